"""Owners and clients of one PostgreSQL database racing one another, and the proof that the audit would see a bad fence.

To replay the schedule that failed: ``DUETIME_SEED=123``. A seed fixes who asks for what and about when; the server
decides the rest, so a replay may need a few runs.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from duetime import lifecycle
from duetime.errors import StoreUnavailable
from duetime.model import HOUR_MS, Definition, HttpTarget, Status, Timer
from duetime.store import Begun, Portion
from duetime.stores import postgres_pool, postgres_statements
from duetime.stores.postgres import PostgresStore
from tests.clocks import START, ManualClock
from tests.contract.postgres_audit import Audit, Change, Violated
from tests.contract.timers import ALICE, BOB, BROKEN, CAROL, DELIVERED, LEASE_MS, another, switch, timer, with_timers

Opened = Callable[[str], Awaitable[PostgresStore]]

OWNERS = (ALICE, BOB, CAROL)
SEEDS = [int(os.environ["DUETIME_SEED"])] if "DUETIME_SEED" in os.environ else range(1_000)
SHARDS = range(3)
IDS = [f"t{n}" for n in range(6)]
LANE = timer().lane
LOCKS = (
    "SELECT FROM shards WHERE shard = $1 FOR UPDATE",
    "SELECT FROM shards WHERE shard = $1 FOR SHARE",
    "SELECT FROM timers WHERE shard = $1 ORDER BY uuid LIMIT 1 FOR UPDATE",  # not two: a begin goes by their time
    "SELECT FROM tallies WHERE $1::int IS NOT NULL ORDER BY namespace, status, slice, spread FOR UPDATE",
)


class Cast:
    """Three owners and the clients, each with a store of its own, and the audit of the database that they share."""

    def __init__(self, audit: Audit, owners: dict[bytes, PostgresStore], clients: PostgresStore, clock: ManualClock):
        self.audit = audit
        self.owners = owners
        self.clients = clients
        self.clock = clock
        self.begun: list[Change] = []
        self.recorded: list[Change] = []

    async def begin(self, owner_id: bytes, held: dict[int, int], limit: int = 100) -> list[Timer]:
        return self._heard(owner_id, await self.owners[owner_id].begin(owner_id, held, limit))

    async def begin_lanes(self, owner_id: bytes, held: dict[int, int], limit: int = 100) -> list[Timer]:
        """The same by lane: all timers of a race are in one."""
        portions = [Portion(LANE, limit)]
        return self._heard(owner_id, await self.owners[owner_id].begin_lanes(owner_id, held, limit, portions))

    def _heard(self, owner_id: bytes, answer: Begun) -> list[Timer]:
        timers = answer.timers
        self.begun.extend((owner_id, t.uuid, t.revision - 1) for t in timers)
        return timers

    async def record(self, owner_id: bytes, changes: list[tuple[Timer, Timer]]) -> list[bool]:
        written = await self.owners[owner_id].record(owner_id, changes)
        self.recorded.extend(
            (owner_id, t.uuid, t.revision) for (t, _), done in zip(changes, written, strict=True) if done
        )
        return written

    async def check(self) -> None:
        await self.audit.check(self.begun, self.recorded)

    async def reset(self) -> None:
        await self.audit.reset()
        self.begun.clear()
        self.recorded.clear()

    @asynccontextmanager
    async def locked(self, lock: str, shard: int = 0) -> AsyncIterator[None]:
        """Whoever wants these rows waits until the end of the block."""
        async with self.audit.connection.transaction():
            await self.audit.connection.fetch(lock, shard)
            yield


@pytest.fixture
def cast(
    runner: asyncio.Runner, database: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, opened: Opened
) -> Iterator[Cast]:
    # What is raced for is rows, not the disk.
    monkeypatch.setitem(postgres_pool._SESSION, "synchronous_commit", "off")

    async def gathered() -> Cast:
        clients = await opened(database)
        audit = await Audit.of(database)
        try:
            return Cast(audit, {o: await opened(audit.url(database, o)) for o in OWNERS}, clients, clock)
        except BaseException:
            await audit.close()
            raise

    cast = runner.run(gathered())
    yield cast
    runner.run(cast.audit.close())


# Seeded schedules.


def settled(rng: random.Random, timer: Timer, now: int) -> Timer:
    """What an owner might record of an attempt."""
    match rng.randrange(4):
        case 0:
            return lifecycle.settle(timer, BROKEN, sent_at=now, now=now, uniform=rng.uniform)
        case 1:
            return lifecycle.defer(timer, fire_at=now, now=now)
    return lifecycle.settle(timer, DELIVERED, sent_at=now, now=now, uniform=rng.uniform)


async def own(cast: Cast, owner_id: bytes, rng: random.Random) -> None:
    """An owner that claims what it can and believes for ever in what it once held, as one that was stopped does."""
    store, begun = cast.owners[owner_id], []
    held = await store.claim(owner_id, SHARDS, 1)
    for _ in range(rng.randrange(3, 7)):
        cast.clock.advance(rng.choice((0, 1, 1, 40_000)))  # A lease is 1 ms, an attempt's deadline 35 s.
        await asyncio.sleep(rng.choice((0, 0, 0.001, 0.002)))
        match rng.choice(("claim", "begin", "begin", "record", "record", "record", "renew", "release")):
            case "claim":
                held |= await store.claim(owner_id, rng.sample(SHARDS, rng.randrange(1, 4)), 1)
            case "record" if begun:
                some = [begun.pop(rng.randrange(len(begun))) for _ in range(rng.randrange(1, len(begun) + 1))]
                await cast.record(owner_id, [(t, settled(rng, t, cast.clock.now())) for t in some])
            case "renew":
                await store.renew(owner_id, 1)
            case "release":
                await store.release(owner_id, rng.sample(SHARDS, 1))
            case _:
                begin = rng.choice((cast.begin, cast.begin_lanes))
                begun += await begin(owner_id, held, rng.choice((1, 100)))


async def use(cast: Cast, rng: random.Random) -> None:
    """A client that makes, moves, cancels, replays and removes the same few timers as everybody else."""
    for _ in range(rng.randrange(2, 5)):
        await asyncio.sleep(rng.choice((0, 0, 0.001, 0.002)))
        id = rng.choice(IDS)
        now = cast.clock.now()
        there = await cast.clients.get("default", id)
        if there is None or rng.random() < 0.4:
            try:
                await cast.clients.put(timer(id, shard=IDS.index(id) % len(SHARDS), at=START))
            except StoreUnavailable as error:
                assert "keeps changing" in str(error)
        elif there.status.final:
            await cast.clients.swap(there, rng.choice((lifecycle.replay(there, now=now), None)))
        elif there.status is Status.PENDING:
            after = lifecycle.cancel(there, now=now), lifecycle.amend(there, now=now), None
            await cast.clients.swap(there, rng.choice(after))


async def pause(cast: Cast, rng: random.Random) -> None:
    """Somebody who can't decide whether the namespace is paused, and in the end decides that it is not."""
    for paused in [rng.random() < 0.7 for _ in range(rng.randrange(3))] + [False]:
        [before] = await cast.clients.namespaces()
        await switch(cast.clients, before, paused=paused)
        await asyncio.sleep(rng.choice((0, 0.002, 0.005)))


