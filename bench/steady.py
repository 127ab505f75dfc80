"""Measures lateness at a steady 1,000 timers/s, compared with a bare loop that sends the same requests from memory."""

from __future__ import annotations

from functools import partial

from bench.firing import Figures, ahead_of, fired
from bench.processes import BenchError, worker
from bench.rounds import Bench, Part, Parts, Sample, Samples
from bench.setups import SETUPS, Setup
from bench.tables import Table, across, ms, us
from bench.timers import evenly

TITLE = "A steady 1,000 timers a second"
PER_SECOND = 1_000
FILL_PER_MS = 10
LOOP = "bare loop"


def parts(bench: Bench) -> Parts:
    seconds = 4 if bench.quick else 8
    count = PER_SECOND * seconds

    def timers(setup: Setup) -> Part:
        async def once(first: int) -> Figures | None:
            return await fired(bench, setup, list(evenly(bench.url, PER_SECOND, seconds, first)), first)

        return partial(ahead_of, once, setup.start_ms + count // FILL_PER_MS)

    async def loop() -> Sample:
        await bench.receiver.ask("reset")
        plan = {"what": "loop", "url": bench.url, "per_second": PER_SECOND, "seconds": seconds}
        await worker("ceilings", plan, bench.directory)
        sample = await bench.receiver.ask("report")
        if sample["count"] != count:
            raise BenchError(f"{sample['count']} requests of the bare loop arrived, not {count}")
        return sample

    made: dict[str, Part] = {
        setup.name: timers(setup) for setup in bench.setups if setup.workers == 1 or not bench.quick
    }
    return made | {LOOP: loop}


def tables(samples: Samples) -> list[Table]:
    names = (*SETUPS, LOOP)
    lines = across(
        samples,
        names,
        ("lateness p50", "p50_ms", ms),
        ("lateness p99", "p99_ms", ms),
        ("lateness p99.9", "p999_ms", ms),
        ("CPU of the service per timer", "server_cpu", us),
        ("CPU of the database per timer", "store_cpu", us),
    )
    return [Table(["", *names], lines)]
