"""A few of each fault, with less load and generous bounds; and planted bugs, each of which must be caught.

The scenarios spend most of their time waiting, so a few run side by side, each in a process of its own. They are
started with the first test and looked at one by one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.chaos.cluster import ROOT
from tests.chaos.scenarios import SCENARIOS
from tests.postgres import Missing, home

AT_ONCE = 2  # as many as there are cores: an instance that is starved past its lease is replaced, and fires twice
SECONDS_MAX = 240.0

CAUGHT = {
    "forward-cursor": ("lost", ["kill", "--times", "1"]),
    "answer-before-commit": ("lost", ["postgres", "--times", "1"]),
    "blind-retry": ("lost", ["cut-fenced", "--times", "12"]),
    "local-clock": ("early", ["jump", "--times", "1"]),
    "new-delivery-id": ("ids", ["kill", "--times", "2", "--rate", "120"]),
}
"""A bug → what it violates, and the scenario that catches it."""

Runs = dict[str, "Future[subprocess.CompletedProcess[str]]"]


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, ended by its id when it takes too long; it then ends what it has started."""
    command = [sys.executable, "-m", "tests.chaos", "--brief", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            said, _ = process.communicate(timeout=SECONDS_MAX)
        except BaseException:
            process.terminate()
            raise
    return subprocess.CompletedProcess(command, process.returncode, said)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[Runs]:
    """What the tests that were asked for will look at, by their names. The longest are started first."""
    try:
        home(18)
    except Missing as missing:
        pytest.skip(str(missing))
    wanted = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started: Runs = {}
        for name in ("jump", "hang", "kill", "stop", *SCENARIOS):
            if name in wanted and name not in started:
                started[name] = pool.submit(chaos, name)
        for bug, (_, arguments) in CAUGHT.items():
            if bug in wanted:
                started[bug] = pool.submit(chaos, *arguments, "--instances", "2", "--bug", bug)
        yield started
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_fault(name: str, runs: Runs) -> None:
    run = runs[name].result()
    print(run.stdout)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("name", CAUGHT)
def test_a_bug_is_caught(name: str, runs: Runs) -> None:
    run = runs[name].result()
    print(run.stdout)
    assert run.returncode == 1, run.stdout
    assert f"VIOLATION {CAUGHT[name][0]}" in run.stdout
