"""A receiver on loopback that a test scripts byte by byte, and an event loop that fails a test on unhandled errors."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import socket
import struct
import subprocess
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from duetime.instants import Instant

T = TypeVar("T")

PATIENCE_SECONDS = 30.0
"""The timeout of tests; only failing tests reach it."""


class Line:
    """The receiver's end of one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._unread = b""

    async def request(self) -> bytes:
        """The next complete request, head and body."""
        while b"\r\n\r\n" not in self._unread:
            await self._more()
        head, _, _ = self._unread.partition(b"\r\n\r\n")
        size = len(head) + 4
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                size += int(value)
        while len(self._unread) < size:
            await self._more()
        request, self._unread = self._unread[:size], self._unread[size:]
        return request

    async def _more(self) -> None:
        data = await self._loop.sock_recv(self._sock, 65536)
        if not data:
            raise ConnectionError("the client closed the connection")
        self._unread += data

    async def send(self, *pieces: bytes) -> None:
        """Send pieces so that each arrives separately."""
        for index, piece in enumerate(pieces):
            if index:
                await asyncio.sleep(0.002)
            await self._loop.sock_sendall(self._sock, piece)

    async def answer(self, *pieces: bytes) -> bytes:
        request = await self.request()
        await self.send(*pieces)
        return request

    async def closed(self) -> None:
        """Wait until the client has closed the connection, ignoring what it sends before that."""
        try:
            while await self._loop.sock_recv(self._sock, 65536):
                pass
        except ConnectionError:
            pass

    def close(self) -> None:
        self._sock.close()

    def reset(self) -> None:
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()


Script = Callable[[Line], Awaitable[object]]


class Peer:
    """Serves one script per connection, in order, and fails when a script does."""

    def __init__(self, *scripts: Script, host: str = "127.0.0.1", last_forever: bool = False) -> None:
        self._scripts = list(scripts)
        self._last_forever = last_forever
        self.host = host
        self.accepted = 0

    async def __aenter__(self) -> Peer:
        self._listener = socket.create_server((self.host, 0), backlog=512)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._running: list[asyncio.Task[None]] = []
        self._accepting = asyncio.create_task(self._accept())
        return self

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._listener)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            index = self.accepted
            self.accepted += 1
            if self._last_forever:
                index = min(index, len(self._scripts) - 1)
            assert index < len(self._scripts), "one connection more than the test has a script for"
            self._running.append(asyncio.create_task(self._serve(self._scripts[index], sock)))

    async def _serve(self, script: Script, sock: socket.socket) -> None:
        with sock:
            await script(Line(sock))

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and not self._last_forever:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while self.accepted < len(self._scripts):  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                await asyncio.gather(*self._running)
        for task in (self._accepting, *self._running):
            task.cancel()
        results = await asyncio.gather(self._accepting, *self._running, return_exceptions=True)
        self._listener.close()
        if kind is None:
            for result in results:
                if isinstance(result, Exception):
                    raise result


def run_in(loop_factory: Callable[[], asyncio.AbstractEventLoop], main: Coroutine[Any, Any, T]) -> T:
    complaints: list[dict[str, Any]] = []

    async def watched() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with asyncio.timeout(2 * PATIENCE_SECONDS):
            result = await main
        gc.collect()
        await asyncio.sleep(0)
        return result

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        result = runner.run(watched())
    gc.collect()
    assert complaints == []
    return result


def run(main: Coroutine[Any, Any, T]) -> T:
    return run_in(uvloop.new_event_loop, main)


@pytest.fixture(name="run")
def run_fixture() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    return run


@pytest.fixture(name="run_in")
def run_in_fixture() -> Callable[..., Any]:
    return run_in


@pytest.fixture(name="Peer")
def peer_fixture() -> type[Peer]:
    return Peer


@pytest.fixture(scope="package", autouse=True)
def _frozen_garbage() -> Iterator[None]:
    """Every test runs GC to find what was never awaited or closed; this makes that cheap."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _asyncio_logs_nothing(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.DEBUG, "asyncio"):
        yield
    said = [record for record in caplog.records if record.name == "asyncio" and record.levelno > logging.DEBUG]
    assert said == []


class Clock:
    """A clock that moves only by hand."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000
        self.seconds = 1000.0

    def now(self) -> Instant:
        return Instant(self.ms)

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here sleeps")


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Use up all file descriptors of the process until the block ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(name="no_descriptors")
def no_descriptors_fixture() -> Callable[[], AbstractContextManager[None]]:
    return no_descriptors


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Certificates:
    """Our own certificate authority, and the certificates that it has signed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority = folder / "ca.pem"
        self._openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.pem",
            "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign",
        )  # fmt: skip

    def issue(self, name: str, *, days: int = 1) -> Path:
        """One file with the key and the certificate for a host name."""
        out = self._folder / f"{name}{days}.pem"
        self._openssl(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
            "-keyout", "leaf.key", "-out", "leaf.csr",
        )  # fmt: skip
        kind = "IP" if name.replace(".", "").isdigit() else "DNS"
        (self._folder / "ext").write_text(f"subjectAltName={kind}:{name}\n")
        self._openssl(
            "x509", "-req", "-in", "leaf.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-days", str(days), "-extfile", "ext", "-out", "leaf.pem",
        )  # fmt: skip
        out.write_text((self._folder / "leaf.key").read_text() + (self._folder / "leaf.pem").read_text())
        return out

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._folder, check=True, capture_output=True)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))
