"""The command: runs scenarios and prints the lateness that the healthy client experienced."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

from tests.isolation.names import Unsupported
from tests.isolation.report import as_json, details, table
from tests.isolation.scenarios import SCENARIOS
from tests.isolation.world import Options, Result, Scenario, run
from tests.postgres import Missing, Postgres

DESCRIPTION = """\
Measure whether trouble delays healthy timers. A healthy client of a service has 100 timers per second to a quick
receiver. Their lateness is measured alone, and then next to the trouble. Everything runs on loopback and is stopped at
the end.

scenarios (all, unless some are named), with their numbers of timers:
{scenarios}
"""
EPILOG = """\
examples:
  python -m tests.isolation                             all scenarios on SQLite: about ten minutes
  python -m tests.isolation --store both                and on PostgreSQL
  python -m tests.isolation --brief                     small sizes and short phases, like `make test`
  python -m tests.isolation hang herd --scale 0.5       two scenarios with half as many timers
  PYTHONPATH=/old/src python -m tests.isolation hang    another version of the service

bars: the healthy p99 beside the trouble is at most 1.5 × that alone + 100 ms (herd: 500 ms), no healthy timer fails or
is missing, and timers of the trouble are put back into the store at most twice per attempt. With --brief it is
1.5 × + 250 ms and the p99 of a plain sleep loop in the same phase. The exit code is 1 when a bar is missed.

columns: lateness in milliseconds; noise is the lateness of that sleep loop, alone and beside; deferred, attempts, row
updates (PostgreSQL) and CPU are those of the service while the healthy timers were measured beside the trouble.
"""
POSTGRES_VERSION = 18
PROGRESS_SECONDS = 5.0


class Progress:
    """Show progress: one changing line on a terminal, otherwise a line from time to time."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._printed_at = 0.0

    def __call__(self, text: str) -> None:
        if self._terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._printed_at > PROGRESS_SECONDS:
            self._printed_at = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    scenarios = "\n".join(f"  {s.name:<13} {_sizes(s):<17} {s.what}" for s in SCENARIOS.values())
    made = argparse.ArgumentParser(
        prog="python -m tests.isolation",
        description=DESCRIPTION.format(scenarios=scenarios),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("scenarios", nargs="*", metavar="scenario", help="one of those above")
    made.add_argument("--store", choices=["sqlite", "postgres", "both"], default="sqlite", help="[sqlite]")
    made.add_argument("--brief", action="store_true", help="small sizes and short phases")
    made.add_argument("--scale", type=float, default=1.0, help="multiply the numbers of timers [1]")
    made.add_argument(
        "--same-namespace", action="store_true", help="put the healthy timers into the namespace of the trouble"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file, too")
    return made


def _sizes(scenario: Scenario) -> str:
    return ", ".join(map("{:,}".format, scenario.sizes))


def sizes_of(scenario: Scenario, *, brief: bool, scale: float) -> list[int]:
    """The numbers of timers to run a scenario with; none if it has no brief form."""
    sizes = [scenario.size_brief] if brief else scenario.sizes
    return [max(1, round(size * scale)) for size in sizes if size is not None]


def main() -> int:
    made = parser()
    given = made.parse_args()
    for name in given.scenarios:
        if name not in SCENARIOS:
            made.error(f"unknown scenario {name!r}: choose from {', '.join(SCENARIOS)}")
    if given.scale <= 0:
        made.error("--scale must be positive")
    signal.signal(signal.SIGTERM, _end)
    results: list[Result] = []
    with ExitStack() as stack:
        stores: dict[str, Postgres | None] = {}
        if given.store != "postgres":
            stores["sqlite"] = None
        if given.store != "sqlite":
            try:
                stores["postgres"] = stack.enter_context(Postgres(POSTGRES_VERSION))
            except Missing as missing:
                made.error(str(missing))
        for name in given.scenarios or SCENARIOS:
            for size in sizes_of(SCENARIOS[name], brief=given.brief, scale=given.scale):
                for store, postgres in stores.items():
                    results += _ran(SCENARIOS[name], size, store, postgres, given)
                    if given.json is not None:
                        given.json.write_text(json.dumps(as_json(results), indent=2) + "\n")
    print(f"\n{table(results)}")
    missed = sum(bool(result.missed) for result in results)
    print(f"\n{missed} of {len(results)} runs missed a bar, on {os.cpu_count()} cores")
    return 1 if missed else 0


def _ran(
    scenario: Scenario, size: int, store: str, postgres: Postgres | None, given: argparse.Namespace
) -> list[Result]:
    """The result, or None if this machine can't run the scenario."""
    print(f"{scenario.name}, {size:,} timers on {store}: {scenario.what}", flush=True)
    progress = Progress()
    options = Options(brief=given.brief, same_namespace=given.same_namespace, say=progress)
    try:
        result = run(scenario, size, postgres, options)
    except Unsupported as reason:
        print(f"skipped: {reason}", flush=True)
        return []
    finally:
        progress.end()
    if result.missed:
        print(details(result), flush=True)
    return [result]


def _end(*_: object) -> NoReturn:
    """Raise KeyboardInterrupt on SIGTERM, so that all started processes are stopped."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
