"""Measures what pending timers cost: the other figures with 10 thousand, a million and ten million in the database."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from functools import partial
from pathlib import Path

from bench.creates import measured
from bench.firing import ARRIVE_SECONDS_MAX, COMPLETED, Figures, ahead_of, arrivals, metrics
from bench.processes import BenchError
from bench.rounds import Bench, Part, Parts, Samples
from bench.setups import POSTGRES, SQLITE, Address, Setup
from bench.tables import Format, Table, across, mb, ms, rate, seconds, us
from bench.timers import at_once, evenly, far_ahead, now_ms

TITLE = "With many timers pending"
FEW, MANY, MOST = 10_000, 1_000_000, 10_000_000
MOST_BYTES = 40_000_000_000
AT_ONCE = 5_000
PER_SECOND = 1_000
PAUSE_MS = 1_000
FILL_MS = 1_000
TOLERANCE = 0.1
TOLERANCE_MS = 1.0
"""Of a lateness, besides: instants are whole milliseconds."""
BAR = f"within {TOLERANCE * 100:.0f} %, lateness + {TOLERANCE_MS:g} ms"
SETUPS = (SQLITE, POSTGRES)
HIGHER = {"made": "creates", "fired": "5,000 at one instant"}
LOWER = {
    "made_cpu": "CPU per create",
    "fired_cpu": "CPU per delivery, 5,000 at one instant",
    "steady_cpu": "CPU per timer, steady",
    "rss_start": "memory when ready",
    "rss_end": "memory at the end",
}
LATE = {"steady_p50": "lateness p50 at 1,000/s", "steady_p99": "lateness p99 at 1,000/s"}


def free_bytes(directory: Path | str) -> int:
    return shutil.disk_usage(directory).free


def part_name(setup: str, count: int) -> str:
    return f"{setup}: {count:,}"


def parts(bench: Bench) -> Parts:
    bases = Bases(bench)
    made: dict[str, Part] = {}
    for setup in bench.setups:
        for count in (FEW, MANY) if bench.quick else (FEW, MANY, MOST):
            if setup.name in SETUPS:
                made[part_name(setup.name, count)] = partial(_measure, bench, setup, bases, count)
    return made


class Bases:
    """Databases with pending timers, filled when they are first asked for."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._made: dict[tuple[str, int], Address] = {}

    async def get(self, setup: Setup, count: int) -> Address:
        if (setup.name, count) not in self._made:
            if count == MOST and min(free_bytes(self._bench.directory), free_bytes(tempfile.gettempdir())) < MOST_BYTES:
                raise BenchError(f"{MOST:,} pending timers need {MOST_BYTES / 1e9:.0f} GB of free disk")
            self._bench.say(f"pending: putting {count:,} timers into the databases")
            await asyncio.gather(*(self._fill(one, count) for one in self._bench.setups if one.name in SETUPS))
        return self._made[setup.name, count]

    async def _fill(self, setup: Setup, count: int) -> None:
        address = await setup.create()
        await setup.fill(address, far_ahead(self._bench.url, 1))
        await setup.multiply(address, count - 1)
        self._made[setup.name, count] = address


async def _measure(bench: Bench, setup: Setup, bases: Bases, count: int) -> Figures:
    base = await bases.get(setup, count)
    # The largest is not copied: what a session adds to it is nothing beside what is there.
    address = base if count == MOST else await setup.create(base)
    try:
        return await ahead_of(partial(_session, bench, setup, address), setup.start_ms + FILL_MS)
    finally:
        if address != base:
            await setup.drop(address)


async def _session(bench: Bench, setup: Setup, address: Address, first: int) -> Figures | None:
    """One server: a steady stretch, then many at one instant, then creates. None if it came up too late."""
    length = 3 if bench.quick else 5
    steady = PER_SECOND * length
    instant = first + length * 1000 + PAUSE_MS
    timers = [*evenly(bench.url, PER_SECOND, length, first), *at_once(bench.url, AT_ONCE, instant)]
    await setup.fill(address, timers)
    await bench.receiver.ask("reset")
    async with setup.serve(bench.directory, address) as server:
        rss_start = server.rss_bytes()
        before = (await metrics(server))[COMPLETED]
        if now_ms() > first:
            await bench.receiver.ask(f"wait {len(timers)} {ARRIVE_SECONDS_MAX}")  # none is left for the next try
            return None
        evenly_fired = await arrivals(bench, steady, server, recorded=before + steady, setup=setup)
        await bench.receiver.ask("reset")
        if now_ms() > instant:
            await bench.receiver.ask(f"wait {AT_ONCE} {PAUSE_MS // 1000}")
            return None
        fired = await arrivals(bench, AT_ONCE, server, recorded=before + len(timers), setup=setup)
        made = await measured(bench, server, 1.5 if bench.quick else 2.0, setup)
        return {
            "ready": server.ready_seconds,
            "rss_start": rss_start,
            "rss_end": server.rss_bytes(),
            "steady_p50": evenly_fired["p50_ms"],
            "steady_p99": evenly_fired["p99_ms"],
            "steady_cpu": evenly_fired["server_cpu"] + evenly_fired["store_cpu"],
            "fired": AT_ONCE / (fired["last_at"] - instant / 1000),
            "fired_cpu": fired["server_cpu"] + fired["store_cpu"],
            "made": made["per_second"],
            "made_cpu": made["server_cpu"] + made["store_cpu"],
        }


def within(samples: Samples, setup: str, figure: str) -> tuple[float | None, bool | None]:
    """The ratio of a figure with a million pending to that with ten thousand, and whether they are within a tenth.

    By the best turn of each: what else the machine does only ever makes a figure worse, and of two equal runs one can
    be worse by more than a tenth.
    """
    turns = [samples.each(part_name(setup, count), figure) for count in (FEW, MANY)]
    if not all(turns):
        return None, None
    few, many = map(max if figure in HIGHER else min, turns)
    ratio = many / few if few else None
    if figure in HIGHER:
        return ratio, many >= few * (1 - TOLERANCE)
    return ratio, many <= few * (1 + TOLERANCE) + (TOLERANCE_MS if figure in LATE else 0.0)


def tables(samples: Samples) -> list[Table]:
    made = []
    forms: dict[str, Format] = {"made": rate, "fired": rate, "rss_start": mb, "rss_end": mb}
    forms |= dict.fromkeys(LATE, ms)
    named = (*HIGHER.items(), *LATE.items(), *LOWER.items())
    for setup in SETUPS:
        sizes = [count for count in (FEW, MANY, MOST) if part_name(setup, count) in samples]
        if not sizes:
            continue
        names = [part_name(setup, count) for count in sizes]
        lines = across(samples, names, *((label, figure, forms.get(figure, us)) for figure, label in named))
        lines += across(samples, names, ("start until ready", "ready", seconds))
        made.append(Table([f"{setup}, pending", *(f"{count:,}" for count in sizes)], lines))
    return made
