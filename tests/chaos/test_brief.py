"""A short run of each fault with less load and generous bounds, and planted bugs, each of which must be caught.

The scenarios spend most of their time waiting, so a few run concurrently, each in its own process. They start with the
first test, and each test waits for one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pytest

from tests.chaos.brief import Run, Runs, started
from tests.chaos.databases import CHECKS
from tests.chaos.scenarios import SCENARIOS
from tests.postgres import Missing
from tests.skips import skip

pytestmark = pytest.mark.alone

FAULTS = {name: [name] for name in ("jump", "hang", "kill", "stop", *SCENARIOS)} | {
    f"{name} on MariaDB": [name, "--server", "mariadb"] for name in ("kill", "restart")
}
"""The faults to run; the longest ones start first."""
CAUGHT = {
    "forward-cursor": ("lost", ["kill", "--times", "1"]),
    "answer-before-commit": ("lost", ["restart", "--times", "1"]),
    "blind-retry": ("lost", ["cut-fenced", "--times", "12"]),
    "local-clock": ("early", ["jump", "--times", "1"]),
    "new-delivery-id": ("ids", ["kill", "--times", "2", "--rate", "120"]),
    "ungated": (r"\d+ writes of stale owners", ["stop", "--server", "mariadb", "--rate", "120"]),
}
"""Each bug with the violation that it causes and the scenario that catches it."""


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """The runs that the selected tests need, by name."""
    wanted = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    arguments = FAULTS | {bug: [*each, "--instances", "2", "--bug", bug] for bug, (_, each) in CAUGHT.items()}
    with started("tests.chaos", {name: each for name, each in arguments.items() if name in wanted}) as runs:
        yield runs


def result(name: str, arguments: Sequence[str], runs: Runs) -> Run:
    try:
        CHECKS["mariadb" if "mariadb" in arguments else "postgres"]()
    except Missing as missing:
        skip(missing)
    run = runs[name].result()
    print(run.stdout)
    return run


@pytest.mark.parametrize("name", FAULTS)
def test_guarantees_hold_under_the_fault(name: str, runs: Runs) -> None:
    run = result(name, FAULTS[name], runs)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("name", CAUGHT)
def test_a_bug_is_caught(name: str, runs: Runs) -> None:
    violated, arguments = CAUGHT[name]
    run = result(name, arguments, runs)
    assert run.returncode == 1, run.stdout
    assert re.search(f"VIOLATION {violated}", run.stdout)
