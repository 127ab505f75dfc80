"""The metrics of the service, published for Prometheus at ``/metrics``."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from duetime.model import OutcomeKind, Status, Unsent
from duetime.store import Quarantine

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
generate_openmetrics, OPENMETRICS_TYPE = choose_encoder("application/openmetrics-text")

_FAST = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
LATENESS_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0),
)
NOTHING_QUARANTINED = Quarantine()
_LATENESS_MS = [round(seconds * 1000) for seconds in LATENESS_SECONDS]


class Telemetry:
    """The metrics of one instance."""

    def __init__(self) -> None:
        self._own = r = CollectorRegistry()
        self._refused_commands = Counter(
            "duetime_refused_commands", "Rejected NATS commands, published as dead letters.", registry=r
        )
        self._deferred = Counter(
            "duetime_deferred",
            "Begun timers put back without using up a retry, by cause.",
            ["cause"],
            registry=r,
        )
        self._wrong_keys = Counter("duetime_wrong_keys", "Requests with a wrong API key.", registry=r)
        self._fenced = Counter(
            "duetime_fenced_writes", "Writes that the store rejected because the shard has a new owner.", registry=r
        )
        self._begin = Histogram(
            "duetime_begin_seconds", "Duration of begins: starting due timers in the store.", buckets=_FAST, registry=r
        )
        self._record = Histogram(
            "duetime_record_seconds", "Duration of records: storing outcomes.", buckets=_FAST, registry=r
        )
        self._owned = Gauge("duetime_owned_shards", "Shards that this instance owns.", registry=r)
        self._offset = Gauge("duetime_clock_offset_seconds", "This machine's clock minus the store's.", registry=r)

        # Names that dashboards of older timer services use.
        self._polling = Histogram(
            "timer_polling_duration_seconds", "Duration of polls for due timers.", buckets=_FAST, registry=r
        )
        # Plain counters for each create and attempt: a Prometheus metric would take a lock for each.
        self._created: Counts[str] = Counts()
        self._commands = 0
        self._attempts: Counts[tuple[OutcomeKind, Status]] = Counts()
        self._late = [0] * (len(LATENESS_SECONDS) + 1)
        self._late_ms = 0
        self._overdue: dict[str, int] = {}
        self._connections = {"yes": 0, "no": 0}
        self._closed_connections = {"limit": 0, "address": 0}
        r.register(self)

    def created(self, api: str, count: int = 1) -> None:
        self._created[api] += count
        self._commands += count

    def attempted(self, kind: OutcomeKind, status: Status) -> None:
        self._attempts[kind, status] += 1

    def refused_command(self) -> None:
        self._commands += 1
        self._refused_commands.inc()

    def deferred(self, cause: Unsent) -> None:
        self._deferred.labels(cause).inc()

    def wrong_key(self) -> None:
        self._wrong_keys.inc()

    def fenced(self, count: int) -> None:
        if count:
            self._fenced.inc(count)

    def lateness(self, ms: int) -> None:
        self._late[bisect_left(_LATENESS_MS, ms)] += 1
        self._late_ms += ms

    def fires(self) -> tuple[int, ...]:
        """The number of attempts sent, per bucket of ``LATENESS_SECONDS``; the last count is of later ones."""
        return tuple(self._late)

    def begin_took(self, seconds: float) -> None:
        self._begin.observe(seconds)
        self._polling.observe(seconds)

    def record_took(self, seconds: float) -> None:
        self._record.observe(seconds)

    def connections(self, *, signed_in: int, anonymous: int) -> None:
        self._connections["yes"], self._connections["no"] = signed_in, anonymous

    def connection_closed(self, reason: str) -> None:
        """Count a connection closed at a limit: ``limit`` for the total, or ``address`` for that of one address."""
        self._closed_connections[reason] += 1

    def overdue(self, timers: Mapping[str, int]) -> None:
        """Set the number of overdue timers by reason."""
        self._overdue = dict(timers)

    def overdue_now(self) -> dict[str, int]:
        return {reason: count for reason, count in self._overdue.items() if count}

    def owned_shards(self, count: int) -> None:
        self._owned.set(count)

    def clock_offset(self, ms: int) -> None:
        self._offset.set(ms / 1000)

    def collect(self) -> Iterator[Metric]:
        """The plain counters as metrics, for the registry."""
        created = CounterMetricFamily("duetime_creates", "Timers created.", labels=["api"])
        for api, count in self._created.items():
            created.add_metric([api], count)
        yield created
        yield CounterMetricFamily(
            "timer_commands_received", "Requests to create a timer, in all APIs.", value=self._commands
        )
        attempts = CounterMetricFamily(
            "duetime_attempts",
            "Delivery attempts, by outcome and resulting status of the timer.",
            labels=["outcome", "status"],
        )
        for (kind, status), count in self._attempts.items():
            attempts.add_metric([kind, status], count)
        yield attempts
        yield HistogramMetricFamily(
            "duetime_lateness_seconds",
            "Time from when an attempt was due until it was sent.",
            buckets=list(zip((*map(str, LATENESS_SECONDS), "+Inf"), accumulate(self._late), strict=True)),
            sum_value=self._late_ms / 1000,
        )
        overdue = GaugeMetricFamily(
            "duetime_overdue_timers",
            "Timers that have been due for two seconds and have not been started, by reason.",
            labels=["reason"],
        )
        for reason, count in self._overdue.items():
            overdue.add_metric([reason], count)
        yield overdue
        connections = GaugeMetricFamily(
            "duetime_connections", "Open client connections, by whether they are signed in.", labels=["signed_in"]
        )
        for signed_in, count in self._connections.items():
            connections.add_metric([signed_in], count)
        yield connections
        closed = CounterMetricFamily(
            "duetime_connections_closed",
            "Client connections closed at a limit: for the total (limit) or for one address (address).",
            labels=["reason"],
        )
        for reason, count in self._closed_connections.items():
            closed.add_metric([reason], count)
        yield closed
        processed = self._attempts.total()
        yield CounterMetricFamily("timer_schedules_processed", "Attempts with a known outcome.", value=processed)

    def own_page(self) -> bytes:
        """The metrics of this process only, in OpenMetrics: unlike the text format, it groups samples by metric."""
        return generate_openmetrics(self._own)

    def page(
        self,
        timers: Mapping[Status, int],
        workers: Mapping[str, bytes] | None = None,
        quarantine: Quarantine = NOTHING_QUARANTINED,
        *,
        exact: bool = True,
        openmetrics: bool = False,
    ) -> bytes:
        """The metrics page: the store's current counts, and the metrics of this process; or those of all ``workers``
        that share the port, by their pages."""
        text = "Timers in the store, by status." if exact else "Estimate of the timers in the store, by status."
        in_store = GaugeMetricFamily("duetime_timers", text, labels=["status"])
        for status, count in timers.items():
            in_store.add_metric([status.value], count)
        aside = [
            GaugeMetricFamily(
                "duetime_quarantined_timers",
                "Timers in the store that this version can't read; they are not sent.",
                value=quarantine.timers,
            ),
            GaugeMetricFamily(
                "duetime_quarantined_namespaces",
                "Namespaces that this version can't read; their timers are not sent.",
                value=len(quarantine.namespaces),
            ),
        ]
        own = self._own.collect() if workers is None else _labeled(workers)
        page = CollectorRegistry()
        page.register(_Collected([in_store, *aside, *own]))
        return generate_openmetrics(page) if openmetrics else generate_latest(page)


class _Collected(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def _labeled(pages: Mapping[str, bytes]) -> list[Metric]:
    """The metrics of all pages, each sample with a ``worker`` label."""
    metrics: dict[str, Metric] = {}
    for worker, page in pages.items():
        for one in text_string_to_metric_families(page.decode()):  # type: ignore[no-untyped-call]
            metric = metrics.setdefault(one.name, Metric(one.name, one.documentation, one.type))
            metric.samples += [sample._replace(labels={**sample.labels, "worker": worker}) for sample in one.samples]
    return list(metrics.values())
