"""Measures how fast timers that are due at one instant are delivered, beside the delivery client alone and wrk."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench.processes import WRK, BenchError, Process, duetime, worker, wrk
from bench.report import Row, compared, ms, rate, us
from bench.rounds import Bench, Part, Sample
from bench.timers import at_once, callback_body, fill, now_ms, remove

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
    await completed(server, count if recorded is None else recorded)
    cpu = server.cpu_seconds() - cpu
    if came != count:
        raise BenchError(f"{came} callbacks came where {count} were due")
    return {**await bench.receiver.ask("report"), "server_cpu": cpu / count}


async def completed(server: Process, count: int) -> None:
    """Return when the store says that so many timers are completed."""
    for _ in range(round(RECORDED_SECONDS_MAX / 0.05)):
        _, page = await server.get("/metrics")
        wanted = 'duetime_timers{status="completed"} '
        done = [float(line.removeprefix(wanted)) for line in page.splitlines() if line.startswith(wanted)]
        if done and done[0] >= count:
            return
        await asyncio.sleep(0.05)
    raise BenchError(f"not all of {count} timers were recorded as completed")


async def burst(bench: Bench, file: Path, count: int) -> Sample:
    """Timers due at one instant, put into the file ahead, fired by a server that starts just before."""
    for patience in (1, 2, 4):
        due = now_ms() + (START_MS + count // 20) * patience
        await fill(file, at_once(bench.url, count, due))
        await bench.receiver.ask("reset")
        async with duetime(bench.directory, file) as server:
            early = now_ms() < due
            if early:
                sample = await arrivals(bench, count, server)
        remove(file)
        if early:
            return sample
    raise BenchError("the server was never up before its timers were due")


async def measure(bench: Bench) -> list[Row]:
    file = bench.directory / "deliveries.db"
    seconds = 1.5 if bench.quick else 2.0
    sizes = (5_000,) if bench.quick else (5_000, 20_000)
    request = {"path": "/hook", "body": callback_body(), "headers": HEADERS}

    def due_at_once(count: int) -> Part:
        return lambda: burst(bench, file, count)

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
