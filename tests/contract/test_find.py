"""find and tally: pages in a stated order, and exact numbers."""

from __future__ import annotations

import pytest

from duetime import lifecycle
from duetime.model import Status, Timer
from duetime.store import Query, Sort
from tests.clocks import START, ManualClock
from tests.contract.timers import (
    ALICE,
    EVERYTHING,
    FULL,
    completed,
    holding,
    ids,
    spread,
    timer,
    with_namespace,
    with_timers,
)

STATUSES = list(Status)


@pytest.fixture
def crowd(store, runner, clock: ManualClock) -> list[Timer]:
    """Thirty timers in creation order; execution order is another one; statuses and two namespaces take turns."""

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


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("sort", list(Sort))
async def test_the_order(store, crowd: list[Timer], sort: Sort, descending: bool) -> None:
    mine = [t for t in crowd if t.namespace == "default"]
    expected = sorted(mine, key=lambda t: getattr(t, sort.value), reverse=descending)
    query = Query(namespace="default", sort=sort, descending=descending)
    assert await store.find(query) == expected


async def test_without_more_words_the_newest_come_first(store, crowd: list[Timer]) -> None:
    found = await store.find(Query(namespace="elsewhere"))
    assert found == [t for t in reversed(crowd) if t.namespace == "elsewhere"]


@pytest.mark.parametrize("sort", list(Sort))
@pytest.mark.parametrize("size", [1, 3, 7, 20, 50])
async def test_pages_follow_each_other_without_gap_or_overlap(store, crowd: list[Timer], size: int, sort: Sort) -> None:
    whole = await store.find(Query(namespace="default", sort=sort, limit=EVERYTHING))
    assert len(whole) == 20
    paged = []
    for offset in range(0, 20 + size, size):
        page = await store.find(Query(namespace="default", sort=sort, limit=size, offset=offset))
        assert len(page) <= size
        paged += page
    assert paged == whole


@pytest.mark.parametrize("namespace", ["default", "elsewhere"])
@pytest.mark.parametrize("status", list(Status))
async def test_one_status_of_one_namespace(store, crowd: list[Timer], status: Status, namespace: str) -> None:
    expected = [t for t in crowd if t.status is status and t.namespace == namespace]
    query = Query(namespace=namespace, status=status, descending=False)
    assert await store.find(query) == expected
    assert await store.find(Query(namespace=namespace, status=status, offset=len(expected))) == []
    assert (await store.tally(namespace))[status] == len(expected)


async def test_a_namespace_without_timers_has_none(store, crowd: list[Timer]) -> None:
    assert await store.find(Query(namespace="nowhere")) == []
    assert await store.tally("nowhere") == dict.fromkeys(Status, 0)


async def test_found_timers_are_whole(store) -> None:
    await with_timers(store, FULL)
    assert await store.find(Query(namespace="default")) == [FULL]


async def test_a_change_does_not_move_a_timer_in_the_order_of_creation(store, crowd: list[Timer]) -> None:
    mine = [t for t in crowd if t.namespace == "default"]
    pending = next(t for t in mine if t.status is Status.PENDING)
    await store.swap(pending, lifecycle.amend(pending, now=START + 1, execute_at=START + 10**6))
    assert ids(await store.find(Query(namespace="default", descending=False))) == ids(mine)
    assert ids(await store.find(Query(namespace="default", sort=Sort.EXECUTE_AT)))[0] == pending.id


async def test_a_timer_made_anew_counts_as_new(store, clock: ManualClock) -> None:
    first, second = timer("first"), timer("second", created_at=START + 1)
    await store.put(first)
    clock.advance(1)
    await store.put(second)
    await store.swap(first, None)
    clock.advance(1)
    await store.put(timer("first", created_at=START + 2))
    assert ids(await store.find(Query(namespace="default", descending=False))) == ["second", "first"]


async def test_the_tally_of_an_empty_store_names_every_status(store) -> None:
    assert await store.tally() == dict.fromkeys(Status, 0)


async def test_the_tally_counts_one_namespace_or_all(store, crowd: list[Timer]) -> None:
    for namespace in ("default", "elsewhere", None):
        counted = dict.fromkeys(Status, 0)
        for t in crowd:
            counted[t.status] += namespace in (None, t.namespace)
        assert await store.tally(namespace) == counted


async def test_the_tally_follows_a_timer_through_its_life(store, clock: ManualClock) -> None:
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
    pending = await store.get("default", b.id)
    await store.swap(pending, lifecycle.cancel(pending, now=START))
    expected = {Status.PENDING: 1, Status.COMPLETED: 1, Status.FAILED: 1, Status.CANCELED: 1}
    assert await counts() == expected
    clock.advance(2)
    assert await store.purge(retention_ms=1, limit=100) == 3
    assert await counts() == {Status.PENDING: 1}
