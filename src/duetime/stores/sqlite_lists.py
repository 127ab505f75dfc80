"""Lists of timers from SQLite: which index serves which question, and where a page goes on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

from duetime.model import Status, Timer, timer_uuid
from duetime.store import Filter, Order, Page, Place, Query, Sort
from duetime.stores.budget import brief, fitting, in_parts
from duetime.stores.orders import FIRST, ORDERS
from duetime.stores.sqlite_namespaces import namespace_names
from duetime.stores.sqlite_rows import BYTES, Connection, encode, select_chosen

_found_decoder = msgspec.json.Decoder(list[tuple[int, ...]])
_counts_decoder = msgspec.json.Decoder(list[int])


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
    page = f"(SELECT seq, {BYTES} AS bytes FROM timers WHERE {where} ORDER BY {order} LIMIT :limit OFFSET :offset)"
    with connection:  # one moment for all parts
        found = connection.execute(f"SELECT json_group_array(json_array(seq, bytes)) FROM {page}", bindings).get
        seqs, sizes = _columns(_found_decoder.decode(found), 2)
        parts = (select_chosen(connection, part) for part in in_parts(seqs, sizes))
        return [brief(timer) if query.brief else timer for part in parts for timer in part]


def page(connection: Connection, filter: Filter, limit: int, after: Place | None) -> Page:
    """A page of what the filter matches, in its order. It finds the places of the timers first, and how large each is,
    and then reads those that fit."""
    column, beyond, way = ORDERS[filter.order]
    value, seq = (after.value, after.mark) if after is not None else FIRST[beyond]
    with connection:  # one moment for both
        where, bindings = _walk(connection, filter)
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
    return Page(timers, Place(filter.order, places[count - 1], seqs[count - 1]) if count < len(found) else None)


def _columns(rows: list[tuple[int, ...]], width: int) -> list[tuple[int, ...]]:
    return list(zip(*rows, strict=True)) or [()] * width


def count(connection: Connection, filter: Filter, most: int) -> int:
    """How many timers the filter matches, at most ``most``: along the same index as its page."""
    column, _, way = ORDERS[filter.order]
    with connection:
        where, bindings = _walk(connection, filter)
        source = f"SELECT 1 FROM timers WHERE {where} ORDER BY {_plus(filter)}{column} {way} LIMIT :most"
        found: int = connection.execute(f"SELECT count(*) FROM ({source})", {**bindings, "most": most}).get
    return found


def forecast(connection: Connection, bounds: Sequence[int], most: int) -> list[int]:
    """How many pending timers are due from each bound up to the next, each at most ``most``, in one statement."""
    due = "fire_at >= json_extract(value, '$[0]') AND fire_at < json_extract(value, '$[1]')"
    counted = f"SELECT count(*) FROM (SELECT 1 FROM timers WHERE status = 'pending' AND {due} LIMIT :most)"
    found = connection.execute(
        f"SELECT json_group_array(({counted})) FROM json_each(:spans)",
        {"spans": encode(list(pairwise(bounds))).decode(), "most": most},
    ).get
    return _counts_decoder.decode(found)


Walk = tuple[str, dict[str, Any]]
"""The conditions of a walk along an index, and their bindings."""


def _plus(filter: Filter) -> str:
    """Before a column, it keeps SQLite from going by it: an id is looked up by its keys, whatever else is asked."""
    return "" if filter.id is None else "+"


def _walk(connection: Connection, filter: Filter) -> Walk:
    conditions: list[str] = []
    bindings: dict[str, Any] = {}
    plus = _plus(filter)
    # Nor is the namespace gone by where the order is another index's: it would all have to be sorted.
    by_namespace = filter.order is Order.FINISHED or (filter.order is Order.NEWEST and filter.correlation_id is None)
    for name, asked, condition in (
        ("namespace", filter.namespace, f"{plus if by_namespace else '+'}namespace = :namespace"),
        ("status", filter.status, "status = :status"),
        ("correlation_id", filter.correlation_id, f"{plus}correlation_id = :correlation_id"),
        ("after", filter.execute_after, f"{plus}execute_at >= :after"),
        ("before", filter.execute_before, f"{plus}execute_at < :before"),
    ):
        if asked is not None:
            conditions.append(condition)
            bindings[name] = str(asked) if isinstance(asked, Status) else asked
    if filter.order is Order.FINISHED and filter.namespace is not None:
        conditions.append("status NOT IN ('pending', 'executing')")
    elif filter.order in (Order.DUE, Order.DEADLINE, Order.FINISHED):
        conditions.append(f"status = '{filter.status}'")  # spelled out, or the partial index would not be seen to fit
    if filter.id is not None:
        names = namespace_names(connection) if filter.namespace is None else (filter.namespace,)
        bindings["uuids"] = encode([timer_uuid(name, filter.id).hex() for name in names]).decode()
        conditions.append("uuid IN (SELECT unhex(value) FROM json_each(:uuids))")
    return " AND ".join(conditions) or "true", bindings
