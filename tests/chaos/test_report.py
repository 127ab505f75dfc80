from __future__ import annotations

import pytest

from tests.chaos.checker import Verdict
from tests.chaos.report import SHOWN_OF_A_KIND_MAX, details
from tests.chaos.world import Result


@pytest.mark.parametrize("first", ["moved", "twice"])
def test_a_rare_violation_is_shown_besides_many_of_another_kind(first: str) -> None:
    verdict = Verdict()
    for number in range(250):
        verdict.violated(first, number)
    verdict.violated("lost", "only one")
    result = Result("kill", 1, 7, 2.5, verdict, wrong=["4 writes of stale owners"])

    lines = details(result).splitlines()

    assert "VIOLATION lost: only one" in lines
    assert "VIOLATION 4 writes of stale owners" in lines
    assert sum(line.startswith(f"VIOLATION {first}") for line in lines) == SHOWN_OF_A_KIND_MAX
    assert f"… and {250 - SHOWN_OF_A_KIND_MAX} more of the kind {first!r}" in lines
