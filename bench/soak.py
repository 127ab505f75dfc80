"""``python -m bench.soak``: sustained load on PostgreSQL, and the size of its tables over time.

A table with constant writes must not grow beyond its live rows: dead rows must be cleaned up as fast as they appear. In
addition to the timers that come and go, some wait for days, so that the table is not simply emptied.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from bench.processes import KEY, Process, duetime, receiver
from tests.postgres import Postgres

BATCH = 50
SOON_MS = (500, 5_000)
STANDING = 20_000
LOOK_SECONDS = 15

_FIGURES = """
    SELECT n_live_tup, n_dead_tup, 100 * n_tup_hot_upd / greatest(n_tup_upd, 1), autovacuum_count,
        pg_table_size('duetime.timers') / 1024, pg_indexes_size('duetime.timers') / 1024,
        (SELECT sum(pg_total_relation_size(relid)) / 1024 FROM pg_partition_tree('duetime.history') WHERE isleaf),
        (pg_total_relation_size('duetime.shards') + pg_total_relation_size('duetime.tallies')) / 1024
    FROM pg_stat_user_tables WHERE relname = 'timers'
"""
_HEADINGS = (
    "seconds",
    "fired",
    "live",
    "dead",
    "HOT %",
    "vacuums",
    "table KiB",
    "indexes KiB",
    "history KiB",
    "other KiB",
)


async def _post(server: Process, timers: list[object]) -> None:
    body = msgspec.json.encode({"timers": timers})
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = f"POST /api/v1/timers/batch HTTP/1.1\r\nHost: bench\r\nX-API-Key: {KEY}\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    if answer[9:12] != b"200":
        raise SystemExit(f"a batch was refused: {answer[:500]!r}")


def _timers(count: int, url: str, delay_ms: tuple[int, int]) -> list[object]:
    low, high = delay_ms
    return [
        {
            "delay": f"{low + (high - low) * n // count}ms",
            "callbackUrl": url,
            "payload": {"order": n, "note": "x" * 100},
        }
        for n in range(count)
    ]


async def _soak(server: Process, hooks: Process, rate: int, seconds: int, figures: Callable[[], str]) -> None:
    url = f"http://127.0.0.1:{hooks.port}/"
    for _ in range(STANDING // 1000):
        await _post(server, _timers(1000, url, (86_400_000, 864_000_000)))
    began = looked = time.monotonic()
    sent = 0
    print(*(f"{heading:>12}" for heading in _HEADINGS), flush=True)
    while (now := time.monotonic()) < began + seconds:
        if now >= looked:
            looked += LOOK_SECONDS
            fired = (await hooks.ask("wait 0 0"))["count"]
            cells = [f"{now - began:.0f}", str(fired), *(await asyncio.to_thread(figures)).split("|")]
            print(*(f"{cell.partition('.')[0]:>12}" for cell in cells), flush=True)
        await _post(server, _timers(BATCH, url, SOON_MS))
        sent += BATCH
        await asyncio.sleep(max(0.0, began + sent / rate - time.monotonic()))
    report = await hooks.ask(f"wait {sent} 30")
    late = await hooks.ask("report")
    print(f"{sent} timers sent, {report['count']} fired at {late['per_second']:.0f}/s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=int, default=500, help="timers per second [500]")
    parser.add_argument("--postgres", type=int, default=18, choices=(15, 18), help="version of PostgreSQL [18]")
    parser.add_argument("--workers", type=int, default=1, help="worker processes of the service [1]")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=Path(__file__).parent))

    async def soak(postgres: Postgres) -> None:
        database = postgres.fresh()
        workers = str(options.workers)
        async with receiver(directory) as hooks, duetime(directory, database, DUETIME_WORKERS=workers) as server:
            seconds = round(options.minutes * 60)
            await _soak(server, hooks, options.rate, seconds, lambda: postgres.sql(_FIGURES, database))

    try:
        with Postgres(options.postgres) as postgres, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(soak(postgres))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
