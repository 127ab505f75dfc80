"""Shows that the MySQL audit detects a broken fence: each bug is planted, and one interleaving exposes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from duetime.stores.mysql import statements as mysql_statements
from tests.clocks import ManualClock
from tests.contract.mysql_audit import MysqlAudit
from tests.contract.races import (
    Actors,
    Interleaving,
    Violated,
    begun_by_age_and_by_lane_at_once,
    begun_by_lane_while_a_claim_is_under_way,
    begun_while_a_claim_is_under_way,
    begun_while_ones_own_claim_is_under_way,
    claimed_while_a_begin_is_under_way,
    claimed_while_a_begin_of_lanes_is_under_way,
    claimed_while_a_record_is_under_way,
    failed_over_with_loss,
    gathered,
    put_while_the_same_timer_becomes_final,
    run_interleaving,
)


@pytest.fixture(params=["mariadb", "mysql9"])
def actors(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[Actors]:
    yield from gathered(request.param, MysqlAudit.of, request, clock)


def replaced(pattern: str, by: str) -> Callable[[str], str]:
    """Plant a bug in the text of a statement."""

    def plant(statement: str) -> str:
        wrong, times = re.subn(pattern, by, statement)
        assert times, "the statement has changed: adapt this planted bug"
        return wrong

    return plant


def in_one(index: int, bug: Callable[[str], str]) -> Callable[[list[str]], list[str]]:
    """Plant a bug in one statement of a packet."""
    return lambda packet: [bug(text) if place == index else text for place, text in enumerate(packet)]


# In SET, InnoDB locks the rows that it reads, whatever the lock clause.
ONLY_READ = replaced(
    r"^SET (@\w+) = (.*)\(SELECT COUNT\(\*\) (.*) (?:LOCK IN|FOR) .*\) = (\d+)$", r"SELECT \2COUNT(*) = \4 INTO \1 \3"
)
NO_OWNER = replaced(r"AND owner_id = \S+ ", "")
NO_REVISION = replaced(r"AND \(uuid, revision\) IN \(.*\) (?=FOR)", "")
NO_FENCE = replaced("@ok AND ", "")
NO_GATE = in_one(2, replaced("AND @go", ""))


def asked_before(packet: tuple[str, ...]) -> list[str]:
    insert, written, take_back, _, *rest = packet
    return [take_back, insert, written, *rest]


def not_asked(packet: tuple[str, ...]) -> list[str]:
    insert, written, _, _, *rest = packet
    return [insert, written, *rest]


@pytest.mark.parametrize(
    ("builder", "bug", "interleaving"),
    [
        ("fence", ONLY_READ, claimed_while_a_begin_is_under_way),
        ("fence", ONLY_READ, claimed_while_a_begin_of_lanes_is_under_way),
        ("fence", ONLY_READ, claimed_while_a_record_is_under_way),
        ("fence", NO_OWNER, failed_over_with_loss),
        ("go", NO_FENCE, begun_while_a_claim_is_under_way),
        ("go", NO_FENCE, begun_by_lane_while_a_claim_is_under_way),
        ("go", NO_FENCE, begun_while_ones_own_claim_is_under_way),
        ("go", NO_REVISION, begun_by_age_and_by_lane_at_once),
        ("go", ONLY_READ, begun_by_age_and_by_lane_at_once),
        ("begin", NO_GATE, begun_while_a_claim_is_under_way),
        ("put", not_asked, put_while_the_same_timer_becomes_final),
        ("put", asked_before, put_while_the_same_timer_becomes_final),
    ],
    ids=[
        *("begin without a lock", "begin by lane without a lock", "record without a lock"),
        "record fenced by version only",
        *("begin that ignores the fence", "begin by lane that ignores the fence", "begin with the old version"),
        *("begin that ignores the revision", "begin that does not lock the timers"),
        "begin whose writes ignore @go",
        *("put that does not check history", "put that checks history before the insert"),
    ],
)
async def test_audit_detects_a_planted_bug(
    actors: Actors,
    monkeypatch: pytest.MonkeyPatch,
    builder: str,
    bug: Callable[[Any], Any],
    interleaving: Interleaving,
) -> None:
    right = getattr(mysql_statements, builder)
    monkeypatch.setattr(mysql_statements, builder, lambda *values, **named: bug(right(*values, **named)))
    with pytest.raises(Violated):
        await run_interleaving(actors, interleaving)
