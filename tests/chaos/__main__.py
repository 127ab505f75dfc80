"""The command: runs scenarios and reports their results."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from tests.chaos.bugs import BUGS
from tests.chaos.cassandra_nodes import NODE_SCENARIOS
from tests.chaos.databases import DATABASES
from tests.chaos.report import details, table
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.world import Options, Scenario, run

DESCRIPTION = """\
Repeat a fault on a cluster under load, and compare what clients were promised with what the receiver got. Three
instances share one database, with leases of three seconds; clients create about 300 timers per second through all of
them, move some and cancel some. Everything runs on loopback and is stopped at the end.
"""
EPILOG = """\
examples:
  python -m {program}                               all scenarios
  python -m {program} {first} --times 10               one fault, ten times
  python -m {program} {first} --times 10 --seed 4711   the same timers and the same faults again
  python -m {program} --brief                       a few of each, like `make test`
  python -m {program} {first} --times 1 --bug answer-before-commit   show that a planted bug is caught

The exit code is 1 after a violation. tests/chaos/checker.py explains `lost`, `early` and so on; `duplicates` are
repeated requests, `unexcused` the ones among them whose attempt was in flight at no fault.

bugs:
{bugs}
"""

BRIEF = {"rate": 40.0, "ahead_seconds_max": 3.0, "noise_seconds": 6.0, "hang_seconds": 7.0, "patience_seconds": 30.0}
CASSANDRA_RATE = 20.0
"""Three nodes on one machine share its cores."""
BUGGY_PATIENCE_SECONDS = 12.0
"""A shorter wait with a planted bug: timers that it has lost never arrive."""
PROGRESS_SECONDS = 5.0


class Progress:
    """Show progress: one changing line on a terminal, otherwise a line from time to time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._terminal = sys.stderr.isatty()
        self._said_at = 0.0

    def __call__(self, text: str) -> None:
        if self._terminal:
            print(f"\r\033[K{self._name} {text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self._said_at > PROGRESS_SECONDS:
            self._said_at = time.monotonic()
            print(f"{self._name} {text}", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def parser(
    program: str, description: str, scenarios: Mapping[str, Scenario], servers: Sequence[str]
) -> argparse.ArgumentParser:
    shown = "\n".join(f"  {s.name:<15} × {s.times:<6,} {s.promise}" for s in scenarios.values())
    bugs = "\n".join(f"  {name:<22} {(bug.__doc__ or '').strip()}" for name, bug in BUGS.items())
    made = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=f"{description}\n\nscenarios (all, unless some are named):\n{shown}\n",
        epilog=EPILOG.format(program=program, first=next(iter(scenarios)), bugs=bugs),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("scenarios", nargs="*", metavar="scenario", help="one of those above")
    made.add_argument("--times", type=int, help="repetitions of each fault, instead of the scenario's own number")
    made.add_argument("--seed", type=int, help="seed of the timers and the faults [random]")
    if servers:
        said = f"the database that they share [{servers[0]}]"
        made.add_argument("--server", choices=servers, default=servers[0], help=said)
    made.add_argument("--instances", type=int, default=3, help="instances on the database [3]")
    made.add_argument("--rate", type=float, help="timers per second [300; Cassandra: 20]")
    made.add_argument("--noise", type=float, help="seconds of lateness to tolerate on a busy machine [0; brief: 6]")
    made.add_argument("--brief", action="store_true", help="few repetitions, less load, generous bounds")
    made.add_argument("--bug", choices=BUGS, help="plant a bug in every instance")
    return made


def options_of(given: argparse.Namespace, scenario: Scenario) -> Options:
    changes: dict[str, float] = dict(BRIEF) if given.brief else {}
    if given.bug:
        changes["patience_seconds"] = BUGGY_PATIENCE_SECONDS
    if getattr(given, "server", "") == "cassandra":
        changes["rate"] = CASSANDRA_RATE
    if given.rate is not None:
        changes["rate"] = given.rate
    if given.noise is not None:
        changes["noise_seconds"] = given.noise
    return Options(
        times=given.times or (scenario.times_brief if given.brief else scenario.times),
        seed=random.SystemRandom().randrange(2**32) if given.seed is None else given.seed,
        server=getattr(given, "server", ""),
        instances=given.instances,
        bug=given.bug,
        say=Progress(scenario.name),
        **changes,
    )


def main(program: str, description: str, scenarios: Mapping[str, Scenario], servers: Sequence[str] = ()) -> int:
    made = parser(program, description, scenarios, servers)
    given = made.parse_args()
    server = getattr(given, "server", "")
    suitable = [name for name, scenario in scenarios.items() if scenario.suits(server)]
    for name in given.scenarios:
        if name not in suitable:
            on = f" on {server}" if name in scenarios else ""
            made.error(f"unknown scenario {name!r}{on}: choose from {', '.join(suitable)}")
    if given.instances < 2 or (given.times is not None and given.times < 1):
        made.error("it takes at least two instances, and one repetition")
    signal.signal(signal.SIGTERM, _end)
    results = []
    for name in given.scenarios or suitable:
        options = options_of(given, scenarios[name])
        on = f" on {options.server}" if options.server else ""
        print(f"{name}{on}: {scenarios[name].promise}; × {options.times:,}, seed {options.seed}", flush=True)
        result = run(scenarios[name], options)
        if isinstance(options.say, Progress):
            options.say.end()
        results.append(result)
        print(details(result), flush=True)
    print(f"\n{table(results)}")
    violations = sum(len(result.violations) for result in results)
    print(f"\n{violations:,} violations on {os.cpu_count()} cores")
    return 1 if violations else 0


def _end(*_: object) -> NoReturn:
    """Raise KeyboardInterrupt on SIGTERM, so that all started processes are stopped."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main("tests.chaos", DESCRIPTION, SCENARIOS | NODE_SCENARIOS, list(DATABASES)))
