"""What is tried again, how often, how long after; against the bare exchange with a clock of its own, and against a
server that answers as it was told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from duetime.client import (
    AsyncClient,
    Client,
    ConnectionFailed,
    InvalidRequest,
    NotFound,
    Unauthorized,
    Unavailable,
    UnexpectedAnswer,
    calls,
)
from duetime.client.exchange import Answer, Lost, Options, Send, Wait, endpoint, exchange
from tests.servers import Receiver, Reply, unused_port

TO = endpoint("http://localhost:3000", "k")
OK = Answer(200, None, b'{"namespaces": []}')
DOWN = Answer(503, None, b'{"error": "UNAVAILABLE", "message": "the store is away", "details": {}}')
BROKEN = Lost(reason="connection reset", sent=True)
REFUSED = Lost(reason="connection refused", sent=False)


class Hand:
    """A clock that is moved by what the exchange waits for."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> int:
        return int(self.at * 1000)

    def monotonic(self) -> float:
        return self.at

    async def sleep(self, seconds: float, until: asyncio.Event | None = None) -> None:
        raise AssertionError


class Play:
    """One exchange, played through with these results."""

    def __init__(self, call: calls.Call[Any], *results: Answer | Lost, **options: Any) -> None:
        self.sent: list[Send] = []
        self.waits: list[float] = []
        self.value: Any = None
        self.error: Exception | None = None
        clock = Hand()
        limits = Options(**{"timeout_seconds": 30.0, "attempt_timeout_seconds": 10.0, "attempts_max": 10} | options)
        steps = exchange(call, TO, limits, clock)
        left = itertools.chain(results, itertools.repeat(results[-1]))
        given: Answer | Lost | None = None
        try:
            while True:
                step = steps.send(given)
                if isinstance(step, Wait):
                    self.waits.append(step.seconds)
                    clock.at += step.seconds
                    given = None
                else:
                    self.sent.append(step)
                    given = next(left)
                    if given == BROKEN:
                        clock.at += 0.01
        except StopIteration as stop:
            self.value = stop.value
        except Exception as error:
            self.error = error


REPEATABLE = [
    calls.create(delay="1s", callback_url="http://x"),
    calls.upsert(id="a", execute_at="2030-01-01T00:00:00Z", callback_url="http://x"),
    calls.get("a"),
    calls.update("a", delay="1s"),
    calls.cancel("a"),
    calls.delete("a"),
    calls.page(),
    calls.batch([{"delay": "1s", "callback_url": "http://x"}]),
    calls.batch_ids([{"delay": "1s", "callback_url": "http://x"}]),
    calls.pause("a"),
    calls.create_namespace("a"),
    calls.delete_secret("a", "b"),
]
ONCE = [
    calls.upsert(id="a", delay="1s", callback_url="http://x"),
    calls.replay("a"),
    calls.replay_all(),
    calls.add_secret("a"),
]


@pytest.mark.parametrize("call", REPEATABLE, ids=lambda call: f"{call.method} {call.path}")
@pytest.mark.parametrize("failure", [BROKEN, REFUSED, DOWN, Answer(429, None, b""), Answer(502, None, b"")])
def test_what_may_be_repeated_is(call: calls.Call[Any], failure: Answer | Lost) -> None:
    play = Play(call, failure, failure, Answer(418, None, b""))
    assert len(play.sent) == 3 and len({send.body for send in play.sent}) == 1  # the same id each time


@pytest.mark.parametrize("call", ONCE, ids=lambda call: f"{call.method} {call.path}")
def test_what_must_not_run_twice_is_sent_once_unless_it_was_not_seen(call: calls.Call[Any]) -> None:
    for failure in (BROKEN, DOWN):
        play = Play(call, failure)
        assert len(play.sent) == 1 and play.error
    for failure in (REFUSED, Answer(429, None, b"")):
        assert len(Play(call, failure, failure, BROKEN).sent) == 3
    assert all(send.fresh for send in Play(call, REFUSED, BROKEN).sent)  # an old connection could hide what happened


