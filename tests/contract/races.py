"""Races between owners and clients of one database: seeded random schedules, and forced interleavings.

``DUETIME_SEED=123`` replays a failed schedule. The seed determines which calls are made and roughly when; the server
determines the rest, so a replay may need several runs.

An ``Audit`` records what happened in the database. A reign is an owner of a shard with one version. A transaction that
ends a reign records which writes under it are committed. All others may commit after its end.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Protocol

import pytest

from duetime import lifecycle
from duetime.errors import Contended
from duetime.instants import Instant
from duetime.model import HOUR_MS, Definition, HttpTarget, Status, Timer
from duetime.store import Begun, Portion, Store
from tests.clocks import START, ManualClock
from tests.contract.stores import STORES
from tests.contract.timers import ALICE, BOB, BROKEN, CAROL, DELIVERED, LEASE_MS, another, switch, timer, with_timers

WAIT_SECONDS_MAX = 30.0

Change = tuple[bytes, bytes, int]
"""An owner, a timer's uuid, and the revision that its write found."""


class Violated(AssertionError):
    """A guarantee was violated."""


class Lock(enum.Enum):
    """Rows to lock, of one shard or of all, so that other transactions wait."""

    SHARD = enum.auto()
    SHARD_SHARED = enum.auto()
    TIMERS = enum.auto()
    TIMER = enum.auto()  # different times, because a begin orders by them
    TALLIES = enum.auto()


class Audit(Protocol):
    """A further connection to the database of an open store, which can also hold locks to block other transactions."""

    def url(self, owner_id: bytes) -> str:
        """The URL for this owner, by which its writes are recognized."""

    async def reset(self) -> None:
        """Empty the database for the next race."""

    async def violations(self) -> list[str]: ...

    async def changes(self, kind: str) -> set[Change]:
        """The recorded actions of owners: ``begins`` or ``ends``."""

    async def give(self, shard: int, owner_id: bytes) -> None:
        """Change the owner of a shard without a new version, as after a failover that lost a claim."""

    def locked(self, lock: Lock, shard: int) -> AbstractAsyncContextManager[None]:
        """Lock these rows until the end of the block."""

    async def waiting(self, number: int, unless: asyncio.Future[Any] | None = None) -> None:
        """Return once this many statements wait for a lock, or once one is done, which a bug may cause."""

    async def close(self) -> None: ...


async def check(audit: Audit, begun: Collection[Change] = (), recorded: Collection[Change] = ()) -> None:
    """Raise ``Violated`` if a guarantee was violated or if the owners got results that differ from what happened."""
    wrong = await audit.violations()
    for kind, told in (("begins", begun), ("ends", recorded)):
        happened = await audit.changes(kind)
        if len(told) != len(set(told)) or set(told) != happened:
            wrong.append(f"{kind}: owners got {sorted(told)}, but the database recorded {sorted(happened)}")
    if wrong:
        raise Violated("; ".join(wrong))


OWNERS = (ALICE, BOB, CAROL)
SHARDS = range(3)
IDS = [f"t{n}" for n in range(6)]
LANE = timer().lane
LOCKS = (Lock.SHARD, Lock.SHARD_SHARED, Lock.TIMER, Lock.TALLIES)


class Actors:
    """Three owners and the clients, each with its own store, and the audit of their common database."""

    def __init__(self, audit: Audit, owners: dict[bytes, Store], clients: Store, clock: ManualClock):
        self.audit = audit
        self.owners = owners
        self.clients = clients
        self.clock = clock
        self.begun: list[Change] = []
        self.recorded: list[Change] = []

    async def begin(self, owner_id: bytes, held: dict[int, int], limit: int = 100) -> list[Timer]:
        return self._heard(owner_id, await self.owners[owner_id].begin(owner_id, held, limit))

    async def begin_lanes(self, owner_id: bytes, held: dict[int, int], limit: int = 100) -> list[Timer]:
        """The same by lane: all timers of a race are in one lane."""
        portions = [Portion(LANE, limit)]
        return self._heard(owner_id, await self.owners[owner_id].begin_lanes(owner_id, held, limit, portions))

    def _heard(self, owner_id: bytes, answer: Begun) -> list[Timer]:
        timers = answer.timers
        self.begun.extend((owner_id, t.uuid, t.revision - 1) for t in timers)
        return timers

    async def record(self, owner_id: bytes, changes: list[tuple[Timer, Timer]]) -> Sequence[bool | None]:
        written = await self.owners[owner_id].record(owner_id, changes)
        self.recorded.extend(
            (owner_id, t.uuid, t.revision) for (t, _), done in zip(changes, written, strict=True) if done
        )
        return written

    async def check(self) -> None:
        await check(self.audit, self.begun, self.recorded)

    async def reset(self) -> None:
        await self.audit.reset()
        self.begun.clear()
        self.recorded.clear()

    def locked(self, lock: Lock, shard: int = 0) -> AbstractAsyncContextManager[None]:
        return self.audit.locked(lock, shard)


