"""The measurements of one peer, the same for all: scheduling rate, a burst, a steady rate, end to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from bench.peers.stands import Stand
from bench.processes import BenchError, Process
from bench.series import rate_between

BATCH = 500
DAY_MS = 86_400_000
LEAD_MS = 1_000
SPARE_SECONDS = 1.5  # from the last schedule to the instant, at least
ARRIVE_SECONDS_MAX = 120
LEFT_SECONDS_MAX = 20.0
STEADY_PER_SECOND = 100
WARM_SECONDS = 2.5  # of the end to end measurement, until what is due follows what is scheduled
GRANT_SECONDS = 0.05
BACKLOG_SECONDS = 3.0  # how far scheduling may run ahead of arriving: the lead, a poll and its batch
BACKLOG_MIN = 64


class Herd(Struct, frozen=True):
    per_second: float
    lateness_ms: list[float]
    cpu_ms_per_timer: float


class Measuring:
    """One peer on its stand, with the receiver that it calls."""

    def __init__(self, stand: Stand, receiver: Process, say: Callable[[str], None]) -> None:
        self._stand = stand
        self._receiver = receiver
        self._say = say

    async def schedules(self, seconds: float, batch: int) -> float:
        """Timers scheduled per second, due on another day."""
        due = round(time.time() * 1000) + DAY_MS
        done = await self._stand.client.ask(self._order(seconds=seconds, due=due, batch=batch))
        return float(done["count"] / done["seconds"])

    async def herd(self, count: int, batch: int, per_second: float) -> Herd:
        """Timers that are all due at one instant; ``per_second`` is how fast they can be scheduled ahead of it."""
        due = await self._ahead(count, batch, per_second)
        await asyncio.sleep(due / 1000 - time.time() - 0.1)
        cpu = self._stand.cpu_seconds()
        came = await self._arrived(count)
        cpu = self._stand.cpu_seconds() - cpu
        return Herd(count / (came["last_at"] - due / 1000), came["lateness_ms"], cpu * 1000 / count)

    async def steady(self, seconds: int, per_second: float) -> list[float]:
        """Percentiles of lateness at a modest rate; ``per_second`` is how fast timers can be scheduled ahead."""
        count = STEADY_PER_SECOND * seconds
        await self._ahead(count, 1, per_second, step_ms=1000 // STEADY_PER_SECOND)
        lateness: list[float] = (await self._arrived(count))["lateness_ms"]
        return lateness

    async def sustained(self, seconds: float, batch: int, expected: float) -> float:
        """Arrivals per second while timers are scheduled as fast as they arrive; ``expected`` is the initial rate."""
        client = self._stand.client
        await self._receiver.ask("reset")
        backlog = max(BACKLOG_MIN if batch == 1 else batch * 4, round(expected * BACKLOG_SECONDS))
        client.tell(self._order(seconds=seconds, batch=batch, granted=backlog))
        started = time.time()
        done = asyncio.create_task(client.answer())
        counts = [0]
        while not done.done():
            await asyncio.wait([done], timeout=GRANT_SECONDS)
            counts.append((await self._receiver.ask("wait 0 0"))["count"])
            past = counts[-min(len(counts), round(1 / GRANT_SECONDS) + 1)]
            ahead = max(backlog, round((counts[-1] - past) * BACKLOG_SECONDS))
            client.tell({"what": "grant", "total": counts[-1] + ahead})
        count = (await done)["count"]
        ended = started + seconds
        came = await self._arrived(count)
        first = came["first_at"]
        return rate_between(came["buckets"], started + WARM_SECONDS - first, ended - first)

    async def _ahead(self, count: int, batch: int, per_second: float, step_ms: int = 0) -> int:
        """Schedule timers that are due from an instant on, and return it: one that was still in the future at the
        end."""
        for patience in (1.3, 3.0, 9.0):
            await self._receiver.ask("reset")
            due = round((time.time() + SPARE_SECONDS * 2 + count / per_second * patience) * 1000)
            await self._stand.client.ask(self._order(count=count, due=due, step_ms=step_ms, batch=batch))
            if time.time() + SPARE_SECONDS < due / 1000:
                return due
            self._say("it was not scheduled in time; once more")
            await self._arrived(count)
        raise BenchError("it never scheduled its timers before they were due: the machine is too busy")

    async def _arrived(self, count: int) -> dict[str, Any]:
        """What the receiver saw, once this many timers have arrived and the peer has none left."""
        came = (await self._receiver.ask(f"wait {count} {ARRIVE_SECONDS_MAX}"))["count"]
        if came < count:
            raise BenchError(f"{came} of {count} timers came within {ARRIVE_SECONDS_MAX} s")
        until = time.monotonic() + LEFT_SECONDS_MAX
        while left := (await self._stand.client.ask({"what": "left"}))["left"]:
            if time.monotonic() > until:
                raise BenchError(f"all {count} timers came, but {left} were not recorded as done")
            await asyncio.sleep(0.1)
        report = await self._receiver.ask("report")
        if report["count"] > count:
            self._say(f"{report['count'] - count} of {count} timers came more than once")
        return report

    def _order(
        self,
        *,
        batch: int,
        count: int | None = None,
        seconds: float | None = None,
        due: int | None = None,
        step_ms: int = 0,
        granted: int | None = None,
    ) -> dict[str, Any]:
        return {
            "what": "schedule",
            "url": f"http://127.0.0.1:{self._receiver.port}/hook",
            "count": count,
            "seconds": seconds,
            "due": due,
            "lead_ms": LEAD_MS,
            "step_ms": step_ms,
            "batch": batch,
            "granted": granted,
        }
