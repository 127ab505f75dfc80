"""The HTTP server over raw sockets, with requests sent in pieces of any size, on both event loops."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import re
import signal
import socket
import struct
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import NamedTuple, Protocol

import pytest
import uvloop

from duetime.doors import connection as connections
from duetime.doors import server as module
from duetime.doors.connection import Connection
from duetime.doors.http import Application, Handler, NotFound, Request, Response, Stream, Unauthorized
from duetime.doors.server import Server, bind
from duetime.errors import InvalidInput, PayloadTooLarge

LIMIT = 1_000_000
PATIENCE_SECONDS = 10
BUFFER_BYTES = 256 * 1024
SEGMENT_BYTES_MAX = 256 * 1024
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "CONNECT")
STATUSES = {InvalidInput: 400, PayloadTooLarge: 413, Unauthorized: 401, NotFound: 404}
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

GET = b"GET /echo HTTP/1.1\r\nHost: a\r\n\r\n"
HOLD = b"GET /hold HTTP/1.1\r\nHost: a\r\n\r\n"
LARGE = b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n"


class Unexpected(Exception):
    """An exception for which the door has no response."""


class Door:
    """Echoes requests; other paths hold, reject, stream or return a large response."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.held = asyncio.Event()
        self.canceled = asyncio.Event()
        self.left = asyncio.Event()
        self.larges = 0
        self.large = 100_000
        self.response = Response(204)

    def routes(self) -> dict[str, dict[str, Handler]]:
        handlers: dict[str, Handler] = {
            **dict.fromkeys(("/echo", "/", "*", "/a b", "/é"), self.echo),
            **{"/hold": self.hold, "/late": self.late, "/locked": self.locked, "/large": self.large_response},
            **{"/unexpected": self.unexpected, "/given": self.given},
            **{"/stream": self.stream, "/later": self.later},
        }
        return {path: dict.fromkeys(METHODS, handler) for path, handler in handlers.items()}

    def refusal(self, error: Exception) -> Response:
        if isinstance(error, Unexpected):
            raise RuntimeError("there is no response")
        return Response(STATUSES.get(type(error), 500), json.dumps({"error": str(error)}).encode())

    async def echo(self, request: Request) -> Response:
        body = await self._body(request)
        echo = [request.method, request.path, request.query_string.decode(), len(body), zlib.crc32(body)]
        return Response(200, json.dumps(echo).encode())

    async def _body(self, request: Request) -> bytes:
        try:
            return await request.body(LIMIT)
        except Exception:
            self.left.set()
            raise

    async def hold(self, request: Request) -> Response:
        """Responds once ``go`` is set."""
        self.held.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.canceled.set()
            raise
        return Response(200, b"held")

    async def late(self, request: Request) -> Response:
        """Reads the body once ``go`` is set."""
        self.held.set()
        await self.go.wait()
        return await self.echo(request)

    async def locked(self, request: Request) -> Response:
        raise Unauthorized

    async def large_response(self, request: Request) -> Response:
        self.larges += 1
        return Response(200, b"x" * self.large)

    async def unexpected(self, request: Request) -> Response:
        raise Unexpected

    async def given(self, request: Request) -> Response:
        return self.response

    async def stream(self, request: Request) -> Response:
        return Stream(self._pieces(), ((b"content-type", b"text/plain"),))

    async def later(self, request: Request) -> Response:
        """Starts to stream once ``go`` is set."""
        await self.hold(request)
        return await self.stream(request)

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        self.held.set()
        try:
            yield b"one"
            yield b""
            await self.go.wait()
            yield b"two"
        finally:
            self.left.set()


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def last(self) -> bool:
        return self.headers.get("connection") == "close"


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.send = writer.write
        self.leave = writer.transport.abort

    async def head(self) -> tuple[int, dict[str, str]]:
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        pairs = [line.split(": ", 1) for line in lines]
        headers = {name.lower(): value for name, value in pairs}
        assert len(headers) == len(pairs) and first.startswith("HTTP/1.1 ")
        return int(first[9:12]), headers

    async def answer(self, *, bare: bool = False) -> Answer:
        status, headers = await self.head()
        length = 0 if bare else int(headers.get("content-length", "0"))
        return Answer(status, headers, await self._reader.readexactly(length))

    async def rest(self) -> bytes:
        """Read until the server closes the connection."""
        return await self._reader.read()

    async def ask(self, request: bytes) -> Answer:
        self.send(request)
        return await self.answer()

    async def stuck(self) -> int:
        """Wait until the server reads no more; returns the number of unsent bytes."""
        before = -1
        while before != (left := self.writer.transport.get_write_buffer_size()):
            before = left
            await asyncio.sleep(0.05)
        return before

    def reset(self) -> None:
        """Close the connection with a reset, not with an orderly end of the data."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.leave()

    def send_at_once(self, data: bytes) -> None:
        """Send all data before the server reads any of it."""
        sock = self.writer.get_extra_info("socket")
        assert os.write(sock.fileno(), data) == len(data)


class Stage:
    def __init__(self, door: Door, server: Server, port: int) -> None:
        self.door = door
        self.server = server
        self.serving: asyncio.Task[None]
        self._port = port
        self._clients: list[Client] = []

    async def connect(self, buffer: int | None = None) -> Client:
        sock = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio disables Nagle's delay only if the protocol is set
        if buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._port))
        except OSError:
            sock.close()
            raise
        limit = 65_536 if buffer is None else 1_024
        self._clients.append(Client(*await asyncio.open_connection(sock=sock, limit=limit)))
        return self._clients[-1]

    async def ask(self, request: bytes) -> Answer:
        """Send a request on a new connection; returns the response."""
        return await (await self.connect()).ask(request)

    def leave(self) -> None:
        for client in self._clients:
            client.leave()


Scene = Callable[[Stage], Awaitable[None]]


class Play(Protocol):
    def __call__(self, scene: Scene, logs: str = "") -> None: ...


@pytest.fixture(params=LOOPS)
def play(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Play]:
    """Runs a scene against a server, which must then stop, leave no tasks or connections, and log only ``logs``."""

    def run(scene: Scene, logs: str = "") -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(asyncio.wait_for(_played(scene), PATIENCE_SECONDS))
        gc.collect(1)
        messages = [record.getMessage() for record in caplog.records]
        assert bool(messages) == bool(logs) and all(logs in message for message in messages), messages

    def alarm(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the event loop is blocked")

    before = signal.signal(signal.SIGALRM, alarm)
    signal.alarm(2 * PATIENCE_SECONDS)
    caplog.set_level(logging.WARNING)
    try:
        yield run
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


async def _played(scene: Scene) -> None:
    door = Door()
    server = Server(Application([door], fallback=door, under={}))
    listener = bind("127.0.0.1", 0)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        listener.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    stage = Stage(door, server, listener.getsockname()[1])
    before = asyncio.all_tasks()
    try:
        async with asyncio.TaskGroup() as tasks:
            stage.serving = tasks.create_task(server.serve(listener))
            await asyncio.sleep(0)
            await scene(stage)
            stage.leave()
            server.stop()
        assert asyncio.all_tasks() <= before
        assert not server.connections
    finally:
        stage.leave()
        await asyncio.sleep(0)


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def post(body: bytes, path: bytes = b"/echo", headers: bytes = b"", *, send: bool = True) -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n%b\r\n" % (path, len(body), headers)
    return head + body if send else head


def chunked(*chunks: bytes, path: bytes = b"/echo", headers: bytes = b"", trailers: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n%b\r\n" % (path, headers)
    return head + b"".join(b"%x;n=1\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\n" + trailers + b"\r\n"


def echoed(body: bytes, method: str = "POST", path: str = "/echo", query: str = "") -> bytes:
    return json.dumps([method, path, query, len(body), zlib.crc32(body)]).encode()


# Requests on one connection.


def test_connection_serves_many_requests(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        for n in range(200):
            answer = await client.ask(post(b"x" * n))
            assert (answer.status, answer.body, answer.last) == (200, echoed(b"x" * n), False)

    play(scene)


def test_pipelined_requests_are_answered_in_order(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(HOLD + b"".join(post(b"x" * n) for n in range(50)))
        await stage.door.held.wait()
        await client.stuck()
        stage.door.go.set()
        assert (await client.answer()).body == b"held"
        for n in range(50):
            assert (await client.answer()).body == echoed(b"x" * n)

    play(scene)


def test_requests_with_the_same_head_have_their_own_bodies(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        for n in range(10):
            assert (await client.ask(post(b"%d" % n))).body == echoed(b"%d" % n)
        client.send_at_once(post(b"a") + post(b"b"))
        assert [(await client.answer()).body for _ in range(2)] == [echoed(b"a"), echoed(b"b")]

    play(scene)


@pytest.mark.parametrize(
    ("begun", "expected"),
    [
        (post(post(b"1"), send=False), echoed(post(b"1"))),
        (b"PUT /?x HTTP/1.1\r\nX-Of: ", echoed(b"1", "PUT", "/", "x")),
    ],
)
def test_bytes_equal_to_the_previous_request_can_be_part_of_the_next(play: Play, begun: bytes, expected: bytes) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        for _ in range(2):
            assert (await client.ask(post(b"1"))).body == echoed(b"1")
        client.send(begun)
        await asyncio.sleep(0.05)  # so that the server reads it separately
        assert (await client.ask(post(b"1"))).body == expected
        assert (await client.ask(post(b"2"))).body == echoed(b"2")

    play(scene)


def test_cached_request_keeps_no_body(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        for _ in range(2):
            await client.ask(post(bytes(10_000)))
        (connection,) = stage.server.connections
        assert isinstance(connection, Connection)
        assert connection._known is not None and connection._known.has_body(b"") and connection._read is None

    play(scene)


def test_endless_pipelining_is_held_back(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect(32 * 1024)
        client.send(HOLD + GET * 50_000)
        await stage.door.held.wait()
        assert await client.stuck() > 0
        (connection,) = stage.server.connections
        assert isinstance(connection, Connection)
        assert len(connection._waiting) <= SEGMENT_BYTES_MAX // len(GET) + 1
        stage.door.go.set()
        for _ in range(1_000):
            assert (await client.answer()).status == 200

    play(scene)


@pytest.mark.parametrize(
    "request_",
    [GET.replace(b"Host: a", b"Host: a\r\nConnection: close"), b"GET /echo HTTP/1.0\r\n\r\n"],
    ids=["close", "1.0"],
)
@pytest.mark.parametrize("behind", [b"", GET, b"\x00garbage\r\n\r\n"], ids=["alone", "request", "garbage"])
def test_bytes_after_the_last_request_are_ignored(play: Play, request_: bytes, behind: bytes) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        answer = await client.ask(request_ + behind)
        assert (answer.status, answer.body, answer.last) == (200, echoed(b"", "GET"), True)
        assert await client.rest() == b""

    play(scene)


KEPT = b"POST /echo HTTP/1.0\r\nConnection: Keep-Alive\r\nContent-Length: 1\r\n\r\n"


def test_http_1_0_client_can_keep_its_connection(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        for body in (b"a", b"b", b"c"):  # the same head, which the server would cache for HTTP/1.1
            answer = await client.ask(KEPT + body)
            assert (answer.status, answer.body) == (200, echoed(body, "POST"))
            assert answer.headers["connection"] == "keep-alive"
        client.send(KEPT + b"d" + KEPT + b"e")
        assert [(await client.answer()).body for _ in range(2)] == [echoed(b"d", "POST"), echoed(b"e", "POST")]
        last = await client.ask(KEPT.replace(b"Connection: Keep-Alive\r\n", b"") + b"f")
        assert (last.status, last.last) == (200, True)
        assert await client.rest() == b""

    play(scene)


@pytest.mark.parametrize("head", [b"", b"Connection: keep-alive\r\n"], ids=["plain", "keep-alive"])
def test_stream_to_an_http_1_0_client_ends_with_the_connection(play: Play, head: bytes) -> None:
    async def scene(stage: Stage) -> None:
        stage.door.go.set()
        client = await stage.connect()
        client.send(b"GET /stream HTTP/1.0\r\n%b\r\n" % head)
        status, headers = await client.head()
        assert status == 200 and "transfer-encoding" not in headers and headers["connection"] == "close"
        assert await client.rest() == b"onetwo"

    play(scene)


def test_empty_piece_does_not_end_a_stream(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        stage.door.go.set()
        client = await stage.connect()
        client.send(GET.replace(b"/echo", b"/stream") + GET.replace(b"Host: a", b"Host: a\r\nConnection: close"))
        await client.head()
        assert (await client.rest()).startswith(b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n")

    play(scene)


def test_stream_is_not_started_for_a_half_closed_connection(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(GET.replace(b"/echo", b"/later"))
        await stage.door.held.wait()
        client.writer.write_eof()
        await asyncio.sleep(0.1)
        stage.door.go.set()
        stage.door.go.clear()  # so that a started stream would stop after its first piece
        await client.rest()

    play(scene)


# Bodies.


@pytest.mark.parametrize("trailers", [b"", b"X-Sum: 1\r\nX-Other: 2\r\n"], ids=["bare", "trailers"])
def test_chunked_body_can_arrive_byte_by_byte(play: Play, trailers: bytes) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        for _ in range(2):
            for byte in chunked(b"hello", b" ", b"world" * 5, trailers=trailers):
                client.send(bytes([byte]))
                await asyncio.sleep(0)
            assert (await client.answer()).body == echoed(b"hello " + b"world" * 5)

    play(scene)


def test_trailers_are_not_headers(play: Play) -> None:
    seen = []

    async def scene(stage: Stage) -> None:
        async def record(request: Request) -> Response:
            await request.body(LIMIT)
            seen.append([name for name, _ in request.headers])
            return Response(200)

        stage.server.application = Application([OneHandler(record)], fallback=stage.door, under={})
        assert (await stage.ask(chunked(b"hello", trailers=b"X-Api-Key: k\r\n"))).status == 200
        assert seen == [[b"host", b"transfer-encoding"]]

    play(scene)


class OneHandler(Door):
    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self._handler = handler

    def routes(self) -> dict[str, dict[str, Handler]]:
        return {"/echo": {"POST": self._handler}}


def test_endless_trailers_are_rejected(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(chunked(b"hello")[:-2])
        with suppress(ConnectionError):
            for _ in range(200):
                client.send(b"X-Trailer: " + b"x" * 10_000 + b"\r\n")
                await client.writer.drain()
            client.writer.write_eof()
        assert b" 400 " in await _received(client)

    play(scene)


def test_connection_close_in_the_trailers_is_respected(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(chunked(b"hello", trailers=b"Connection: close\r\n") + GET)
        assert (await client.answer()).body == echoed(b"hello")
        assert await client.rest() == b""

    play(scene)


async def _received(client: Client) -> bytes:
    """All bytes that a client receives before its connection is closed or reset."""
    received = b""
    with suppress(ConnectionError):
        while piece := await client._reader.read(65_536):
            received += piece
    return received


def test_body_is_held_back_until_the_handler_reads_it(play: Play) -> None:
    body = random.Random(1).randbytes(LIMIT)

    async def scene(stage: Stage) -> None:
        client = await stage.connect(32 * 1024)
        client.send(post(body, b"/late") + GET)
        await stage.door.held.wait()
        assert await client.stuck() > 0
        stage.door.go.set()
        assert (await client.answer()).body == echoed(body, path="/late")
        assert (await client.answer()).status == 200

    play(scene)


def test_100_continue_is_sent_when_the_handler_reads_the_body(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        for expect in (b"Expect: 100-continue\r\n", b"expect: 100-Continue\r\n"):
            stage.door.held.clear()
            stage.door.go.clear()
            client.send(post(b"hello", b"/late", expect, send=False))
            await stage.door.held.wait()
            assert not client._reader._buffer  # type: ignore[attr-defined]
            stage.door.go.set()
            assert await client.head() == (100, {})
            client.send(b"he")
            client.send(b"llo")
            assert (await client.answer()).body == echoed(b"hello", path="/late")

    play(scene)


def test_http_1_0_client_gets_no_100_continue(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(post(b"hello", headers=b"Expect: 100-continue\r\n", send=False).replace(b"HTTP/1.1", b"HTTP/1.0"))
        await client.stuck()
        client.send(b"hello")
        assert (await client.answer()).body == echoed(b"hello")

    play(scene)


@pytest.mark.parametrize(("path", "size", "status"), [(b"/echo", LIMIT + 1, 413), (b"/locked", 5, 401)])
def test_rejected_request_gets_no_100_continue(play: Play, path: bytes, size: int, status: int) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        body = b"x" * size
        answer = await client.ask(post(body, path, b"Expect: 100-continue\r\n", send=False))
        assert answer.status == status
        if not answer.last:  # the server still reads the body
            client.send(body + GET)
            assert (await client.answer()).body == echoed(b"", "GET")

    play(scene)


@pytest.mark.parametrize(
    ("request_", "status"),
    [(post(b"x" * 3_000_000), 413), (post(b"x" * 3_000_000, b"/locked"), 401), (chunked(*[b"x" * 60_000] * 50), 413)],
    ids=["announced", "locked", "chunked"],
)
def test_request_rejected_while_it_is_sent_gets_one_response(play: Play, request_: bytes, status: int) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(request_ * 2 + GET)
        answer = await client.answer()
        assert answer.status == status and b"error" in answer.body
        assert answer.last == (b"Content-Length" in request_)  # the length of a chunked body is not known yet
        assert await client.rest() == b""

    play(scene)


@pytest.mark.parametrize(
    ("request_", "status"),
    [(post(b"x" * 500_000, b"/locked"), 401), (chunked(*[b"x" * 60_000] * 17), 413)],
    ids=["announced", "chunked"],
)
def test_rest_of_a_rejected_body_within_the_limit_is_skipped(play: Play, request_: bytes, status: int) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(request_ * 2 + GET)
        for _ in range(2):
            answer = await client.answer()
            assert answer.status == status and b"error" in answer.body
        assert (await client.answer()).body == echoed(b"", "GET")

    play(scene)


def test_body_of_the_largest_size_is_read(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        for request in (post(b"x" * LIMIT), chunked(*[b"x" * 10_000] * (LIMIT // 10_000))):
            assert (await stage.ask(request)).body == echoed(b"x" * LIMIT)
        assert (await stage.ask(chunked(b"x" * LIMIT, b"x"))).status == 413

    play(scene)


@pytest.mark.parametrize("begun", [post(b"x" * 100)[:-50], chunked(b"hello")[:-5]], ids=["announced", "chunked"])
@pytest.mark.parametrize("how", ["close", "abort", "eof"])
def test_client_that_disconnects_within_a_body_gets_no_response(play: Play, begun: bytes, how: str) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(begun)
        await client.stuck()
        {"close": client.writer.close, "abort": client.reset, "eof": client.writer.write_eof}[how]()
        await stage.door.left.wait()
        if how == "eof":
            assert await client.rest() == b""

    play(scene)


def test_server_waits_for_the_handler_of_a_disconnected_client(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(HOLD)
        await stage.door.held.wait()
        client.reset()
        (connection,) = stage.server.connections
        assert isinstance(connection, Connection)
        await until(connection._transport.is_closing)
        asyncio.get_running_loop().call_later(0.1, stage.door.go.set)
        stage.server.stop()
        await stage.serving
        assert stage.door.go.is_set() or stage.door.canceled.is_set()

    play(scene)


# Responses.


def test_head_response_has_the_length_but_no_body(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(LARGE.replace(b"GET", b"HEAD") + GET)
        answer = await client.answer(bare=True)
        assert (answer.status, answer.headers["content-length"]) == (200, "100000")
        assert (await client.answer()).body == echoed(b"", "GET")

    play(scene)


def test_head_response_of_a_stream_has_no_length(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        answer = await stage.ask(b"HEAD /stream HTTP/1.1\r\nHost: a\r\n\r\n")
        assert answer.status == 200 and "content-length" not in answer.headers

    play(scene)


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("body", [b"", b"none of this"], ids=["empty", "body"])
def test_204_and_304_have_neither_length_nor_body(play: Play, status: int, body: bytes) -> None:
    async def scene(stage: Stage) -> None:
        stage.door.response = Response(status, body, ((b"etag", b'"1"'),))
        client = await stage.connect()
        client.send(GET.replace(b"/echo", b"/given") + GET)
        answer = await client.answer()
        assert (answer.status, answer.headers["etag"]) == (status, '"1"') and "content-length" not in answer.headers
        assert (await client.answer()).status == 200

    play(scene)


def test_large_response_reaches_a_slow_reader(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        stage.door.large = 5_000_000
        client = await stage.connect(32 * 1024)
        client.send(LARGE + GET)
        await client.stuck()
        answer = await client.answer()
        assert answer.body == b"x" * 5_000_000
        assert (await client.answer()).status == 200

    play(scene)


@pytest.mark.parametrize("leave", [True, False], ids=["leaves", "reads on"])
def test_client_that_does_not_read_gets_no_further_responses(play: Play, leave: bool) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect(32 * 1024)
        client.send(LARGE * 500)
        before = -1
        while before != stage.door.larges:
            before = stage.door.larges
            await asyncio.sleep(0.1)
        assert before < 50
        assert (await stage.ask(GET)).status == 200
        if leave:
            client.reset()
        else:
            for _ in range(500):
                assert len((await client.answer()).body) == stage.door.large
        assert (await stage.ask(GET)).status == 200

    play(scene)


def test_every_response_has_a_date(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        for request in (GET, b"garbage\r\n\r\n", GET.replace(b"/echo", b"/nothing")):
            date = (await stage.ask(request)).headers["date"]
            assert re.fullmatch(r"[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT", date)

    play(scene)


def test_failing_error_handler_closes_the_connection(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(GET.replace(b"/echo", b"/unexpected") + GET)
        assert await _received(client) == b""
        assert (await stage.ask(GET)).status == 200

    play(scene, logs="failed")


@pytest.mark.parametrize(
    "header", [(b"x-a", b"a\r\nset-cookie: b"), (b"x-a\r\nx-b", b"a"), (b"x-a", b"a\nb"), (b"x a", b"a"), (b"", b"a")]
)
def test_invalid_response_header_is_never_sent(play: Play, header: tuple[bytes, bytes]) -> None:
    async def scene(stage: Stage) -> None:
        stage.door.response = Response(200, b"", (header,))
        client = await stage.connect()
        client.send(GET.replace(b"/echo", b"/given"))
        assert await _received(client) == b""

    play(scene, logs="failed")


@pytest.mark.parametrize("more", [0, 2])
def test_half_closed_client_gets_responses(play: Play, more: int) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(HOLD + post(b"hello") * more)
        await stage.door.held.wait()
        client.writer.write_eof()
        await client.stuck()
        stage.door.go.set()
        assert (await client.answer()).body == b"held"
        for _ in range(more):
            assert (await client.answer()).body == echoed(b"hello")
        assert await client.rest() == b""

    play(scene)


# Malformed and unusual requests.


def refused(answer: Answer) -> bool:
    return answer.status == 400 and answer.last and "error" in json.loads(answer.body)


GARBAGE = {
    "garbage": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 3,
    "words": b"what is this\r\n\r\n",
    "unknown method": b"FETCH / HTTP/1.1\r\n\r\n",
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "unknown version": b"GET / HTTP/1.2\r\n\r\n",
    "bare line feeds": b"GET / HTTP/1.1\nHost: a\n\n",
    "bare returns": b"GET / HTTP/1.1\rHost: a\r\r",
    "nul in a header": b"GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n",
    "no name": b"GET / HTTP/1.1\r\n: a\r\n\r\n",
    "folded": b"GET / HTTP/1.1\r\nX: a\r\n b\r\n\r\n",
    "folded length": b"POST / HTTP/1.1\r\nContent-Length:\r\n 5\r\n\r\nhello",
    "two lengths": b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "the same length twice": b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "a list of lengths": b"POST / HTTP/1.1\r\nContent-Length: 5, 5\r\n\r\nhello",
    "length and chunks": b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "no chunks": b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\nhello",
    "chunks that are not the last coding": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "no chunks before another protocol": b"POST /echo HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    b"Transfer-Encoding: gzip\r\n\r\nhello",
    "control character before chunked": b"POST / HTTP/1.1\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "no length": b"POST / HTTP/1.1\r\nContent-Length:\r\n\r\nhello",
    "negative length": b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\nhello",
    "signed length": b"POST / HTTP/1.1\r\nContent-Length: +5\r\n\r\nhello",
    "endless length": b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\nhello",
    "length of many digits": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %b5\r\n\r\nhello" % (b"0" * 4_300),
    "no host": b"GET /echo HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /echo HTTP/1.1\r\nHost: a\r\nhost: a\r\n\r\n",
    "empty host": b"GET /echo HTTP/1.1\r\nHost: \r\n\r\n",
    "two names in one host": b"GET /echo HTTP/1.1\r\nHost: a, b\r\n\r\n",
    "host with a user": b"GET /echo HTTP/1.1\r\nHost: u@a\r\n\r\n",
    "host with a path": b"GET /echo HTTP/1.1\r\nHost: a/b\r\n\r\n",
    "host with a word for a port": b"GET /echo HTTP/1.1\r\nHost: a:http\r\n\r\n",
    "two hosts of an older client": b"GET /echo HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n",
    "space before a colon": b"POST / HTTP/1.1\r\nContent-Length : 5\r\n\r\nhello",
    "chunk without an end": chunked(b"hello").replace(b"hello\r\n", b"helloXX"),
    "negative chunk": chunked(b"hello").replace(b"5;", b"-5;"),
    "hexadecimal chunk": chunked(b"hello").replace(b"5;", b"0x5;"),
    "endless chunk": chunked(b"hello").replace(b"5;", b"FFFFFFFFFFFFFFFFF;"),
    "line feed after a chunk": chunked(b"hello").replace(b"hello\r\n", b"hello\n"),
    "length in a trailer": chunked(b"hello", trailers=b"Content-Length: 7\r\n"),
    "coding in a trailer": chunked(b"hello", trailers=b"Transfer-Encoding: chunked\r\n"),
    "not ascii": b"GET /\xc3\xa9 HTTP/1.1\r\n\r\n",
    "not ascii in a query": b"GET /?\xc3\xa9 HTTP/1.1\r\n\r\n",
    "not ascii in a fragment": b"GET /#\xff HTTP/1.1\r\n\r\n",
    "no slash": b"GET echo HTTP/1.1\r\n\r\n",
    "space in the target": b"GET /a b HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_malformed_request_is_rejected_after_the_responses_to_earlier_requests(play: Play, garbage: bytes) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(garbage)
        assert refused(await client.answer())
        assert await client.rest() == b""

        client = await stage.connect()
        client.send(HOLD + post(b"hello") + garbage + GET)
        await stage.door.held.wait()
        stage.door.go.set()
        assert (await client.answer()).body == b"held"
        assert (await client.answer()).body == echoed(b"hello")
        assert refused(await client.answer())
        assert await client.rest() == b""

    play(scene)


def test_malformed_chunk_after_a_response_gets_no_second_response(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        assert (await client.ask(chunked(b"hello", path=b"/locked")[:-9])).status == 401
        client.send(b"this is not a chunk\r\n")
        assert await client.rest() == b""

    play(scene)


HEADS = {
    "one header": b"X-A: " + b"a" * 300_000,
    "many headers": b"X-A: a\r\n" * 50_000,
    "target": b"GET /" + b"a" * 300_000,
    "method": b"G" * 300_000,
    "slightly too large": b"X-A: " + b"a" * 70_000,
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("piece", [1_000, 1_000_000], ids=["trickled", "at once"])
def test_too_large_head_is_rejected(play: Play, head: bytes, piece: int) -> None:
    whole = (head if head.startswith(b"G") else b"GET /echo HTTP/1.1\r\n" + head) + b"\r\nHost: a\r\n\r\n"

    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        with suppress(ConnectionError):
            for at in range(0, len(whole), piece):
                client.send(whole[at : at + piece])
                await client.writer.drain()
                await asyncio.sleep(0)
        received = await _received(client)
        assert received.startswith(b"HTTP/1.1 400 ") and b"connection: close\r\n" in received
        assert (b"larger than 65536 bytes" in received) is not head.startswith(b"GG")

    play(scene)


HOSTS = (b"a", b"A.b-c_d", b"127.0.0.1", b"a:3000", b"a:", b"[::1]", b"[::1]:3000", b"xn--bcher-kva.example.")


@pytest.mark.parametrize("host", HOSTS)
def test_host_can_be_a_name_or_an_address(play: Play, host: bytes) -> None:
    async def scene(stage: Stage) -> None:
        assert (await stage.ask(GET.replace(b"Host: a", b"Host: " + host))).status == 200
        assert (await stage.ask(b"GET /echo HTTP/1.0\r\n\r\n")).status == 200

    play(scene)


@pytest.mark.parametrize("header", [b"X-A: " + b"a" * 60_000, b"\r\n".join([b"X-A: a"] * 7_000)], ids=["one", "many"])
def test_head_below_the_limit_is_accepted(play: Play, header: bytes) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        for _ in range(2):
            assert (await client.ask(GET.replace(b"Host: a", b"Host: a\r\n" + header))).status == 200

    play(scene)


def test_head_after_a_large_body_is_not_too_large(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send_at_once(post(b"x" * 100_000) + GET[:10])
        assert (await client.answer()).status == 200
        client.send(GET[10:])
        assert (await client.answer()).body == echoed(b"", "GET")

    play(scene)


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
@pytest.mark.parametrize("body", [None, b"hello", b"hello" * 50_000], ids=["bare", "body", "large"])
@pytest.mark.parametrize("framing", ["announced", "chunked"])
def test_upgrade_is_ignored_and_the_connection_is_closed(
    play: Play, protocol: bytes, body: bytes | None, framing: str
) -> None:
    headers = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\n" % protocol

    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        if body is None:
            answer = await client.ask(b"GET /echo HTTP/1.1\r\nHost: a\r\n%b\r\n\x81\x00" % headers)
        else:
            send = post(body, headers=headers) if framing == "announced" else chunked(body, headers=headers)
            client.send(send[:-3])
            await client.stuck()
            answer = await client.ask(send[-3:])
        assert answer.status == 200 and answer.last
        assert answer.body == echoed(body or b"", "GET" if body is None else "POST")
        assert await client.rest() == b""

    play(scene)


def test_connect_is_rejected(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        answer = await client.ask(b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n\x16\x03\x01")
        assert answer.status in (400, 404) and answer.last
        assert await client.rest() == b""

    play(scene)


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"*", "*", ""),
        (b"http://b/echo", "/echo", ""),
        (b"http://b:80/echo?x=1&y=%20", "/echo", "x=1&y=%20"),
        (b"http://b", "/", ""),
        (b"http://b?x=1", "/", "x=1"),
        (b"/echo#there", "/echo", ""),
        (b"/echo?x=1#there?y=2", "/echo", "x=1"),
        (b"/%65cho", "/echo", ""),
        (b"/a%20b?a%20b", "/a b", "a%20b"),
        (b"/%C3%A9", "/é", ""),
        (b"/echo?", "/echo", ""),
        (b"/echo?a?b", "/echo", "a?b"),
    ],
)
def test_request_target_can_have_any_form(play: Play, target: bytes, path: str, query: str) -> None:
    async def scene(stage: Stage) -> None:
        answer = await stage.ask(b"OPTIONS %b HTTP/1.1\r\nHost: a\r\n\r\n" % target)
        assert (answer.status, answer.body) == (200, echoed(b"", "OPTIONS", path, query))

    play(scene)


@pytest.mark.parametrize("target", [b"/%FF", b"/%", b"/%zz", b"//echo", b"/echo/"])
def test_unknown_target_is_not_found(play: Play, target: bytes) -> None:
    async def scene(stage: Stage) -> None:
        answer = await stage.ask(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % target)
        assert (answer.status, answer.last) == (404, False)

    play(scene)


# Idle connections.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS_MAX", 0.2)
    monkeypatch.setattr(module, "TIMEOUT_CHECK_SECONDS", 0.02)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "begun",
    [b"", GET, GET[:-2], post(b"hello")[:-1], chunked(b"hello")[:-3], post(b"hello", b"/locked")[:-1]],
    ids=["silent", "after a request", "head", "body", "chunk", "refused body"],
)
def test_idle_connection_is_closed(play: Play, begun: bytes) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(begun)
        await _received(client)

    play(scene)


@pytest.mark.usefixtures("impatient")
def test_slow_head_is_closed(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(GET[:-2])
        received = asyncio.create_task(_received(client))
        while not received.done():
            client.send(b"X: a\r\n")
            await asyncio.wait([received], timeout=0.02)
        assert await received == b""

    play(scene)


@pytest.mark.usefixtures("impatient")
def test_slow_body_is_read_to_its_end(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(post(b"x" * 20, send=False))
        for _ in range(20):
            client.send(b"x")
            await asyncio.sleep(0.02)
        assert (await client.answer()).body == echoed(b"x" * 20)

    play(scene)


@pytest.mark.usefixtures("impatient")
def test_connection_with_a_slow_handler_is_not_idle(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(HOLD)
        await asyncio.sleep(0.5)
        stage.door.go.set()
        assert (await client.answer()).body == b"held"

    play(scene)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", [b"/echo", b"/late"])
def test_connection_whose_body_is_held_back_is_not_idle(play: Play, path: bytes) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send((HOLD if path == b"/echo" else b"") + post(b"hello", path)[:-1])
        await asyncio.sleep(0.5)
        stage.door.go.set()
        if path == b"/echo":
            await client.answer()
        await asyncio.sleep(0.08)  # a few checks for idle connections
        client.send(b"o")
        assert (await client.answer()).body == echoed(b"hello", path=path.decode())

    play(scene)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "request_",
    [LARGE, LARGE.replace(b"Host: a", b"Host: a\r\nConnection: close"), LARGE * 9],
    ids=["one", "last", "many"],
)
def test_client_that_never_reads_is_disconnected(play: Play, request_: bytes) -> None:
    async def scene(stage: Stage) -> None:
        stage.door.large = 5_000_000
        client = await stage.connect(32 * 1024)
        client.send(request_)
        await until(lambda: stage.door.larges > 0)
        await until(lambda: not stage.server.connections)

    play(scene)


# Stop.


def test_stop_closes_idle_connections_and_accepts_none(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        idle, used, begun = [await stage.connect() for _ in range(3)]
        await used.ask(GET)
        begun.send(GET[:-2])
        await begun.stuck()
        stage.server.stop()
        for client in (idle, used, begun):
            assert await client.rest() == b""
        await stage.serving
        with pytest.raises(ConnectionError):
            await stage.connect()

    play(scene)


def test_stop_waits_for_requests_in_progress(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client, reading = await stage.connect(), await stage.connect()
        client.send(HOLD + GET)
        reading.send(post(b"hello")[:-1])
        await stage.door.held.wait()
        await reading.stuck()
        stage.server.stop()
        await asyncio.sleep(0)
        assert not stage.serving.done()
        stage.door.go.set()
        reading.send(b"o")
        for waiting, body in ((client, b"held"), (reading, echoed(b"hello"))):
            answer = await waiting.answer()
            assert (answer.body, answer.last) == (body, True)
            assert await waiting.rest() == b""
        await stage.serving

    play(scene)


def test_stop_sends_pending_responses(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        stage.door.large = 5_000_000
        client = await stage.connect(32 * 1024)
        client.send(LARGE)
        await client.head()
        stage.server.stop()
        assert len(await client.rest()) == 5_000_000
        await stage.serving

    play(scene)


def test_canceled_server_sends_pending_responses(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(HOLD)
        await stage.door.held.wait()
        stage.door.go.set()
        stage.serving.cancel()  # takes effect after the handler has returned and before its response is written
        assert (await client.answer()).body == b"held"
        await asyncio.wait([stage.serving])

    play(scene)


@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_stop_does_not_wait_forever(play: Play, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRAIN_SECONDS_MAX", 0.2)

    async def scene(stage: Stage) -> None:
        client, body, deaf = await stage.connect(), await stage.connect(), await stage.connect(32 * 1024)
        client.send(HOLD)
        body.send(post(b"hello")[:-1])
        stage.door.large = 5_000_000
        deaf.send(LARGE * 3)
        await stage.door.held.wait()
        await deaf.stuck()
        if how == "stop":
            stage.server.stop()
        else:
            stage.serving.cancel()
        await asyncio.wait([stage.serving])
        assert stage.serving.cancelled() == (how == "cancel")
        assert stage.door.canceled.is_set()
        for lost in (client, body):
            assert await _received(lost) == b""

    play(scene)


def test_server_stopped_before_it_serves_returns_at_once(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        server = Server(stage.server.application)
        server.stop()
        await server.serve(bind("127.0.0.1", 0))

    play(scene)


# Requests cut into pieces.


def _request(rng: random.Random) -> bytes:
    method = rng.choice([b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS"])
    target = rng.choice([b"/echo", b"/echo?x=%d" % rng.randrange(99), b"/%65cho", b"/locked", b"/none", b"http://b/"])
    size = rng.choice([0, 1, rng.randrange(100), rng.randrange(5_000), rng.randrange(5_000)])
    if rng.random() < 0.02:
        size = rng.choice([70_000, 150_000, LIMIT + 1])
    body = rng.randbytes(size)
    headers = b"".join(b"X-%d: %b\r\n" % (n, b"v" * rng.randrange(30)) for n in range(rng.randrange(4)))
    start = b"%b %b HTTP/1.1\r\nHost: a\r\n%b" % (method, target, headers)
    framing = rng.choice(["none", "length", "chunked"])
    if framing == "none":
        return start + b"\r\n"
    if framing == "length":
        return start + b"Content-Length: %d\r\n\r\n%b" % (size, body)
    cuts = sorted(rng.randrange(size + 1) for _ in range(rng.randrange(5)))
    chunks = [body[a:b] for a, b in zip([0, *cuts], [*cuts, size], strict=True) if a < b]
    trailers = rng.choice([b"", b"X-Trailer: 1\r\n"])
    encoded = b"".join(b"%x%b\r\n%b\r\n" % (len(c), rng.choice([b"", b";a=b"]), c) for c in chunks)
    return start + b"Transfer-Encoding: chunked\r\n\r\n" + encoded + b"0\r\n" + trailers + b"\r\n"


def _with_same_head(rng: random.Random, request: bytes) -> bytes:
    """A request with the same head and, unless it is chunked, another body of the same length."""
    head, end, body = request.partition(b"\r\n\r\n")
    return request if b"chunked" in head else head + end + rng.randbytes(len(body))


async def _comparable(client: Client, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """The next response without its date."""
    answer = await client.answer(bare=request.startswith(b"HEAD"))
    return answer.status, {**answer.headers, "date": ""}, answer.body


@pytest.mark.parametrize("seed", range(4))
def test_responses_do_not_depend_on_how_requests_are_cut_into_pieces(play: Play, seed: int) -> None:
    rng = random.Random(seed)

    async def scene(stage: Stage) -> None:
        for _ in range(75):
            requests = [_request(rng)]
            for _ in range(rng.randrange(7)):
                requests.append(_with_same_head(rng, requests[-1]) if rng.random() < 0.5 else _request(rng))
            client = await stage.connect()
            whole = []
            for request in requests:
                client.send(request)
                whole.append(await _comparable(client, request))

            data = b"".join(requests)
            cuts = sorted(rng.randrange(len(data)) for _ in range(rng.choice([0, 1, 3, 10, 30])))
            client = await stage.connect()
            sending = asyncio.create_task(_send(client, data, cuts))
            assert [await _comparable(client, request) for request in requests] == whole
            await sending

    play(scene)


async def _send(client: Client, data: bytes, cuts: list[int]) -> None:
    for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True):
        client.send(data[a:b])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
