"""A short run of the crash test, and tests of its checker."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e import crash
from tests.e2e.crash import Entry, Ledger, judge
from tests.servers import Received


def test_nothing_is_lost_early_or_twice_when_the_service_is_killed(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    assert crash.run(kills=6, seed=seed, gap=(0.7, 1.7), directory=tmp_path) == []


def got(number: int, at_ms: float, delivery: str = "d") -> Received:
    headers = {"webhook-id": delivery, "duetime-timer": "default/x", "duetime-attempt": "1"}
    return Received(int(at_ms * 1_000_000), "POST", "/", headers, b"", str(number).encode())


@pytest.mark.parametrize(
    ("entry", "received", "says"),
    [
        (Entry(0, 1000, "x"), [got(0, 1000)], None),
        (Entry(0, 1000, "x"), [got(0, 1000), got(0, 3000)], None),  # a kill at 2000
        (Entry(0, 1000), [], None),
        (Entry(0, 1000), [got(0, 1001)], None),
        (Entry(0, 1000, "x", cancel_asked=True), [], None),
        (Entry(0, 1000, "x", cancel_asked=True), [got(0, 1001)], None),
        (Entry(0, 1000, "x", canceled=True, cancel_asked=True), [], None),
        (Entry(0, 1000, "x"), [], "lost"),
        (Entry(0, 1000, "x"), [got(0, 999.999)], "early"),
        (Entry(0, 1000), [got(0, 999)], "early"),
        (Entry(0, 1000, "x", canceled=True, cancel_asked=True), [got(0, 1001)], "canceled"),
        (Entry(0, 1000, "x"), [got(0, 1000), got(0, 1500)], "twice with no kill"),
        (Entry(0, 1000, "x"), [got(0, 1000), got(0, 3000), got(0, 3001)], "twice with no kill"),
        (Entry(0, 1000, "x"), [got(0, 1000, "a"), got(0, 3000, "b")], "different delivery ids"),
        (Entry(0, 1000, "x", completed_ns=1_500_000_000), [got(0, 1000), got(0, 3000)], "seen completed"),
        (Entry(0, 1000, "y"), [got(0, 1000)], "another name"),
    ],
)
def test_the_checker_finds_each_violation(entry: Entry, received: list[Received], says: str | None) -> None:
    found = judge(Ledger(entries=[entry], kills_ns=[2_000_000_000]), received)
    assert len(found) == (says is not None)
    assert says is None or says in found[0]
