"""Unsent attempts: a shortage of descriptors, memory or ports is no failure of the destination."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import pytest
import uvloop

from duetime.deliverers import client as client_module
from duetime.deliverers import unsent as module
from duetime.deliverers.client import HttpClient
from duetime.deliverers.connection import Answer, Unreachable
from duetime.deliverers.egress import Egress
from duetime.deliverers.http import HttpDeliverer
from duetime.deliverers.unsent import NotSent, OutOfDescriptors, out_of_descriptors
from duetime.model import Definition, HttpTarget, OutcomeKind, Timer, Unsent
from duetime.urls import parse_url
from tests.clocks import all_at

Run = Callable[..., Any]
NoDescriptors = Callable[[], AbstractContextManager[None]]
REQUEST = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nhi"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

LOOPS = pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])


async def answering(line: Any) -> None:
    while True:
        try:
            await line.answer(OK)
        except ConnectionError:
            return


async def post(client: HttpClient, peer: Any, *addresses: str) -> Answer:
    url = parse_url(f"http://name.example:{peer.port}/")
    return await client.request(url, list(addresses) or ["127.0.0.1"], REQUEST)


@asynccontextmanager
async def idle_connections(client: HttpClient, Peer: Any, number: int) -> AsyncIterator[None]:
    """Leave this many idle connections to a receiver."""
    arrived = asyncio.Event()
    lines: list[Any] = []

    async def script(line: Any) -> None:
        await line.request()
        lines.append(line)
        if len(lines) == number:
            arrived.set()
        await arrived.wait()
        await line.send(OK)
        await line.closed()

    async with Peer(*[script] * number) as peer:
        await asyncio.gather(*(post(client, peer) for _ in range(number)))
        assert len(client._idle) == number
        yield


def fail_connects(monkeypatch: pytest.MonkeyPatch, errors: dict[str, OSError]) -> list[str]:
    """Make connections to these addresses fail in this way; yields the list of the addresses that were tried."""
    tried: list[str] = []
    connect: Any = uvloop.Loop.create_connection

    async def create_connection(loop: Any, *arguments: Any, host: str, **options: Any) -> Any:
        tried.append(host)
        if host in errors:
            raise errors[host]
        return await connect(loop, *arguments, host=host, **options)

    monkeypatch.setattr(uvloop.Loop, "create_connection", create_connection)
    return tried


def deliverer_for(clock: Any) -> HttpDeliverer:
    egress = Egress(clock, allow_loopback=True)
    return HttpDeliverer(egress=egress, clock=clock, keys_of=lambda namespace: (), version="1")


def timer_for(url: str) -> Timer:
    definition = Definition(target=HttpTarget(url=url))
    return Timer("default", "t-1", 0, definition, *all_at(1), revision=9, firing=7, attempt=1)


def oserror(code: int) -> OSError:
    return OSError(code, os.strerror(code))


# Descriptors.


@LOOPS
def test_an_attempt_without_a_descriptor_does_not_count(
    loop: Any, run_in: Run, Peer: Any, clock: Any, no_descriptors: NoDescriptors
) -> None:
    async def main() -> None:
        deliverer = deliverer_for(clock)
        async with Peer(answering, last_forever=True) as peer:
            timer = timer_for(f"http://127.0.0.1:{peer.port}/")
            with no_descriptors():
                assert out_of_descriptors()
                outcome = await deliverer.deliver(timer, 10_000)
            assert (outcome.kind, outcome.cause) == (OutcomeKind.UNSENT, Unsent.DESCRIPTORS)
            assert outcome.error == "out of file descriptors"
            assert not out_of_descriptors()
            assert (await deliverer.deliver(timer, 10_000)).status == 200
            await deliverer.close()

    run_in(loop, main())


@LOOPS
def test_idle_connections_are_closed_for_a_new_one(
    loop: Any, run_in: Run, Peer: Any, no_descriptors: NoDescriptors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CLOSED_FOR_ROOM", 3)

    async def main() -> None:
        client = HttpClient()
        async with Peer(answering, last_forever=True) as other, idle_connections(client, Peer, 5):
            newest = list(client._idle)[3:]
            with no_descriptors():
                assert (await post(client, other)).status == 200
                assert [connection for connection in client._idle if connection in newest] == newest
                assert len(client._idle) == 3
            await client.close()

    run_in(loop, main())


def test_concurrent_requests_without_descriptors_close_no_more_than_needed(
    run: Run, Peer: Any, no_descriptors: NoDescriptors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CLOSED_FOR_ROOM", 10)

    async def main() -> None:
        client = HttpClient()
        async with Peer(answering, last_forever=True) as other, idle_connections(client, Peer, 40):
            with no_descriptors():
                # All in one round of the event loop.
                urls = [parse_url(f"http://place-{n}:{other.port}/") for n in range(4)]
                await asyncio.gather(*(client.request(url, ["127.0.0.1"], REQUEST) for url in urls))
                assert len(client._idle) >= 30
            await client.close()

    run(main())


def test_without_descriptors_no_tls_context_is_created(run: Run, no_descriptors: NoDescriptors) -> None:
    """It would lack the root certificates that can't be opened, for the lifetime of the process."""

    async def main() -> None:
        client = HttpClient()
        with no_descriptors(), pytest.raises(NotSent, match="out of file descriptors"):
            await client.request(parse_url("https://name.example:9/"), ["127.0.0.1"], REQUEST)
        assert client._tls is None
        await client.close()

    run(main())


