"""The server over raw sockets: what clients send in whatever pieces, and what they then hear; on both event loops."""

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


class Odd(Exception):
    """What the door has no answer for."""


class Door:
    """Echoes what it reads, or does what a path is called."""

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
            **{"/hold": self.hold, "/late": self.late, "/locked": self.locked, "/large": self.larger},
            **{"/odd": self.odd, "/given": self.given},
            **{"/stream": self.stream, "/later": self.later},
        }
        return {path: dict.fromkeys(METHODS, handler) for path, handler in handlers.items()}

    def refusal(self, error: Exception) -> Response:
        if isinstance(error, Odd):
            raise RuntimeError("there is no answer")
        return Response(STATUSES.get(type(error), 500), json.dumps({"error": str(error)}).encode())

    async def echo(self, request: Request) -> Response:
        body = await self._body(request)
        said = [request.method, request.path, request.query_string.decode(), len(body), zlib.crc32(body)]
        return Response(200, json.dumps(said).encode())

    async def _body(self, request: Request) -> bytes:
        try:
            return await request.body(LIMIT)
        except Exception:
            self.left.set()
            raise

    async def hold(self, request: Request) -> Response:
        """Answers when it may."""
        self.held.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.canceled.set()
            raise
        return Response(200, b"held")

    async def late(self, request: Request) -> Response:
        """Reads when it may."""
        self.held.set()
        await self.go.wait()
        return await self.echo(request)

    async def locked(self, request: Request) -> Response:
        raise Unauthorized

    async def larger(self, request: Request) -> Response:
        self.larges += 1
        return Response(200, b"x" * self.large)

    async def odd(self, request: Request) -> Response:
        raise Odd

    async def given(self, request: Request) -> Response:
        return self.response

    async def stream(self, request: Request) -> Response:
        return Stream(self._pieces(), ((b"content-type", b"text/plain"),))

    async def later(self, request: Request) -> Response:
        """Streams when it may."""
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
        """Whatever comes until the server closes."""
        return await self._reader.read()

    async def ask(self, request: bytes) -> Answer:
        self.send(request)
        return await self.answer()

    async def stuck(self) -> int:
        """How much the server has not taken, once it takes no more."""
        before = -1
        while before != (left := self.writer.transport.get_write_buffer_size()):
            before = left
            await asyncio.sleep(0.05)
        return before

    def vanish(self) -> None:
        """Leave in a way that the server can't take for the end of what there is to say."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.leave()

    def shout(self, data: bytes) -> None:
        """Send it all before the server gets to read any of it."""
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
        sock = socket.socket(proto=socket.IPPROTO_TCP)  # or asyncio would let Nagle delay it
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
        """One request on a connection of its own."""
        return await (await self.connect()).ask(request)

    def leave(self) -> None:
        for client in self._clients:
            client.leave()


Scene = Callable[[Stage], Awaitable[None]]


class Play(Protocol):
    def __call__(self, scene: Scene, logs: str = "") -> None: ...


@pytest.fixture(params=LOOPS)
def play(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Play]:
    """Runs a scene against a server, which then has to stop by itself, leave nothing, and log nothing else."""

    def run(scene: Scene, logs: str = "") -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(asyncio.wait_for(_played(scene), PATIENCE_SECONDS))
        gc.collect(1)
        messages = [record.getMessage() for record in caplog.records]
        assert bool(messages) == bool(logs) and all(logs in message for message in messages), messages

    def alarm(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the event loop stands still")

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


# Requests, one after the other.


def test_a_connection_serves_many_requests(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        for n in range(200):
            answer = await client.ask(post(b"x" * n))
            assert (answer.status, answer.body, answer.last) == (200, echoed(b"x" * n), False)

    play(scene)


def test_pipelined_requests_are_answered_in_their_order(play: Play) -> None:
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


def test_requests_with_the_same_head_have_each_their_own_body(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        for n in range(10):
            assert (await client.ask(post(b"%d" % n))).body == echoed(b"%d" % n)
        client.shout(post(b"a") + post(b"b"))
        assert [(await client.answer()).body for _ in range(2)] == [echoed(b"a"), echoed(b"b")]

    play(scene)


@pytest.mark.parametrize(
    ("begun", "said"),
    [
        (post(post(b"1"), send=False), echoed(post(b"1"))),
        (b"PUT /?x HTTP/1.1\r\nX-Of: ", echoed(b"1", "PUT", "/", "x")),
    ],
)
def test_what_looks_like_the_request_before_may_be_a_part_of_the_next(play: Play, begun: bytes, said: bytes) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        for _ in range(2):
            assert (await client.ask(post(b"1"))).body == echoed(b"1")
        client.send(begun)
        await asyncio.sleep(0.05)  # so that it comes in a piece of its own
        assert (await client.ask(post(b"1"))).body == said
        assert (await client.ask(post(b"2"))).body == echoed(b"2")

    play(scene)


def test_a_remembered_request_leaves_no_body_behind(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        for _ in range(2):
            await client.ask(post(bytes(10_000)))
        (connection,) = stage.server.connections
        assert connection._known is not None and connection._known.has(b"") and connection._read is None

    play(scene)


def test_who_pipelines_without_end_waits(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect(32 * 1024)
        client.send(HOLD + GET * 50_000)
        await stage.door.held.wait()
        assert await client.stuck() > 0
        (connection,) = stage.server.connections
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
def test_what_follows_the_last_request_is_not_looked_at(play: Play, request_: bytes, behind: bytes) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        answer = await client.ask(request_ + behind)
        assert (answer.status, answer.body, answer.last) == (200, echoed(b"", "GET"), True)
        assert await client.rest() == b""

    play(scene)


def test_an_older_client_gets_a_stream_that_ends_with_its_connection(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        stage.door.go.set()
        client = await stage.connect()
        client.send(b"GET /stream HTTP/1.0\r\n\r\n")
        status, headers = await client.head()
        assert status == 200 and "transfer-encoding" not in headers
        assert await client.rest() == b"onetwo"

    play(scene)


def test_an_empty_piece_does_not_end_a_stream(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        stage.door.go.set()
        client = await stage.connect()
        client.send(GET.replace(b"/echo", b"/stream") + GET.replace(b"Host: a", b"Host: a\r\nConnection: close"))
        await client.head()
        assert (await client.rest()).startswith(b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n")

    play(scene)


def test_who_says_goodbye_before_a_stream_begins_has_left_it(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(GET.replace(b"/echo", b"/later"))
        await stage.door.held.wait()
        client.writer.write_eof()
        await asyncio.sleep(0.1)
        stage.door.go.set()
        stage.door.go.clear()  # so that a stream would stand still after its first piece
        await client.rest()

    play(scene)


# Bodies.


@pytest.mark.parametrize("trailers", [b"", b"X-Sum: 1\r\nX-Other: 2\r\n"], ids=["bare", "trailers"])
def test_a_chunked_body_may_come_byte_by_byte(play: Play, trailers: bytes) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        for _ in range(2):
            for byte in chunked(b"hello", b" ", b"world" * 5, trailers=trailers):
                client.send(bytes([byte]))
                await asyncio.sleep(0)
            assert (await client.answer()).body == echoed(b"hello " + b"world" * 5)

    play(scene)


def test_trailers_are_no_headers(play: Play) -> None:
    seen = []

    async def scene(stage: Stage) -> None:
        async def look(request: Request) -> Response:
            await request.body(LIMIT)
            seen.append([name for name, _ in request.headers])
            return Response(200)

        stage.server.application = Application([Looking(look)], fallback=stage.door, under={})
        assert (await stage.ask(chunked(b"hello", trailers=b"X-Api-Key: k\r\n"))).status == 200
        assert seen == [[b"host", b"transfer-encoding"]]

    play(scene)


class Looking(Door):
    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self._handler = handler

    def routes(self) -> dict[str, dict[str, Handler]]:
        return {"/echo": {"POST": self._handler}}


def test_trailers_without_end_are_refused(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(chunked(b"hello")[:-2])
        with suppress(ConnectionError):
            for _ in range(200):
                client.send(b"X-Trailer: " + b"x" * 10_000 + b"\r\n")
                await client.writer.drain()
            client.writer.write_eof()
        assert b" 400 " in await _heard(client)

    play(scene)


def test_a_goodbye_in_the_trailers_is_one(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(chunked(b"hello", trailers=b"Connection: close\r\n") + GET)
        assert (await client.answer()).body == echoed(b"hello")
        assert await client.rest() == b""

    play(scene)


async def _heard(client: Client) -> bytes:
    """What a client gets to read before its connection ends in whatever way."""
    heard = b""
    with suppress(ConnectionError):
        while piece := await client._reader.read(65_536):
            heard += piece
    return heard


def test_a_body_waits_for_its_reader(play: Play) -> None:
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


def test_who_is_expected_to_continue_is_told_so_when_somebody_reads(play: Play) -> None:
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


def test_an_older_client_is_not_told_to_continue(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(post(b"hello", headers=b"Expect: 100-continue\r\n", send=False).replace(b"HTTP/1.1", b"HTTP/1.0"))
        await client.stuck()
        client.send(b"hello")
        assert (await client.answer()).body == echoed(b"hello")

    play(scene)


@pytest.mark.parametrize(("path", "size", "status"), [(b"/echo", LIMIT + 1, 413), (b"/locked", 5, 401)])
def test_who_is_refused_is_not_told_to_continue(play: Play, path: bytes, size: int, status: int) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        body = b"x" * size
        answer = await client.ask(post(body, path, b"Expect: 100-continue\r\n", send=False))
        assert answer.status == status
        if not answer.last:  # then the body is still read
            client.send(body + GET)
            assert (await client.answer()).body == echoed(b"", "GET")

    play(scene)


@pytest.mark.parametrize(
    ("request_", "status"),
    [(post(b"x" * 3_000_000), 413), (post(b"x" * 3_000_000, b"/locked"), 401), (chunked(*[b"x" * 60_000] * 50), 413)],
    ids=["announced", "locked", "chunked"],
)
def test_who_is_refused_while_sending_hears_why_and_no_more(play: Play, request_: bytes, status: int) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(request_ * 2 + GET)
        answer = await client.answer()
        assert answer.status == status and b"error" in answer.body
        assert answer.last == (b"Content-Length" in request_)  # else nobody knows yet how much there is
        assert await client.rest() == b""

    play(scene)


@pytest.mark.parametrize(
    ("request_", "status"),
    [(post(b"x" * 500_000, b"/locked"), 401), (chunked(*[b"x" * 60_000] * 17), 413)],
    ids=["announced", "chunked"],
)
def test_the_rest_of_a_refused_body_that_is_not_too_large_is_read_over(
    play: Play, request_: bytes, status: int
) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(request_ * 2 + GET)
        for _ in range(2):
            answer = await client.answer()
            assert answer.status == status and b"error" in answer.body
        assert (await client.answer()).body == echoed(b"", "GET")

    play(scene)


def test_a_body_of_the_largest_size_is_read(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        for request in (post(b"x" * LIMIT), chunked(*[b"x" * 10_000] * (LIMIT // 10_000))):
            assert (await stage.ask(request)).body == echoed(b"x" * LIMIT)
        assert (await stage.ask(chunked(b"x" * LIMIT, b"x"))).status == 413

    play(scene)


@pytest.mark.parametrize("begun", [post(b"x" * 100)[:-50], chunked(b"hello")[:-5]], ids=["announced", "chunked"])
@pytest.mark.parametrize("how", ["close", "abort", "eof"])
def test_who_leaves_in_the_middle_of_a_body_is_not_answered(play: Play, begun: bytes, how: str) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(begun)
        await client.stuck()
        {"close": client.writer.close, "abort": client.vanish, "eof": client.writer.write_eof}[how]()
        await stage.door.left.wait()
        if how == "eof":
            assert await client.rest() == b""

    play(scene)


def test_a_handler_whose_client_left_ends_before_the_server_does(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(HOLD)
        await stage.door.held.wait()
        client.vanish()
        (connection,) = stage.server.connections
        await until(connection._transport.is_closing)
        asyncio.get_running_loop().call_later(0.1, stage.door.go.set)
        stage.server.stop()
        await stage.serving
        assert stage.door.go.is_set() or stage.door.canceled.is_set()

    play(scene)


# Answers.


def test_a_head_has_the_length_but_not_the_body(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(LARGE.replace(b"GET", b"HEAD") + GET)
        answer = await client.answer(bare=True)
        assert (answer.status, answer.headers["content-length"]) == (200, "100000")
        assert (await client.answer()).body == echoed(b"", "GET")

    play(scene)


def test_the_head_of_a_stream_claims_no_length(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        answer = await stage.ask(b"HEAD /stream HTTP/1.1\r\nHost: a\r\n\r\n")
        assert answer.status == 200 and "content-length" not in answer.headers

    play(scene)


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("body", [b"", b"none of this"], ids=["empty", "body"])
def test_an_answer_without_a_body_has_no_length(play: Play, status: int, body: bytes) -> None:
    async def scene(stage: Stage) -> None:
        stage.door.response = Response(status, body, ((b"etag", b'"1"'),))
        client = await stage.connect()
        client.send(GET.replace(b"/echo", b"/given") + GET)
        answer = await client.answer()
        assert (answer.status, answer.headers["etag"]) == (status, '"1"') and "content-length" not in answer.headers
        assert (await client.answer()).status == 200

    play(scene)


def test_a_large_answer_reaches_a_slow_reader(play: Play) -> None:
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
def test_who_does_not_read_is_answered_no_more(play: Play, leave: bool) -> None:
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
            client.vanish()
        else:
            for _ in range(500):
                assert len((await client.answer()).body) == stage.door.large
        assert (await stage.ask(GET)).status == 200

    play(scene)


def test_every_answer_has_the_date(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        for request in (GET, b"garbage\r\n\r\n", GET.replace(b"/echo", b"/nothing")):
            date = (await stage.ask(request)).headers["date"]
            assert re.fullmatch(r"[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d GMT", date)

    play(scene)


def test_a_door_without_an_answer_ends_the_connection(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(GET.replace(b"/echo", b"/odd") + GET)
        assert await _heard(client) == b""
        assert (await stage.ask(GET)).status == 200

    play(scene, logs="broke off")


@pytest.mark.parametrize(
    "header", [(b"x-a", b"a\r\nset-cookie: b"), (b"x-a\r\nx-b", b"a"), (b"x-a", b"a\nb"), (b"x a", b"a"), (b"", b"a")]
)
def test_what_is_not_a_header_never_leaves(play: Play, header: tuple[bytes, bytes]) -> None:
    async def scene(stage: Stage) -> None:
        stage.door.response = Response(200, b"", (header,))
        client = await stage.connect()
        client.send(GET.replace(b"/echo", b"/given"))
        assert await _heard(client) == b""

    play(scene, logs="broke off")


@pytest.mark.parametrize("more", [0, 2])
def test_who_has_said_all_still_gets_the_answers(play: Play, more: int) -> None:
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


# What is not HTTP, and what is unusual.


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
    "chunks in disguise": b"POST / HTTP/1.1\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
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
def test_what_is_not_http_is_refused_after_the_answers_to_what_was(play: Play, garbage: bytes) -> None:
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


def test_a_bad_chunk_behind_an_answer_brings_no_second_one(play: Play) -> None:
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
    "just over, at once": b"X-A: " + b"a" * 70_000,
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("piece", [1_000, 1_000_000], ids=["trickled", "at once"])
def test_a_head_has_its_limit(play: Play, head: bytes, piece: int) -> None:
    whole = (head if head.startswith(b"G") else b"GET /echo HTTP/1.1\r\n" + head) + b"\r\nHost: a\r\n\r\n"

    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        with suppress(ConnectionError):
            for at in range(0, len(whole), piece):
                client.send(whole[at : at + piece])
                await client.writer.drain()
                await asyncio.sleep(0)
        heard = await _heard(client)
        assert heard.startswith(b"HTTP/1.1 400 ") and b"connection: close\r\n" in heard

    play(scene)


HOSTS = (b"a", b"A.b-c_d", b"127.0.0.1", b"a:3000", b"a:", b"[::1]", b"[::1]:3000", b"xn--bcher-kva.example.")


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_may_be_a_name_or_an_address(play: Play, host: bytes) -> None:
    async def scene(stage: Stage) -> None:
        assert (await stage.ask(GET.replace(b"Host: a", b"Host: " + host))).status == 200
        assert (await stage.ask(b"GET /echo HTTP/1.0\r\n\r\n")).status == 200

    play(scene)


@pytest.mark.parametrize("header", [b"X-A: " + b"a" * 60_000, b"\r\n".join([b"X-A: a"] * 7_000)], ids=["one", "many"])
def test_a_head_below_its_limit_is_read(play: Play, header: bytes) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        for _ in range(2):
            assert (await client.ask(GET.replace(b"Host: a", b"Host: a\r\n" + header))).status == 200

    play(scene)


def test_a_head_behind_a_large_body_is_not_a_large_head(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.shout(post(b"x" * 100_000) + GET[:10])
        assert (await client.answer()).status == 200
        client.send(GET[10:])
        assert (await client.answer()).body == echoed(b"", "GET")

    play(scene)


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
@pytest.mark.parametrize("body", [None, b"hello", b"hello" * 50_000], ids=["bare", "body", "large"])
@pytest.mark.parametrize("framing", ["announced", "chunked"])
def test_who_wants_another_protocol_gets_an_answer_in_this_one(
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


def test_there_are_no_tunnels(play: Play) -> None:
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
def test_a_target_has_many_forms(play: Play, target: bytes, path: str, query: str) -> None:
    async def scene(stage: Stage) -> None:
        answer = await stage.ask(b"OPTIONS %b HTTP/1.1\r\nHost: a\r\n\r\n" % target)
        assert (answer.status, answer.body) == (200, echoed(b"", "OPTIONS", path, query))

    play(scene)


@pytest.mark.parametrize("target", [b"/%FF", b"/%", b"/%zz", b"//echo", b"/echo/"])
def test_a_target_that_nobody_has_is_not_found(play: Play, target: bytes) -> None:
    async def scene(stage: Stage) -> None:
        answer = await stage.ask(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % target)
        assert (answer.status, answer.last) == (404, False)

    play(scene)


# Who stands still.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS_MAX", 0.2)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "begun",
    [b"", GET, GET[:-2], post(b"hello")[:-1], chunked(b"hello")[:-3], post(b"hello", b"/locked")[:-1]],
    ids=["silent", "after a request", "head", "body", "chunk", "refused body"],
)
def test_a_connection_that_stands_still_is_closed(play: Play, begun: bytes) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(begun)
        await _heard(client)

    play(scene)


@pytest.mark.usefixtures("impatient")
def test_a_head_that_trickles_is_closed(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(GET[:-2])
        heard = asyncio.create_task(_heard(client))
        while not heard.done():
            client.send(b"X: a\r\n")
            await asyncio.wait([heard], timeout=0.02)
        assert await heard == b""

    play(scene)


@pytest.mark.usefixtures("impatient")
def test_a_body_that_trickles_is_read_to_its_end(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(post(b"x" * 20, send=False))
        for _ in range(20):
            client.send(b"x")
            await asyncio.sleep(0.02)
        assert (await client.answer()).body == echoed(b"x" * 20)

    play(scene)


@pytest.mark.usefixtures("impatient")
def test_a_slow_answer_stands_not_still(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(HOLD)
        await asyncio.sleep(0.5)
        stage.door.go.set()
        assert (await client.answer()).body == b"held"

    play(scene)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", [b"/echo", b"/late"])
def test_a_body_that_nobody_asked_for_yet_stands_not_still(play: Play, path: bytes) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send((HOLD if path == b"/echo" else b"") + post(b"hello", path)[:-1])
        await asyncio.sleep(0.5)
        stage.door.go.set()
        if path == b"/echo":
            await client.answer()
        await asyncio.sleep(0.08)  # a few looks
        client.send(b"o")
        assert (await client.answer()).body == echoed(b"hello", path=path.decode())

    play(scene)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "request_",
    [LARGE, LARGE.replace(b"Host: a", b"Host: a\r\nConnection: close"), LARGE * 9],
    ids=["one", "last", "many"],
)
def test_who_never_reads_is_let_go(play: Play, request_: bytes) -> None:
    async def scene(stage: Stage) -> None:
        stage.door.large = 5_000_000
        client = await stage.connect(32 * 1024)
        client.send(request_)
        await until(lambda: stage.door.larges > 0)
        await until(lambda: not stage.server.connections)

    play(scene)


# The end.


def test_a_stop_closes_who_is_idle_and_takes_nobody_new(play: Play) -> None:
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


def test_a_stop_waits_for_the_answer_that_is_under_way(play: Play) -> None:
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
        for asked, body in ((client, b"held"), (reading, echoed(b"hello"))):
            answer = await asked.answer()
            assert (answer.body, answer.last) == (body, True)
            assert await asked.rest() == b""
        await stage.serving

    play(scene)


def test_a_stop_delivers_what_has_been_answered(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        stage.door.large = 5_000_000
        client = await stage.connect(32 * 1024)
        client.send(LARGE)
        await client.head()
        stage.server.stop()
        assert len(await client.rest()) == 5_000_000
        await stage.serving

    play(scene)


def test_a_server_that_is_canceled_delivers_what_has_been_answered(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.send(HOLD)
        await stage.door.held.wait()
        stage.door.go.set()
        stage.serving.cancel()  # which it hears when the answer is made, before that is written
        assert (await client.answer()).body == b"held"
        await asyncio.wait([stage.serving])

    play(scene)


@pytest.mark.parametrize("how", ["stop", "cancel"])
def test_an_answer_that_never_comes_holds_no_stop(play: Play, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
            assert await _heard(lost) == b""

    play(scene)


def test_a_server_stopped_before_it_serves_does_not(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        server = Server(stage.server.application)
        server.stop()
        await server.serve(bind("127.0.0.1", 0))

    play(scene)


# However it is cut.


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
    said = b"".join(b"%x%b\r\n%b\r\n" % (len(c), rng.choice([b"", b";a=b"]), c) for c in chunks)
    return start + b"Transfer-Encoding: chunked\r\n\r\n" + said + b"0\r\n" + trailers + b"\r\n"


def _again(rng: random.Random, request: bytes) -> bytes:
    """The same head, and another body of that length if there is one."""
    head, end, body = request.partition(b"\r\n\r\n")
    return request if b"chunked" in head else head + end + rng.randbytes(len(body))


async def _same(client: Client, request: bytes) -> tuple[int, dict[str, str], bytes]:
    answer = await client.answer(bare=request.startswith(b"HEAD"))
    return answer.status, {**answer.headers, "date": ""}, answer.body


@pytest.mark.parametrize("seed", range(4))
def test_requests_are_answered_the_same_however_they_are_cut(play: Play, seed: int) -> None:
    rng = random.Random(seed)

    async def scene(stage: Stage) -> None:
        for _ in range(75):
            requests = [_request(rng)]
            for _ in range(rng.randrange(7)):
                requests.append(_again(rng, requests[-1]) if rng.random() < 0.5 else _request(rng))
            client = await stage.connect()
            whole = []
            for request in requests:
                client.send(request)
                whole.append(await _same(client, request))

            said = b"".join(requests)
            cuts = sorted(rng.randrange(len(said)) for _ in range(rng.choice([0, 1, 3, 10, 30])))
            client = await stage.connect()
            sending = asyncio.create_task(_send(client, said, cuts))
            assert [await _same(client, request) for request in requests] == whole
            await sending

    play(scene)


async def _send(client: Client, said: bytes, cuts: list[int]) -> None:
    for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True):
        client.send(said[a:b])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
