"""The SQL rules do the same as ``lifecycle``, field by field."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import msgspec
import pytest

from duetime import lifecycle
from duetime.instants import CreatedAt, DeadlineAt, ExecuteAt, FireAt, Instant, StartedAt
from duetime.model import Attempt, Definition, HttpTarget, Outcome, OutcomeKind, RetryPolicy, Status, Timer
from duetime.stores.sql import rules
from duetime.stores.sql.columns import FINAL, INITIAL, LIVE, MOVE, NEW, final_row, live_row, new_row

NOW = Instant(1_800_000_000_000)
ATTEMPT = Attempt(1, NOW - 900, 4, OutcomeKind.ANSWERED, 500, "HTTP 500", "oops", 7)
SUCCESS = Outcome(kind=OutcomeKind.ANSWERED, status=200, body=b'{"ok": true}')
FAILURE = Outcome(kind=OutcomeKind.UNREACHABLE, error="refused", final=True)

EXECUTING = Timer(
    namespace="default",
    id="a",
    shard=1,
    definition=Definition(
        target=HttpTarget(url="http://example.com/"), retry=RetryPolicy(max_retries=2), timeout_ms=2_000
    ),
    execute_at=ExecuteAt(NOW - 1_000),
    fire_at=FireAt(NOW),
    created_at=CreatedAt(NOW - 5_000),
    updated_at=NOW - 10,
    revision=20,
    firing=7,
    fingerprint="0123456789abcdef",
    correlation_id="order-17",
    status=Status.EXECUTING,
    attempt=3,
    failures=1,
    lost=1,
    last_error="HTTP 500",
    started_at=StartedAt(NOW - 900),
    deadline_at=DeadlineAt(NOW + 7_000),
    version=4,
    attempts=(ATTEMPT,),
)
"""A timer whose fields all differ from each other and from any value that a statement writes."""

Change = Callable[[Timer], Timer]


def begins(timer: Timer) -> Timer:
    return lifecycle.begin(timer, now=NOW + 50, version=9)


def settles(outcome: Outcome) -> Change:
    return lambda timer: lifecycle.settle(timer, outcome, sent_at=NOW + 20, now=NOW + 50, uniform=max)


def gives_up(timer: Timer) -> Timer:
    return lifecycle.give_up(timer, now=NOW + 50)


def check(before: Timer, change: Change, values: Mapping[str, str], bound: tuple[str, ...]) -> None:
    """``values`` are what a statement computes from the row, ``bound`` what it is given: together they must be all that
    the change changes, and the first what it changes it to."""
    after = change(before)
    row, becomes = (dict(zip(FINAL, final_row(timer), strict=True)) for timer in (before, after))
    changed = {name for name in FINAL if row[name] != becomes[name]}
    assert changed <= {*values, *bound}, f"no statement writes {changed - {*values, *bound}}"
    database = sqlite3.connect(":memory:")
    columns = ", ".join(f"? AS {name}" for name in FINAL)
    for name, expression in values.items():
        [(computed,)] = database.execute(f"SELECT {expression} FROM (SELECT {columns})", list(row.values()))
        assert computed == becomes[name], f"{name} becomes {becomes[name]!r}, not {computed!r}"
    database.close()


BEGUN = rules.begun(now=str(NOW + 50), version="9")
PENDING = msgspec.structs.replace(EXECUTING, status=Status.PENDING, deadline_at=None, version=0)


@pytest.mark.parametrize(("before", "started_at"), [*product([PENDING, EXECUTING], [None, NOW - 900])])
def test_begin_in_sql_matches_lifecycle(before: Timer, started_at: int | None) -> None:
    check(msgspec.structs.replace(before, started_at=started_at), begins, BEGUN, ())


@pytest.mark.parametrize("change", [settles(SUCCESS), settles(FAILURE), gives_up])
def test_end_in_sql_matches_lifecycle(change: Change) -> None:
    check(EXECUTING, change, rules.ended("revision"), rules.END)


def test_completion_in_sql_matches_lifecycle() -> None:
    check(EXECUTING, settles(SUCCESS), rules.completed("revision", str(NOW + 50)), rules.COMPLETE)


def test_a_put_writes_a_whole_timer() -> None:
    instants = ExecuteAt(NOW), FireAt(NOW), CreatedAt(NOW - 5), NOW - 5
    fresh = Timer("default", "a", 1, EXECUTING.definition, *instants, 20, 20, "f", "order-17")
    given = dict(zip(NEW, new_row(fresh), strict=True))
    written = dict(zip(LIVE, live_row(fresh), strict=True))
    database = sqlite3.connect(":memory:")
    columns = ", ".join(f"? AS {name}" for name in NEW)
    for name in LIVE:
        [(value,)] = database.execute(
            f"SELECT {given_or(name)} FROM (SELECT {columns})",
            list(given.values()),
        )
        assert value == written[name], name
    database.close()


def given_or(name: str) -> str:
    return name if name in NEW else INITIAL.get(name, "NULL")


def test_a_row_has_every_field_of_a_timer() -> None:
    made = {"uuid", "timeout_ms"}
    assert {*FINAL} - made == {*Timer.__struct_fields__}
    assert {*LIVE} == {*FINAL, "lane"}
    assert {*MOVE} < {*FINAL} and len(FINAL) == len({*FINAL})


@pytest.mark.parametrize("field", ["fingerprint", "correlation_id", "created_at", "firing", "failures", "last_error"])
def test_the_check_detects_an_extra_change_in_a_begin(field: str) -> None:
    value: Any = {"fingerprint": "x", "correlation_id": "x", "last_error": "x"}.get(field, 77)
    with pytest.raises(AssertionError, match=field):
        check(PENDING, lambda timer: msgspec.structs.replace(begins(timer), **{field: value}), BEGUN, ())


@pytest.mark.parametrize("field", ["fire_at", "started_at", "deadline_at", "version"])
def test_the_check_detects_an_extra_change_in_an_end(field: str) -> None:
    def ends(timer: Timer) -> Timer:
        return msgspec.structs.replace(settles(FAILURE)(timer), **{field: 77})

    with pytest.raises(AssertionError, match=field):
        check(EXECUTING, ends, rules.ended("revision"), rules.END)


@pytest.mark.parametrize("field", [*BEGUN])
def test_the_check_detects_a_missing_change(field: str) -> None:
    less = {name: value for name, value in BEGUN.items() if name != field}
    before = EXECUTING if field == "lost" else msgspec.structs.replace(PENDING, started_at=None)
    with pytest.raises(AssertionError, match=field):
        check(before, begins, less, ())
