"""The only module that reads a clock. Everything else gets a ``Clock``."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from duetime.instants import Instant


class Clock(Protocol):
    def now(self) -> Instant:
        """Wall-clock milliseconds since the epoch, rounded down, so never ahead of the real time."""

    def monotonic(self) -> float:
        """Seconds that never go backwards; only differences have a meaning."""

    async def sleep(self, seconds: float, until: asyncio.Event | None = None) -> None:
        """Sleep for ``seconds`` of this clock, or until ``until`` is set."""


class SystemClock:
    """The machine's own clock."""

    monotonic = staticmethod(time.monotonic)

    def now(self) -> Instant:
        return Instant(time.time_ns() // 1_000_000)

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
    """A clock that is corrected from time to time. In between, it follows the monotonic clock, so a change of the
    machine's time does not affect it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.monotonic = clock.monotonic
        self.sleep = clock.sleep
        self.correct(0)

    def correct(self, offset_ms: int) -> None:
        """Set the offset: the underlying clock is ahead by ``offset_ms`` now."""
        monotonic_ms = self._clock.monotonic() * 1000
        # The added microsecond makes up for rounding errors of floats.
        self._ahead_ms = self._clock.now() - offset_ms - monotonic_ms + 0.001

    def now(self) -> Instant:
        return Instant(self.monotonic() * 1000 + self._ahead_ms)


class VirtualClock:
    """The machine's clock plus an offset that ``advance`` increases, so that tests can skip days."""

    def __init__(self) -> None:
        self._system = SystemClock()
        self._ahead_ms = 0
        self._sleepers: dict[asyncio.Timeout, float] = {}

    def now(self) -> Instant:
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
        """Move the time forward and wake every sleeper whose time has come."""
        self._ahead_ms += ms
        real = asyncio.get_running_loop().time()
        for timeout, wake_at in self._sleepers.items():
            if not timeout.expired():
                timeout.reschedule(real + max(0.0, wake_at - self.monotonic()))
