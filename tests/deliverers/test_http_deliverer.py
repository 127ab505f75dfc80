from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from msgspec import Raw
from standardwebhooks import Webhook

from duetime.deliverer import Deliverer
from duetime.deliverers.bodies import body_of
from duetime.deliverers.connection import Connection
from duetime.deliverers.deadlines import Deadlines
from duetime.deliverers.egress import Egress
from duetime.deliverers.http import HttpDeliverer
from duetime.instants import EPOCH, CreatedAt, ExecuteAt, FireAt, Instant
from duetime.model import (
    ABSENT,
    BodyFormat,
    Definition,
    HttpTarget,
    NatsTarget,
    Outcome,
    OutcomeKind,
    Status,
    Target,
    Timer,
    Unsent,
)
from duetime.secret_rotation import to_text
from tests.simulation.world import Machine, VirtualLoop

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n" + b'{"ok":true}'


def timer_for(
    target: Target | str,
    *,
    payload: Raw = ABSENT,
    body: BodyFormat = BodyFormat.PAYLOAD,
    attempt: int = 1,
    id: str = "t-1",
    namespace: str = "default",
    firing: int = 7,
) -> Timer:
    if isinstance(target, str):
        target = HttpTarget(url=target)
    return Timer(
        namespace=namespace,
        id=id,
        shard=0,
        definition=Definition(target=target, payload=payload, body=body),
        execute_at=ExecuteAt(1_700_000_000_123),
        fire_at=FireAt(1_700_000_000_123),
        created_at=CreatedAt(1),
        updated_at=Instant(1),
        revision=9,
        firing=firing,
        attempt=attempt,
        status=Status.EXECUTING,
    )


def deliverer_for(clock: Any, keys: Sequence[bytes] = (), **policy: Any) -> HttpDeliverer:
    egress = Egress(clock, **(policy or {"allow_loopback": True}))
    return HttpDeliverer(egress=egress, clock=clock, keys_of=lambda namespace: keys, version="9.8.7")


def taken_apart(request: bytes) -> tuple[str, dict[str, str], bytes]:
    head, _, body = request.partition(b"\r\n\r\n")
    line, *headers = head.decode("utf-8").split("\r\n")
    names = [header.partition(": ")[0].lower() for header in headers]
    assert len(names) == len(set(names)), "a header came twice"
    return line, {name: header.partition(": ")[2] for name, header in zip(names, headers, strict=True)}, body


@pytest.fixture
def exchange(run: Callable[..., Any], Peer: Any, clock: Any) -> Callable[..., tuple[Outcome, bytes]]:
    """The outcome of one delivery, and the request that the receiver saw."""

    def exchange(answer: bytes = OK, keys: Sequence[bytes] = (), **changes: Any) -> tuple[Outcome, bytes]:
        seen: list[bytes] = []

        async def script(line: Any) -> None:
            seen.append(await line.answer(answer))

        async def main() -> Outcome:
            deliverer = deliverer_for(clock, keys)
            async with Peer(script) as peer:
                method = changes.pop("method", "POST")
                headers = changes.pop("headers", {})
                path = changes.pop("path", "/hook?a=b")
                target = HttpTarget(url=f"http://127.0.0.1:{peer.port}{path}", method=method, headers=headers)
                outcome = await deliverer.deliver(timer_for(target, **changes), 10_000)
                await deliverer.close()
            return outcome

        outcome = run(main())
        assert isinstance(outcome, Outcome)
        return outcome, seen[0]

    return exchange


# The request.


def test_http_deliverer_implements_the_port(clock: Any) -> None:
    _: Deliverer = deliverer_for(clock)


def test_request_has_the_documented_line_and_headers(exchange: Callable[..., tuple[Outcome, bytes]]) -> None:
    outcome, request = exchange(payload=Raw(b'{"a": 1}'), attempt=3, headers={"X-Own": "yes"}, method="PUT")
    assert outcome == Outcome(kind=OutcomeKind.ANSWERED, status=200, body=b'{"ok":true}')
    line, headers, body = taken_apart(request)
    assert line == "PUT /hook?a=b HTTP/1.1"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", headers.pop("host"))
    delivery_id = timer_for("http://x/").delivery_id
    trace = headers.pop("traceparent")
    assert re.fullmatch(rf"00-{delivery_id.replace('-', '')}-(?!0{{16}})[0-9a-f]{{16}}-01", trace)
    assert headers == {
        "content-type": "application/json",
        "user-agent": "timer-platform/0.1.0 duetime/9.8.7",
        "x-own": "yes",
        "webhook-id": delivery_id,
        "webhook-timestamp": "1700000000",
        "duetime-attempt": "3",
        "duetime-timer": "default/t-1",
        "content-length": "8",
    }
    assert body == b'{"a": 1}'


def test_attempts_of_a_firing_share_the_id_and_trace_and_have_their_own_spans(
    exchange: Callable[..., tuple[Outcome, bytes]],
) -> None:
    one, two, again, other = (
        taken_apart(exchange(attempt=attempt, firing=firing)[1])[1]
        for attempt, firing in ((1, 7), (2, 7), (2, 7), (1, 8))
    )
    assert one["webhook-id"] == two["webhook-id"] != other["webhook-id"]
    spans = [headers["traceparent"].split("-") for headers in (one, two, again, other)]
    assert spans[0][1] == spans[1][1] != spans[3][1]
    assert spans[0][2] != spans[1][2] == spans[2][2]


def test_a_timers_headers_replace_ours_where_that_is_harmless(
    exchange: Callable[..., tuple[Outcome, bytes]],
) -> None:
    own = {"content-TYPE": "text/plain", "User-agent": "me", "Authorization": "Bearer ü"}
    _, headers, _ = taken_apart(exchange(headers=own)[1])
    assert headers["content-type"] == "text/plain"
    assert headers["user-agent"] == "me"
    assert headers["authorization"] == "Bearer ü"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "x"},
        {"content-length": "0"},
        {"Transfer-Encoding": "chunked"},
        {"CONNECTION": "close"},
        {"webhook-id": "x"},
        {"Webhook-Signature": "x"},
        {"webhook-timestamp": "x"},
        {"Duetime-Attempt": "x"},
        {"X": "a\r\nHost: evil"},
        {"X": "a\nb"},
        {"X": "a\0b"},
        {"X\r\nY": "a"},
        {"X Y": "a"},
        {"X:": "a"},
        {"": "a"},
    ],
)
def test_a_header_that_would_change_the_framing_is_rejected(
    run: Callable[..., Any], clock: Any, headers: dict[str, str]
) -> None:
    async def main() -> None:
        deliverer = deliverer_for(clock)
        outcome = await deliverer.deliver(timer_for(HttpTarget(url="http://127.0.0.1:1/", headers=headers)), 1000)
        assert outcome.kind is OutcomeKind.REFUSED
        assert "callback_headers" in (outcome.error or "")
        await deliverer.close()

    run(main())


@pytest.mark.parametrize(
    ("id", "shown"),
    [
        ("plain-1.2:3", "default/plain-1.2:3"),
        ("50% off", "default/50%25%20off"),
        ("ü/é", "default/%C3%BC/%C3%A9"),
        ("a\r\nX: y", "default/a%0D%0AX:%20y"),
    ],
)
def test_the_timer_header_is_always_valid(exchange: Callable[..., tuple[Outcome, bytes]], id: str, shown: str) -> None:
    _, headers, _ = taken_apart(exchange(id=id)[1])
    assert headers["duetime-timer"] == shown
    assert "x" not in headers


def test_each_attempt_has_new_signatures_for_all_keys(run: Callable[..., Any], Peer: Any, clock: Any) -> None:
    old, new = b"o" * 32, b"n" * 24
    clock.ms = int(datetime.now(UTC).timestamp() * 1000)  # the official package looks at the real clock
    seen: list[bytes] = []

    async def script(line: Any) -> None:
        for _ in range(2):
            seen.append(await line.answer(OK))

    async def main() -> None:
        deliverer = deliverer_for(clock, [new, old])
        async with Peer(script) as peer:
            for attempt in (1, 2):
                timer = timer_for(f"http://127.0.0.1:{peer.port}/", payload=Raw(b'{"a": 1}'), attempt=attempt)
                assert (await deliverer.deliver(timer, 10_000)).status == 200
                clock.ms += 5_000
            await deliverer.close()

    run(main())
    timestamps = []
    for request in seen:
        _, headers, body = taken_apart(request)
        for key in (old, new):
            assert Webhook(to_text(key)).verify(body, headers) == {"a": 1}
        timestamps.append(int(headers["webhook-timestamp"]))
    assert timestamps[1] == timestamps[0] + 5


