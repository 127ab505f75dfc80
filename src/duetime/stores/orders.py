"""The orders of a page as SQL has them: by which column, and which way. Behind it, seq: the order of creation."""

from __future__ import annotations

from duetime.store import Order

ORDERS = {
    Order.NEWEST: ("seq", "<", "DESC"),
    Order.SOONEST: ("execute_at", ">", "ASC"),
    Order.DUE: ("fire_at", ">", "ASC"),
    Order.DEADLINE: ("deadline_at", ">", "ASC"),
    Order.FINISHED: ("updated_at", "<", "DESC"),
}
FIRST = {"<": (1 << 62, 1 << 62), ">": (-1, -1)}
"""A place before all others, the value of the column and the seq, for each way."""
