"""All reads and writes of timers, for the tests of query plans."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from duetime import lifecycle
from duetime.instants import Instant
from duetime.model import Status
from duetime.store import Filter, Portion, Query, Sort, Store
from tests.clocks import START
from tests.contract.timers import ALICE, completed, holding, timer, with_timers

OFFSET_PAGES = {
    f"offset page {status} by {sort} {way}": Query(
        namespace="default", status=status, sort=sort, descending=way == "down"
    )
    for status in (None, Status.PENDING, Status.COMPLETED)
    for sort in Sort
    for way in ("up", "down")
}
PAGES = {
    "page " + " ".join(f"{field}={value}" for field, value in msgspec.structs.asdict(filter).items() if value): (
        filter,
        index,
    )
    for filter, index in (
        (Filter(), "namespace"),
        (Filter(namespace="default"), "namespace"),
        (Filter(status=Status.PENDING), "due"),
        (Filter(status=Status.PENDING, namespace="default"), "due"),
        (Filter(status=Status.EXECUTING), "due"),
        (Filter(status=Status.FAILED), "ended"),
        (Filter(status=Status.CANCELED), "ended"),
        (Filter(status=Status.COMPLETED), "final"),
        (Filter(status=Status.FAILED, namespace="default"), "final"),
        (Filter(correlation_id="a"), "correlation_id"),
        (Filter(correlation_id="a", namespace="default"), "correlation_id"),
        (Filter(execute_after=Instant(1), execute_before=Instant(9)), "execute_at"),
        (Filter(execute_after=Instant(1), execute_before=Instant(9), namespace="default"), "execute_at"),
        (Filter(execute_after=Instant(1), status=Status.PENDING), "execute_at"),
        (Filter(id="t7"), "uuid"),
        (
            Filter(id="t7", namespace="default", status=Status.PENDING, correlation_id="a", execute_after=Instant(1)),
            "uuid",
        ),
    )
}
COUNTS = {name.replace("page", "count"): entry for name, entry in PAGES.items()}


async def verbs(store: Store) -> dict[str, Callable[[], Awaitable[object]]]:
    """Every store method that reads timers, ready to be called."""
    await with_timers(store, one := timer("one"), two := timer("two"), three := timer("three"))
    held = await holding(store)
    begun = (await store.begin(ALICE, held, 5)).timers
    await store.swap(two, canceled := lifecycle.cancel(two, now=START))
    return {
        "begin": lambda: store.begin(ALICE, held, 5, lane_max=3),
        "begin_lanes": lambda: store.begin_lanes(ALICE, held, 5, [Portion(one.lane, 3)]),
        "lanes": lambda: store.lanes(START, due_max=10),
        "overdue": lambda: store.overdue(held, START, 10),
        "record": lambda: store.record(ALICE, [(t, completed(t)) for t in begun]),
        "put": lambda: store.put(timer("new")),
        "get": lambda: store.get("default", "t7"),
        "amend": lambda: store.swap(one, lifecycle.amend(one, now=START)),
        "cancel": lambda: store.swap(three, lifecycle.cancel(three, now=START)),
        "replay": lambda: store.swap(canceled, lifecycle.replay(canceled, now=START)),
        "remove": lambda: store.swap(canceled, None),
        "purge": lambda: store.purge(retention_ms=20, limit=10),
        **{name: partial(store.page_by_offset, query) for name, query in OFFSET_PAGES.items()},
        **{name: partial(store.page, filter, 10) for name, (filter, _) in PAGES.items()},
        **{name: partial(store.count, filter, 10) for name, (filter, _) in COUNTS.items()},
        "forecast": lambda: store.forecast([START, START + 10, START + 20], 10),
    }
