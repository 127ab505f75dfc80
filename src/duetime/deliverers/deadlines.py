"""Time limits for many attempts on one timer of the event loop."""

from __future__ import annotations

import asyncio
from heapq import heappop, heappush
from typing import Any

from msgspec import Struct

TICKS_PER_SECOND = 64


class Deadline(Struct, eq=False):
    """The time limit of one attempt. Past it the running task is canceled, once.

    Whoever else cancels the task meanwhile is heard: ``reached`` is true only when the limit was the one and only
    reason. That is what ``asyncio.timeout`` does; this one shares its timers.
    """

    _task: asyncio.Task[Any]
    _requests: int  # to cancel the task, before this one
    _bucket: set[Deadline]
    _expired: bool = False

    def expire(self) -> None:
        self._expired = True
        self._task.cancel()

    def reached(self) -> bool:
        """Asked after a cancellation; takes it back when it was ours."""
        if not self._expired:
            return False
        self._expired = False
        return self._task.uncancel() <= self._requests

    def lift(self) -> None:
        self._bucket.discard(self)


class Deadlines:
    """The time limits of all attempts under way, on one timer of the event loop.

    Nearly every limit is lifted long before it is reached, and setting and clearing a timer for each cost as much as
    signing the request. So limits that fall into the same 1/64 s share a bucket: one may come that much late, never
    early. The timer is set for the earliest bucket that has anything in it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._buckets: dict[int, set[Deadline]] = {}
        self._ticks: list[int] = []  # a heap of the keys of _buckets
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_tick = 0

    def begin(self, timeout_ms: int) -> Deadline:
        """A limit for the running task."""
        loop = self._loop
        task = asyncio.current_task(loop)
        assert task is not None
        tick = int((loop.time() + timeout_ms / 1000) * TICKS_PER_SECOND) + 1
        bucket = self._buckets.get(tick)
        if bucket is None:
            bucket = self._buckets[tick] = set()
            heappush(self._ticks, tick)
        if self._alarm is None or tick < self._alarm_tick:
            self._set_alarm(tick)
        deadline = Deadline(task, task.cancelling(), bucket)
        bucket.add(deadline)
        return deadline

    def _set_alarm(self, tick: int) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_tick = tick
        self._alarm = self._loop.call_at(tick / TICKS_PER_SECOND, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        now = self._loop.time() * TICKS_PER_SECOND
        while self._ticks:
            tick = self._ticks[0]
            bucket = self._buckets[tick]
            if bucket and tick > now:
                self._set_alarm(tick)
                return
            heappop(self._ticks)
            del self._buckets[tick]
            for deadline in bucket:
                deadline.expire()

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
