"""Lists of timers from SQLite: which index serves which question, and where a page goes on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from duetime.model import Status, Timer, timer_uuid
from duetime.store import Filter, Order, Page, Place, Query, Sort
from duetime.stores.orders import FIRST, ORDERS
from duetime.stores.sqlite_rows import Connection, encode, select, select_with_seq

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
    page = f"(SELECT * FROM timers WHERE {where} ORDER BY {order} LIMIT :limit OFFSET :offset)"
    return select(connection, page, bindings)


def page(connection: Connection, filter: Filter, limit: int, after: Place | None, namespaces: Collection[str]) -> Page:
    """A page of what the filter matches, in its order; ``namespaces`` are all there are."""
    column, beyond, _ = ORDERS[filter.order]

    def place(row: tuple[Timer, int]) -> tuple[int, int]:
        timer, seq = row
        return seq if column == "seq" else getattr(timer, column), seq

    walks = _walks(filter, namespaces)
    with connection:  # one moment for all of them
        found = [row for walk in walks for row in _page_rows(connection, filter, walk, limit, after)]
    if len(walks) > 1:
        found.sort(key=place, reverse=beyond == "<")
    timers = [timer for timer, _ in found[:limit]]
    return Page(timers, Place(filter.order, *place(found[limit - 1])) if len(found) > limit else None)


def count(connection: Connection, filter: Filter, most: int, namespaces: Collection[str]) -> int:
    """How many timers the filter matches, at most ``most``: along the same indexes as its page."""
    column, _, way = ORDERS[filter.order]
    found = 0
    with connection:
        for where, bindings in _walks(filter, namespaces):
            source = f"SELECT 1 FROM timers WHERE {where} ORDER BY {_plus(filter)}{column} {way} LIMIT :left"
            found += connection.execute(f"SELECT count(*) FROM ({source})", {**bindings, "left": most - found}).get
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


def _walks(filter: Filter, namespaces: Collection[str]) -> list[Walk]:
    """What is walked along, to be merged: the index of final timers is by namespace."""
    if filter.order is Order.FINISHED and filter.namespace is None:
        return [_walk(filter, name, ()) for name in namespaces]
    return [_walk(filter, filter.namespace, namespaces)]


def _walk(filter: Filter, namespace: str | None, namespaces: Collection[str]) -> Walk:
    conditions: list[str] = []
    bindings: dict[str, Any] = {}
    plus = _plus(filter)
    # Nor is the namespace gone by where the order is another index's: it would all have to be sorted.
    by_namespace = filter.order is Order.FINISHED or (filter.order is Order.NEWEST and filter.correlation_id is None)
    for name, asked, condition in (
        ("namespace", namespace, f"{plus if by_namespace else '+'}namespace = :namespace"),
        ("status", filter.status, "status = :status"),
        ("correlation_id", filter.correlation_id, f"{plus}correlation_id = :correlation_id"),
        ("after", filter.execute_after, f"{plus}execute_at >= :after"),
        ("before", filter.execute_before, f"{plus}execute_at < :before"),
    ):
        if asked is not None:
            conditions.append(condition)
            bindings[name] = str(asked) if isinstance(asked, Status) else asked
    if filter.order in (Order.DUE, Order.DEADLINE):
        conditions.append(f"status = '{filter.status}'")  # spelled out, or the partial index would not be seen to fit
    elif filter.order is Order.FINISHED:
        conditions.append("status NOT IN ('pending', 'executing')")
    if filter.id is not None:
        names = namespaces if namespace is None else (namespace,)
        bindings["uuids"] = encode([timer_uuid(name, filter.id).hex() for name in names]).decode()
        conditions.append("uuid IN (SELECT unhex(value) FROM json_each(:uuids))")
    return " AND ".join(conditions) or "true", bindings


def _page_rows(
    connection: Connection, filter: Filter, walk: Walk, limit: int, after: Place | None
) -> list[tuple[Timer, int]]:
    """One timer more than the page has room for, each with its rowid."""
    column, beyond, way = ORDERS[filter.order]
    value, seq = (after.value, after.mark) if after is not None else FIRST[beyond]
    where, bindings = walk
    behind, order = f"({column}, seq) {beyond} (:value, :seq)", f"{column} {way}, seq {way}"
    if column == "seq":
        behind, order = f"{_plus(filter)}seq < :seq", f"{_plus(filter)}seq {way}"
    source = f"(SELECT * FROM timers WHERE {behind} AND {where} ORDER BY {order} LIMIT :limit)"
    return select_with_seq(connection, source, {**bindings, "value": value, "seq": seq, "limit": limit + 1})