def gathered(
    name: str, audit_of: Callable[[str], Awaitable[Audit]], request: pytest.FixtureRequest, clock: ManualClock
) -> Iterator[Actors]:
    """Create the actors on a new database of a server; the body of a fixture."""
    server, runner = request.getfixturevalue(name), request.getfixturevalue("runner")
    database = server.fresh()
    stores: list[Store] = []
    audits: list[Audit] = []

    async def opened(url: str) -> Any:
        stores.append(store := await STORES[name].opened(url, clock))
        return store

    async def actors() -> Actors:
        clients = await opened(database)
        audits.append(audit := await audit_of(database))
        return Actors(audit, {owner_id: await opened(audit.url(owner_id)) for owner_id in OWNERS}, clients, clock)

    async def close() -> None:
        for store in stores:
            await store.close()
        for audit in audits:
            await audit.close()

    try:
        yield runner.run(actors())
    finally:
        runner.run(close())
        server.give_back(database)


# Seeded random schedules.


def settled(rng: random.Random, timer: Timer, now: Instant) -> Timer:
    """A random outcome that an owner might record."""
    match rng.randrange(4):
        case 0:
            return lifecycle.settle(timer, BROKEN, sent_at=now, now=now, uniform=rng.uniform)
        case 1:
            return lifecycle.defer(timer, fire_at=now, now=now)
    return lifecycle.settle(timer, DELIVERED, sent_at=now, now=now, uniform=rng.uniform)


async def own(actors: Actors, owner_id: bytes, rng: random.Random) -> None:
    """An owner that claims all it can and never notices that it lost a shard, like a suspended process."""
    store = actors.owners[owner_id]
    begun: list[Timer] = []
    held = await store.claim(owner_id, SHARDS, 1)
    for _ in range(rng.randrange(3, 7)):
        actors.clock.advance(rng.choice((0, 1, 1, 40_000)))  # A lease is 1 ms, an attempt's deadline 35 s.
        await asyncio.sleep(rng.choice((0, 0, 0.001, 0.002)))
        match rng.choice(("claim", "begin", "begin", "record", "record", "record", "renew", "release")):
            case "claim":
                held |= await store.claim(owner_id, rng.sample(SHARDS, rng.randrange(1, 4)), 1)
            case "record" if begun:
                some = [begun.pop(rng.randrange(len(begun))) for _ in range(rng.randrange(1, len(begun) + 1))]
                await actors.record(owner_id, [(t, settled(rng, t, actors.clock.now())) for t in some])
            case "renew":
                await store.renew(owner_id, 1)
            case "release":
                await store.release(owner_id, rng.sample(SHARDS, 1))
            case _:
                begin = rng.choice((actors.begin, actors.begin_lanes))
                begun += await begin(owner_id, held, rng.choice((1, 100)))


async def use(actors: Actors, rng: random.Random) -> None:
    """A client that creates, moves, cancels, replays and deletes the same few timers as all others."""
    for _ in range(rng.randrange(2, 5)):
        await asyncio.sleep(rng.choice((0, 0, 0.001, 0.002)))
        id = rng.choice(IDS)
        now = actors.clock.now()
        there = await actors.clients.get("default", id)
        if there is None or rng.random() < 0.4:
            with suppress(Contended):
                await actors.clients.put(timer(id, shard=IDS.index(id) % len(SHARDS), at=START))
        elif there.status.final:
            await actors.clients.swap(there, rng.choice((lifecycle.replay(there, now=now), None)))
        elif there.status is Status.PENDING:
            after = lifecycle.cancel(there, now=now), lifecycle.amend(there, now=now), None
            await actors.clients.swap(there, rng.choice(after))


async def pause(actors: Actors, rng: random.Random) -> None:
    """A client that repeatedly pauses and resumes the namespace, and finally resumes it."""
    for paused in [rng.random() < 0.7 for _ in range(rng.randrange(3))] + [False]:
        [before] = await actors.clients.namespaces()
        await switch(actors.clients, before, paused=paused)
        await asyncio.sleep(rng.choice((0, 0.002, 0.005)))


async def obstruct(actors: Actors, rng: random.Random) -> None:
    """Let statements queue for a row lock and release them all at once."""
    for _ in range(rng.randrange(3)):
        await asyncio.sleep(rng.choice((0, 0.001)))
        async with actors.locked(rng.choice(LOCKS), rng.choice(SHARDS)):
            await asyncio.sleep(rng.choice((0.001, 0.003, 0.005)))