async def obstruct(cast: Cast, rng: random.Random) -> None:
    """Have statements pile up on a row and let them all go at once."""
    for _ in range(rng.randrange(3)):
        await asyncio.sleep(rng.choice((0, 0.001)))
        async with cast.locked(rng.choice(LOCKS), rng.choice(SHARDS)):
            await asyncio.sleep(rng.choice((0.001, 0.003, 0.005)))


async def play(cast: Cast, seed: int) -> None:
    """One schedule."""
    rng = random.Random(seed)
    await cast.reset()
    some = [timer(id, shard=n % len(SHARDS)) for n, id in enumerate(IDS) if rng.random() < 0.7]
    await with_timers(cast.clients, *some)
    parts = [own(cast, owner_id, random.Random(rng.random())) for owner_id in OWNERS]
    parts += [use(cast, random.Random(rng.random())) for _ in range(2)]
    parts += [obstruct(cast, random.Random(rng.random())), pause(cast, random.Random(rng.random()))]
    try:
        async with asyncio.timeout(30):
            await asyncio.gather(*parts)
        await cast.check()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}") from error


async def test_whatever_the_schedule_nothing_is_done_twice_or_by_the_wrong_owner(cast: Cast) -> None:
    begun = recorded = 0
    for seed in SEEDS:
        await play(cast, seed)
        begun, recorded = begun + len(cast.begun), recorded + len(cast.recorded)
    # The schedules would prove little if they made nothing happen.
    assert len(SEEDS) == 1 or min(begun, recorded) > len(SEEDS) // 2


