"""Lists and counts of timers: filters, orders and pages."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from duetime.instants import Instant
from duetime.model import Status, Timer

PAGE_BYTES_MAX = 4 << 20
"""Approximate byte limit of the timers in one result; the last timer may exceed it."""


class Sort(enum.StrEnum):
    CREATED_AT = "created_at"
    EXECUTE_AT = "execute_at"


class Query(Struct, frozen=True, kw_only=True):
    """The filter, order and position of an offset page."""

    namespace: str
    status: Status | None = None
    sort: Sort = Sort.CREATED_AT
    descending: bool = True
    limit: int = 50
    offset: int = 0
    brief: bool = False  # omit payloads and metadata


class Order(enum.StrEnum):
    """The order of a list. Ties are in the order of creation."""

    # Each order has an index of its own.
    NEWEST = "newest"  # by creation, latest first
    SOONEST = "soonest"  # by execute_at
    DUE = "due"  # pending timers by fire_at
    DEADLINE = "deadline"  # executing timers by the deadline of their attempt
    FINISHED = "finished"  # final timers, latest first


class Filter(Struct, frozen=True, kw_only=True):
    """The filter of a list; None matches all values."""

    namespace: str | None = None
    id: str | None = None
    status: Status | None = None
    correlation_id: str | None = None
    execute_after: Instant | None = None  # execute_at >= this
    execute_before: Instant | None = None  # execute_at < this

    @property
    def order(self) -> Order:
        """The order whose index serves this filter, so that a page never requires a scan."""
        if self.id is not None or self.correlation_id is not None:
            return Order.NEWEST
        if self.execute_after is not None or self.execute_before is not None:
            return Order.SOONEST
        match self.status:
            case None:
                return Order.NEWEST
            case Status.PENDING:
                return Order.DUE
            case Status.EXECUTING:
                return Order.DEADLINE
        return Order.FINISHED

    def matches(self, timer: Timer) -> bool:
        return (
            self.namespace in (None, timer.namespace)
            and self.id in (None, timer.id)
            and self.status in (None, timer.status)
            and self.correlation_id in (None, timer.correlation_id)
            and (self.execute_after is None or timer.execute_at >= self.execute_after)
            and (self.execute_before is None or timer.execute_at < self.execute_before)
        )


class Cursor(Struct, frozen=True, array_like=True):
    """The end of a page: its order and, of its last timer, the value that the order sorts by and the store's mark of
    its creation. Marks are opaque outside the store; a store raises ``InvalidCursor`` for one that it can't have
    created."""

    order: Order
    value: int
    mark: int | str


class Page(Struct, frozen=True):
    timers: list[Timer]
    next: Cursor | None  # cursor of the next page; None on the last page


class Lists(Protocol):
    async def page_by_offset(self, query: Query) -> list[Timer]:
        """Return the page that starts at ``query.offset``."""

    async def page(self, filter: Filter, limit: int, after: Cursor | None = None) -> Page:
        """Return up to ``limit`` timers after the cursor ``after``, in the filter's order, of about ``PAGE_BYTES_MAX``
        in total. A page before the last may be shorter but has at least one timer. Timers that do not fit are not read.

        A timer that keeps its position and status while a client pages through the list is returned exactly once, even
        if other timers are inserted and deleted meanwhile.
        """

    async def tally(self, namespace: str | None = None) -> dict[Status, int]:
        """Return the exact number of timers by status, in one namespace or in all."""

    async def count(self, filter: Filter, most: int) -> int:
        """Return how many timers match the filter; counting stops at ``most``."""

    async def forecast(self, bounds: Sequence[Instant], most: int) -> list[int]:
        """Return how many pending timers have a ``fire_at`` from each bound up to the next. Each count stops at
        ``most``, so the cost does not grow with the number of timers."""
