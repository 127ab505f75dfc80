"""page_by_offset and tally: pages by offset in a given order, and exact counts."""

from __future__ import annotations

import asyncio
from itertools import product

import pytest

from duetime import lifecycle
from duetime.model import Status, Timer
from duetime.store import Query, Sort, Store
from tests.clocks import START, ManualClock
from tests.contract.needs import lists, purge
from tests.contract.timers import (
    ALICE,
    EVERYTHING,
    FULL,
    completed,
    existing,
    holding,
    ids,
    spread,
    timer,
    with_namespace,
    with_timers,
)

STATUSES = list(Status)


@pytest.fixture
def crowd(store: Store, runner: asyncio.Runner, clock: ManualClock) -> list[Timer]:
    """Thirty timers in creation order; the execution order differs; statuses and two namespaces alternate."""

    async def create() -> list[Timer]:
        await with_namespace(store, "elsewhere")
        timers = []
        for n in range(30):
            clock.advance(10)
            timers.append(
                timer(
                    f"t{n * 7 % 30}",
                    at=START + n * 11 % 30,
                    namespace="default" if n % 3 else "elsewhere",
                    created_at=clock.now(),
                    status=STATUSES[n % 5],
                )
            )
        await with_timers(store, *timers)
        return timers

    return runner.run(create())


@lists
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("sort", list(Sort))
async def test_timers_are_sorted_as_requested(store: Store, crowd: list[Timer], sort: Sort, descending: bool) -> None:
    mine = [t for t in crowd if t.namespace == "default"]
    expected = sorted(mine, key=lambda t: getattr(t, sort.value), reverse=descending)
    query = Query(namespace="default", sort=sort, descending=descending)
    assert await store.page_by_offset(query) == expected


@lists
async def test_newest_timer_is_first_by_default(store: Store, crowd: list[Timer]) -> None:
    found = await store.page_by_offset(Query(namespace="elsewhere"))
    assert found == [t for t in reversed(crowd) if t.namespace == "elsewhere"]


@lists
async def test_consecutive_pages_have_no_gap_or_overlap(store: Store, crowd: list[Timer]) -> None:
    for sort, size in product(Sort, (1, 3, 7, 20, 50)):
        whole = await store.page_by_offset(Query(namespace="default", sort=sort, limit=EVERYTHING))
        assert len(whole) == 20
        paged = []
        for offset in range(0, 20 + size, size):
            page = await store.page_by_offset(Query(namespace="default", sort=sort, limit=size, offset=offset))
            assert len(page) <= size
            paged += page
        assert paged == whole, (sort, size)


@lists
async def test_page_filters_by_status_and_namespace(store: Store, crowd: list[Timer]) -> None:
    for status, namespace in product(Status, ("default", "elsewhere")):
        expected = [t for t in crowd if t.status is status and t.namespace == namespace]
        query = Query(namespace=namespace, status=status, descending=False)
        assert await store.page_by_offset(query) == expected, (status, namespace)
        assert await store.page_by_offset(Query(namespace=namespace, status=status, offset=len(expected))) == []
        assert (await store.tally(namespace))[status] == len(expected)


@lists
async def test_page_is_empty_for_an_empty_namespace(store: Store, crowd: list[Timer]) -> None:
    assert await store.page_by_offset(Query(namespace="nowhere")) == []
    assert await store.tally("nowhere") == dict.fromkeys(Status, 0)


@lists
async def test_found_timers_are_complete(store: Store) -> None:
    await with_timers(store, FULL)
    assert await store.page_by_offset(Query(namespace="default")) == [FULL]


@lists
async def test_changed_timer_keeps_its_position_in_creation_order(store: Store, crowd: list[Timer]) -> None:
    mine = [t for t in crowd if t.namespace == "default"]
    pending = next(t for t in mine if t.status is Status.PENDING)
    await store.swap(pending, lifecycle.amend(pending, now=START + 1, execute_at=START + 10**6))
    assert ids(await store.page_by_offset(Query(namespace="default", descending=False))) == ids(mine)
    assert ids(await store.page_by_offset(Query(namespace="default", sort=Sort.EXECUTE_AT)))[0] == pending.id


@lists
async def test_recreated_timer_is_last_in_creation_order(store: Store, clock: ManualClock) -> None:
    first, second = timer("first"), timer("second", created_at=START + 1)
    await store.put(first)
    clock.advance(1)
    await store.put(second)
    await store.swap(first, None)
    clock.advance(1)
    await store.put(timer("first", created_at=START + 2))
    assert ids(await store.page_by_offset(Query(namespace="default", descending=False))) == ["second", "first"]


async def test_tally_of_an_empty_store_contains_every_status(store: Store) -> None:
    assert await store.tally() == dict.fromkeys(Status, 0)


async def test_tally_counts_one_namespace_or_all(store: Store, crowd: list[Timer]) -> None:
    for namespace in ("default", "elsewhere", None):
        counted = dict.fromkeys(Status, 0)
        for t in crowd:
            counted[t.status] += namespace in (None, t.namespace)
        assert await store.tally(namespace) == counted


@purge
async def test_tally_follows_a_timer_through_its_life(store: Store, clock: ManualClock) -> None:
    held = await holding(store)

    async def counts() -> dict[Status, int]:
        assert await store.tally() == await store.tally("default")
        return {status: number for status, number in (await store.tally()).items() if number}

    await with_timers(store, *spread(4, at=START - 10))
    assert await counts() == {Status.PENDING: 4}
    [a, b, c] = (await store.begin(ALICE, held, 3)).timers
    assert await counts() == {Status.PENDING: 1, Status.EXECUTING: 3}
    await store.record(ALICE, [(a, completed(a)), (b, lifecycle.defer(b, fire_at=START + 5, now=START))])
    assert await counts() == {Status.PENDING: 2, Status.EXECUTING: 1, Status.COMPLETED: 1}
    await store.record(ALICE, [(c, lifecycle.give_up(c, now=START))])
    pending = await existing(store, b.id)
    await store.swap(pending, lifecycle.cancel(pending, now=START))
    expected = {Status.PENDING: 1, Status.COMPLETED: 1, Status.FAILED: 1, Status.CANCELED: 1}
    assert await counts() == expected
    clock.advance(2)
    assert await store.purge(retention_ms=1, limit=100) == 3
    assert await counts() == {Status.PENDING: 1}
