"""Measures creates over HTTP, one by one and durable, beside the bare server, the bare store and raw SQLite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.processes import KEY, WRK, BenchError, Process, bare, duetime, worker, wrk
from bench.report import Row, compared, ms, rate, us
from bench.rounds import Bench, Part, Sample
from bench.timers import create_body, now_ms, remove
from duetime.timetext import format_time

CONNECTIONS = 64
AHEAD_MS = 7 * 86_400_000
HEADERS = {"X-API-Key": KEY}


def far_body(url: str) -> str:
    at = now_ms() + AHEAD_MS
    return create_body(url).replace("{at}", format_time(at)).replace("{due}", str(at))


async def load(bench: Bench, server: Process, seconds: float, **plan: Any) -> dict[str, Any]:
    """Creates at full speed; every one of them must have been accepted."""
    plan = {"body": far_body(bench.url), **plan}
    result = await worker(
        "load",
        {
            "port": server.port,
            "path": "/timers",
            "connections": CONNECTIONS,
            "seconds": seconds,
            "headers": HEADERS,
            **plan,
        },
        bench.directory,
    )
    if set(result["statuses"]) != {"201"}:
        raise BenchError(f"creates were answered {result['statuses']}, not all with 201")
    return result


async def measured(bench: Bench, server: Process, seconds: float, **plan: Any) -> dict[str, Any]:
    """The load's result with what the server spent on each create."""
    cpu = server.cpu_seconds()
    result = await load(bench, server, seconds, **plan)
    return {**result, "server_cpu": (server.cpu_seconds() - cpu) / result["answers"]}


async def measure(bench: Bench) -> list[Row]:
    seconds = 2.0 if bench.quick else 3.0
    file = bench.directory / "creates.db"

    async def durable() -> Sample:
        async with duetime(bench.directory, file) as server:
            result = await measured(bench, server, seconds)
        remove(file)
        return result

    async def bare_server() -> Sample:
        async with bare(bench.directory) as server:
            return await measured(bench, server, seconds - 1)

    async def bare_server_wrk() -> Sample:
        async with bare(bench.directory) as server:
            return await wrk(
                server.port,
                "/timers",
                far_body(bench.url),
                {**HEADERS, "Content-Type": "application/json"},
                connections=CONNECTIONS,
                seconds=seconds - 1,
                directory=bench.directory,
            )

    async def store() -> Sample:
        return await _ceiling(bench, file, what="store", url=bench.url, callers=CONNECTIONS, seconds=seconds - 1)

    async def single() -> Sample:
        return await _ceiling(bench, file, what="raw", batch=1, seconds=1.0)

    async def hundred() -> Sample:
        return await _ceiling(bench, file, what="raw", batch=100, seconds=1.0)

    parts: dict[str, Part] = {"duetime": durable, "bare server": bare_server}
    if WRK:
        parts["bare server, wrk"] = bare_server_wrk
    parts |= {"bare store": store, "SQLite single": single, "SQLite by 100": hundred}
    s = await bench.interleave("creates", parts)
    value = rate(s.median("duetime", "per_second"))
    rows = [
        compared(
            "creates one by one, durable",
            value,
            f"bare server {rate(s.median('bare server', 'per_second'))}",
            s.ratio("duetime", "bare server", "per_second"),
            least=0.5,
        )
    ]
    for part in ("bare store", "SQLite single", "SQLite by 100"):
        ratio = s.ratio("duetime", part, "per_second")
        rows.append(compared("", "", f"{part} {rate(s.median(part, 'per_second'))}", ratio))
    rows.append(
        Row(
            "  answered after, p50 / p99",
            f"{ms(s.median('duetime', 'p50_ms'))} / {ms(s.median('duetime', 'p99_ms'))}",
        )
    )
    rows.append(
        compared(
            "  server CPU per create",
            us(s.median("duetime", "server_cpu")),
            f"bare server {us(s.median('bare server', 'server_cpu'))}",
            s.ratio("duetime", "bare server", "server_cpu"),
        )
    )
    if WRK:
        rows.append(
            compared(
                "load generator on the bare server",
                rate(s.median("bare server", "per_second")),
                f"wrk {rate(s.median('bare server, wrk', 'per_second'))}",
                s.ratio("bare server", "bare server, wrk", "per_second"),
                least=0.6,
            )
        )
    return rows


async def _ceiling(bench: Bench, file: Path, **plan: Any) -> Sample:
    try:
        return await worker("ceilings", {"path": str(file), **plan}, bench.directory)
    finally:
        remove(file)
