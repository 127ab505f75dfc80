"""The HTTP server: listens, keeps the connections, and stops without losing responses that are under way."""

from __future__ import annotations

import asyncio
import errno
import socket
from email.utils import formatdate

from duetime.batched_writes import BatchedWrites
from duetime.doors.body_budget import BODIES_BYTES_MAX, BodyBudget
from duetime.doors.connection import READ_AT_ONCE_MAX, READ_BODY_AT_ONCE_MAX, Connection
from duetime.doors.connection_limits import ConnectionLimits
from duetime.doors.server_interfaces import Application, Served
from duetime.errors import SettingsError
from duetime.telemetry import Telemetry

BACKLOG = 4096
DRAIN_SECONDS_MAX = 5.0
TIMEOUT_CHECK_SECONDS = 1.0
CONNECTIONS_MAX = 10_000
ANONYMOUS_PART = 16
"""Requests without a valid key or session have a budget of their own: one in this many bytes of the main one."""


class Server:
    def __init__(
        self,
        application: Application,
        admission: ConnectionLimits | None = None,
        *,
        bodies_bytes_max: int = BODIES_BYTES_MAX,
    ) -> None:
        self.application = application
        self.bodies = BodyBudget(bodies_bytes_max)
        self.anonymous_bodies = BodyBudget(bodies_bytes_max // ANONYMOUS_PART)
        self.buffer = memoryview(bytearray(READ_BODY_AT_ONCE_MAX))
        self.small_buffer = self.buffer[:READ_AT_ONCE_MAX]
        self.admission = admission or ConnectionLimits(CONNECTIONS_MAX, Telemetry())
        self.date = b""
        self.connections: set[Served] = set()
        self.stopping = False
        self.writes = BatchedWrites()
        self._wake = asyncio.Event()

    async def serve(self, listener: socket.socket) -> None:
        """Serve connections until ``stop``."""
        loop = asyncio.get_running_loop()
        self.date = _date()
        listening = await loop.create_server(lambda: Connection(self, loop), sock=listener, backlog=BACKLOG)
        try:
            while not self.stopping:
                await self._pause(TIMEOUT_CHECK_SECONDS)
                self.date = _date()
                for connection in list(self.connections):
                    connection.check_timeouts()
        finally:
            self.stopping = True
            listening.close()
            await self._drain()

    def stop(self) -> None:
        """Accept no more connections, and end ``serve`` when all current requests are answered."""
        self.stopping = True
        self._wake.set()

    def connected(self, connection: Served, now: float) -> None:
        self.connections.add(connection)
        if not self.stopping:
            self.admission.admit(connection, now)

    def disconnected(self, connection: Served) -> None:
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
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # Only then asyncio sets TCP_NODELAY.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
        return listener
    except OSError as error:
        name = "PORT" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "HOST"
        reason = f"{name}: can't listen on {host}:{port}: {error.strerror}; set {name} to another value"
        raise SettingsError(reason) from error
