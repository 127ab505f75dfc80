"""``python -m bench``: runs the measurements in about five minutes, prints the table and writes it as JSON if asked."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import uvloop

from bench import commands, creates, deliveries, pending, steady, sustained
from bench.machine import Machine
from bench.processes import WRK, WRK_MISSING, BenchError, receiver
from bench.report import Row, table
from bench.rounds import Bench

Measure = Callable[[Bench], Awaitable[list[Row]]]

MEASUREMENTS: dict[str, Measure] = {
    "creates": creates.measure,
    "deliveries": deliveries.measure,
    "sustained": sustained.measure,
    "steady": steady.measure,
    "commands": commands.measure,
    "pending": pending.measure,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="about 40 seconds: one round, smaller sizes")
    parser.add_argument(
        "--rounds",
        type=int,
        help="rounds of each measurement [3, and 2 of those that take long; 1 with --quick]; sustained is run once",
    )
    parser.add_argument("--only", choices=MEASUREMENTS, action="append", help="run this one alone; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows of the table here")
    return parser


async def _measure(options: argparse.Namespace, directory: Path) -> list[Row]:
    rows: list[Row] = []
    async with receiver(directory) as hooks:
        rounds, rounds_long = (1, 1) if options.quick else (3, 2)
        bench = Bench(
            directory,
            hooks,
            rounds=options.rounds or rounds,
            rounds_long=options.rounds or rounds_long,
            quick=options.quick,
            started=time.monotonic(),
        )
        for name in options.only or MEASUREMENTS:
            if name == "pending" and options.quick and not options.only:
                rows.append(Row(name, "skipped", "try --quick --only pending, with 100 k"))
                continue
            try:
                rows += await MEASUREMENTS[name](bench)
            except BenchError as error:
                rows.append(Row(name, "could not run", str(error)))
        bench.say("done\n")
    return rows


def main() -> int:
    options = _parser().parse_args()
    if WRK is None:
        print(WRK_MISSING, file=sys.stderr)
    # Beside the code, so that the files are on a real disk even where /tmp is memory.
    machine = Machine()
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=Path(__file__).parent))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rows = runner.run(_measure(options, directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(table(rows))
    print(machine.summary())
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
