"""The command: runs scenarios and says what came of them."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from typing import NoReturn

from tests.chaos.bugs import BUGS
from tests.chaos.report import details, table
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.world import Options, Scenario, run

DESCRIPTION = """\
Do something bad to a cluster under load, over and over, and hold what clients were promised against what the receiver
got. Three instances share one PostgreSQL, with leases of three seconds; clients create about 300 timers a second
through all of them, move some and cancel some. Everything runs on loopback and is ended in the end.

scenarios (all, unless some are named):
{scenarios}
"""
EPILOG = """\
examples:
  python -m tests.chaos                               all of it, as `make chaos`: about half an hour
  python -m tests.chaos kill --times 10               ten times kill -9
  python -m tests.chaos kill --times 10 --seed 4711   the same timers and the same faults again
  python -m tests.chaos --brief                       a few of each, as `make test`
  python -m tests.chaos postgres --times 1 --bug answer-before-commit   see a planted bug being caught

The exit code is 1 when something was violated. `lost`, `early` and the like are explained in tests/chaos/checker.py;
`duplicates` are requests that came again, `unexcused` those of them whose attempt was in flight at no fault.

bugs:
{bugs}
"""

BRIEF = {"rate": 40.0, "ahead_seconds_max": 3.0, "noise_seconds": 6.0, "hang_seconds": 7.0, "patience_seconds": 30.0}
BUGGY_PATIENCE_SECONDS = 12.0
"""What a planted bug has lost does not come, however long one waits."""
PROGRESS_SECONDS = 5.0


class Progress:
    """One line that changes on a terminal, and a line now and then elsewhere."""

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


def parser() -> argparse.ArgumentParser:
    scenarios = "\n".join(f"  {s.name:<11} × {s.times:<6,} {s.promise}" for s in SCENARIOS.values())
    bugs = "\n".join(f"  {name:<22} {(bug.__doc__ or '').strip()}" for name, bug in BUGS.items())
    made = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=DESCRIPTION.format(scenarios=scenarios),
        epilog=EPILOG.format(bugs=bugs),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("scenarios", nargs="*", metavar="scenario", help="one of those above")
    made.add_argument("--times", type=int, help="how often each fault is done, in place of the scenario's own number")
    made.add_argument("--seed", type=int, help="of the timers and the faults; a new one unless given")
    made.add_argument("--instances", type=int, default=3, help="how many share the database [3]")
    made.add_argument("--rate", type=float, help="timers per second [300]")
    made.add_argument("--noise", type=float, help="seconds of lateness to put down to a busy machine [0; brief: 6]")
    made.add_argument("--brief", action="store_true", help="few repetitions, less load, generous bounds")
    made.add_argument("--bug", choices=BUGS, help="plant a bug in every instance")
    return made


def options_of(given: argparse.Namespace, scenario: Scenario) -> Options:
    changes: dict[str, float] = dict(BRIEF) if given.brief else {}
    if given.bug:
        changes["patience_seconds"] = BUGGY_PATIENCE_SECONDS
    if given.rate is not None:
        changes["rate"] = given.rate
    if given.noise is not None:
        changes["noise_seconds"] = given.noise
    return Options(
        times=given.times or (scenario.times_brief if given.brief else scenario.times),
        seed=random.SystemRandom().randrange(2**32) if given.seed is None else given.seed,
        instances=given.instances,
        bug=given.bug,
        say=Progress(scenario.name),
        **changes,
    )


def main() -> int:
    made = parser()
    given = made.parse_args()
    for name in given.scenarios:
        if name not in SCENARIOS:
            made.error(f"there is no scenario {name!r}: choose from {', '.join(SCENARIOS)}")
    if given.instances < 2 or (given.times is not None and given.times < 1):
        made.error("it takes at least two instances, and one repetition")
    signal.signal(signal.SIGTERM, _end)
    results = []
    for name in given.scenarios or SCENARIOS:
        options = options_of(given, SCENARIOS[name])
        print(f"{name}: {SCENARIOS[name].promise}; × {options.times:,}, seed {options.seed}", flush=True)
        result = run(SCENARIOS[name], options)
        if isinstance(options.say, Progress):
            options.say.end()
        results.append(result)
        print(details(result), flush=True)
    print(f"\n{table(results)}")
    violations = sum(len(result.violations) for result in results)
    print(f"\n{violations:,} violations on {os.cpu_count()} cores")
    return 1 if violations else 0


def _end(*_: object) -> NoReturn:
    """As Ctrl-C does: whatever was started is ended on the way out."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
