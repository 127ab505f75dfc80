"""Starts, watches and stops the processes of the bench: the server, the receiver, and workers that run once."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

KEY = "bench-key-0123456789-0123456789-0123456789"
READY_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
WORKER_SECONDS_MAX = 180.0
LINE_BYTES_MAX = 1 << 24
_ROOT = Path(__file__).resolve().parent.parent
NATS = Path(sys.executable).parent / "nats-server"
UVICORN = _ROOT / ".venv-bench/bin/uvicorn"
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICK


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def cpu_of_all(pid: int) -> float:
    """CPU seconds of a process and of all its past and present descendants."""
    total = 0.0
    for one in family(pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # gone just now: its parent has it in its sum
            total += cpu_of(one)
    return total


class BenchError(Exception):
    """Something that the bench needs did not work; the message says what."""


def reason(error: Exception) -> str:
    """Why something could not run; for unexpected errors with their type."""
    return str(error) if isinstance(error, BenchError) else f"{type(error).__name__}: {error}"


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """The minimal environment of a process, so that a user's settings do not change the figures."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """A running process of ours, and its statistics from the kernel."""

    def __init__(self, process: asyncio.subprocess.Process, port: int = 0) -> None:
        self._process = process
        self.port = port
        self.ready_seconds = 0.0

    def cpu_seconds(self) -> float:
        """Including its workers."""
        return cpu_of_all(self._process.pid)

    def rss_bytes(self) -> int:
        """Including its workers."""
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in family(self._process.pid)) * _PAGE

    async def ask(self, line: str) -> dict[str, Any]:
        """Send a control line and return the response."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise BenchError("a process of the bench exited early; its output is above")
        answer: dict[str, Any] = msgspec.json.decode(line)
        return answer

    async def get(self, path: str) -> tuple[int, str]:
        """One GET on its own connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            head = f"GET {path} HTTP/1.1\r\nHost: bench\r\nX-API-Key: {KEY}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode())
            answer = (await reader.read()).decode()
        finally:
            writer.close()
        return int(answer[9:12] or 0), answer.partition("\r\n\r\n")[2]

    async def listens(self) -> None:
        """Wait until it accepts connections."""
        until = time.monotonic() + READY_SECONDS_MAX
        while time.monotonic() < until:
            if self._process.returncode is not None:
                raise BenchError(f"a server exited with {self._process.returncode} before it listened")
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return
            except OSError:
                await asyncio.sleep(0.01)
        raise BenchError("a server did not listen in time")

    async def ready(self, seconds_max: float = READY_SECONDS_MAX) -> None:
        """Wait until ``/readyz`` is ready, and note how long that took."""
        started = time.monotonic()
        while time.monotonic() < started + seconds_max:
            if self._process.returncode is not None:
                raise BenchError(f"the server exited with {self._process.returncode} before it was ready")
            try:
                if (await self.get("/readyz"))[0] == 200:
                    self.ready_seconds = time.monotonic() - started
                    return
            except (OSError, ValueError):
                pass
            await asyncio.sleep(0.01)
        raise BenchError("the server was not ready in time")

    async def kill(self) -> None:
        """Kill it, like a crash."""
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def stop(self) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS_MAX)
            except TimeoutError:
                await self.kill()


async def _spawn(*command: str, directory: Path, piped: bool = False, **more: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        cwd=directory,
        env=environment(more),
        stdin=asyncio.subprocess.PIPE if piped else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE if piped else asyncio.subprocess.DEVNULL,
        limit=LINE_BYTES_MAX,
    )


@asynccontextmanager
async def duetime(directory: Path, database: Path | str, **settings: Any) -> AsyncIterator[Process]:
    """A ready ``duetime serve`` on the given store: a file, or the URL of a database."""
    port = free_port()
    process = await _spawn(
        *(sys.executable, "-m", "duetime", "serve"),
        directory=directory,
        HOST="127.0.0.1",
        PORT=str(port),
        API_KEY=KEY,
        LOG_LEVEL=settings.pop("LOG_LEVEL", "warn"),
        DATABASE_URL=database if isinstance(database, str) else f"sqlite:///{database}",
        DUETIME_ALLOW_PRIVATE_TARGETS="on",
        **settings,
    )
    server = Process(process, port)
    try:
        await server.ready()
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def _ready(directory: Path, port: int, *command: str) -> AsyncIterator[Process]:
    server = Process(await _spawn(*command, directory=directory), port)
    try:
        await server.ready()
        yield server
    finally:
        await server.stop()


