"""The command: upgrades and rolls back for a while, and reports the results."""

from __future__ import annotations

import argparse
import sys

from tests.postgres import Postgres
from tests.upgrade.run import Options, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="number of upgrades and rollbacks [3]")
    parser.add_argument("--rate", type=float, default=100.0, help="timers per second [100]")
    parser.add_argument("--phase", type=float, default=15.0, help="seconds between two switches [15]")
    parser.add_argument("--seed", type=int, default=1, help="seed of the load [1]")
    given = parser.parse_args()
    options = Options(rate=given.rate, phase_seconds=given.phase, rounds=given.rounds, seed=given.seed)
    failed = 0
    for version in (15, 18):
        with Postgres(version) as postgres:
            print(f"PostgreSQL {version}")
            load = run(options, postgres)
        violations = load.violations()
        canceled = sum(timer.canceled_at is not None for timer in load.timers.values())
        received = sum(len(times) for got in load.got.values() for times in got.requests.values())
        print(
            f"{len(load.timers):,} timers, {canceled:,} canceled, {received:,} requests; answers {dict(load.answers)}"
        )
        for violation in violations[:20]:
            print(f"VIOLATION {violation}")
        print(f"{len(violations):,} violations")
        failed += len(violations)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
