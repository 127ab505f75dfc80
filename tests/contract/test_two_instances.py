"""Two instances that create timers in one database at the same time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from duetime.errors import StoreError
from duetime.model import Status
from duetime.store import Cursor, Filter, Query, Store
from tests.clocks import ManualClock
from tests.contract.stores import Contender
from tests.contract.timers import ids, spread

SERVERS_ONLY = True


@pytest.fixture
def other(
    contender: Contender, runner: asyncio.Runner, store: Store, place: Path | str, clock: ManualClock
) -> Iterator[Store]:
    """The store of another instance."""
    other = runner.run(contender.opened(place, clock))
    yield other
    runner.run(other.close())


def count_rejections(store: Any, monkeypatch: pytest.MonkeyPatch) -> list[StoreError]:
    """The rejected writes of this store, also those that it retries."""
    write, rejected = store._pool.write, list[StoreError]()

    async def watched(*statements: Any, **named: Any) -> Any:
        try:
            return await write(*statements, **named)
        except StoreError as error:
            rejected.append(error)
            raise

    monkeypatch.setattr(store._pool, "write", watched)
    return rejected


async def test_puts_of_the_same_ids_in_opposite_orders_do_not_deadlock(
    store: Store, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejected = [count_rejections(each, monkeypatch) for each in (store, other)]
    for round in range(6):
        for _ in range(2):  # The second time, all of them exist.
            same = [spread(400, prefix=f"{round}-") for _ in range(4)]
            results = await asyncio.gather(
                store.put_many(same[0]),
                other.put_many(same[1][::-1]),
                store.put_many(same[2][::-1]),
                other.put_many(same[3]),
            )
            results[1].reverse()
            results[2].reverse()
        assert all(found is not None for each in results for found in each)
    assert rejected == [[], []]
    assert (await store.tally())[Status.PENDING] == 6 * 400


async def listed(store: Store, filter: Filter) -> list[str]:
    """The ids on pages of one timer each."""
    found: list[str] = []
    after: Cursor | None = None
    while True:
        page = await store.page(filter, 1, after)
        found += ids(page.timers)
        if (after := page.next) is None:
            return found


@pytest.mark.parametrize("number", [1, 20])
async def test_timers_created_in_the_same_millisecond_are_all_listed(
    store: Store, other: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(random, "getrandbits", lambda bits: 7)
    one, two = spread(number, prefix="one", step_ms=0), spread(number, prefix="two", step_ms=0)
    await asyncio.gather(store.put_many(one), other.put_many(two))
    for filter in (Filter(), Filter(namespace="default"), Filter(status=Status.PENDING)):
        assert sorted(await listed(store, filter)) == sorted(ids([*one, *two]))
    pages = [await store.page_by_offset(Query(namespace="default", limit=1, offset=n)) for n in range(2 * number)]
    assert sorted(t.id for page in pages for t in page) == sorted(ids([*one, *two]))
