"""Measures the cost of pending timers: the other figures with 10 thousand, a million and ten million in the database.

The services of all sizes run at the same time and take short turns, because the machine's speed changes from one second
to the next by more than the tenth that is to be detected.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.creates import WARM_SECONDS, load, measured
from bench.firing import COMPLETED, Figures, ahead_of, arrivals, metrics
from bench.processes import BenchError, Process
from bench.rounds import Bench, Parts, Samples
from bench.setups import POSTGRES, SQLITE, Address, Setup
from bench.tables import Format, Table, mb, ms, rate, seconds, us
from bench.timers import at_once, evenly, far_ahead, now_ms
from duetime.model import Timer

TITLE = "With many timers pending"
FEW, MANY, MOST = 10_000, 1_000_000, 10_000_000
MOST_BYTES = 40_000_000_000
TURNS = 5
AT_ONCE = 5_000
PER_SECOND = 1_000
STEADY_MS, HERD_MS = 1_300, 1_600
"""The length of a turn, including the pause after it."""
CREATE_SECONDS = 0.7
FILL_MS = 3_000
TOLERANCE = 0.1
TOLERANCE_MS = 1.0
"""Tolerance of latenesses: instants are whole milliseconds."""
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


def of(figure: str, count: int) -> str:
    """The name of a figure with this many pending timers."""
    return f"{figure}, {count:,} pending"


def ratio_of(figure: str) -> str:
    return f"{figure}, a million to ten thousand"


def parts(bench: Bench) -> Parts:
    bases = Bases(bench)
    return {setup.name: partial(_measure, bench, setup, bases) for setup in bench.setups if setup.name in SETUPS}


class Bases:
    """Databases with pending timers, filled on first use."""

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


@dataclass(frozen=True)
class Turn:
    count: int
    """The number of pending timers in the database of this turn."""
    at: int
    herd: bool

    def timers(self, url: str) -> list[Timer]:
        return list(at_once(url, AT_ONCE, self.at) if self.herd else evenly(url, PER_SECOND, 1, self.at))


def turns(sizes: Sequence[int], first: int) -> list[Turn]:
    """Steady seconds, then many timers at one instant; each size in turn, every second time backwards."""
    made, at = [], first
    for herd, length in ((False, STEADY_MS), (True, HERD_MS)):
        for number in range(TURNS):
            for count in sizes[:: 1 if number % 2 == 0 else -1]:
                made.append(Turn(count, at, herd))
                at += length
    return made


async def _measure(bench: Bench, setup: Setup, bases: Bases) -> Figures:
    sizes = (FEW, MANY) if bench.quick else (FEW, MANY, MOST)
    filled = {count: await bases.get(setup, count) for count in sizes}
    return await ahead_of(partial(_session, bench, setup, filled), len(sizes) * (setup.start_ms + FILL_MS))


async def _session(bench: Bench, setup: Setup, filled: Mapping[int, Address], first: int) -> Figures | None:
    """A service for each size, all at once. None if one started too late, or a turn took too long."""
    each: dict[str, list[float]] = {}

    def note(count: int, **figures: float) -> None:
        for figure, value in figures.items():
            each.setdefault(of(figure, count), []).append(value)

    async with AsyncExitStack() as stack:
        planned = turns(list(filled), first)
        servers: dict[int, Process] = {}
        for count, base in filled.items():
            # The largest is not copied: what a session adds to it is nothing beside what is there.
            address = base if count == MOST else await setup.create(base)
            if address != base:
                stack.push_async_callback(setup.drop, address)
            await setup.fill(
                address, [one for turn in planned if turn.count == count for one in turn.timers(bench.url)]
            )
            servers[count] = await stack.enter_async_context(setup.serve(bench.directory, address))
            note(count, ready=servers[count].ready_seconds, rss_start=servers[count].rss_bytes())
        recorded = {count: (await metrics(server))[COMPLETED] for count, server in servers.items()}
        for turn in planned:
            await bench.receiver.ask("reset")
            if now_ms() > turn.at:
                return None
            number = AT_ONCE if turn.herd else PER_SECOND
            recorded[turn.count] += number
            came = await arrivals(bench, number, servers[turn.count], recorded[turn.count], setup)
            cpu = came["server_cpu"] + came["store_cpu"]
            if turn.herd:
                note(turn.count, fired=number / (came["last_at"] - turn.at / 1000), fired_cpu=cpu)
            else:
                note(turn.count, steady_p50=came["p50_ms"], steady_p99=came["p99_ms"], steady_cpu=cpu)
        for server in servers.values():
            await load(bench, server, WARM_SECONDS)
        for number in range(TURNS):
            for count, server in list(servers.items())[:: 1 if number % 2 == 0 else -1]:
                made = await measured(bench, server, CREATE_SECONDS, setup)
                note(count, made=made["per_second"], made_cpu=made["server_cpu"] + made["store_cpu"])
        for count, server in servers.items():
            note(count, rss_end=server.rss_bytes())
    return _summary(each)


def _summary(each: Mapping[str, Sequence[float]]) -> Figures:
    """The median of each figure's turns, and of their ratios; for latenesses, which fluctuate, the ratio of the
    medians."""
    figures: Figures = {name: statistics.median(values) for name, values in each.items()}
    for figure in HIGHER | LOWER:
        pairs = zip(each[of(figure, MANY)], each[of(figure, FEW)], strict=True)
        figures[ratio_of(figure)] = statistics.median(many / few for many, few in pairs)
    for figure in LATE:
        figures[ratio_of(figure)] = figures[of(figure, MANY)] / figures[of(figure, FEW)]
    return figures


def within(samples: Samples, setup: str, figure: str) -> tuple[float | None, bool | None]:
    """The ratio of a figure with a million pending timers to that with ten thousand, and whether it is within a
    tenth."""
    ratio = samples.median(setup, ratio_of(figure))
    if ratio is None:
        return None, None
    if figure in HIGHER:
        return ratio, ratio >= 1 - TOLERANCE
    few = samples.median(setup, of(figure, FEW)) or 0.0
    return ratio, few * ratio <= few * (1 + TOLERANCE) + (TOLERANCE_MS if figure in LATE else 0.0)


def tables(samples: Samples) -> list[Table]:
    forms: dict[str, Format] = {"made": rate, "fired": rate, "rss_start": mb, "rss_end": mb, "ready": seconds}
    forms |= dict.fromkeys(LATE, ms)
    made = []
    for setup in SETUPS:
        sizes = [count for count in (FEW, MANY, MOST) if samples.each(setup, of("made", count))]
        lines = [
            [label, *(forms.get(figure, us)(samples.median(setup, of(figure, count)) or 0.0) for count in sizes)]
            for figure, label in (HIGHER | LATE | LOWER | {"ready": "start until ready"}).items()
        ]
        if sizes:
            made.append(Table([f"{setup}, pending", *(f"{count:,}" for count in sizes)], lines))
    return made
