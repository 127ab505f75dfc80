"""Measures timers end to end: created over HTTP at full speed, fired a few seconds later, delivered and recorded."""

from __future__ import annotations

import time

from bench.creates import measured
from bench.deliveries import arrivals
from bench.processes import duetime
from bench.report import Row, rate, us
from bench.rounds import Bench, Sample
from bench.series import rate_between
from bench.timers import create_body, remove

AHEAD_MS = 5_500  # the door asks for five seconds, and a request may wait in line
SETTLE_SECONDS = 0.5


async def measure(bench: Bench) -> list[Row]:
    file = bench.directory / "sustained.db"
    seconds = 7.5 if bench.quick else 9.0
    ahead = AHEAD_MS / 1000

    async def both() -> Sample:
        await bench.receiver.ask("reset")
        async with duetime(bench.directory, file) as server:
            cpu = server.cpu_seconds()
            made = await measured(bench, server, seconds, body=create_body(bench.url), ahead_ms=AHEAD_MS)
            count = made["answers"]
            came = await arrivals(bench, count, server)
            ended = time.time()
            cpu = server.cpu_seconds() - cpu
        remove(file)
        started = made["started_at"]
        begin, end = started + ahead + SETTLE_SECONDS, started + seconds
        first = came["first_at"]
        return {
            "count": count,
            "whole": count / (ended - started),
            "without_wait": count / (ended - started - ahead),
            "creates_alone": rate_between(made["buckets"], SETTLE_SECONDS, ahead),
            "creates_both": rate_between(made["buckets"], begin - started, end - started),
            "deliveries_both": rate_between(came["buckets"], begin - first, end - first),
            "tail": came["last_at"] - end - ahead,
            "cpu": cpu / count,
            "p50_ms": came["p50_ms"],
            "p99_ms": came["p99_ms"],
        }

    # It has no ceiling to take turns with, so once is as good as often.
    bench.say("end to end: duetime")
    s = await both()
    return [
        Row(f"end to end, {s['count']:,.0f} timers", rate(s["whole"]), "from first create to last record"),
        Row("", rate(s["without_wait"]), f"less the {ahead:g} s that each waits to be due"),
        Row(
            "  while both sides run",
            f"{rate(s['creates_both'])} + {rate(s['deliveries_both'])}",
            f"created + delivered; creates alone {rate(s['creates_alone'])}",
        ),
        Row("  lateness p50 / p99", f"{s['p50_ms']:,.0f} ms / {s['p99_ms']:,.0f} ms"),
        Row("  last delivery after its time", f"{s['tail']:.1f} s"),
        Row("  server CPU per timer, whole life", us(s["cpu"])),
    ]
