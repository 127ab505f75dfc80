"""Limits on the memory and the time of requests, over real sockets and on both event loops."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import uvloop

from duetime.doors import connection as connections
from duetime.doors import server as servers
from duetime.doors.body_budget import SMALL_BYTES_MAX
from duetime.doors.connection import Connection
from duetime.doors.http import Application, Handler, Keys, Request, Response, TooBusy, TooSlow, Unauthorized
from duetime.doors.server import ANONYMOUS_PART, Server, bind
from duetime.errors import PayloadTooLarge

KEY = b"k" * 32
KIB = 1024
TOTAL = 1024 * KIB
BODY_MAX = 512 * KIB
SMALL = 10 * KIB
PATIENCE_SECONDS = 20
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
STATUSES = {TooBusy: 503, TooSlow: 408, Unauthorized: 401, PayloadTooLarge: 413}
GET = b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n"


class Door:
    def __init__(self) -> None:
        self.keys = Keys(KEY.decode())
        self.go = asyncio.Event()
        self.read = 0

    def routes(self) -> dict[str, dict[str, Handler]]:
        handlers = {"/locked": self.locked, "/open": self.open, "/large": self.large, "/mirror": self.mirror}
        return {path: {"GET": handler, "POST": handler} for path, handler in handlers.items()}

    def refusal(self, error: Exception) -> Response:
        return Response(STATUSES.get(type(error), 500), str(error).encode())

    async def locked(self, request: Request) -> Response:
        await self.keys.check(request)
        return await self.open(request)

    async def open(self, request: Request) -> Response:
        """Keeps the body in memory until ``go`` is set."""
        body = await request.body(BODY_MAX)
        self.read += 1
        await self.go.wait()
        return Response(200, b"%d" % len(body))

    async def large(self, request: Request) -> Response:
        return Response(200, b"x" * 8_000_000)

    async def mirror(self, request: Request) -> Response:
        await self.keys.check(request)
        await request.body(BODY_MAX)
        return await self.large(request)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        with suppress(ConnectionError):
            self.writer.write(data)
            await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
        return int(head[9:12]), await self._reader.readexactly(length)

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        await self.send(request)
        return await self.answer()

    async def closed(self) -> bytes:
        """Read until the server closes the connection; returns all bytes."""
        received = b""
        with suppress(ConnectionError):
            while piece := await self._reader.read(65_536):
                received += piece
        return received


class Stage:
    def __init__(self, door: Door, server: Server, port: int) -> None:
        self.door = door
        self.server = server
        self._port = port
        self._clients: list[Client] = []

    async def connect(self) -> Client:
        self._clients.append(Client(*await asyncio.open_connection("127.0.0.1", self._port)))
        return self._clients[-1]

    async def until_read(self, count: int) -> None:
        while self.door.read < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def until_free(self) -> None:
        while self.server.bodies.held or self.server.anonymous_bodies.held:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    def leave(self) -> None:
        for client in self._clients:
            client.writer.transport.abort()


Scene = Callable[[Stage], Awaitable[None]]


@pytest.fixture(params=LOOPS)
def play(request: pytest.FixtureRequest) -> Callable[[Scene], None]:
    """Runs a scene against a server; once all clients have disconnected, the server must hold no bytes."""

    async def played(scene: Scene) -> None:
        door = Door()
        server = Server(Application([door], fallback=door, under={}), bodies_bytes_max=TOTAL)
        listener = bind("127.0.0.1", 0)
        stage = Stage(door, server, listener.getsockname()[1])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve(listener))
            await asyncio.sleep(0)
            await scene(stage)
            door.go.set()
            stage.leave()
            await stage.until_free()
            server.stop()

    def run(scene: Scene) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(asyncio.wait_for(played(scene), PATIENCE_SECONDS))

    return run


def post(body: bytes, path: bytes = b"/locked", *, key: bytes = KEY, chunk: int = 0) -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: a\r\nX-API-Key: %b\r\n" % (path, key)
    if not chunk:
        return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    pieces = [body[at : at + chunk] for at in range(0, len(body), chunk)]
    return head + b"Transfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % b"".join(
        b"%x\r\n%b\r\n" % (len(p), p) for p in pieces
    )


# Memory.


@pytest.mark.parametrize("chunk", [0, 8_000], ids=["announced", "chunked"])
def test_large_bodies_beyond_the_budget_are_rejected_and_small_bodies_are_not(
    play: Callable[[Scene], None], chunk: int
) -> None:
    async def scene(stage: Stage) -> None:
        first, second, third, small = [await stage.connect() for _ in range(4)]
        await first.send(post(bytes(BODY_MAX), chunk=chunk))
        await second.send(post(bytes(BODY_MAX - 200 * KIB), chunk=chunk))
        await stage.until_read(2)
        assert stage.server.bodies.held == 2 * BODY_MAX - 200 * KIB

        status, why = await third.ask(post(bytes(BODY_MAX), chunk=chunk))
        assert status == 503 and b"try again" in why
        await small.send(post(bytes(SMALL), chunk=chunk))
        await stage.until_read(3)
        stage.door.go.set()
        assert [(await client.answer())[0] for client in (first, second, small)] == [200, 200, 200]
        await stage.until_free()
        assert (await first.ask(post(bytes(BODY_MAX), chunk=chunk)))[0] == 200

    play(scene)


def test_rejected_keys_hold_no_memory(play: Callable[[Scene], None]) -> None:
    async def scene(stage: Stage) -> None:
        for chunk in (0, 5_000):
            client = await stage.connect()
            assert (await client.ask(post(bytes(BODY_MAX), key=b"no", chunk=chunk)))[0] == 401
            assert stage.server.bodies.held == stage.server.anonymous_bodies.held == 0

    play(scene)


def test_anonymous_bodies_do_not_use_the_budget_of_authenticated_bodies(play: Callable[[Scene], None]) -> None:
    async def scene(stage: Stage) -> None:
        share = TOTAL // ANONYMOUS_PART
        count = share // SMALL
        for _ in range(count):
            await (await stage.connect()).send(post(bytes(SMALL), b"/open"))
        await stage.until_read(count)
        assert (await (await stage.connect()).ask(post(bytes(SMALL), b"/open")))[0] == 503
        assert stage.server.bodies.held == 0
        client = await stage.connect()
        await client.send(post(bytes(BODY_MAX)))
        await stage.until_read(count + 1)

    play(scene)


def test_body_is_counted_until_its_response_is_read(play: Callable[[Scene], None]) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        await client.send(post(bytes(BODY_MAX), b"/mirror"))
        while stage.server.bodies.held < BODY_MAX:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        assert stage.server.bodies.held == BODY_MAX
        assert (await client.answer())[0] == 200
        await stage.until_free()

    play(scene)


def test_body_of_one_byte_chunks_is_joined(play: Callable[[Scene], None]) -> None:
    async def scene(stage: Stage) -> None:
        stage.door.go.set()
        client = await stage.connect()
        assert await client.ask(post(bytes(range(256)) * 100, chunk=1)) == (200, b"25600")

    play(scene)


def test_pipelined_requests_are_parsed_a_few_at_a_time(play: Callable[[Scene], None]) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        client.writer.write(post(b"") + GET * 20_000)
        await stage.until_read(1)
        await asyncio.sleep(0.05)
        (connection,) = stage.server.connections
        assert isinstance(connection, Connection)
        assert 0 < len(connection._waiting) <= connections.PARSED_AT_ONCE_MAX // len(GET) + 1

    play(scene)


@pytest.mark.parametrize("seed", range(3))
def test_no_bytes_stay_counted_after_a_mix_of_hostile_requests(play: Callable[[Scene], None], seed: int) -> None:
    rng = random.Random(seed)

    async def hostile(stage: Stage) -> None:
        client = await stage.connect()
        request = post(
            bytes(rng.choice([0, 1, SMALL, SMALL_BYTES_MAX + 1, BODY_MAX, BODY_MAX + 1])),
            rng.choice([b"/locked", b"/open", b"/mirror", b"/none"]),
            key=rng.choice([KEY, KEY, b"no"]),
            chunk=rng.choice([0, 3_000]),
        )
        await client.send(request[: rng.choice([len(request), len(request), rng.randrange(len(request))])])
        await asyncio.sleep(rng.choice([0, 0.01, 0.1]))
        match rng.randrange(4):
            case 0:
                client.writer.transport.abort()
            case 1:
                with suppress(OSError):
                    client.writer.write_eof()
            case 2:
                await client.send(b"garbage\r\n\r\n" + request)

    async def scene(stage: Stage) -> None:
        for _ in range(6):
            await asyncio.gather(*(hostile(stage) for _ in range(15)))
            assert stage.server.bodies.held <= TOTAL

    play(scene)


# Time.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(connections, "BODY_BYTES_PER_SECOND_MIN", 10_000)
    monkeypatch.setattr(servers, "TIMEOUT_CHECK_SECONDS", 0.02)


async def trickle(client: Client, data: bytes) -> bytes:
    """Send ``data`` every 50 ms until the server closes the connection; returns what the server sent."""
    received = asyncio.create_task(client.closed())
    while not received.done():
        await client.send(data)
        await asyncio.wait([received], timeout=0.05)
    return await received


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("chunked", [False, True])
def test_slow_body_gets_a_408(play: Callable[[Scene], None], chunked: bool) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        request = post(b"x" * 100_000, chunk=1 if chunked else 0)
        await client.send(request[: request.index(b"\r\n\r\n") + 4])
        response = await trickle(client, b"1\r\nx\r\n" if chunked else b"x")
        assert response.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in response and b"too slowly" in response

    play(scene)


@pytest.mark.usefixtures("impatient")
def test_slow_body_of_a_rejected_request_is_cut_off(play: Callable[[Scene], None]) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        await client.send(post(b"x" * 100_000, key=b"no")[:-100_000])
        assert (await client.answer())[0] == 401
        assert await trickle(client, b"x") == b""

    play(scene)


@pytest.mark.usefixtures("impatient")
def test_slow_head_is_cut_off(play: Callable[[Scene], None]) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        await client.send(GET[:-2])
        assert await trickle(client, b"X: a\r\n") == b""

    play(scene)


@pytest.mark.usefixtures("impatient")
def test_time_limit_grows_with_the_size_of_the_body(play: Callable[[Scene], None]) -> None:
    async def scene(stage: Stage) -> None:
        stage.door.go.set()
        client = await stage.connect()
        request = post(bytes(400_000))
        for at in range(0, len(request), 20_000):  # takes four times the grace, but keeps the minimum rate
            await client.send(request[at : at + 20_000])
            await asyncio.sleep(0.06)
        assert (await client.answer())[0] == 200

    play(scene)
