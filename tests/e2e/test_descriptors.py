"""Few file descriptors and many clients: idle connections without the key block neither deliveries nor other
clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import KEY, Duetime, Receiver, Reply, until
from tests.skips import skip

pytestmark = pytest.mark.alone

OPEN_FILES_MAX = 1024
FLOOD = 1200
TIMERS = 30
SHARE = 448
"""The shares of clients and deliveries in the limit."""

HALF_HEAD = b"POST /timers HTTP/1.1\r\nHost: a\r\nX-Api-"
HALF_BODY = b"POST /session HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{"


@pytest.fixture(autouse=True)
def enough_descriptors() -> Iterator[None]:
    """The flood's ends of the connections are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FLOOD + 1000
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            skip(f"needs {wanted} open files: ulimit -Hn is {hard}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Flood:
    """Idle connections without a key, from several loopback addresses."""

    def __init__(self, port: int, addresses: int, sent: bytes) -> None:
        self._port = port
        self._addresses = addresses
        self._sent = sent
        self._clients: list[socket.socket] = []

    def grow(self, count: int) -> None:
        for _ in range(count):
            source = (f"127.0.0.{1 + len(self._clients) % self._addresses}", 0)
            self._clients.append(socket.create_connection(("127.0.0.1", self._port), 30, source))
            with contextlib.suppress(ConnectionError):
                self._clients[-1].sendall(self._sent)

    def __enter__(self) -> Flood:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()


def create(service: Duetime, url: str) -> str:
    """A timer with one attempt, created on a new connection from one of the flood's addresses."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)) as connection:
        body = json.dumps({"execute_at": service.ahead(10), "callback_url": url})
        connection.request("POST", "/timers", body, {"Content-Type": "application/json", "X-API-Key": KEY})
        response = connection.getresponse()
        assert response.status == 201
        id: str = json.loads(response.read())["data"]["id"]
    return id


def anonymous(service: Duetime) -> int:
    """The number of connections that are not signed in, from the metrics."""
    found = re.search(
        r'^duetime_connections{signed_in="no"} (\d+)', service.request("GET", "/metrics").body.decode(), re.M
    )
    assert found is not None
    return int(found[1])


floods = pytest.mark.parametrize(
    ("addresses", "sent"),
    [(1, b""), (20, b""), (1, HALF_HEAD), (20, HALF_HEAD), (1, HALF_BODY), (20, HALF_BODY)],
    ids=lambda value: {b"": "nothing", HALF_HEAD: "half a head", HALF_BODY: "half a body"}.get(value, value),
)


@floods
def test_idle_connections_take_no_descriptors_from_deliveries(tmp_path: Path, addresses: int, sent: bytes) -> None:
    with Receiver() as receiver, Duetime(tmp_path, virtual_clock=True, open_files_max=OPEN_FILES_MAX) as service:
        ids = [service.create(receiver.url("/hook")) for _ in range(TIMERS)]
        with Flood(service.port, addresses, sent) as flood:
            flood.grow(FLOOD)
            service.advance()
            assert [service.finished(id)["status"] for id in ids] == ["completed"] * TIMERS


@floods
def test_a_client_with_the_key_can_always_connect(tmp_path: Path, addresses: int, sent: bytes) -> None:
    with Duetime(tmp_path, virtual_clock=True, open_files_max=OPEN_FILES_MAX) as service:
        assert service.process is not None
        with Flood(service.port, addresses, sent) as flood:
            for _ in range(TIMERS):
                flood.grow(FLOOD // TIMERS)
                create(service, "http://127.0.0.1:1/")
            most = SHARE // 4 if addresses == 1 else SHARE // 2
            assert most - 2 <= anonymous(service) <= most
            assert len(os.listdir(f"/proc/{service.process.pid}/fd")) < most + OPEN_FILES_MAX // 8
        until("they are gone", lambda: anonymous(service) == 0)
        assert service.terminate() == 0
        assert "too low: using at most 448 client connections" in service.stderr
        assert "too many open files" not in service.stderr.lower() and "Traceback" not in service.stderr


def test_deliveries_use_no_more_descriptors_than_their_share(tmp_path: Path) -> None:
    """Of 400 timers due at once for a receiver that never responds, only as many are sent as there are descriptors."""
    limits: dict[str, Any] = {"DUETIME_MAX_PER_DESTINATION": "4096"}
    with Receiver() as receiver, Duetime(tmp_path, virtual_clock=True, open_files_max=256, **limits) as service:
        receiver.reply("/slow", Reply(hang=True))
        ids = [service.create(receiver.url("/slow")) for _ in range(400)]
        service.advance()
        share = 96
        receiver.wait("/slow", 16)
        time.sleep(0.3)  # without a limit, more would be sent in this time
        assert len(receiver.at("/slow")) <= share
        while len(receiver.at("/slow")) < len(ids):
            receiver.release()
            time.sleep(0.01)
        receiver.release()
        assert {service.finished(id)["status"] for id in ids} == {"completed"}
