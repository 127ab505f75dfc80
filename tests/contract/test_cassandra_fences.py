"""The floor, the fence and unknown results of the Cassandra store, on a real node."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from duetime.clock import SystemClock
from duetime.errors import StoreIndeterminate, StoreUnavailable
from duetime.model import Status, Timer
from duetime.stores.cassandra import partition
from duetime.stores.cassandra.driver import Call
from duetime.stores.cassandra.partition import RAISE
from duetime.stores.cassandra.store import CassandraStore
from duetime.stores.unreadable import QUARANTINED
from tests.cassandra import Cassandra
from tests.clocks import START, ManualClock
from tests.contract import cassandra_store
from tests.contract.cassandra_store import AnyShard
from tests.contract.stores import SHARDS
from tests.contract.timers import ALICE, BOB, EVERYTHING, completed, holding, ids, spread, timer, with_timers

pytestmark = pytest.mark.cassandra

PUT_SECONDS = 8.0
FINISH_SECONDS_MAX = 20.0


@pytest.fixture
def url(cassandra: Cassandra) -> Iterator[str]:
    yield (url := cassandra.fresh())
    cassandra.give_back(url)


Apply = Callable[[Sequence[Call]], Awaitable[bool]]


def intercept(store: CassandraStore, around: Callable[[Apply, Sequence[Call]], Awaitable[bool]]) -> None:
    """Run ``around`` instead of each conditional write of this store."""
    session: Any = store._session
    apply: Apply = session.apply
    session.apply = lambda calls: around(apply, calls)


async def opened(url: str, clock: ManualClock) -> AnyShard:
    return await cassandra_store.opened(url, clock, shards=SHARDS)


# The floor.


class Rivals:
    """Two owners take shards from each other, begin, record and raise the floor; clients are late to put due timers."""

    def __init__(self, seed: int, *, checks_touched: bool = True) -> None:
        self.rng = random.Random(seed)
        self.checks_touched = checks_touched
        self.put: set[str] = set()
        self.begun: Counter[str] = Counter()
        self.recorded: Counter[str] = Counter()
        self.raised = self.claimed = 0
        self.putting = True
        self.early: list[Timer] = []

    async def late(self, apply: Apply, calls: Sequence[Call]) -> bool:
        """The floor may move between a client's look at it and its write."""
        await asyncio.sleep(self.rng.uniform(0, 0.05))
        return await apply(calls)

    async def slow(self, apply: Apply, calls: Sequence[Call]) -> bool:
        """Clients may write between an owner's look below the new floor and the raise."""
        if calls[0].statement != RAISE:
            return await apply(calls)
        await asyncio.sleep(self.rng.uniform(0, 0.02))
        if not self.checks_touched:
            calls = [Call(RAISE.replace(" AND touched = ?", ""), calls[0].arguments[:-1])]
        raised = await apply(calls)
        self.raised += raised
        return raised

    async def client(self, store: CassandraStore, name: str) -> None:
        number = 0
        while self.putting:
            at = SystemClock().now() - self.rng.choice((0, 0, 1_000, 100_000))
            shard = self.rng.randrange(SHARDS)
            some = [timer(f"{name}-{number + n}", at=at, shard=shard) for n in range(10)]
            number += 10
            try:
                assert await store.put_many(some) == [None] * 10
            except StoreUnavailable:
                continue  # the floor moved again and again
            self.put |= set(ids(some))
            await asyncio.sleep(0.005)

    async def owner(self, store: CassandraStore, owner_id: bytes) -> None:
        held: dict[int, int] = {}
        while self.putting or self.put - self.recorded.keys():
            if self.rng.random() < 0.3:
                claimed = await store.claim(owner_id, [self.rng.randrange(SHARDS)], 1)
                held |= claimed
                self.claimed += len(claimed)
            begun = await store.begin(owner_id, held, 40)
            for shard in begun.refused | begun.unknown:
                held.pop(shard, None)
            self.begun.update(ids(begun.timers))
            self.early += [t for t in begun.timers if t.fire_at > SystemClock().now()]
            if self.rng.random() < 0.05:
                await asyncio.sleep(0.3)  # a stall between begin and record
            changes = [(t, completed(t, SystemClock().now())) for t in begun.timers]
            for (before, _), done in zip(changes, await store.record(owner_id, changes), strict=True):
                self.recorded[before.id] += done is True
            await asyncio.sleep(0)

    async def run(self, url: str) -> None:
        async with stores(url, 4) as (one, two, mine, theirs):
            for client in (one, two):
                intercept(client, self.late)
            for owner in (mine, theirs):
                intercept(owner, self.slow)
            owners = [asyncio.ensure_future(self.owner(mine, ALICE)), asyncio.ensure_future(self.owner(theirs, BOB))]
            clients = [asyncio.ensure_future(self.client(one, "one")), asyncio.ensure_future(self.client(two, "two"))]
            await asyncio.sleep(PUT_SECONDS)
            self.putting = False
            await asyncio.gather(*clients)
            _, unfinished = await asyncio.wait(owners, timeout=FINISH_SECONDS_MAX)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*owners, return_exceptions=not self.checks_touched)


