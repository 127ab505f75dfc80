"""The brief form of each scenario: trouble does not delay, fail or lose the timers of a healthy client.

The bars compare two phases of the same service process and add the noise of the machine, measured in the same phase. A
shared machine can still stall for longer than that, so a scenario that misses a bar is run again. A service that
lacks isolation misses its bars every time.
"""

from __future__ import annotations

import os

import pytest

from tests.isolation.names import Unsupported
from tests.isolation.report import details, table
from tests.isolation.scenarios import SCENARIOS
from tests.isolation.world import Options, run

RUNS_MAX = 3
ON_SQLITE = [scenario.name for scenario in SCENARIOS.values() if scenario.size_brief is not None]
ON_POSTGRES = ["hang", "silent-many", "herd"]


@pytest.mark.parametrize(
    ("name", "store"), [(name, "sqlite") for name in ON_SQLITE] + [(name, "postgres") for name in ON_POSTGRES]
)
def test_healthy_timers_are_isolated(name: str, store: str, request: pytest.FixtureRequest) -> None:
    scenario = SCENARIOS[name]
    assert scenario.size_brief is not None
    postgres = request.getfixturevalue("postgres18") if store == "postgres" else None
    for _ in range(RUNS_MAX):
        try:
            result = run(scenario, scenario.size_brief, postgres, Options(brief=True))
        except Unsupported as reason:
            if os.environ.get("CI"):
                raise
            pytest.skip(str(reason))
        print(table([result]))
        if not result.missed:
            return
    pytest.fail(details(result))
