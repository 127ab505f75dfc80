"""Real servers for tests: ``Duetime``, a service in its own process, and ``Receiver``, an HTTP server for callbacks.

Both use loopback only and are context managers that leave nothing running. The client is the standard library's, so a
test can send arbitrary bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Self

KEY = "test-key-test-key-test-key-test-key-0123"
LOOPBACK = "127.0.0.0/8,::1/128"
FINAL = ("completed", "failed", "canceled")
PATIENCE_SECONDS = 30.0
IDLE_SECONDS_MAX = 30.0
"""Timeouts of tests; only failing tests reach them."""
DUE_SECONDS = 10
"""The default delay of a test's timer: long enough for the platform API's minimum even on a slow machine."""

_LISTENING = re.compile(r"is listening on http://\S+:(\d+)$", re.MULTILINE).search


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]  # names in lower case
    body: Any  # parsed if it is JSON, else bytes


class NotStarted(AssertionError):
    """The process exited or did not become ready."""


_unused_addresses = (f"127.77.{n // 250}.{1 + n % 250}" for n in count())


def unused_address() -> str:
    """A loopback address that no test has used yet: wrong keys are counted by address."""
    return next(_unused_addresses)


def until(what: str, condition: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
    """Poll ``condition`` and return its first true value; raises an AssertionError with ``what`` after a timeout."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        time.sleep(0.005)
    return value


def instant(text: str) -> datetime:
    """Parse a time in the service's format."""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", text), text
    return datetime.fromisoformat(text)


