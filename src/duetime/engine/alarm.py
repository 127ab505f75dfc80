"""When to look next. A nudge brings the look forward; losing one costs lateness, never a timer."""

from __future__ import annotations

import asyncio

from duetime.clock import Clock


class Alarm:
    def __init__(self, clock: Clock, *, interval_ms: int) -> None:
        self._clock = clock
        self._interval_ms = interval_ms
        self._at = 0
        self._latest = 0.0
        self._nudged = asyncio.Event()

    def nudge(self, at: int) -> None:
        """Something falls due at ``at``: look by then."""
        if at < self._at:
            self._at = at
            self._nudged.set()

    def reset(self) -> None:
        """A look starts: what is nudged from here on may not be part of what it sees."""
        self._at = self._clock.now() + self._interval_ms
        self._latest = self._clock.monotonic() + self._interval_ms / 1000
        self._nudged.clear()

    async def ring(self) -> None:
        """Return at the earliest of the nudges since ``reset``, and no later than one interval after it."""
        while (left_ms := self._at - self._clock.now()) > 0 and (left := self._latest - self._clock.monotonic()) > 0:
            await self._clock.sleep(min(left, left_ms / 1000), self._nudged)
            self._nudged.clear()
