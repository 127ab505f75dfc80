"""Limits on connections and which connection is closed at a limit, over real sockets and on both event loops."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import uvloop

from duetime.clock import SystemClock
from duetime.doors.connection_limits import GONE_MAX, SCAN_MAX, ConnectionLimits, Group
from duetime.doors.http import Application, Handler, Keys, Request, Response, Unauthorized
from duetime.doors.server import Server, bind
from duetime.doors.server_interfaces import Served
from duetime.doors.sessions import CookieSessions, SessionDoor
from duetime.store import ALL_ABILITIES
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry

KEY = "k" * 32
SESSIONS = CookieSessions(KEY, SystemClock(), MemoryStore(SystemClock()))
TOTAL = 16
ANONYMOUS_MAX = TOTAL // 2
PER_ADDRESS_MAX = TOTAL // 4
PATIENCE_SECONDS = 20
TICK_SECONDS = 0.01
"""Longer than the resolution of an event loop's clock, so that one connection is idle longer than the next."""
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

ANONYMOUS = b"GET /open HTTP/1.1\r\nHost: a\r\n\r\n"
SIGNED_IN = b"GET /locked HTTP/1.1\r\nHost: a\r\nX-API-Key: " + KEY.encode() + b"\r\n\r\n"
WRONG_KEY = SIGNED_IN.replace(b"kk", b"no")
HOLD = ANONYMOUS.replace(b"/open", b"/hold")
HOLD_SIGNED_IN = SIGNED_IN.replace(b"/locked", b"/hold-locked")
LARGE_BYTES = 8_000_000


class Door:
    def __init__(self) -> None:
        self.keys = Keys(KEY, SESSIONS)
        self.go = asyncio.Event()
        self.held = 0
        self.before_answer: Callable[[], None] = lambda: None

    def routes(self) -> dict[str, dict[str, Handler]]:
        handlers: dict[str, Handler] = {
            **{"/open": self.open, "/locked": self.locked, "/large": self.large},
            **{"/hold": self.hold, "/hold-locked": self.hold_locked, "/body": self.body},
        }
        return {path: {"GET": handler, "POST": handler} for path, handler in handlers.items()}

    def refusal(self, error: Exception) -> Response:
        return Response(401 if isinstance(error, Unauthorized) else 500, repr(error).encode())

    async def open(self, request: Request) -> Response:
        self.before_answer()
        return Response(200, b"open")

    async def locked(self, request: Request) -> Response:
        await self.keys.check(request)
        return Response(200, b"locked")

    async def large(self, request: Request) -> Response:
        return Response(200, b"x" * LARGE_BYTES)

    async def hold(self, request: Request) -> Response:
        self.held += 1
        await self.go.wait()
        return Response(200, b"held")

    async def hold_locked(self, request: Request) -> Response:
        await self.keys.check(request)
        return await self.hold(request)

    async def body(self, request: Request) -> Response:
        return Response(200, await request.body(1000))


class Counting(Server):
    arrived = 0

    def connected(self, connection: Served, now: float) -> None:
        super().connected(connection, now)
        self.arrived += 1


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.send = writer.write

    @property
    def open(self) -> bool:
        return not self._reader.at_eof() and self._reader.exception() is None

    async def answer(self) -> tuple[int, bytes]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
        return int(head[9:12]), await self._reader.readexactly(length)

    async def ask(self, request: bytes) -> int:
        self.send(request)
        return (await self.answer())[0]

    async def closed(self) -> None:
        """Returns once the server has closed the connection."""
        with suppress(ConnectionError):
            while await self._reader.read(65_536):
                pass