def printed(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"


class Duetime:
    """One ``duetime serve``. After ``terminate`` or ``kill``, ``start`` runs a new process on the same directory.

    Without ``API_KEY`` in ``env``, it gets ``KEY`` and may call loopback addresses; with ``bare=True``, it gets only a
    free port and ``env``.
    """

    module = "duetime"

    def __init__(
        self,
        directory: Path,
        *,
        virtual_clock: bool = False,
        bare: bool = False,
        start: bool = True,
        open_files_max: int | None = None,
        **env: str,
    ) -> None:
        """``open_files_max`` is the process's hard limit on open files."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.port = 0
        self._arguments = ["--virtual-clock"] if virtual_clock else []
        self._prefix = [] if open_files_max is None else ["sh", "-c", f'ulimit -n {open_files_max}; exec "$@"', "sh"]
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH", "TZ") if name in os.environ}
        ours = {} if bare else {"API_KEY": KEY, "DUETIME_ALLOW_PRIVATE_TARGETS": LOOPBACK, "HOST": "127.0.0.1"}
        self._env = inherited | {"PORT": "0"} | ours | env
        self._starts = 0
        self._connections: list[http.client.HTTPConnection] = []
        self._asked_at = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        if start:
            self.start()

    # The process.

    def spawn(self) -> None:
        """Start the process without waiting until it is ready."""
        assert self.process is None or self.process.poll() is not None, "is running already"
        self._starts += 1
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [*self._prefix, sys.executable, "-m", self.module, "serve", *self._arguments],
                cwd=self.directory,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        self.spawn()
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise

    def wait_ready(self) -> None:
        until("the service is ready", self._is_ready)

    def _is_ready(self) -> bool:
        assert self.process is not None
        listening = _LISTENING(self.stderr)
        if self.process.poll() is not None:
            raise NotStarted(f"exit code {self.process.returncode}: {self.stderr}")
        if listening is None:
            return False
        self.port = int(listening[1])
        return self.request("GET", "/readyz").status == 200

    @property
    def _log(self) -> Path:
        return self.directory / f"stderr-{self._starts}.log"

    @property
    def stderr(self) -> str:
        """The log of the latest process so far."""
        return self._log.read_text(errors="replace")

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for the process to exit; returns the exit code."""
        assert self.process is not None
        self.disconnect()
        return self.process.wait(PATIENCE_SECONDS * 2)

    def terminate(self) -> int:
        """Stop the process with SIGTERM; returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        self.disconnect()
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # The client.

    @property
    def key(self) -> str | None:
        """The API key that clients have to send."""
        if self._env.get("DUETIME_AUTH", "key") != "key":
            return None
        return self._env.get("API_KEY") or (self.directory / "duetime.key").read_text().strip()

    def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        source: str | None = None,
    ) -> Answer:
        """Send one request on a keep-alive connection. ``headers`` replace the defaults, including the key. ``source``
        is the client's loopback address, which gets a connection of its own."""
        if json is not None:
            body = _dumps(json)
        if headers is None:
            headers = {"Content-Type": "application/json"}
            if path.startswith(("/timers", "/metrics", "/clock", "/api/")) and self.key is not None:
                headers["X-API-Key"] = self.key
        if time.monotonic() - self._asked_at > IDLE_SECONDS_MAX:
            self.disconnect()  # The service closes idle connections, perhaps just when this request is sent.
        self._asked_at = time.monotonic()
        if source is not None:
            connection = self._connect(source)
        else:
            connection = self._connections.pop() if self._connections else self._connect()
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            given = {name.lower(): value for name, value in response.getheaders()}
            content = response.read()
        except BaseException:
            connection.close()
            raise
        if source is None:
            self._connections.append(connection)
        else:
            connection.close()
        return Answer(response.status, given, _parsed(given, content))

    def _connect(self, source: str | None = None) -> http.client.HTTPConnection:
        at = None if source is None else (source, 0)
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS, source_address=at)

    def disconnect(self) -> None:
        """Close the keep-alive connections before the process stops."""
        while self._connections:
            self._connections.pop().close()

    def raw(self, message: bytes, *, leave: bool = False) -> bytes:
        """Send bytes and return all bytes until the service closes; with ``leave``, the client half-closes first."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS) as connection:
            with contextlib.suppress(ConnectionError, BrokenPipeError):
                connection.sendall(message)
                if leave:
                    connection.shutdown(socket.SHUT_WR)
            pieces = []
            with contextlib.suppress(ConnectionError):
                while piece := connection.recv(65536):
                    pieces.append(piece)
        return b"".join(pieces)

    def now(self) -> datetime:
        """The time of a service with a virtual clock."""
        return instant(self.request("GET", "/clock").body["now"])

    def ahead(self, seconds: float) -> str:
        """An ``execute_at`` this many seconds from now, by the service's clock."""
        now = self.now() if self._arguments else datetime.now(UTC)
        return printed(now + timedelta(seconds=seconds))

    def advance(self, duration: str = f"{DUE_SECONDS}s") -> None:
        answer = self.request("POST", "/clock", json={"advance": duration})
        assert answer.status == 200, answer

    def create(self, url: str, *, seconds: float = DUE_SECONDS, **fields: Any) -> str:
        """Create a timer that is due in this many seconds; returns its id."""
        answer = self.request(
            "POST", "/timers", json={"execute_at": self.ahead(seconds), "callback_url": url, **fields}
        )
        assert answer.status == 201, answer
        made: str = answer.body["data"]["id"]
        return made

    def get(self, id: str) -> dict[str, Any]:
        answer = self.request("GET", f"/timers/{id}")
        assert answer.status == 200, answer
        data: dict[str, Any] = answer.body["data"]
        return data

    def total(self, status: str | None = None) -> int:
        """The number of timers, optionally with this status."""
        chosen = f"&status={status}" if status else ""
        total: int = self.request("GET", f"/timers?limit=1{chosen}").body["data"]["total"]
        return total

    def finished(self, id: str) -> dict[str, Any]:
        """Wait until the timer is completed, failed or canceled; returns it."""

        def final() -> dict[str, Any] | None:
            timer = self.get(id)
            return timer if timer["status"] in FINAL else None

        timer: dict[str, Any] = until(f"timer {id} is final", final)
        return timer

    def fired(self, url: str, **fields: Any) -> dict[str, Any]:
        """Create a timer, advance the virtual clock to its due time, and return the finished timer."""
        id = self.create(url, **fields)
        self.advance()
        return self.finished(id)


def _dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


def _parsed(headers: Mapping[str, str], content: bytes) -> Any:
    return json.loads(content) if content and headers.get("content-type") == "application/json" else content


# --- the receiver --------------------------------------------------------------------------------------------------


