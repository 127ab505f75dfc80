"""The faults: each one is repeated on the cluster while the load continues."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import Callable

from duetime.lifecycle import ATTEMPT_GRACE_MS
from duetime.sharding import shard_of
from tests.chaos.answers import Cutting
from tests.chaos.clients import Clients
from tests.chaos.cluster import LEASE_SECONDS, SHARDS, Member
from tests.chaos.lateness import Lateness, Whose
from tests.chaos.launcher import set_offset
from tests.chaos.ledger import Fault, Promise, Said
from tests.chaos.load import CALLBACK_TIMEOUT_SECONDS, Plan
from tests.chaos.world import Scenario, World

SECOND_NS = 1_000_000_000
TAKEOVER_SECONDS = LEASE_SECONDS + 1
ATTEMPT_SECONDS = CALLBACK_TIMEOUT_SECONDS + ATTEMPT_GRACE_MS / 1000
ON_TIME_SECONDS = 1.0
DRAIN_SECONDS = 25.0
RESUME_SECONDS = 5.0
UNSETTLED_NS = 3 * SECOND_NS
"""How long after the database returns owners may still be replaced, because all leases had run out."""
FENCED = "duetime_fenced_writes_total"
FENCED_SECONDS = 3.0
CUT_SECONDS_MAX = 2.0
CUT_SHARE = 0.04
"""The share of begins and records to cut: low enough that hardly any timer is affected three times, and then failed."""
RACES_AT_ONCE = 250
RACE_SECONDS = (-0.015, 0.015)
JUMPS_MS = (3_600_000, -3_600_000, 5_000, -5_000)
UNRECORDED_SECONDS = 0.1
"""How long a statement of a killed process may still take until it is committed."""


async def _stricken(world: World, member: Member, kind: str, from_ns: int) -> Fault:
    """The attempts in flight on the instance that a fault has just hit."""
    await asyncio.sleep(UNRECORDED_SECONDS)
    # The others keep handing shards to an instance until they notice that it is dead.
    coming = await world.cluster.assigned_to(member)
    shards = await world.cluster.shards_of(member)
    in_flight = await world.cluster.in_flight(member)
    return Fault(kind, from_ns, time.time_ns(), in_flight, shards, coming - shards)


async def _taken_over(world: World, member: Member) -> None:
    async def nothing_left() -> bool:
        return not await world.cluster.shards_of(member)

    seconds = 2 * TAKEOVER_SECONDS + world.options.noise_seconds
    await world.cluster.wait(f"the shards of {member.role} are taken over", nothing_left, seconds)


def _measure_takeover(world: World, lateness: Lateness) -> None:
    faults = world.ledger.faults
    for place, fault in enumerate(faults):
        until_ns = fault.from_ns + int((TAKEOVER_SECONDS + 1) * SECOND_NS)
        if place + 1 < len(faults):
            # Timers due shortly before the next fault or later may be late because of that fault.
            until_ns = min(until_ns, faults[place + 1].from_ns - SECOND_NS // 2)
        from_ns = fault.from_ns - SECOND_NS // 10
        for figure, whose, bound in (
            ("takeover", Whose.HIT, TAKEOVER_SECONDS),
            ("coming", Whose.COMING, TAKEOVER_SECONDS),
            ("in flight", Whose.IN_FLIGHT, TAKEOVER_SECONDS + ATTEMPT_SECONDS),
            ("others late", Whose.OTHERS, ON_TIME_SECONDS),
        ):
            late = lateness.of(fault, from_ns=from_ns, until_ns=until_ns, whose=whose)
            world.hold(figure, late.seconds, bound, f"over {late}")


# kill -9


async def _kill(world: World) -> None:
    for repetition in range(world.options.times):
        member = world.draw.choice(world.cluster.members)
        again_at_once = world.draw.random() < 0.5
        await asyncio.sleep(world.draw.uniform(0.1, 1.5))
        from_ns = time.time_ns()
        member.kill()
        world.add_fault(await _stricken(world, member, "kill", from_ns))
        if again_at_once:
            member.spawn()
        await _taken_over(world, member)
        if not again_at_once:
            member.spawn()
        await world.cluster.wait_ready(member)
        world.said(repetition)


KILL = Scenario(
    name="kill",
    promise="kill -9 one instance: nothing lost, its shards taken over within the lease + 1 s, the others on time",
    times=100,
    times_brief=2,
    strike=_kill,
    measure=_measure_takeover,
)


# A namespace is paused, and an instance dies meanwhile.


async def _set_paused(world: World, member: Member, paused: bool) -> None:
    clients = Clients()
    answer = await clients.ask(member.port, "PATCH", "/api/v1/namespaces/default", {"paused": paused})
    clients.close()
    assert answer is not None and answer.status == 200, answer


async def _pause(world: World) -> None:
    for repetition in range(world.options.times):
        member, other, *_ = world.draw.sample(world.cluster.members, len(world.cluster.members))
        await asyncio.sleep(world.draw.uniform(0.1, 1.0))
        await _set_paused(world, other, True)
        # Attempts begun before have arrived or failed by then.
        quiet_ns = time.time_ns() + int((CALLBACK_TIMEOUT_SECONDS + world.options.noise_seconds) * SECOND_NS)
        await asyncio.sleep(world.draw.uniform(0.5, 2.0))
        from_ns = time.time_ns()
        member.kill()
        world.add_fault(await _stricken(world, member, "pause", from_ns))
        await _taken_over(world, member)
        await asyncio.sleep(max(0.0, quiet_ns - time.time_ns()) / SECOND_NS + 1.0)
        until_ns = time.time_ns()
        fired = [callback for callback in world.receiver.callbacks() if quiet_ns < callback.received_ns < until_ns]
        if fired:
            world.wrong.append(f"{len(fired)} callbacks of a paused namespace, the first: {fired[0]}")
        due = await world.cluster.database.due(time.time_ns() // 1_000_000)
        world.add("held back", due)
        await _set_paused(world, other, False)
        await world.cluster.restart(member)
        world.said(repetition)
    if not world.figures["held back"]:
        world.wrong.append("nothing was held back, so nothing was shown")


PAUSE = Scenario(
    name="pause",
    promise="a namespace is paused and one instance killed: nothing fires until it goes on, and then nothing is lost",
    times=20,
    times_brief=2,
    strike=_pause,
)


# SIGTERM


async def _roll(world: World) -> None:
    for repetition in range(world.options.times):
        member = world.cluster.members[repetition % len(world.cluster.members)]
        await asyncio.sleep(world.draw.uniform(0.1, 1.0))
        shards = await world.cluster.shards_of(member)
        from_ns = time.time_ns()
        code = await asyncio.to_thread(member.terminate)
        # A graceful stop may fire nothing twice, so nothing counts as in flight.
        world.add_fault(Fault("roll", from_ns, time.time_ns(), shards=shards))
        world.hold("stop", (time.time_ns() - from_ns) / 1e9, DRAIN_SECONDS)
        if code != 0:
            world.wrong.append(f"{member.role} stopped with exit code {code}: {member.stderr[-2000:]}")
        await world.cluster.restart(member)
        world.said(repetition)


def _measure_roll(world: World, lateness: Lateness) -> None:
    for fault in world.ledger.faults:
        late = lateness.of(fault, from_ns=fault.from_ns, until_ns=fault.until_ns, whose=Whose.HIT)
        world.hold("late", late.seconds, TAKEOVER_SECONDS, f"over {late}")


ROLL = Scenario(
    name="roll",
    promise="SIGTERM one instance after the other: nothing lost, nothing twice, exit code 0 within 25 s",
    times=50,
    times_brief=3,
    strike=_roll,
    measure=_measure_roll,
)


# The database becomes unavailable.


def _measure_return(world: World, lateness: Lateness) -> None:
    for fault in world.ledger.faults:
        back_ns = fault.until_ns - UNSETTLED_NS
        late = lateness.of(
            fault, from_ns=fault.from_ns, until_ns=back_ns + 2 * SECOND_NS, whose=Whose.HIT, since_ns=back_ns
        )
        world.hold("firing again", late.seconds, RESUME_SECONDS, f"over {late}")
        if not late.timers:
            world.wrong.append("nothing fell due while the database was away, so nothing was shown")


async def _restart(world: World) -> None:
    database = world.cluster.database
    for repetition in range(world.options.times):
        await asyncio.sleep(world.draw.uniform(0.5, 2.0))
        from_ns = time.time_ns()
        await asyncio.to_thread(database.crash)
        await asyncio.sleep(world.draw.choice((0.0, 0.3, 1.5)))
        await asyncio.to_thread(database.server.start)
        world.add_fault(Fault("restart", from_ns, time.time_ns() + UNSETTLED_NS, in_flight=None))
        await asyncio.sleep(UNSETTLED_NS / SECOND_NS)
        world.check_alive()
        world.said(repetition)


RESTART = Scenario(
    name="restart",
    promise="the database restarts as after a crash: nothing lost, firing again within 5 s of its return",
    times=20,
    times_brief=2,
    strike=_restart,
    measure=_measure_return,
)


async def _hang(world: World) -> None:
    server, proxy = world.cluster.database.server, world.cluster.proxy
    assert proxy is not None
    for repetition in range(world.options.times):
        refused = world.ledger.answers["create 503"]
        from_ns = time.time_ns()
        server.pause()
        proxy.refuse()
        await asyncio.sleep(world.options.hang_seconds)
        proxy.allow()
        server.resume()
        world.add_fault(Fault("hang", from_ns, time.time_ns() + UNSETTLED_NS, in_flight=None))
        if world.ledger.answers["create 503"] == refused:
            world.wrong.append("no create was answered with 503 while the database was away")
        await asyncio.sleep(UNSETTLED_NS / SECOND_NS)
        world.check_alive()
        world.said(repetition)


HANG = Scenario(
    name="hang",
    promise="the database hangs and refuses connections: 503 with Retry-After, nothing lost, firing again within 5 s",
    times=2,
    times_brief=1,
    strike=_hang,
    measure=_measure_return,
    proxied=True,
)


# SIGSTOP


async def _stop(world: World) -> None:
    for repetition in range(world.options.times):
        member = world.draw.choice(world.cluster.members)
        await asyncio.sleep(world.draw.uniform(0.1, 1.5))
        before = await asyncio.to_thread(member.metric, FENCED)
        from_ns = time.time_ns()
        member.signal(signal.SIGSTOP)
        fault = await _stricken(world, member, "stop", from_ns)
        world.add_fault(fault)
        await asyncio.sleep(2 * LEASE_SECONDS - (time.time_ns() - from_ns) / 1e9)
        member.signal(signal.SIGCONT)
        # What it had in flight it tries to record now, under a version that is not the shard's any more. A statement
        # that it was waiting for at the time it gives up instead, so not every attempt in flight ends in a refusal.
        deadline = time.monotonic() + FENCED_SECONDS
        fenced = 0.0
        while time.monotonic() < deadline and fenced < max(1, len(fault.in_flight or ())):
            await asyncio.sleep(0.1)
            fenced = await asyncio.to_thread(member.metric, FENCED) - before
        world.add("fenced writes", fenced)
        world.add("attempts in flight", len(fault.in_flight or ()))
        world.said(repetition)
    if world.figures["attempts in flight"] and not world.figures["fenced writes"]:
        world.wrong.append(f"{world.figures['attempts in flight']:g} were in flight, and no write was refused")


STOP = Scenario(
    name="stop",
    promise="SIGSTOP an owner for twice its lease: nothing lost, its late writes all refused and counted",
    times=50,
    times_brief=1,
    strike=_stop,
    measure=_measure_takeover,
)


# Responses of the database get lost.


async def _cut(world: World, is_wanted: Callable[[bytes], bool], share: float, on_cut: Callable[[], None]) -> None:
    proxy = world.cluster.proxy
    assert proxy is not None
    cutting = Cutting(is_wanted, share=share, times=world.options.times, draw=world.draw, on_cut=on_cut)
    proxy.on_answer = cutting
    began = time.monotonic()
    while not cutting.done.is_set() and time.monotonic() - began < 30 + world.options.times * CUT_SECONDS_MAX:
        await asyncio.sleep(0.5)
        world.options.say(f"{cutting.cuts}/{world.options.times} cuts of {cutting.seen} answers")
    proxy.on_answer = None
    world.note("cuts", cutting.cuts)
    if cutting.cuts < world.options.times:
        world.wrong.append(f"only {cutting.cuts} answers were cut off: is their shape still what it was?")


async def _cut_puts(world: World) -> None:
    # A lost response to a put affects no attempt, so nothing may come twice: record no fault.
    await _cut(world, world.cluster.database.answers.is_put, 0.25, lambda: None)


CUT = Scenario(
    name="cut",
    promise="the connection breaks between the commit of a create and its answer: nothing lost, one timer per id",
    times=1_000,
    times_brief=30,
    strike=_cut_puts,
    proxied=True,
)


async def _cut_fenced(world: World) -> None:
    def on_cut() -> None:
        # All shards of that instance get a new version, but its attempts in flight are recorded under the old one.
        world.add_fault(Fault("cut", time.time_ns(), time.time_ns() + SECOND_NS // 2, in_flight=None))

    answers = world.cluster.database.answers
    await _cut(world, lambda piece: answers.is_begin(piece) or answers.is_record(piece), CUT_SHARE, on_cut)


CUT_FENCED = Scenario(
    name="cut-fenced",
    promise="the same for begins and records: nothing lost, nothing left behind",
    times=100,
    times_brief=6,
    strike=_cut_fenced,
    proxied=True,
)


# Races of cancels and firings.


async def _race(world: World) -> None:
    members = world.cluster.members
    sooner = asyncio.Semaphore(RACES_AT_ONCE)

    async def race(place: int) -> None:
        id = str(uuid.UUID(int=world.draw.getrandbits(128), version=4))
        offset_seconds = world.draw.uniform(*RACE_SECONDS)
        async with sooner:
            at_ms = int((time.time() + 1.0 + (place % 100) / 200) * 1000)
            plan = Plan(id, 0.0, None, True, False, (0.0, 0.0))
            shard = shard_of("default", id, namespace_shards=SHARDS, shards=SHARDS)
            promise = Promise(id, shard, await world.load.create(plan, at_ms))
            world.ledger.add([promise])
            if not promise.acknowledged:
                return  # too slow: it was due before it was written
            await asyncio.sleep(at_ms / 1000 + offset_seconds - time.time())
            ports = [members[(place + n) % len(members)].port for n in range(2)]
            promise.cancels += await asyncio.gather(*(world.load.cancel(id, port) for port in ports))

    for start in range(0, world.options.times, RACES_AT_ONCE):
        count = min(RACES_AT_ONCE, world.options.times - start)
        await asyncio.gather(*(race(start + n) for n in range(count)))
        world.options.say(f"{start + count}/{world.options.times} races")
    won = sum(any(c.said is Said.YES for c in promise.cancels) for promise in world.ledger.promises.values())
    world.note("won", won)
    if world.options.times >= 100 and not 0.02 < won / world.options.times < 0.98:
        world.wrong.append(f"{won} of {world.options.times} cancels won: these were no races")


RACE = Scenario(
    name="race",
    promise="cancels from two instances at the due instant: an acknowledged one never fires, a refused one once",
    times=5_000,
    times_brief=300,
    strike=_race,
    loaded=False,
)


# Clocks jump.


async def _jump(world: World) -> None:
    for repetition in range(world.options.times):
        offset_ms = JUMPS_MS[repetition % len(JUMPS_MS)]
        member = world.draw.choice(world.cluster.members)
        assert member.clock is not None
        await asyncio.sleep(world.draw.uniform(0.1, 1.0))
        shards = await world.cluster.shards_of(member)
        from_ns = time.time_ns()
        set_offset(member.clock, offset_ms)
        try:
            await _taken_over(world, member)
        except AssertionError:
            set_offset(member.clock, 0)
            raise
        world.hold("gave up", (time.time_ns() - from_ns) / 1e9, TAKEOVER_SECONDS, f"with a clock {offset_ms} ms off")
        await asyncio.sleep(1.0)
        set_offset(member.clock, 0)

        async def has_some(member: Member = member) -> bool:
            return bool(await world.cluster.shards_of(member))

        await world.cluster.wait(f"{member.role} has shards again", has_some)
        shards |= await world.cluster.shards_of(member)
        await asyncio.sleep(2.0)
        world.add_fault(Fault("jump", from_ns, time.time_ns(), shards=shards))
        world.said(repetition)


def _measure_jump(world: World, lateness: Lateness) -> None:
    for fault in world.ledger.faults:
        late = lateness.of(fault, from_ns=fault.from_ns, until_ns=fault.until_ns, whose=Whose.HIT)
        world.hold("late", late.seconds, TAKEOVER_SECONDS, f"over {late}")


JUMP = Scenario(
    name="jump",
    promise="the clock of one instance jumps by 1 h or 5 s, either way: nothing early, it gives its shards up",
    times=20,
    times_brief=4,
    strike=_jump,
    measure=_measure_jump,
    movable_clocks=True,
)


SCENARIOS = {
    scenario.name: scenario for scenario in (KILL, PAUSE, ROLL, RESTART, HANG, STOP, RACE, CUT, CUT_FENCED, JUMP)
}
