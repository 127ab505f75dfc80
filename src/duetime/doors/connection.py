"""One HTTP/1.1 connection: reads requests, has the application handle them, and writes the responses in order.

httptools parses. This module passes requests to the application one at a time, in order; buffers no more of a body than
its handler asks for; and handles no request of a client that does not read the previous response.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import aclosing
from typing import cast
from urllib.parse import unquote

import httptools

from duetime.doors.body_budget import BodyBudget
from duetime.doors.http import Request, Response, Stream, TooSlow, shown_path
from duetime.doors.http_heads import HEAD_BYTES_MAX, Header, framing_of, lines, size_of
from duetime.doors.server_interfaces import Host
from duetime.errors import DuetimeError, InvalidInput

log = logging.getLogger(__name__)

READ_AT_ONCE_MAX = 16 * 1024
READ_BODY_AT_ONCE_MAX = 64 * 1024
PARSED_AT_ONCE_MAX = 4 * 1024
"""No more than this is parsed while requests wait: a small one takes thirty times the memory of its bytes."""
UNREAD_BYTES_MAX = 64 * 1024
"""How much of a body is buffered before reading pauses."""
READ_OVER_BYTES_MAX = 1024 * 1024
"""After an early error, the rest of a body up to this size is read and dropped, so that the connection can go on."""
IDLE_SECONDS_MAX = 75.0
"""How long a connection may have no request, and a body may make no progress."""
GRACE_SECONDS = 20.0
"""How long a request's head may take, and how far its body may lag behind ``BODY_BYTES_PER_SECOND_MIN``."""
BODY_BYTES_PER_SECOND_MIN = 4 * 1024
WRITE_AT_ONCE_MAX = 16 * 1024
REPEATED_BYTES_MAX = 1024
"""The largest head that a connection remembers."""

HEAD_TOO_LARGE = f"the request's headers or trailers are larger than {HEAD_BYTES_MAX} bytes"

_FRAMING = (b"content-length", b"transfer-encoding")


