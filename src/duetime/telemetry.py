"""What the service counts and measures, published for Prometheus at ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from duetime.model import OutcomeKind, Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FAST = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LATENESS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3600)


class Telemetry:
    """One set of metrics; an instance has one, and a test that runs several instances has one for each."""

    def __init__(self) -> None:
        self._registry = r = CollectorRegistry()
        self._timers = Gauge("duetime_timers", "Timers in the store, by status.", ["status"], registry=r)
        self._created = Counter("duetime_creates", "Timers created.", ["door"], registry=r)
        self._attempted = Counter(
            "duetime_attempts",
            "Delivery attempts, by how they ended and what became of the timer.",
            ["outcome", "status"],
            registry=r,
        )
        self._refused_commands = Counter(
            "duetime_refused_commands", "Commands from the broker that went to the dead letters.", registry=r
        )
        self._deferred = Counter(
            "duetime_deferred",
            "Begun timers put back unspent: their destination or the lease did not allow them now.",
            registry=r,
        )
        self._fenced = Counter("duetime_fenced_writes", "Writes refused because the shard had a new owner.", registry=r)
        self._lateness = Histogram(
            "duetime_lateness_seconds",
            "From when an attempt was due to when it was sent.",
            buckets=_LATENESS,
            registry=r,
        )
        self._begin = Histogram("duetime_begin_seconds", "Duration of a begin in the store.", buckets=_FAST, registry=r)
        self._record = Histogram(
            "duetime_record_seconds", "Duration of a record in the store.", buckets=_FAST, registry=r
        )
        self._owned = Gauge("duetime_owned_shards", "Shards that this instance owns.", registry=r)
        self._offset = Gauge("duetime_clock_offset_seconds", "This machine's clock minus the store's.", registry=r)

        # Names that dashboards of older timer services know.
        self._commands = Counter("timer_commands_received", "Requests that made a timer, at all doors.", registry=r)
        self._processed = Counter("timer_schedules_processed", "Attempts whose outcome is known.", registry=r)
        self._polling = Histogram(
            "timer_polling_duration_seconds", "Duration of a look for due timers.", buckets=_FAST, registry=r
        )
        # Finding a labelled counter by its labels costs more than counting: these are found once.
        self._counter_of_creates = lru_cache(self._created.labels)
        self._counter_of_attempts = lru_cache(self._attempted.labels)

    def created(self, door: str, count: int = 1) -> None:
        if count:
            self._counter_of_creates(door).inc(count)
            self._commands.inc(count)

    def attempted(self, kind: OutcomeKind, status: Status) -> None:
        self._counter_of_attempts(kind, status).inc()
        self._processed.inc()

    def refused_command(self) -> None:
        self._commands.inc()
        self._refused_commands.inc()

    def deferred(self) -> None:
        self._deferred.inc()

    def fenced(self, count: int) -> None:
        if count:
            self._fenced.inc(count)

    def lateness(self, ms: int) -> None:
        self._lateness.observe(ms / 1000)

    def begin_took(self, seconds: float) -> None:
        self._begin.observe(seconds)
        self._polling.observe(seconds)

    def record_took(self, seconds: float) -> None:
        self._record.observe(seconds)

    def owned_shards(self, count: int) -> None:
        self._owned.set(count)

    def clock_offset(self, ms: int) -> None:
        self._offset.set(ms / 1000)

    def page(self, timers: Mapping[Status, int]) -> bytes:
        """The metrics page, with the store's own counts as of now."""
        for status, count in timers.items():
            self._timers.labels(status.value).set(count)
        return generate_latest(self._registry)
