"""Lists of timers from PostgreSQL: which index serves which question, and where a page goes on.

What is asked of both tables is asked of each for a whole page, in the order of an index, and merged.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from duetime.model import Status, timer_uuid
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


def page(
    filter: Filter, limit: int, at: int | None, after: Place | None, namespaces: Collection[str] = ()
) -> Statement:
    """One timer more than the page has room for, each with its seq. ``at`` is a virtual clock's time, ``namespaces``
    are those in which a filter's id may be."""
    column, beyond, way = ORDERS[filter.order]
    arguments = _Arguments()
    value, seq = (arguments.add(n) for n in ((after.value, after.mark) if after is not None else FIRST[beyond]))
    where = [f"({column}, seq) {beyond} ({value}::bigint, {seq}::bigint)"]
    if column == "seq":
        column = _newest(filter)
        where = [f"{column} < {seq}::bigint AND {value}::bigint IS NOT NULL"]
    conditions = " AND ".join(where + _conditions(filter, at, namespaces, arguments))
    order = f"{column} {way}" if filter.order is Order.NEWEST else f"{column} {way}, seq {way}"
    size = f"LIMIT {arguments.add(limit + 1)}::bigint"
    if _by_namespace(filter):
        # The index of final timers is by namespace: a page of all is merged from a page of each.
        each = f"SELECT {TIMER}, seq FROM history WHERE namespace = name AND {conditions} ORDER BY {order} {size}"
        source = f"SELECT each.* FROM namespaces CROSS JOIN LATERAL ({each}) AS each"
        return f"{source} ORDER BY {order} {size}", arguments
    selects = [
        f"SELECT {TIMER}, seq FROM {table} WHERE {conditions} ORDER BY {order} {size}"
        for table in _tables(filter.status)
    ]
    return _merged(selects, order, size), arguments


def count(filter: Filter, most: int, at: int | None, namespaces: Collection[str] = ()) -> Statement:
    """How many timers the filter matches, at most ``most``: along the same index as its page."""
    column, _, way = ORDERS[filter.order]
    arguments = _Arguments()
    conditions = " AND ".join(_conditions(filter, at, namespaces, arguments)) or "true"
    order = f"ORDER BY {_newest(filter) if column == 'seq' else column} {way}"
    size = f"LIMIT {arguments.add(most)}::bigint"
    if _by_namespace(filter):
        each = f"SELECT FROM history WHERE namespace = name AND {conditions} {order} {size}"
        source = f"SELECT FROM namespaces CROSS JOIN LATERAL ({each}) AS each {size}"
    else:
        tables = _tables(filter.status)
        each = " UNION ALL ".join(f"(SELECT 1 FROM {table} WHERE {conditions} {order} {size})" for table in tables)
        source = f"SELECT FROM ({each}) AS each {size}"
    return f"SELECT count(*) FROM ({source}) AS counted", arguments


_DUE = "SELECT count(*) FROM (SELECT FROM timers WHERE fire_at >= starts_at AND fire_at < ends_at {} LIMIT $3) AS due"

# $1, $2: from when and up to when, $3: most, $4: now. What is not due yet can't be executing: the index says it all.
FORECAST = f"""
    SELECT CASE WHEN starts_at > {now("$4")} THEN ({_DUE.format("")})
        ELSE ({_DUE.format("AND status = 'pending'")}) END
    FROM unnest($1::bigint[], $2::bigint[]) WITH ORDINALITY AS spans (starts_at, ends_at, place) ORDER BY place
"""


def _newest(filter: Filter) -> str:
    """The order of creation, as the index has it that the filter goes by: of one namespace, of what belongs together,
    or of all. The few timers that an id can mean are found by their keys, and are in no order until they are sorted."""
    if filter.id is not None:
        return "seq - 0"
    return "seq" if filter.namespace is not None or filter.correlation_id is not None else "seq + 0"


def _by_namespace(filter: Filter) -> bool:
    """Whether what is asked of all namespaces is asked of each."""
    return filter.order is Order.FINISHED and filter.namespace is None


def _conditions(filter: Filter, at: int | None, namespaces: Collection[str], arguments: _Arguments) -> list[str]:
    where = []
    by_namespace = filter.order is Order.FINISHED or (
        filter.order is Order.NEWEST and filter.correlation_id is None and filter.id is None
    )
    # Nothing that is asked besides an id is worded as an index has it.
    correlation_id = "correlation_id = {}" if filter.id is None else "correlation_id IS NOT DISTINCT FROM {}"
    for asked, condition in (
        (filter.namespace, "namespace = {}" if by_namespace else "namespace || '' = {}"),
        (filter.status and filter.status.value, "status = {}" if by_namespace else "status || '' = {}"),
        (filter.correlation_id, correlation_id),
        (filter.execute_after, "execute_at >= {}" if filter.id is None else "execute_at + 0 >= {}"),
        (filter.execute_before, "execute_at < {}" if filter.id is None else "execute_at + 0 < {}"),
    ):
        if asked is not None:
            where.append(condition.format(arguments.add(asked)))
    if filter.order is Order.DEADLINE:
        # An attempt is under way only of what was due: the index on fire_at leads to the few that can be meant.
        where.append(f"fire_at <= (SELECT {now(arguments.add(at))})")
    if filter.id is not None:
        names = namespaces if filter.namespace is None else (filter.namespace,)
        uuids = [timer_uuid(name, filter.id) for name in names]
        where.append(f"uuid = ANY ({arguments.add(uuids)}::bytea[])")
    return where
