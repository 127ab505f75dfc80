"""Lists of timers from MySQL. Each query forces its index."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from duetime.store import Cursor, Filter, Order, Query
from duetime.stores.mysql.literals import listed, literal
from duetime.stores.sql.lists import Condition, Index, conditions_of, index_of, merged, order_of, tables_of
from duetime.stores.sql.page_orders import ORDERS, START, seq_of

_ANYWHERE = {Index.NAMESPACE: "seq", Index.FINAL: "ended"}
"""The indexes for queries over all namespaces."""


def page_by_offset(query: Query) -> str:
    """The query for the keys and sizes of the timers on an offset page."""
    index, order = order_of(query)
    where = f"namespace = {literal(query.namespace)}"
    if query.status is not None:
        where += f" AND status = {literal(query.status.value)}"
    selects = [
        f"SELECT uuid, size, execute_at, seq FROM {table} FORCE INDEX ({table}_{index}) WHERE {where} "
        f"ORDER BY {order} LIMIT {query.offset + query.limit}"
        for table in tables_of(query.status)
    ]
    return merged(selects, order, f"LIMIT {query.limit} OFFSET {query.offset}")


def page(filter: Filter, limit: int, now: str, after: Cursor | None, names: Collection[str]) -> str:
    """The query for the timers of a page and the one after it: key, value of the order, seq and size."""
    column, beyond, way = ORDERS[filter.order]
    value, seq = (after.value, seq_of(after)) if after is not None else START[beyond]
    if filter.order is Order.NEWEST:
        behind, order = f"seq < {seq}", f"seq {way}"
    else:
        # Written so that the first part is a range of the index.
        behind = f"{column} {beyond}= {value} AND ({column} {beyond} {value} OR seq {beyond} {seq})"
        order = f"{column} {way}, seq {way}"
    selects = _selects(filter, f"uuid, {column} AS place, seq, size", [behind], order, limit + 1, now, names)
    return merged(selects, order.replace(column, "place", 1), f"LIMIT {limit + 1}")


def count(filter: Filter, most: int, now: str, names: Collection[str]) -> str:
    """The query for the number of timers that match, up to ``most``, by the same index as their page."""
    column, _, way = ORDERS[filter.order]
    selects = _selects(filter, "1 AS one", [], f"{column} {way}", most, now, names)
    union = " UNION ALL ".join(f"({select})" for select in selects)
    return f"SELECT COUNT(*) FROM (SELECT * FROM ({union}) AS each_of LIMIT {most}) AS counted"


def _selects(
    filter: Filter, what: str, where: list[str], order: str, limit: int, now: str, names: Collection[str]
) -> list[str]:
    where = where + [_condition(condition) for condition in conditions_of(filter, names)]
    if filter.order is Order.DEADLINE:
        where.append(f"fire_at <= {now}")
    return [
        f"SELECT {what} FROM {table} {_forced(filter, table)} WHERE {' AND '.join(where) or 'TRUE'} "
        f"ORDER BY {order} LIMIT {limit}"
        for table in tables_of(filter.status)
    ]


def _condition(condition: Condition) -> str:
    column, operator, value = condition
    return f"{column} {operator} {listed(value) if isinstance(value, list) else literal(value)}"


def _forced(filter: Filter, table: str) -> str:
    index = index_of(filter)
    if table == "timers" and index is Index.UUID:
        return "FORCE INDEX (PRIMARY)"
    return f"FORCE INDEX ({table}_{_ANYWHERE.get(index, index) if filter.namespace is None else index})"


def forecast(bounds: Sequence[int], most: int) -> list[str]:
    return [
        "SELECT COUNT(*) FROM (SELECT 1 FROM timers FORCE INDEX (timers_due) WHERE status = 'pending' "
        f"AND fire_at >= {start} AND fire_at < {end} LIMIT {most}) AS due"
        for start, end in pairwise(bounds)
    ]
