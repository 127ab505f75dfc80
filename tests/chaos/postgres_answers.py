"""Recognizes PostgreSQL's responses.

The messages are those of the wire protocol, version 3: a letter, a length, the content. The shape of the rows, which
``stores/postgres/statements`` determines, tells which statement it was.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from duetime.model import Timer
from tests.chaos.answers import Answers

PUT_COLUMNS, RECORD_COLUMNS = 4, 2
BEGIN_COLUMNS = len(Timer.__struct_fields__) + 6

_HEAD = struct.Struct("!ci")
_SHORT, _LONG = struct.Struct("!h"), struct.Struct("!i")
_NUMBER = struct.Struct("!q")


def rows(piece: bytes) -> Iterator[list[bytes | None]]:
    """The complete rows in the data from the server."""
    place = 0
    while place + _HEAD.size <= len(piece):
        letter, length = _HEAD.unpack_from(piece, place)
        content = piece[place + _HEAD.size : place + 1 + length]
        if length < 4 or len(content) < length - 4:
            return
        if letter == b"D":
            yield _columns(content)
        place += 1 + length


def _columns(content: bytes) -> list[bytes | None]:
    (count,) = _SHORT.unpack_from(content)
    place, columns = _SHORT.size, list[bytes | None]()
    for _ in range(count):
        (length,) = _LONG.unpack_from(content, place)
        place += _LONG.size
        columns.append(None if length < 0 else content[place : place + length])
        place += max(0, length)
    return columns


def _counts(row: list[bytes | None], columns: int) -> bool:
    """Whether it is a row with this many columns whose first one, the number of written rows, is not zero."""
    number = row[0]
    return len(row) == columns and number is not None and len(number) == _NUMBER.size and number != bytes(_NUMBER.size)


def _is_put(piece: bytes) -> bool:
    return any(_counts(row, PUT_COLUMNS) for row in rows(piece))


def _is_record(piece: bytes) -> bool:
    return any(_counts(row, RECORD_COLUMNS) for row in rows(piece))


def _is_begin(piece: bytes) -> bool:
    """Whether attempts were begun: a begin that found nothing returns one row without a timer."""
    return any(len(row) == BEGIN_COLUMNS and row[0] is not None for row in rows(piece))


ANSWERS = Answers(_is_put, _is_begin, _is_record)
