"""Rows that this program can't read: detecting and reporting them, and holding back unreadable namespaces.

A row may be damaged, or a newer version may have written a value that this one does not know. Decoding many rows at
once is fast but fails as a whole; after a failure the rows are decoded again one by one (docs/decisions/0026).
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
"""The stored status of a timer that a begin could not read. It is internal to the stores and not part of ``Status``."""
STATUSES = tuple(status.value for status in Status)

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The exceptions of decoding an unreadable row."""

_about = msgspec.json.Decoder(About).decode


def log_quarantined(namespace: str, id: str, reason: str) -> None:
    log.warning("timer %s/%s can't be read and is quarantined: %s", namespace, id, reason)


def timer_quarantined(namespace: str, id: str) -> Quarantined:
    return Quarantined(f"timer {namespace}/{id}")


def about_of(about: bytes) -> About:
    """Decode what an instance reports about itself; ``UNNAMED`` if this program can't read it."""
    try:
        return _about(about)
    except UNREADABLE:
        return UNNAMED


class RowReader:
    """Decodes the rows of all namespaces, and remembers the unreadable ones, whose timers are held back."""

    def __init__(self) -> None:
        self.unreadable: dict[str, str] = {}

    def read(self, rows: Iterable[tuple[str, Callable[[], Namespace]]]) -> list[Namespace]:
        """Decode all rows, given as (name, decode)."""
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
    """Decode one row; raise ``Quarantined`` if it can't be read."""
    try:
        return decode()
    except UNREADABLE as error:
        raise Quarantined(f"namespace {name}") from error