@asynccontextmanager
async def stores(url: str, number: int) -> AsyncIterator[list[CassandraStore]]:
    opened = [CassandraStore(url, shards=SHARDS, takeover_now=True) for _ in range(number)]
    for store in opened:
        await store.open()
    try:
        yield opened
    finally:
        for store in opened:
            await store.close()


@pytest.fixture
def restless_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises the floor as often as possible."""
    monkeypatch.setattr(partition, "FLOOR_STEP_MS", 20)
    monkeypatch.setattr(partition, "FLOOR_LAG_MS", 100)


async def test_floor_hides_no_timer(url: str, restless_floor: None) -> None:
    rivals = Rivals(1)
    await rivals.run(url)
    print(len(rivals.put), "put,", rivals.raised, "raises,", rivals.claimed, "claims")
    assert not rivals.put - rivals.recorded.keys(), "lost"
    assert set(rivals.recorded.values()) <= {0, 1}, "recorded twice"
    assert not rivals.early
    assert len(rivals.put) > 200 and rivals.raised > 20 and rivals.claimed > 5, "the run proves little"


async def test_floor_that_ignores_new_entries_hides_timers(url: str, restless_floor: None) -> None:
    """Shows that the test above would find it."""
    rivals = Rivals(1, checks_touched=False)
    await rivals.run(url)
    assert rivals.put - rivals.begun.keys(), "the planted bug has no effect: adapt the test"


async def test_floor_stays_below_the_oldest_due_timer(url: str, clock: ManualClock, restless_floor: None) -> None:
    store = await opened(url, clock)
    try:
        held = await store.claim(ALICE, range(SHARDS), 1_000)
        await with_timers(store, timer("waits", at=START - 50_000, shard=1), timer("later", at=START + 9_000, shard=2))
        assert await store._partitions[1].raise_floor(ALICE, held[1], START)
        assert (await store._partitions[1].state()).floor == START - 50_001
        assert await store._partitions[2].raise_floor(ALICE, held[2], START)
        assert (await store._partitions[2].state()).floor == START - 100
        assert not await store._partitions[2].raise_floor(BOB, held[2], START + 5_000)
        assert not await store._partitions[2].raise_floor(ALICE, held[2] + 1, START + 5_000)
        await store.put(past := timer("past", at=START - 9_000, shard=2))
        assert set(ids((await store.begin(ALICE, held, 9)).timers)) == {"waits", "past"}
        there = await store.get("default", past.id)
        assert there is not None and there.fire_at == START - 9_000
    finally:
        await store.close()


# Unknown results.


@pytest.fixture
def store(url: str, runner: asyncio.Runner, clock: ManualClock) -> Iterator[CassandraStore]:
    store = runner.run(opened(url, clock))
    yield store
    runner.run(store.close())


async def lost_answer(apply: Apply, calls: Sequence[Call]) -> bool:
    await apply(calls)
    raise StoreIndeterminate("planted: the answer is lost")


async def lost_request(apply: Apply, calls: Sequence[Call]) -> bool:
    raise StoreIndeterminate("planted: the request is lost")


def restored(store: Any) -> None:
    del store._session.apply


async def test_write_without_an_answer_is_found_by_a_serial_read(store: CassandraStore) -> None:
    held = await holding(store)
    intercept(store, lost_answer)
    new = spread(16, at=START - 20)
    assert await store.put_many(new) == [None] * 16
    begun = (await store.begin(ALICE, held, EVERYTHING)).timers
    assert sorted(ids(begun)) == sorted(ids(new))
    assert await store.record(ALICE, [(t, completed(t)) for t in begun]) == [True] * 16
    restored(store)
    assert (await store.tally())[Status.COMPLETED] == 16


async def test_unknown_write_concerns_only_its_shard(store: CassandraStore) -> None:
    held = await holding(store)
    await with_timers(store, *spread(16, at=START - 20))

    async def lost_in_shard_three(apply: Apply, calls: Sequence[Call]) -> bool:
        if 3 in calls[0].arguments[1:2]:
            raise StoreIndeterminate("planted: the request is lost")
        return await apply(calls)

    first = (await store.begin(ALICE, held, 8)).timers
    intercept(store, lost_in_shard_three)
    begun = await store.begin(ALICE, held, EVERYTHING)
    assert begun.unknown == {3} and {t.shard for t in begun.timers} == set(range(8)) - {3}
    recorded = await store.record(ALICE, [(t, completed(t)) for t in first])
    assert recorded == [None if t.shard == 3 else True for t in first]
    with pytest.raises(StoreIndeterminate):
        await store.put(timer("new", shard=3))
    assert await store.put(timer("other", shard=4)) is None
    restored(store)


async def test_late_write_of_a_former_owner_is_refused(store: CassandraStore, clock: ManualClock) -> None:
    """Alice's begin and record leave the process only after Bob has claimed the shards."""
    held = await holding(store)
    await with_timers(store, *spread(16, at=START - 20))
    begun = (await store.begin(ALICE, held, 8)).timers
    claimed = asyncio.Event()

    async def wait(apply: Apply, calls: Sequence[Call]) -> bool:
        await claimed.wait()
        return await apply(calls)

    async with stores_on(store, clock) as other:
        intercept(store, wait)
        late = asyncio.ensure_future(store.begin(ALICE, held, EVERYTHING))
        outcomes = asyncio.ensure_future(store.record(ALICE, [(t, completed(t)) for t in begun]))
        await asyncio.sleep(0.3)
        clock.advance(60_000)
        theirs = await holding(other, BOB)
        claimed.set()
        assert (await late).timers == [] and await outcomes == [False] * 8
        assert len((await other.begin(BOB, theirs, EVERYTHING)).timers) == 16