async def play(actors: Actors, seed: int) -> None:
    """Run one random schedule."""
    rng = random.Random(seed)
    await actors.reset()
    some = [timer(id, shard=n % len(SHARDS)) for n, id in enumerate(IDS) if rng.random() < 0.7]
    await with_timers(actors.clients, *some)
    parts = [own(actors, owner_id, random.Random(rng.random())) for owner_id in OWNERS]
    parts += [use(actors, random.Random(rng.random())) for _ in range(2)]
    parts += [obstruct(actors, random.Random(rng.random())), pause(actors, random.Random(rng.random()))]
    try:
        async with asyncio.timeout(30):
            await asyncio.gather(*parts)
        await actors.check()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}") from error


# Forced interleavings: each passes with the store's own statements and fails with a planted bug.


Begin = Callable[[Actors, bytes, dict[int, int]], Awaitable[list[Timer]]]
"""A function that begins all due timers."""


async def claimed_while_a_begin_is_under_way(actors: Actors, begin: Begin = Actors.begin) -> None:
    """Alice's begin has passed the fence and waits for a timer's row when her lease expires and Bob claims."""
    await with_timers(actors.clients, timer())
    held = await actors.owners[ALICE].claim(ALICE, [0], 1)
    async with actors.locked(Lock.TIMERS):
        begun = asyncio.ensure_future(begin(actors, ALICE, held))
        await actors.audit.waiting(1)
        actors.clock.advance(1)
        claim = asyncio.ensure_future(actors.owners[BOB].claim(BOB, [0], LEASE_MS))
        await actors.audit.waiting(2, unless=claim)
    assert await claim == {0: 2}
    assert len(await begun) == 1


async def claimed_while_a_begin_of_lanes_is_under_way(actors: Actors) -> None:
    await claimed_while_a_begin_is_under_way(actors, Actors.begin_lanes)


async def claimed_while_a_record_is_under_way(actors: Actors) -> None:
    await with_timers(actors.clients, timer())
    [begun] = await actors.begin(ALICE, await actors.owners[ALICE].claim(ALICE, [0], 1))
    async with actors.locked(Lock.TIMERS):
        change = begun, lifecycle.settle(begun, DELIVERED, sent_at=START, now=START, uniform=random.uniform)
        record = asyncio.ensure_future(actors.record(ALICE, [change]))
        await actors.audit.waiting(1)
        actors.clock.advance(1)
        claim = asyncio.ensure_future(actors.owners[BOB].claim(BOB, [0], LEASE_MS))
        await actors.audit.waiting(2, unless=claim)
    assert await claim == {0: 2}
    assert await record == [True]


async def begun_while_a_claim_is_under_way(actors: Actors, begin: Begin = Actors.begin, claimer: bytes = BOB) -> None:
    """Alice's begin starts before a claim is committed and has to wait for it."""
    await with_timers(actors.clients, timer())
    held = await actors.owners[ALICE].claim(ALICE, [0], 1)
    actors.clock.advance(1)
    async with actors.locked(Lock.SHARD):
        claim = asyncio.ensure_future(actors.owners[claimer].claim(claimer, [0], LEASE_MS))
        await actors.audit.waiting(1)
        begun = asyncio.ensure_future(begin(actors, ALICE, held))
        await actors.audit.waiting(2, unless=begun)
    assert await claim == {0: 2}
    some = await begun
    await actors.check()
    assert some == []


async def begun_by_lane_while_a_claim_is_under_way(actors: Actors) -> None:
    await begun_while_a_claim_is_under_way(actors, Actors.begin_lanes)


async def begun_while_ones_own_claim_is_under_way(actors: Actors) -> None:
    """After the claim, an attempt begun with the old version would count as lost."""
    await begun_while_a_claim_is_under_way(actors, claimer=ALICE)


async def begun_by_lane_while_ones_own_claim_is_under_way(actors: Actors) -> None:
    await begun_while_a_claim_is_under_way(actors, Actors.begin_lanes, ALICE)


async def changed_while_a_begin_of_lanes_is_under_way(actors: Actors) -> None:
    """Alice's begin has found a timer when a client moves it to another lane and to an hour later."""
    await with_timers(actors.clients, before := timer())
    held = await actors.owners[ALICE].claim(ALICE, [0], LEASE_MS)
    async with actors.locked(Lock.SHARD):
        begun = asyncio.ensure_future(actors.begin_lanes(ALICE, held))
        await actors.audit.waiting(1)
        elsewhere = Definition(target=HttpTarget(url="http://elsewhere.example"))
        after = lifecycle.amend(before, now=START, execute_at=START + HOUR_MS, definition=elsewhere)
        assert await actors.clients.swap(before, after)
    assert await begun == []
    assert await actors.clients.get("default", before.id) == after


