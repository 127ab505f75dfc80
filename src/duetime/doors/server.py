"""HTTP in over TCP: listens, keeps the connections, and stops so that no answer that is under way is lost."""

from __future__ import annotations

import asyncio
import socket
from email.utils import formatdate

from duetime.doors.admission import Admission
from duetime.doors.budget import BODIES_BYTES_MAX, Budget
from duetime.doors.connection import READ_AT_ONCE_MAX, READ_BODY_AT_ONCE_MAX, Connection
from duetime.doors.host import Application, Served
from duetime.errors import SettingsError
from duetime.telemetry import Telemetry
from duetime.writing import Sweep

BACKLOG = 4096
DRAIN_SECONDS_MAX = 5.0
LOOK_SECONDS = 1.0
CONNECTIONS_MAX = 10_000
ANONYMOUS_PART = 16
"""Requests without a valid key or session may hold one part in so many beside the budget of the others."""


class Server:
    def __init__(
        self,
        application: Application,
        admission: Admission | None = None,
        *,
        bodies_bytes_max: int = BODIES_BYTES_MAX,
    ) -> None:
        self.application = application
        self.bodies = Budget(bodies_bytes_max)
        self.anonymous_bodies = Budget(bodies_bytes_max // ANONYMOUS_PART)
        self.buffer = memoryview(bytearray(READ_BODY_AT_ONCE_MAX))
        self.small_buffer = self.buffer[:READ_AT_ONCE_MAX]
        self.admission = admission or Admission(CONNECTIONS_MAX, Telemetry())
        self.date = b""
        self.connections: set[Served] = set()
        self.stopping = False
        self.writes = Sweep()
        self._wake = asyncio.Event()

    async def serve(self, listener: socket.socket) -> None:
        """Answer whoever comes, until ``stop``."""
        loop = asyncio.get_running_loop()
        self.date = _date()
        listening = await loop.create_server(lambda: Connection(self, loop), sock=listener, backlog=BACKLOG)
        try:
            while not self.stopping:
                await self._pause(LOOK_SECONDS)
                self.date = _date()
                for connection in list(self.connections):
                    connection.look()
        finally:
            self.stopping = True
            listening.close()
            await self._drain()

    def stop(self) -> None:
        """Take no more connections and end ``serve`` once what is under way has been answered."""
        self.stopping = True
        self._wake.set()

    def came(self, connection: Served, now: float) -> None:
        self.connections.add(connection)
        if not self.stopping:
            self.admission.admit(connection, now)

    def left(self, connection: Served) -> None:
        self.connections.discard(connection)
        if self.stopping:
            self._wake.set()

    async def _pause(self, seconds: float) -> None:
        alarm = asyncio.get_running_loop().call_later(seconds, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            alarm.cancel()
        self._wake.clear()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + DRAIN_SECONDS_MAX
        self.writes.flush()
        for connection in list(self.connections):
            connection.finish()
        while self.connections and loop.time() < until:
            await self._pause(until - loop.time())
        tasks = [connection.abort() for connection in self.connections]
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)
        self.connections.clear()


def _date() -> bytes:
    return formatdate(usegmt=True).encode()


def bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # which asyncio does not delay
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
        return listener
    except OSError as error:
        raise SettingsError(f"PORT: can't listen on {host}:{port}: {error.strerror}") from error
