"""page: filters, their orders, and cursors that stay correct while timers are created and deleted; and count, which
takes the same filters."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from duetime.errors import InvalidCursor
from duetime.model import Status, Timer
from duetime.store import Cursor, Filter, Order, Store
from tests.clocks import START, ManualClock
from tests.contract.needs import lists
from tests.contract.timers import ids, timer, with_namespace, with_timers

pytestmark = lists

NAMESPACES = ("default", "billing", "mail")
STATUSES = (Status.PENDING, Status.FAILED, Status.CANCELED)


@pytest.fixture
def crowd(store: Store, runner: asyncio.Runner, clock: ManualClock) -> list[Timer]:
    """In order of creation; many have the same time, so that the order of creation must distinguish them."""
    clock.advance(100)  # Only timers that were due can be executing.
    draw = random.Random(7)
    timers = []
    for n in range(150):
        status = draw.choice(list(Status))
        at = START + draw.randrange(20)
        timers.append(
            timer(
                f"t{n}",
                at=at,
                namespace=draw.choice(NAMESPACES),
                status=status,
                fire_at=at + draw.randrange(3),
                updated_at=START + draw.randrange(15),
                deadline_at=START + draw.randrange(10) if status is Status.EXECUTING else None,
                correlation_id=draw.choice([None, "order-1", "order-2"]),
            )
        )

    async def create() -> None:
        for name in NAMESPACES[1:]:
            await with_namespace(store, name)
        await with_timers(store, *timers)

    runner.run(create())
    return timers


async def walk(store: Store, filter: Filter, limit: int) -> list[Timer]:
    seen: list[Timer] = []
    after: Cursor | None = None
    while True:
        page = await store.page(filter, limit, after)
        assert len(page.timers) <= limit
        seen += page.timers
        after = page.next
        if after is None:
            return seen
        assert len(page.timers) == limit and after.order is filter.order


def expected(crowd: list[Timer], filter: Filter) -> list[Timer]:
    marked = [(n, t) for n, t in enumerate(crowd) if filter.matches(t)]
    keys: dict[Order, Callable[[int, Timer], tuple[Any, ...]]] = {
        Order.NEWEST: lambda n, t: (-n,),
        Order.SOONEST: lambda n, t: (t.execute_at, n),
        Order.DUE: lambda n, t: (t.fire_at, n),
        Order.DEADLINE: lambda n, t: (t.deadline_at, n),
        Order.FINISHED: lambda n, t: (-t.updated_at, -n),
    }
    return [t for _, t in sorted(marked, key=lambda entry: keys[filter.order](*entry))]


FILTERS = [
    Filter(
        namespace=namespace, status=status, correlation_id=correlation_id, execute_after=after, execute_before=before
    )
    for namespace, status, correlation_id, (after, before) in itertools.product(
        (None, "billing"),
        (None, *Status),
        (None, "order-1"),
        ((None, None), (START + 5, None), (None, START + 9), (START + 5, START + 9)),
    )
]


@pytest.mark.parametrize("limit", [1, 7, 1_000])
async def test_every_filter_returns_its_matches_in_order(store: Store, crowd: list[Timer], limit: int) -> None:
    for filter in FILTERS:
        assert await walk(store, filter, limit) == expected(crowd, filter), filter


async def test_every_filter_counts_its_matches_up_to_a_limit(store: Store, crowd: list[Timer]) -> None:
    for filter in FILTERS:
        matching = len(expected(crowd, filter))
        assert await store.count(filter, 1_000) == matching, filter
        assert await store.count(filter, 7) == min(7, matching), filter
        assert await store.count(filter, 0) == 0, filter


@pytest.fixture
def namesakes(store: Store, runner: asyncio.Runner, clock: ManualClock) -> list[Timer]:
    """One id in each namespace, in order of creation, among others."""
    clock.advance(100)
    made = [
        timer("it", namespace=name, status=status, at=START + 5 - n, updated_at=START + n, correlation_id="order-1")
        for n, (name, status) in enumerate(zip(NAMESPACES, STATUSES, strict=True))
    ]

    async def create() -> None:
        for name in NAMESPACES[1:]:
            await with_namespace(store, name)
        await with_timers(store, timer("It"), *made, timer("it "), timer("before it", correlation_id="order-1"))

    runner.run(create())
    return made


@pytest.mark.parametrize("limit", [1, 2, 10])
async def test_id_is_found_in_every_namespace(store: Store, namesakes: list[Timer], limit: int) -> None:
    for filter in (
        Filter(id="it"),
        Filter(id="it", namespace="billing"),
        Filter(id="it", namespace="nowhere"),
        Filter(id="it", status=Status.PENDING),
        Filter(id="it", status=Status.FAILED),
        Filter(id="it", correlation_id="order-1"),
        Filter(id="it", correlation_id="order-2"),
        Filter(id="it", execute_after=START + 4),
        Filter(id="it", execute_before=START + 4, status=Status.CANCELED, namespace="mail", correlation_id="order-1"),
        Filter(id="nobody"),
    ):
        matching = [t for t in reversed(namesakes) if filter.matches(t)]
        assert await walk(store, filter, limit) == matching, filter
        assert await store.count(filter, limit) == min(limit, len(matching)), filter


async def test_page_without_matches_is_empty(store: Store) -> None:
    page = await store.page(Filter(status=Status.FAILED), 10)
    assert page.timers == [] and page.next is None


@pytest.mark.parametrize(
    "filter",
    [Filter(), Filter(namespace="billing"), Filter(execute_after=START), Filter(status=Status.PENDING)],
    ids=str,
)
async def test_unchanged_timers_are_listed_once_while_others_change(
    store: Store, crowd: list[Timer], filter: Filter
) -> None:
    draw = random.Random(11)
    going = set(draw.sample(ids(crowd), 50))
    seen: list[str] = []
    after: Cursor | None = None
    for round in itertools.count():
        page = await store.page(filter, 5, after)
        seen += ids(page.timers)
        after = page.next
        if after is None:
            break
        for id in [id for id in going if draw.random() < 0.2]:
            gone = next(t for t in crowd if t.id == id)
            await store.swap(gone, None)
            going.discard(id)
        await store.put(timer(f"new-{round}", at=START + draw.randrange(20), namespace=draw.choice(NAMESPACES)))
    stayed = [t.id for t in crowd if await store.get(t.namespace, t.id) is not None and filter.matches(t)]
    assert set(stayed) <= set(seen)
    assert len(seen) == len(set(seen))


async def test_invalid_cursor_is_rejected(store: Store) -> None:
    await with_timers(store, timer("a"), timer("b"))
    marks: list[int | str] = ["", "é", 1 << 62, -(1 << 63)]
    for order, mark in product((Order.NEWEST, Order.DUE), marks):
        filter = Filter(status=Status.PENDING if order is Order.DUE else None)
        with pytest.raises(InvalidCursor):
            await store.page(filter, 1, Cursor(order, START, mark))
