"""The interfaces between a connection, its server, and the application that handles requests."""

from __future__ import annotations

import asyncio
from typing import Protocol

from duetime.batched_writes import BatchedWrites
from duetime.doors.body_budget import BodyBudget
from duetime.doors.connection_limits import Connection, ConnectionLimits
from duetime.doors.http import Request, Response


class Application(Protocol):
    """Handles requests."""

    async def answer(self, request: Request) -> Response | None:
        """Handle a request; never raises. None if the client has left."""

    def refusal(self, error: Exception, path: str) -> Response:
        """The response to bytes that are not a valid request; ``path`` is what is known of its path."""


class Served(Connection, Protocol):
    """A connection, as the server sees it."""

    def check_timeouts(self) -> None:
        """Close the connection if it was idle for too long or the client sends or reads too slowly."""

    def finish(self) -> None:
        """Close the connection if it has no request, or if its client does not read the stream."""

    def abort(self) -> asyncio.Task[None] | None:
        """Close the connection now; returns its task, which is canceled, if there is one."""


class Host(Protocol):
    """The server, as its connections see it."""

    application: Application
    admission: ConnectionLimits
    bodies: BodyBudget
    anonymous_bodies: BodyBudget
    """The budget for connections without a valid key or session."""
    buffer: memoryview
    """The read buffer, shared by all connections."""
    small_buffer: memoryview
    """The beginning of the buffer, used while no handler waits for a body."""
    date: bytes
    """The value of the Date header."""
    stopping: bool
    writes: BatchedWrites

    def connected(self, connection: Served, now: float) -> None: ...

    def disconnected(self, connection: Served) -> None: ...