class Received(NamedTuple):
    at_ns: int  # wall clock, when the request was complete
    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    head: bytes  # the request line and the headers, unparsed
    body: bytes


@dataclass
class Reply:
    """How the receiver responds to a request."""

    status: int = 200
    body: bytes = b'{"ok": true}'
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_seconds: float = 0.0
    hang: bool = False  # respond only after ``release`` is called
    close: bool = False  # close the connection without a response
    raw: bytes | None = None  # send these bytes instead, and close

    def message(self) -> bytes:
        if self.raw is not None:
            return self.raw
        lines = [f"HTTP/1.1 {self.status} Said", f"Content-Length: {len(self.body)}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


OK = Reply()


class Receiver:
    """An HTTP server on loopback that records every request and sends the configured replies, by path."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.received: list[Received] = []
        self.connections = 0
        self._changed = threading.Condition()
        self._replies: dict[str, list[Reply]] = {}
        self._hanging: list[Callable[[], None]] = []
        self._open: set[asyncio.Transport] = set()
        self._decide: Callable[[Received], Reply] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="receiver", daemon=True)
        self._thread.start()
        listening = self._loop.create_server(lambda: _Connection(self), host, port, backlog=4096)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result(PATIENCE_SECONDS)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.base = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def url(self, path: str) -> str:
        return self.base + path

    def reply(self, path: str, *replies: Reply) -> str:
        """Set the replies for a path, in order; the last one repeats. Returns the path's URL."""
        self._replies[path] = list(replies)
        return self.url(path)

    def decide(self, decide: Callable[[Received], Reply]) -> None:
        """Set a function that decides the reply to every request for which ``reply`` has set none."""
        self._decide = decide

    def release(self) -> None:
        """Respond to the hanging requests."""
        self._loop.call_soon_threadsafe(self._release)

    def at(self, path: str) -> list[Received]:
        return [request for request in list(self.received) if request.path == path]

    def wait(self, path: str, count: int = 1) -> list[Received]:
        """Wait for at least ``count`` requests to a path; returns them."""
        with self._changed:
            enough = self._changed.wait_for(lambda: len(self.at(path)) >= count, PATIENCE_SECONDS)
        assert enough, f"{len(self.at(path))} requests to {path}, not {count}"
        return self.at(path)

    def close(self) -> None:
        async def stop() -> None:
            self._server.close()
            for transport in list(self._open):
                transport.abort()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(PATIENCE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_SECONDS)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Called in the loop's thread.

    def _release(self) -> None:
        hanging, self._hanging = self._hanging, []
        for answer in hanging:
            answer()

    def _take(self, request: Received) -> Reply:
        with self._changed:  # A test that waits for the request may then change the reply to the next one.
            self.received.append(request)
            self._changed.notify_all()
            replies = self._replies.get(request.path)
            if replies is None:
                return self._decide(request) if self._decide else OK
            return replies.pop(0) if len(replies) > 1 else replies[0]


class _Connection(asyncio.Protocol):
    """Parses requests with a Content-Length, which all requests of Duetime have."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._receiver.connections += 1
        self._receiver._open.add(transport)

    def connection_lost(self, _: Exception | None) -> None:
        self._receiver._open.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._data.startswith(b"\x16"):
            self._transport.close()  # a TLS handshake
        while True:
            head, blank, rest = self._data.partition(b"\r\n\r\n")
            if not blank:
                return
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            length = int(headers.get("content-length", "0"))
            if len(rest) < length:
                return
            self._data = rest[length:]
            method, path, _ = first.split(" ")
            self._answer(Received(time.time_ns(), method, path, headers, head, rest[:length]))

    def _answer(self, request: Received) -> None:
        reply = self._receiver._take(request)

        def send() -> None:
            if self._transport.is_closing():
                return
            if not reply.close:
                self._transport.write(reply.message())
            if reply.close or reply.raw is not None:
                self._transport.close()

        if reply.hang:
            self._receiver._hanging.append(send)
        elif reply.delay_seconds:
            self._receiver._loop.call_later(reply.delay_seconds, send)
        else:
            send()


@contextlib.contextmanager
def unused_port() -> Iterator[int]:
    """A loopback port that refuses connections during the block: bound, but not listening."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
