"""What a connection and the server that has it need of each other, and of the application behind them."""

from __future__ import annotations

import asyncio
from typing import Protocol

from duetime.doors.admission import Admission, Connection
from duetime.doors.budget import Budget
from duetime.doors.http import Request, Response
from duetime.writing import Sweep


class Application(Protocol):
    """Who answers."""

    async def answer(self, request: Request) -> Response | None:
        """The answer to a request, whatever becomes of it; None when nobody waits for one."""

    def refusal(self, error: Exception, path: str) -> Response:
        """The answer to what is not a request; its path, as far as that is known."""


class Served(Connection, Protocol):
    """A connection."""

    def look(self) -> None:
        """Close it if it has stood still for too long or is sent to too slowly."""

    def finish(self) -> None:
        """Close it if it has no request; a stream that nobody reads is not waited for."""

    def abort(self) -> asyncio.Task[None] | None:
        """End it now; its task, if there is one, has been canceled."""


class Host(Protocol):
    """Who has the connections."""

    application: Application
    admission: Admission
    bodies: Budget
    anonymous_bodies: Budget
    """Of connections without a valid key or session."""
    buffer: memoryview
    """What connections read into, one after the other."""
    small_buffer: memoryview
    """The beginning of it, where no body is asked for."""
    date: bytes
    """For the heads of answers."""
    stopping: bool
    writes: Sweep

    def came(self, connection: Served, now: float) -> None: ...

    def left(self, connection: Served) -> None: ...
