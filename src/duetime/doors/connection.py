"""One connection of HTTP/1.1: reads requests, has each one answered, and writes the answers in their order.

httptools parses, the application answers, and this is what is between them: one request at a time, in the order in
which they came; no more of a body in memory than its reader asks for; no answer for a client that does not read the one
before.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import aclosing
from typing import cast
from urllib.parse import unquote

import httptools

from duetime.doors.budget import Budget
from duetime.doors.heads import HEAD_BYTES_MAX, Header, framing_of, lines, size_of
from duetime.doors.host import Host
from duetime.doors.http import Request, Response, Stream, TooSlow, shown_path
from duetime.errors import DuetimeError, InvalidInput

log = logging.getLogger(__name__)

READ_AT_ONCE_MAX = 16 * 1024
READ_BODY_AT_ONCE_MAX = 64 * 1024
PARSED_AT_ONCE_MAX = 4 * 1024
"""Beyond it nothing is parsed while requests wait: small ones take thirty times the memory of their bytes."""
UNREAD_BYTES_MAX = 64 * 1024
"""How much of a body may wait for its reader before the client has to."""
READ_OVER_BYTES_MAX = 1024 * 1024
"""How large a body may be that was refused before it was whole, for the connection to serve on behind it."""
IDLE_SECONDS_MAX = 75.0
"""How long a connection may be without a request, and a body may stand still."""
GRACE_SECONDS = 20.0
"""How long the head of a request may take, and how far its body may be behind ``BODY_BYTES_PER_SECOND_MIN``."""
BODY_BYTES_PER_SECOND_MIN = 4 * 1024
WRITE_AT_ONCE_MAX = 16 * 1024
REPEATED_BYTES_MAX = 1024
"""Of a head that a connection remembers."""

_FRAMING = (b"content-length", b"transfer-encoding")


class Connection(asyncio.BufferedProtocol):
    # Without slots, an object with more than 30 attributes costs 2,300 instructions more per request (CPython 3.11).
    __slots__ = (
        *("_answering", "_asked", "_begun", "_bodiless", "_deaf", "_drained", "_ended", "_framing", "_headers"),
        *(
            "_in_head",
            "_known",
            "_known_bytes",
            "_known_head",
            "_left",
            "_loop",
            "_lost",
            "_parser",
            "_paused",
            "_read",
        ),
        *("_reading", "_segment", "_server", "_since", "_streaming", "_task", "_transport", "_unparsed"),
        *("_unsent", "_unsent_since", "_url", "_waiting", "address", "lost", "signed_in"),
    )

    def __init__(self, server: Host, loop: asyncio.AbstractEventLoop) -> None:
        self.address = ""
        self.signed_in = not server.admission.key_needed
        self._server = server
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request | DuetimeError] = deque()  # an error: what came was not HTTP
        self._reading: Request | None = None
        self._read: Request | None = None  # to its end, by the segment that is being parsed
        self._known: Request | None = None  # without its body, of a request that had this head and this size:
        self._known_head, self._known_bytes = b"", 0
        self._answering: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._streaming = False
        self._asked = False  # for the rest of the body
        self._deaf = False  # whatever comes is dropped
        self._left = False  # the client will send no more
        self._ended = False  # the last answer is written
        self.lost = False
        self._paused = False
        self._since = loop.time()
        self._begun = self._since  # when the head or body that is coming was first waited for
        self._unparsed = b""  # what came while requests were waiting
        self._unsent, self._unsent_since = 0, 0.0
        self._in_head = False
        self._url = b""
        self._headers: list[Header] = []
        self._framing = b""  # of a body that this parser will not read
        self._segment = 0
        self._bodiless = 0  # bytes of segments that brought neither the beginning of a request nor a piece of its body

    # What the transport tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername")
        if peer:
            self.address = peer[0]
        self._server.came(self, self._loop.time())
        if self._server.stopping:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deaf = self._left = self.lost = True
        self._unparsed = b""
        self._server.admission.leave(self)
        self._waiting.clear()
        if self._reading is not None:
            self._reading.leave()
        self.resume_writing()
        if self._task is None:
            self._server.left(self)
        elif self._streaming:
            self._task.cancel()

    def eof_received(self) -> bool:
        """Who has said all still wants the answer, unless it is a stream: that one has left."""
        self._deaf = self._left = True
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
        return self._server.buffer if self._asked else self._server.small_buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._received(bytes(self._server.buffer[:nbytes]))

    def _received(self, data: bytes) -> None:
        if self._deaf:
            return
        between = self._reading is None and not self._in_head
        if between and len(data) == self._known_bytes and data.startswith(self._known_head) and self._known is not None:
            # A client says nearly the same over and over. The parser is between two requests, before and after this.
            self._since = self._loop.time()
            self._came(self._known.again(data[len(self._known_head) :]))
            return
        step = READ_AT_ONCE_MAX if self._asked else PARSED_AT_ONCE_MAX
        for at in range(0, len(data), step):
            if self._waiting:
                self._unparsed += data[at:]
                break
            self._parse(data[at : at + step])
            if self._deaf:
                break
        else:
            if between and self._read is not None:
                self._remember(self._read, data)
        self._read = None

    def _parse(self, data: bytes) -> None:
        self._segment = len(data)
        self._bodiless += self._segment
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(error.__context__)
        else:
            # Heads, trailers and what stands between the pieces of a body have a limit.
            if self._bodiless > HEAD_BYTES_MAX and (self._in_head or self._reading is not None):
                self._refuse()

    def _remember(self, request: Request, data: bytes) -> None:
        """Remember a request that is all of ``data``: whatever else begins like that and is as long is one, too."""
        head, end, body = data.partition(b"\r\n\r\n")
        if len(head) <= REPEATED_BYTES_MAX and request.has(body):
            self._known, self._known_head, self._known_bytes = request.again(b""), head + end, len(data)

    def _upgrade(self, rest: bytes) -> None:
        """Nobody here speaks another protocol, so the request is answered in this one. The parser leaves out the body
        of a request like that; another one, which does not see the wish, reads it."""
        if self._framing:
            self._parser = httptools.HttpRequestParser(_Rest(self))
            head, self._framing = b"POST / HTTP/1.1\r\nconnection: close\r\n%b\r\n" % self._framing, b""
            self._parse(head + rest)
        else:
            self._deaf = True

    def _refuse(self, fault: BaseException | None = None) -> None:
        """Say that this is not HTTP, after the answers to what was."""
        if self._deaf:
            return  # It came behind the last request, where nobody looks.
        self._deaf = True
        request = self._reading
        if request is not None and request.answered:
            self._end(heard=False)
            return
        if request is not None:
            request.leave()
        not_http = InvalidInput("", "the request is not valid HTTP")
        self._waiting.append(fault if isinstance(fault, DuetimeError) else not_http)
        self._answer_next()

    # What the parser tells.

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._in_head = True
        self._bodiless = 0
        self._since = self._begun = self._loop.time()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # and not in the trailers
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        parser, url, headers = self._parser, self._url, self._headers
        if self._bodiless + self._segment > HEAD_BYTES_MAX and size_of(url, headers) > HEAD_BYTES_MAX:
            raise ValueError("the head is too large")
        if url.startswith(b"/") and b"#" not in url:
            raw_path, _, query = url.partition(b"?")
        else:
            parsed = httptools.parse_url(url)
            raw_path, query = parsed.path or b"/", parsed.query or b""
        path = raw_path.decode("ascii")
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise ValueError("another version of HTTP")
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
        request.last = old or not parser.should_keep_alive()
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
        self._bodiless = 0
        self._since = self._loop.time()
        request = self._reading
        if request is None:
            return
        fed = request.feed(body)
        if not request.answered:
            if fed > UNREAD_BYTES_MAX:
                self._pause_reading()
        elif fed > READ_OVER_BYTES_MAX:
            self._end(heard=False)

    def on_message_complete(self) -> None:
        request = self._reading
        if request is None or self._framing:
            return
        self._reading = None
        self._bodiless = 0
        request.last = request.last or not self._parser.should_keep_alive()  # as its trailers may say
        self._deaf = self._deaf or request.last
        request.end()
        self._read = request

    # Reading no more than somebody wants.

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
        """The one who answers waits for more of the body."""
        self._since = self._loop.time()
        if not self._asked:
            self._begun = self._since
        if not self._asked and not request.old and (request.header(b"expect") or b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._asked = True
        self._resume_reading()

    # What a request asks and tells.

    @property
    def budget(self) -> Budget:
        return self._server.bodies if self.signed_in else self._server.anonymous_bodies

    def sign_in(self) -> None:
        """A request carried a valid key or session."""
        self.signed_in = True
        self._server.admission.sign_in(self, self._loop.time())

    # Answering.

    def _answer_next(self) -> None:
        if self._answering is not None or self._ended:
            return
        if self._waiting:
            request = self._waiting.popleft()
            if isinstance(request, Request):
                self._answering = request
                self._asked = False
                self._task = self._loop.create_task(self._answer(request))
            else:
                path = self._url.decode("ascii", "replace")
                self._write(self._server.application.refusal(request, path), last=True)
                self._end(heard=False)
        elif self._deaf or self._server.stopping:
            self._end()
        else:
            self._since = self._begun = self._loop.time()
            self._asked = False
            self._resume_reading()

    async def _answer(self, request: Request) -> None:
        try:
            response = await self._server.application.answer(request)
            if self._drained is not None:
                await self._until_drained()
            if response is not None and not self._transport.is_closing():
                last = request.last or self._server.stopping or self._lingers(request)
                if not isinstance(response, Stream) or request.method == "HEAD":
                    self._write(response, last=last, bare=request.method == "HEAD")
                    if self._drained is not None:  # The answer may be as large as the body, whose bytes stay counted.
                        await self._until_drained()
                elif not self._left:
                    await self._stream(response, last=last, chunked=not request.old)
                if last:
                    self._end(heard=request.whole)
        except Exception:
            log.exception("the answer to %s %s broke off", request.method, shown_path(request))
            self._transport.abort()
        finally:
            request.over()
            self._answering = self._task = None
            if self.lost:
                self._server.left(self)
        self._answer_next()

    async def _until_drained(self) -> None:
        """Wait for a client that does not read."""
        while self._drained is not None:
            await self._drained

    def _lingers(self, request: Request) -> bool:
        """Whether it is refused before its body is whole, and that is too large to be read over, or may not come."""
        if request.whole:
            return False
        expects = not self._asked and request.header(b"expect") is not None
        return expects or request.announced > READ_OVER_BYTES_MAX

    def _end(self, *, heard: bool = True) -> None:
        """Close. Who is still sending would lose the answer by it, and may finish, if that does not take too long."""
        self._ended = self._deaf = True
        self._server.writes.flush()
        if heard or self._left or self._transport.is_closing():
            self._transport.close()
        else:
            self._since = self._loop.time()
            self._transport.write_eof()
            self._resume_reading()

    def _write(self, response: Response, *, last: bool, bare: bool = False) -> None:
        body, length = response.body, b""
        if response.status in (204, 304):
            body = b""
        elif not isinstance(response, Stream):
            length = b"content-length: %d\r\n" % len(body)
        head = self._head(response, length, last=last)
        if bare or len(body) <= WRITE_AT_ONCE_MAX:
            self._server.writes.add(self._transport, head if bare else head + body, self._loop)
        else:
            self._transport.writelines([head, body])

    def _head(self, response: Response, framing: bytes, *, last: bool) -> bytes:
        closing = b"connection: close\r\n" if last else b""
        first = lines(response.status, tuple(response.headers), tuple(response.guards))
        return b"%bdate: %b\r\n%b%b\r\n" % (first, self._server.date, framing, closing)

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

    # What the server tells.

    def look(self) -> None:
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
        """Whether the head or the body that is coming takes longer than it may."""
        if self._ended or (self._reading is None and not self._in_head):
            return False
        fed = 0 if self._reading is None else self._reading.fed
        return now - self._begun > GRACE_SECONDS + fed / BODY_BYTES_PER_SECOND_MIN

    def idle_since(self) -> float | None:
        """Since when the server has been waiting for the client: to send a request or the rest of one, or to read the
        response. None while the server works on a request."""
        request = self._answering
        if request is None or request.waits or self._drained is not None:
            return self._since
        return None

    def drop(self) -> None:
        """Close it to make room for another. A response that was just written is sent, if the client reads it."""
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
    """What a connection is told of a body whose head another parser has read."""

    def __init__(self, connection: Connection) -> None:
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete
