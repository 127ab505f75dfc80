"""Timeouts of many requests on one timer of the event loop."""

from __future__ import annotations

import asyncio
from heapq import heappop, heappush
from typing import Protocol

TICKS_PER_SECOND = 64


class Limited(Protocol):
    def expire(self) -> None:
        """Called at the deadline, unless it left its bucket before."""


Bucket = set[Limited]


class Deadlines:
    """The timeouts of all current requests, on one timer of the event loop.

    Nearly every request ends long before its deadline, and a timer of its own would cost as much as signing it. So
    deadlines within the same 1/64 s share a bucket: a timeout may come that much late, but never early. The timer is
    set for the earliest bucket that is not empty.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, Bucket] = {}
        self._ticks: list[int] = []  # a heap of the keys of _buckets
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_tick = 0

    def enter(self, limited: Limited, until: float, loop: asyncio.AbstractEventLoop) -> Bucket:
        """Add a deadline and return its bucket; the caller leaves the bucket with ``discard`` when done in time."""
        tick = int(until * TICKS_PER_SECOND) + 1
        bucket = self._buckets.get(tick)
        if bucket is None:
            bucket = self._buckets[tick] = set()
            heappush(self._ticks, tick)
        if self._alarm is None or tick < self._alarm_tick:
            self._set_alarm(tick, loop)
        bucket.add(limited)
        return bucket

    def _set_alarm(self, tick: int, loop: asyncio.AbstractEventLoop) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_tick = tick
        self._alarm = loop.call_at(tick / TICKS_PER_SECOND, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._alarm = None
        now = loop.time() * TICKS_PER_SECOND
        while self._ticks:
            tick = self._ticks[0]
            bucket = self._buckets[tick]
            if bucket and tick > now:
                self._set_alarm(tick, loop)
                return
            heappop(self._ticks)
            del self._buckets[tick]
            for limited in tuple(bucket):  # a copy: each one leaves the bucket
                limited.expire()

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
