"""Shows that the PostgreSQL audit detects a broken fence: each bug is planted, and one interleaving exposes it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from duetime.stores.postgres import statements as postgres_statements
from tests.clocks import ManualClock
from tests.contract.postgres_audit import PostgresAudit
from tests.contract.races import (
    Actors,
    Interleaving,
    Violated,
    begun_by_age_and_by_lane_at_once,
    claimed_while_a_begin_is_under_way,
    claimed_while_a_begin_of_lanes_is_under_way,
    claimed_while_a_record_is_under_way,
    failed_over_with_loss,
    failed_over_with_loss_and_begun_by_lane,
    gathered,
    put_while_the_same_timer_becomes_final,
    run_interleaving,
)


@pytest.fixture(params=["postgres15", "postgres18"])
def actors(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[Actors]:
    yield from gathered(request.param, PostgresAudit.of, request, clock)


LOCKED_FENCE = "ORDER BY shard FOR SHARE"
KEY_SHARE = "ORDER BY shard FOR KEY SHARE"
FENCED_BEGIN = "AND due.shard = ANY (ARRAY(SELECT shard FROM fence))"
SAME_REVISION = "timers.ctid = due.at AND timers.revision = due.revision"
SAME_TIMER = "timers.seq = due.seq"
OWNED_BEGIN = "owner_id = $1 AND version = ($2::bigint[])[shard + 1]"
OWNED_BEGIN_BUG = "$1::bytea IS NOT NULL AND version = ($2::bigint[])[shard + 1]"
OWNED_RECORD, OWNED_RECORD_BUG = "AND owner_id = $1\n", "AND $1::bytea IS NOT NULL\n"
ASKED_AFTER = "refuse_finished(array_agg(uuid))"
ASKED_BEFORE = "AS numbered\n"
ASKED_BEFORE_BUG = "AS numbered WHERE NOT EXISTS (SELECT FROM history WHERE history.uuid = numbered.uuid)\n"


@pytest.mark.parametrize(
    ("statement", "bugs", "interleaving"),
    [
        ("BEGIN", {LOCKED_FENCE: ""}, claimed_while_a_begin_is_under_way),
        ("BEGIN", {LOCKED_FENCE: KEY_SHARE}, claimed_while_a_begin_is_under_way),
        ("BEGIN_LANES", {LOCKED_FENCE: ""}, claimed_while_a_begin_of_lanes_is_under_way),
        ("BEGIN_LANES", {LOCKED_FENCE: KEY_SHARE}, claimed_while_a_begin_of_lanes_is_under_way),
        ("RECORD", {LOCKED_FENCE: ""}, claimed_while_a_record_is_under_way),
        ("RECORD", {LOCKED_FENCE: KEY_SHARE}, claimed_while_a_record_is_under_way),
        ("BEGIN", {FENCED_BEGIN: ""}, claimed_while_a_begin_is_under_way),
        ("BEGIN_LANES", {FENCED_BEGIN: ""}, claimed_while_a_begin_of_lanes_is_under_way),
        ("BEGIN_LANES", {SAME_REVISION: SAME_TIMER}, begun_by_age_and_by_lane_at_once),
        ("BEGIN", {OWNED_BEGIN: OWNED_BEGIN_BUG}, failed_over_with_loss),
        ("BEGIN_LANES", {OWNED_BEGIN: OWNED_BEGIN_BUG}, failed_over_with_loss_and_begun_by_lane),
        ("RECORD", {OWNED_RECORD: OWNED_RECORD_BUG}, failed_over_with_loss),
        ("PUT", {ASKED_AFTER: "1"}, put_while_the_same_timer_becomes_final),
        ("PUT", {ASKED_AFTER: "1", ASKED_BEFORE: ASKED_BEFORE_BUG}, put_while_the_same_timer_becomes_final),
    ],
    ids=[
        *("begin without a lock", "begin with too weak a lock"),
        *("begin by lane without a lock", "begin by lane with too weak a lock"),
        *("record without a lock", "record with too weak a lock"),
        *("begin that ignores the fence", "begin by lane that ignores the fence"),
        "begin by lane that ignores the revision",
        *("begin fenced by version only", "begin by lane fenced by version only", "record fenced by version only"),
        *("put that does not check history", "put that checks history with its own snapshot"),
    ],
)
async def test_audit_detects_a_planted_bug(
    actors: Actors,
    monkeypatch: pytest.MonkeyPatch,
    statement: str,
    bugs: dict[str, str],
    interleaving: Interleaving,
) -> None:
    text = getattr(postgres_statements, statement)
    for right, wrong in bugs.items():
        assert right in text, "the statement has changed: adapt this planted bug"
        text = text.replace(right, wrong)
    monkeypatch.setattr(postgres_statements, statement, text)
    with pytest.raises(Violated):
        await run_interleaving(actors, interleaving)
