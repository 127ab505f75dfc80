"""Fires timers that were put into a database in advance, and returns what the receiver saw and the server used."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from bench.processes import BenchError, Process
from bench.rounds import Bench
from bench.setups import Setup
from bench.timers import now_ms
from duetime.model import Timer

ARRIVE_SECONDS_MAX = 60
RECORDED_SECONDS_MAX = 30.0
LOOK_SECONDS = 0.05
COMPLETED = 'duetime_timers{status="completed"}'

WORKER = re.compile(r'(?:{|,)worker="\d+"}$')

Figures = dict[str, Any]


async def arrivals(
    bench: Bench, count: int, server: Process, recorded: float | None = None, setup: Setup | None = None
) -> Figures:
    """What the receiver saw and the server used, once ``count`` callbacks have arrived and ``recorded`` are
    completed."""
    cpu, store_cpu = server.cpu_seconds(), setup.store_cpu_seconds() if setup else 0.0
    came = (await bench.receiver.ask(f"wait {count} {ARRIVE_SECONDS_MAX}"))["count"]
    put_off = await completed(server, count if recorded is None else recorded)
    cpu, store_cpu = server.cpu_seconds() - cpu, (setup.store_cpu_seconds() if setup else 0.0) - store_cpu
    if came != count:
        raise BenchError(f"{came} callbacks arrived, but {count} were due")
    spent = {"server_cpu": cpu / count, "store_cpu": store_cpu / count, "put_off": put_off}
    return {**await bench.receiver.ask("report"), **spent}


async def metrics(server: Process) -> Mapping[str, float]:
    """The values of the metrics page, summed over all workers."""
    _, page = await server.get("/metrics")
    figures: defaultdict[str, float] = defaultdict(float)
    for line in page.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            figures[WORKER.sub("", name)] += float(value)
    return figures


async def completed(server: Process, count: float) -> float:
    """Wait until the store reports this many completed timers; returns how many attempts were put back until then."""
    for _ in range(round(RECORDED_SECONDS_MAX / LOOK_SECONDS)):
        figures = await metrics(server)
        if figures.get(COMPLETED, 0.0) >= count:
            return figures.get("duetime_deferred_total", 0.0)
        await asyncio.sleep(LOOK_SECONDS)
    raise BenchError(f"not all of {count:,.0f} timers were recorded as completed")


async def ahead_of(attempt: Callable[[int], Awaitable[Figures | None]], wait_ms: int) -> Figures:
    """Try with timers due in ``wait_ms``, and longer while the server starts too late for them (None)."""
    for patience in (1, 2, 4, 8):
        sample = await attempt(now_ms() + wait_ms * patience)
        if sample is not None:
            return sample
    raise BenchError("the server was never up before its timers were due: the machine is too busy")


async def fired(bench: Bench, setup: Setup, timers: Sequence[Timer], first_due: int) -> Figures | None:
    """Timers put into a database in advance and fired by a server started just before; None if it started too late."""
    address = await setup.create()
    try:
        await setup.fill(address, timers)
        await bench.receiver.ask("reset")
        async with setup.serve(bench.directory, address) as server:
            return await arrivals(bench, len(timers), server, setup=setup) if now_ms() < first_due else None
    finally:
        await setup.drop(address)
