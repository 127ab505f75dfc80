"""How much of a list of timers is read at a time: so many bytes, whatever the number of timers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from duetime.model import ABSENT, Timer
from duetime.store import PAGE_BYTES_MAX

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


def size_of(timer: Timer) -> int:
    """What a timer counts for: its definition and its attempts as they are stored. The rest is small."""
    return len(_encode(timer.definition)) + len(_encode(timer.attempts))


def fitting(sizes: Sequence[int], bytes_max: int = PAGE_BYTES_MAX) -> int:
    """How many of these come before the limit is reached, the one that reaches it included."""
    read = 0
    for count, size in enumerate(sizes):
        if read >= bytes_max:
            return count
        read += size
    return len(sizes)


def in_parts(keys: Sequence[T], sizes: Sequence[int]) -> Iterator[Sequence[T]]:
    """The keys of as many timers as may be read at a time, then of the next."""
    start = 0
    while start < len(keys):
        end = start + fitting(sizes[start:])
        yield keys[start:end]
        start = end


def brief(timer: Timer) -> Timer:
    """The timer for a list, without what may be large."""
    definition = msgspec.structs.replace(timer.definition, payload=ABSENT, metadata=ABSENT)
    return msgspec.structs.replace(timer, definition=definition)
