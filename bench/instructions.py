"""``python -m bench.instructions``: what a timer costs the service in instructions of the processor.

Time swings with whatever else the machine does; the number of instructions does not, so a change of a hundredth can be
seen. It is what valgrind counts: the process's own code and that of its libraries, the embedded database included, and
nothing of the kernel. The service is run twice, with few timers and with more, and the difference is counted.

``--source DIR`` counts another checkout's ``src`` beside this one.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

import uvloop
from msgspec import Struct

from bench.processes import KEY, BenchError, Process, environment, free_port, receiver
from bench.setups import PostgresDatabases, Setup, Sqlite
from bench.tables import Table, times
from bench.timers import at_once, batch_body, create_body, now_ms
from duetime.timetext import format_time
from tests.postgres import Missing, Postgres

BATCH = 500
AHEAD_MS = 7 * 86_400_000
ARRIVE_SECONDS_MAX = 300
RECORDED_SECONDS = 2.0  # after the last callback
VALGRIND = ("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null")
_COUNTED = re.compile(r"Collected : (\d+)")


class Kind(Struct, frozen=True):
    what: str
    few: int
    many: int
    how: Literal["single", "batch", "herd"]


KINDS = (
    Kind("create, one by one", 500, 2_000, "single"),
    Kind(f"create, by {BATCH}", 1_000, 4_000, "batch"),
    Kind("delivery of many due at one instant", 1_500, 4_500, "herd"),
)


async def _create(server: Process, url: str, count: int, how: str) -> None:
    batch = BATCH if how == "batch" else 1
    path, body = ("/api/v1/timers/batch", batch_body(url, BATCH)) if how == "batch" else ("/timers", create_body(url))
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

    await asyncio.gather(*(send() for _ in range(4 if how == "batch" else 32)))


async def _spent(kind: Kind, count: int, setup: Setup, hooks: Process, source: Path, directory: Path) -> int:
    """The instructions of a whole run of the service, from its start to its end."""
    url = f"http://127.0.0.1:{hooks.port}/hook"
    address = await setup.create()
    if kind.how == "herd":
        await setup.fill(address, list(at_once(url, count, now_ms())))
        await hooks.ask("reset")
    port = free_port()
    settings = {
        "PYTHONPATH": str(source),
        "HOST": "127.0.0.1",
        "PORT": str(port),
        "API_KEY": KEY,
        "LOG_LEVEL": "warn",
        "DATABASE_URL": address if isinstance(address, str) else f"sqlite:///{address}",
        "DUETIME_ALLOW_PRIVATE_TARGETS": "on",
        "DUETIME_LEASE_TTL": "60s",  # it runs fifty times slower
    }
    process = await asyncio.create_subprocess_exec(
        *(*VALGRIND, sys.executable, "-m", "duetime", "serve"),
        cwd=directory,
        env=environment(settings),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    said = asyncio.create_task(process.stderr.read())
    server = Process(process, port)
    try:
        await server.ready()
        if kind.how == "herd":
            came = (await hooks.ask(f"wait {count} {ARRIVE_SECONDS_MAX}"))["count"]
            if came != count:
                raise BenchError(f"{came} callbacks came where {count} were due")
            await asyncio.sleep(RECORDED_SECONDS)
        else:
            await _create(server, url, count, kind.how)
        process.send_signal(signal.SIGTERM)
        await process.wait()
    finally:
        await server.kill()
        await setup.drop(address)
    counted = _COUNTED.search((await said).decode())
    if counted is None:
        raise BenchError("valgrind did not say how many instructions it counted")
    return int(counted[1])


async def _measure(sources: Iterable[Path], directory: Path) -> list[list[str]]:
    lines = []
    async with AsyncExitStack() as stack:
        hooks = await stack.enter_async_context(receiver(directory))
        setups: list[Setup] = [Sqlite(directory)]
        try:
            setups.append(PostgresDatabases(stack.enter_context(Postgres(18))))
        except Missing as error:
            print(f"{error}. It is left out.", file=sys.stderr)
        for kind in KINDS:
            for setup in setups:
                each = []
                for source in sources:
                    print(f"{setup.name}: {kind.what}, {source}", file=sys.stderr)
                    few, many = [await _spent(kind, n, setup, hooks, source, directory) for n in (kind.few, kind.many)]
                    each.append((many - few) / (kind.many - kind.few))
                ratios = [times(one / each[-1]) for one in each[:-1]]
                lines.append([f"{setup.name}: {kind.what}", *(f"{one:,.0f}" for one in each), *ratios])
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.instructions", description=__doc__)
    parser.add_argument("--source", type=Path, metavar="DIR", help="the src folder of another checkout, to compare")
    options = parser.parse_args()
    if shutil.which(VALGRIND[0]) is None:
        print("valgrind is not installed: apt-get install valgrind", file=sys.stderr)
        return 1
    root = Path(__file__).resolve().parent
    sources = [root.parent / "src", *([options.source.resolve()] if options.source else [])]
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=root))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            lines = runner.run(_measure(sources, directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    headings = ["instructions per timer", "here", *(["there", "ratio"] if options.source else [])]
    print(Table(headings, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
