"""``python -m bench.instructions``: the CPU instructions per create and delivery.

Time varies with everything else on the machine, the number of instructions hardly does, so a change of a few percent is
visible. Valgrind counts them: those of the process's own code and its libraries, including the embedded database, but
not the kernel's. Each operation runs a few times and more often, and the difference counts: creates by a whole service,
deliveries by the delivery client alone.

``--source DIR`` also measures another checkout's ``src``, with the benchmark of that checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import uvloop

from bench.processes import KEY, BenchError, Process, environment, free_port, receiver
from bench.setups import PostgresDatabases, Setup, Sqlite
from bench.tables import Table, times
from bench.timers import batch_body, create_body, now_ms, timer
from duetime.clock import CorrectedClock, SystemClock
from duetime.deliverers.egress import Egress
from duetime.deliverers.http import HttpDeliverer
from duetime.model import OutcomeKind
from duetime.timetext import format_time
from tests.postgres import Missing, Postgres

_ROOT = Path(__file__).resolve().parent.parent
BATCH = 500
AHEAD_MS = 7 * 86_400_000
SINGLES, BATCHED, DELIVERIES = (500, 2_000), (1_000, 4_000), (1_000, 4_000)
READY_SECONDS_MAX = 600.0
"""A service under valgrind is fifty times slower, and more on a busy machine."""
VALGRIND = ("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null")
_COUNTED = re.compile(r"Collected : (\d+)")

Run = Callable[[Path, int], Awaitable[int]]
"""Runs an operation this many times with the code of a folder; returns the instructions of the whole process."""


class Valgrind:
    """A program under valgrind."""

    def __init__(self, directory: Path, source: Path) -> None:
        self._directory = directory
        self._source = source

    async def start(self, *arguments: str, **settings: str) -> asyncio.subprocess.Process:
        path = os.pathsep.join((str(self._source), str(self._source.parent)))  # each with the benchmark of its own
        self._process = await asyncio.create_subprocess_exec(
            *(*VALGRIND, sys.executable, "-m", *arguments),
            cwd=self._directory,
            env=environment({**settings, "PYTHONPATH": path}),
            stderr=asyncio.subprocess.PIPE,
        )
        assert self._process.stderr is not None
        self._said = asyncio.create_task(self._process.stderr.read())
        return self._process

    async def counted(self) -> int:
        """The instructions of the program, which was told to stop or exits by itself."""
        said = (await self._said).decode()
        await self._process.wait()
        counted = _COUNTED.search(said)
        if counted is None:
            raise BenchError(f"valgrind did not print the number of instructions: {said[-2000:]}")
        return int(counted[1])


async def _create(server: Process, url: str, count: int, batch: int) -> None:
    path, body = ("/timers", create_body(url)) if batch == 1 else ("/api/v1/timers/batch", batch_body(url, batch))
    at = now_ms() + AHEAD_MS
    body = body.replace("{at}", format_time(at)).replace("{due}", str(at))
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nX-API-Key: {KEY}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    left = count // batch

    async def send() -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 20)
        while left:
            left -= 1
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            if answer[9:11] != b"20":
                raise BenchError(f"a create was refused: {answer.decode()}")
            await reader.readexactly(int(answer.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
        writer.close()

    await asyncio.gather(*(send() for _ in range(32 if batch == 1 else 4)))


async def _served(setup: Setup, batch: int, url: str, directory: Path, source: Path, count: int) -> int:
    """Creates through a whole service."""
    address = await setup.create()
    valgrind = Valgrind(directory, source)
    port = free_port()
    process = await valgrind.start(
        *("duetime", "serve"),
        HOST="127.0.0.1",
        PORT=str(port),
        API_KEY=KEY,
        LOG_LEVEL="warn",
        DATABASE_URL=address if isinstance(address, str) else f"sqlite:///{address}",
        DUETIME_ALLOW_PRIVATE_TARGETS="on",
        DUETIME_LEASE_TTL="60s",
    )
    server = Process(process, port)
    try:
        await server.ready(READY_SECONDS_MAX)
        await _create(server, url, count, batch)
        process.send_signal(signal.SIGTERM)
        return await valgrind.counted()
    finally:
        await server.kill()
        await setup.drop(address)


async def _delivered(url: str, directory: Path, source: Path, count: int) -> int:
    """Deliveries through the client alone, in its own process: ``main`` of this module with a URL."""
    valgrind = Valgrind(directory, source)
    await valgrind.start("bench.instructions", "--deliver", url, str(count))
    return await valgrind.counted()


async def _deliver(url: str, count: int) -> None:
    clock = CorrectedClock(SystemClock())
    egress = Egress(clock, allow_all=True)
    deliverer = HttpDeliverer(egress=egress, clock=clock, keys_of=lambda namespace: (), version="bench")
    for _ in range(count):  # one after the other: of many at once, some would wait for others, as chance has it
        outcome = await deliverer.deliver(timer(url, 0, due=10**12), 30_000)
        if outcome.kind is not OutcomeKind.ANSWERED:
            raise BenchError(f"a delivery failed: {outcome.error}")
    await deliverer.close()


async def _measure(sources: Sequence[Path], directory: Path) -> list[list[str]]:
    lines = []
    async with AsyncExitStack() as stack:
        hooks = await stack.enter_async_context(receiver(directory))
        url = f"http://127.0.0.1:{hooks.port}/hook"
        setups: list[Setup] = [Sqlite(directory)]
        try:
            setups.append(PostgresDatabases(stack.enter_context(Postgres(18))))
        except Missing as error:
            print(f"{error}. It is left out.", file=sys.stderr)
        runs: dict[str, tuple[tuple[int, int], Run]] = {"a delivery": (DELIVERIES, partial(_delivered, url, directory))}
        for setup in setups:
            runs[f"a create, {setup.name}"] = SINGLES, partial(_served, setup, 1, url, directory)
            runs[f"a create by {BATCH}, {setup.name}"] = BATCHED, partial(_served, setup, BATCH, url, directory)
        for what, ((few, many), run) in runs.items():
            print(f"counting: {what}", file=sys.stderr)
            each = [(await run(source, many) - await run(source, few)) / (many - few) for source in sources]
            ratios = [times(each[0] / other) for other in each[1:]]
            lines.append([what, *(f"{one:,.0f}" for one in each), *ratios])
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.instructions", description=__doc__)
    parser.add_argument("--source", type=Path, metavar="DIR", help="the src folder of another checkout, to compare")
    parser.add_argument("--deliver", nargs=2, metavar=("URL", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.deliver:
        url, count = options.deliver
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_deliver(url, int(count)))
        return 0
    if shutil.which(VALGRIND[0]) is None:
        print("valgrind is not installed: apt-get install valgrind", file=sys.stderr)
        return 1
    sources = [_ROOT / "src", *([options.source.resolve()] if options.source else [])]
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=_ROOT / "bench"))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            lines = runner.run(_measure(sources, directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    headings = ["instructions of", "here", *(["there", "ratio"] if options.source else [])]
    print(Table(headings, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
