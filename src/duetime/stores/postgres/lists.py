"""Lists of timers from PostgreSQL. Each query is written so that only the intended index fits."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from duetime.model import Status
from duetime.store import PAGE_BYTES_MAX, Cursor, Filter, Order, Query
from duetime.stores.postgres.rows import BYTES
from duetime.stores.postgres.statements import now
from duetime.stores.sql.columns import TIMER
from duetime.stores.sql.lists import LEADS, Condition, Index, conditions_of, index_of, merged, order_of, tables_of
from duetime.stores.sql.page_orders import ORDERS, START, seq_of

Statement = tuple[str, list[Any]]


class _Arguments(list[Any]):
    def add(self, value: object) -> str:
        self.append(value)
        return f"${len(self)}"


def page_by_offset(query: Query) -> Statement:
    """The query for the keys and sizes of the timers on an offset page."""
    index, order = order_of(query)
    arguments = _Arguments()
    conditions = conditions_of(Filter(namespace=query.namespace, status=query.status), ())
    where = " AND ".join(_condition(condition, index, arguments) for condition in conditions)
    reach, limit, offset = (arguments.add(n) for n in (query.offset + query.limit, query.limit, query.offset))
    selects = [
        f"SELECT uuid, {BYTES} AS bytes, execute_at, seq FROM {table} WHERE {where} ORDER BY {order} "
        f"LIMIT {reach}::bigint"
        for table in tables_of(query.status)
    ]
    return merged(selects, order, f"LIMIT {limit} OFFSET {offset}"), arguments


def page(
    filter: Filter, limit: int, at: int | None, after: Cursor | None, namespaces: Collection[str] = ()
) -> Statement:
    """The query for the timers of a page, each with its seq and with the number of rows found, one of which may be
    beyond the page. ``at`` is the time of a virtual clock; ``namespaces`` are searched for the filter's id."""
    column, beyond, way = ORDERS[filter.order]
    arguments = _Arguments()
    value, seq = (arguments.add(n) for n in ((after.value, seq_of(after)) if after is not None else START[beyond]))
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
    found = merged(_selects(filter, f"{TIMER}, seq", conditions, order, size), order, size)
    return (
        f"""SELECT * FROM (
            SELECT *, row_number() OVER in_order AS place, count(*) OVER () AS found,
                sum({BYTES}) OVER in_order - ({BYTES}) AS bytes_before
            FROM ({found}) AS found WINDOW in_order AS (ORDER BY {order} ROWS UNBOUNDED PRECEDING)
        ) AS counted WHERE bytes_before < {PAGE_BYTES_MAX} AND place <= {arguments.add(limit)} ORDER BY place""",
        arguments,
    )


def count(filter: Filter, most: int, at: int | None, namespaces: Collection[str] = ()) -> Statement:
    """The query for the number of timers that match, up to ``most``, by the same index as their page."""
    column, _, way = ORDERS[filter.order]
    arguments = _Arguments()
    conditions = " AND ".join(_conditions(filter, at, namespaces, arguments)) or "true"
    order = f"{_newest(filter) if column == 'seq' else column}{' + 0' if _ended_anywhere(filter) else ''} {way}"
    size = f"LIMIT {arguments.add(most)}::bigint"
    union = " UNION ALL ".join(f"({select})" for select in _selects(filter, "1", conditions, order, size))
    counted = f"SELECT count(*) FROM (SELECT FROM ({union}) AS each {size}) AS counted"
    return counted, arguments


def _selects(filter: Filter, what: str, conditions: str, order: str, size: str) -> list[str]:
    """One SELECT per table. If the index starts with the namespace and the filter names none, the SELECT runs for each
    namespace that may contribute: those whose first timer is among the first ones overall."""
    selects = []
    for table in tables_of(filter.status):
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

# $1, $2: start and end of each span, $3: most, $4: now. Timers that are not yet due can't be executing, so for later
# spans the index alone gives the count.
FORECAST = f"""
    SELECT CASE WHEN starts_at > {now("$4")} THEN (SELECT count(*) FROM ({_DUE} LIMIT $3) AS due)
        ELSE (SELECT count(*) FROM ({_DUE} AND status = 'pending' LIMIT $3) AS due) END
    FROM unnest($1::bigint[], $2::bigint[]) WITH ORDINALITY AS spans (starts_at, ends_at, place) ORDER BY place
"""


def _newest(filter: Filter) -> str:
    """The column for the order of creation. The few timers with a given id are found by their keys and then sorted; the
    expression keeps the planner from using an index for this order."""
    return "seq" if filter.id is None else "seq - 0"


def _by_namespace(filter: Filter) -> bool:
    """Whether the index for the filter starts with the namespace."""
    return "namespace" in LEADS[index_of(filter)] and not _ended_anywhere(filter)


def _ended_anywhere(filter: Filter) -> bool:
    """Whether the index for the filter is the one of failed and canceled timers of all namespaces."""
    anywhere = index_of(filter) is Index.FINAL and filter.namespace is None
    return anywhere and filter.status is not Status.COMPLETED


def _conditions(filter: Filter, at: int | None, namespaces: Collection[str], arguments: _Arguments) -> list[str]:
    if _ended_anywhere(filter):
        return [f"status = '{filter.status}'"]  # as a literal, or the planner would not use the partial index
    index = index_of(filter)
    where = [_condition(condition, index, arguments) for condition in conditions_of(filter, namespaces)]
    if filter.order is Order.DEADLINE:
        where.append(f"fire_at <= (SELECT {now(arguments.add(at))})")
    return where


def _condition(condition: Condition, index: Index, arguments: _Arguments) -> str:
    """Conditions on columns that do not lead the index are written so that no index can serve them."""
    column, operator, value = condition
    if isinstance(value, list):
        return f"{column} = ANY ({arguments.add(value)}::bytea[])"
    if column not in LEADS[index]:
        column, operator = (column, "IS NOT DISTINCT FROM") if operator == "=" else (f"{column} + 0", operator)
    return f"{column} {operator} {arguments.add(value)}"
