"""Starts what a peer needs, on an empty store, and stops all of it: the store's server, a client, a worker."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from bench.processes import BenchError, free_port
from tests.postgres import Postgres

HERE = Path(__file__).resolve().parent
VENV = HERE.parent.parent / ".venv-bench"
NODE_MODULES = HERE / "node_modules"
PROGRAMS = HERE / "programs"
ANSWER_SECONDS_MAX = 120.0
READY_SECONDS_MAX = 60.0
LOG_LINES_SHOWN = 8
# Where there is this program, even a bench that is killed leaves nothing behind.
END_WITH_US = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
TEMPORAL_LIMITS = ("frontend.namespaceRPS", "frontend.rps", "history.rps", "matching.rps")
REQUESTS_PER_SECOND_MAX = 100_000


class Program:
    """A process that speaks JSON lines, in its own process group, so that it is stopped with all its children."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(line) + b"\n")

    async def answer(self, seconds: float = ANSWER_SECONDS_MAX) -> dict[str, Any]:
        try:
            line = await asyncio.wait_for(self._line(), seconds)
        except TimeoutError:
            raise BenchError(f"no answer within {seconds:.0f} s; {self._said()}") from None
        answer: dict[str, Any] = msgspec.json.decode(line)
        return answer

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            if line.startswith(b"{"):  # a peer may print a banner of its own
                return line
        raise BenchError(f"it ended early; {self._said()}")

    async def ask(self, line: object) -> dict[str, Any]:
        self.tell(line)
        return await self.answer()

    def _said(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        return "its last words: " + (" / ".join(lines) or "none")

    async def end(self) -> None:
        """Kill it with all its children: its store is thrown away afterwards."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


async def spawn(name: str, command: Sequence[str | Path], directory: Path, **more: str) -> Program:
    """A program in the peers' own environment; its stderr goes into a log in the directory."""
    log = directory / f"{name}.log"
    kept = {key: os.environ[key] for key in ("HOME", "LANG") if key in os.environ}
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *END_WITH_US,
            *command,
            cwd=directory,
            env={**kept, "PATH": os.pathsep.join((str(VENV / "bin"), os.environ["PATH"])), **more},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    return Program(process, log)


def cpu_seconds(pids: Sequence[int]) -> float:
    """The CPU time of these processes and of their children, including ended ones."""
    total = 0.0
    for pid in pids:
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue  # its parent has it among its ended children now
            total += times.user + times.system + times.children_user + times.children_system
    return total


class Server(msgspec.Struct, frozen=True):
    """A running store: its address for clients and workers, and the process whose CPU time counts."""

    address: str
    pid: int


class Stand:
    """A peer on an empty store, with a client, and with a worker if requested."""

    def __init__(self, server: Server, client: Program, worker: Program | None, version: str) -> None:
        self.client = client
        self.version = version
        self._pids = [server.pid, (worker or client).pid]

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._pids)


@asynccontextmanager
async def stand(
    command: Sequence[str | Path],
    store: Callable[[Path], AbstractContextManager[Server]],
    directory: Path,
    *,
    works: bool,
    worker_apart: bool,
) -> AsyncIterator[Stand]:
    """``works``: timers are fired; ``worker_apart``: by a process of its own, not by the client's."""
    place = Path(tempfile.mkdtemp(prefix="peer-", dir=directory))
    running: list[Program] = []

    async def start(role: str, server: Server) -> dict[str, Any]:
        program = await spawn(role, [*command, role, server.address], place)
        running.append(program)
        return await program.answer(READY_SECONDS_MAX)

    try:
        with store(place) as server:
            try:
                said = await start("client" if worker_apart or not works else "both", server)
                if works and worker_apart:
                    await start("worker", server)
                worker = running[1] if len(running) > 1 else None
                yield Stand(server, running[0], worker, said["version"])
            finally:
                for program in reversed(running):
                    await program.end()
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def postgres(directory: Path) -> Iterator[Server]:
    """PostgreSQL 18 with default settings and fsync on."""
    with Postgres(18) as server:
        assert server.process is not None
        yield Server(server.create_database("peers"), server.process.pid)


@contextmanager
def redis(directory: Path) -> Iterator[Server]:
    """Redis whose append-only file reaches the disk before it responds, so that scheduled tasks are durable."""
    port = free_port()
    durable = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")
    with _listening(["redis-server", "--bind", "127.0.0.1", "--port", str(port), *durable], port, directory) as pid:
        yield Server(f"redis://127.0.0.1:{port}/0", pid)


@contextmanager
def temporal(directory: Path) -> Iterator[Server]:
    """Temporal's development server on a file."""
    port = free_port()
    command: list[str | Path] = [
        VENV / "bin/temporal",
        "server",
        "start-dev",
        "--ip",
        "127.0.0.1",
        "--port",
        str(port),
        "--headless",
    ]
    command += ["--db-filename", directory / "temporal.db", "--log-level", "error"]
    command += ["--sqlite-pragma", "journal_mode=wal", "--sqlite-pragma", "synchronous=full"]
    for limit in TEMPORAL_LIMITS:
        command += ["--dynamic-config-value", f"{limit}={REQUESTS_PER_SECOND_MAX}"]
    with _listening(command, port, directory) as pid:
        yield Server(f"127.0.0.1:{port}", pid)


@contextmanager
def _listening(command: Sequence[str | Path], port: int, directory: Path) -> Iterator[int]:
    """The process id of a server once it accepts connections; stops it at the end."""
    log = directory / "server.log"
    with open(log, "wb") as said:
        process = subprocess.Popen(
            [*END_WITH_US, *command],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + READY_SECONDS_MAX
        while not _takes_connections(port):
            if process.poll() is not None or time.monotonic() > until:
                last = " / ".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
                raise BenchError(f"{Path(command[0]).name} did not start: {last}")
            time.sleep(0.02)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