async def test_instances_that_all_come_back_too_late_do_not_wait_for_each_other(cast: Cast) -> None:
    """Each finds the others dead and removes them, while they say that they live."""
    for _ in range(300):
        await asyncio.gather(*(cast.owners[owner_id].renew(owner_id, 1) for owner_id in OWNERS))
        cast.clock.advance(1)


# Forced interleavings: each is right with the store's own statements, and seen to be wrong with a seeded bug.


Begin = Callable[[Cast, bytes, dict[int, int]], Awaitable[list[Timer]]]
"""A way to begin all that is due."""


async def claimed_while_a_begin_is_under_way(cast: Cast, begin: Begin = Cast.begin) -> None:
    """Alice's begin has passed the fence and waits for a timer's row when her lease runs out and Bob claims."""
    await with_timers(cast.clients, timer())
    held = await cast.owners[ALICE].claim(ALICE, [0], 1)
    async with cast.locked("SELECT FROM timers WHERE shard = $1 FOR UPDATE"):
        begun = asyncio.ensure_future(begin(cast, ALICE, held))
        await cast.audit.waiting(1)
        cast.clock.advance(1)
        claim = asyncio.ensure_future(cast.owners[BOB].claim(BOB, [0], LEASE_MS))
        await cast.audit.waiting(2, unless=claim)
    assert await claim == {0: 2}
    assert len(await begun) == 1


async def claimed_while_a_begin_of_lanes_is_under_way(cast: Cast) -> None:
    await claimed_while_a_begin_is_under_way(cast, Cast.begin_lanes)


async def claimed_while_a_record_is_under_way(cast: Cast) -> None:
    await with_timers(cast.clients, timer())
    [begun] = await cast.begin(ALICE, await cast.owners[ALICE].claim(ALICE, [0], 1))
    async with cast.locked("SELECT FROM timers WHERE shard = $1 FOR UPDATE"):
        change = begun, lifecycle.settle(begun, DELIVERED, sent_at=START, now=START, uniform=random.uniform)
        record = asyncio.ensure_future(cast.record(ALICE, [change]))
        await cast.audit.waiting(1)
        cast.clock.advance(1)
        claim = asyncio.ensure_future(cast.owners[BOB].claim(BOB, [0], LEASE_MS))
        await cast.audit.waiting(2, unless=claim)
    assert await claim == {0: 2}
    assert await record == [True]


async def begun_while_a_claim_is_under_way(cast: Cast, begin: Begin = Cast.begin, claimer: bytes = BOB) -> None:
    """Alice's begin starts before a claim is committed, and has to wait for it."""
    await with_timers(cast.clients, timer())
    held = await cast.owners[ALICE].claim(ALICE, [0], 1)
    cast.clock.advance(1)
    async with cast.locked("SELECT FROM shards WHERE shard = $1 FOR UPDATE"):
        claim = asyncio.ensure_future(cast.owners[claimer].claim(claimer, [0], LEASE_MS))
        await cast.audit.waiting(1)
        begun = asyncio.ensure_future(begin(cast, ALICE, held))
        await cast.audit.waiting(2, unless=begun)
    assert await claim == {0: 2}
    assert await begun == []


async def begun_by_lane_while_a_claim_is_under_way(cast: Cast) -> None:
    await begun_while_a_claim_is_under_way(cast, Cast.begin_lanes)


async def begun_while_ones_own_claim_is_under_way(cast: Cast) -> None:
    """After it, a begin with the version of before would look like an attempt that was lost."""
    await begun_while_a_claim_is_under_way(cast, claimer=ALICE)


async def begun_by_lane_while_ones_own_claim_is_under_way(cast: Cast) -> None:
    await begun_while_a_claim_is_under_way(cast, Cast.begin_lanes, ALICE)


