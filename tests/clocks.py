"""Clocks for tests: the time moves only by hand, so skipping a day takes no time and results are deterministic."""

from __future__ import annotations

import asyncio
import math

from duetime.instants import CreatedAt, ExecuteAt, FireAt, Instant

START = Instant(1_800_000_000_000)


def all_at(at: int) -> tuple[ExecuteAt, FireAt, CreatedAt, Instant]:
    """The first four instants of a timer, all equal."""
    return ExecuteAt(at), FireAt(at), CreatedAt(at), Instant(at)


class ManualClock:
    """A clock that moves only with ``advance``, which wakes the sleepers whose time has come."""

    def __init__(self, now: Instant = START) -> None:
        self._start = now
        self._now = now
        self._sleepers: dict[asyncio.Event, Instant] = {}

    def now(self) -> Instant:
        return self._now

    def monotonic(self) -> float:
        return (self._now - self._start) / 1000

    async def sleep(self, seconds: float, until: asyncio.Event | None = None) -> None:
        woken = asyncio.Event()
        self._sleepers[woken] = self._now + math.ceil(seconds * 1000)
        try:
            if seconds <= 0:
                await asyncio.sleep(0)  # Let other tasks run, as with a real clock.
            elif until is None:
                await woken.wait()
            else:
                await _first(woken, until)
        finally:
            del self._sleepers[woken]

    def advance(self, ms: int) -> None:
        """Move the time forward and wake every sleeper whose time has come."""
        self._now += ms
        for woken, wake_at in self._sleepers.items():
            if wake_at <= self._now:
                woken.set()

    def next_wake_at(self) -> Instant | None:
        """The earliest wake-up time of all sleepers: how far to advance when nothing else is left to do."""
        return min((at for woken, at in self._sleepers.items() if not woken.is_set()), default=None)


async def _first(*events: asyncio.Event) -> None:
    """Return as soon as one of the events is set."""
    if any(event.is_set() for event in events):
        return
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
