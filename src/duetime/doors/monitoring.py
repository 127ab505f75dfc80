"""Health checks, readiness, metrics, and the virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from duetime.clock import VirtualClock
from duetime.doors import wire
from duetime.doors.http import Handler, Keys, NotFound, Request, Response
from duetime.doors.http_v1_schema import Overdue
from duetime.doors.operation import Operation, Text, routes
from duetime.engine.watchdog import Watchdog
from duetime.errors import InvalidInput
from duetime.service import Service
from duetime.telemetry import OPENMETRICS_TYPE, TEXT_TYPE, Telemetry
from duetime.timetext import TIME_MS_MAX, format_time, parse_duration
from duetime.worker_metrics import WorkerMetrics


class Alive(Struct):
    """The process is alive."""

    status: Literal["alive"]


class QuarantinedRows(Struct):
    """How many rows this version can't read. They stay in the store, and nothing is sent for them."""

    timers: int
    namespaces: int


class Ready(Struct):
    """The instance is ready."""

    status: Literal["ready"]
    overdue: Overdue | UnsetType = UNSET
    quarantined: QuarantinedRows | UnsetType = UNSET


class NotReady(Struct):
    """The instance is not ready: load balancers should send requests to another one."""

    status: Literal["not ready"]
    reason: Annotated[str, Meta(description="for people", examples=["it is starting or stopping"])]
    overdue: Overdue
    quarantined: QuarantinedRows | UnsetType = UNSET


_TIMERS = """\
# HELP duetime_timers Timers in the store, by status.
# TYPE duetime_timers gauge
duetime_timers{status="pending"} 3.0
"""
METRICS = Text({"text/plain": _TIMERS, "application/openmetrics-text": _TIMERS + "# EOF\n"})


class Advance(Struct, forbid_unknown_fields=True):
    advance: str


_advance_decoder = msgspec.json.Decoder(Advance)
_encode = msgspec.json.Encoder().encode


class MonitoringDoor:
    def __init__(
        self,
        service: Service,
        keys: Keys,
        metrics_keys: Keys,
        telemetry: Telemetry,
        worker_metrics: WorkerMetrics | None,
        *,
        ready: Callable[[], bool],
        watchdog: Watchdog,
        refusal: Callable[[Exception], Response],
        virtual_clock: VirtualClock | None,
    ) -> None:
        self._service = service
        self._keys = keys
        self._metrics_keys = metrics_keys
        self._telemetry = telemetry
        self._worker_metrics = worker_metrics
        self._ready = ready
        self._watchdog = watchdog
        self._virtual_clock = virtual_clock
        self.refusal = refusal

    def routes(self) -> dict[str, dict[str, Handler]]:
        found = routes(self.operations())
        if self._virtual_clock is None:
            found["/clock"] = {"GET": self.no_clock, "POST": self.no_clock}
        else:
            found["/clock"] = {"GET": self.clock, "POST": self.advance}
        return found

    def operations(self) -> list[Operation]:
        def at(path: str, handler: Handler, summary: str, **more: Any) -> Operation:
            return Operation(
                method="GET",
                path=path,
                tag="monitoring",
                name=path[1:],
                summary=summary,
                description=handler.__doc__ or "",
                handler=handler,
                **more,
            )

        return [
            at("/livez", self.livez, "Check that the process is alive",
               responses={200: Alive}, errors=(403,), needs_key=False),
            at("/readyz", self.readyz, "Check that the service is ready for requests",
               responses={200: Ready, 503: NotReady}, errors=(403,), needs_key=False),
            at("/metrics", self.metrics, "Get the metrics for Prometheus", responses={200: METRICS}),
        ]  # fmt: skip

    async def livez(self, request: Request) -> Response:
        """For liveness probes: checks only the process. Needs no key and ignores the query."""
        return Response(200, b'{"status":"alive"}')

    async def readyz(self, request: Request) -> Response:
        """For load balancers. The response also counts overdue timers by reason, and quarantined rows. Needs no key and
        ignores the query."""
        problem = self._watchdog.problem() if self._ready() else "it is starting or stopping"
        overdue: dict[str, int] = {reason: count for reason, count in self._watchdog.overdue.items() if count}
        quarantine = self._watchdog.quarantine
        kept: QuarantinedRows | UnsetType = UNSET
        if quarantine.timers or quarantine.namespaces:
            kept = QuarantinedRows(quarantine.timers, len(quarantine.namespaces))
        if problem is None:
            return Response(200, _encode(Ready("ready", overdue or UNSET, kept)))
        return Response(503, _encode(NotReady("not ready", problem, overdue, kept)))

    async def metrics(self, request: Request) -> Response:
        """OpenMetrics 1.0 if `Accept` prefers it, otherwise the Prometheus text format. Needs no key with
        DUETIME_METRICS_AUTH=none."""
        await self._metrics_keys.check(request)
        openmetrics = prefers_openmetrics(request.header(b"accept") or b"")
        workers = None if self._worker_metrics is None else await self._worker_metrics.pages()
        page = self._telemetry.page(
            await self._service.tally(),
            workers,
            await self._service.quarantine(),
            exact=self._service.abilities.counts_exactly,
            openmetrics=openmetrics,
        )
        return Response(200, page, ((b"content-type", (OPENMETRICS_TYPE if openmetrics else TEXT_TYPE).encode()),))

    async def no_clock(self, request: Request) -> Response:
        raise NotFound("/clock exists only on a server that was started with --virtual-clock")

    async def clock(self, request: Request) -> Response:
        request.check_query()
        return Response(200, b'{"now":"%s"}' % format_time(self._service.clock.now()).encode())

    async def advance(self, request: Request) -> Response:
        await self._keys.check(request)
        request.check_query()
        assert self._virtual_clock is not None
        asked = wire.decode(await request.body(1024), Advance, _advance_decoder)
        ms = parse_duration(asked.advance, "advance")
        if self._virtual_clock.now() + ms > TIME_MS_MAX:
            raise InvalidInput("advance", "must not lead beyond the year 9999")
        self._virtual_clock.advance(ms)
        return await self.clock(request)


def prefers_openmetrics(accept: bytes) -> bool:
    """Whether this Accept header prefers OpenMetrics 1.0 to the Prometheus text format."""
    weights = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for kind, *given in ([word.strip() for word in item.split(b";")] for item in accept.lower().split(b",")):
        name, said = kind.decode("latin-1"), dict(word.partition(b"=")[::2] for word in given)
        if name in weights and (name == "text/plain" or said.get(b"version", b"1.0.0") == b"1.0.0"):
            with suppress(ValueError):
                weights[name] = max(weights[name], float(said.get(b"q", b"1")))
    openmetrics, text = weights.values()
    return openmetrics > 0 and openmetrics >= text