def test_a_handshake_that_fails_without_descriptors_does_not_count(
    run: Run, Peer: Any, no_descriptors: NoDescriptors, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ssl.SSLError(1, "certificate verify failed")
    error.reason = "CERTIFICATE_VERIFY_FAILED"
    fail_connects(monkeypatch, {"127.0.0.1": error})

    async def main() -> None:
        client = HttpClient(tls=ssl.create_default_context())
        url = parse_url("https://name.example/")
        with no_descriptors(), pytest.raises(NotSent, match="out of file descriptors"):
            await client.request(url, ["127.0.0.1"], REQUEST)
        with pytest.raises(Unreachable, match="TLS"):
            await client.request(url, ["127.0.0.1"], REQUEST)
        await client.close()

    run(main())


# Other shortages.


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EMFILE, OutcomeKind.UNSENT),
        (errno.ENFILE, OutcomeKind.UNSENT),
        (errno.ENOBUFS, OutcomeKind.UNSENT),
        (errno.ENOMEM, OutcomeKind.UNSENT),
        (errno.EADDRNOTAVAIL, OutcomeKind.UNSENT),
        (errno.ECONNREFUSED, OutcomeKind.UNREACHABLE),
        (errno.ENETUNREACH, OutcomeKind.UNREACHABLE),
        (errno.EHOSTUNREACH, OutcomeKind.UNREACHABLE),
        (errno.ETIMEDOUT, OutcomeKind.UNREACHABLE),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else str(value),
)
def test_a_shortage_is_distinguished_from_a_failure_of_the_destination(
    run: Run, clock: Any, monkeypatch: pytest.MonkeyPatch, code: int, kind: OutcomeKind
) -> None:
    fail_connects(monkeypatch, {"127.0.0.1": oserror(code)})

    async def main() -> None:
        deliverer = deliverer_for(clock)
        outcome = await deliverer.deliver(timer_for("http://127.0.0.1:9/"), 10_000)
        assert outcome.kind is kind
        assert outcome.cause is (Unsent.DESCRIPTORS if kind is OutcomeKind.UNSENT else None)
        assert outcome.error
        await deliverer.close()

    run(main())


def test_an_address_without_a_route_is_a_failure_of_the_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same error as without a free local port, but permanent."""

    class Socket(socket.socket):
        def connect(self, address: Any) -> None:
            raise oserror(code)

    monkeypatch.setattr(socket, "socket", Socket)
    code = errno.EADDRNOTAVAIL
    assert module.connect_shortage(oserror(errno.EADDRNOTAVAIL), "2606:4700::1") is None
    code = errno.ENETUNREACH
    assert module.connect_shortage(oserror(errno.EADDRNOTAVAIL), "1.1.1.1") is None
    code = errno.EMFILE
    assert module.connect_shortage(oserror(errno.EADDRNOTAVAIL), "1.1.1.1") is not None


def test_the_next_address_is_tried_after_a_shortage(
    run: Run, Peer: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = {"127.0.0.2": oserror(errno.EADDRNOTAVAIL), "127.0.0.3": oserror(errno.ECONNREFUSED)}
    tried = fail_connects(monkeypatch, errors)

    async def main() -> None:
        client = HttpClient()
        async with Peer(answering, last_forever=True) as peer:
            assert (await post(client, peer, "127.0.0.2", "127.0.0.3", "127.0.0.1")).status == 200
            assert tried == ["127.0.0.2", "127.0.0.3", "127.0.0.1"]
            # The address that was not tried for lack of a port may be reachable.
            with pytest.raises(NotSent):
                await post(client, peer, "127.0.0.2", "127.0.0.3")
            with pytest.raises(Unreachable):
                await post(client, peer, "127.0.0.3")
            await client.close()

    run(main())


def test_a_shortage_after_the_request_was_sent_is_a_failed_attempt(
    run: Run, Peer: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reused connection broke with the request on it, so the receiver may have it; descriptors ran out only after
    that."""
    received: list[bytes] = []

    async def script(line: Any) -> None:
        await line.answer(OK)
        received.append(await line.request())
        fail_connects(monkeypatch, {"127.0.0.1": oserror(errno.EMFILE)})

    async def main() -> None:
        deliverer = deliverer_for(clock)
        async with Peer(script) as peer:
            timer = timer_for(f"http://127.0.0.1:{peer.port}/")
            assert (await deliverer.deliver(timer, 10_000)).status == 200
            outcome = await deliverer.deliver(timer, 10_000)
            assert outcome.kind is OutcomeKind.UNREACHABLE
            assert "out of file descriptors" in (outcome.error or "")
            await deliverer.close()

    run(main())
    assert len(received) == 1


def test_an_internal_error_is_not_hidden_by_shortages() -> None:
    assert OutOfDescriptors().cause is Unsent.DESCRIPTORS
    assert module.lookup_shortage(socket.gaierror(socket.EAI_AGAIN, "try again"), was_out=False) is None
    assert module.lookup_shortage(socket.gaierror(socket.EAI_AGAIN, "try again"), was_out=True) is not None
