"""What a store can do, where databases differ.

The APIs reject requests that the store can't serve, with a message; the web page and the CLI do not offer them, and
estimated counts are shown as estimates. The rest of the port is the same for every database.
"""

from __future__ import annotations

import enum

from msgspec import Struct

from duetime.errors import Unsupported
from duetime.store.lists import Filter, Order, Query, Sort


class TimeSource(enum.StrEnum):
    """The clock that decides which timers are due and which leases have expired."""

    STORE = "store"
    MACHINE = "machine"  # that of each instance: the clocks must be synchronized


_LISTS = {
    Order.NEWEST: "all timers, or those with an id or a correlation id",
    Order.SOONEST: "timers by execution time",
    Order.DUE: "pending timers",
    Order.DEADLINE: "executing timers",
    Order.FINISHED: "completed, failed or canceled timers",
}
"""What the list in each order contains, for messages in every API."""
_ORDERS = {Sort.CREATED_AT: Order.NEWEST, Sort.EXECUTE_AT: Order.SOONEST}


class Abilities(Struct, frozen=True, kw_only=True):
    orders: frozenset[Order] = frozenset(Order)  # in which the store can list timers
    offset_max: int | None = None  # largest ``Query.offset``; None: unlimited
    counts_exactly: bool = True  # whether ``tally``, ``count`` and ``forecast`` are exact; otherwise estimates
    expires_history: bool = False  # the database expires old final timers itself; ``purge`` does nothing
    time_source: TimeSource = TimeSource.STORE

    def check_filter(self, filter: Filter) -> None:
        """Raise ``Unsupported`` if the store can't list or count by this filter."""
        if filter.order in self.orders:
            return
        field, verdict = "status", "is required" if filter.status is None else f"can't be '{filter.status}'"
        if filter.id is not None or filter.correlation_id is not None:
            field, verdict = "correlation_id" if filter.id is None else "id", "can't be used"
        elif filter.order is Order.SOONEST:
            field, verdict = "execute_before" if filter.execute_after is None else "execute_after", "can't be used"
        has = "; ".join(text for order, text in _LISTS.items() if order in self.orders) or "single timers"
        missing = _LISTS[filter.order]
        raise Unsupported(field, f"{verdict}: this database can't list {missing}. It can list: {has}")

    def check_query(self, query: Query) -> None:
        """Raise ``Unsupported`` if the store can't serve this offset page."""
        sorts = [sort for sort in Sort if _ORDERS[sort] in self.orders]
        if query.sort not in sorts:
            instead = f"use '{sorts[0]}'" if sorts else "use the lists of the HTTP v1 API"
            raise Unsupported("sort", f"can't be '{query.sort}': this database can't list in that order; {instead}")
        if self.offset_max is not None and query.offset > self.offset_max:
            instead = "the lists of the HTTP v1 API page by cursor, without this limit"
            raise Unsupported("offset", f"can be at most {self.offset_max} with this database; {instead}")


ALL_ABILITIES = Abilities()
