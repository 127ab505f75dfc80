"""Measures creates over HTTP, one by one and durable, compared with the bare server, the bare stores and bare
inserts."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.machine import busy_share
from bench.pgbench import inserts
from bench.processes import KEY, UVICORN, WRK, BenchError, Process, bare, on_uvicorn, worker, wrk
from bench.rounds import Bench, Part, Parts, Sample, Samples
from bench.setups import POSTGRES, SETUPS, SQLITE, Setup
from bench.tables import Table, across, ms, percent, rate, us
from bench.timers import create_body, now_ms
from duetime.timetext import format_time

TITLE = "Creates, one by one"
CONNECTIONS = 64
AHEAD_MS = 7 * 86_400_000
WARM_SECONDS = 0.5  # a new database grows its files and a new process its caches; the peers have as long
HEADERS = {"X-API-Key": KEY}
BARE, BARE_WRK, PGBENCH = "bare server", "bare server, by wrk", "pgbench, single inserts"
BARE_UVICORN = "bare application on uvicorn"
SINGLE, HUNDRED = "SQLite, single inserts", "SQLite, inserts by 100"


def store_name(setup: str) -> str:
    return f"{setup}, bare store"


def far_body(url: str) -> str:
    at = now_ms() + AHEAD_MS
    return create_body(url).replace("{at}", format_time(at)).replace("{due}", str(at))


async def load(bench: Bench, server: Process, seconds: float, **plan: Any) -> dict[str, Any]:
    """Creates at full speed; all of them must have been accepted."""
    usual = {"path": "/timers", "connections": CONNECTIONS, "body": far_body(bench.url), "headers": HEADERS}
    result = await worker("load", {"port": server.port, "seconds": seconds, **usual, **plan}, bench.directory)
    if not set(result["statuses"]) <= {"200", "201"}:
        raise BenchError(f"creates got {result['statuses']}, not only 200 and 201")
    return result


async def measured(
    bench: Bench, server: Process, seconds: float, setup: Setup | None = None, **plan: Any
) -> dict[str, Any]:
    """The load's result, with the CPU time of the server and its database per response, and how busy the machine
    was."""
    cpu, store_cpu = server.cpu_seconds(), setup.store_cpu_seconds() if setup else 0.0
    result, busy = await busy_share(load(bench, server, seconds, **plan))
    cpu, store_cpu = server.cpu_seconds() - cpu, (setup.store_cpu_seconds() if setup else 0.0) - store_cpu
    answers = result["answers"]
    return {**result, "server_cpu": cpu / answers, "store_cpu": store_cpu / answers, "busy": busy}


def parts(bench: Bench) -> Parts:
    seconds = 2.0 if bench.quick else 3.0
    made: dict[str, Part] = {setup.name: partial(_durable, bench, setup, seconds) for setup in bench.setups}
    made[BARE] = partial(_bare, bench, bare, seconds - 1)
    if UVICORN.exists():
        made[BARE_UVICORN] = partial(_bare, bench, on_uvicorn, seconds - 1)
    if WRK:
        made[BARE_WRK] = partial(_bare_wrk, bench, seconds - 1)
    for setup in bench.setups:
        if setup.workers == 1:
            made[store_name(setup.name)] = partial(
                _ceiling, bench, setup, what="store", url=bench.url, callers=CONNECTIONS, seconds=seconds - 1
            )
    [sqlite] = [setup for setup in bench.setups if setup.name == SQLITE]
    made[SINGLE] = partial(_ceiling, bench, sqlite, what="raw", batch=1, seconds=1.0)
    made[HUNDRED] = partial(_ceiling, bench, sqlite, what="raw", batch=100, seconds=1.0)
    if bench.postgres is not None:
        made[PGBENCH] = partial(
            inserts, bench.postgres, bench.url, clients=CONNECTIONS, seconds=round(seconds), directory=bench.directory
        )
    return made


async def _durable(bench: Bench, setup: Setup, seconds: float) -> Sample:
    address = await setup.create()
    try:
        async with setup.serve(bench.directory, address) as server:
            await load(bench, server, WARM_SECONDS)
            return await measured(bench, server, seconds, setup)
    finally:
        await setup.drop(address)


async def _bare(bench: Bench, serve: Any, seconds: float) -> Sample:
    async with serve(bench.directory) as server:
        await load(bench, server, WARM_SECONDS)
        return await measured(bench, server, seconds)


async def _bare_wrk(bench: Bench, seconds: float) -> Sample:
    headers = {**HEADERS, "Content-Type": "application/json"}
    async with bare(bench.directory) as server:
        port, body, directory = server.port, far_body(bench.url), bench.directory
        return await wrk(port, "/timers", body, headers, connections=CONNECTIONS, seconds=seconds, directory=directory)


async def _ceiling(bench: Bench, setup: Setup, **plan: Any) -> Sample:
    address = await setup.create()
    try:
        return await worker("ceilings", {"address": str(address), **plan}, bench.directory)
    finally:
        await setup.drop(address)


def tables(samples: Samples) -> list[Table]:
    lines = across(
        samples,
        SETUPS,
        ("creates", "per_second", rate),
        ("response time p50", "p50_ms", ms),
        ("response time p99", "p99_ms", ms),
        ("CPU of the service per create", "server_cpu", us),
        ("CPU of the database per create", "store_cpu", us),
        ("CPU of the machine in use", "busy", percent),
    )
    ceilings = [BARE_UVICORN, BARE, BARE_WRK, store_name(SQLITE), store_name(POSTGRES), SINGLE, HUNDRED, PGBENCH]
    beside = []
    for name in ceilings:
        per_second = samples.median(name, "per_second")
        if per_second is not None:
            ratios = [samples.ratio(setup, name, "per_second") for setup in SETUPS]
            beside.append([name, rate(per_second), *("" if one is None else f"{one:.2f}" for one in ratios)])
    note = "Ceilings: what the parts can do alone, and the creates above as a ratio to each."
    return [Table(["", *SETUPS], lines), Table(["ceiling", "alone", *SETUPS], beside, note)]
