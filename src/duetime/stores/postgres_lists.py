"""Lists of timers from PostgreSQL: which index serves which question, and where a page goes on.

What is asked of both tables is asked of each for a whole page, in the order of an index, and merged.
"""

from __future__ import annotations

from typing import Any

from duetime.model import Status
from duetime.store import Filter, Order, Place, Query, Sort
from duetime.stores.orders import FIRST, ORDERS
from duetime.stores.postgres_rows import TIMER
from duetime.stores.postgres_statements import now

Statement = tuple[str, list[Any]]


class _Arguments(list[Any]):
    def add(self, value: object) -> str:
        self.append(value)
        return f"${len(self)}"


def _tables(status: Status | None) -> tuple[str, ...]:
    if status is None:
        return "timers", "history"
    return ("history",) if status.final else ("timers",)


def _merged(selects: list[str], order: str, rest: str) -> str:
    union = " UNION ALL ".join(f"({select})" for select in selects)
    return f"SELECT * FROM ({union}) AS merged ORDER BY {order} {rest}"


def find(query: Query) -> Statement:
    """A page by number, in the order that the query names."""
    way = "DESC" if query.descending else "ASC"
    order = f"seq {way}" if query.sort is Sort.CREATED_AT else f"execute_at {way}, seq {way}"
    arguments = _Arguments()
    # An empty string keeps the planner from going by a column where the order is another index's.
    namespace = "namespace" if query.sort is Sort.CREATED_AT else "namespace || ''"
    where = f"{namespace} = {arguments.add(query.namespace)}"
    if query.status is not None:
        where += f" AND status || '' = {arguments.add(query.status.value)}"
    reach, limit, offset = (arguments.add(n) for n in (query.offset + query.limit, query.limit, query.offset))
    selects = [
        f"SELECT {TIMER}, seq FROM {table} WHERE {where} ORDER BY {order} LIMIT {reach}::bigint"
        for table in _tables(query.status)
    ]
    return _merged(selects, order, f"LIMIT {limit} OFFSET {offset}"), arguments


def page(filter: Filter, limit: int, at: int | None, after: Place | None) -> Statement:
    """One timer more than the page has room for, each with its seq. ``at`` is a virtual clock's time."""
    column, beyond, way = ORDERS[filter.order]
    arguments = _Arguments()
    value, seq = (arguments.add(n) for n in ((after.value, after.mark) if after is not None else FIRST[beyond]))
    where = [f"({column}, seq) {beyond} ({value}::bigint, {seq}::bigint)"]
    by_namespace = filter.order is Order.FINISHED or (filter.order is Order.NEWEST and filter.correlation_id is None)
    if column == "seq":
        column = "seq" if filter.namespace is not None or filter.correlation_id is not None else "seq + 0"
        where = [f"{column} < {seq}::bigint AND {value}::bigint IS NOT NULL"]
    for asked, condition in (
        (filter.namespace, "namespace = {}" if by_namespace else "namespace || '' = {}"),
        (filter.status and filter.status.value, "status = {}" if by_namespace else "status || '' = {}"),
        (filter.correlation_id, "correlation_id = {}"),
        (filter.execute_after, "execute_at >= {}"),
        (filter.execute_before, "execute_at < {}"),
    ):
        if asked is not None:
            where.append(condition.format(arguments.add(asked)))
    if filter.order is Order.DEADLINE:
        # An attempt is under way only of what was due: the index on fire_at leads to the few that can be meant.
        where.append(f"fire_at <= (SELECT {now(arguments.add(at))})")
    order = f"{column} {way}" if filter.order is Order.NEWEST else f"{column} {way}, seq {way}"
    size = f"LIMIT {arguments.add(limit + 1)}::bigint"
    conditions = " AND ".join(where)
    if filter.order is Order.FINISHED and filter.namespace is None:
        # The index of final timers is by namespace: a page of all is merged from a page of each.
        each = f"SELECT {TIMER}, seq FROM history WHERE namespace = name AND {conditions} ORDER BY {order} {size}"
        source = f"SELECT each.* FROM namespaces CROSS JOIN LATERAL ({each}) AS each"
        return f"{source} ORDER BY {order} {size}", arguments
    selects = [
        f"SELECT {TIMER}, seq FROM {table} WHERE {conditions} ORDER BY {order} {size}"
        for table in _tables(filter.status)
    ]
    return _merged(selects, order, size), arguments
