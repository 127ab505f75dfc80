"""History in slices of time: made ahead, dropped as a whole, and there for whatever ends whenever it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import asyncpg
import pytest

from duetime import lifecycle
from duetime.errors import StoreUnavailable
from duetime.model import DAY_MS, FOREVER_MS, Status, replace
from duetime.stores.postgres import PostgresStore
from duetime.stores.postgres_schema import SLICES_PER_RETENTION_MIN, slice_width_ms
from tests.clocks import START, ManualClock
from tests.contract.postgres_audit import Audit
from tests.contract.timers import (
    ALICE,
    completed,
    ended,
    everything,
    holding,
    spread,
    timer,
    with_namespace,
    with_timers,
)

MONTH_MS = 30 * DAY_MS


@pytest.fixture
def store(runner: asyncio.Runner, opened, database: str) -> PostgresStore:
    store: PostgresStore = runner.run(opened(database))
    return store


@pytest.fixture
def backup(runner: asyncio.Runner, store: PostgresStore, database: str) -> Iterator[asyncpg.Connection]:
    """Somebody who reads all of history in one transaction, as pg_dump does, until it is rolled back."""

    async def begun() -> asyncpg.Connection:
        connection = await asyncpg.connect(database)
        await connection.execute("BEGIN; SELECT FROM duetime.history")
        return connection

    connection = runner.run(begun())
    yield connection
    runner.run(connection.close())


async def slices(store: PostgresStore) -> list[tuple[int, int]]:
    """From when to when each slice reaches, as the store notes it and as PostgreSQL has it."""
    noted = [tuple(row) for row in await store._pool.read("SELECT * FROM slices ORDER BY starts_at")]
    tables = await store._pool.read(
        "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'history'::regclass"
    )
    assert {name for (name,) in tables} == {f"history_{starts_at}" for starts_at, _ in noted}
    return noted


async def assert_counts_are_right(store: PostgresStore) -> None:
    there = await everything(store)
    assert await store.tally() == {status: sum(t.status is status for t in there.values()) for status in Status}


@pytest.mark.parametrize(
    ("retention_ms", "width_ms"),
    [
        (0, DAY_MS),
        (DAY_MS, DAY_MS),
        (27 * DAY_MS, DAY_MS),
        (28 * DAY_MS, 7 * DAY_MS),
        (111 * DAY_MS, 7 * DAY_MS),
        (112 * DAY_MS, 28 * DAY_MS),
        (FOREVER_MS, 28 * DAY_MS),
    ],
)
def test_a_slice_is_narrow_beside_the_retention(retention_ms: int, width_ms: int) -> None:
    assert slice_width_ms(retention_ms) == width_ms
    assert width_ms == DAY_MS or width_ms * SLICES_PER_RETENTION_MIN <= retention_ms


async def test_at_first_there_is_room_for_today_and_tomorrow(store: PostgresStore) -> None:
    [(starts_at, ends_at)] = await slices(store)
    assert starts_at <= START
    assert ends_at > START + DAY_MS
    assert ends_at - starts_at == slice_width_ms(MONTH_MS)


async def test_upkeep_makes_the_next_slice_a_day_ahead(store: PostgresStore, clock: ManualClock) -> None:
    [first] = await slices(store)
    clock.advance(first[1] - START - DAY_MS - 1)
    await store.purge(retention_ms=MONTH_MS, limit=1)
    assert await slices(store) == [first]
    clock.advance(1)
    await store.purge(retention_ms=MONTH_MS, limit=1)
    assert await slices(store) == [first, (first[1], first[1] + slice_width_ms(MONTH_MS))]


async def test_slices_follow_the_longest_retention(store: PostgresStore, clock: ManualClock) -> None:
    await with_namespace(store, "archive", retention_ms=400 * DAY_MS)
    clock.advance(20 * DAY_MS)
    await store.purge(retention_ms=MONTH_MS, limit=1)
    starts_at, ends_at = (await slices(store))[-1]
    assert ends_at - starts_at == 28 * DAY_MS


TALLIED = (
    "the count comes before the row, so what is refused is a slice of NULL (23502) and not a row without one (23514)"
)
AHEAD = pytest.mark.parametrize("days", [8, 400])


@AHEAD
async def test_a_cancel_when_there_is_no_slice_makes_one(store: PostgresStore, clock: ManualClock, days: int) -> None:
    await with_timers(store, before := timer())
    clock.advance(days * DAY_MS)
    assert await store.swap(before, lifecycle.cancel(before, now=clock.now()))
    await assert_counts_are_right(store)


@AHEAD
async def test_an_import_when_there_is_no_slice_makes_one(store: PostgresStore, clock: ManualClock, days: int) -> None:
    clock.advance(days * DAY_MS)
    await with_timers(store, ended("imported", Status.FAILED, at=clock.now()))
    await assert_counts_are_right(store)


@AHEAD
async def test_a_record_when_there_is_no_slice_makes_one(store: PostgresStore, clock: ManualClock, days: int) -> None:
    await with_timers(store, *spread(3, at=START - 3))
    begun = (await store.begin(ALICE, await holding(store), 3)).timers
    clock.advance(days * DAY_MS)
    assert await store.record(ALICE, [(t, completed(t, clock.now())) for t in begun]) == [True] * 3
    await assert_counts_are_right(store)


async def test_instances_that_miss_the_same_slice_make_it_once(store: PostgresStore, clock: ManualClock) -> None:
    await with_timers(store, *(timers := spread(20)))
    clock.advance(100 * DAY_MS)
    cancels = (store.swap(t, lifecycle.cancel(t, now=clock.now())) for t in timers)
    assert await asyncio.gather(*cancels) == [True] * 20
    assert len([1 for starts, ends in await slices(store) if starts <= clock.now() < ends]) == 1
    await assert_counts_are_right(store)


async def test_a_slice_ends_where_a_later_one_begins(store: PostgresStore, clock: ManualClock) -> None:
    """As when the clock of the server was ahead for a while and has been put right."""
    await with_timers(store, *(timers := spread(2)))
    for live, days in zip(timers, (20, -5), strict=True):
        clock.advance(days * DAY_MS)
        assert await store.swap(live, lifecycle.cancel(live, now=clock.now()))
    _, (_, ends_at), (later_at, _) = await slices(store)
    assert clock.now() < ends_at == later_at
    await assert_counts_are_right(store)


async def test_a_slice_that_is_old_as_a_whole_is_dropped(store: PostgresStore, clock: ManualClock) -> None:
    await with_timers(store, *(ended(f"e{n}", Status.COMPLETED) for n in range(50)), ended("f", Status.FAILED))
    [(_, ends_at)] = await slices(store)
    clock.advance(ends_at - START - 1)
    await with_timers(store, ended("last of the slice", Status.CANCELED, at=clock.now()), timer("live"))
    clock.advance(MONTH_MS)
    assert await store.purge(retention_ms=MONTH_MS, limit=1) == 0
    assert len(await everything(store)) == 53
    clock.advance(1)
    # It goes at once, whatever the limit: a drop costs the same for one timer and for a million.
    assert await store.purge(retention_ms=MONTH_MS, limit=1) == 52
    assert {id for _, id in await everything(store)} == {"live"}
    assert await store.tally() == dict.fromkeys(Status, 0) | {Status.PENDING: 1}
    assert all(starts_at >= ends_at for starts_at, _ in await slices(store))


@pytest.fixture
def audit(runner: asyncio.Runner, store: PostgresStore, database: str) -> Iterator[Audit]:
    audit = runner.run(Audit.of(database))
    yield audit
    runner.run(audit.close())


async def test_every_change_is_counted_in_the_slice_of_the_timer(store: PostgresStore, audit: Audit, clock) -> None:
    """A count in the slice of another time is right until one of the two slices is dropped."""
    await with_namespace(store, "short", retention_ms=2 * DAY_MS)
    await with_timers(store, *(timers := spread(6, at=START - 9)), brief := timer("b", at=START + 9, namespace="short"))
    begun = (await store.begin(ALICE, await holding(store), 5)).timers
    again = [lifecycle.defer(t, fire_at=START + DAY_MS, now=START) for t in begun[3:]]
    final = [completed(t) for t in begun[:3]]
    assert await store.record(ALICE, [*zip(begun, [*final, *again], strict=True)]) == [True] * 5
    await store.swap(timers[5], canceled := lifecycle.cancel(timers[5], now=START))
    await store.swap(brief, lifecycle.cancel(brief, now=START))
    await audit.check()
    clock.advance(12 * DAY_MS)  # the slice of now is another one
    assert await store.swap(final[0], lifecycle.replay(final[0], now=clock.now()))
    assert await store.swap(final[1], None)
    assert await store.swap(canceled, replace(canceled, correlation_id="moved"))
    assert await store.swap(again[0], lifecycle.cancel(again[0], now=clock.now()))
    await audit.check()
    assert await store.purge(retention_ms=MONTH_MS, limit=100) == 1
    await audit.check()
    clock.advance(2 * MONTH_MS)
    await store.purge(retention_ms=MONTH_MS, limit=100)
    await audit.check()
    await assert_counts_are_right(store)


async def test_what_is_kept_for_less_time_goes_row_by_row(store: PostgresStore, clock: ManualClock) -> None:
    await with_namespace(store, "short", retention_ms=2 * DAY_MS)
    await with_timers(store, *(ended(f"s{n}", Status.COMPLETED, namespace="short") for n in range(5)))
    await with_timers(store, ended("kept", Status.COMPLETED))
    before = await slices(store)
    clock.advance(2 * DAY_MS + 1)
    assert [await store.purge(retention_ms=MONTH_MS, limit=3) for _ in range(3)] == [3, 2, 0]
    assert {id for _, id in await everything(store)} == {"kept"}
    assert before[0] in await slices(store)
    await assert_counts_are_right(store)


async def test_opening_keeps_what_a_namespace_keeps_longer(store: PostgresStore, opened, database: str, clock) -> None:
    await with_namespace(store, "archive", retention_ms=FOREVER_MS)
    await with_timers(store, ended("a", Status.COMPLETED, namespace="archive"))
    clock.advance(100 * DAY_MS)
    await store.purge(retention_ms=MONTH_MS, limit=100)
    assert await store.get("archive", "a")
    again = await opened(database)
    assert await again.get("archive", "a")


async def test_a_write_that_makes_a_slice_keeps_what_a_namespace_keeps_longer(store: PostgresStore, clock) -> None:
    await with_namespace(store, "archive", retention_ms=FOREVER_MS)
    await with_timers(store, ended("a", Status.COMPLETED, namespace="archive"))
    clock.advance(100 * DAY_MS)
    await with_timers(store, ended("b", Status.COMPLETED, at=clock.now()))
    assert await store.get("archive", "a")


async def test_a_reader_that_keeps_an_old_slice_from_going_does_not_keep_a_new_one_from_coming(
    store: PostgresStore, backup: asyncpg.Connection, clock: ManualClock
) -> None:
    await with_timers(store, live := timer("live"), ended("old", Status.COMPLETED))
    clock.advance(100 * DAY_MS)
    assert await store.swap(live, lifecycle.cancel(live, now=clock.now()))


async def test_a_drop_waits_only_briefly_for_a_reader(store: PostgresStore, backup, clock: ManualClock) -> None:
    # Whoever comes after it in the queue waits as long as it does.
    await with_timers(store, ended("old", Status.COMPLETED))
    clock.advance(100 * DAY_MS)
    with pytest.raises(StoreUnavailable, match="lock timeout"):
        await store.purge(retention_ms=MONTH_MS, limit=100)
    await backup.execute("ROLLBACK")
    assert await store.purge(retention_ms=MONTH_MS, limit=100) == 1
