"""The only module of the client that reads a clock. Everything else gets a ``Clock``, so tests can pass their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> int:
        """Milliseconds since the Unix epoch."""

    def monotonic(self) -> float:
        """Seconds that never run backwards; only differences have a meaning."""


class SystemClock:
    """The clock of the machine."""

    monotonic = staticmethod(time.monotonic)

    def now(self) -> int:
        return time.time_ns() // 1_000_000
