"""A small HTTP/1.1 client for callbacks: one request and one response, to an address that the guard has checked.

It owns the connection pool. Idle connections are kept for a few seconds and reused, newest first; a connection in use
belongs to exactly one request. The pool does not limit connections in use: the dispatcher limits attempts, and a limit
here would let a hanging receiver block the others. The client does not follow redirects, keep cookies, use proxies or
decompress responses.

Raises ``Unreachable`` if there is no complete response: no connection, a TLS failure, a broken connection, a malformed
response. Raises ``TimeoutError`` if the response does not arrive in time. Raises ``NotSent`` if a local shortage
prevented the connection; then, and with any other error, no byte of the request was written. Canceling a request closes
its connection.

When the process runs out of file descriptors, idle connections are closed.

A receiver may close an idle connection just when we write to it. If no byte of a response arrived, the request is sent
once more on a new connection; receivers can drop the duplicate by its delivery id. If the new connection fails in the
same way, that is an error.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from itertools import islice

from duetime.batched_writes import BatchedWrites
from duetime.deliverers.connection import Answer, Connection, Key, NoAnswer, Unreachable, why
from duetime.deliverers.deadlines import Deadlines
from duetime.deliverers.unsent import NotSent, OutOfDescriptors, connect_shortage, out_of_descriptors
from duetime.model import Unsent
from duetime.urls import Url

IDLE_SECONDS_MAX = 4.0  # servers usually close after 5
IDLE_MAX = 1024
IDLE_PER_ADDRESS_MAX = 512
CONNECT_SECONDS_MAX = 5.0  # per address; the last address has all the remaining time
CLOSE_SECONDS_MAX = 1.0
CONNECTS_PER_ROUND = 8  # of the event loop, each to a different host and port
CLOSED_FOR_ROOM = 64
CLOSING_ROUNDS_MAX = 16  # of the event loop; closing a connection takes two, even with TLS

_log = logging.getLogger(__name__)


class HttpClient:
    def __init__(self, *, tls: ssl.SSLContext | None = None, idle_seconds: float = IDLE_SECONDS_MAX) -> None:
        self._tls = tls
        self._idle_seconds = idle_seconds
        self.writes = BatchedWrites()
        self.deadlines = Deadlines()
        # When each became idle, oldest first: popitem() returns the newest, iteration begins with the oldest.
        self._idle: dict[Connection, float] = {}
        self._idle_at: dict[Key, dict[Connection, float]] = {}
        self._connections: set[Connection] = set()
        self._sweep_handle: asyncio.TimerHandle | None = None
        # Hosts and ports that this round of the event loop connects to, and the requests that wait for the next round.
        self._begun: set[tuple[str, int]] = set()
        self._turns: dict[tuple[str, int], deque[asyncio.Future[None]]] = {}
        self._closing: set[Connection] = set()  # to make room
        self._closed = False
        self._emptied: asyncio.Future[None] | None = None

    async def request(self, url: Url, addresses: list[str], head_and_body: bytes, until: float | None = None) -> Answer:
        """Send one request to the first reachable address and return the response, before ``until`` (event loop time);
        or raise ``Unreachable``, ``TimeoutError`` or ``NotSent``."""
        name = url.server_name if url.tls else None
        connection = self._take(url.port, name, addresses)
        if connection is None:
            await self._turn((url.host, url.port))
            connection = self._take(url.port, name, addresses)  # one may have become idle meanwhile
        sent = False
        try:
            while True:
                if connection is None:
                    async with asyncio.timeout_at(until):
                        connection = await self._connect(url, addresses, name)
                sent = True
                waiter = connection.send(head_and_body, until)
                try:
                    result = await waiter
                except BaseException:
                    connection.abandon(waiter)
                    raise
                if isinstance(result, Answer):
                    return result
                if result is NoAnswer.LATE:
                    raise TimeoutError
                if isinstance(result, Unreachable):
                    raise result
                # The connection was stale. Other idle ones may be stale as well, so open a new one.
                connection = None
        except (Unreachable, TimeoutError):
            raise
        except Exception as exc:
            if not sent:
                raise
            # The receiver may have the first request, so this attempt counts as sent.
            if isinstance(exc, NotSent):
                raise Unreachable(f"connection closed before the response, and no new connection: {exc}") from None
            _log.exception("the request to %s raised an error", url.origin)
            raise Unreachable(f"internal error: {type(exc).__name__}") from None

    async def close(self) -> None:
        """Close all connections, even those in use: their requests fail with ``Unreachable``."""
        self._closed = True
        if self._sweep_handle is not None:
            self._sweep_handle.cancel()
            self._sweep_handle = None
        for connection in tuple(self._connections):
            connection.drop("shutting down")
        self.deadlines.close()
        if self._connections:
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._emptied,), timeout=CLOSE_SECONDS_MAX)

    async def _connect(self, url: Url, addresses: list[str], name: str | None) -> Connection:
        problem = "no address to connect to"
        shortage: tuple[Unsent, str] | None = None
        for left, address in zip(range(len(addresses) - 1, -1, -1), addresses, strict=True):
            try:
                # An address that drops packets must leave time for the next one.
                async with asyncio.timeout(CONNECT_SECONDS_MAX if left else None):
                    return await self._connect_to(url, address, name)
            except Unreachable as exc:
                problem = str(exc)
            except TimeoutError:
                problem = "connection timed out"
            except NotSent as exc:
                shortage = exc.cause, str(exc)
        if shortage is not None:
            raise NotSent(*shortage)
        raise Unreachable(problem)

    async def _connect_to(self, url: Url, address: str, name: str | None) -> Connection:
        try:
            return await self._open(url, address, name)
        except OutOfDescriptors:
            await self._make_room()
        return await self._open(url, address, name)

    async def _open(self, url: Url, address: str, name: str | None) -> Connection:
        if self._closed:
            raise NotSent(Unsent.DRAIN, "shutting down")
        loop = asyncio.get_running_loop()
        if url.tls and self._tls is None:
            if out_of_descriptors():
                raise OutOfDescriptors  # OpenSSL would silently ignore root certificates that it can't open
            self._tls = tls_context()
        connection = Connection(self, (address, url.port, name), loop)
        try:
            await loop.create_connection(
                lambda: connection,
                host=address,
                port=url.port,
                ssl=self._tls if url.tls else None,
                server_hostname=name,
            )
        except BaseException as exc:
            connection.drop("not connected")
            # uvloop does not call connection_lost if connecting was canceled.
            self.lost(connection)
            if isinstance(exc, OSError) and (shortage := connect_shortage(exc, address)):
                raise shortage from None
            if isinstance(exc, (OSError, ValueError)):
                raise Unreachable(why(exc)) from None
            raise
        if self._closed:
            raise NotSent(Unsent.DRAIN, "shutting down")
        if connection.problem is not None:
            raise Unreachable(connection.problem)
        return connection

    async def _make_room(self) -> None:
        """Close the oldest idle connections and wait until the event loop has released their file descriptors."""
        if not self._closing:
            self._closing = set(islice(self._idle, CLOSED_FOR_ROOM))
            for connection in self._closing:
                connection.drop("out of file descriptors")
        for _ in range(CLOSING_ROUNDS_MAX):
            self._closing &= self._connections
            if not self._closing:
                break
            await asyncio.sleep(0)

    def _take(self, port: int, name: str | None, addresses: list[str]) -> Connection | None:
        """Take the newest usable idle connection out of the pool."""
        for address in addresses:
            idle = self._idle_at.get((address, port, name))
            while idle:
                connection, since = idle.popitem()
                del self._idle[connection]
                if connection.loop.time() - since < self._idle_seconds:
                    return connection
                connection.drop("idle")
        return None

    async def _turn(self, place: tuple[str, int]) -> None:
        """Wait for this request's turn to connect: at most one connect per host and port in a round of the event loop,
        and a few in all.

        If hundreds were started in one round, none would send a byte before the last one is started. Besides, while
        responses arrive, rounds take longer and connections become idle: so a fast receiver gets few connections, and a
        slow one soon gets all that it needs.
        """
        loop = asyncio.get_running_loop()
        if not self._begun and not self._turns:
            loop.call_soon(self._next_round)
        if place not in self._begun and place not in self._turns and len(self._begun) < CONNECTS_PER_ROUND:
            self._begun.add(place)
            return
        turn = loop.create_future()
        self._turns.setdefault(place, deque()).append(turn)
        await turn

    def _next_round(self) -> None:
        self._begun.clear()
        for place in tuple(islice(self._turns, CONNECTS_PER_ROUND)):
            line = self._turns.pop(place)
            while line and place not in self._begun:
                turn = line.popleft()
                if not turn.done():
                    turn.set_result(None)
                    self._begun.add(place)
            if line:
                self._turns[place] = line  # at the end of the line
        if self._begun or self._turns:
            asyncio.get_running_loop().call_soon(self._next_round)

    def park(self, connection: Connection) -> None:
        """Return a connection to the pool for the next request to the same address."""
        idle = self._idle_at.get(connection.key)
        if idle is None:
            idle = self._idle_at[connection.key] = {}
        if len(idle) >= IDLE_PER_ADDRESS_MAX:
            connection.drop("idle")
            return
        if len(self._idle) >= IDLE_MAX:
            next(iter(self._idle)).drop("idle")
        idle[connection] = self._idle[connection] = connection.loop.time()
        if self._sweep_handle is None:
            self._sweep_handle = connection.loop.call_later(self._idle_seconds / 2, self._sweep)

    def unpark(self, connection: Connection) -> None:
        """Remove an unusable connection from the pool; does nothing if it is not in it."""
        if connection in self._idle:
            del self._idle[connection]
            self._idle_at[connection.key].pop(connection, None)

    def opened(self, connection: Connection) -> None:
        self._connections.add(connection)
        if self._closed:
            connection.drop("shutting down")

    def lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def _sweep(self) -> None:
        """Close connections that were idle for too long, and drop addresses without idle connections."""
        self._sweep_handle = None
        now = asyncio.get_running_loop().time()
        for connection, since in tuple(self._idle.items()):
            if now - since < self._idle_seconds:
                break
            connection.drop("idle")
        for key in [key for key, idle in self._idle_at.items() if not idle]:
            del self._idle_at[key]
        if self._idle and not self._closed:
            loop = asyncio.get_running_loop()
            self._sweep_handle = loop.call_later(self._idle_seconds / 2, self._sweep)


def tls_context() -> ssl.SSLContext:
    """The system's root certificates, with host name verification and HTTP/1.1 only."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
