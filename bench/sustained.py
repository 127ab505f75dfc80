"""Measures timers end to end: created over HTTP, due a second later, delivered and recorded, all at the same time.

In batches it is a closed loop: no more timers are created while a fixed number is in flight, so that it measures what
the service can sustain, not how fast it falls behind. One by one, creating is the limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from bench.batches import MINIMAL, PATH
from bench.creates import CONNECTIONS as CONNECTIONS_SINGLE
from bench.creates import load
from bench.firing import arrivals
from bench.machine import busy_share
from bench.processes import KEY, BenchError, Process
from bench.rounds import Bench, Part, Parts, Sample, Samples
from bench.series import rate_between
from bench.setups import SETUPS, Served
from bench.tables import Table, across, mb, percent, rate, us
from bench.timers import batch_body, durable_body, now_ms
from duetime.timetext import format_time

TITLE = "End to end, sustained"
AHEAD_MS = 1_000
BATCH = 500  # as large as those of the peers
CONNECTIONS = 4
ON_THE_WAY_MAX = 24_000
IN_BATCHES, ONE_BY_ONE = f"in batches of {BATCH}", "one by one"
LOOK_SECONDS = 0.005
SETTLE_SECONDS = 1.0


def single_name(setup: str) -> str:
    return f"{setup}, {ONE_BY_ONE}"


def parts(bench: Bench) -> Parts:
    made: dict[str, Part] = {setup.name: partial(measure, bench, setup, in_batches) for setup in bench.setups}
    singly = [setup for setup in bench.setups if setup.workers == 1 or not bench.quick]
    made |= {single_name(setup.name): partial(measure, bench, setup, _one_by_one) for setup in singly}
    return made


async def measure(bench: Bench, setup: Served, make: Any) -> Sample:
    """The rate of timers that ``make`` creates through a service, which delivers and records them meanwhile."""
    seconds = 6.0 if bench.quick else 10.0
    address = await setup.create()
    try:
        await bench.receiver.ask("reset")
        async with setup.serve(bench.directory, address) as server:
            cpu, store_cpu = server.cpu_seconds(), setup.store_cpu_seconds()
            started = time.time()
            count, busy = await busy_share(make(bench, server, seconds))
            ended = time.time()
            came = await arrivals(bench, count, server)
            cpu, store_cpu = server.cpu_seconds() - cpu, setup.store_cpu_seconds() - store_cpu
            rss = server.rss_bytes()
    finally:
        await setup.drop(address)
    first = came["first_at"]
    return {
        "count": count,
        "per_second": rate_between(came["buckets"], started + AHEAD_MS / 1000 + SETTLE_SECONDS - first, ended - first),
        "server_cpu": cpu / count,
        "store_cpu": store_cpu / count,
        "rss_bytes": rss,
        "busy": busy,
    }


async def _one_by_one(bench: Bench, server: Process, seconds: float) -> int:
    plan = {"path": "/api/v1/timers", "body": durable_body(bench.url), "ahead_ms": AHEAD_MS}
    made: Mapping[str, int] = await load(bench, server, seconds, connections=CONNECTIONS_SINGLE, **plan)
    return made["answers"]


async def in_batches(bench: Bench, server: Process, seconds: float, *, on_the_way_max: int = ON_THE_WAY_MAX) -> int:
    template = batch_body(bench.url, BATCH)
    until = time.monotonic() + seconds
    sent = came = 0
    over = False

    async def watch() -> None:
        nonlocal came
        while not over:  # to the end of an answer: the next question is somebody else's
            came = (await bench.receiver.ask("wait 0 0"))["count"]
            await asyncio.sleep(LOOK_SECONDS)

    async def send() -> None:
        nonlocal sent
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 20)
        try:
            while time.monotonic() < until:
                if sent - came + BATCH > on_the_way_max:
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                sent += BATCH
                at = now_ms() + AHEAD_MS
                await _post(reader, writer, template.replace("{at}", format_time(at)).replace("{due}", str(at)))
        finally:
            writer.close()

    watching = asyncio.create_task(watch())
    try:
        await asyncio.gather(*(send() for _ in range(CONNECTIONS)))
    finally:
        over = True
        await watching
    return sent


async def _post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: str) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: bench\r\nX-API-Key: {KEY}\r\nContent-Type: application/json\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in MINIMAL.items())
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    answer = await reader.readuntil(b"\r\n\r\n")
    length = answer.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
    await reader.readexactly(int(length))
    if answer[9:12] != b"200":
        raise BenchError(f"a batch was refused: {answer.decode()}")


def tables(samples: Samples) -> list[Table]:
    made = []
    for title, names in (
        (IN_BATCHES, SETUPS),
        (ONE_BY_ONE, [single_name(setup) for setup in SETUPS]),
    ):
        lines = across(
            samples,
            names,
            ("delivered while as many are created", "per_second", rate),
            ("CPU of the service per timer, whole life", "server_cpu", us),
            ("CPU of the database per timer, whole life", "store_cpu", us),
            ("memory of the service at the end", "rss_bytes", mb),
            ("CPU of the machine in use", "busy", percent),
        )
        if lines:
            made.append(Table([title, *SETUPS], lines))
    return made
