"""How much memory request bodies may take, all of them together."""

from __future__ import annotations

BODIES_BYTES_MAX = 64 * 1024 * 1024
SMALL_BYTES_MAX = 64 * 1024
"""Up to this size a body may use the part of the budget that is reserved for small ones."""
RESERVED_PART = 8
"""One part in so many is reserved for small bodies."""


class Budget:
    """Bytes in memory. Each body takes its bytes as they come; its request gives them back when it is over."""

    __slots__ = ("_bytes_max", "_large_max", "held")

    def __init__(self, bytes_max: int) -> None:
        self.held = 0
        self._bytes_max = bytes_max
        self._large_max = bytes_max - bytes_max // RESERVED_PART

    def has_room(self, more: int, size: int) -> bool:
        """Whether ``more`` bytes fit, of a body that has ``size`` bytes with them."""
        return self.held + more <= (self._bytes_max if size <= SMALL_BYTES_MAX else self._large_max)

    def take(self, more: int, size: int) -> bool:
        """``has_room``, and take them if so."""
        held = self.held + more
        if held > (self._bytes_max if size <= SMALL_BYTES_MAX else self._large_max):
            return False
        self.held = held
        return True
