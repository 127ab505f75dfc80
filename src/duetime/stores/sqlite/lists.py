"""Lists of timers from SQLite. Each query is written so that only the intended index fits: a plus before a column keeps
SQLite from using an index for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

from duetime.model import Timer
from duetime.store import Cursor, Filter, Order, Page, Query
from duetime.stores.byte_budget import brief, fitting, in_parts
from duetime.stores.sql.columns import encode
from duetime.stores.sql.lists import LEADS, Condition, Index, conditions_of, index_of, order_of
from duetime.stores.sql.page_orders import ORDERS, START, seq_of
from duetime.stores.sqlite.namespaces import namespace_names
from duetime.stores.sqlite.rows import BYTES, Connection, select_chosen

_found_decoder = msgspec.json.Decoder(list[tuple[int, ...]])
_counts_decoder = msgspec.json.Decoder(list[int])


def page_by_offset(connection: Connection, query: Query) -> list[Timer]:
    """Return an offset page."""
    index, order = order_of(query)
    where, bindings = _where(conditions_of(Filter(namespace=query.namespace, status=query.status), ()), index)
    bindings |= {"limit": query.limit, "offset": query.offset}
    page = f"(SELECT seq, {BYTES} AS bytes FROM timers WHERE {where} ORDER BY {order} LIMIT :limit OFFSET :offset)"
    with connection:  # all parts from one snapshot
        found = connection.execute(f"SELECT json_group_array(json_array(seq, bytes)) FROM {page}", bindings).get
        seqs, sizes = _columns(_found_decoder.decode(found), 2)
        parts = (select_chosen(connection, part) for part in in_parts(seqs, sizes))
        return [brief(timer) if query.brief else timer for part in parts for timer in part]


def page(connection: Connection, filter: Filter, limit: int, after: Cursor | None) -> Page:
    """Return a page of the timers that match the filter. Finds their positions and sizes first, and then reads those
    that fit."""
    column, beyond, way = ORDERS[filter.order]
    value, seq = (after.value, seq_of(after)) if after is not None else START[beyond]
    with connection:  # both from one snapshot
        where, bindings = _scan(connection, filter)
        behind, order = f"({column}, seq) {beyond} (:value, :seq)", f"{column} {way}, seq {way}"
        if column == "seq":
            behind, order = f"{_plus(filter)}seq < :seq", f"{_plus(filter)}seq {way}"
        source = f"SELECT {column} AS place, seq, {BYTES} AS bytes FROM timers WHERE {behind} AND {where}"
        found = _found_decoder.decode(
            connection.execute(
                f"SELECT json_group_array(json_array(place, seq, bytes)) FROM ({source} ORDER BY {order} LIMIT :limit)",
                {**bindings, "value": value, "seq": seq, "limit": limit + 1},
            ).get
        )
        places, seqs, sizes = _columns(found, 3)
        count = fitting(sizes[:limit])
        timers = select_chosen(connection, seqs[:count])
    return Page(timers, Cursor(filter.order, places[count - 1], seqs[count - 1]) if count < len(found) else None)


def _columns(rows: list[tuple[int, ...]], width: int) -> list[tuple[int, ...]]:
    return list(zip(*rows, strict=True)) or [()] * width


def count(connection: Connection, filter: Filter, most: int) -> int:
    """Count the timers that match the filter, up to ``most``, by the same index as their page."""
    column, _, way = ORDERS[filter.order]
    with connection:
        where, bindings = _scan(connection, filter)
        source = f"SELECT 1 FROM timers WHERE {where} ORDER BY {_plus(filter)}{column} {way} LIMIT :most"
        found: int = connection.execute(f"SELECT count(*) FROM ({source})", {**bindings, "most": most}).get
    return found


def forecast(connection: Connection, bounds: Sequence[int], most: int) -> list[int]:
    """Count the pending timers that are due from each bound up to the next, each up to ``most``, in one statement."""
    due = "fire_at >= json_extract(value, '$[0]') AND fire_at < json_extract(value, '$[1]')"
    counted = f"SELECT count(*) FROM (SELECT 1 FROM timers WHERE status = 'pending' AND {due} LIMIT :most)"
    found = connection.execute(
        f"SELECT json_group_array(({counted})) FROM json_each(:spans)",
        {"spans": encode(list(pairwise(bounds))).decode(), "most": most},
    ).get
    return _counts_decoder.decode(found)


Scan = tuple[str, dict[str, Any]]
"""The conditions of an index scan, and their bindings."""


def _plus(filter: Filter) -> str:
    """A filter with an id uses the index on the key, whatever else it contains."""
    return "" if filter.id is None else "+"


def _scan(connection: Connection, filter: Filter) -> Scan:
    names = namespace_names(connection) if filter.id is not None and filter.namespace is None else ()
    where, bindings = _where(conditions_of(filter, names), index_of(filter))
    if filter.id is None and filter.order is Order.FINISHED and filter.namespace is not None:
        where += " AND status NOT IN ('pending', 'executing')"
    elif filter.id is None and filter.order in (Order.DUE, Order.DEADLINE, Order.FINISHED):
        where += f" AND status = '{filter.status}'"  # as a literal, or the planner would not use the partial index
    return where, bindings


def _where(conditions: Sequence[Condition], index: Index) -> Scan:
    where: list[str] = []
    bindings: dict[str, Any] = {}
    for number, (column, operator, value) in enumerate(conditions):
        name = f"value{number}"
        plus = "" if column in LEADS[index] or column == "status" else "+"
        if isinstance(value, list):
            where.append(f"{column} IN (SELECT unhex(value) FROM json_each(:{name}))")
            bindings[name] = encode([key.hex() for key in value]).decode()
        else:
            where.append(f"{plus}{column} {operator} :{name}")
            bindings[name] = value
    return " AND ".join(where) or "true", bindings
