"""Many kinds of hostile clients at once: the service stays within its memory limit and keeps serving a healthy
client."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers import KEY, PATIENCE_SECONDS, Duetime, until

pytestmark = pytest.mark.alone

MIB = 1024 * 1024
MEMORY_BYTES_MAX = 400 * MIB
ATTACK_SECONDS = 5.0
ANSWER_SECONDS_MAX = 2.0
"""How long the healthy client may wait for a response. One of these attacks alone blocked the loop for 3.7 seconds."""
HELD_SECONDS = 1.0
"""How long an attacker keeps its connection without a response."""
UPLOADS = 40
LARGE = 15 * MIB
TARGET = "http://127.0.0.1:9/nobody"


def head(path: str, length: int | None, key: str = KEY) -> bytes:
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nX-API-Key: {key}\r\n{framing}\r\n\r\n".encode()


class Attack:
    """Sends from its own threads until it is closed, and counts the statuses of the responses."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.answers = Counter[str]()

    def begin(self, name: str, client: Callable[[socket.socket], None], count: int = 1) -> None:
        def run() -> None:
            while not self._over.is_set():
                with contextlib.suppress(OSError), self._connection() as connection:
                    client(connection)
                    self._listen(name, connection)

        for _ in range(count):
            self._threads.append(threading.Thread(target=run, name=name))
            self._threads[-1].start()

    def _connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), timeout=5)

    def _listen(self, name: str, connection: socket.socket) -> None:
        connection.settimeout(HELD_SECONDS)
        said = connection.recv(65_536)
        if said.startswith(b"HTTP/1.1 "):
            self.answers[f"{name} {said[9:12].decode()}"] += 1

    def has_hit(self, seconds: float) -> bool:
        """Whether the budget was exceeded and large names were checked, which may take a while on a busy machine."""
        assert seconds < PATIENCE_SECONDS, self.answers
        return self.answers["upload 503"] > 0 and self.answers["name 400"] > 0

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def upload(connection: socket.socket) -> None:
    """All of a large body except its end, chunked or with a length."""
    piece = b" " * MIB
    chunked = connection.getsockname()[1] % 2
    connection.sendall(head("/api/v1/timers/batch", None if chunked else LARGE))
    for _ in range(LARGE // MIB - 1):
        connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)


def trickle(connection: socket.socket) -> None:
    connection.sendall(head("/session", 100, "no") + b"{")


def pipeline(connection: socket.socket) -> None:
    """Many requests without reading the responses."""
    connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 20_000)


def send(path: str, body: bytes) -> Callable[[socket.socket], None]:
    def sent(connection: socket.socket) -> None:
        connection.sendall(head(path, len(body)) + body)

    return sent


def escapes() -> bytes:
    payload = '{"\\u00e9":"\\":"},' * (LARGE // 60 // 17)
    one = f'{{"delay":"1h","callbackUrl":"{TARGET}","payload":[{payload}1]}}'
    return f'{{"timers":[{",".join([one] * 60)}]}}'.encode()


def large_names() -> Iterator[bytes]:
    for n in range(64):
        fields = {"delay": "1h", "callbackUrl": TARGET, "callbackHeaders": {f"X-{n}-" + "a" * 60_000: "v"}}
        yield json.dumps(fields).encode()


def memory(service: Duetime, what: str) -> int:
    assert service.process is not None
    lines = Path(f"/proc/{service.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Duetime]:
    with Duetime(tmp_path) as running:
        yield running


def test_hostile_clients_exhaust_neither_memory_nor_the_event_loop(service: Duetime) -> None:
    attack = Attack(service.port)
    longest, served = 0.0, Counter[int]()
    try:
        attack.begin("escapes", send("/api/v1/timers/batch", escapes()))
        attack.begin("numbers", send("/api/v1/timers/batch", b'{"timers":[' + b"1," * (LARGE // 2) + b"1]}"))
        attack.begin("upload", upload, UPLOADS)
        attack.begin("trickle", trickle, 20)
        attack.begin("pipeline", pipeline, 20)
        for name in large_names():
            attack.begin("name", send("/api/v1/timers", name))
        began_at = time.monotonic()
        while (lasted := time.monotonic() - began_at) < ATTACK_SECONDS or not attack.has_hit(lasted):
            fields = {"delay": "1h", "callbackUrl": TARGET}
            for method, path, sent in (("GET", "/livez", None), ("POST", "/api/v1/timers", fields)):
                began = time.monotonic()
                served[service.request(method, path, json=sent).status] += 1
                longest = max(longest, time.monotonic() - began)
    finally:
        attack.end()
    assert served.keys() == {200}
    assert longest < ANSWER_SECONDS_MAX
    assert memory(service, "VmHWM") < MEMORY_BYTES_MAX
    body = b" " * (LARGE - 1000) + json.dumps({"timers": [{"delay": "1h", "callbackUrl": TARGET}]}).encode()
    until("there is room again", lambda: service.request("POST", "/api/v1/timers/batch", body=body).status == 200)
