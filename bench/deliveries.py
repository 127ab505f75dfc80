"""Measures how fast timers that are due at one instant are delivered, beside the delivery client alone and wrk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from bench.processes import WRK, BenchError, Process, duetime, worker, wrk
from bench.report import Row, compared, ms, rate, us
from bench.rounds import Bench, Part, Sample
from bench.timers import at_once, callback_body, fill, now_ms, remove
from duetime.model import Timer

CONCURRENT = 256
ARRIVE_SECONDS_MAX = 60
START_MS = 1_500  # from the filling of the file to the instant: the server must be up by then
RECORDED_SECONDS_MAX = 30.0
HEADERS = {
    "Content-Type": "application/json",
    "User-Agent": "timer-platform/0.1.0 duetime/bench",
    "X-Tenant": "acme",
    "webhook-id": "0f8fad5b-d9cb-569f-a165-70867728950e",
    "webhook-timestamp": "1700000000",
    "duetime-attempt": "1",
    "duetime-timer": "default/0f8fad5bd9cb569fa16570867728950e",
    "traceparent": "00-0f8fad5bd9cb569fa16570867728950e-a16570867728950e-01",
}


async def arrivals(bench: Bench, count: int, server: Process, recorded: int | None = None) -> Sample:
    """What the receiver saw and the server spent, once ``count`` callbacks came and ``recorded`` are completed."""
    cpu = server.cpu_seconds()
    came = (await bench.receiver.ask(f"wait {count} {ARRIVE_SECONDS_MAX}"))["count"]
    put_off = await completed(server, count if recorded is None else recorded)
    cpu = server.cpu_seconds() - cpu
    if came != count:
        raise BenchError(f"{came} callbacks came where {count} were due")
    return {**await bench.receiver.ask("report"), "server_cpu": cpu / count, "put_off": put_off}


async def completed(server: Process, count: int) -> float:
    """Return when the store says that so many timers are completed: how many attempts were put off until then."""
    for _ in range(round(RECORDED_SECONDS_MAX / 0.05)):
        _, page = await server.get("/metrics")
        metrics = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        if float(metrics.get('duetime_timers{status="completed"}', 0)) >= count:
            return float(metrics.get("duetime_deferred_total", 0))
        await asyncio.sleep(0.05)
    raise BenchError(f"not all of {count} timers were recorded as completed")


async def ahead_of(attempt: Callable[[int], Awaitable[Sample | None]], wait_ms: int) -> Sample:
    """Try with timers due in ``wait_ms``, and longer ones while the server comes up too late for them (None)."""
    for patience in (1, 2, 4, 8):
        sample = await attempt(now_ms() + wait_ms * patience)
        if sample is not None:
            return sample
    raise BenchError("the server was never up before its timers were due: the machine is too busy")


async def fired(bench: Bench, file: Path, timers: Sequence[Timer], first_due: int) -> Sample | None:
    """Timers put into the file ahead and fired by a server that starts just before; None if it started too late."""
    await fill(file, timers)
    await bench.receiver.ask("reset")
    try:
        async with duetime(bench.directory, file) as server:
            return await arrivals(bench, len(timers), server) if now_ms() < first_due else None
    finally:
        remove(file)


async def measure(bench: Bench) -> list[Row]:
    file = bench.directory / "deliveries.db"
    seconds = 1.5 if bench.quick else 2.0
    sizes = (5_000,) if bench.quick else (5_000, 20_000)
    request = {"path": "/hook", "body": callback_body(), "headers": HEADERS}

    def due_at_once(count: int) -> Part:
        async def once(due: int) -> Sample | None:
            return await fired(bench, file, list(at_once(bench.url, count, due)), due)

        return lambda: ahead_of(once, START_MS + count // 20)

    async def client() -> Sample:
        await bench.receiver.ask("reset")
        plan = {"what": "client", "url": bench.url, "callers": CONCURRENT, "seconds": seconds}
        figures = await worker("ceilings", plan, bench.directory)
        if figures["failed"]:
            raise BenchError(f"the delivery client failed {figures['failed']} times")
        return figures

    async def ours() -> Sample:
        await bench.receiver.ask("reset")
        head = {name: value for name, value in HEADERS.items() if name != "Content-Type"}
        plan = {**request, "headers": head, "port": bench.receiver.port, "connections": CONCURRENT, "seconds": seconds}
        result = await worker("load", plan, bench.directory)
        return {**result, "per_cpu_second": result["answers"] / result["cpu_seconds"]}

    async def theirs() -> Sample:
        await bench.receiver.ask("reset")
        port, body = bench.receiver.port, callback_body()
        directory = bench.directory
        return await wrk(port, "/hook", body, HEADERS, connections=CONCURRENT, seconds=seconds, directory=directory)

    parts = {f"{count:,} at once": due_at_once(count) for count in sizes} | {"client": client, "load": ours}
    if WRK:
        parts["wrk"] = theirs
    s = await bench.interleave("deliveries", parts)
    rows = []
    for count in sizes:
        part = f"{count:,} at once"
        client_rate = f"client alone {rate(s.median('client', 'per_second'))}"
        rows += [
            compared(
                f"{count:,} due at one instant",
                rate(s.median(part, "per_second")),
                client_rate,
                s.ratio(part, "client", "per_second"),
            ),
            Row("  lateness p50 / p99", f"{ms(s.median(part, 'p50_ms'))} / {ms(s.median(part, 'p99_ms'))}"),
            Row("  put off by the server", f"{s.median(part, 'put_off'):,.0f} timers"),
            Row("  server CPU per delivery", us(s.median(part, "server_cpu"))),
        ]
    for part in ("load", "wrk"):
        if part in parts:
            ratio = s.ratio("client", part, "per_second")
            value = rate(s.median("client", "per_second")) if part == "load" else ""
            figure = "delivery client alone" if part == "load" else ""
            rows.append(compared(figure, value, f"{part} {rate(s.median(part, 'per_second'))}", ratio))
    for part in ("load", "wrk"):
        if part in parts:
            ratio = s.ratio("client", part, "per_cpu_second")
            value = rate(s.median("client", "per_cpu_second")) if part == "load" else ""
            figure = "  per CPU-second" if part == "load" else ""
            beside = f"{part} {rate(s.median(part, 'per_cpu_second'))}"
            rows.append(compared(figure, value, beside, ratio, least=0.4 if part == "wrk" else None))
    return rows
