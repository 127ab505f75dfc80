"""Slices of history: created ahead of time, dropped as a whole, and available whenever a timer becomes final."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from duetime import lifecycle
from duetime.model import DAY_MS, FOREVER_MS, Status, replace
from duetime.store import Store
from duetime.stores.postgres.store import PostgresStore
from duetime.stores.sql.retention import slice_width_ms
from tests.clocks import START, ManualClock
from tests.contract.audits import AUDITS
from tests.contract.races import Audit, check
from tests.contract.stores import Contender, Reopen
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

SERVERS_ONLY = True
"""The stores whose history is in slices."""


async def slices(store: Any) -> list[tuple[int, int]]:
    """The start and end of each slice, in the store's table and in the server's catalog."""
    if isinstance(store, PostgresStore):
        noted = await store._pool.read("SELECT starts_at, ends_at FROM slices ORDER BY starts_at")
        tables = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'history'::regclass"
        there = {name.removeprefix("history_") for (name,) in await store._pool.read(tables)}
    else:
        noted, found = await store._pool.read(
            "SELECT starts_at, ends_at FROM slices ORDER BY starts_at",
            "SELECT partition_name FROM information_schema.partitions "
            "WHERE table_schema = DATABASE() AND table_name = 'history' AND partition_name <> 'p0'",
        )
        there = {name.removeprefix("p") for (name,) in found}
    assert there == {str(starts_at) for starts_at, _ in noted}
    return [(starts_at, ends_at) for starts_at, ends_at in noted]


async def assert_counts_are_right(store: Store) -> None:
    there = await everything(store)
    assert await store.tally() == {status: sum(t.status is status for t in there.values()) for status in Status}


async def test_first_slices_cover_today_and_tomorrow(store: Store) -> None:
    [(starts_at, ends_at)] = await slices(store)
    assert starts_at <= START
    assert ends_at > START + DAY_MS
    assert ends_at == START // DAY_MS * DAY_MS + slice_width_ms(MONTH_MS)


async def test_upkeep_creates_the_next_slice_a_day_ahead(store: Store, clock: ManualClock) -> None:
    [first] = await slices(store)
    clock.advance(first[1] - START - DAY_MS - 1)
    await store.purge(retention_ms=MONTH_MS, limit=1)
    assert await slices(store) == [first]
    clock.advance(1)
    await store.purge(retention_ms=MONTH_MS, limit=1)
    assert await slices(store) == [first, (first[1], first[1] + slice_width_ms(MONTH_MS))]


async def test_slice_width_follows_the_longest_retention(store: Store, clock: ManualClock) -> None:
    await with_namespace(store, "archive", retention_ms=400 * DAY_MS)
    clock.advance(20 * DAY_MS)
    await store.purge(retention_ms=MONTH_MS, limit=1)
    _, ends_at = (await slices(store))[-1]
    assert ends_at == clock.now() // DAY_MS * DAY_MS + 28 * DAY_MS


AHEAD = pytest.mark.parametrize("days", [8, 400])


@AHEAD
async def test_cancel_creates_a_missing_slice(store: Store, clock: ManualClock, days: int) -> None:
    await with_timers(store, before := timer())
    clock.advance(days * DAY_MS)
    assert await store.swap(before, lifecycle.cancel(before, now=clock.now()))
    await assert_counts_are_right(store)


@AHEAD
async def test_put_of_a_final_timer_creates_a_missing_slice(store: Store, clock: ManualClock, days: int) -> None:
    clock.advance(days * DAY_MS)
    await with_timers(store, ended("imported", Status.FAILED, at=clock.now()))
    await assert_counts_are_right(store)


@AHEAD
async def test_record_creates_a_missing_slice(store: Store, clock: ManualClock, days: int) -> None:
    await with_timers(store, *spread(3, at=START - 3))
    begun = (await store.begin(ALICE, await holding(store), 3)).timers
    clock.advance(days * DAY_MS)
    assert await store.record(ALICE, [(t, completed(t, clock.now())) for t in begun]) == [True] * 3
    await assert_counts_are_right(store)


async def test_concurrent_instances_create_a_missing_slice_once(store: Store, clock: ManualClock) -> None:
    await with_timers(store, *(timers := spread(20)))
    clock.advance(100 * DAY_MS)
    cancels = (store.swap(t, lifecycle.cancel(t, now=clock.now())) for t in timers)
    assert await asyncio.gather(*cancels) == [True] * 20
    assert len([1 for starts, ends in await slices(store) if starts <= clock.now() < ends]) == 1
    await assert_counts_are_right(store)


async def test_clock_set_back_finds_a_slice(store: Store, clock: ManualClock) -> None:
    await with_timers(store, *(timers := spread(2)))
    for live, days in zip(timers, (20, -5), strict=True):
        clock.advance(days * DAY_MS)
        assert await store.swap(live, lifecycle.cancel(live, now=clock.now()))
    (_, ends_at), (starts_at, _) = await slices(store)
    assert ends_at == starts_at
    await assert_counts_are_right(store)


async def set_back_behind_the_oldest_slice(store: Store, clock: ManualClock) -> None:
    """Drop the slices of the first hundred days, and then set the clock back to the first."""
    clock.advance(100 * DAY_MS)
    await store.purge(retention_ms=MONTH_MS, limit=100)
    assert all(ends_at > START + 70 * DAY_MS for _, ends_at in await slices(store))
    clock.advance(-100 * DAY_MS)


async def test_clock_set_back_behind_the_oldest_slice_finds_one(
    store: Store, reopened: Reopen, clock: ManualClock
) -> None:
    await set_back_behind_the_oldest_slice(store, clock)
    await with_timers(store, *(timers := spread(4, at=START - 4)))
    [first, second] = (await store.begin(ALICE, await holding(store), 2)).timers
    assert await store.record(ALICE, [(first, completed(first))]) == [True]
    await assert_counts_are_right(store)
    assert await store.purge(retention_ms=MONTH_MS, limit=100) == 0
    again = await reopened(store)
    try:
        assert await again.record(ALICE, [(second, completed(second))]) == [True]
        assert await again.swap(timers[2], canceled := lifecycle.cancel(timers[2], now=START))
        assert await again.swap(canceled, lifecycle.replay(canceled, now=START))
        await slices(again)
        clock.advance(200 * DAY_MS)
        await again.purge(retention_ms=MONTH_MS, limit=100)
        # Each of the timers was counted in the slice that it lay in: no count is left over, and none is missing.
        assert {id for _, id in await everything(again)} == {"t2", "t3"}
        assert await again.tally() == dict.fromkeys(Status, 0) | {Status.PENDING: 2}
    finally:
        await again.close()


async def test_rows_of_a_clock_set_back_are_deleted_at_the_end_of_a_shorter_retention(
    store: Store, audit: Audit, clock: ManualClock
) -> None:
    await set_back_behind_the_oldest_slice(store, clock)
    await with_namespace(store, "short", retention_ms=2 * DAY_MS)
    await with_timers(store, *(timers := [timer(f"s{n}", namespace="short") for n in range(5)]))
    for live in timers:
        assert await store.swap(live, lifecycle.cancel(live, now=START))
    await check(audit)
    clock.advance(2 * DAY_MS + 1)
    assert await store.purge(retention_ms=MONTH_MS, limit=100) == 5
    await check(audit)


async def test_expired_slice_is_dropped(store: Store, clock: ManualClock) -> None:
    await with_timers(store, *(ended(f"e{n}", Status.COMPLETED) for n in range(50)), ended("f", Status.FAILED))
    [(_, ends_at)] = await slices(store)
    clock.advance(ends_at - START - 1)
    await with_timers(store, ended("last of the slice", Status.CANCELED, at=clock.now()), timer("live"))
    clock.advance(MONTH_MS)
    assert await store.purge(retention_ms=MONTH_MS, limit=1) == 0
    assert len(await everything(store)) == 53
    clock.advance(1)
    # The whole slice is dropped, whatever the limit: dropping costs the same for one timer and a million.
    assert await store.purge(retention_ms=MONTH_MS, limit=1) == 52
    assert {id for _, id in await everything(store)} == {"live"}
    assert await store.tally() == dict.fromkeys(Status, 0) | {Status.PENDING: 1}
    assert all(starts_at >= ends_at for starts_at, _ in await slices(store))


@pytest.fixture
def audit(runner: asyncio.Runner, contender: Contender, store: Store, place: str) -> Iterator[Audit]:
    if contender.server not in AUDITS:
        pytest.skip("the audit needs triggers, which TiDB does not have")
    audit: Audit = runner.run(AUDITS[contender.server](place))
    yield audit
    runner.run(audit.close())


async def test_every_change_is_counted_in_the_timers_slice(store: Store, audit: Audit, clock: ManualClock) -> None:
    """A count in a wrong slice is noticed only when one of the two slices is dropped."""
    await with_namespace(store, "short", retention_ms=2 * DAY_MS)
    await with_timers(store, *(timers := spread(6, at=START - 9)), brief := timer("b", at=START + 9, namespace="short"))
    begun = (await store.begin(ALICE, await holding(store), 5)).timers
    again = [lifecycle.defer(t, fire_at=START + DAY_MS, now=START) for t in begun[3:]]
    final = [completed(t) for t in begun[:3]]
    assert await store.record(ALICE, [*zip(begun, [*final, *again], strict=True)]) == [True] * 5
    await store.swap(timers[5], canceled := lifecycle.cancel(timers[5], now=START))
    await store.swap(brief, lifecycle.cancel(brief, now=START))
    await check(audit)
    clock.advance(12 * DAY_MS)  # now in another slice
    assert await store.swap(final[0], lifecycle.replay(final[0], now=clock.now()))
    assert await store.swap(final[1], None)
    assert await store.swap(canceled, replace(canceled, correlation_id="moved"))
    assert await store.swap(again[0], lifecycle.cancel(again[0], now=clock.now()))
    await check(audit)
    assert await store.purge(retention_ms=MONTH_MS, limit=100) == 1
    await check(audit)
    clock.advance(2 * MONTH_MS)
    await store.purge(retention_ms=MONTH_MS, limit=100)
    await check(audit)
    await assert_counts_are_right(store)


async def test_shorter_retention_is_deleted_row_by_row(store: Store, clock: ManualClock) -> None:
    await with_namespace(store, "short", retention_ms=2 * DAY_MS)
    await with_timers(store, *(ended(f"s{n}", Status.COMPLETED, namespace="short") for n in range(5)))
    await with_timers(store, ended("kept", Status.COMPLETED))
    before = await slices(store)
    clock.advance(2 * DAY_MS + 1)
    assert [await store.purge(retention_ms=MONTH_MS, limit=3) for _ in range(3)] == [3, 2, 0]
    assert {id for _, id in await everything(store)} == {"kept"}
    assert before[0] in await slices(store)
    await assert_counts_are_right(store)


async def test_open_respects_a_longer_retention_of_a_namespace(
    store: Store, reopened: Reopen, clock: ManualClock
) -> None:
    await with_namespace(store, "archive", retention_ms=FOREVER_MS)
    await with_timers(store, ended("a", Status.COMPLETED, namespace="archive"))
    clock.advance(100 * DAY_MS)
    await store.purge(retention_ms=MONTH_MS, limit=100)
    assert await store.get("archive", "a")
    again = await reopened(store)
    assert await again.get("archive", "a")
    await again.close()


async def test_creating_a_slice_respects_a_longer_retention_of_a_namespace(store: Store, clock: ManualClock) -> None:
    await with_namespace(store, "archive", retention_ms=FOREVER_MS)
    await with_timers(store, ended("a", Status.COMPLETED, namespace="archive"))
    clock.advance(100 * DAY_MS)
    await with_timers(store, ended("b", Status.COMPLETED, at=clock.now()))
    assert await store.get("archive", "a")
