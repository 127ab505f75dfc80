"""The stream of pulses, ``/api/v1/events``: what changed, for pages that are being looked at.

One task asks the store, once a second and only while somebody listens. A listener is woken and takes the latest pulse:
one that reads slowly misses some, and nothing piles up for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec
from msgspec import Struct

from duetime.activity import Activity
from duetime.doors import durable_schema as schema
from duetime.doors.durable_values import shown_point
from duetime.doors.http import Handler, Keys, Request, Response, Stream, TooBusy, Unauthorized
from duetime.errors import StoreError
from duetime.model import Status
from duetime.service import Service
from duetime.timetext import format_time

log = logging.getLogger(__name__)

PATH = "/api/v1/events"
PULSE_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""How long a stream is silent at most: a proxy would take it for dead. A session that ended is noticed by then."""
LISTENERS_MAX = 200
ALIVE = b": alive\n\n"
HEADERS = (b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")

_encode = msgspec.json.Encoder().encode


class Pulse(Struct, rename="camel"):
    now: str
    statuses: dict[Status, int]
    activity: schema.Point | None
    changes: int


class Pulses:
    def __init__(self, service: Service, activity: Activity) -> None:
        self._service = service
        self._activity = activity
        self._listeners = 0
        self._wanted = asyncio.Event()
        self._next = asyncio.Event()  # set, and replaced, when there is something new
        self._latest: bytes | None = None
        self._known: tuple[object, object] | None = None
        self._changes = 0
        self._ended = False

    def listen(self) -> AsyncGenerator[bytes, None]:
        """Pulses from now on, until ``end``."""
        if self._ended:
            raise TooBusy("this instance is stopping: ask again")
        if self._listeners >= LISTENERS_MAX:
            raise TooBusy(f"{LISTENERS_MAX} are listening already: ask again later")
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
        """Have every stream end now, and no other begin."""
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
                log.debug("no pulse: %s", error)
            except Exception:  # What is only there to be looked at must not stop what fires timers.
                log.exception("no pulse")
            await self._service.clock.sleep(PULSE_SECONDS)

    async def run_once(self) -> None:
        """Look whether anything has changed, and wake the listeners if so."""
        service, activity = self._service, self._activity
        statuses = await service.tally()
        if self._ended:
            return
        point = activity.points[-1] if activity.points else None
        now = service.clock.now()
        changed = statuses, activity.fires(), service.changes
        new = self._latest is None or self._known != (changed, point)
        if self._known is None or self._known[0] != changed:
            # It grows as time does, so that it goes on growing when a listener comes back to another instance.
            self._changes = max(self._changes + 1, now)
        self._known = changed, point
        shown = None if point is None else shown_point(point)
        pulse = _encode(Pulse(format_time(now), statuses, shown, self._changes))
        self._latest = b"event: pulse\ndata: %s\n\n" % pulse
        if new:
            self._next.set()
            self._next = asyncio.Event()


class PulsesDoor:
    """A stream has no end that a document of requests and answers could tell of, so it has a door of its own."""

    def __init__(self, pulses: Pulses, keys: Keys, *, refusal: Callable[[Exception], Response]) -> None:
        self._pulses = pulses
        self._keys = keys
        self.refusal = refusal

    def routes(self) -> dict[str, dict[str, Handler]]:
        return {PATH: {"GET": self.events}}

    async def events(self, request: Request) -> Response:
        await self._keys.check(request)
        return Stream(self._while_signed_in(request, self._pulses.listen()), HEADERS)

    async def _while_signed_in(
        self, request: Request, pulses: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """What the pulses are, until the session of the request ends."""
        async with aclosing(pulses):
            async for pulse in pulses:
                try:
                    await self._keys.check(request)
                except (Unauthorized, StoreError):
                    return
                yield pulse