class Stage:
    def __init__(self, door: Door, server: Counting, telemetry: Telemetry, port: int) -> None:
        self.door = door
        self.server = server
        self._telemetry = telemetry
        self._port = port
        self._clients: list[Client] = []

    async def connect(self, address: int = 1) -> Client:
        """Connect from ``127.0.0.{address}`` and wait until the server has applied its limits."""
        arrived = self.server.arrived
        local = (f"127.0.0.{address}", 0)
        client = Client(*await asyncio.open_connection("127.0.0.1", self._port, local_addr=local))
        self._clients.append(client)
        await until(lambda: self.server.arrived > arrived)
        await asyncio.sleep(TICK_SECONDS)
        return client

    async def connected(self, count: int, request: bytes = b"", *, addresses: int = 1) -> list[Client]:
        """Make ``count`` connections from this many addresses; each sends the request and gets its response."""
        clients = []
        for n in range(count):
            clients.append(await self.connect(1 + n % addresses))
            if request:
                assert await clients[-1].ask(request) == 200
        await asyncio.sleep(TICK_SECONDS)
        return clients

    async def holding(self, count: int, request: bytes, *, addresses: int = 1) -> list[Client]:
        """Make ``count`` connections from this many addresses, each with a request in progress."""
        clients = []
        for n in range(count):
            clients.append(await self.connect(1 + n % addresses))
            held = self.door.held
            clients[-1].send(request)
            await until(lambda held=held: self.door.held > held)  # type: ignore[misc]
        return clients

    def counts(self) -> tuple[int, int]:
        """The numbers of connections that are signed in and that are not, from the metrics."""
        return round(self._metric('duetime_connections{signed_in="yes"}')), round(
            self._metric('duetime_connections{signed_in="no"}')
        )

    def closed(self) -> tuple[int, int]:
        """The numbers of connections closed for the total limit and for the limit per address, from the metrics."""
        return round(self._metric('duetime_connections_closed_total{reason="limit"}')), round(
            self._metric('duetime_connections_closed_total{reason="address"}')
        )

    def _metric(self, name: str) -> float:
        [line] = [line for line in self._telemetry.own_page().decode().splitlines() if line.startswith(name + " ")]
        return float(line.rpartition(" ")[2])

    def leave(self) -> None:
        for client in self._clients:
            client.writer.transport.abort()


