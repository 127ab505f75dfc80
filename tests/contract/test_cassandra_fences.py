"""The floor, the fence and unknown results of the Cassandra store, on a real node."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from duetime.clock import SystemClock
from duetime.errors import StoreIndeterminate, StoreUnavailable
from duetime.model import Definition, HttpTarget, Status, Timer
from duetime.stores.cassandra import backlog, partition
from duetime.stores.cassandra.backlog import WORN_MIN
from duetime.stores.cassandra.driver import Call, TooManyTombstones
from duetime.stores.cassandra.partition import RAISE, SWEPT
from duetime.stores.cassandra.store import CassandraStore
from duetime.stores.unreadable import QUARANTINED
from tests.cassandra import Cassandra
from tests.clocks import START, ManualClock
from tests.contract import cassandra_store
from tests.contract.cassandra_store import AnyShard
from tests.contract.stores import SHARDS
from tests.contract.timers import (
    ALICE,
    BOB,
    EVERYTHING,
    completed,
    holding,
    ids,
    spread,
    switch,
    timer,
    with_namespace,
    with_timers,
)

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
    """Two owners take shards from each other, begin, record and sweep; clients are late to put due timers."""

    def __init__(self, seed: int, *, raises_floor: bool = True) -> None:
        self.rng = random.Random(seed)
        self.raises_floor = raises_floor
        self.put: set[str] = set()
        self.begun: Counter[str] = Counter()
        self.recorded: Counter[str] = Counter()
        self.swept = self.claimed = 0
        self.putting = True
        self.early: list[Timer] = []

    async def late(self, apply: Apply, calls: Sequence[Call]) -> bool:
        """The floor may move between a client's look at it and its write."""
        await asyncio.sleep(self.rng.uniform(0, 0.05))
        return await apply(calls)

    async def slow(self, apply: Apply, calls: Sequence[Call]) -> bool:
        """Clients may write between an owner's look at what is left and the end of its sweep."""
        if calls[0].statement == RAISE and not self.raises_floor:
            return True
        if calls[0].statement != SWEPT:
            return await apply(calls)
        await asyncio.sleep(self.rng.uniform(0, 0.02))
        swept = await apply(calls)
        self.swept += swept
        return swept

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
            await asyncio.gather(*owners, return_exceptions=not self.raises_floor)


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
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps as often as possible."""
    for name, value in {"STEP_MS": 20, "LAG_MS": 100, "WORN_MIN": 0}.items():
        monkeypatch.setattr(backlog, name, value)


async def test_sweeps_hide_no_timer(url: str, restless: None) -> None:
    rivals = Rivals(1)
    await rivals.run(url)
    print(len(rivals.put), "put,", rivals.swept, "sweeps,", rivals.claimed, "claims")
    assert not rivals.put - rivals.recorded.keys(), "lost"
    assert set(rivals.recorded.values()) <= {0, 1}, "recorded twice"
    assert not rivals.early
    assert len(rivals.put) > 200 and rivals.swept > 20 and rivals.claimed > 5, "the run proves little"


async def test_sweep_that_does_not_raise_the_floor_hides_timers(url: str, restless: None) -> None:
    """Shows that the test above would find it."""
    rivals = Rivals(1, raises_floor=False)
    await rivals.run(url)
    assert rivals.put - rivals.begun.keys(), "the planted bug has no effect: adapt the test"


async def test_swept_timers_wait_in_their_lanes(url: str, clock: ManualClock, restless: None) -> None:
    store = await opened(url, clock)
    try:
        held = await store.claim(ALICE, range(SHARDS), 1_000)
        await with_namespace(store, "paused", paused=True)
        await with_timers(
            store,
            timer("waits", at=START - 50_000, shard=1, namespace="paused"),
            timer("due", at=START - 50_000, shard=1),
            timer("later", at=START + 9_000, shard=2),
        )
        assert ids((await store.begin(ALICE, held, 0)).timers) == []
        for shard in (1, 2):
            assert await store._backlogs[shard].sweep(START)
            state = await store._partitions[shard].state()
            assert (state.floor, state.swept) == (START - 100, START - 100)
        assert {each.namespace for each in store._backlogs[1].lanes.values()} == {"paused", "default"}
        assert store._backlogs[2].lanes == {}
        await store.put(past := timer("past", at=START - 9_000, shard=2))
        assert set(ids((await store.begin(ALICE, held, 9)).timers)) == {"due", "past"}
        there = await store.get("default", past.id)
        assert there is not None and there.fire_at == START - 9_000
        clock.advance(20_000)
        async with stores_on(store, clock) as other:
            theirs = await other.claim(BOB, range(SHARDS), 1_000)
            assert ids((await other.begin(BOB, theirs, 9)).timers) == ["later"]
            paused = await other.namespace("paused")
            assert paused is not None
            await switch(other, paused, paused=False)
            assert ids((await other.begin(BOB, theirs, 9)).timers) == ["waits"]
            assert (await other.begin(BOB, theirs, 9)).timers == []
            assert {each.namespace for each in other._backlogs[1].lanes.values()} <= {"default"}
    finally:
        await store.close()


async def test_former_owner_sweeps_nothing(url: str, clock: ManualClock, restless: None) -> None:
    store = await opened(url, clock)
    try:
        held = await store.claim(ALICE, [1], 1_000)
        await with_timers(store, timer("waits", at=START - 50_000, shard=1))
        await store.begin(ALICE, held, 0)
        clock.advance(20_000)
        async with stores_on(store, clock) as other:
            theirs = await other.claim(BOB, [1], 1_000)
            before = await store._partitions[1].state()
            assert not await store._backlogs[1].sweep(START + 20_000)
            assert await store._partitions[1].state() == before
            assert ids((await other.begin(BOB, theirs, 9)).timers) == ["waits"]
    finally:
        await store.close()


async def test_unconfirmed_sweep_hides_no_timer(url: str, clock: ManualClock, restless: None) -> None:
    """The response to the end of a sweep is lost, whether it was written or not."""
    for answer in (lost_answer, lost_request):
        store = await opened(url, clock)
        try:
            held = await store.claim(ALICE, range(SHARDS), 1_000)
            await with_timers(store, timer(f"waits {answer}", at=clock.now() - 50_000, shard=1))
            await store.begin(ALICE, held, 0)

            async def around(apply: Apply, calls: Sequence[Call], answer: Any = answer) -> bool:
                return bool(await answer(apply, calls)) if calls[0].statement == SWEPT else await apply(calls)

            intercept(store, around)
            with contextlib.suppress(StoreIndeterminate):
                await store._backlogs[1].sweep(clock.now())
            restored(store)
            assert ids((await store.begin(ALICE, held, 9)).timers) == [f"waits {answer}"]
            clock.advance(20_000)
        finally:
            await store.close()


async def fire_beside_waiting_timers(store: AnyShard, clock: ManualClock, *, sweeps: bool) -> int:
    """Fire 2,000 timers of one shard while two others wait: one of a paused namespace, one for a destination without
    room. Return how many reads met too many tombstones for one read, of which the test's nodes allow few."""
    failed = 0
    session: Any = store._session
    read = session.read

    async def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal failed
        try:
            return await read(*arguments, **options)
        except TooManyTombstones:
            failed += 1
            raise

    session.read = counted
    held = await store.claim(ALICE, range(SHARDS), 1_000_000)
    paused = await with_namespace(store, "paused", paused=True)
    away = Definition(target=HttpTarget(url="https://away.example"))
    blocked = timer("blocked", at=START, shard=1, definition=away)
    await with_timers(store, timer("waits", at=START, shard=1, namespace="paused"), blocked)
    limits = {blocked.lane: 0}
    for number in range(5):
        some = [timer(f"{number}-{n}", at=clock.now() - n % 7, shard=1) for n in range(400)]
        assert await store.put_many(some) == [None] * 400
        begun = await store.begin(ALICE, held, 500, lane_max=500, lane_limits=limits)
        assert len(begun.timers) == 400
        assert all(await store.record(ALICE, [(t, completed(t, clock.now())) for t in begun.timers]))
        clock.advance(10_000)
        if sweeps:
            store._backlogs[1].worn = WORN_MIN
            assert await store._backlogs[1].sweep(clock.now())
        assert not (await store.begin(ALICE, held, 500, lane_max=500, lane_limits=limits)).timers
    await switch(store, paused, paused=False)
    assert set(ids((await store.begin(ALICE, held, 500)).timers)) == {"blocked", "waits"}
    return failed


async def test_waiting_timers_do_not_keep_tombstones_in_the_way_of_polls(url: str, clock: ManualClock) -> None:
    store = await opened(url, clock)
    try:
        assert await fire_beside_waiting_timers(store, clock, sweeps=True) == 0
    finally:
        await store.close()


async def test_polls_pass_any_number_of_tombstones_in_steps(
    url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens without sweeps, which shows that the test above would find it."""
    monkeypatch.setattr(backlog.Backlog, "may_sweep", lambda self, now: False)
    store = await opened(url, clock)
    try:
        assert await fire_beside_waiting_timers(store, clock, sweeps=False) > 0
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