async def changed_while_a_begin_of_lanes_is_under_way(cast: Cast) -> None:
    """Alice's begin has found a timer when a client moves it to another lane, an hour ahead."""
    await with_timers(cast.clients, before := timer())
    held = await cast.owners[ALICE].claim(ALICE, [0], LEASE_MS)
    async with cast.locked("SELECT FROM shards WHERE shard = $1 FOR UPDATE"):
        begun = asyncio.ensure_future(cast.begin_lanes(ALICE, held))
        await cast.audit.waiting(1)
        elsewhere = Definition(target=HttpTarget(url="http://elsewhere.example"))
        after = lifecycle.amend(before, now=START, execute_at=START + HOUR_MS, definition=elsewhere)
        assert await cast.clients.swap(before, after)
    assert await begun == []
    assert await cast.clients.get("default", before.id) == after


async def begun_by_age_and_by_lane_at_once(cast: Cast) -> None:
    """Two looks of one owner find the same timer and wait for its row."""
    await with_timers(cast.clients, timer())
    held = await cast.owners[ALICE].claim(ALICE, [0], LEASE_MS)
    async with cast.locked("SELECT FROM timers WHERE shard = $1 FOR UPDATE"):
        by_age = asyncio.ensure_future(cast.begin(ALICE, held))
        await cast.audit.waiting(1)
        by_lane = asyncio.ensure_future(cast.begin_lanes(ALICE, held))
        await cast.audit.waiting(2)
    if len(begun := await by_age + await by_lane) != 1:
        raise Violated(f"one attempt was due, and {len(begun)} were begun")


async def left_while_a_renewal_is_under_way(cast: Cast) -> None:
    """Alice was stopped in the middle of a renewal, which the server goes on with."""
    await cast.owners[ALICE].renew(ALICE, LEASE_MS)
    await cast.owners[ALICE].claim(ALICE, SHARDS, LEASE_MS)
    async with cast.locked("SELECT FROM shards WHERE shard = $1 FOR UPDATE"):
        renew = asyncio.ensure_future(cast.owners[ALICE].renew(ALICE, LEASE_MS))
        await cast.audit.waiting(1)
        leave = asyncio.ensure_future(cast.owners[ALICE].leave(ALICE))
        await cast.audit.waiting(2)
    await renew
    await leave
    assert await cast.clients.cluster() == []


async def failed_over_with_loss(cast: Cast, begin: Begin = Cast.begin) -> None:
    """A replica that had not heard of Alice's claim has taken over and given the same version to Bob."""
    await with_timers(cast.clients, timer("a"), timer("b"))
    held = await cast.owners[ALICE].claim(ALICE, [0], LEASE_MS)
    [begun] = await cast.begin(ALICE, held, 1)
    await cast.audit.connection.execute("UPDATE shards SET owner_id = $1 WHERE shard = 0", BOB)
    await begin(cast, ALICE, held)
    now = cast.clock.now()
    change = begun, lifecycle.settle(begun, DELIVERED, sent_at=now, now=now, uniform=random.uniform)
    await cast.record(ALICE, [change])


async def failed_over_with_loss_and_begun_by_lane(cast: Cast) -> None:
    await failed_over_with_loss(cast, Cast.begin_lanes)


async def put_while_the_same_timer_becomes_final(cast: Cast) -> None:
    """The put finds the live timer being removed, waits for that, and must not take the identity to be free."""
    await with_timers(cast.clients, before := timer())
    [begun] = await cast.begin(ALICE, await cast.owners[ALICE].claim(ALICE, [0], LEASE_MS))
    async with cast.locked(LOCKS[3]):
        change = begun, lifecycle.settle(begun, DELIVERED, sent_at=START, now=START, uniform=random.uniform)
        record = asyncio.ensure_future(cast.record(ALICE, [change]))
        # A count that has no row yet can't be locked; by the second time it has one.
        await cast.audit.waiting(1, unless=record)
        put = asyncio.ensure_future(cast.clients.put(another(before)))
        await cast.audit.waiting(2, unless=put)
    assert await record == [True]
    await put


async def put_while_the_same_timer_is_replayed(cast: Cast) -> None:
    await with_timers(cast.clients, before := timer())
    await cast.clients.swap(before, final := lifecycle.cancel(before, now=START))
    async with cast.locked(LOCKS[3]):
        replay = asyncio.ensure_future(cast.clients.swap(final, lifecycle.replay(final, now=START)))
        await cast.audit.waiting(1, unless=replay)
        put = asyncio.ensure_future(cast.clients.put(another(before)))
        await cast.audit.waiting(2, unless=put)
    assert await replay
    assert (await put).fingerprint == before.fingerprint


