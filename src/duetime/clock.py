"""The one place that reads a clock. Everything else is handed a ``Clock``."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> int:
        """Wall-clock milliseconds since the epoch, rounded down: an instant that was reached is never ahead of it."""

    def monotonic(self) -> float:
        """Seconds that never run backwards; only differences mean anything."""

    async def sleep(self, seconds: float, until: asyncio.Event | None = None) -> None:
        """Return after ``seconds`` of this clock, or as soon as ``until`` is set."""


class SystemClock:
    """The machine's own clock."""

    monotonic = staticmethod(time.monotonic)

    def now(self) -> int:
        return time.time_ns() // 1_000_000

    async def sleep(self, seconds: float, until: asyncio.Event | None = None) -> None:
        if until is None:
            await asyncio.sleep(seconds)
            return
        try:
            async with asyncio.timeout(seconds):
                await until.wait()
        except TimeoutError:
            pass


class CorrectedClock:
    """Another clock, put right now and then by somebody who knows better; in between it goes by the monotonic clock, so
    that it does not follow when the machine's is set to another time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.monotonic = clock.monotonic
        self.sleep = clock.sleep
        self.correct(0)

    def correct(self, offset_ms: int) -> None:
        """The other clock is ahead by so much now."""
        monotonic_ms = self._clock.monotonic() * 1000
        # A microsecond makes up for what a float loses.
        self._ahead_ms = self._clock.now() - offset_ms - monotonic_ms + 0.001

    def now(self) -> int:
        return int(self.monotonic() * 1000 + self._ahead_ms)


class VirtualClock:
    """A clock that runs like the machine's and can be moved forward by hand, so that "in three days" is now."""

    def __init__(self) -> None:
        self._system = SystemClock()
        self._ahead_ms = 0
        self._sleepers: dict[asyncio.Timeout, float] = {}

    def now(self) -> int:
        return self._system.now() + self._ahead_ms

    def monotonic(self) -> float:
        return self._system.monotonic() + self._ahead_ms / 1000

    async def sleep(self, seconds: float, until: asyncio.Event | None = None) -> None:
        timeout = asyncio.timeout(seconds)
        self._sleepers[timeout] = self.monotonic() + seconds
        try:
            async with timeout:
                await (until or asyncio.Event()).wait()
        except TimeoutError:
            pass
        finally:
            del self._sleepers[timeout]

    def advance(self, ms: int) -> None:
        """Move time forward and wake whoever slept until an instant that is now past."""
        self._ahead_ms += ms
        real = asyncio.get_running_loop().time()
        for timeout, wake_at in self._sleepers.items():
            if not timeout.expired():
                timeout.reschedule(real + max(0.0, wake_at - self.monotonic()))