def test_waits_grow_are_drawn_and_end_with_the_timeout() -> None:
    plays = [Play(calls.namespaces(), DOWN, attempts_max=1000) for _ in range(200)]
    for play in plays:
        assert isinstance(play.error, Unavailable) and str(play.error) == "the store is away"
        assert sum(play.waits) < 30
        assert all(wait <= min(0.1 * 2 ** (n + 1), 5) for n, wait in enumerate(play.waits))
    assert len({play.waits[0] for play in plays}) > 150
    assert max(play.waits[6] for play in plays) > 3


def test_a_wrong_key_is_not_tried_again() -> None:
    said = b'{"error": "TOO_MANY_WRONG_KEYS", "message": "wait 8 s", "details": {}}'
    play = Play(calls.namespaces(), Answer(429, "8", said), OK)
    assert isinstance(play.error, Unauthorized) and len(play.sent) == 1


def test_tries_are_counted() -> None:
    play = Play(calls.namespaces(), REFUSED, attempts_max=3)
    assert len(play.sent) == 3 and isinstance(play.error, ConnectionFailed) and not play.error.sent
    assert str(play.error) == "no answer from http://localhost:3000: connection refused"


def test_retry_after_is_the_shortest_wait() -> None:
    play = Play(calls.namespaces(), Answer(503, "7", b""), Answer(429, "2", b""), OK)
    assert 7 <= play.waits[0] <= 7.2 and 2 <= play.waits[1] <= 2.4 and play.value == []
    too_long = Play(calls.namespaces(), Answer(503, "31", b""))
    assert not too_long.waits and isinstance(too_long.error, Unavailable)
    odd = Play(calls.namespaces(), Answer(503, "Wed, 21 Oct 2015 07:28:00 GMT", b""), OK)
    assert odd.waits[0] <= 0.2


def test_an_attempt_has_its_own_timeout_within_the_whole() -> None:
    play = Play(calls.namespaces(), DOWN, timeout_seconds=1.0, attempt_timeout_seconds=0.8)
    assert play.sent[0].timeout_seconds == 0.8
    left = [max(1.0 - sum(play.waits[:n]), 0.001) for n in range(len(play.sent))]  # it is never none at all
    assert all(send.timeout_seconds <= most + 1e-9 for send, most in zip(play.sent, left, strict=True))


def test_an_old_connection_is_no_failure() -> None:
    play = Play(calls.namespaces(), Lost(reason="closed", sent=True, kept=True), OK, attempts_max=1)
    assert play.value == [] and not play.waits
    assert [send.fresh for send in play.sent] == [False, True]


def test_a_delete_that_finds_nothing_on_its_second_try_was_done() -> None:
    gone = Answer(404, None, b'{"error": "TIMER_NOT_FOUND", "message": "timer not found", "details": {}}')
    assert isinstance(Play(calls.delete("a"), gone).error, NotFound)
    assert isinstance(Play(calls.delete("a"), REFUSED, gone).error, NotFound)  # the first try was never seen
    assert Play(calls.delete("a"), BROKEN, gone).error is None
    assert isinstance(Play(calls.get("a"), BROKEN, gone).error, NotFound)


def test_answers_that_are_not_of_duetime() -> None:
    for answer in (Answer(200, None, b"<html>"), Answer(200, None, b"{}"), Answer(302, None, b"")):
        assert isinstance(Play(calls.namespaces(), answer).error, UnexpectedAnswer)
    wrong = Answer(200, None, b'{"attempts": [{"duration": "soon"}]}')
    assert isinstance(Play(calls.attempts("a"), wrong).error, UnexpectedAnswer)
    assert isinstance(Play(calls.namespaces(), Answer(500, None, b"oops")).error, Unavailable)


# --- over real connections -----------------------------------------------------------------------------------------

PATH = "/api/v1/namespaces"
EMPTY = Reply(body=b'{"namespaces": []}')
BUSY = Reply(503, b'{"error": "UNAVAILABLE", "message": "busy", "details": {}}', {"Retry-After": "0"})


@pytest.fixture
def server() -> Iterator[Receiver]:
    """Nobody else's: its connections are counted."""
    with Receiver() as server:
        yield server