Story = Callable[[Cast], Awaitable[None]]
STORIES: list[Story] = [
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


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
async def test_a_forced_interleaving_ends_well(cast: Cast, story: Story) -> None:
    for _ in range(3):
        await cast.reset()
        await story(cast)
        await cast.check()


LOCKED_FENCE = "ORDER BY shard FOR SHARE"
KEY_SHARE = "ORDER BY shard FOR KEY SHARE"
FENCED_BEGIN = "AND due.shard = ANY (ARRAY(SELECT shard FROM fence))"
SAME_REVISION = "timers.ctid = due.at AND timers.revision = due.revision"
SAME_TIMER = "timers.seq = due.seq"
OWNED_BEGIN = "owner_id = $1 AND version = ($2::bigint[])[shard + 1]"
OWNED_BEGIN_BUG = "$1::bytea IS NOT NULL AND version = ($2::bigint[])[shard + 1]"
OWNED_RECORD, OWNED_RECORD_BUG = "AND owner_id = $1\n", "AND $1::bytea IS NOT NULL\n"
ASKED_AFTER = "refuse_finished(array_agg(uuid))"
ASKED_BEFORE = "AS numbered\n"
ASKED_BEFORE_BUG = "AS numbered WHERE NOT EXISTS (SELECT FROM history WHERE history.uuid = numbered.uuid)\n"


@pytest.mark.parametrize(
    ("statement", "bugs", "story"),
    [
        ("BEGIN", {LOCKED_FENCE: ""}, claimed_while_a_begin_is_under_way),
        ("BEGIN", {LOCKED_FENCE: KEY_SHARE}, claimed_while_a_begin_is_under_way),
        ("BEGIN_LANES", {LOCKED_FENCE: ""}, claimed_while_a_begin_of_lanes_is_under_way),
        ("BEGIN_LANES", {LOCKED_FENCE: KEY_SHARE}, claimed_while_a_begin_of_lanes_is_under_way),
        ("RECORD", {LOCKED_FENCE: ""}, claimed_while_a_record_is_under_way),
        ("RECORD", {LOCKED_FENCE: KEY_SHARE}, claimed_while_a_record_is_under_way),
        ("BEGIN", {FENCED_BEGIN: ""}, claimed_while_a_begin_is_under_way),
        ("BEGIN_LANES", {FENCED_BEGIN: ""}, claimed_while_a_begin_of_lanes_is_under_way),
        ("BEGIN_LANES", {SAME_REVISION: SAME_TIMER}, begun_by_age_and_by_lane_at_once),
        ("BEGIN", {OWNED_BEGIN: OWNED_BEGIN_BUG}, failed_over_with_loss),
        ("BEGIN_LANES", {OWNED_BEGIN: OWNED_BEGIN_BUG}, failed_over_with_loss_and_begun_by_lane),
        ("RECORD", {OWNED_RECORD: OWNED_RECORD_BUG}, failed_over_with_loss),
        ("PUT", {ASKED_AFTER: "1"}, put_while_the_same_timer_becomes_final),
        ("PUT", {ASKED_AFTER: "1", ASKED_BEFORE: ASKED_BEFORE_BUG}, put_while_the_same_timer_becomes_final),
    ],
    ids=[
        *("begin without a lock", "begin with too weak a lock"),
        *("begin by lane without a lock", "begin by lane with too weak a lock"),
        *("record without a lock", "record with too weak a lock"),
        *("begin that ignores the fence", "begin by lane that ignores the fence"),
        "begin by lane that ignores the revision",
        *("begin by the version alone", "begin by lane by the version alone", "record by the version alone"),
        *("put that does not ask for final timers", "put that asks for them with its own snapshot"),
    ],
)
async def test_a_bug_does_not_escape_the_audit(
    cast: Cast, monkeypatch: pytest.MonkeyPatch, statement: str, bugs: dict[str, str], story: Story
) -> None:
    text = getattr(postgres_statements, statement)
    for right, wrong in bugs.items():
        assert right in text, "the statement has changed, and this bug is none any more"
        text = text.replace(right, wrong)
    monkeypatch.setattr(postgres_statements, statement, text)
    with pytest.raises(Violated):
        for _ in range(3):
            await cast.reset()
            await story(cast)
            await cast.check()
