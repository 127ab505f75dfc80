"""Lists of timers from SQLite: which index serves which question, and where a page goes on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from duetime.model import Status, Timer
from duetime.store import Filter, Order, Page, Place, Query, Sort
from duetime.stores.orders import FIRST, ORDERS
from duetime.stores.sqlite_rows import Connection, select, select_with_seq


def find(connection: Connection, query: Query) -> list[Timer]:
    """A page by number, in the order that the query names."""
    way = "DESC" if query.descending else "ASC"
    where, order = {
        Sort.CREATED_AT: ("namespace = :namespace", f"seq {way}"),
        Sort.EXECUTE_AT: ("+namespace = :namespace", f"execute_at {way}, seq {way}"),
    }[query.sort]
    if query.status is not None:
        where += " AND status = :status"
    bindings = {
        "namespace": query.namespace,
        "status": query.status and query.status.value,
        "limit": query.limit,
        "offset": query.offset,
    }
    page = f"(SELECT * FROM timers WHERE {where} ORDER BY {order} LIMIT :limit OFFSET :offset)"
    return select(connection, page, bindings)


def page(connection: Connection, filter: Filter, limit: int, after: Place | None, namespaces: Iterable[str]) -> Page:
    """A page of what the filter matches, in its order; ``namespaces`` are all there are."""
    if filter.order is Order.FINISHED and filter.namespace is None:
        # The index of final timers is by namespace: a page of all is merged from a page of each.
        found = [row for name in namespaces for row in _page_rows(connection, filter, name, limit, after)]
        found.sort(key=lambda row: (row[0].updated_at, row[1]), reverse=True)
    else:
        found = _page_rows(connection, filter, filter.namespace, limit, after)
    timers = [timer for timer, _ in found[:limit]]
    if len(found) <= limit:
        return Page(timers, None)
    last, seq = found[limit - 1]
    column = ORDERS[filter.order][0]
    return Page(timers, Place(filter.order, seq if column == "seq" else getattr(last, column), seq))


def _page_rows(
    connection: Connection, filter: Filter, namespace: str | None, limit: int, after: Place | None
) -> list[tuple[Timer, int]]:
    """One timer more than the page has room for, each with its rowid."""
    column, beyond, way = ORDERS[filter.order]
    value, seq = (after.value, after.mark) if after is not None else FIRST[beyond]
    conditions = [f"({column}, seq) {beyond} (:value, :seq)" if column != "seq" else "seq < :seq"]
    bindings: dict[str, Any] = {"value": value, "seq": seq, "limit": limit + 1}
    # A plus keeps SQLite from going by the namespace where the order is another index's: it would have to sort it all.
    by_namespace = filter.order is Order.FINISHED or (filter.order is Order.NEWEST and filter.correlation_id is None)
    for name, asked, condition in (
        ("namespace", namespace, "namespace = :namespace" if by_namespace else "+namespace = :namespace"),
        ("status", filter.status, "status = :status"),
        ("correlation_id", filter.correlation_id, "correlation_id = :correlation_id"),
        ("after", filter.execute_after, "execute_at >= :after"),
        ("before", filter.execute_before, "execute_at < :before"),
    ):
        if asked is not None:
            conditions.append(condition)
            bindings[name] = str(asked) if isinstance(asked, Status) else asked
    if filter.order in (Order.DUE, Order.DEADLINE):
        conditions.append(f"status = '{filter.status}'")  # spelled out, or the partial index would not be seen to fit
    elif filter.order is Order.FINISHED:
        conditions.append("status NOT IN ('pending', 'executing')")
    where = " AND ".join(conditions)
    source = f"(SELECT * FROM timers WHERE {where} ORDER BY {column} {way}, seq {way} LIMIT :limit)"
    return select_with_seq(connection, source, bindings)