class Connection(asyncio.BufferedProtocol):
    # Without slots, an object with more than 30 attributes costs 2,300 instructions more per request (CPython 3.11).
    __slots__ = (
        *("_answering", "_body_wanted", "_client_finished", "_drained", "_ended", "_framing", "_headers"),
        *("_ignoring_input", "_in_head", "_known", "_known_bytes", "_known_head", "_loop", "_overhead_bytes"),
        *("_parser", "_paused", "_read", "_reading", "_segment", "_server", "_since", "_streaming", "_task"),
        *("_transport", "_unparsed", "_unsent", "_unsent_since", "_url", "_wait_began", "_waiting", "address"),
        *("lost", "signed_in"),
    )

    def __init__(self, server: Host, loop: asyncio.AbstractEventLoop) -> None:
        self.address = ""
        self.signed_in = not server.admission.key_needed
        self._server = server
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request | DuetimeError] = deque()  # an error: the bytes were not valid HTTP
        self._reading: Request | None = None
        self._read: Request | None = None  # the request that ended in the segment that is being parsed
        self._known: Request | None = None  # an earlier request without its body, which had this head and size:
        self._known_head, self._known_bytes = b"", 0
        self._answering: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._streaming = False
        self._body_wanted = False  # the handler has asked for the rest of the body
        self._ignoring_input = False  # all further input is dropped
        self._client_finished = False  # the client will send no more
        self._ended = False  # the last response is written
        self.lost = False
        self._paused = False
        self._since = loop.time()
        self._wait_began = self._since  # when the wait for the current head or body began
        self._unparsed = b""  # received while requests were waiting
        self._unsent, self._unsent_since = 0, 0.0
        self._in_head = False
        self._url = b""
        self._headers: list[Header] = []
        self._framing = b""  # the framing headers of a body that this parser will not read
        self._segment = 0
        self._overhead_bytes = 0  # bytes of segments with neither the beginning of a request nor a piece of its body

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        if peer:
            self.address = peer[0]
        self._server.connected(self, self._loop.time())
        if self._server.stopping:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ignoring_input = self._client_finished = self.lost = True
        self._unparsed = b""
        self._server.admission.leave(self)
        self._waiting.clear()
        if self._reading is not None:
            self._reading.leave()
        self.resume_writing()
        if self._task is None:
            self._server.disconnected(self)
        elif self._streaming:
            self._task.cancel()

    def eof_received(self) -> bool:
        """The client closed its sending side. It still gets its response, but not an endless stream."""
        self._ignoring_input = self._client_finished = True
        if self._reading is not None:
            self._reading.leave()
        self._server.writes.flush()
        return self._answering is not None and not self._streaming

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._server.buffer if self._body_wanted else self._server.small_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._received(bytes(self._server.buffer[:nbytes]))

    def _received(self, data: bytes) -> None:
        if self._ignoring_input:
            return
        between = self._reading is None and not self._in_head
        if between and len(data) == self._known_bytes and data.startswith(self._known_head) and self._known is not None:
            # A client often repeats the same head. The parser is between two requests, before and after this.
            self._since = self._loop.time()
            self._came(self._known.with_body(data[len(self._known_head) :]))
            return
        step = READ_AT_ONCE_MAX if self._body_wanted else PARSED_AT_ONCE_MAX
        for at in range(0, len(data), step):
            if self._waiting:
                self._unparsed += data[at:]
                break
            self._parse(data[at : at + step])
            if self._ignoring_input:
                break
        else:
            if between and self._read is not None:
                self._remember(self._read, data)
        self._read = None

    def _parse(self, data: bytes) -> None:
        self._segment = len(data)
        self._overhead_bytes += self._segment
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(error.__context__)
        else:
            # The limit for heads, trailers and the bytes between the chunks of a body.
            if self._overhead_bytes > HEAD_BYTES_MAX and (self._in_head or self._reading is not None):
                self._refuse(InvalidInput("", HEAD_TOO_LARGE))

    def _remember(self, request: Request, data: bytes) -> None:
        """Remember a request that is exactly ``data``: any data with the same head and length is one request, too."""
        head, end, body = data.partition(b"\r\n\r\n")
        if len(head) <= REPEATED_BYTES_MAX and not request.old and request.has_body(body):
            self._known, self._known_head, self._known_bytes = request.with_body(b""), head + end, len(data)

    def _upgrade(self, rest: bytes) -> None:
        """Ignore a request to change the protocol. The parser does not read the body of such a request, so another
        parser, which does not see the Upgrade header, reads it."""
        if self._framing:
            self._parser = httptools.HttpRequestParser(_Rest(self))
            head, self._framing = b"POST / HTTP/1.1\r\nconnection: close\r\n%b\r\n" % self._framing, b""
            self._parse(head + rest)
        else:
            self._ignoring_input = True

    def _refuse(self, fault: BaseException | None = None) -> None:
        """Respond with an error to invalid HTTP, after the responses to earlier requests."""
        if self._ignoring_input:
            return  # It came after the last request and is dropped.
        self._ignoring_input = True
        request = self._reading
        if request is not None and request.answered:
            self._end(all_read=False)
            return
        if request is not None:
            request.leave()
        not_http = InvalidInput("", "the request is not valid HTTP")
        self._waiting.append(fault if isinstance(fault, DuetimeError) else not_http)
        self._answer_next()

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._in_head = True
        self._overhead_bytes = 0
        self._since = self._wait_began = self._loop.time()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # and not in the trailers
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        parser, url, headers = self._parser, self._url, self._headers
        if self._overhead_bytes + self._segment > HEAD_BYTES_MAX and size_of(url, headers) > HEAD_BYTES_MAX:
            raise InvalidInput("", HEAD_TOO_LARGE)
        if url.startswith(b"/") and b"#" not in url:
            raw_path, _, query = url.partition(b"?")
        else:
            parsed = httptools.parse_url(url)
            raw_path, query = parsed.path or b"/", parsed.query or b""
        path = raw_path.decode("ascii")
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise InvalidInput("", f"HTTP/{version} is not supported: use HTTP/1.1 or HTTP/1.0")
        old = version == "1.0"
        request = self._reading = Request(
            parser.get_method().decode("ascii"),
            unquote(path) if "%" in path else path,
            raw_path,
            query,
            headers,
            self,
            framing_of(headers, old=old),
        )
        request.old = old
        request.last = not parser.should_keep_alive()
        if parser.should_upgrade():
            request.last = True
            self._framing = b"".join(b"%b: %b\r\n" % header for header in headers if header[0] in _FRAMING)
        self._came(request)

    def _came(self, request: Request) -> None:
        self._waiting.append(request)
        if self._answering is None:
            self._answer_next()
        else:
            self._pause_reading()

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes = 0
        self._since = self._loop.time()
        request = self._reading
        if request is None:
            return
        fed = request.feed(body)
        if not request.answered:
            if fed > UNREAD_BYTES_MAX:
                self._pause_reading()
        elif fed > READ_OVER_BYTES_MAX:
            self._end(all_read=False)

    def on_message_complete(self) -> None:
        request = self._reading
        if request is None or self._framing:
            return
        self._reading = None
        self._overhead_bytes = 0
        request.last = request.last or not self._parser.should_keep_alive()  # Trailers may change it.
        self._ignoring_input = self._ignoring_input or request.last
        request.end()
        self._read = request

    # Backpressure.

    def _pause_reading(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._paused = False
            if self._unparsed:
                data, self._unparsed = self._unparsed, b""
                self._received(data)
            if not self._paused:
                self._transport.resume_reading()

    def more(self, request: Request) -> None:
        """The handler waits for more of the body."""
        self._since = self._loop.time()
        if not self._body_wanted:
            self._wait_began = self._since
        if not self._body_wanted and not request.old and (request.header(b"expect") or b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._body_wanted = True
        self._resume_reading()

    # Called by requests.

    @property
    def budget(self) -> BodyBudget:
        return self._server.bodies if self.signed_in else self._server.anonymous_bodies

    def sign_in(self) -> None:
        """A request carried a valid key or session."""
        self.signed_in = True
        self._server.admission.sign_in(self, self._loop.time())

    # Responses.

    def _answer_next(self) -> None:
        if self._answering is not None or self._ended:
            return
        if self._waiting:
            request = self._waiting.popleft()
            if isinstance(request, Request):
                self._answering = request
                self._body_wanted = False
                self._task = self._loop.create_task(self._answer(request))
            else:
                path = self._url.decode("ascii", "replace")
                self._write(self._server.application.refusal(request, path), last=True)
                self._end(all_read=False)
        elif self._ignoring_input or self._server.stopping:
            self._end()
        else:
            self._since = self._wait_began = self._loop.time()
            self._body_wanted = False
            self._resume_reading()

    async def _answer(self, request: Request) -> None:
        try:
            response = await self._server.application.answer(request)
            if self._drained is not None:
                await self._until_drained()
            if response is not None and not self._transport.is_closing():
                last = request.last or self._server.stopping or self._lingers(request)
                if not isinstance(response, Stream) or request.method == "HEAD":
                    self._write(response, last=last, old=request.old, bare=request.method == "HEAD")
                    if self._drained is not None:  # The response may be as large as the body, which stays counted.
                        await self._until_drained()
                elif not self._client_finished:
                    last = last or request.old  # In HTTP/1.0, the end of the connection ends the stream.
                    await self._stream(response, last=last, chunked=not request.old)
                if last:
                    self._end(all_read=request.whole)
        except Exception:
            log.exception("the response to %s %s failed", request.method, shown_path(request))
            self._transport.abort()
        finally:
            request.release()
            self._answering = self._task = None
            if self.lost:
                self._server.disconnected(self)
        self._answer_next()

    async def _until_drained(self) -> None:
        """Wait until the client has read what is buffered."""
        while self._drained is not None:
            await self._drained

    def _lingers(self, request: Request) -> bool:
        """Whether the response comes before the whole body, and the rest is too large to read over, or may not come."""
        if request.whole:
            return False
        expects = not self._body_wanted and request.header(b"expect") is not None
        return expects or request.announced > READ_OVER_BYTES_MAX

    def _end(self, *, all_read: bool = True) -> None:
        """Close the connection; later if the client is still sending, because it would lose the response."""
        self._ended = self._ignoring_input = True
        self._server.writes.flush()
        if all_read or self._client_finished or self._transport.is_closing():
            self._transport.close()
        else:
            self._since = self._loop.time()
            self._transport.write_eof()
            self._resume_reading()

    def _write(self, response: Response, *, last: bool, old: bool = False, bare: bool = False) -> None:
        body, length = response.body, b""
        if response.status in (204, 304):
            body = b""
        elif not isinstance(response, Stream):
            length = b"content-length: %d\r\n" % len(body)
        head = self._head(response, length, last=last, old=old)
        if bare or len(body) <= WRITE_AT_ONCE_MAX:
            self._server.writes.add(self._transport, head if bare else head + body, self._loop)
        else:
            self._transport.writelines([head, body])

    def _head(self, response: Response, framing: bytes, *, last: bool, old: bool = False) -> bytes:
        after = b"connection: close\r\n" if last else b"connection: keep-alive\r\n" if old else b""
        if response.location:
            after += b"location: %b\r\n" % response.location
        first = lines(response.status, tuple(response.headers), tuple(response.guards))
        return b"%bdate: %b\r\n%b%b\r\n" % (first, self._server.date, framing, after)

    async def _stream(self, response: Stream, *, last: bool, chunked: bool) -> None:
        framing = b"transfer-encoding: chunked\r\n" if chunked else b""
        self._transport.write(self._head(response, framing, last=last))
        self._streaming = True
        try:
            async with aclosing(response.pieces) as pieces:
                async for piece in pieces:
                    if piece:
                        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
                    await self._until_drained()
        finally:
            self._streaming = False
        if chunked:
            self._transport.write(b"0\r\n\r\n")

    # Called by the server.

    def check_timeouts(self) -> None:
        now = self._loop.time()
        unsent = self._transport.get_write_buffer_size()
        if unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        request = self._answering
        if unsent and now - self._unsent_since > IDLE_SECONDS_MAX:
            self._transport.abort()
        elif request is None or request.waits:
            still_max = min(IDLE_SECONDS_MAX, GRACE_SECONDS) if self._ended else IDLE_SECONDS_MAX
            if not unsent and now - self._since > still_max:
                self._transport.close()
            elif self._is_slow(now):
                if request is None:
                    self._transport.close()
                else:
                    request.last = True
                    request.fail(TooSlow())

    def _is_slow(self, now: float) -> bool:
        """Whether the head or body takes too long to arrive."""
        if self._ended or (self._reading is None and not self._in_head):
            return False
        fed = 0 if self._reading is None else self._reading.fed
        return now - self._wait_began > GRACE_SECONDS + fed / BODY_BYTES_PER_SECOND_MIN

    def idle_since(self) -> float | None:
        """Since when the server waits for the client: to send a request or the rest of one, or to read a response. None
        while the server handles a request."""
        request = self._answering
        if request is None or request.waits or self._drained is not None:
            return self._since
        return None

    def drop(self) -> None:
        """Close the connection to make room for another. A response that was just written is still sent."""
        self._server.writes.flush()
        self._transport.abort()

    def finish(self) -> None:
        if self._answering is None:
            self._transport.close()
        elif self._streaming and self._drained is not None:
            self.abort()

    def abort(self) -> asyncio.Task[None] | None:
        self._transport.abort()
        if self._task is not None:
            self._task.cancel()
        return self._task


class _Rest:
    """The callbacks for a body whose head another parser has read."""

    def __init__(self, connection: Connection) -> None:
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete
