from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import uvloop
from hypothesis import example, given, settings
from hypothesis import strategies as st

from duetime import batched_writes
from duetime.deliverers import client as module
from duetime.deliverers.client import HttpClient
from duetime.deliverers.connection import Answer, Connection, Unreachable
from duetime.deliverers.unsent import NotSent
from duetime.model import Unsent
from duetime.urls import Url, parse_url

REQUEST = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
TWO = b"HTTP/1.1 202 Accepted\r\nContent-Length: 3\r\n\r\ntwo"


def url_of(peer: Any, scheme: str = "http", host: str = "127.0.0.1") -> Url:
    return parse_url(f"{scheme}://{host}:{peer.port}/x")


async def post(client: HttpClient, peer: Any, message: bytes = REQUEST) -> Answer:
    return await client.request(url_of(peer), [peer.host], message)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - a condition of the client's, which tells nobody
            await asyncio.sleep(0.001)


def pieces_of(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


@pytest.fixture
def one(run: Callable[..., Any], Peer: Any) -> Callable[..., Answer]:
    """The response to one request whose receiver sends these pieces, then closes or waits for the close."""

    def one(*pieces: bytes, close: bool = False, reset: bool = False) -> Answer:
        async def script(line: Any) -> None:
            await line.answer(*pieces)
            if reset:
                await asyncio.sleep(0.02)
                line.reset()
            elif not close:
                await line.closed()

        async def main() -> Answer:
            client = HttpClient()
            async with Peer(script) as peer:
                try:
                    return await post(client, peer)
                finally:
                    await client.close()

        answer = run(main())
        assert isinstance(answer, Answer)
        return answer

    return one


# Parsing responses.


def test_response_with_a_content_length_is_read(one: Callable[..., Answer]) -> None:
    whole = b"HTTP/1.1 503 Busy\r\nServer: x\r\nretry-AFTER: 120\r\ncontent-length: 5\r\n\r\nlater"
    assert one(whole) == Answer(503, "120", b"later")
    assert one(*pieces_of(whole)) == Answer(503, "120", b"later")


CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: Retry-After\r\n\r\n"
    b'5;name=value;quoted="a b"\r\nhello\r\n1\r\n \r\n00a\r\n0123456789\r\n0;last\r\nRetry-After: 9\r\nX: y\r\n\r\n'
)


def test_chunked_response_in_odd_pieces_with_extensions_and_trailers(one: Callable[..., Answer]) -> None:
    expected = Answer(200, None, b"hello 0123456789")
    assert one(CHUNKED) == expected
    assert one(*pieces_of(CHUNKED)) == expected
    assert one(CHUNKED[:85], CHUNKED[85:110], CHUNKED[110:111], CHUNKED[111:]) == expected


def test_an_unframed_body_ends_with_the_connection(one: Callable[..., Answer]) -> None:
    assert one(b"HTTP/1.1 200 OK\r\n\r\n", b"so ", b"far", close=True) == Answer(200, None, b"so far")
    assert one(b"HTTP/1.0 200 OK\r\nRetry-After: 1\r\n\r\n", close=True) == Answer(200, "1", b"")
    assert one(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nzz", close=True) == Answer(200, None, b"zz")


def test_an_unframed_body_that_ends_with_a_reset_is_an_error(one: Callable[..., Answer]) -> None:
    with pytest.raises(Unreachable, match="reset by peer before the response was complete"):
        one(b"HTTP/1.1 200 OK\r\n\r\nso far", reset=True)


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("length", [b"", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_some_responses_have_no_body_whatever_their_headers_say(
    one: Callable[..., Answer], status: int, length: bytes
) -> None:
    assert one(b"HTTP/1.1 %d X\r\n%b\r\n" % (status, length)) == Answer(status, None, b"")


def test_informational_responses_are_skipped(one: Callable[..., Answer]) -> None:
    whole = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: </x>\r\nRetry-After: 7\r\n\r\n" + OK
    assert one(whole) == Answer(200, None, b"ok")
    assert one(*pieces_of(whole)) == Answer(200, None, b"ok")


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [b"H"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhell"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n"],
        [b"HTTP/1.1 100 Continue\r\n\r\n"],
    ],
)
@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_closes_early_is_an_error(
    one: Callable[..., Answer], pieces: list[bytes], reset: bool
) -> None:
    with pytest.raises(Unreachable, match="before the response"):
        one(*pieces, close=True, reset=reset)


@pytest.mark.parametrize(
    "answer",
    [
        b"220 mail.example ESMTP\r\n",
        b"\x16\x03\x01\x02\x00",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 099 Low\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nokok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nNo colon\r\n\r\n",
        b"HTTP/1.1 101 Switch\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\nPRI",
    ],
)
def test_a_response_that_is_not_http_is_an_error(one: Callable[..., Answer], answer: bytes) -> None:
    with pytest.raises(Unreachable, match="malformed response"):
        one(answer)


class Transport:
    """A connection that exists only in memory, so that every piece is one read."""

    closed = False

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None: ...

    def abort(self) -> None:
        self.closed = True


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, len(CHUNKED) + 60), max_size=12), before=st.booleans())
def test_splitting_a_response_anywhere_does_not_change_it(cuts: list[int], before: bool) -> None:
    whole = (b"HTTP/1.1 103 Early\r\n\r\n" if before else b"") + CHUNKED
    points = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]

    async def main() -> Answer | object:
        client = HttpClient()
        connection = Connection(client, ("127.0.0.1", 1, None), asyncio.get_running_loop())
        connection.connection_made(Transport())  # type: ignore[arg-type]
        waiter = connection.send(REQUEST)
        for start, end in pairwise(points):
            if start < end:
                connection.data_received(whole[start:end])
        assert len(client._idle) == 1
        connection.connection_lost(None)
        await client.close()
        return await waiter

    assert asyncio.run(main()) == Answer(200, None, b"hello 0123456789")


# Limits.


def test_response_headers_have_a_limit(one: Callable[..., Answer]) -> None:
    few = b"HTTP/1.1 200 OK\r\n" + b"X-Pad: %b\r\n" % (b"x" * 1000) * 60 + b"Content-Length: 2\r\n\r\nok"
    assert one(few).body == b"ok"
    many = b"HTTP/1.1 200 OK\r\n" + b"X-Pad: %b\r\n" % (b"x" * 1000) * 70 + b"Content-Length: 2\r\n\r\nok"
    with pytest.raises(Unreachable, match="64 KiB of headers"):
        one(many)
    with pytest.raises(Unreachable, match="64 KiB of headers"):
        one(b"HTTP/1.1 200 OK\r\nX-Endless: ", *[b"x" * 16384] * 5)
    with pytest.raises(Unreachable, match="64 KiB of headers"):
        one(*[b"HTTP/1.1 103 Early\r\nLink: %b\r\n\r\n" % (b"x" * 16000)] * 5)
    with pytest.raises(Unreachable, match="64 KiB of headers"):
        one(b"HTTP/1.1 200 " + b"x" * 70_000)


def test_bytes_around_a_body_have_a_limit(one: Callable[..., Answer]) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with pytest.raises(Unreachable, match="malformed response"):
        one(head, b"1;" + b"x" * 600_000, b"x" * 600_000)
    with pytest.raises(Unreachable, match="malformed response"):
        one(head, b"0\r\n", b"X-Trailer: %b\r\n" % (b"x" * 1000) * 80)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n", b"a" * 200_000],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", b"a" * 65_537],
        [b"HTTP/1.1 200 OK\r\n\r\n", b"a" * 40_000, b"a" * 40_000],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"4000\r\n" + b"a" * 0x4000 + b"\r\n"] * 6],
    ],
)
def test_a_body_is_cut_at_64_kib_without_waiting_for_the_rest(
    run: Callable[..., Any], Peer: Any, pieces: list[bytes]
) -> None:
    async def script(line: Any) -> None:
        await line.request()
        try:
            await line.send(*pieces)
        except ConnectionError:
            return
        await line.closed()

    async def main() -> None:
        client = HttpClient()
        async with Peer(script) as peer:
            answer = await post(client, peer)
            assert answer == Answer(200, None, b"a" * 65_536)
            assert not client._idle
        await client.close()

    run(main())


def test_a_body_of_exactly_64_kib_is_complete_and_keeps_the_connection(run: Callable[..., Any], Peer: Any) -> None:
    async def script(line: Any) -> None:
        await line.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 65536\r\n\r\n" + b"a" * 65_536)
        await line.answer(TWO)

    async def main() -> None:
        client = HttpClient()
        async with Peer(script) as peer:
            assert (await post(client, peer)).body == b"a" * 65_536
            assert (await post(client, peer)).body == b"two"
        await client.close()

    run(main())


# Reuse of connections.


@pytest.mark.parametrize(
    "answer",
    [
        OK,
        CHUNKED,
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
    ],
)
def test_a_connection_is_reused(run: Callable[..., Any], Peer: Any, answer: bytes) -> None:
    async def script(line: Any) -> None:
        assert await line.answer(answer) == REQUEST
        assert await line.answer(TWO) == REQUEST
        await line.answer(answer)
        await line.closed()

    async def main() -> None:
        client = HttpClient()
        async with Peer(script) as peer:
            first = await post(client, peer)
            assert (await post(client, peer)) == Answer(202, None, b"two")
            assert (await post(client, peer)) == first
            await client.close()
            assert peer.accepted == 1

    run(main())


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"],
        [b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"],
        [b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n"],
        [b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"],
        [OK + b"x"],
        [OK + b"H"],
        [OK + OK],
        [OK + b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"],
        [OK, OK],
        [OK, b"\r\n"],
        [b"HTTP/1.1 204 No Content\r\n\r\nbody"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok\x00\x01garbage"],
        [b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 500 X\r\n\r\n"],
    ],
)
def test_connection_with_an_unexpected_response_is_not_reused(
    run: Callable[..., Any], Peer: Any, pieces: list[bytes]
) -> None:
    async def first(line: Any) -> None:
        await line.answer(*pieces)
        await line.closed()

    async def second(line: Any) -> None:
        await line.answer(TWO)

    async def main() -> None:
        client = HttpClient()
        async with Peer(first, second) as peer:
            assert (await post(client, peer)).status in (200, 204, 304)
            if len(pieces) > 1:
                await until(lambda: not client._connections)
            assert (await post(client, peer)) == Answer(202, None, b"two")
        await client.close()

    run(main())


LATER = b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\nok"
NOTHING = b"HTTP/1.1 204 No Content\r\n\r\n"
BOTH = b"HTTP/1.1 100 Continue\r\n\r\n" + OK
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
QUOTED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(OK), OK)
LONG = b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + b"x" * 5000
MEANT = {
    OK: Answer(200, None, b"ok"),
    TWO: Answer(202, None, b"two"),
    LATER: Answer(503, "7", b"ok"),
    NOTHING: Answer(204, None, b""),
    BOTH: Answer(200, None, b"ok"),
    CHUNKS: Answer(200, None, b"ok"),
    QUOTED: Answer(200, None, OK),
    LONG: Answer(200, None, b"x" * 5000),
}


@settings(deadline=None)
@given(said=st.lists(st.tuples(st.sampled_from(list(MEANT)), st.integers(0, 60)), min_size=1, max_size=12))
@example(said=[(OK, 0), (QUOTED, QUOTED.index(OK, 1)), (OK, 0)])
def test_a_response_is_parsed_the_same_after_any_others_and_in_any_two_pieces(said: list[tuple[bytes, int]]) -> None:
    async def main() -> None:
        client = HttpClient()
        connection = Connection(client, ("127.0.0.1", 1, None), asyncio.get_running_loop())
        connection.connection_made(Transport())  # type: ignore[arg-type]
        for answer, cut in said:
            waiter = connection.send(REQUEST)
            for piece in filter(None, (answer[:cut], answer[cut:])):
                connection.data_received(piece)
            assert waiter.result() == MEANT[answer]
            assert client._take(1, None, ["127.0.0.1"]) is connection
        connection.connection_lost(None)
        await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("answer", [OK, NOTHING, CHUNKS])
@pytest.mark.parametrize("more", [b"H", OK])
@pytest.mark.parametrize("apart", [False, True])
def test_a_repeated_response_with_extra_bytes_closes_the_connection(
    run: Callable[..., Any], Peer: Any, answer: bytes, more: bytes, apart: bool
) -> None:
    async def first(line: Any) -> None:
        await line.answer(answer)
        await line.answer(answer)
        await line.answer(*((answer, more) if apart else (answer + more,)))
        await line.closed()

    async def second(line: Any) -> None:
        await line.answer(TWO)

    async def main() -> None:
        client = HttpClient()
        async with Peer(first, second) as peer:
            for _ in range(3):
                assert await post(client, peer) == MEANT[answer]
            if apart:
                await until(lambda: not client._idle)
            assert not client._idle
            assert (await post(client, peer)).body == b"two"
        await client.close()

    run(main())


def test_a_connection_that_ends_after_two_equal_responses_gives_no_third(run: Callable[..., Any], Peer: Any) -> None:
    async def first(line: Any) -> None:
        await line.answer(NOTHING)
        await line.answer(NOTHING)
        await line.request()

    async def second(line: Any) -> None:
        await line.answer(TWO)

    async def main() -> None:
        client = HttpClient()
        async with Peer(first, second) as peer:
            for meant in (MEANT[NOTHING], MEANT[NOTHING], MEANT[TWO]):
                assert await post(client, peer) == meant
        await client.close()

    run(main())


def test_a_closed_idle_connection_is_noticed(run: Callable[..., Any], Peer: Any) -> None:
    async def first(line: Any) -> None:
        await line.answer(OK)
        line.close()

    async def second(line: Any) -> None:
        await line.answer(TWO)

    async def main() -> None:
        client = HttpClient()
        async with Peer(first, second) as peer:
            assert (await post(client, peer)).body == b"ok"
            await until(lambda: not client._idle)
            assert (await post(client, peer)).body == b"two"
        await client.close()

    run(main())


@pytest.mark.parametrize("reset", [False, True])
def test_a_stale_connection_is_replaced_once(run: Callable[..., Any], Peer: Any, reset: bool) -> None:
    seen: list[bytes] = []

    async def first(line: Any) -> None:
        await line.answer(OK)
        seen.append(await line.request())
        if reset:
            line.reset()

    async def second(line: Any) -> None:
        seen.append(await line.answer(TWO))

    async def main() -> None:
        client = HttpClient()
        async with Peer(first, second) as peer:
            assert (await post(client, peer)).body == b"ok"
            assert (await post(client, peer, REQUEST + b"")).body == b"two"
        await client.close()

    run(main())
    assert seen == [REQUEST, REQUEST]


def test_the_replacement_is_a_new_connection_and_is_not_replaced_again(run: Callable[..., Any], Peer: Any) -> None:
    async def kept(line: Any) -> None:
        await line.answer(OK)
        with suppress(ConnectionError):  # the connection that was not used
            await line.request()

    async def fresh(line: Any) -> None:
        await line.request()

    async def main() -> None:
        client = HttpClient()
        async with Peer(kept, kept, fresh) as peer:
            await asyncio.gather(post(client, peer), post(client, peer))
            assert len(client._idle) == 2
            with pytest.raises(Unreachable, match="closed before the response"):
                await post(client, peer)
            await client.close()
            assert peer.accepted == 3

    run(main())


def test_a_request_uses_at_most_one_idle_connection(run: Callable[..., Any], Peer: Any) -> None:
    """A receiver that was restarted has closed all of them: the request must not be sent on each."""
    on_kept, on_fresh = 0, 0

    async def kept(line: Any) -> None:
        nonlocal on_kept
        await line.answer(OK)
        with suppress(ConnectionError):
            await line.request()
            on_kept += 1

    async def fresh(line: Any) -> None:
        nonlocal on_fresh
        await line.answer(TWO)
        on_fresh += 1

    async def main() -> None:
        client = HttpClient()
        async with Peer(kept, kept, kept, kept, fresh) as peer:
            await asyncio.gather(*(post(client, peer) for _ in range(4)))
            assert len(client._idle) == 4
            assert (await post(client, peer)).body == b"two"
            await client.close()
        assert (on_kept, on_fresh) == (1, 1)

    run(main())


def test_a_reused_connection_that_closes_after_a_byte_is_an_error(run: Callable[..., Any], Peer: Any) -> None:
    async def script(line: Any) -> None:
        await line.answer(OK)
        await line.answer(b"H")

    async def main() -> None:
        client = HttpClient()
        async with Peer(script) as peer:
            await post(client, peer)
            with pytest.raises(Unreachable, match="before the response was complete"):
                await post(client, peer)
            assert peer.accepted == 1
        await client.close()

    run(main())


def test_a_response_before_the_whole_request_was_sent_closes_the_connection(run: Callable[..., Any], Peer: Any) -> None:
    large = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 30000000\r\n\r\n" + b"x" * 30_000_000

    async def first(line: Any) -> None:
        await line.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await line.closed()

    async def second(line: Any) -> None:
        await line.answer(TWO)

    async def main() -> None:
        client = HttpClient()
        async with Peer(first, second) as peer:
            assert (await post(client, peer, large)).status == 413
            assert (await post(client, peer)).body == b"two"
        await client.close()

    run(main())


def test_bytes_before_the_first_request_are_not_its_response(run: Callable[..., Any], Peer: Any) -> None:
    async def script(line: Any) -> None:
        await line.send(OK)
        await line.closed()

    async def main() -> None:
        client = HttpClient()
        async with Peer(script) as peer:
            connection = await client._connect(url_of(peer), [peer.host], None)
            await until(lambda: connection.problem is not None)
            assert await asyncio.wait_for(connection.send(REQUEST), 5) is not None
            assert not client._connections
        await client.close()

    run(main())


def test_the_newest_idle_connection_is_used_first_and_the_oldest_is_evicted(
    run: Callable[..., Any], Peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(line: Any) -> None:
        try:
            while True:
                await line.answer(OK)
        except ConnectionError:
            pass

    async def main() -> None:
        client = HttpClient()
        async with Peer(script, last_forever=True) as peer, Peer(script, last_forever=True) as other:
            await asyncio.gather(*(post(client, peer) for _ in range(4)))
            order = list(client._idle)
            assert len(order) == 4
            await post(client, peer)
            assert list(client._idle) == order
            monkeypatch.setattr(module, "IDLE_MAX", 4)
            await post(client, other)
            assert list(client._idle)[:3] == order[1:]
            monkeypatch.setattr(module, "IDLE_PER_ADDRESS_MAX", 1)
            await asyncio.gather(post(client, other), post(client, other))
            assert sum(connection.key[1] == other.port for connection in client._idle) == 1
            await client.close()
            assert not client._idle
            assert not client._connections

    run(main())


def test_an_idle_connection_is_closed_after_a_while(run: Callable[..., Any], Peer: Any) -> None:
    async def script(line: Any) -> None:
        await line.answer(OK)
        await line.closed()

    async def main() -> None:
        client = HttpClient(idle_seconds=0.02)
        async with Peer(script) as peer:
            await post(client, peer)
            await until(lambda: not client._connections)
            await until(lambda: not client._idle_at)
        await client.close()

    run(main())


def test_connections_are_pooled_by_address(run: Callable[..., Any], Peer: Any) -> None:
    async def script(line: Any) -> None:
        await line.answer(OK)
        await line.closed()

    async def main() -> None:
        client = HttpClient()
        async with Peer(script) as peer, Peer(script, host="127.0.0.2") as other:
            url = url_of(peer)
            await client.request(url, ["127.0.0.1"], REQUEST)
            with pytest.raises(Unreachable):
                await client.request(url, ["127.0.0.3"], REQUEST)  # nothing listens there
            await client.request(url_of(other), ["127.0.0.2"], REQUEST)
            await client.close()

    run(main())


@pytest.mark.parametrize("written_at_once", [3, batched_writes.WRITES_AT_ONCE])
def test_hundreds_of_concurrent_requests_each_get_their_own_response(
    run: Callable[..., Any], Peer: Any, monkeypatch: pytest.MonkeyPatch, written_at_once: int
) -> None:
    monkeypatch.setattr(batched_writes, "WRITES_AT_ONCE", written_at_once)

    async def script(line: Any) -> None:
        try:
            while True:
                request = await line.request()
                number = request.rpartition(b"\r\n\r\n")[2]
                head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(number)
                await line.send(head + number if int(number) % 3 else head, *([] if int(number) % 3 else [number]))
        except ConnectionError:
            pass

    async def main() -> None:
        client = HttpClient()

        async def several(start: int) -> None:
            for number in range(start, start + 10):
                text = b"%d" % number
                message = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text)
                assert (await post(client, peer, message)).body == text

        async with Peer(script, last_forever=True) as peer:
            await asyncio.gather(*(several(1000 * n) for n in range(1, 101)))
            assert peer.accepted <= 100
            await client.close()

    run(main())


# Timeouts and cancellation.


@pytest.mark.parametrize(
    "pieces", [[], [b"HTTP/1.1 200 OK\r\n"], [b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n", *[b"x"] * 300]]
)
def test_a_slow_trickling_response_times_out(run: Callable[..., Any], Peer: Any, pieces: list[bytes]) -> None:
    async def script(line: Any) -> None:
        try:
            await line.answer(*pieces)
        except ConnectionError:
            return
        await line.closed()

    async def main() -> None:
        client = HttpClient()
        async with Peer(script) as peer:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await post(client, peer)
            assert not client._idle
            await until(lambda: not client._connections)
        await client.close()

    run(main())


def test_the_timeout_of_a_request_ends_with_its_response(run: Callable[..., Any], Peer: Any) -> None:
    async def script(line: Any) -> None:
        await line.answer(OK)
        await line.request()
        await asyncio.sleep(0.15)  # beyond the timeout of the first request
        await line.send(OK)
        await line.closed()

    async def main() -> None:
        client = HttpClient()
        async with Peer(script) as peer:
            until = asyncio.get_running_loop().time() + 0.05
            await client.request(url_of(peer), [peer.host], REQUEST, until)
            [connection] = client._connections
            await client.request(url_of(peer), [peer.host], REQUEST)
            assert client._connections == {connection}
        await client.close()

    run(main())


def test_a_canceled_request_closes_its_connection(run: Callable[..., Any], Peer: Any) -> None:
    arrived = []

    async def script(line: Any) -> None:
        await line.answer(OK)
        arrived.append(await line.request())
        await line.closed()

    async def main() -> None:
        client = HttpClient()
        async with Peer(script) as peer:
            await post(client, peer)
            task = asyncio.create_task(post(client, peer))
            await until(lambda: arrived)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not client._idle
            await until(lambda: not client._connections)
            assert peer.accepted == 1
        await client.close()

    run(main())


def test_canceling_a_request_just_after_its_response_keeps_the_connection(run: Callable[..., Any], Peer: Any) -> None:
    async def script(line: Any) -> None:
        await line.answer(OK)
        await line.answer(TWO)
        await line.closed()

    async def main() -> None:
        client = HttpClient()
        async with Peer(script) as peer:
            first = asyncio.create_task(post(client, peer))
            while not client._idle:  # noqa: ASYNC110 - in the very round in which it becomes true
                await asyncio.sleep(0)
            # The response has arrived, but the first request has not been resumed yet.
            assert not first.done()
            connection = client._take(peer.port, None, ["127.0.0.1"])
            assert connection is not None
            waiter = connection.send(REQUEST)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert await waiter == Answer(202, None, b"two")
            await client.close()

    run(main())


@pytest.mark.parametrize("rounds", range(6))
def test_a_canceled_connect_leaves_nothing_open(run: Callable[..., Any], Peer: Any, rounds: int) -> None:
    async def script(line: Any) -> None:
        await line.closed()

    async def main() -> None:
        client = HttpClient()
        async with Peer(script, last_forever=True) as peer:
            task = asyncio.create_task(post(client, peer))
            for _ in range(rounds):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: not client._connections)
            await asyncio.sleep(0.01)  # an open connection may not have been accepted yet
            await until(lambda: all(task.done() for task in peer._running))
        await client.close()

    run(main())


def test_closing_the_client_ends_requests_in_flight(run: Callable[..., Any], Peer: Any) -> None:
    arrived = []

    async def script(line: Any) -> None:
        arrived.append(await line.request())
        await line.closed()

    async def main() -> None:
        client = HttpClient()
        async with Peer(script) as peer:
            task = asyncio.create_task(post(client, peer))
            await until(lambda: arrived)
            await client.close()
            with pytest.raises(Unreachable, match="shutting down"):
                await task
            with pytest.raises(NotSent, match="shutting down") as caught:
                await post(client, peer)
            assert caught.value.cause is Unsent.DRAIN
            await client.close()

    run(main())


# Connecting.


def test_refused_connection_raises_unreachable(run: Callable[..., Any]) -> None:
    async def main() -> None:
        client = HttpClient()
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            url = parse_url(f"http://127.0.0.1:{bound.getsockname()[1]}/")
            with pytest.raises(Unreachable, match=r"^connection refused$"):
                await client.request(url, ["127.0.0.1"], REQUEST)
            with pytest.raises(Unreachable, match=r"^connection refused$"):
                await client.request(url, ["127.0.0.2", "127.0.0.1"], REQUEST)
        await client.close()

    run(main())


def test_addresses_are_tried_in_order(run: Callable[..., Any], Peer: Any) -> None:
    async def script(line: Any) -> None:
        await line.answer(OK)
        await line.answer(TWO)

    async def main() -> None:
        client = HttpClient()
        async with Peer(script) as peer:
            addresses = ["127.0.0.2", "127.0.0.1", "127.0.0.3"]
            assert (await client.request(url_of(peer), addresses, REQUEST)).body == b"ok"
            assert (await client.request(url_of(peer), addresses, REQUEST)).body == b"two"
        await client.close()

    run(main())


class Rerouted(uvloop.Loop):
    """A network that connects to other addresses than requested."""

    async def create_connection(self, *args: Any, host: str, **kwargs: Any) -> Any:  # type: ignore[override]
        if host == "127.0.0.99":  # drops packets
            await asyncio.sleep(3600)
        connect: Any = super().create_connection
        return await connect(*args, host="127.0.0.1", **kwargs)


def test_a_connection_to_another_address_is_not_used(run_in: Callable[..., Any], Peer: Any) -> None:
    async def script(line: Any) -> None:
        with pytest.raises(ConnectionError):
            await line.request()

    async def main() -> None:
        client = HttpClient()
        async with Peer(script) as peer:
            with pytest.raises(Unreachable, match=r"connected to 127\.0\.0\.1 instead of 127\.0\.0\.2"):
                await client.request(url_of(peer), ["127.0.0.2"], REQUEST)
        await client.close()

    run_in(Rerouted, main())


def test_an_address_that_drops_packets_leaves_time_for_the_next(
    run_in: Callable[..., Any], Peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_SECONDS_MAX", 0.01)

    async def script(line: Any) -> None:
        await line.answer(OK)

    async def main() -> None:
        client = HttpClient()
        async with Peer(script) as peer:
            answer = await client.request(url_of(peer), ["127.0.0.99", "127.0.0.1"], REQUEST)
            assert answer.body == b"ok"
        await client.close()

    run_in(Rerouted, main())


# TLS.


async def serve_tls(
    certificate: Any, handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> asyncio.Server:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return await asyncio.start_server(handler, "127.0.0.1", 0, ssl=context)


def trusting(certificates: Any) -> ssl.SSLContext:
    context = module.tls_context()
    context.load_verify_locations(certificates.authority)
    return context


def tls_requests(
    run: Callable[..., Any], certificate: Any, context: ssl.SSLContext | None, names: list[str]
) -> list[Answer | str]:
    """The results of requests to each name in turn; the receiver counts its connections in the response's body."""
    connections = ended = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections, ended
        connections += 1
        try:
            while True:
                await reader.readexactly(len(REQUEST))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % connections)
        except (asyncio.IncompleteReadError, OSError):
            writer.transport.abort()
        ended += 1

    async def main() -> list[Answer | str]:
        server = await serve_tls(certificate, handler)
        port = server.sockets[0].getsockname()[1]
        client = HttpClient(tls=context)
        results: list[Answer | str] = []
        for name in names:
            try:
                results.append(await client.request(parse_url(f"https://{name}:{port}/"), ["127.0.0.1"], REQUEST))
            except Unreachable as exc:
                results.append(str(exc))
        await client.close()
        server.close()
        await until(lambda: ended == connections)
        await asyncio.sleep(0.02)
        return results

    results = run(main())
    assert isinstance(results, list)
    return results


def test_tls_checks_the_name_and_keeps_the_connection(run: Callable[..., Any], certificates: Any) -> None:
    certificate = certificates.issue("hooks.example")
    names = ["hooks.example", "hooks.example", "HOOKS.example."]
    # The trailing dot is only for the resolver: the certificate's name and the connection stay the same.
    assert tls_requests(run, certificate, trusting(certificates), names) == [Answer(200, None, b"1")] * 3


def test_tls_accepts_a_certificate_for_an_address(run: Callable[..., Any], certificates: Any) -> None:
    certificate = certificates.issue("127.0.0.1")
    assert tls_requests(run, certificate, trusting(certificates), ["127.0.0.1"]) == [Answer(200, None, b"1")]


def test_a_certificate_for_another_name_is_rejected_even_with_a_pooled_connection(
    run: Callable[..., Any], certificates: Any
) -> None:
    names = ["hooks.example", "other.example"]
    good, bad = tls_requests(run, certificates.issue("hooks.example"), trusting(certificates), names)
    assert good == Answer(200, None, b"1")
    assert isinstance(bad, str)
    assert bad.startswith("TLS: Hostname mismatch")


def test_a_certificate_of_an_unknown_authority_is_rejected(run: Callable[..., Any], certificates: Any) -> None:
    [result] = tls_requests(run, certificates.issue("hooks.example"), None, ["hooks.example"])
    assert isinstance(result, str)
    assert result.startswith("TLS: ")


def test_a_certificate_that_has_expired_is_rejected(run: Callable[..., Any], certificates: Any) -> None:
    certificate = certificates.issue("hooks.example", days=-1)
    assert tls_requests(run, certificate, trusting(certificates), ["hooks.example"]) == ["TLS: certificate has expired"]


def test_receiver_without_tls_is_an_error(run: Callable[..., Any], Peer: Any) -> None:
    async def plain(line: Any) -> None:
        await line.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await line.closed()

    async def closing(line: Any) -> None:
        line.close()

    async def main() -> None:
        client = HttpClient()
        for script in (plain, closing):
            async with Peer(script) as peer:
                with pytest.raises(Unreachable):
                    await client.request(url_of(peer, "https"), [peer.host], REQUEST)
        await client.close()

    run(main())


def test_a_hanging_handshake_times_out_and_is_closed(run: Callable[..., Any], Peer: Any) -> None:
    async def script(line: Any) -> None:
        await line.closed()

    async def main() -> None:
        client = HttpClient()
        async with Peer(script) as peer:
            until = asyncio.get_running_loop().time() + 0.05
            async with asyncio.timeout(10):
                with pytest.raises(TimeoutError):
                    await client.request(url_of(peer, "https"), [peer.host], REQUEST, until)
        await client.close()

    run(main())


# Many concurrent requests.


async def answering(line: Any) -> None:
    with contextlib.suppress(ConnectionError):  # of an abandoned request
        while True:
            await line.answer(OK)


def test_hundreds_of_requests_each_get_a_connection_if_there_are_no_responses(
    run: Callable[..., Any], Peer: Any
) -> None:
    asked = 80

    async def main() -> None:
        client, all_here = HttpClient(), asyncio.Event()
        waiting = 0

        async def script(line: Any) -> None:
            nonlocal waiting
            with contextlib.suppress(ConnectionError):  # of an abandoned request
                await line.request()
                waiting += 1
                await all_here.wait()
                await line.send(OK)
                await line.closed()

        async with Peer(script, last_forever=True) as peer:
            requests = [asyncio.create_task(post(client, peer)) for _ in range(asked)]
            await asyncio.sleep(0)
            for given_up in requests[1::3]:  # an abandoned request must not block the others
                given_up.cancel()
            left = [request for request in requests if not request.cancelling()]
            await until(lambda: waiting == len(left))
            all_here.set()
            assert {answer.status for answer in await asyncio.gather(*left)} == {200}
            assert len(left) <= peer.accepted < asked
            await client.close()

    run(main())


def test_later_requests_get_their_turns_to_connect_too(run: Callable[..., Any], Peer: Any) -> None:
    async def script(line: Any) -> None:
        await line.answer(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")

    async def main() -> None:
        client = HttpClient()
        async with Peer(script, last_forever=True) as peer:
            for _ in range(2):
                await asyncio.gather(*(post(client, peer) for _ in range(3)))
            assert peer.accepted == 6
            await client.close()

    run(main())


@pytest.mark.parametrize("places", [1, module.CONNECTS_PER_ROUND])
def test_hundreds_of_connects_to_some_hosts_do_not_delay_another_host(
    run: Callable[..., Any], Peer: Any, places: int
) -> None:
    came: list[str] = []

    def silent(name: str) -> Callable[[Any], Coroutine[Any, Any, None]]:
        async def script(line: Any) -> None:
            with contextlib.suppress(ConnectionError):
                await line.request()
                came.append(name)
                await line.closed()

        return script

    async def main() -> None:
        client = HttpClient()
        async with (
            Peer(silent("crowded"), last_forever=True) as crowded,
            Peer(silent("other"), last_forever=True) as other,
        ):
            urls = [parse_url(f"http://place-{n % places}:{crowded.port}/") for n in range(300)]
            requests = [asyncio.create_task(client.request(url, [crowded.host], REQUEST)) for url in urls]
            requests += [asyncio.create_task(post(client, other)) for _ in range(3)]
            await until(lambda: len(came) == len(requests))
            assert "other" not in came[30:]
            for request in requests:
                request.cancel()
            await asyncio.wait(requests)
            await client.close()

    run(main())


def test_more_hosts_than_connects_per_round_all_get_their_turns(run: Callable[..., Any], Peer: Any) -> None:
    async def main() -> None:
        client = HttpClient()
        async with Peer(answering, last_forever=True) as peer:
            urls = [parse_url(f"http://place-{n}:{peer.port}/") for n in range(3 * module.CONNECTS_PER_ROUND)]
            asked = [asyncio.create_task(client.request(url, [peer.host], REQUEST)) for url in urls for _ in range(3)]
            await asyncio.sleep(0)
            for request in asked[:30]:
                request.cancel()
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert [answer.status for answer in answers if isinstance(answer, Answer)] == [200] * (len(asked) - 30)
            await client.close()

    run(main())


def test_hundreds_of_requests_share_connections_if_responses_come_soon(run: Callable[..., Any], Peer: Any) -> None:
    asked = 320

    async def main() -> None:
        client = HttpClient()
        async with Peer(answering, last_forever=True) as peer:
            await asyncio.gather(*(post(client, peer) for _ in range(asked)))
            assert peer.accepted < asked
            await client.close()

    run(main())
