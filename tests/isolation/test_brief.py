"""The brief form of each scenario: trouble does not delay, fail or lose the timers of a healthy client.

The bars compare two phases of the same service process and add the noise of the machine, measured in the same phase. A
shared machine can still stall for longer than that, so a scenario that misses a bar is run again. A service that
lacks isolation misses its bars every time. A few scenarios run concurrently, because they spend most of their time
waiting.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.brief import Runs, run, started
from tests.isolation.scenarios import SCENARIOS
from tests.postgres import Missing, home
from tests.skips import skip

pytestmark = pytest.mark.alone

RUNS_MAX = 3
ON_SQLITE = [scenario.name for scenario in SCENARIOS.values() if scenario.size_brief is not None]
ON_POSTGRES = ["hang", "silent-many", "herd"]
ARGUMENTS = {f"{name}-sqlite": [name] for name in ON_SQLITE} | {
    f"{name}-postgres": [name, "--store", "postgres"] for name in ON_POSTGRES
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """The runs that the selected tests need, by name."""
    wanted = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    with started("tests.isolation", {name: each for name, each in ARGUMENTS.items() if name in wanted}) as runs:
        yield runs


@pytest.mark.parametrize("name", ARGUMENTS)
def test_healthy_timers_are_isolated(name: str, runs: Runs) -> None:
    if name.endswith("postgres"):
        try:
            home(18)
        except Missing as missing:
            skip(missing)
    result = runs[name].result()
    for _ in range(RUNS_MAX - 1):
        if result.returncode == 0:
            break
        result = run("tests.isolation", *ARGUMENTS[name])
    print(result.stdout)
    _, unsupported, reason = result.stdout.partition("skipped: ")
    if unsupported:
        skip(reason.splitlines()[0])
    assert result.returncode == 0, result.stdout