@asynccontextmanager
async def stores_on(store: CassandraStore, clock: ManualClock) -> AsyncIterator[CassandraStore]:
    """Another instance on the database of a store."""
    hosts = ",".join(f"{host}:{port}" for host, port in store._address.hosts)
    other = await opened(f"cassandra://{hosts}/{store._address.keyspace}", clock)
    try:
        yield other
    finally:
        await other.close()


async def test_claim_that_was_cut_off_is_completed_by_a_renewal(store: CassandraStore) -> None:
    async def lose_fences(apply: Apply, calls: Sequence[Call]) -> bool:
        if calls[0].statement == partition.CLAIM:
            raise StoreIndeterminate("planted: the request is lost")
        return await apply(calls)

    intercept(store, lose_fences)
    assert await store.claim(ALICE, [2], 1_000) == {}
    assert (await store.renew(ALICE, 1_000)).held == {}
    restored(store)
    assert (await store.renew(ALICE, 1_000)).held == {2: 1}
    await with_timers(store, timer("a", shard=2))
    assert ids((await store.begin(ALICE, {2: 1}, 1)).timers) == ["a"]


# Unreadable rows.


async def test_unreadable_timer_is_set_aside_and_comes_back(store: AnyShard, clock: ManualClock) -> None:
    await with_timers(store, bad := timer("bad", at=START - 5, shard=3), *spread(8, at=START - 20))
    [(whole,)] = await store._session.read(
        "SELECT timer FROM timers WHERE shard = 3 AND kind = 0 AND lane = 0 AND at = 0 AND uuid = ?", bad.uuid
    )
    write = (
        "UPDATE timers SET timer = ? WHERE shard = 3 AND kind = 0 AND lane = 0 AND at = 0 AND uuid = ? IF revision > 0"
    )
    assert await store._session.apply([Call(write, (b"{", bad.uuid))])
    held = await holding(store)
    begun = (await store.begin(ALICE, held, EVERYTHING)).timers
    assert len(begun) == 8 and "bad" not in ids(begun)
    again = await store.begin(ALICE, held, EVERYTHING)
    assert (again.timers, again.more, again.next_at) == ([], False, None)
    assert (await store.quarantine()).timers == 1
    rows = await store._partitions[3].rows([bad.uuid])
    assert rows[bad.uuid].status == QUARANTINED
    assert await store._session.apply([Call(write, (whole, bad.uuid))])
    async with stores_on(store, clock) as other:
        assert (await other.quarantine()).timers == 0
        clock.advance(60_000)
        begun = (await other.begin(ALICE, await holding(other), EVERYTHING)).timers
        assert "bad" in ids(begun)
