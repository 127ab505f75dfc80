"""Measures how fast timers that are due at one instant are delivered: 5,000 and 20,000 of them."""

from __future__ import annotations

from functools import partial

from bench.firing import Figures, ahead_of, fired
from bench.rounds import Bench, Part, Parts, Samples
from bench.setups import SETUPS, Setup
from bench.tables import Table, across, ms, number, rate, us
from bench.timers import at_once

TITLE = "Many due at one instant"
SIZES = SMALL, LARGE = 5_000, 20_000  # the first is that of the peers
FILL_PER_MS = 10


def part_name(setup: str, count: int) -> str:
    return f"{setup}: {count:,}"


def parts(bench: Bench) -> Parts:
    return {part_name(setup.name, count): _part(bench, setup, count) for count in SIZES for setup in bench.setups}


def _part(bench: Bench, setup: Setup, count: int) -> Part:
    async def once(due: int) -> Figures | None:
        figures = await fired(bench, setup, list(at_once(bench.url, count, due)), due)
        # From the instant, not from the first arrival: what counts is when all are through.
        return figures and {**figures, "per_second": count / (figures["last_at"] - due / 1000)}

    return partial(ahead_of, once, setup.start_ms + count // FILL_PER_MS)


def tables(samples: Samples) -> list[Table]:
    made = []
    for count in SIZES:
        lines = across(
            samples,
            [part_name(setup, count) for setup in SETUPS],
            ("delivered, from the instant to the last", "per_second", rate),
            ("lateness p50", "p50_ms", ms),
            ("lateness p99", "p99_ms", ms),
            ("lateness p99.9", "p999_ms", ms),
            ("CPU of the service per timer", "server_cpu", us),
            ("CPU of the database per timer", "store_cpu", us),
            ("deferred by the service", "put_off", number),
        )
        if lines:
            made.append(Table([f"{count:,} at once", *SETUPS], lines))
    return made