Scene = Callable[[Stage], Awaitable[None]]
Play = Callable[..., None]


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@pytest.fixture(params=LOOPS)
def play(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Play:
    """Runs a scene against a server for ``TOTAL`` connections, which must forget all of them at the end."""

    async def played(scene: Scene, total: int, *, key_needed: bool) -> None:
        door, telemetry = Door(), Telemetry()
        session = SessionDoor(door.keys, SESSIONS, ALL_ABILITIES, refusal=door.refusal)
        application = Application([door, session], fallback=door, under={})
        server = Counting(application, ConnectionLimits(total, telemetry, key_needed=key_needed))
        listener = bind("127.0.0.1", 0)
        stage = Stage(door, server, telemetry, listener.getsockname()[1])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(server.serve(listener))
            await asyncio.sleep(0)
            try:
                await scene(stage)
                stage.leave()
                door.go.set()
                await until(lambda: stage.counts() == (0, 0) and not server.connections)
                assert not server.admission._anonymous_at
            finally:
                stage.leave()
                door.go.set()
                server.stop()

    def run(scene: Scene, total: int = TOTAL, *, key_needed: bool = True) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(asyncio.wait_for(played(scene, total, key_needed=key_needed), PATIENCE_SECONDS))
        assert not caplog.records

    return run


# Anonymous connections.


def test_anonymous_connections_are_limited_to_half_of_the_total(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        clients = await stage.connected(ANONYMOUS_MAX, addresses=4)
        assert stage.counts() == (0, ANONYMOUS_MAX) and stage.closed() == (0, 0)
        newcomer = await stage.connect(9)
        await clients[0].closed()
        assert all(client.open for client in [*clients[1:], newcomer])
        assert stage.counts() == (0, ANONYMOUS_MAX) and stage.closed() == (1, 0)
        assert await newcomer.ask(SIGNED_IN) == 200

    play(scene)


def test_longest_idle_connection_is_closed(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        clients = await stage.connected(ANONYMOUS_MAX, addresses=4)
        for n in (0, 1, 3):
            assert await clients[n].ask(ANONYMOUS) == 200
        await asyncio.sleep(TICK_SECONDS)
        for n in (2, 4, 5):
            await stage.connect(9 + n)
            await clients[n].closed()
        assert [n for n, client in enumerate(clients) if client.open] == [0, 1, 3, 6, 7]

    play(scene)


def test_activity_restarts_the_idle_time(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        clients = await stage.connected(ANONYMOUS_MAX, addresses=4)
        for client in reversed(clients):
            assert await client.ask(ANONYMOUS) == 200
            await asyncio.sleep(TICK_SECONDS)
        await stage.connect(9)
        await clients[-1].closed()
        assert all(client.open for client in clients[:-1])

    play(scene)


def test_anonymous_connections_of_one_address_are_limited_to_a_quarter_of_the_total(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        other = await stage.connect(2)
        clients = await stage.connected(PER_ADDRESS_MAX)
        assert stage.closed() == (0, 0)
        newcomer = await stage.connect()
        await clients[0].closed()
        assert all(client.open for client in [other, *clients[1:], newcomer])
        assert stage.counts() == (0, PER_ADDRESS_MAX + 1) and stage.closed() == (0, 1)

    play(scene)


def test_limits_hold_for_simultaneous_connections(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        await asyncio.gather(*(stage.connect(n) for n in range(1, 101)))
        await until(lambda: stage.server.arrived == 100)
        assert stage.counts() == (0, ANONYMOUS_MAX) and stage.closed() == (100 - ANONYMOUS_MAX, 0)

    play(scene)


def test_wrong_key_does_not_sign_a_connection_in(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        assert await client.ask(WRONG_KEY) == 401
        assert await client.ask(ANONYMOUS) == 200
        assert stage.counts() == (0, 1)

    play(scene)


def test_new_connection_is_closed_if_all_others_of_its_address_are_busy(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        clients = await stage.holding(PER_ADDRESS_MAX, HOLD)
        await (await stage.connect()).closed()
        assert stage.counts() == (0, PER_ADDRESS_MAX) and stage.closed() == (0, 1)
        assert (await stage.connect(2)).open
        stage.door.go.set()
        for client in clients:
            assert await client.answer() == (200, b"held")

    play(scene)


def test_new_connection_is_closed_if_all_anonymous_connections_are_busy(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        clients = await stage.holding(ANONYMOUS_MAX - 1, HOLD, addresses=4)
        idle = await stage.connect(9)
        last = await stage.connect(10)
        await idle.closed()
        assert stage.closed() == (1, 0)
        last.send(HOLD)
        await until(lambda: stage.door.held == ANONYMOUS_MAX)
        await (await stage.connect(9)).closed()
        assert stage.closed() == (2, 0)
        stage.door.go.set()
        for client in [*clients, last]:
            assert await client.answer() == (200, b"held")

    play(scene)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /open HT",
        b"GET /open HTTP/1.1\r\nHost: a\r\nX-Slow: ",
        b"POST /body HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nhalf",
        b"POST /body HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n" * 2,
    ],
    ids=["half a line", "half a head", "half a body", "half a chunked body", "an unread response"],
)
def test_connections_that_wait_for_their_client_count_as_idle(play: Play, sent: bytes) -> None:
    async def scene(stage: Stage) -> None:
        for n in range(2 * ANONYMOUS_MAX):
            client = await stage.connect(1 + n % 4)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.send(sent)
            await asyncio.sleep(TICK_SECONDS)
        assert stage.closed() == (ANONYMOUS_MAX, 0)
        await until(lambda: len(stage.server.connections) == ANONYMOUS_MAX)
        newcomer = await stage.connect()
        assert await newcomer.ask(SIGNED_IN) == 200
        assert stage.counts() == (1, ANONYMOUS_MAX - 1)

    play(scene)


# Connections with a key.


def test_flood_does_not_close_signed_in_connections(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        clients = await stage.connected(10, SIGNED_IN, addresses=2)
        for n in range(60):
            await stage.connect(1 + n % 10)
            if n % 10 == 0:
                clients.append(await stage.connect(1 + n % 3))
                assert await clients[-1].ask(SIGNED_IN) == 200
                clients.pop().writer.close()
        assert all(client.open for client in clients)
        for client in clients:
            assert await client.ask(SIGNED_IN) == 200
        assert stage.counts()[0] == len(clients)

    play(scene)


def test_signed_in_connections_of_one_address_can_use_the_total(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        clients = await stage.connected(TOTAL, SIGNED_IN)
        assert all(client.open for client in clients)
        assert stage.counts() == (TOTAL, 0) and stage.closed() == (0, 0)

    play(scene)


def test_new_connection_at_the_total_closes_the_longest_idle_signed_in_connection(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        [busy] = await stage.holding(1, HOLD_SIGNED_IN)
        clients = await stage.connected(TOTAL - 1, SIGNED_IN)
        assert await clients[0].ask(SIGNED_IN) == 200
        await asyncio.sleep(TICK_SECONDS)
        newcomer = await stage.connect()
        await clients[1].closed()
        assert all(client.open for client in [busy, clients[0], *clients[2:]])
        assert await newcomer.ask(SIGNED_IN) == 200
        assert stage.counts() == (TOTAL, 0) and stage.closed() == (1, 0)

    play(scene)


def test_flood_at_the_total_closes_anonymous_connections_first(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        clients = await stage.connected(TOTAL - 3, SIGNED_IN)
        flood = [await stage.connect(2 + n) for n in range(20)]
        assert all(client.open for client in clients) and stage.counts() == (TOTAL - 3, 3)
        assert [client.open for client in flood] == 17 * [False] + 3 * [True]

    play(scene)


def test_new_connection_is_closed_if_all_are_busy(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        clients = await stage.holding(TOTAL, HOLD_SIGNED_IN)
        await (await stage.connect()).closed()
        assert stage.counts() == (TOTAL, 0) and stage.closed() == (1, 0)
        stage.door.go.set()
        for client in clients:
            assert await client.answer() == (200, b"held")

    play(scene)


def test_session_signs_a_connection_in(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        first, second, third = [await stage.connect() for _ in range(3)]
        body = b'{"apiKey": "%b"}' % KEY.encode()
        first.send(b"POST /session HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        assert (await first.answer())[0] == 204
        assert stage.counts() == (1, 2)
        cookie = SESSIONS.begin()
        request = b"GET /%b HTTP/1.1\r\nHost: a\r\nCookie: duetime_session=%b\r\n\r\n"
        assert await second.ask(request % (b"locked", cookie)) == 200
        assert stage.counts() == (2, 1)
        assert await third.ask(request % (b"session", b"1." + cookie)) == 200
        assert stage.counts() == (2, 1)

    play(scene)


def test_without_a_key_every_connection_counts_as_signed_in(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        clients = await stage.connected(TOTAL)
        assert stage.counts() == (TOTAL, 0) and stage.closed() == (0, 0)
        await stage.connect()
        await clients[0].closed()
        assert stage.counts() == (TOTAL, 0) and stage.closed() == (1, 0)

    play(scene, key_needed=False)


def test_written_response_is_sent_before_the_connection_is_closed(play: Play) -> None:
    async def scene(stage: Stage) -> None:
        client = await stage.connect()
        [connection] = stage.server.connections

        def soon_dropped() -> None:
            asyncio.get_running_loop().call_soon(connection.drop)

        stage.door.before_answer = soon_dropped
        client.send(ANONYMOUS)
        assert await client.answer() == (200, b"open")
        await client.closed()

    play(scene)


# The search for an idle connection.


class Fake:
    address = "a"

    def __init__(self, since: float | None) -> None:
        self.since = since
        self.times_examined = 0

    def idle_since(self) -> float | None:
        self.times_examined += 1
        return self.since

    def drop(self) -> None: ...


def grouped(fakes: list[Fake], now: float = 0.0) -> Group:
    group = Group()
    for fake in fakes:
        group.add(fake, now)
    return group


def examined(fakes: list[Fake]) -> int:
    return sum(fake.times_examined for fake in fakes)


def test_search_among_idle_connections_examines_one() -> None:
    fakes = [Fake(0) for _ in range(10_000)]
    group = grouped(fakes)
    for n in range(5_000):
        assert group.longest_idle(n) is fakes[n]
        assert group.remove(fakes[n])
    assert examined(fakes) == 5_000


def test_search_finds_the_longest_idle_of_recently_active_connections() -> None:
    chance = random.Random(7)
    for _ in range(200):
        fakes = [Fake(chance.choice([None, chance.random()])) for _ in range(chance.randrange(1, SCAN_MAX // 2))]
        group = grouped(fakes)
        idle = sorted((fake.since, n) for n, fake in enumerate(fakes) if fake.since is not None)
        for _, n in idle:
            assert group.longest_idle(1.0) is fakes[n]
            group.remove(fakes[n])
        assert group.longest_idle(1.0) is None and len(group) == len(fakes) - len(idle)


def test_recently_active_connections_are_examined_once() -> None:
    fakes = [Fake(1) for _ in range(100)]
    group = grouped(fakes)
    assert group.longest_idle(2) is fakes[0]
    assert examined(fakes) == 101
    assert group.longest_idle(2) is fakes[0]
    assert examined(fakes) == 102


def test_search_among_busy_connections_examines_a_limited_number() -> None:
    fakes = [Fake(None) for _ in range(10_000)]
    group = grouped(fakes)
    assert group.longest_idle(1) is None
    assert examined(fakes) == SCAN_MAX


def test_limited_search_among_recently_active_connections_finds_one() -> None:
    fakes = [Fake(1) for _ in range(10_000)]
    assert grouped(fakes).longest_idle(2) is not None
    assert examined(fakes) == SCAN_MAX


def test_search_continues_where_the_last_search_ended() -> None:
    idle = Fake(0.5)
    fakes = [*(Fake(None) for _ in range(2 * SCAN_MAX)), idle]
    group = grouped(fakes)
    assert [group.longest_idle(1) for _ in range(3)] == [None, None, idle]


def test_group_forgets_closed_connections() -> None:
    group = Group()
    for n in range(10_000):
        fake = Fake(n)
        group.add(fake, n)
        assert group.remove(fake) and not group.remove(fake)
    assert len(group) == 0 and len(group._heap) <= GONE_MAX
    assert group.longest_idle(1) is None


# The operating system's limit on open files.

_AT_THE_LIMIT = """
import asyncio, sys, time, uvloop
from duetime.doors.http import Application, Response
from duetime.doors.server import Server, bind

class Door:
    def routes(self):
        return {"/": {"GET": self.answer}}
    def refusal(self, error):
        return Response(500, repr(error).encode())
    async def answer(self, request):
        return Response(200, b"%d" % time.process_time_ns())

async def main():
    door = Door()
    listener = bind("127.0.0.1", 0)
    print(listener.getsockname()[1], flush=True)
    await Server(Application([door], fallback=door, under={})).serve(listener)

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


def test_server_without_free_descriptors_neither_exits_nor_spins() -> None:
    """libuv closes the connections that it can't accept."""
    command = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", sys.executable, "-c", _AT_THE_LIMIT]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            asyncio.run(asyncio.wait_for(_crowd(int(process.stdout.readline())), PATIENCE_SECONDS))
            assert process.poll() is None
        finally:
            process.kill()


async def _crowd(port: int) -> None:
    async def connect() -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", port))

    async def used_seconds() -> float:
        early.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        status, body = await early.answer()
        assert status == 200
        return int(body) / 1e9

    early = await connect()
    await used_seconds()
    crowd = [await connect() for _ in range(150)]
    await until(lambda: sum(not client.open for client in crowd) > 80)
    before = await used_seconds()
    seconds = 1.0
    waiting = [asyncio.create_task(connect()) for _ in range(20)]
    await asyncio.sleep(seconds)
    assert await used_seconds() - before < seconds / 2
    crowd += await asyncio.gather(*waiting)
    for client in crowd:
        client.writer.transport.abort()
    await asyncio.sleep(0.1)
    late = await connect()
    assert await late.ask(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n") == 200
    late.writer.transport.abort()
    early.writer.transport.abort()
