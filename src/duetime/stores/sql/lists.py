"""The query behind a list: its tables, index and conditions. Each dialect turns them into SQL that makes its planner
scan this index and no other.

Where live and final timers are in separate tables, each table returns a whole page in index order, and the two results
are merged.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import NamedTuple

from duetime.model import Status, timer_uuid
from duetime.store import Filter, Order, Query, Sort


class Index(enum.StrEnum):
    """The indexes that lists use; each ends with the order of creation."""

    UUID = "uuid"
    CORRELATION_ID = "correlation_id"
    NAMESPACE = "namespace"
    EXECUTE_AT = "execute_at"
    DUE = "due"  # fire_at
    FINAL = "final"  # namespace, status, updated_at


LEADS = {
    Index.UUID: {"uuid"},
    Index.CORRELATION_ID: {"correlation_id"},
    Index.NAMESPACE: {"namespace"},
    Index.EXECUTE_AT: {"execute_at"},
    Index.DUE: {"fire_at"},
    Index.FINAL: {"namespace", "status"},
}
"""The columns of each index that conditions may use as they are. Conditions on other columns are written so that no
index can serve them; otherwise the planner might choose another index."""

_BY_ORDER = {
    Order.NEWEST: Index.NAMESPACE,
    Order.SOONEST: Index.EXECUTE_AT,
    Order.DUE: Index.DUE,
    Order.DEADLINE: Index.DUE,  # every executing timer was due
    Order.FINISHED: Index.FINAL,
}


def index_of(filter: Filter) -> Index:
    if filter.id is not None:
        return Index.UUID
    return Index.CORRELATION_ID if filter.correlation_id is not None else _BY_ORDER[filter.order]


class Condition(NamedTuple):
    column: str
    operator: str
    value: str | int | list[bytes]


def conditions_of(filter: Filter, names: Collection[str]) -> list[Condition]:
    """The conditions of a filter; ``names`` are the namespaces to search for the filter's id."""
    fields = [
        ("namespace", "=", filter.namespace),
        ("status", "=", filter.status and filter.status.value),
        ("correlation_id", "=", filter.correlation_id),
        ("execute_at", ">=", filter.execute_after),
        ("execute_at", "<", filter.execute_before),
    ]
    conditions = [Condition(column, operator, value) for column, operator, value in fields if value is not None]
    if filter.id is not None:
        meant = names if filter.namespace is None else (filter.namespace,)
        conditions.append(Condition("uuid", "IN", [timer_uuid(name, filter.id) for name in meant]))
    return conditions


def order_of(query: Query) -> tuple[Index, str]:
    """The index and the ORDER BY of an offset page."""
    direction = "DESC" if query.descending else "ASC"
    if query.sort is Sort.CREATED_AT:
        return Index.NAMESPACE, f"seq {direction}"
    return Index.EXECUTE_AT, f"execute_at {direction}, seq {direction}"


def tables_of(status: Status | None) -> tuple[str, ...]:
    if status is None:
        return "timers", "history"
    return ("history",) if status.final else ("timers",)


def merged(selects: Sequence[str], order: str, rest: str) -> str:
    union = " UNION ALL ".join(f"({select})" for select in selects)
    return f"SELECT * FROM ({union}) AS merged ORDER BY {order} {rest}"
