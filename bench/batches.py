"""Measures creates in batches over HTTP, each batch one durable write, and the disk space per timer."""

from __future__ import annotations

from functools import partial

from bench.creates import HEADERS, measured
from bench.firing import metrics
from bench.processes import BenchError
from bench.rounds import Bench, Parts, Sample, Samples
from bench.setups import SETUPS, Setup
from bench.tables import Table, across, ms, rate, size, us
from bench.timers import batch_body, now_ms
from duetime.timetext import format_time

TITLE = "Creates in batches"
SIZES = (500, 1_000)
CONNECTIONS = 4
AHEAD_MS = 7 * 86_400_000
PATH = "/api/v1/timers/batch"
MINIMAL = {"Prefer": "return=minimal"}  # the peers' library calls answer with ids, or with nothing


def part_name(setup: str, count: int) -> str:
    return f"{setup}: by {count:,}"


def parts(bench: Bench) -> Parts:
    return {
        part_name(setup.name, count): partial(_measure, bench, setup, count)
        for count in (SIZES[:1] if bench.quick else SIZES)
        for setup in bench.setups
    }


async def _measure(bench: Bench, setup: Setup, count: int) -> Sample:
    seconds = 1.5 if bench.quick else 3.0
    at = now_ms() + AHEAD_MS
    body = batch_body(bench.url, count).replace("{at}", format_time(at)).replace("{due}", str(at))
    address = await setup.create()
    try:
        async with setup.serve(bench.directory, address) as server:
            empty = await setup.disk_bytes(address)
            plan = {"path": PATH, "connections": CONNECTIONS, "body": body, "headers": HEADERS | MINIMAL}
            result = await measured(bench, server, seconds, setup, **plan)
            made = result["answers"] * count
            pending = (await metrics(server))['duetime_timers{status="pending"}']
        if pending != made:
            raise BenchError(f"{pending:,.0f} timers are pending, but {made:,} were created in batches")
        return {
            "per_second": result["per_second"] * count,
            "p50_ms": result["p50_ms"],
            "p99_ms": result["p99_ms"],
            "server_cpu": result["server_cpu"] / count,
            "store_cpu": result["store_cpu"] / count,
            "disk_bytes": (await setup.disk_bytes(address) - empty) / made,
            "busy": result["busy"],
        }
    finally:
        await setup.drop(address)


def tables(samples: Samples) -> list[Table]:
    made = []
    for count in SIZES:
        lines = across(
            samples,
            [part_name(setup, count) for setup in SETUPS],
            ("timers created", "per_second", rate),
            ("response time of a batch, p50", "p50_ms", ms),
            ("response time of a batch, p99", "p99_ms", ms),
            ("CPU of the service per timer", "server_cpu", us),
            ("CPU of the database per timer", "store_cpu", us),
            ("on disk per pending timer", "disk_bytes", size),
        )
        if lines:
            made.append(Table([f"batches of {count:,}", *SETUPS], lines))
    return made
