"""Estimated counts of timers by namespace and status.

Each process counts its own changes and writes the sums to rows of its own, so nothing contends; the sum over all
processes is the count. A process that is killed loses the changes of its last second. Final timers are counted by the
day on which they ended; these rows expire as the timers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable

from duetime.errors import StoreError
from duetime.model import DAY_MS, Status, Timer
from duetime.stores.cassandra.driver import Session

FLUSH_SECONDS = 1.0
LIVE_DAY = 0
_WRITE = "INSERT INTO tallies (part, process, namespace, status, day, timers) VALUES (0, ?, ?, ?, ?, ?) USING TTL ?"
_READ = "SELECT namespace, status, timers FROM tallies WHERE part = 0"

Count = tuple[str, str, int]
"""Namespace, status, and day of the end."""


class Tallies:
    def __init__(self, session: Session, ttl_of: Callable[[str], int]) -> None:
        self._session = session
        self._ttl_of = ttl_of
        self._process = os.urandom(8)
        self._counts: Counter[Count] = Counter()
        self._changed: set[Count] = set()
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_writing())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            await self.flush()

    def moved(self, before: Timer | None, after: Timer | None) -> None:
        """A timer was inserted, changed or deleted."""
        for timer, number in ((before, -1), (after, 1)):
            if timer is not None:
                day = timer.updated_at // DAY_MS if timer.status.final else LIVE_DAY
                self._add((timer.namespace, timer.status.value, day), number)

    def left(self, namespace: str, status: str) -> None:
        """A live timer went into quarantine."""
        self._add((namespace, status, LIVE_DAY), -1)

    def _add(self, count: Count, number: int) -> None:
        self._counts[count] += number
        self._changed.add(count)

    async def flush(self) -> None:
        async with self._writing:
            some, self._changed = self._changed, set()
            try:
                for count in list(some):
                    namespace, _, day = count
                    ttl = self._ttl_of(namespace) if day != LIVE_DAY else 0
                    await self._session.write(_WRITE, self._process, *count, self._counts[count], ttl)
                    some.discard(count)
            finally:
                self._changed |= some

    async def read(self, namespace: str | None) -> dict[Status, int]:
        await self.flush()
        sums: Counter[str] = Counter()
        for name, status, timers in await self._session.read(_READ):
            if namespace in (None, name):
                sums[status] += timers
        return {status: max(0, sums[status.value]) for status in Status}

    async def _keep_writing(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            with contextlib.suppress(StoreError):  # then the next flush tries it again
                await self.flush()
