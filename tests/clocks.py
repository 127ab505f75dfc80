"""Clocks for tests: time stands still until it is moved, so a day costs nothing and nothing depends on the machine."""

from __future__ import annotations

import asyncio
import math

START = 1_800_000_000_000


class ManualClock:
    """A clock that moves only when ``advance`` says so. Sleepers wake when the hands have passed them."""

    def __init__(self, now: int = START) -> None:
        self._start = now
        self._now = now
        self._sleepers: dict[asyncio.Event, int] = {}

    def now(self) -> int:
        return self._now

    def monotonic(self) -> float:
        return (self._now - self._start) / 1000

    async def sleep(self, seconds: float, until: asyncio.Event | None = None) -> None:
        woken = asyncio.Event()
        self._sleepers[woken] = self._now + math.ceil(seconds * 1000)
        try:
            if seconds <= 0:
                await asyncio.sleep(0)  # Others get their turn, as with a real clock.
            elif until is None:
                await woken.wait()
            else:
                await _first(woken, until)
        finally:
            del self._sleepers[woken]

    def advance(self, ms: int) -> None:
        """Move time forward and wake whoever slept until an instant that is now past."""
        self._now += ms
        for woken, wake_at in self._sleepers.items():
            if wake_at <= self._now:
                woken.set()

    def next_wake_at(self) -> int | None:
        """The earliest instant that somebody sleeps until: how far to advance when there is nothing else to do."""
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
