"""``python -m bench``: runs the measurements in rounds, including the peers, and writes the figures and the report.

Raw figures go to a file, from which ``python -m bench.report`` can create the document again.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import apsw
import uvloop

from bench import against, batches, client, commands, creates, herd, pending, report, steady, sustained
from bench.machine import Machine, description
from bench.processes import WRK, WRK_MISSING, reason, receiver
from bench.results import Failure, Results
from bench.rounds import ROUND, Bench, Part, spread
from bench.setups import PostgresDatabases, Sqlite
from duetime.version import __version__
from tests.postgres import Missing, Postgres

OURS = {
    "creates": creates,
    "batches": batches,
    "herd": herd,
    "client": client,
    "sustained": sustained,
    "steady": steady,
    "commands": commands,
    "pending": pending,
}
PEERS = "peers"
ROUNDS = 5
ROUNDS_LONG = 2
LONG = ("commands", "pending")


class Turn(NamedTuple):
    measurement: str
    part: str
    run: Part


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--full", action="store_true", help="all measurements, in rounds: about forty minutes")
    parser.add_argument("--rounds", type=int, help=f"[1; with --full {ROUNDS}, {ROUNDS_LONG} of the slow ones]")
    parser.add_argument(
        "--only", choices=(*OURS, PEERS), action="append", help="run only this one, without a report; may be repeated"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help=f"the file for the raw figures [{report.FIGURES.name} in docs]"
    )
    return parser


def _turns(bench: Bench, names: Sequence[str]) -> list[Turn]:
    """Our measurements one after another, with the peers between them."""
    blocks = [
        [Turn(name, part, run) for part, run in OURS[name].parts(bench).items()] for name in names if name in OURS
    ]
    peers = against.parts(bench) if PEERS in names else {}
    return spread(blocks or [[]], [Turn(PEERS, part, run) for part, run in peers.items()])


def _rounds(turn: Turn, options: argparse.Namespace) -> int:
    """The number of rounds of a measurement: slow peers that decide no bar run only in the first one."""
    rounds: int = options.rounds or (ROUNDS if options.full else 1)
    if turn.measurement == PEERS:
        return rounds if against.decides(turn.part) else 1
    return ROUNDS_LONG if turn.measurement in LONG and options.full and not options.rounds else rounds


async def _run(
    bench: Bench, options: argparse.Namespace, names: Sequence[str], results: Results, watch: Machine
) -> None:
    """Every second round runs backwards, so that drift affects all turns equally."""
    turns = _turns(bench, names)
    rounds = max((_rounds(turn, options) for turn in turns), default=0)
    for number in range(rounds):
        of_round = [turn for turn in turns if number < _rounds(turn, options)]
        for place, turn in enumerate(of_round[:: 1 if number % 2 == 0 else -1], 1):
            bench.say(f"round {number + 1} of {rounds}, {place} of {len(of_round)}: {turn.measurement}: {turn.part}")
            try:
                with watch.apart() if turn.measurement == PEERS else nullcontext():
                    sample = await turn.run()
                results.add(turn.measurement, turn.part, {ROUND: number, **sample})
                why = str(sample.get("error") or "")  # of one that was not measured to its end
            except Exception as error:  # whatever it is: the others are worth having
                why = reason(error)
            if why:
                bench.say(f"{turn.measurement}: {turn.part} could not run: {why}\n")
                results.failures.append(Failure(turn.measurement, turn.part, why))
        results.seconds, results.others_share = watch.seconds(), watch.others_share()
        if options.json:  # after each round: what is there is not lost when somebody loses patience
            results.save(options.json)


async def _measure(options: argparse.Namespace, directory: Path, results: Results, watch: Machine) -> None:
    names = options.only or [*OURS, PEERS]
    if PEERS in names and (why := against.missing()):
        print(f"{why}. What is measured against them is skipped.", file=sys.stderr)
        results.failures.append(Failure(PEERS, "all", why))
        names = [name for name in names if name != PEERS]
    async with AsyncExitStack() as stack:
        hooks = await stack.enter_async_context(receiver(directory))
        setups: list[Sqlite | PostgresDatabases] = [Sqlite(directory)]
        postgres = None
        try:
            postgres = stack.enter_context(Postgres(18))
            setups += [PostgresDatabases(postgres), PostgresDatabases(postgres, workers=2)]
            results.versions["PostgreSQL"] = postgres.sql("SHOW server_version")
        except Missing as error:
            print(f"{error}. What is measured on it is skipped.", file=sys.stderr)
            results.failures.append(Failure("PostgreSQL", "all", str(error)))
        bench = Bench(directory, hooks, postgres, setups, quick=not options.full, started=time.monotonic())
        await _run(bench, options, names, results, watch)
        bench.say("done\n")


def main() -> int:
    options = _parser().parse_args()
    if not options.only:
        options.json = options.json or report.FIGURES
    if WRK is None:
        print(WRK_MISSING, file=sys.stderr)
    watch = Machine()
    rounds: int | None = options.rounds
    versions = {
        "Duetime": __version__,
        "Python": f"{sys.version.split()[0]} ({sys.base_prefix})",
        "SQLite": apsw.sqlite_lib_version(),
    }
    results = Results(
        began_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=("make bench-full" if options.full else "make bench") + (f" ROUNDS={rounds}" if rounds else ""),
        quick=not options.full,
        rounds=rounds,
        machine=description(),
        versions=versions,
    )
    # Beside the code, so that the files are on a real disk even where /tmp is memory.
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=Path(__file__).parent))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_measure(options, directory, results, watch))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if not options.only:
        report.write(results)
    print(report.text(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
