"""Every arrow of the state machine."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace as as_if

from duetime import lifecycle
from duetime.errors import TimerNotPending
from duetime.model import (
    Definition,
    HttpTarget,
    Outcome,
    OutcomeKind,
    ResponseProtocol,
    RetryPolicy,
    Status,
    Timer,
)
from duetime.timetext import format_time

NOW = 1_800_000_000_000
OK = Outcome(kind=OutcomeKind.ANSWERED, status=200, body=b'{"ok": true}')
HTTP_500 = Outcome(kind=OutcomeKind.ANSWERED, status=500, error="HTTP 500")


def pending(**changes: Any) -> Timer:
    definition = Definition(
        target=HttpTarget(url="http://example.com/"), retry=RetryPolicy(max_retries=2, jitter=False), timeout_ms=2_000
    )
    timer = Timer(
        namespace="default",
        id="a",
        shard=1,
        definition=definition,
        execute_at=NOW,
        fire_at=NOW,
        created_at=NOW - 10,
        updated_at=NOW - 10,
        revision=7,
        firing=7,
    )
    return as_if(timer, **changes)


def begun(**changes: Any) -> Timer:
    return lifecycle.begin(pending(**changes), now=NOW, version=3)


def settle(timer: Timer, outcome: Outcome, now: int = NOW + 5) -> Timer:
    return lifecycle.settle(timer, outcome, sent_at=NOW, now=now, uniform=lambda a, b: b)


def test_begin_counts_the_attempt_and_notes_its_deadline_and_version() -> None:
    timer = begun()
    assert (timer.status, timer.attempt, timer.lost, timer.version) == (Status.EXECUTING, 1, 0, 3)
    assert timer.deadline_at == NOW + 2_000 + lifecycle.ATTEMPT_GRACE_MS
    assert timer.revision == 8 and timer.started_at == NOW


def test_begin_of_an_executing_timer_counts_the_attempt_before_it_as_lost() -> None:
    again = lifecycle.begin(begun(), now=NOW + 9_000, version=4)
    assert (again.attempt, again.lost, again.version, again.started_at) == (2, 1, 4, NOW)
    assert again.delivery_id == begun().delivery_id


def test_success_completes() -> None:
    timer = settle(begun(), OK)
    assert (timer.status, timer.executed_at, timer.last_error, timer.deadline_at) == (
        Status.COMPLETED,
        NOW + 5,
        None,
        None,
    )


def test_failures_are_retried_with_the_same_delivery_id_until_the_policy_is_exhausted() -> None:
    timer = begun()
    ids = {timer.delivery_id}
    for failures in (1, 2):
        timer = settle(timer, HTTP_500)
        assert (timer.status, timer.failures, timer.last_error) == (Status.PENDING, failures, "HTTP 500")
        assert timer.fire_at > NOW and timer.execute_at == NOW
        timer = lifecycle.begin(timer, now=timer.fire_at, version=3)
        ids.add(timer.delivery_id)
    timer = settle(timer, HTTP_500)
    assert (timer.status, timer.attempt, timer.failures) == (Status.FAILED, 3, 3)
    assert timer.executed_at is not None and len(ids) == 1


def test_lost_attempts_do_not_count_against_the_retries() -> None:
    timer = lifecycle.begin(lifecycle.begin(begun(), now=NOW, version=4), now=NOW, version=5)
    timer = settle(timer, HTTP_500)
    assert (timer.status, timer.attempt, timer.failures, timer.lost) == (Status.PENDING, 3, 1, 0)


def test_a_timer_whose_outcomes_keep_vanishing_is_given_up_with_a_reason() -> None:
    timer = begun()
    for version in (4, 5, 6):
        timer = lifecycle.begin(timer, now=NOW, version=version)
    assert timer.lost == lifecycle.LOST_MAX
    failed = lifecycle.give_up(timer, now=NOW)
    assert failed.status is Status.FAILED and failed.attempt == 3
    assert "3 attempts in a row were never recorded" in str(failed.last_error)


def test_an_answer_can_reschedule_and_that_is_a_new_firing() -> None:
    at = NOW + 60_000
    body = b'{"ok": false, "nextExecuteAt": "%s"}' % format_time(at).encode()
    timer = begun(failures=1)
    after = settle(timer, Outcome(kind=OutcomeKind.ANSWERED, status=200, body=body))
    assert (after.status, after.execute_at, after.fire_at) == (Status.PENDING, at, at)
    assert (after.attempt, after.failures, after.lost, after.started_at) == (0, 0, 0, None)
    assert after.delivery_id != timer.delivery_id


@pytest.mark.parametrize(
    ("protocol", "status", "body", "completes"),
    [
        ("status", 204, b"", True),
        ("status", 299, b"whatever", True),
        ("status", 300, b"", False),
        ("status", 404, b"", False),
        ("answer", 200, b'{"ok": true}', True),
        ("answer", 200, b'{"ok": true, "more": [1]}', True),
        ("answer", 201, b'{"ok": true}', False),
        ("answer", 200, b'{"ok": false}', False),
        ("answer", 200, b'{"ok": false, "nextExecuteAt": "tomorrow"}', False),
        ("answer", 200, b'{"ok": "yes"}', False),
        ("answer", 200, b"OK", False),
        ("answer", 200, b"", False),
        ("answer", 500, b'{"ok": true}', False),
    ],
)
def test_what_an_answer_means(protocol: str, status: int, body: bytes, completes: bool) -> None:
    timer = begun()
    timer = as_if(timer, definition=as_if(timer.definition, protocol=ResponseProtocol(protocol)))
    after = settle(timer, Outcome(kind=OutcomeKind.ANSWERED, status=status, body=body))
    assert (after.status is Status.COMPLETED) is completes
    assert (after.last_error is None) is completes


@pytest.mark.parametrize("kind", [OutcomeKind.UNREACHABLE, OutcomeKind.TIMED_OUT, OutcomeKind.REFUSED])
def test_no_answer_is_a_failure_with_its_reason(kind: OutcomeKind) -> None:
    after = settle(begun(), Outcome(kind=kind, error="because" * 1_000))
    assert after.status is Status.PENDING
    assert after.last_error is not None and len(after.last_error) == lifecycle.ERROR_LENGTH_MAX


def test_a_deferred_attempt_is_not_spent() -> None:
    timer = lifecycle.defer(begun(), fire_at=NOW + 1_000, now=NOW)
    assert (timer.status, timer.attempt, timer.fire_at, timer.execute_at) == (Status.PENDING, 0, NOW + 1_000, NOW)
    assert timer.deadline_at is None


def test_amend_moves_a_pending_timer_and_starts_anew() -> None:
    retried = settle(begun(), HTTP_500)
    moved = lifecycle.amend(retried, now=NOW, execute_at=NOW + 99)
    assert (moved.execute_at, moved.fire_at, moved.attempt, moved.failures) == (NOW + 99, NOW + 99, 0, 0)
    assert moved.delivery_id != retried.delivery_id


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.PENDING])
def test_only_a_pending_timer_can_be_changed(status: Status) -> None:
    timer = pending(status=status)
    with pytest.raises(TimerNotPending, match=f"cannot update timer with status '{status}'"):
        lifecycle.amend(timer, now=NOW)
    with pytest.raises(TimerNotPending, match=f"cannot cancel timer with status '{status}'"):
        lifecycle.cancel(timer, now=NOW)


def test_every_write_moves_the_revision() -> None:
    timer = pending()
    for after in (
        lifecycle.amend(timer, now=NOW),
        lifecycle.cancel(timer, now=NOW),
        lifecycle.begin(timer, now=NOW, version=1),
    ):
        assert after.revision == timer.revision + 1


@pytest.mark.parametrize(
    ("before", "stamp", "moves"),
    [
        ("7@1000", "8@1001", True),
        ("7@1000", "7@1000", False),
        ("7@1000", "6@999", False),
        ("10@1000", "9@999", False),  # as numbers, not as texts
        ("7@1000", "1@2000", True),  # a new stream counts anew
        ("7@1000", "8@900", True),  # a clock that was put back
        ("", "1@1", True),  # made before commands left a stamp
    ],
)
def test_a_later_command_moves_a_pending_timer(before: str, stamp: str, moves: bool) -> None:
    timer = pending(fingerprint=before)
    after = lifecycle.command(timer, execute_at=NOW + 1, stamp=stamp, now=NOW)
    if not moves:
        assert after is timer
        return
    assert (after.execute_at, after.fire_at, after.fingerprint) == (NOW + 1, NOW + 1, stamp)
    assert (after.revision, after.firing) == (8, 8)
    same = lifecycle.command(timer, execute_at=NOW, stamp=stamp, now=NOW)
    assert same == as_if(timer, fingerprint=stamp, revision=8)


def test_a_command_leaves_alone_what_was_reached() -> None:
    retried = settle(begun(fingerprint="1@1"), HTTP_500)
    assert retried.status is Status.PENDING
    for timer in (retried, begun(fingerprint="1@1"), lifecycle.cancel(pending(), now=NOW), settle(begun(), OK)):
        assert lifecycle.command(timer, execute_at=NOW + 1, stamp="2@2", now=NOW) is timer


def test_a_command_moves_what_another_door_made_and_leaves_it_its_fingerprint() -> None:
    timer = pending(fingerprint="0123456789abcdef")
    after = lifecycle.command(timer, execute_at=NOW + 1, stamp="2@2", now=NOW)
    assert (after.execute_at, after.fingerprint) == (NOW + 1, timer.fingerprint)
    assert lifecycle.command(timer, execute_at=NOW, stamp="2@2", now=NOW) is timer
