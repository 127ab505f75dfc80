"""What operators and their machines ask: is it alive, is it ready, how is it doing; and, in development, what time it
is."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from duetime.clock import VirtualClock
from duetime.doors import wire
from duetime.doors.http import Handler, Keys, Request, Response
from duetime.engine.watchdog import Watchdog
from duetime.errors import InvalidInput
from duetime.service import Service
from duetime.siblings import Siblings
from duetime.telemetry import CONTENT_TYPE, Telemetry
from duetime.timetext import TIME_MS_MAX, format_time, parse_duration


class Advance(Struct):
    advance: str


_advance_decoder = msgspec.json.Decoder(Advance)
_encode = msgspec.json.Encoder().encode


class OperationsDoor:
    def __init__(
        self,
        service: Service,
        keys: Keys,
        metrics_keys: Keys,
        telemetry: Telemetry,
        siblings: Siblings | None,
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
        self._siblings = siblings
        self._ready = ready
        self._watchdog = watchdog
        self._virtual_clock = virtual_clock
        self.refusal = refusal

    def routes(self) -> dict[str, dict[str, Handler]]:
        routes: dict[str, dict[str, Handler]] = {
            "/livez": {"GET": self.livez},
            "/readyz": {"GET": self.readyz},
            "/metrics": {"GET": self.metrics},
        }
        if self._virtual_clock is not None:
            routes["/clock"] = {"GET": self.clock, "POST": self.advance}
        return routes

    async def livez(self, request: Request) -> Response:
        return Response(200, b'{"status":"alive"}')

    async def readyz(self, request: Request) -> Response:
        """Whether to send requests here. What is overdue, by reason, and what is quarantined is said along."""
        problem = self._watchdog.problem() if self._ready() else "it is starting or stopping"
        overdue = {reason: count for reason, count in self._watchdog.overdue.items() if count}
        quarantine = self._watchdog.quarantine
        said: dict[str, object] = {"overdue": overdue} if overdue or problem else {}
        if quarantine.timers or quarantine.namespaces:
            said["quarantined"] = {"timers": quarantine.timers, "namespaces": len(quarantine.namespaces)}
        if problem is None:
            return Response(200, _encode({"status": "ready", **said}))
        return Response(503, _encode({"status": "not ready", "reason": problem, **said}))

    async def metrics(self, request: Request) -> Response:
        await self._metrics_keys.check(request)
        workers = None if self._siblings is None else await self._siblings.pages()
        page = self._telemetry.page(await self._service.tally(), workers, await self._service.quarantine())
        return Response(200, page, ((b"content-type", CONTENT_TYPE.encode()),))

    async def clock(self, request: Request) -> Response:
        return Response(200, b'{"now":"%s"}' % format_time(self._service.clock.now()).encode())

    async def advance(self, request: Request) -> Response:
        await self._keys.check(request)
        assert self._virtual_clock is not None
        asked = wire.decode(await request.body(1024), Advance, _advance_decoder)
        ms = parse_duration(asked.advance, "advance")
        if self._virtual_clock.now() + ms > TIME_MS_MAX:
            raise InvalidInput("advance", "must not lead beyond the year 9999")
        self._virtual_clock.advance(ms)
        return await self.clock(request)