def bare(directory: Path) -> AbstractAsyncContextManager[Process]:
    """The server without a store."""
    port = free_port()
    return _ready(directory, port, sys.executable, "-m", "bench.bare", str(port), KEY)


def on_uvicorn(directory: Path) -> AbstractAsyncContextManager[Process]:
    """The bare application of ``bench.asgi``."""
    port = free_port()
    listen = ("--app-dir", str(_ROOT / "bench"), "--port", str(port))
    quick = ("--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "warning")
    return _ready(directory, port, str(UVICORN), "asgi:app", *listen, *quick)


@asynccontextmanager
async def nats(directory: Path) -> AsyncIterator[Process]:
    """A NATS server with JetStream on an empty directory, with its default settings: it syncs every two minutes."""
    if not NATS.exists():
        raise BenchError("nats-server is not installed (make test installs it)")
    port = free_port()
    data = Path(tempfile.mkdtemp(prefix="nats-", dir=directory))
    listen = ("-a", "127.0.0.1", "-p", str(port), "-l", str(data / "log"))
    process = await _spawn(str(NATS), "-js", "-sd", str(data), *listen, directory=directory)
    server = Process(process, port)
    try:
        await server.listens()
        yield server
    finally:
        await server.stop()
        shutil.rmtree(data, ignore_errors=True)


@asynccontextmanager
async def receiver(directory: Path) -> AsyncIterator[Process]:
    process = Process(await _spawn(sys.executable, "-m", "bench.receiver", directory=directory, piped=True))
    try:
        process.port = (await process.answer())["port"]
        yield process
    finally:
        await process.stop()


async def worker(module: str, plan: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Run ``python -m bench.<module>`` with the plan as JSON on its stdin; its one line of JSON is the result."""
    process = await _spawn(sys.executable, "-m", f"bench.{module}", directory=directory, piped=True)
    handle = Process(process)
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(plan) + b"\n")
        process.stdin.close()
        return await asyncio.wait_for(handle.answer(), WORKER_SECONDS_MAX)
    except TimeoutError:
        raise BenchError(f"bench.{module} did not exit in time") from None
    finally:
        await handle.stop()


WRK = shutil.which("wrk")
WRK_MISSING = "wrk is not installed (apt-get install wrk, brew install wrk): what is measured against it is skipped"


async def wrk(
    port: int, path: str, body: str, headers: Mapping[str, str], *, connections: int, seconds: float, directory: Path
) -> dict[str, float]:
    """Requests per second and per CPU second of wrk, with one thread."""
    assert WRK is not None
    script = directory / "wrk.lua"
    lines = ['wrk.method = "POST"', f"wrk.body = {_lua(body)}"]
    lines += [f"wrk.headers[{_lua(name)}] = {_lua(value)}" for name, value in headers.items()]
    script.write_text("\n".join(lines) + "\n")
    url = f"http://127.0.0.1:{port}{path}"
    process = await asyncio.create_subprocess_exec(
        *(WRK, "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "-s", str(script), url),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    cpu = 0.0
    reading = asyncio.create_task(process.stdout.read())
    while not reading.done():
        with suppress(FileNotFoundError, ProcessLookupError):
            cpu = max(cpu, cpu_of(process.pid))
        await asyncio.wait([reading], timeout=0.02)
    said = (await reading).decode()
    await process.wait()
    answers = re.search(r"(\d+) requests in ([0-9.]+)(m?s)", said)
    if answers is None:
        raise BenchError(f"unexpected output of wrk: {said}")
    refused = re.search(r"Non-2xx or 3xx responses: (\d+)", said)
    if refused:
        raise BenchError(f"{refused[1]} of wrk's requests were refused")
    count, took = int(answers[1]), float(answers[2]) / (1000 if answers[3] == "ms" else 1)
    return {"per_second": count / took, "per_cpu_second": count / cpu if cpu else 0.0}


def _lua(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
