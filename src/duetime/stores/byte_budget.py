"""Byte limits for reading timers: a result holds a limited number of bytes, however many timers that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from duetime.model import ABSENT, Timer
from duetime.store import PAGE_BYTES_MAX

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


def size_of(timer: Timer) -> int:
    """The size of a timer for byte limits: its stored definition and attempts. The other fields are small."""
    return len(_encode(timer.definition)) + len(_encode(timer.attempts))


def fitting(sizes: Sequence[int], bytes_max: int = PAGE_BYTES_MAX) -> int:
    """How many of these fit within the limit, including the one that reaches it."""
    read = 0
    for count, size in enumerate(sizes):
        if read >= bytes_max:
            return count
        read += size
    return len(sizes)


def in_parts(keys: Sequence[T], sizes: Sequence[int], bytes_max: int = PAGE_BYTES_MAX) -> Iterator[Sequence[T]]:
    """Split the keys into parts, each of as many timers as may be read at once."""
    start = 0
    while start < len(keys):
        end = start + fitting(sizes[start:], bytes_max)
        yield keys[start:end]
        start = end


def brief(timer: Timer) -> Timer:
    """The timer without payload and metadata, which may be large."""
    definition = msgspec.structs.replace(timer.definition, payload=ABSENT, metadata=ABSENT)
    return msgspec.structs.replace(timer, definition=definition)
