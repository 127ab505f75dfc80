"""A small HTTP/1.1 client for callbacks: one request, one answer, to an address that the guard has judged.

It owns the outgoing connections. An idle one is kept for a few seconds and used again, newest first; one in use
belongs to exactly one request. There is no limit on those in use: the dispatcher above has one, and a limit here would
let a hanging receiver stop the others. It follows no redirect, keeps no cookie, knows no proxy and unpacks nothing.

Fails with ``Unreachable`` whenever there is no whole answer: no connection, no TLS, a connection that broke, an answer
that is not HTTP. Time limits are the caller's: cancel the request, and its connection is closed. A connection goes
back to the pool only after a whole answer that allows it and with nothing left over in either direction, so that one
receiver's answer can never be taken for the answer to another request.

A kept connection may have been closed by the receiver just as we wrote to it. When not one byte of an answer came, the
request is sent once more on a new connection; receivers drop a repeat by its delivery id. A new connection that fails
the same way is an error.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
from collections import deque
from itertools import islice
from typing import cast

import httptools
from msgspec import Struct

from duetime.deliverers.egress import Url
from duetime.errors import DuetimeError
from duetime.writing import Sweep

BODY_BYTES_MAX = 64 * 1024
HEAD_BYTES_MAX = 64 * 1024
ANSWER_BYTES_MAX = 1024 * 1024  # with chunk sizes, trailers and 1xx answers: what frames 64 KiB is never that much
REPEATED_BYTES_MAX = 1024  # of an answer that a connection remembers
IDLE_SECONDS_MAX = 4.0  # servers usually close after 5
IDLE_MAX = 1024
IDLE_PER_ADDRESS_MAX = 512
CONNECT_SECONDS_MAX = 5.0  # when there is another address to try; the last one has all the time that is left
CLOSE_SECONDS_MAX = 1.0
CONNECTS_PER_ROUND = 8  # of the event loop, each to another place

Key = tuple[str, int, str | None]
"""What makes two connections the same: the address, the port, and the name its certificate was checked for."""


class Unreachable(DuetimeError):
    """There was no whole answer; the message says why, for people."""


class Answer(Struct, frozen=True):
    status: int
    retry_after: str | None
    body: bytes  # the first 64 KiB


class _Stale:
    """What a waiter gets when a kept connection turned out to be closed before the answer began."""


_STALE = _Stale()
_Waiter = asyncio.Future[Answer | Unreachable | _Stale]


class HttpClient:
    def __init__(self, *, tls: ssl.SSLContext | None = None, idle_seconds: float = IDLE_SECONDS_MAX) -> None:
        self._tls = tls
        self._idle_seconds = idle_seconds
        self.writes = Sweep()
        # Since when each is idle, in order of arrival: popitem() gives the newest, iteration begins with the oldest.
        self._idle: dict[_Connection, float] = {}
        self._idle_at: dict[Key, dict[_Connection, float]] = {}
        self._connections: set[_Connection] = set()
        self._sweep_handle: asyncio.TimerHandle | None = None
        # The host and port that connections are begun to in this round of the event loop, and who waits for the next.
        self._begun: set[tuple[str, int]] = set()
        self._turns: dict[tuple[str, int], deque[asyncio.Future[None]]] = {}
        self._closed = False
        self._emptied: asyncio.Future[None] | None = None

    async def request(self, url: Url, addresses: list[str], head_and_body: bytes) -> Answer:
        """Send one request to the first address that can be reached and return the answer, or raise Unreachable."""
        name = url.server_name if url.tls else None
        connection = self._take(url.port, name, addresses)
        if connection is None:
            await self._turn((url.host, url.port))
            connection = self._take(url.port, name, addresses)  # one that was in use may have come free meanwhile
        while True:
            if connection is None:
                connection = await self._connect(url, addresses, name)
            waiter = connection.send(head_and_body)
            try:
                result = await waiter
            except BaseException:
                connection.abandon(waiter)
                raise
            if isinstance(result, Answer):
                return result
            if isinstance(result, Unreachable):
                raise result
            # It was closed already. Others that are kept may be as stale: only a new one will do.
            connection = None

    async def close(self) -> None:
        """Close every connection, also those in use: their requests end as unreachable."""
        self._closed = True
        if self._sweep_handle is not None:
            self._sweep_handle.cancel()
            self._sweep_handle = None
        for connection in tuple(self._connections):
            connection.drop("shutting down")
        if self._connections:
            self._emptied = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._emptied,), timeout=CLOSE_SECONDS_MAX)

    async def _connect(self, url: Url, addresses: list[str], name: str | None) -> _Connection:
        problem = "no address to connect to"
        for left, address in zip(range(len(addresses) - 1, -1, -1), addresses, strict=True):
            try:
                # An address that swallows packets must not eat the time of the next one.
                async with asyncio.timeout(CONNECT_SECONDS_MAX if left else None):
                    return await self._connect_to(url, address, name)
            except Unreachable as exc:
                problem = str(exc)
            except TimeoutError:
                problem = "connection timed out"
        raise Unreachable(problem)

    async def _connect_to(self, url: Url, address: str, name: str | None) -> _Connection:
        if self._closed:
            raise Unreachable("shutting down")
        loop = asyncio.get_running_loop()
        if url.tls and self._tls is None:
            self._tls = tls_context()
        connection = _Connection(self, (address, url.port, name), loop)
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
            # uvloop says nothing more about a connection whose making was canceled.
            self.lost(connection)
            if isinstance(exc, (OSError, ValueError)):
                raise Unreachable(_why(exc)) from None
            raise
        if connection.problem is not None:
            raise Unreachable(connection.problem)
        return connection

    def _take(self, port: int, name: str | None, addresses: list[str]) -> _Connection | None:
        """The newest idle connection that is still good, out of the pool."""
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
        """Wait to be the one who begins a connection to this place in a round of the event loop, and among the few who
        begin one at all.

        Of hundreds begun at once, none would carry a byte before the last is begun. And while there are answers, rounds
        take long and connections come free, so a quick receiver is given few of them; a slow one has all of them soon.
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
                self._turns[place] = line  # behind the others
        if self._begun or self._turns:
            asyncio.get_running_loop().call_soon(self._next_round)

    def park(self, connection: _Connection) -> None:
        """Keep a connection for the next request to the same place."""
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

    def unpark(self, connection: _Connection) -> None:
        """Forget an idle connection that is of no more use; no harm if it is not idle."""
        if connection in self._idle:
            del self._idle[connection]
            self._idle_at[connection.key].pop(connection, None)

    def opened(self, connection: _Connection) -> None:
        self._connections.add(connection)
        if self._closed:
            connection.drop("shutting down")

    def lost(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        if not self._connections and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def _sweep(self) -> None:
        """Close what was idle for too long, and forget addresses that have nothing idle."""
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


class _Connection(asyncio.Protocol):
    """One connection, and the parser of the answer that is under way on it.

    A waiter always gets a result and never an exception, so a request that was given up leaves nothing to be logged.
    """

    __slots__ = (
        "_announced",
        "_body",
        "_complete",
        "_extra",
        "_feed",
        "_framed",
        "_head_bytes",
        "_headers_complete",
        "_keep_alive",
        "_last",
        "_last_bytes",
        "_more",
        "_owner",
        "_parser",
        "_received",
        "_retry_after",
        "_reused",
        "_size",
        "_status",
        "_transport",
        "_waiter",
        "key",
        "loop",
        "problem",
    )

    def __init__(self, owner: HttpClient, key: Key, loop: asyncio.AbstractEventLoop) -> None:
        self.key = key
        self.loop = loop
        self.problem: str | None = None  # why it can no longer be used
        self._owner = owner
        self._parser = httptools.HttpResponseParser(self)
        self._feed = self._parser.feed_data
        self._transport: asyncio.Transport | None = None
        self._waiter: _Waiter | None = None
        self._reused = False
        self._received = 0
        self._head_bytes = 0
        self._complete = False
        self._extra = False
        self._headers_complete = False
        self._framed = False
        self._announced = False
        self._keep_alive = False
        self._last: Answer | None = None  # that came in one piece, this one:
        self._last_bytes = b""
        self._status = 0
        self._retry_after: str | None = None
        self._body = b""
        self._more: list[bytes] | None = None
        self._size = 0

    # What the client does with it.

    def send(self, message: bytes) -> _Waiter:
        waiter: _Waiter = self.loop.create_future()
        self._received = 0
        self._head_bytes = 0
        self._complete = False
        self._extra = False
        self._headers_complete = False
        transport = self._transport
        if transport is None or self.problem is not None:
            # It was lost between the connect and now.
            self._settle(waiter, self.problem or "connection closed before the answer")
            return waiter
        self._waiter = waiter
        self._owner.writes.add(transport, message, self.loop)
        return waiter

    def abandon(self, waiter: _Waiter) -> None:
        """The request was given up. When its answer had come already, the connection is another's by now."""
        if self._waiter is waiter:
            self._waiter = None
            self.drop("given up")

    def drop(self, problem: str) -> None:
        """Close at once. Nothing unsent matters any more, and a polite TLS farewell would only linger."""
        if self.problem is None:
            self.problem = problem
        self._owner.unpark(self)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            self._settle(waiter, problem)
        if self._transport is not None:
            self._transport.abort()

    def _settle(self, waiter: _Waiter, problem: str) -> None:
        if self._reused and not self._received:
            waiter.set_result(_STALE)
        else:
            waiter.set_result(Unreachable(problem))

    # What the event loop tells it.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        if self.problem is not None:
            # It was given up while it was being made.
            transport.abort()
            return
        self._owner.opened(self)
        peer = transport.get_extra_info("peername")
        if peer is None or not _same(peer[0], self.key[0]):
            self.drop(f"connected to {peer[0] if peer else 'nobody'} instead of {self.key[0]}")
            return
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:
            # Nobody asked: whatever this is, it must not become the answer to the next request.
            self.drop("unasked bytes")
            return
        if data == self._last_bytes and self._last is not None and not self._received:
            # A receiver says the same over and over. The parser is between two answers, before and after this one.
            self._hand_over(self._last)
            return
        self._received += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserUpgrade:
            self.drop("malformed answer: it switches to another protocol")
            return
        except httptools.HttpParserError as exc:
            if not self._complete:
                self.drop(self.problem or f"malformed answer: {exc}")
                return
            self._extra = True
        if self._complete:
            answer = self._answer()
            if self._received == len(data) <= REPEATED_BYTES_MAX:
                self._last, self._last_bytes = answer, data
            self._hand_over(answer)
        elif not self._headers_complete and self._received > HEAD_BYTES_MAX:
            self.drop(_HEAD_TOO_LARGE)
        elif self._received > ANSWER_BYTES_MAX:
            self.drop("malformed answer: too much around the body")

    def eof_received(self) -> None:
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)
        self._transport = None
        self._owner.lost(self)

    def _end(self, exc: Exception | None) -> None:
        if self._waiter is not None and self._headers_complete and not self._framed and exc is None:
            # Neither a length nor chunks: the end of the connection is the end of the body.
            self._keep_alive = False
            self._hand_over(self._answer())
        elif exc is None:
            self.drop("connection closed before the answer" + (" was complete" if self._received_any else ""))
        else:
            self.drop(_why(exc) + " before the answer" + (" was complete" if self._received_any else ""))

    @property
    def _received_any(self) -> bool:
        return self._waiter is not None and self._received > 0

    def _answer(self) -> Answer:
        body = self._body if self._more is None else b"".join(self._more)
        if len(body) > BODY_BYTES_MAX:
            body = body[:BODY_BYTES_MAX]
        return Answer(self._status, self._retry_after, body)

    def _hand_over(self, answer: Answer) -> None:
        """Give the answer to who waits for it, then keep the connection or close it."""
        waiter, self._waiter = self._waiter, None
        assert waiter is not None
        if not waiter.done():
            waiter.set_result(answer)
        transport = self._transport
        if (
            self._keep_alive
            and not self._extra
            and self.problem is None
            and transport is not None
            # An answer that came before the whole request was sent leaves the rest of it in the way of the next.
            and not transport.get_write_buffer_size()
        ):
            self._reused = True
            self._owner.park(self)
        else:
            self.drop("not kept")

    # What the parser tells it.

    def on_message_begin(self) -> None:
        if self._complete:
            self._extra = True
            return
        self._headers_complete = False
        self._framed = False
        self._announced = False
        self._retry_after = None
        self._body = b""
        self._more = None
        self._size = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        length = len(name)
        self._head_bytes += length + len(value) + 4
        if self._head_bytes > HEAD_BYTES_MAX:
            self.problem = _HEAD_TOO_LARGE
            raise ValueError(_HEAD_TOO_LARGE)
        if self._complete or self._headers_complete:
            return  # a trailer, or what follows the answer
        if length == 14:
            if name.lower() == b"content-length":
                self._framed = True
                self._announced = value != b"0"
        elif length == 17:
            if name.lower() == b"transfer-encoding":
                self._framed = value.lower().rstrip().endswith(b"chunked")
                self._announced = True
        elif length == 11 and name.lower() == b"retry-after":
            self._retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        parser = self._parser
        self._headers_complete = True
        self._status = status = parser.get_status_code()
        self._keep_alive = parser.should_keep_alive()
        if status < 200:
            if status < 100:
                self.problem = f"malformed answer: status {status}"
                raise ValueError(self.problem)
            self._headers_complete = False
        elif status in (204, 304):
            # These have no body whatever they announce; if one announces some, it may follow all the same.
            self._complete = True
            if self._announced:
                self._keep_alive = False

    def on_body(self, data: bytes) -> None:
        if self._complete:
            return
        size = self._size
        if size == 0:
            self._body = data
        elif self._more is None:
            self._more = [self._body, data]
        else:
            self._more.append(data)
        self._size = size = size + len(data)
        if size > BODY_BYTES_MAX:
            self._complete = True
            self._keep_alive = False

    def on_message_complete(self) -> None:
        if self._headers_complete:
            self._complete = True


_HEAD_TOO_LARGE = f"malformed answer: more than {HEAD_BYTES_MAX // 1024} KiB of headers"


def tls_context() -> ssl.SSLContext:
    """The system's trusted roots, host names checked, and HTTP/1.1 as the only protocol spoken."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _same(one: str, other: str) -> bool:
    return one == other or ipaddress.ip_address(one) == ipaddress.ip_address(other)


def _why(exc: Exception) -> str:
    """A failure to connect, in words that a user can act on."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"TLS: {exc.verify_message or exc.reason}"
    if isinstance(exc, ssl.SSLError):
        return f"TLS: {(exc.reason or str(exc)).lower().replace('_', ' ')}"
    if isinstance(exc, OSError) and exc.errno:
        return os.strerror(exc.errno).lower()
    return f"connection failed: {exc}" if str(exc) else "connection failed"
