"""Retries of the clients: one exchange with a manual clock, and real connections to a server with prepared
responses."""

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
    UnexpectedResponse,
    __version__,
    calls,
)
from duetime.client.exchange import NoResponse, Options, Response, Send, Wait, endpoint, exchange
from tests.servers import Receiver, Reply, unused_port

TO = endpoint("http://localhost:3000", "k")
OK = Response(200, None, b'{"namespaces": []}')
DOWN = Response(503, None, b'{"error": "UNAVAILABLE", "message": "the store is away", "details": {}}')
BROKEN = NoResponse(reason="connection reset", sent=True)
REFUSED = NoResponse(reason="connection refused", sent=False)


class ManualClock:
    """A clock that only the waits of an exchange move."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> int:
        return int(self.at * 1000)

    def monotonic(self) -> float:
        return self.at


class Play:
    """Runs one exchange that gets these results; the last one repeats."""

    def __init__(self, call: calls.Call[Any], *results: Response | NoResponse, **options: Any) -> None:
        self.sent: list[Send] = []
        self.waits: list[float] = []
        self.value: Any = None
        self.error: Exception | None = None
        clock = ManualClock()
        limits = Options(**{"timeout_seconds": 30.0, "attempt_timeout_seconds": 10.0, "attempts_max": 10} | options)
        steps = exchange(call, TO, limits, clock)
        left = itertools.chain(results, itertools.repeat(results[-1]))
        given: Response | NoResponse | None = None
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
    calls.cancel_all().call(0),
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
    calls.replay_all().call(0),
    calls.add_secret("a"),
]


@pytest.mark.parametrize("call", REPEATABLE, ids=lambda call: f"{call.method} {call.path}")
@pytest.mark.parametrize("failure", [BROKEN, REFUSED, DOWN, Response(429, None, b""), Response(502, None, b"")])
def test_idempotent_calls_are_retried(call: calls.Call[Any], failure: Response | NoResponse) -> None:
    play = Play(call, failure, failure, Response(418, None, b""))
    assert len(play.sent) == 3 and len({send.body for send in play.sent}) == 1  # the same id each time


@pytest.mark.parametrize("call", ONCE, ids=lambda call: f"{call.method} {call.path}")
def test_other_calls_are_retried_only_when_the_server_did_not_see_them(call: calls.Call[Any]) -> None:
    for failure in (BROKEN, DOWN):
        play = Play(call, failure)
        assert len(play.sent) == 1 and play.error
    for failure in (REFUSED, Response(429, None, b"")):
        assert len(Play(call, failure, failure, BROKEN).sent) == 3
    assert all(
        send.fresh for send in Play(call, REFUSED, BROKEN).sent
    )  # a reused connection could hide whether the request was seen


def test_backoff_grows_has_jitter_and_ends_with_the_timeout() -> None:
    plays = [Play(calls.namespaces(), DOWN, attempts_max=1000) for _ in range(200)]
    for play in plays:
        assert isinstance(play.error, Unavailable) and str(play.error) == "the store is away"
        assert sum(play.waits) < 30
        assert all(wait <= min(0.1 * 2 ** (n + 1), 5) for n, wait in enumerate(play.waits))
    assert len({play.waits[0] for play in plays}) > 150
    assert max(play.waits[6] for play in plays) > 3


def test_wrong_key_is_not_retried() -> None:
    body = b'{"error": "TOO_MANY_WRONG_KEYS", "message": "wait 8 s", "details": {}}'
    play = Play(calls.namespaces(), Response(429, "8", body), OK)
    assert isinstance(play.error, Unauthorized) and len(play.sent) == 1


def test_attempts_are_limited() -> None:
    play = Play(calls.namespaces(), REFUSED, attempts_max=3)
    assert len(play.sent) == 3 and isinstance(play.error, ConnectionFailed) and not play.error.sent
    assert str(play.error) == "no response from http://localhost:3000: connection refused"


def test_retry_after_is_the_minimum_wait() -> None:
    play = Play(calls.namespaces(), Response(503, "7", b""), Response(429, "2", b""), OK)
    assert 7 <= play.waits[0] <= 7.2 and 2 <= play.waits[1] <= 2.4 and play.value == []
    too_long = Play(calls.namespaces(), Response(503, "31", b""))
    assert not too_long.waits and isinstance(too_long.error, Unavailable)
    odd = Play(calls.namespaces(), Response(503, "Wed, 21 Oct 2015 07:28:00 GMT", b""), OK)
    assert odd.waits[0] <= 0.2


def test_attempt_has_its_own_timeout_within_the_total_timeout() -> None:
    play = Play(calls.namespaces(), DOWN, timeout_seconds=1.0, attempt_timeout_seconds=0.8)
    assert play.sent[0].timeout_seconds == 0.8
    left = [max(1.0 - sum(play.waits[:n]), 0.001) for n in range(len(play.sent))]  # it is never zero
    assert all(send.timeout_seconds <= most + 1e-9 for send, most in zip(play.sent, left, strict=True))


def test_connection_that_the_server_closed_is_replaced_without_a_wait() -> None:
    play = Play(calls.namespaces(), NoResponse(reason="closed", sent=True, reused=True), OK, attempts_max=1)
    assert play.value == [] and not play.waits
    assert [send.fresh for send in play.sent] == [False, True]


def test_retried_delete_that_gets_a_404_succeeds() -> None:
    gone = Response(404, None, b'{"error": "TIMER_NOT_FOUND", "message": "timer not found", "details": {}}')
    assert isinstance(Play(calls.delete("a"), gone).error, NotFound)
    assert isinstance(Play(calls.delete("a"), REFUSED, gone).error, NotFound)  # the server never saw the first request
    assert Play(calls.delete("a"), BROKEN, gone).error is None
    assert isinstance(Play(calls.get("a"), BROKEN, gone).error, NotFound)


def test_responses_of_other_servers_raise_an_error() -> None:
    for answer in (Response(200, None, b"<html>"), Response(200, None, b"{}"), Response(302, None, b"")):
        assert isinstance(Play(calls.namespaces(), answer).error, UnexpectedResponse)
    for status in (400, 401, 403, 404, 405, 409, 501):
        play = Play(calls.get("a"), Response(status, None, b"<html>"))
        assert isinstance(play.error, UnexpectedResponse) and play.error.status == status and len(play.sent) == 1
        assert str(play.error) == f"http://localhost:3000 responds, but not like Duetime (status {status})"
    page = Play(calls.get("a"), Response(200, None, b"<html>")).error
    assert isinstance(page, UnexpectedResponse) and page.status == 200
    assert str(page).startswith("http://localhost:3000 responds, but not like Duetime (JSON is malformed")
    # A proxy's 404 does not prove that the first request was carried out.
    assert isinstance(Play(calls.delete("a"), BROKEN, Response(404, None, b"")).error, UnexpectedResponse)
    wrong = Response(200, None, b'{"attempts": [{"duration": "soon"}]}')
    assert isinstance(Play(calls.attempts("a"), wrong).error, UnexpectedResponse)
    assert isinstance(Play(calls.namespaces(), Response(500, None, b"oops")).error, Unavailable)


# --- over real connections -----------------------------------------------------------------------------------------

PATH = "/api/v1/namespaces"
EMPTY = Reply(body=b'{"namespaces": []}')
BUSY = Reply(503, b'{"error": "UNAVAILABLE", "message": "busy", "details": {}}', {"Retry-After": "0"})


@pytest.fixture
def server() -> Iterator[Receiver]:
    """A server for one test, which counts its connections."""
    with Receiver() as server:
        yield server


def test_busy_server_and_broken_responses_are_retried(make: Callable[..., Client], server: Receiver) -> None:
    server.reply(PATH, BUSY, Reply(close=True), Reply(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"), EMPTY)
    assert make(server.base, "k").namespaces() == []
    requests = server.at(PATH)
    assert len(requests) == 4 and {request.headers["x-api-key"] for request in requests} == {"k"}
    assert {request.headers["user-agent"] for request in requests} == {f"duetime-python/{__version__}"}


def test_retried_create_keeps_its_id(make: Callable[..., Client], server: Receiver) -> None:
    path = "/api/v1/timers"
    server.reply(path, Reply(close=True), BUSY, Reply(400, b'{"error": "X", "message": "no more", "details": {}}'))
    with pytest.raises(InvalidRequest, match="no more"):
        make(server.base, "k").create(delay="1s", callback_url="http://x")
    requests = server.at(path)
    assert len(requests) == 3 and len({json.loads(request.body)["id"] for request in requests}) == 1


def test_connections_are_reused_and_replaced(make: Callable[..., Client], server: Receiver) -> None:
    server.reply(PATH, EMPTY)
    client = make(server.base, "k", attempts_max=1)
    for _ in range(5):
        client.namespaces()
    assert server.connections == 1
    # The server closes the idle connection: the next call opens a new one.
    for transport in list(server._open):
        server._loop.call_soon_threadsafe(transport.close)
    assert client.namespaces() == []
    assert server.connections >= 2
    # A call that must not run twice gets a new connection.
    seen = server.connections
    server.reply("/api/v1/timers/replay", Reply(body=b'{"replayed": 3, "more": false}'))
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
    ids=["chunked", "until close", "HTTP/1.0", "100 Continue"],
)
def test_responses_with_any_valid_framing_are_read(make: Callable[..., Client], server: Receiver, raw: bytes) -> None:
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
    ids=["empty", "SSH", "no status", "bad chunk size", "cut chunk", "cut body", "huge headers"],
)
def test_broken_response_raises_an_error(make: Callable[..., Client], server: Receiver, raw: bytes) -> None:
    server.reply(PATH, Reply(raw=raw))
    with pytest.raises(ConnectionFailed) as error:
        make(server.base, "k", attempts_max=2).namespaces()
    assert error.value.sent and server.base in str(error.value)


def test_refused_connection_raises_an_error(make: Callable[..., Client]) -> None:
    with unused_port() as port, pytest.raises(ConnectionFailed, match="connection refused") as error:
        make(f"http://127.0.0.1:{port}", "k", attempts_max=2).get("a")
    assert not error.value.sent and error.value.code == "CONNECTION_FAILED"


def test_tls_to_a_server_without_it_is_named(make: Callable[..., Client], url: str) -> None:
    with pytest.raises(ConnectionFailed, match=r"TLS: .*; is it a server without TLS, at http://\?$") as error:
        make(url.replace("http:", "https:"), "k", attempts_max=1).namespaces()
    assert not error.value.sent


def test_silent_server_times_out(make: Callable[..., Client], server: Receiver) -> None:
    server.reply(PATH, Reply(hang=True), EMPTY)
    assert make(server.base, "k", attempt_timeout_seconds=0.2).namespaces() == []
    server.reply(PATH, Reply(hang=True))
    with pytest.raises(ConnectionFailed, match="timed out"):
        make(server.base, "k", timeout_seconds=0.2).namespaces()


def test_canceled_call_closes_its_connection(server: Receiver) -> None:
    server.reply(PATH, Reply(hang=True), EMPTY)

    async def scene() -> None:
        async with AsyncClient(server.base, "k") as client:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.namespaces()
            assert await client.namespaces() == []
            # Ten concurrent calls use ten connections, and each gets its own response.
            assert await asyncio.gather(*(client.namespaces() for _ in range(10))) == [[]] * 10

    asyncio.run(scene())
