"""The time of the next poll. A nudge brings it forward; a lost nudge makes timers late but loses none."""

from __future__ import annotations

import asyncio

from duetime.clock import Clock
from duetime.instants import EPOCH, Instant


class Alarm:
    def __init__(self, clock: Clock, *, interval_ms: int) -> None:
        self._clock = clock
        self._interval_ms = interval_ms
        self._at = EPOCH
        self._latest = 0.0
        self._nudged = asyncio.Event()

    def nudge(self, at: Instant) -> None:
        """Poll no later than ``at``: a timer falls due then."""
        if at < self._at:
            self._at = at
            self._nudged.set()

    def reset(self) -> None:
        """Called when a poll starts. The poll may miss anything nudged after this."""
        self._at = self._clock.now() + self._interval_ms
        self._latest = self._clock.monotonic() + self._interval_ms / 1000
        self._nudged.clear()

    async def wait(self) -> None:
        """Return at the earliest nudge since ``reset``, or one interval after ``reset``."""
        while (left_ms := self._at - self._clock.now()) > 0 and (left := self._latest - self._clock.monotonic()) > 0:
            await self._clock.sleep(min(left, left_ms / 1000), self._nudged)
            self._nudged.clear()
