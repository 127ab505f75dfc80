"""Cursors as text: they round-trip for the positions of every store."""

from __future__ import annotations

import pytest

from duetime.doors.http_v1_values import decode_cursor, encode_cursor
from duetime.errors import InvalidCursor
from duetime.model import Status
from duetime.store import Cursor, Filter, Order


@pytest.mark.parametrize("mark", [0, 7, 1 << 60, 1 << 80, "", "7", "01J9-\u00fc/+?="])
@pytest.mark.parametrize("value", [-1, 0, 1_800_000_000_000])
def test_a_cursor_round_trips(mark: int | str, value: int) -> None:
    place = Cursor(Order.DUE, value, mark)
    back = decode_cursor(encode_cursor(place), Filter(status=Status.PENDING))
    assert back == place and type(back.mark) is type(mark)


def test_a_cursor_of_another_sort_order_is_rejected() -> None:
    with pytest.raises(InvalidCursor, match=r"^cursor must be the nextCursor"):
        decode_cursor(encode_cursor(Cursor(Order.DUE, 1, "a")), Filter())
