"""The overview of the service, for the web page: computed on request, and cached for all clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Generic, TypeVar

import msgspec

from duetime.activity import STEP_SECONDS, Activity
from duetime.doors import http_v1_schema as schema
from duetime.doors.http_v1_values import overdue_of, shown_count, shown_instance, shown_point, unowned_of
from duetime.instants import EPOCH, Instant
from duetime.model import HOUR_MS, MINUTE_MS, Status
from duetime.overdue import OVERDUE_MS
from duetime.service import Counted, Service
from duetime.store import Cursor, Filter, Order
from duetime.timetext import format_time

OVERVIEW_SECONDS = 1.0
FORECAST_SECONDS = 10.0
FAILURES_SECONDS = 5.0
"""For how long each part is cached."""
FAILURES_MAX = 500
FAILURES_PAGE = 100
FAILURES_BYTES_MAX = 8 << 20
"""The most bytes of payloads to read with the failed timers."""
DESTINATIONS_MAX = 20

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


class _Cached(Generic[T]):
    """A value that is cached for a while."""

    def __init__(self, seconds: float, make: Callable[[], Awaitable[T]]) -> None:
        self._seconds = seconds
        self._make = make
        self._made: tuple[float, T] | None = None

    async def at(self, now: float) -> T:
        if self._made is None or not 0 <= now - self._made[0] < self._seconds:
            self._made = now, await self._make()
        return self._made[1]


class Overview:
    def __init__(self, service: Service, activity: Activity, *, shards: int) -> None:
        self._service = service
        self._activity = activity
        self._shards = shards
        self._one_at_a_time = asyncio.Lock()
        self._whole = _Cached(OVERVIEW_SECONDS, self._make_whole)
        self._forecast = _Cached(FORECAST_SECONDS, self._make_forecast)
        self._failures = _Cached(FAILURES_SECONDS, self._make_failures)

    async def whole(self) -> bytes:
        """The overview as JSON, at most ``OVERVIEW_SECONDS`` old."""
        async with self._one_at_a_time:
            return await self._whole.at(self._service.clock.monotonic())

    async def _make_whole(self) -> bytes:
        service, activity = self._service, self._activity
        at = service.clock.monotonic()
        forecast, overdue = await self._forecast.at(at)
        failures = await self._failures.at(at)
        instances = await service.cluster()
        return _encode(
            schema.Overview(
                now=format_time(service.clock.now()),
                statuses=await service.tally(),
                since=format_time(activity.since),
                step_seconds=STEP_SECONDS,
                activity=[shown_point(point) for point in activity.points],
                forecast=forecast,
                overdue=shown_count(overdue),
                overdue_reasons=overdue_of(instances),
                failures=failures,
                instances=[shown_instance(instance) for instance in instances],
                shards=self._shards,
                unowned=unowned_of(instances, self._shards),
                estimated=not service.abilities.counts_exactly,
            )
        )

    async def _make_forecast(self) -> tuple[schema.Forecast, Counted]:
        now = self._service.clock.now()
        minutes = [now + n * MINUTE_MS for n in range(61)]
        hours = [now + n * HOUR_MS for n in range(25)]
        overdue, _, *by_minute = await self._service.forecast([EPOCH, now - OVERDUE_MS, *minutes])
        by_hour = await self._service.forecast(hours)
        return schema.Forecast(_steps(minutes, by_minute), _steps(hours, by_hour)), overdue

    async def _make_failures(self) -> schema.Failures | None:
        if Order.FINISHED not in self._service.abilities.orders:
            return None
        found: dict[str, schema.DestinationFailures] = {}
        looked_at = read_bytes = 0
        after: Cursor | None = None
        while True:
            page = await self._service.page(Filter(status=Status.FAILED), FAILURES_PAGE, after)
            for timer in page.timers:  # latest first
                name = self._service.destination(timer)
                if name not in found:
                    found[name] = schema.DestinationFailures(name, 0, timer.last_error, format_time(timer.updated_at))
                found[name].timers += 1
                read_bytes += len(timer.definition.payload)
            looked_at += len(page.timers)
            after = page.next
            if after is None or looked_at >= FAILURES_MAX or read_bytes >= FAILURES_BYTES_MAX:
                most = sorted(found.values(), key=lambda failures: -failures.timers)
                return schema.Failures(looked_at, most[:DESTINATIONS_MAX])


def _steps(bounds: Sequence[Instant], counts: Sequence[Counted]) -> list[schema.ForecastStep]:
    spans = zip(pairwise(bounds), counts, strict=True)
    return [
        schema.ForecastStep(format_time(start), counted.timers, counted.more, counted.estimated)
        for (start, _), counted in spans
    ]
