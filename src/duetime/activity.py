"""The recent activity of the whole cluster: attempts per second, and their lateness.

Each instance reports with every heartbeat how many attempts it has sent since it started, by lateness. This module
reads all reports every few seconds and keeps the differences for an hour. The counts are the ones of the metrics, so
they cost nothing extra.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

from msgspec import Struct

from duetime.clock import Clock
from duetime.errors import StoreError
from duetime.store import Instance
from duetime.telemetry import LATENESS_SECONDS, Telemetry

log = logging.getLogger(__name__)

STEP_SECONDS = 5
POINTS_MAX = 720

_NONE = (0,) * (len(LATENESS_SECONDS) + 1)


class Point(Struct, frozen=True):
    """The activity in the step that ended at ``at``."""

    at: int
    fires_per_second: float
    lateness_p50_ms: float | None
    lateness_p99_ms: float | None


class _Seen(Struct, frozen=True):
    """The last report of an instance: its counts, their time by that instance's own clock, and its latest rate."""

    fires: Sequence[int]
    at_ms: float
    per_second: float = 0.0


class Activity:
    def __init__(
        self,
        cluster: Callable[[], Awaitable[list[Instance]]],
        telemetry: Telemetry,
        clock: Clock,
        *,
        owner_id: bytes,
    ) -> None:
        self._cluster = cluster
        self._telemetry = telemetry
        self._clock = clock
        self._owner_id = owner_id
        self._seen: dict[bytes, _Seen] | None = None
        self.points: deque[Point] = deque(maxlen=POINTS_MAX)
        self.since = clock.now()

    def fires(self) -> int:
        """How many attempts the live instances have sent, as far as this instance knows."""
        others = (seen.fires for owner_id, seen in (self._seen or {}).items() if owner_id != self._owner_id)
        return sum(map(sum, others)) + sum(self._telemetry.fires())

    async def run(self) -> None:
        while True:
            try:
                await self.sample()
            except StoreError as error:
                log.debug("could not read the activity of the cluster: %s", error)
            except Exception:  # An error in these statistics must not stop the instance.
                log.exception("could not read the activity of the cluster")
            await self._clock.sleep(STEP_SECONDS)

    async def sample(self) -> None:
        """Add a point for the time since the previous sample; the first sample only sets the baseline."""
        reports = {i.owner_id: _Seen(i.about.fires, i.alive_until) for i in await self._cluster()}
        # This instance's own counts are newer than its report.
        reports[self._owner_id] = _Seen(self._telemetry.fires(), self._clock.monotonic() * 1000)
        before, self._seen = self._seen, reports
        if before is None:
            self.since = self._clock.now()
            return
        late = list(_NONE)
        for owner_id, now in reports.items():
            # A new instance has counted from zero.
            then = before.get(owner_id) or _Seen(_NONE, now.at_ms - STEP_SECONDS * 1000)
            if now.at_ms <= then.at_ms:
                reports[owner_id] = then  # No new report: assume the same rate as before.
                continue
            fired = [max(0, a - b) for a, b in zip(now.fires, then.fires, strict=False)]
            per_second = sum(fired) * 1000 / (now.at_ms - then.at_ms)
            reports[owner_id] = _Seen(now.fires, now.at_ms, per_second)
            late = [a + b for a, b in zip(late, fired, strict=False)]
        rate = sum(seen.per_second for seen in reports.values())
        self.points.append(Point(self._clock.now(), rate, percentile(late, 0.5), percentile(late, 0.99)))


def percentile(counts: Sequence[int], share: float) -> float | None:
    """The percentile in milliseconds, interpolated linearly within each bucket."""
    left = sum(counts) * share
    if not left:
        return None
    for count, (start, end) in zip(counts, pairwise((0, *LATENESS_SECONDS)), strict=False):
        if count >= left:
            return (start + (end - start) * left / count) * 1000
        left -= count
    return LATENESS_SECONDS[-1] * 1000
