"""Lists of timers from PostgreSQL: which index serves which question, and where a page goes on.

What is asked of both tables is asked of each for a whole page, in the order of an index, and merged.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from duetime.model import Status, timer_uuid
from duetime.store import PAGE_BYTES_MAX, Filter, Order, Place, Query, Sort
from duetime.stores.orders import FIRST, ORDERS
from duetime.stores.postgres_rows import BYTES, TIMER
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
    """The keys of a page by number, in the order that the query names, and how large each timer is."""
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
        f"SELECT uuid, {BYTES} AS bytes, execute_at, seq FROM {table} WHERE {where} ORDER BY {order} "
        f"LIMIT {reach}::bigint"
        for table in _tables(query.status)
    ]
    return _merged(selects, order, f"LIMIT {limit} OFFSET {offset}"), arguments


def page(
    filter: Filter, limit: int, at: int | None, after: Place | None, namespaces: Collection[str] = ()
) -> Statement:
    """The timers of a page, each with its seq, and how many are on the page and right behind it. ``at`` is a virtual
    clock's time, ``namespaces`` are those in which a filter's id may be."""
    column, beyond, way = ORDERS[filter.order]
    arguments = _Arguments()
    value, seq = (arguments.add(n) for n in ((after.value, after.mark) if after is not None else FIRST[beyond]))
    mark = "seq"
    if filter.order is Order.NEWEST:
        column = _newest(filter)
        where, order = [f"{column} < {seq}::bigint AND {value}::bigint IS NOT NULL"], f"{column} {way}"
    else:
        if _ended_anywhere(filter):
            column, mark = f"{column} + 0", "seq + 0"
        where, order = (
            [f"({column}, {mark}) {beyond} ({value}::bigint, {seq}::bigint)"],
            f"{column} {way}, {mark} {way}",
        )
    conditions = " AND ".join(where + _conditions(filter, at, namespaces, arguments))
    size = f"LIMIT {arguments.add(limit + 1)}::bigint"
    found = _merged(_selects(filter, f"{TIMER}, seq", conditions, order, size), order, size)
    return (
        f"""SELECT * FROM (
            SELECT *, row_number() OVER in_order AS place, count(*) OVER () AS found,
                sum({BYTES}) OVER in_order - ({BYTES}) AS bytes_before
            FROM ({found}) AS found WINDOW in_order AS (ORDER BY {order} ROWS UNBOUNDED PRECEDING)
        ) AS counted WHERE bytes_before < {PAGE_BYTES_MAX} AND place <= {arguments.add(limit)} ORDER BY place""",
        arguments,
    )


def count(filter: Filter, most: int, at: int | None, namespaces: Collection[str] = ()) -> Statement:
    """How many timers the filter matches, at most ``most``: along the same index as its page."""
    column, _, way = ORDERS[filter.order]
    arguments = _Arguments()
    conditions = " AND ".join(_conditions(filter, at, namespaces, arguments)) or "true"
    order = f"{_newest(filter) if column == 'seq' else column}{' + 0' if _ended_anywhere(filter) else ''} {way}"
    size = f"LIMIT {arguments.add(most)}::bigint"
    union = " UNION ALL ".join(f"({select})" for select in _selects(filter, "1", conditions, order, size))
    counted = f"SELECT count(*) FROM (SELECT FROM ({union}) AS each {size}) AS counted"
    return counted, arguments


def _selects(filter: Filter, what: str, conditions: str, order: str, size: str) -> list[str]:
    """What to ask each table. Where the index is by namespace, what is asked of all is asked of each that may have it:
    of those whose first timer is among the first ones of all."""
    selects = []
    for table in _tables(filter.status):
        source = f"FROM {table} WHERE {conditions} ORDER BY {order}"
        if _by_namespace(filter) and filter.namespace is None:
            source = f"FROM {table} WHERE namespace = name AND {conditions} ORDER BY {order}"
            first = f"SELECT {order.partition(',')[0].rpartition(' ')[0]} AS head {source} LIMIT 1"
            way = order.rpartition(" ")[2]
            names = f"(SELECT name {_of_each('namespaces', first)} ORDER BY head {way} {size}) AS names"
            selects.append(f"SELECT each.* {_of_each(names, f'SELECT {what} {source} {size}')}")
        else:
            selects.append(f"SELECT {what} {source} {size}")
    return selects


def _of_each(names: str, select: str) -> str:
    return f"FROM {names} CROSS JOIN LATERAL ({select}) AS each"


_DUE = "SELECT FROM timers WHERE fire_at >= starts_at AND fire_at < ends_at"

# $1, $2: from when and up to when, $3: most, $4: now. What is not due yet is not executing: the index says it all.
FORECAST = f"""
    SELECT CASE WHEN starts_at > {now("$4")} THEN (SELECT count(*) FROM ({_DUE} LIMIT $3) AS due)
        ELSE (SELECT count(*) FROM ({_DUE} AND status = 'pending' LIMIT $3) AS due) END
    FROM unnest($1::bigint[], $2::bigint[]) WITH ORDINALITY AS spans (starts_at, ends_at, place) ORDER BY place
"""


def _newest(filter: Filter) -> str:
    """The order of creation. The few timers that an id can mean are found by their keys, and are in no order until they
    are sorted."""
    return "seq" if filter.id is None else "seq - 0"


def _by_namespace(filter: Filter) -> bool:
    """Whether the index that serves the filter begins with the namespace."""
    if filter.order is Order.NEWEST:
        return filter.correlation_id is None and filter.id is None
    return filter.order is Order.FINISHED and not _ended_anywhere(filter)


def _ended_anywhere(filter: Filter) -> bool:
    """Whether the index that serves the filter has those that failed or were canceled, of all namespaces."""
    return filter.order is Order.FINISHED and filter.namespace is None and filter.status is not Status.COMPLETED


def _conditions(filter: Filter, at: int | None, namespaces: Collection[str], arguments: _Arguments) -> list[str]:
    where = []
    by_namespace = _by_namespace(filter)
    # Nothing that is asked besides an id is worded as an index has it.
    correlation_id = "correlation_id = {}" if filter.id is None else "correlation_id IS NOT DISTINCT FROM {}"
    if _ended_anywhere(filter):
        return [f"status = '{filter.status}'"]  # spelled out, or the partial index would not be seen to fit
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