def test_without_a_key_nothing_is_signed(exchange: Callable[..., tuple[Outcome, bytes]]) -> None:
    assert "webhook-signature" not in taken_apart(exchange()[1])[1]


# The body.


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (ABSENT, b""),
        (Raw(b"null"), b"null"),
        (Raw(b'{ "a" :  1.0 }'), b'{ "a" :  1.0 }'),
        (Raw('"ü"'.encode()), '"ü"'.encode()),
    ],
)
def test_a_payload_is_sent_byte_for_byte(
    exchange: Callable[..., tuple[Outcome, bytes]], payload: Raw, expected: bytes
) -> None:
    _, headers, body = taken_apart(exchange(payload=payload)[1])
    assert body == expected
    assert headers["content-length"] == str(len(expected))


@pytest.mark.parametrize(
    ("payload", "raw"), [(ABSENT, b"null"), (Raw(b"null"), b"null"), (Raw(b'{"n": 1.0}'), b'{"n": 1.0}')]
)
def test_an_envelope_contains_the_payload_unchanged(payload: Raw, raw: bytes) -> None:
    body = body_of(timer_for("http://x/", payload=payload, body=BodyFormat.ENVELOPE, attempt=2, id='a"ü'), EPOCH)
    assert raw in body
    assert json.loads(body) == {
        "id": 'a"ü',
        "namespace": "default",
        "executeAt": "2023-11-14T22:13:20.123Z",
        "attempt": 2,
        "payload": json.loads(raw),
    }


# The outcome.


@pytest.mark.parametrize(
    ("status", "error"),
    [
        *((200, None), (299, None), (302, "HTTP 302: redirects are not followed")),
        *((404, "HTTP 404"), (500, "HTTP 500")),
    ],
)
def test_a_status_becomes_an_outcome(
    exchange: Callable[..., tuple[Outcome, bytes]], status: int, error: str | None
) -> None:
    answer = b"HTTP/1.1 %d X\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 2\r\n\r\nhm" % status
    outcome, _ = exchange(answer)
    assert outcome == Outcome(kind=OutcomeKind.ANSWERED, status=status, body=b"hm", error=error)


NOW = datetime.fromtimestamp(1_700_000_000, UTC)


@pytest.mark.parametrize(
    ("text", "wait_ms"),
    [
        ("0", 0),
        ("120", 120_000),
        (" 5 ", 5_000),
        (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90_000),
        (format_datetime(NOW - timedelta(days=1), usegmt=True), 0),
        ("Tue, 14 Nov 2023 22:14:00 -0000", 40_000),
        ("9" * 50, 366 * 24 * 3600 * 1000),
        ("-1", None),
        ("1.5", None),
        ("soon", None),
        ("", None),
        ("Tue, 99 Nov 2023 22:14:00 GMT", None),
        ("\xb2", None),
    ],
)
def test_retry_after_is_parsed(exchange: Callable[..., tuple[Outcome, bytes]], text: str, wait_ms: int | None) -> None:
    answer = b"HTTP/1.1 503 X\r\nRetry-After: %b\r\nContent-Length: 0\r\n\r\n" % text.encode("latin-1")
    assert exchange(answer)[0].retry_after_ms == wait_ms


def test_receiver_that_does_not_respond_times_out(run: Callable[..., Any], Peer: Any, clock: Any) -> None:
    async def script(line: Any) -> None:
        await line.closed()

    async def main() -> None:
        deliverer = deliverer_for(clock)
        async with Peer(script) as peer:
            outcome = await deliverer.deliver(timer_for(f"http://127.0.0.1:{peer.port}/"), 50)
            assert outcome == Outcome(kind=OutcomeKind.TIMED_OUT, error="no response within 50ms")
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            await asyncio.sleep(0)  # no cancellation may be left over
        await deliverer.close()

    run(main())


def test_a_slow_lookup_is_a_timeout(run: Callable[..., Any], clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: go_on.wait(10) and [])

    async def main() -> None:
        deliverer = deliverer_for(clock)
        outcome = await deliverer.deliver(timer_for("http://slow.example/"), 50)
        assert outcome.kind is OutcomeKind.TIMED_OUT
        await deliverer.close()
        go_on.set()

    run(main())


def test_a_cancellation_is_propagated(run: Callable[..., Any], Peer: Any, clock: Any) -> None:
    arrived = asyncio.Event()

    async def script(line: Any) -> None:
        await line.request()
        arrived.set()
        await line.closed()

    async def main() -> None:
        deliverer = deliverer_for(clock)
        async with Peer(script) as peer:
            task = asyncio.create_task(deliverer.deliver(timer_for(f"http://127.0.0.1:{peer.port}/"), 10_000))
            await arrived.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await deliverer.close()

    run(main())


def test_timeouts_of_any_length_expire_in_order_and_leave_nothing_behind(
    run: Callable[..., Any], Peer: Any, clock: Any
) -> None:
    reached: list[int] = []

    async def silent(line: Any) -> None:
        await line.closed()

    async def quick(line: Any) -> None:
        await line.answer(OK)
        await line.closed()

    async def main() -> None:
        deliverer = deliverer_for(clock)
        async with Peer(silent, last_forever=True) as peer, Peer(quick) as other:

            async def attempt(timeout_ms: int) -> None:
                outcome = await deliverer.deliver(timer_for(f"http://127.0.0.1:{peer.port}/"), timeout_ms)
                assert outcome.kind is OutcomeKind.TIMED_OUT
                reached.append(timeout_ms)

            assert (await deliverer.deliver(timer_for(f"http://127.0.0.1:{other.port}/"), 60_000)).status == 200
            await asyncio.gather(*map(attempt, (300, 100, 200, 0)))
            deadlines = deliverer._client.deadlines
            assert not any(deadlines._buckets.values())
            # The bucket of the first attempt was empty at the last deadline, so there is no timer.
            assert deadlines._alarm is None
            assert deadlines._buckets == {}
            await deliverer.close()

    run(main())
    assert reached == [0, 100, 200, 300]


def test_a_timeout_is_never_early_and_only_for_requests_in_flight(run: Callable[..., Any]) -> None:
    class Waiting:
        def __init__(self) -> None:
            self.reached: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def expire(self) -> None:
            self.reached.set_result(asyncio.get_running_loop().time())

    async def main() -> None:
        loop = asyncio.get_running_loop()
        deadlines = Deadlines()
        limits = [loop.time() + ms / 1000 for ms in range(0, 100, 7)]
        waiting, gone = [Waiting() for _ in limits], [Waiting() for _ in limits]
        for one, other, limit in zip(waiting, gone, limits, strict=True):
            deadlines.enter(one, limit, loop)
            deadlines.enter(other, limit, loop).discard(other)
        for one, limit in zip(waiting, limits, strict=True):
            # The loop's clock counts milliseconds; a difference of two floats may be off by a rounding error.
            assert round((await one.reached - limit) * 1000) >= 0
        assert not any(other.reached.done() for other in gone)
        deadlines.close()

    run(main())


@pytest.mark.parametrize("from_outside", [False, True])
def test_a_cancellation_wins_over_a_timeout_in_the_same_round(
    run: Callable[..., Any], Peer: Any, clock: Any, from_outside: bool
) -> None:
    arrived = asyncio.Event()

    async def script(line: Any) -> None:
        await line.request()
        arrived.set()
        await line.closed()

    async def main() -> None:
        deliverer = deliverer_for(clock)
        async with Peer(script) as peer:
            task = asyncio.create_task(deliverer.deliver(timer_for(f"http://127.0.0.1:{peer.port}/"), 10_000))
            await arrived.wait()
            [connection] = deliverer._client._connections
            connection.expire()
            if from_outside:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                assert (await task).kind is OutcomeKind.TIMED_OUT
        await deliverer.close()

    run(main())


def test_timeout_of_the_caller_is_raised(run: Callable[..., Any], Peer: Any, clock: Any) -> None:
    async def script(line: Any) -> None:
        await line.closed()

    async def main() -> None:
        deliverer = deliverer_for(clock)
        async with Peer(script) as peer:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.03):
                    await deliverer.deliver(timer_for(f"http://127.0.0.1:{peer.port}/"), 10_000)
        await deliverer.close()

    run(main())


@pytest.mark.parametrize(
    ("target", "kind", "error"),
    [
        (HttpTarget(url="http://127.0.0.1/"), OutcomeKind.REFUSED, "loopback"),
        (HttpTarget(url="http://[::ffff:10.0.0.1]/"), OutcomeKind.REFUSED, "written as IPv6"),
        (HttpTarget(url="http://2130706433/"), OutcomeKind.REFUSED, "callback_url"),
        (HttpTarget(url="http://a@b/"), OutcomeKind.REFUSED, "callback_url"),
        (HttpTarget(url="nonsense"), OutcomeKind.REFUSED, "callback_url"),
        (HttpTarget(url="http://1.1.1.1/", method="CONNECT"), OutcomeKind.REFUSED, "callback_method"),
        (HttpTarget(url="http://1.1.1.1/", method="POST / HTTP/1.1\r\nX: "), OutcomeKind.REFUSED, "callback_method"),
        (NatsTarget(subject="a.b"), OutcomeKind.REFUSED, "not an HTTP target"),
        (
            HttpTarget(url="http://inside.example/"),
            OutcomeKind.REFUSED,
            "the callback URL points to inside.example, which resolves to an",
        ),
        (HttpTarget(url="http://gone.example/"), OutcomeKind.UNREACHABLE, "gone.example was not resolved"),
    ],
)
def test_unsent_and_refused_attempts_have_a_reason(
    run: Callable[..., Any],
    clock: Any,
    monkeypatch: pytest.MonkeyPatch,
    target: Target,
    kind: OutcomeKind,
    error: str,
) -> None:
    def lookup(host: bytes, *_: object, **__: object) -> list[Any]:
        if host == b"inside.example":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))]
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)

    async def main() -> None:
        deliverer = deliverer_for(clock, allow_loopback=False)
        outcome = await deliverer.deliver(timer_for(target), 10_000)
        assert outcome.kind is kind
        assert error in (outcome.error or "")
        await deliverer.close()

    run(main())


def test_refused_connection_is_unreachable(run: Callable[..., Any], clock: Any) -> None:
    async def main() -> None:
        deliverer = deliverer_for(clock)
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            outcome = await deliverer.deliver(timer_for(f"http://127.0.0.1:{bound.getsockname()[1]}/"), 10_000)
        assert outcome == Outcome(kind=OutcomeKind.UNREACHABLE, error="connection refused")
        await deliverer.close()

    run(main())


def test_nothing_is_sent_for_an_unknown_namespace(run: Callable[..., Any], Peer: Any, clock: Any) -> None:
    """It is unknown whether its callbacks have to be signed."""
    keys: Sequence[bytes] | None = None
    asked: list[str] = []
    seen: list[bytes] = []

    def keys_of(namespace: str) -> Sequence[bytes] | None:
        asked.append(namespace)
        return keys

    async def script(line: Any) -> None:
        seen.append(await line.answer(OK))

    async def main() -> None:
        nonlocal keys
        egress = Egress(clock, allow_loopback=True)
        deliverer = HttpDeliverer(egress=egress, clock=clock, keys_of=keys_of, version="1")
        async with Peer(script) as peer:
            timer = timer_for(f"http://127.0.0.1:{peer.port}/", namespace="new")
            outcome = await deliverer.deliver(timer, 10_000)
            assert (outcome.kind, outcome.cause) == (OutcomeKind.UNSENT, Unsent.NAMESPACE)
            assert peer.accepted == 0
            keys = [b"key"]
            assert (await deliverer.deliver(timer, 10_000)).kind is OutcomeKind.ANSWERED
            await deliverer.close()

    run(main())
    assert asked == ["new", "new"]
    assert "webhook-signature" in taken_apart(seen[0])[1]


class Lookup:
    """A guard with slow lookups."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def known(self, url: Any) -> None:
        return None

    async def resolve(self, url: Any, until: float) -> list[str]:
        await asyncio.sleep(self.seconds)
        return ["127.0.0.1"]


@pytest.mark.parametrize("seconds", [0.0, 1.0, 6.5])
def test_the_timeout_of_an_attempt_includes_the_lookup(seconds: float) -> None:
    until: list[float] = []

    async def request(url: Any, addresses: Any, message: bytes, by: float) -> Any:
        until.append(by)
        raise TimeoutError

    async def main() -> None:
        await asyncio.sleep(3)
        deliverer = HttpDeliverer(
            egress=Lookup(seconds),  # type: ignore[arg-type]
            clock=Machine(),
            keys_of=lambda namespace: (),
            version="1",
        )
        deliverer._client.request = request  # type: ignore[method-assign, assignment]
        outcome = await deliverer.deliver(timer_for("http://receiver.example/"), 7_000)
        assert outcome.kind is OutcomeKind.TIMED_OUT

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
    assert until == [3.0 + 7.0]


def test_an_internal_error_before_sending_does_not_count(
    run: Callable[..., Any], clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def keys_of(namespace: str) -> Sequence[bytes]:
        raise KeyError(namespace)

    async def main() -> None:
        egress = Egress(clock, allow_loopback=True)
        deliverer = HttpDeliverer(egress=egress, clock=clock, keys_of=keys_of, version="1")
        outcome = await deliverer.deliver(timer_for("http://127.0.0.1:9/"), 10_000)
        assert outcome == Outcome(kind=OutcomeKind.UNSENT, cause=Unsent.INTERNAL, error="internal error: KeyError")
        await deliverer.close()

    run(main())
    assert logged_errors(caplog) == ["KeyError"]


def test_an_internal_error_after_sending_is_a_failed_attempt(
    run: Callable[..., Any], Peer: Any, clock: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error during sending, and one after the response: in both cases the receiver may have the request."""
    send = Connection.send
    broken = True

    def break_after_sending(connection: Connection, *arguments: Any) -> Any:
        waiter = send(connection, *arguments)
        if broken:
            raise KeyError
        return waiter

    def broken_wait_ms(*_: object) -> int:
        raise KeyError

    async def script(line: Any) -> None:
        await line.answer(OK.replace(b"\r\n\r\n", b"\r\nRetry-After: 1\r\n\r\n"))
        await line.closed()

    async def main() -> None:
        nonlocal broken
        deliverer = deliverer_for(clock)
        async with Peer(script, last_forever=True) as peer:
            timer = timer_for(f"http://127.0.0.1:{peer.port}/")
            failed = Outcome(kind=OutcomeKind.UNREACHABLE, error="internal error: KeyError")
            assert await deliverer.deliver(timer, 10_000) == failed
            broken = False
            monkeypatch.setattr(deliverer, "_wait_ms", broken_wait_ms)
            assert await deliverer.deliver(timer, 10_000) == failed
            await deliverer.close()

    monkeypatch.setattr(Connection, "send", break_after_sending)
    run(main())
    assert logged_errors(caplog) == ["KeyError", "KeyError"]


def logged_errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The exceptions that were logged with a traceback."""
    records = [record for record in caplog.records if record.name.startswith("duetime")]
    assert all(record.levelno == logging.ERROR for record in records)
    return [record.exc_info[0].__name__ for record in records if record.exc_info and record.exc_info[0]]


# The guard and the client together.


def test_the_connection_goes_to_the_checked_address(
    run: Callable[..., Any], Peer: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that changes its address after the check, like an attacker's."""
    answers = [["127.0.0.1"], ["127.0.0.2"]]
    asked = []

    def lookup(host: bytes, *_: object, **__: object) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 0)) for a in answers[min(len(asked) - 1, 1)]]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    seen: list[bytes] = []

    async def script(line: Any) -> None:
        seen.append(await line.answer(OK))
        seen.append(await line.answer(OK))
        await line.closed()

    async def main() -> None:
        deliverer = deliverer_for(clock, allow=["127.0.0.1/32"])
        async with Peer(script) as peer:
            timer = timer_for(f"http://rebind.example:{peer.port}/")
            assert (await deliverer.deliver(timer, 10_000)).status == 200
            assert (await deliverer.deliver(timer, 10_000)).status == 200
            assert asked == [b"rebind.example"]  # the check and the connection use the same lookup
            clock.seconds += 60
            outcome = await deliverer.deliver(timer, 10_000)
            # The open connection to the old address must not bypass the guard.
            assert outcome.kind is OutcomeKind.REFUSED
            assert outcome.error is not None and outcome.error.startswith("the callback URL points to rebind.example,")
            await deliverer.close()
        assert taken_apart(seen[0])[1]["host"] == f"rebind.example:{peer.port}"

    run(main())


def test_targets_with_long_headers_are_not_cached(clock: Any) -> None:
    deliverer = deliverer_for(clock)
    for n in range(3):
        asyncio.run(deliverer.check(HttpTarget(url="http://8.8.8.8/", headers={"X": f"{n}" * 5000})))
        asyncio.run(deliverer.check(HttpTarget(url=f"http://8.8.8.8/{n}")))
    assert deliverer._cached_route.cache_info().currsize == 3
