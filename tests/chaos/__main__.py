"""The command: runs scenarios and says what came of them."""

from __future__ import annotations

import argparse
import random
import sys

from tests.chaos.scenarios import SCENARIOS
from tests.chaos.world import Options, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("scenarios", nargs="*")
    parser.add_argument("--times", type=int)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--hang", type=float, default=60)
    options = parser.parse_args()
    for name in options.scenarios or SCENARIOS:
        scenario = SCENARIOS[name]
        result = run(
            scenario, Options(times=options.times or scenario.times, seed=options.seed, hang_seconds=options.hang)
        )
        print(result.figures, result.verdict.found, result.answers, result.seconds)
        print(result.verdict.acknowledged, result.verdict.received, result.verdict.duplicates)
        for v in result.violations[:10]:
            print("VIOLATION", v)
    return 0


if __name__ == "__main__":
    sys.exit(main())
