"""The orders of a page in SQL: column, comparison and direction. Ties are ordered by ``seq``, the order of creation."""

from __future__ import annotations

from duetime.errors import InvalidCursor
from duetime.store import Cursor, Order

ORDERS = {
    Order.NEWEST: ("seq", "<", "DESC"),
    Order.SOONEST: ("execute_at", ">", "ASC"),
    Order.DUE: ("fire_at", ">", "ASC"),
    Order.DEADLINE: ("deadline_at", ">", "ASC"),
    Order.FINISHED: ("updated_at", "<", "DESC"),
}
START = {"<": (1 << 62, 1 << 62), ">": (-1, -1)}
"""A start position before all rows, as (value, seq), for each comparison."""


def seq_of(cursor: Cursor) -> int:
    """The ``seq`` in a cursor. Cursors come from clients, so the mark may be anything."""
    if isinstance(cursor.mark, str) or abs(cursor.mark) >= 1 << 62:
        raise InvalidCursor
    return cursor.mark
