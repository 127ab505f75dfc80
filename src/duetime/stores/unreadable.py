"""Rows that this program can't read: how they are told, what is said of them, and which namespaces they hold back.

A row outlives programs. It may be damaged, or a newer program wrote a value that this one does not know. Decoding many
rows at once is fast and fails as a whole; so whoever fails decodes them again one by one (docs/decisions/0026).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from duetime.errors import Quarantined
from duetime.model import Namespace, Status
from duetime.store import UNNAMED, About

log = logging.getLogger(__name__)

QUARANTINED = "quarantined"
"""The status of a timer that a begin could not read. It is no ``Status``: nobody but the stores knows it."""
STATUSES = tuple(status.value for status in Status)

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding a row raises that can't be read."""

_about = msgspec.json.Decoder(About).decode


def say_quarantined(namespace: str, id: str, reason: str) -> None:
    log.warning("timer %s/%s can't be read and is quarantined: %s", namespace, id, reason)


def timer_quarantined(namespace: str, id: str) -> Quarantined:
    return Quarantined(f"timer {namespace}/{id}")


def about_of(about: bytes) -> About:
    """What an instance says of itself; nothing if this program can't read it."""
    try:
        return _about(about)
    except UNREADABLE:
        return UNNAMED


class RowReader:
    """Reads all rows of namespaces, and remembers which of them can't be read: their timers are held back."""

    def __init__(self) -> None:
        self.unreadable: dict[str, str] = {}

    def read(self, rows: Iterable[tuple[str, Callable[[], Namespace]]]) -> list[Namespace]:
        """All of them: each by its name, with what decodes it."""
        found, unreadable = [], {}
        for name, decode in rows:
            try:
                found.append(decode())
            except UNREADABLE as error:
                unreadable[name] = str(error)
        for name in unreadable.keys() - self.unreadable.keys():
            log.warning("namespace %s can't be read, its timers are held back: %s", name, unreadable[name])
        self.unreadable = unreadable
        return found


def read_row(name: str, decode: Callable[[], Namespace]) -> Namespace:
    """One of them."""
    try:
        return decode()
    except UNREADABLE as error:
        raise Quarantined(f"namespace {name}") from error
