"""One failover of each kind, with less load and generous bounds; and what is lost if commits do not wait for the
standby."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.brief import Runs, started
from tests.mysql import Mariadb
from tests.postgres import Missing, home
from tests.skips import skip

pytestmark = pytest.mark.alone

BRIEF = ("postgres-sync", "postgres-async", "mariadb-sync")
BUG = ("postgres-sync", "--bug", "asynchronous-commit")


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    try:
        home(18)
        Mariadb.check()
    except Missing as missing:
        skip(missing)
    with started("tests.failover", {name: [name] for name in BRIEF} | {"bug": BUG}) as runs:
        yield runs


@pytest.mark.parametrize("name", BRIEF)
def test_guarantees_hold_in_the_failover(name: str, runs: Runs) -> None:
    run = runs[name].result()
    print(run.stdout)
    assert run.returncode == 0, run.stdout


def test_a_commit_that_does_not_wait_for_the_standby_is_lost(runs: Runs) -> None:
    run = runs["bug"].result()
    print(run.stdout)
    assert run.returncode == 1, run.stdout
    assert "VIOLATION lost" in run.stdout
