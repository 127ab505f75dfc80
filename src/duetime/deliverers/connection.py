"""One outgoing connection: sends one request at a time and parses the response.

It returns to the pool only after a complete response that allows reuse, with no bytes left over in either direction, so
a response can never be mistaken for the response to another request.
"""

from __future__ import annotations

import asyncio
import enum
import ipaddress
import os
import socket
import ssl
from typing import Protocol, cast

import httptools
from msgspec import Struct

from duetime.batched_writes import BatchedWrites
from duetime.deliverers.deadlines import Bucket, Deadlines
from duetime.errors import DuetimeError

BODY_BYTES_MAX = 64 * 1024
HEAD_BYTES_MAX = 64 * 1024
ANSWER_BYTES_MAX = 1024 * 1024  # in all, with chunk sizes, trailers and 1xx responses
REPEATED_BYTES_MAX = 1024  # the largest response that a connection remembers

Key = tuple[str, int, str | None]
"""Connections with the same key are interchangeable: address, port, and the name in the verified certificate."""


class Unreachable(DuetimeError):
    """There was no complete response; the message says why, for users."""


class Answer(Struct, frozen=True):
    status: int
    retry_after: str | None
    body: bytes  # the first 64 KiB


class NoAnswer(enum.Enum):
    """Results of a request without a response, besides ``Unreachable``."""

    STALE = "a reused connection was closed before the first byte of the response"
    LATE = "the request timed out"


Waiter = asyncio.Future[Answer | Unreachable | NoAnswer]