async def begun_by_age_and_by_lane_at_once(actors: Actors) -> None:
    """Two polls of one owner find the same timer and wait for its row."""
    await with_timers(actors.clients, timer())
    held = await actors.owners[ALICE].claim(ALICE, [0], LEASE_MS)
    async with actors.locked(Lock.TIMERS):
        by_age = asyncio.ensure_future(actors.begin(ALICE, held))
        await actors.audit.waiting(1)
        by_lane = asyncio.ensure_future(actors.begin_lanes(ALICE, held))
        await actors.audit.waiting(2)
    if len(begun := await by_age + await by_lane) != 1:
        raise Violated(f"one attempt was due, but {len(begun)} were begun")


async def left_while_a_renewal_is_under_way(actors: Actors) -> None:
    """Alice is suspended during a renewal, which the server continues."""
    await actors.owners[ALICE].renew(ALICE, LEASE_MS)
    await actors.owners[ALICE].claim(ALICE, SHARDS, LEASE_MS)
    async with actors.locked(Lock.SHARD):
        renew = asyncio.ensure_future(actors.owners[ALICE].renew(ALICE, LEASE_MS))
        await actors.audit.waiting(1)
        leave = asyncio.ensure_future(actors.owners[ALICE].leave(ALICE))
        await actors.audit.waiting(2)
    await renew
    await leave
    assert await actors.clients.cluster() == []


async def failed_over_with_loss(actors: Actors, begin: Begin = Actors.begin) -> None:
    """A replica without Alice's claim was promoted, and Bob claimed the same version."""
    await with_timers(actors.clients, timer("a"), timer("b"))
    held = await actors.owners[ALICE].claim(ALICE, [0], LEASE_MS)
    [begun] = await actors.begin(ALICE, held, 1)
    await actors.audit.give(0, BOB)
    await begin(actors, ALICE, held)
    now = actors.clock.now()
    change = begun, lifecycle.settle(begun, DELIVERED, sent_at=now, now=now, uniform=random.uniform)
    await actors.record(ALICE, [change])


async def failed_over_with_loss_and_begun_by_lane(actors: Actors) -> None:
    await failed_over_with_loss(actors, Actors.begin_lanes)


async def put_while_the_same_timer_becomes_final(actors: Actors) -> None:
    """The put waits while the live timer is moved to history, and must not treat its identity as free then."""
    await with_timers(actors.clients, before := timer())
    [begun] = await actors.begin(ALICE, await actors.owners[ALICE].claim(ALICE, [0], LEASE_MS))
    async with actors.locked(Lock.TALLIES):
        change = begun, lifecycle.settle(begun, DELIVERED, sent_at=START, now=START, uniform=random.uniform)
        record = asyncio.ensure_future(actors.record(ALICE, [change]))
        # A count without a row can't be locked; the second time there is a row.
        await actors.audit.waiting(1, unless=record)
        put = asyncio.ensure_future(actors.clients.put(another(before)))
        await actors.audit.waiting(2, unless=put)
    assert await record == [True]
    await put


async def put_while_the_same_timer_is_replayed(actors: Actors) -> None:
    await with_timers(actors.clients, before := timer())
    await actors.clients.swap(before, final := lifecycle.cancel(before, now=START))
    async with actors.locked(Lock.TALLIES):
        replay = asyncio.ensure_future(actors.clients.swap(final, lifecycle.replay(final, now=START)))
        await actors.audit.waiting(1, unless=replay)
        put = asyncio.ensure_future(actors.clients.put(another(before)))
        await actors.audit.waiting(2, unless=put)
    assert await replay
    taken = await put
    assert taken is not None and taken.fingerprint == before.fingerprint


Interleaving = Callable[[Actors], Awaitable[None]]
INTERLEAVINGS: list[Interleaving] = [
    claimed_while_a_begin_is_under_way,
    claimed_while_a_begin_of_lanes_is_under_way,
    claimed_while_a_record_is_under_way,
    begun_while_a_claim_is_under_way,
    begun_by_lane_while_a_claim_is_under_way,
    begun_while_ones_own_claim_is_under_way,
    begun_by_lane_while_ones_own_claim_is_under_way,
    changed_while_a_begin_of_lanes_is_under_way,
    begun_by_age_and_by_lane_at_once,
    left_while_a_renewal_is_under_way,
    failed_over_with_loss,
    failed_over_with_loss_and_begun_by_lane,
    put_while_the_same_timer_becomes_final,
    put_while_the_same_timer_is_replayed,
]


async def run_interleaving(actors: Actors, interleaving: Interleaving) -> None:
    for _ in range(3):
        await actors.reset()
        await interleaving(actors)
        await actors.check()
