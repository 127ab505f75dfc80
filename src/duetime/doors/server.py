"""HTTP/1.1 over plain connections: reads requests, has each one answered, and writes the answers in their order.

httptools parses, the application answers, and this is what is between them: one request of a connection at a time, in
the order in which they came; no more of a body in memory than its reader asks for; no answer for a client that does not
read the one before; and an end that waits for answers that are under way, but for nobody else.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections import deque
from contextlib import aclosing
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Protocol, cast
from urllib.parse import unquote

import httptools

from duetime.doors.http import Header, Request, Response, Stream
from duetime.errors import InvalidInput, SettingsError

log = logging.getLogger(__name__)

BACKLOG = 4096
HEAD_BYTES_MAX = 64 * 1024
UNREAD_BYTES_MAX = 64 * 1024
"""How much of a body may wait for its reader before the client has to."""
IDLE_SECONDS_MAX = 75.0
"""How long a connection may be without a request, the head of one may take, and a body may stand still."""
DRAIN_SECONDS_MAX = 5.0
LOOK_SECONDS = 1.0
WRITE_AT_ONCE_MAX = 16 * 1024

_NAME = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+").fullmatch
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*").fullmatch


class Application(Protocol):
    """Who answers."""

    async def answer(self, request: Request) -> Response | None:
        """The answer to a request, whatever becomes of it; None when nobody waits for one."""

    def refusal(self, error: Exception) -> Response:
        """The answer to what is not a request."""


class Server:
    def __init__(self, application: Application) -> None:
        self.application = application
        self.date = b""
        self.connections: set[_Connection] = set()
        self.stopping = False
        self._wake = asyncio.Event()

    async def serve(self, listener: socket.socket) -> None:
        """Answer whoever comes, until ``stop``."""
        loop = asyncio.get_running_loop()
        self.date = _date()
        listening = await loop.create_server(lambda: _Connection(self, loop), sock=listener, backlog=BACKLOG)
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

    def left(self, connection: _Connection) -> None:
        self.connections.discard(connection)
        if self.stopping:
            self._wake.set()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + DRAIN_SECONDS_MAX
        for connection in list(self.connections):
            connection.finish()
        while self.connections and loop.time() < until:
            await self._pause(until - loop.time())
        tasks = [connection.abort() for connection in self.connections]
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)


class _Connection(asyncio.Protocol):
    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        # What follows a request that is to be the last one is not looked at, so it is not an error either.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._waiting: deque[Request | None] = deque()  # None: what came was not HTTP
        self._reading: Request | None = None
        self._answering: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._streaming = False
        self._asked = False  # for the rest of the body
        self._deaf = False  # whatever comes is dropped
        self._paused = False
        self._in_head = False
        self._head_bytes = 0
        self._since = loop.time()
        self._url = b""
        self._headers: list[Header] = []

    # What the transport tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)
        if self._server.stopping:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.left(self)
        self._deaf = True
        self._waiting.clear()
        if self._reading is not None:
            self._reading.leave()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._streaming and self._task is not None:
            self._task.cancel()

    def eof_received(self) -> bool:
        """Who has said all still wants the answer, unless it is a stream: that one has left."""
        self._deaf = True
        if self._reading is not None:
            self._reading.leave()
        return self._answering is not None and not self._streaming

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._deaf = True  # What follows would be another protocol, which nobody here speaks.
        except httptools.HttpParserError:
            self._refuse()
        else:
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > HEAD_BYTES_MAX:
                    self._refuse()

    def _refuse(self) -> None:
        """Say that this is not HTTP, after the answers to what was."""
        self._deaf = True
        if self._reading is not None:
            self._reading.leave()
        self._waiting.append(None)
        self._answer_next()

    # What the parser tells.

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._in_head = True
        self._head_bytes = 0
        self._since = self._loop.time()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        parser, url = self._parser, self._url
        if url.startswith(b"/") and b"#" not in url:
            raw_path, _, query = url.partition(b"?")
        else:
            parsed = httptools.parse_url(url)
            raw_path, query = parsed.path or b"", parsed.query or b""
        path = raw_path.decode("ascii")
        request = self._reading = Request(
            parser.get_method().decode("ascii"),
            unquote(path) if "%" in path else path,
            raw_path,
            query,
            self._headers,
            self._more,
        )
        request.last = parser.get_http_version() == "1.0" or not parser.should_keep_alive() or parser.should_upgrade()
        self._waiting.append(request)
        if self._answering is None:
            self._answer_next()
        else:
            self._pause_reading()

    def on_body(self, body: bytes) -> None:
        self._since = self._loop.time()
        if self._reading is not None and self._reading.feed(body) > UNREAD_BYTES_MAX:
            self._pause_reading()

    def on_message_complete(self) -> None:
        if self._reading is not None:
            self._reading.end()
            self._reading = None

    # Reading no more than somebody wants.

    def _pause_reading(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def _more(self, request: Request) -> None:
        """The one who answers waits for more of the body."""
        if not self._asked and (request.header(b"expect") or b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._asked = True
        self._resume_reading()

    # Answering.

    def _answer_next(self) -> None:
        if self._answering is not None or self._transport.is_closing():
            return
        if not self._waiting:
            self._since = self._loop.time()
            self._resume_reading()
            if self._deaf or self._server.stopping:
                self._transport.close()
            return
        request = self._waiting.popleft()
        if request is None:
            refusal = self._server.application.refusal(InvalidInput("", "the request is not valid HTTP"))
            self._write(refusal, last=True)
            self._transport.close()
            return
        self._answering = request
        self._asked = False
        self._task = self._loop.create_task(self._answer(request))

    async def _answer(self, request: Request) -> None:
        try:
            response = await self._server.application.answer(request)
            while self._drained is not None:
                await self._drained
            if response is not None and not self._transport.is_closing():
                last = request.last or self._server.stopping
                if isinstance(response, Stream) and request.method != "HEAD":
                    await self._stream(response, last=last)
                else:
                    self._write(response, last=last, bare=request.method == "HEAD")
                if last:
                    self._transport.close()
        except Exception:
            log.exception("the answer to %s %s broke off", request.method, request.path)
            self._transport.abort()
        request.drop()  # What is still to come of its body is read, and nothing more.
        self._answering = self._task = None
        self._answer_next()

    def _write(self, response: Response, *, last: bool, bare: bool = False) -> None:
        body = response.body
        head = b"%bdate: %b\r\n%b%b\r\n" % (
            _head(response.status, tuple(response.headers), tuple(response.guards)),
            self._server.date,
            b"" if response.status in (204, 304) else b"content-length: %d\r\n" % len(body),
            b"connection: close\r\n" if last else b"",
        )
        if bare or not body:
            self._transport.write(head)
        elif len(body) <= WRITE_AT_ONCE_MAX:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])

    async def _stream(self, response: Stream, *, last: bool) -> None:
        closing = b"connection: close\r\n" if last else b""
        head = _head(response.status, tuple(response.headers), tuple(response.guards))
        self._transport.write(
            b"%bdate: %b\r\ntransfer-encoding: chunked\r\n%b\r\n" % (head, self._server.date, closing)
        )
        self._streaming = True
        try:
            async with aclosing(response.pieces) as pieces:
                async for piece in pieces:
                    self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    while self._drained is not None:
                        await self._drained
        finally:
            self._streaming = False
        self._transport.write(b"0\r\n\r\n")

    # What the server tells.

    def look(self) -> None:
        """Close what has stood still for too long."""
        still = self._answering is None or self._answering.waits
        if still and self._loop.time() - self._since > IDLE_SECONDS_MAX:
            self._transport.close()

    def finish(self) -> None:
        """Close what has no request; who does not read a stream is not waited for."""
        if self._answering is None:
            self._transport.close()
        elif self._streaming and self._drained is not None:
            self.abort()

    def abort(self) -> asyncio.Task[None] | None:
        """End it now; its task, if there is one, has been canceled."""
        self._transport.abort()
        if self._task is not None:
            self._task.cancel()
        return self._task


@lru_cache(maxsize=1_024)
def _head(status: int, headers: tuple[Header, ...], guards: tuple[Header, ...]) -> bytes:
    """The first lines of an answer; most answers have the same few."""
    lines = [b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode())]
    for name, value in (*headers, *guards):
        if not _NAME(name) or not _VALUE(value):
            raise ValueError(f"{name!r}: {value!r} is not a header")
        lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join(lines) + b"\r\n"


def _date() -> bytes:
    return formatdate(usegmt=True).encode()


def bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
        return listener
    except OSError as error:
        raise SettingsError(f"PORT: can't listen on {host}:{port}: {error.strerror}") from error