class Pool(Protocol):
    """The pool that a connection belongs to."""

    writes: BatchedWrites
    deadlines: Deadlines

    def opened(self, connection: Connection) -> None: ...

    def park(self, connection: Connection) -> None:
        """Keep the connection for the next request with the same key."""

    def unpark(self, connection: Connection) -> None:
        """Remove the connection if it is kept: it is no longer usable."""

    def lost(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """A waiter always gets a result and never an exception, so an abandoned request does not log an unhandled one."""

    __slots__ = (
        "_announced",
        "_body",
        "_bucket",
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
        "_parser",
        "_pool",
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

    def __init__(self, pool: Pool, key: Key, loop: asyncio.AbstractEventLoop) -> None:
        self.key = key
        self.loop = loop
        self.problem: str | None = None  # why it can no longer be used
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._feed = self._parser.feed_data
        self._transport: asyncio.Transport | None = None
        self._waiter: Waiter | None = None
        self._bucket: Bucket | None = None  # its deadline, while it waits for a response
        self._reused = False
        self._received = 0
        self._head_bytes = 0
        self._complete = False
        self._extra = False
        self._headers_complete = False
        self._framed = False
        self._announced = False
        self._keep_alive = False
        self._last: Answer | None = None  # the last response that arrived in one piece, parsed from:
        self._last_bytes = b""
        self._status = 0
        self._retry_after: str | None = None
        self._body = b""
        self._more: list[bytes] | None = None
        self._size = 0

    # Called by the client.

    def send(self, message: bytes, until: float | None = None) -> Waiter:
        """Send a request; the response must arrive before ``until`` (event loop time)."""
        waiter: Waiter = self.loop.create_future()
        self._received = 0
        self._head_bytes = 0
        self._complete = False
        self._extra = False
        self._headers_complete = False
        transport = self._transport
        if transport is None or self.problem is not None:
            # It was lost between the connect and now.
            self._settle(waiter, self.problem or "connection closed before the response")
            return waiter
        self._waiter = waiter
        if until is not None:
            self._bucket = self._pool.deadlines.enter(self, until, self.loop)
        self._pool.writes.add(transport, message, self.loop)
        return waiter

    def abandon(self, waiter: Waiter) -> None:
        """Abandon the request. If its response has arrived already, the connection may belong to another request."""
        if self._waiter is waiter:
            self._released()
            self.drop("given up")

    def drop(self, problem: str) -> None:
        """Close at once, without sending what is buffered and without a TLS close handshake."""
        if self.problem is None:
            self.problem = problem
        self._pool.unpark(self)
        waiter = self._released()
        if waiter is not None and not waiter.done():
            self._settle(waiter, problem)
        if self._transport is not None:
            self._transport.abort()

    def expire(self) -> None:
        """The request timed out."""
        waiter = self._released()
        if waiter is not None and not waiter.done():
            waiter.set_result(NoAnswer.LATE)
        self.drop("no response in time")

    def _released(self) -> Waiter | None:
        """Detach and return the waiter of the current request."""
        waiter, self._waiter = self._waiter, None
        if self._bucket is not None:
            self._bucket.discard(self)
            self._bucket = None
        return waiter

    def _settle(self, waiter: Waiter, problem: str) -> None:
        if self._reused and not self._received:
            waiter.set_result(NoAnswer.STALE)
        else:
            waiter.set_result(Unreachable(problem))

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)
        if self.problem is not None:
            # It was dropped while connecting.
            transport.abort()
            return
        self._pool.opened(self)
        peer = transport.get_extra_info("peername")
        if peer is None or not _same(peer[0], self.key[0]):
            self.drop(f"connected to {peer[0] if peer else 'no address'} instead of {self.key[0]}")
            return
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:
            # There is no request: these bytes must not become the response to the next one.
            self.drop("unexpected bytes")
            return
        if data == self._last_bytes and self._last is not None and not self._received:
            # Receivers often repeat the same response. Skip the parser, which is between two responses.
            self._hand_over(self._last)
            return
        self._received += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserUpgrade:
            self.drop("malformed response: it switches to another protocol")
            return
        except httptools.HttpParserError as exc:
            if not self._complete:
                self.drop(self.problem or f"malformed response: {exc}")
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
            self.drop("malformed response: too many bytes around the body")

    def eof_received(self) -> None:
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(exc)
        self._transport = None
        self._pool.lost(self)

    def _end(self, exc: Exception | None) -> None:
        if self._waiter is not None and self._headers_complete and not self._framed and exc is None:
            # Neither a length nor chunks: the body ends with the connection.
            self._keep_alive = False
            self._hand_over(self._answer())
        elif exc is None:
            self.drop("connection closed before the response" + (" was complete" if self._received_any else ""))
        else:
            self.drop(why(exc) + " before the response" + (" was complete" if self._received_any else ""))

    @property
    def _received_any(self) -> bool:
        return self._waiter is not None and self._received > 0

    def _answer(self) -> Answer:
        body = self._body if self._more is None else b"".join(self._more)
        if len(body) > BODY_BYTES_MAX:
            body = body[:BODY_BYTES_MAX]
        return Answer(self._status, self._retry_after, body)

    def _hand_over(self, answer: Answer) -> None:
        """Pass the response to the waiter, then keep the connection or close it."""
        waiter = self._released()
        assert waiter is not None
        if not waiter.done():
            waiter.set_result(answer)
        transport = self._transport
        if (
            self._keep_alive
            and not self._extra
            and self.problem is None
            and transport is not None
            # If the response came before the whole request was sent, the rest would precede the next request.
            and not transport.get_write_buffer_size()
        ):
            self._reused = True
            self._pool.park(self)
        else:
            self.drop("not kept")

    # Called by the parser.

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
            return  # a trailer, or bytes after the response
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
                self.problem = f"malformed response: status {status}"
                raise ValueError(self.problem)
            self._headers_complete = False
        elif status in (204, 304):
            # These have no body, whatever their headers say. If they announce one, it may follow anyway: do not reuse.
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


_HEAD_TOO_LARGE = f"malformed response: more than {HEAD_BYTES_MAX // 1024} KiB of headers"


def _same(one: str, other: str) -> bool:
    return one == other or ipaddress.ip_address(one) == ipaddress.ip_address(other)


def why(exc: Exception) -> str:
    """The error text of a failed connection, for users."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"TLS: {exc.verify_message or exc.reason}"
    if isinstance(exc, ssl.SSLError):
        return f"TLS: {(exc.reason or str(exc)).lower().replace('_', ' ')}"
    if isinstance(exc, OSError) and exc.errno:
        return os.strerror(exc.errno).lower()
    # The text of an error without a number may contain the address, which clients must not see.
    return "connection failed"
