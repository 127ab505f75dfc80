"""What PostgreSQL's answers are about: rules for the proxy that cut a connection after a commit and before its answer.

The messages are those of the wire protocol, version 3: a letter, a length, the content. What a statement was is told by
the shape of its rows, which ``postgres_statements`` gives them; a rule that meets nothing makes its scenario fail, so
that a change of that shape does not go unnoticed.
"""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Callable, Iterator

from duetime.model import Timer

PUT_COLUMNS, RECORD_COLUMNS = 4, 2
BEGIN_COLUMNS = len(Timer.__struct_fields__) + 6

_HEAD = struct.Struct("!ci")
_SHORT, _LONG = struct.Struct("!h"), struct.Struct("!i")
_NUMBER = struct.Struct("!q")


def rows(piece: bytes) -> Iterator[list[bytes | None]]:
    """The rows that are whole in what the server sent."""
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
    """Whether it is a row of so many columns that begins with how many were written, and some were."""
    number = row[0]
    return len(row) == columns and number is not None and len(number) == _NUMBER.size and number != bytes(_NUMBER.size)


def is_put(piece: bytes) -> bool:
    return any(_counts(row, PUT_COLUMNS) for row in rows(piece))


def is_record(piece: bytes) -> bool:
    return any(_counts(row, RECORD_COLUMNS) for row in rows(piece))


def is_begin(piece: bytes) -> bool:
    """Whether attempts were begun: a begin that found nothing answers with one row that is of no timer."""
    return any(len(row) == BEGIN_COLUMNS and row[0] is not None for row in rows(piece))


class Cutting:
    """A rule of the proxy: cuts some of the answers of one kind, drawn, until it has cut ``times``."""

    def __init__(
        self,
        is_wanted: Callable[[bytes], bool],
        *,
        share: float,
        times: int,
        draw: random.Random,
        on_cut: Callable[[], None] = lambda: None,
    ) -> None:
        self._is_wanted = is_wanted
        self._share = share
        self._times = times
        self._draw = draw
        self._on_cut = on_cut
        self.seen = 0
        self.cuts = 0
        self.done = threading.Event()

    def __call__(self, piece: bytes) -> bool:
        if self.cuts >= self._times or not self._is_wanted(piece):
            return False
        self.seen += 1
        if self._draw.random() >= self._share:
            return False
        self.cuts += 1
        self._on_cut()
        if self.cuts >= self._times:
            self.done.set()
        return True
