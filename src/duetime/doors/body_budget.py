"""Limits the memory of all request bodies together."""

from __future__ import annotations

BODIES_BYTES_MAX = 64 * 1024 * 1024
SMALL_BYTES_MAX = 64 * 1024
"""Bodies up to this size may use the reserved part of the budget."""
RESERVED_PART = 8
"""One in this many bytes of the budget is reserved for small bodies."""


class BodyBudget:
    """The bytes in memory. Each body takes its bytes as they arrive; its request returns them when it is answered."""

    __slots__ = ("_bytes_max", "_large_max", "held")

    def __init__(self, bytes_max: int) -> None:
        self.held = 0
        self._bytes_max = bytes_max
        self._large_max = bytes_max - bytes_max // RESERVED_PART

    def has_room(self, more: int, size: int) -> bool:
        """Whether ``more`` bytes fit, of a body that then has ``size`` bytes."""
        return self.held + more <= (self._bytes_max if size <= SMALL_BYTES_MAX else self._large_max)

    def take(self, more: int, size: int) -> bool:
        """Take ``more`` bytes if they fit; returns whether they do."""
        held = self.held + more
        if held > (self._bytes_max if size <= SMALL_BYTES_MAX else self._large_max):
            return False
        self.held = held
        return True
