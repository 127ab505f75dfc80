"""The event stream ``/api/v1/events``: sends pulses to open web pages.

One task polls the store, once a second and only while there are listeners. Each listener takes the latest pulse, so a
slow one misses some and has no backlog.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec
from msgspec import Struct

from duetime.activity import Activity
from duetime.doors import http_v1_schema as schema
from duetime.doors.http import Handler, Keys, Request, Response, Stream, TooBusy, Unauthorized
from duetime.doors.http_v1_values import shown_point
from duetime.errors import StoreError
from duetime.model import Status
from duetime.service import Service
from duetime.timetext import format_time

log = logging.getLogger(__name__)

PATH = "/api/v1/events"
PULSE_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""The longest silence of a stream: proxies close silent connections. Also how soon the end of a session is noticed."""
LISTENERS_MAX = 200
ALIVE = b": alive\n\n"
HEADERS = (b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")

_encode = msgspec.json.Encoder().encode


class Pulse(Struct, rename="camel", omit_defaults=True):
    now: str
    statuses: dict[Status, int]
    activity: schema.ActivityPoint | None
    changes: int
    estimated: bool = False  # whether the counts in ``statuses`` are


class Pulses:
    def __init__(self, service: Service, activity: Activity) -> None:
        self._service = service
        self._activity = activity
        self._listeners = 0
        self._wanted = asyncio.Event()
        self._next = asyncio.Event()  # set and replaced when there is a new pulse
        self._latest: bytes | None = None
        self._known: tuple[object, object] | None = None
        self._changes = 0
        self._ended = False

    def listen(self) -> AsyncGenerator[bytes, None]:
        """Pulses from now on, until ``end``."""
        if self._ended:
            raise TooBusy("this instance is stopping; connect again")
        if self._listeners >= LISTENERS_MAX:
            raise TooBusy(f"the maximum of {LISTENERS_MAX} event streams is open; try again later")
        return self._listen()

    async def _listen(self) -> AsyncGenerator[bytes, None]:
        self._listeners += 1
        self._wanted.set()
        try:
            if self._latest is not None:
                yield self._latest
            while not self._ended:
                news = self._next
                await self._service.clock.sleep(SILENCE_SECONDS, news)
                if news.is_set() and self._latest is not None:
                    yield self._latest
                elif not self._ended:
                    yield ALIVE
        finally:
            self._listeners -= 1

    def end(self) -> None:
        """End every stream now, and allow no new one."""
        self._ended = True
        self._latest = None
        self._next.set()

    async def run(self) -> None:
        while True:
            if not self._listeners:
                self._wanted.clear()
                self._latest = None
                await self._wanted.wait()
            try:
                await self.run_once()
            except StoreError as error:
                log.debug("could not make a pulse: %s", error)
            except Exception:  # An error here must not stop the instance.
                log.exception("could not make a pulse")
            await self._service.clock.sleep(PULSE_SECONDS)

    async def run_once(self) -> None:
        """Make a pulse, and wake the listeners if anything has changed."""
        service, activity = self._service, self._activity
        statuses = await service.tally()
        if self._ended:
            return
        point = activity.points[-1] if activity.points else None
        now = service.clock.now()
        changed = statuses, activity.fires(), service.changes
        new = self._latest is None or self._known != (changed, point)
        if self._known is None or self._known[0] != changed:
            # At least the current time, so that it also grows for a listener that reconnects to another instance.
            self._changes = max(self._changes + 1, now)
        self._known = changed, point
        shown = None if point is None else shown_point(point)
        estimated = not service.abilities.counts_exactly
        pulse = _encode(Pulse(format_time(now), statuses, shown, self._changes, estimated))
        self._latest = b"event: pulse\ndata: %s\n\n" % pulse
        if new:
            self._next.set()
            self._next = asyncio.Event()


class PulsesDoor:
    """Serves the stream. It is not in the OpenAPI document, which can't describe a response without an end."""

    def __init__(self, pulses: Pulses, keys: Keys, *, refusal: Callable[[Exception], Response]) -> None:
        self._pulses = pulses
        self._keys = keys
        self.refusal = refusal

    def routes(self) -> dict[str, dict[str, Handler]]:
        return {PATH: {"GET": self.events}}

    async def events(self, request: Request) -> Response:
        await self._keys.check(request)
        request.check_query()
        return Stream(self._while_signed_in(request, self._pulses.listen()), HEADERS)

    async def _while_signed_in(
        self, request: Request, pulses: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """The pulses, until the session of the request ends."""
        async with aclosing(pulses):
            async for pulse in pulses:
                try:
                    await self._keys.check(request)
                except (Unauthorized, StoreError):
                    return
                yield pulse