def test_a_server_that_stumbles(make: Callable[..., Client], server: Receiver) -> None:
    server.reply(PATH, BUSY, Reply(close=True), Reply(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"), EMPTY)
    assert make(server.base, "k").namespaces() == []
    requests = server.at(PATH)
    assert len(requests) == 4 and {request.headers["x-api-key"] for request in requests} == {"k"}


def test_a_create_that_is_repeated_keeps_its_id(make: Callable[..., Client], server: Receiver) -> None:
    path = "/api/v1/timers"
    server.reply(path, Reply(close=True), BUSY, Reply(400, b'{"error": "X", "message": "no more", "details": {}}'))
    with pytest.raises(InvalidRequest, match="no more"):
        make(server.base, "k").create(delay="1s", callback_url="http://x")
    requests = server.at(path)
    assert len(requests) == 3 and len({json.loads(request.body)["id"] for request in requests}) == 1


def test_connections_are_kept_and_replaced(make: Callable[..., Client], server: Receiver) -> None:
    server.reply(PATH, EMPTY)
    client = make(server.base, "k", attempts_max=1)
    for _ in range(5):
        client.namespaces()
    assert server.connections == 1
    # The server closes it while it lies idle: the next call does not notice.
    server._loop.call_soon_threadsafe(lambda: [transport.close() for transport in list(server._open)])
    assert client.namespaces() == []
    assert server.connections >= 2
    # What must not run twice has a connection of its own.
    seen = server.connections
    server.reply("/api/v1/timers/replay", Reply(body=b'{"replayed": 3}'))
    assert client.replay_all() == 3
    assert server.connections == seen + 1


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\n"
        b'{"nam\r\n0d\r\nespaces": []}\r\n0\r\nTrailer: 1\r\n\r\n',
        b'HTTP/1.1 200 OK\r\n\r\n{"namespaces": []}',
        b'HTTP/1.0 200 OK\r\nContent-Length: 18\r\n\r\n{"namespaces": []}',
        b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n{"namespaces": []}',
    ],
    ids=["chunked", "to the end", "1.0", "continue"],
)
def test_answers_framed_in_other_ways(make: Callable[..., Client], server: Receiver, raw: bytes) -> None:
    server.reply(PATH, Reply(raw=raw))
    client = make(server.base, "k", attempts_max=1)
    assert client.namespaces() == [] and client.namespaces() == []


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"SSH-2.0-OpenSSH_9\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    ],
    ids=["nothing", "ssh", "no status", "no chunk", "half a chunk", "half", "a long head"],
)
def test_answers_that_are_broken(make: Callable[..., Client], server: Receiver, raw: bytes) -> None:
    server.reply(PATH, Reply(raw=raw))
    with pytest.raises(ConnectionFailed) as error:
        make(server.base, "k", attempts_max=2).namespaces()
    assert error.value.sent and server.base in str(error.value)


def test_nobody_there(make: Callable[..., Client]) -> None:
    with unused_port() as port, pytest.raises(ConnectionFailed, match="connection refused") as error:
        make(f"http://127.0.0.1:{port}", "k", attempts_max=2).get("a")
    assert not error.value.sent and error.value.code == "CONNECTION_FAILED"


def test_a_server_that_hangs(make: Callable[..., Client], server: Receiver) -> None:
    server.reply(PATH, Reply(hang=True), EMPTY)
    assert make(server.base, "k", attempt_timeout_seconds=0.2).namespaces() == []
    server.reply(PATH, Reply(hang=True))
    with pytest.raises(ConnectionFailed, match="took too long"):
        make(server.base, "k", timeout_seconds=0.2).namespaces()


def test_a_call_that_is_canceled_leaves_no_connection_behind(server: Receiver) -> None:
    server.reply(PATH, Reply(hang=True), EMPTY)

    async def scene() -> None:
        async with AsyncClient(server.base, "k") as client:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.namespaces()
            assert await client.namespaces() == []
            # Ten at once have ten connections, and all get their own answer.
            assert await asyncio.gather(*(client.namespaces() for _ in range(10))) == [[]] * 10

    asyncio.run(scene())
