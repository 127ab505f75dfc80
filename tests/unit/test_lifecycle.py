"""Every transition of a timer: begin, settle, defer, give up, amend, cancel, replay, renew and command."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from msgspec.structs import replace as as_if

from duetime import lifecycle
from duetime.errors import TimerNotPending
from duetime.instants import CreatedAt, ExecuteAt, FireAt, Instant
from duetime.model import (
    ANSWER_CHARS_KEPT_MAX,
    ATTEMPTS_KEPT_MAX,
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

NOW = Instant(1_800_000_000_000)
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
        execute_at=ExecuteAt(NOW),
        fire_at=FireAt(NOW),
        created_at=CreatedAt(NOW - 10),
        updated_at=NOW - 10,
        revision=7,
        firing=7,
    )
    return as_if(timer, **changes)


def begun(**changes: Any) -> Timer:
    return lifecycle.begin(pending(**changes), now=NOW, version=3)


def settle(timer: Timer, outcome: Outcome, now: Instant = NOW + 5) -> Timer:
    return lifecycle.settle(timer, outcome, sent_at=NOW, now=now, uniform=lambda a, b: b)


def test_begin_counts_the_attempt_and_sets_its_deadline_and_version() -> None:
    timer = begun()
    assert (timer.status, timer.attempt, timer.lost, timer.version) == (Status.EXECUTING, 1, 0, 3)
    assert timer.deadline_at == NOW + 2_000 + lifecycle.ATTEMPT_GRACE_MS
    assert timer.revision == 8 and timer.started_at == NOW


def test_begin_of_an_executing_timer_counts_the_previous_attempt_as_lost() -> None:
    again = lifecycle.begin(begun(), now=NOW + 9_000, version=4)
    assert (again.attempt, again.lost, again.version, again.started_at) == (2, 1, 4, NOW)
    assert again.delivery_id == begun().delivery_id


def test_success_completes_the_timer() -> None:
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


def test_timer_fails_after_too_many_lost_attempts_in_a_row() -> None:
    timer = begun()
    for version in (4, 5, 6):
        timer = lifecycle.begin(timer, now=NOW, version=version)
    assert timer.lost == lifecycle.LOST_MAX
    failed = lifecycle.give_up(timer, now=NOW)
    assert failed.status is Status.FAILED and failed.attempt == 3
    assert "3 attempts in a row were never recorded" in str(failed.last_error)


def test_reschedule_by_the_receiver_starts_a_new_firing() -> None:
    at = NOW + 60_000
    body = b'{"ok": false, "nextExecuteAt": "%s"}' % format_time(at).encode()
    timer = begun(failures=1)
    after = settle(timer, Outcome(kind=OutcomeKind.ANSWERED, status=200, body=body))
    assert (after.status, after.execute_at, after.fire_at) == (Status.PENDING, at, at)
    assert (after.attempt, after.failures, after.lost, after.started_at) == (0, 0, 0, None)
    assert after.delivery_id != timer.delivery_id


@pytest.mark.parametrize(("in_ms", "fires_in_ms"), [(-99_000, 1_000), (0, 1_000), (1_000, 1_000), (1_001, 1_001)])
def test_reschedule_is_at_least_a_second_ahead(in_ms: int, fires_in_ms: int) -> None:
    body = b'{"ok": false, "nextExecuteAt": "%s"}' % format_time(NOW + in_ms).encode()
    after = settle(begun(), Outcome(kind=OutcomeKind.ANSWERED, status=200, body=body), now=NOW)
    assert (after.execute_at, after.fire_at) == (NOW + fires_in_ms, NOW + fires_in_ms)


def test_retry_after_delays_a_retry() -> None:
    busy = Outcome(kind=OutcomeKind.ANSWERED, status=503, error="HTTP 503", retry_after_ms=77_000)
    assert settle(begun(), busy, now=NOW).fire_at == NOW + 77_000


def test_timer_that_is_not_executing_has_no_version_and_no_deadline() -> None:
    timers = [
        *(settle(begun(), OK), settle(begun(), HTTP_500), settle(begun(failures=99), HTTP_500)),
        *(lifecycle.defer(begun(), fire_at=NOW, now=NOW), lifecycle.give_up(begun(lost=3), now=NOW)),
    ]
    assert [timer.status for timer in timers] == [
        *(Status.COMPLETED, Status.PENDING, Status.FAILED),
        *(Status.PENDING, Status.FAILED),
    ]
    assert {(timer.version, timer.deadline_at) for timer in timers} == {(0, None)}
    assert {timer.revision for timer in timers} == {9}


def test_latest_attempts_are_kept_with_their_outcomes() -> None:
    timer = pending(definition=as_if(pending().definition, retry=RetryPolicy(max_retries=99, jitter=False)))
    for n in range(ATTEMPTS_KEPT_MAX + 3):
        begun = lifecycle.begin(timer, now=timer.fire_at, version=3)
        sent_at = begun.fire_at + 4
        outcome = Outcome(kind=OutcomeKind.ANSWERED, status=500 + n, error="no", body=b"x" * 999)
        timer = lifecycle.settle(begun, outcome, sent_at=sent_at, now=sent_at + n, uniform=max)
    kept = timer.attempts
    assert [(a.number, a.status, a.duration_ms) for a in kept] == [(n + 1, 500 + n, n) for n in range(3, 13)]
    assert kept[-1].answer == "x" * ANSWER_CHARS_KEPT_MAX and kept[-1].sent_at == sent_at
    assert kept[-1].firing == timer.firing and kept[-1].error == "no"


def test_duration_is_not_negative_after_the_clock_was_set_back() -> None:
    after = lifecycle.settle(begun(), OK, sent_at=NOW, now=NOW - 50, uniform=max)
    assert after.attempts[0].duration_ms == 0


def test_replay_starts_a_new_firing_now() -> None:
    done = settle(begun(), OK)
    again = lifecycle.replay(done, now=NOW + 99)
    assert done.executed_at == NOW + 5
    assert (again.fire_at, again.execute_at, again.executed_at) == (NOW + 99, NOW, None)
    assert again.delivery_id != done.delivery_id and again.attempts == done.attempts


def test_replacement_starts_a_new_firing_and_keeps_the_time_of_creation() -> None:
    before, new = pending(created_at=NOW - 10, revision=7, firing=7), pending(created_at=NOW, revision=500, firing=500)
    after = lifecycle.renew(before, new)
    assert (after.created_at, after.revision, after.firing) == (NOW - 10, 8, 8)
    with pytest.raises(TimerNotPending):
        lifecycle.renew(begun(), new)


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
        ("answer", 200, b"", True),
        ("answer", 204, b"", True),
        ("answer", 299, b"", True),
        ("answer", 300, b"", False),
        ("answer", 500, b"", False),
        ("answer", 200, b" \r\n", True),
        ("answer", 202, b"\n", True),
        ("answer", 500, b" ", False),
        ("answer", 202, b"queued", False),
        ("answer", 500, b'{"ok": true}', False),
    ],
)
def test_response_completes_or_fails_the_attempt_by_its_protocol(
    protocol: str, status: int, body: bytes, completes: bool
) -> None:
    timer = begun()
    timer = as_if(timer, definition=as_if(timer.definition, protocol=ResponseProtocol(protocol)))
    after = settle(timer, Outcome(kind=OutcomeKind.ANSWERED, status=status, body=body))
    assert (after.status is Status.COMPLETED) is completes
    assert (after.last_error is None) is completes


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b"<html>"), (200, b"{}"), (200, b'{"ok": "yes"}'), (202, b"queued"), (201, b'{"ok": true}')],
)
def test_error_of_an_unexpected_body_says_what_was_expected(status: int, body: bytes) -> None:
    error = settle(begun(), Outcome(kind=OutcomeKind.ANSWERED, status=status, body=body)).last_error
    assert error is not None and len(error) < lifecycle.ERROR_LENGTH_MAX
    assert '{"ok": true}' in error and "empty body" in error and 'responseProtocol "status"' in error


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"OK", 'the response body "OK" is not JSON; expected'),
        ("é".encode() * 50, f'the response body "{"é" * 39}…" is not JSON; expected'),
        (b"\xff", 'the response body "\ufffd" is not JSON; expected'),
        (b"{}", "the response body has no field ok; expected 200"),
        (b"null", "the response body is null; expected 200"),
        (b"[]", "the response body is an array; expected 200"),
        (b'"ok"', "the response body is a string; expected 200"),
        (b"1.5", "the response body is a number; expected 200"),
        (b"true", "the response body is a boolean; expected 200"),
        (b'{"ok": "x"}', "in the response body, ok is a string, not true or false; expected 200"),
        (b'{"ok": {}}', "in the response body, ok is an object, not true or false; expected 200"),
        (b'{"ok": false, "retry": 1}', "in the response body, retry is a number, not true or false; expected 200"),
        (b'{"ok": false, "nextExecuteAt": 1}', "in the response body, nextExecuteAt is a number, not a string"),
        (b'{"ok": false, "nextExecuteAt": "x"}', "in the response body, nextExecuteAt must be a time like 20"),
        (b'{"ok": 1e999}', "the response body has a number that is too large; expected 200"),
        (
            b'{"ok": true, "a": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
            "the response body is nested too deeply; expected",
        ),
    ],
)
def test_error_of_an_unexpected_body_says_what_is_wrong_with_it(body: bytes, error: str) -> None:
    last_error = settle(begun(), Outcome(kind=OutcomeKind.ANSWERED, status=200, body=body)).last_error
    assert last_error is not None and last_error.startswith(error)


AT = b'"2999-01-01T00:00:00Z"'


@pytest.mark.parametrize(
    ("body", "key", "meant"),
    [
        (b'{"ok": false, "next_execute_at": %b}' % AT, "next_execute_at", "nextExecuteAt"),
        (b'{"ok": false, "NextExecuteAt": %b}' % AT, "NextExecuteAt", "nextExecuteAt"),
        (b'{"ok": false, "nextExecutionAt": %b}' % AT, "nextExecutionAt", "nextExecuteAt"),
        (b'{"ok": false, "executeAt": %b}' % AT, "executeAt", "nextExecuteAt"),
        (b'{"ok": false, "retry": false, "next-execute-at": %b}' % AT, "next-execute-at", "nextExecuteAt"),
        (b'{"ok": false, "n": 1e999, "Retry": false}', "Retry", "retry"),
        (b'{"ok": false, "error": "no", "retry_": false}', "retry_", "retry"),
        (b'{"OK": true}', "OK", "ok"),
    ],
)
def test_error_of_a_misspelled_field_in_the_response_suggests_the_known_one(body: bytes, key: str, meant: str) -> None:
    error = settle(begun(), Outcome(kind=OutcomeKind.ANSWERED, status=200, body=body)).last_error
    assert error is not None and error.endswith(f"; {key} is not a known field; did you mean {meant}?")


@pytest.mark.parametrize(
    "body",
    [
        b'{"ok": false}',
        b'{"ok": false, "entry": 1, "reply": 1, "error": "x", "token": 1, "status": "failed", "executed": true}',
        b'{"ok": false, "retry": true, "RETRY": false}',
        b'{"ok": false, "\xff": 1}',
        b'{"ok": false, "re\\ntry": 1}',
        b'{"ok": false, %b"next_execute_at": 1}' % b"".join(b'"%b": 1, ' % (b"x" * n) for n in range(1, 33)),
    ],
)
def test_error_of_a_response_without_similar_keys_suggests_nothing(body: bytes) -> None:
    error = settle(begun(), Outcome(kind=OutcomeKind.ANSWERED, status=200, body=body)).last_error
    assert error == 'the receiver responded {"ok": false}'


@hypothesis.settings(derandomize=True, deadline=None, database=None)
@hypothesis.given(
    st.binary(max_size=40) | st.text('{}[]":,okretry0e9ns \\u', max_size=60).map(lambda text: text.encode())
)
def test_any_response_body_is_read(body: bytes) -> None:
    settle(begun(), Outcome(kind=OutcomeKind.ANSWERED, status=200, body=body))


@pytest.mark.parametrize("time", [b'"tomorrow"', b"5"])
def test_error_of_a_wrong_time_to_reschedule_to_names_only_the_time(time: bytes) -> None:
    body = b'{"ok": false, "nextExecuteAt": %s}' % time
    error = settle(begun(), Outcome(kind=OutcomeKind.ANSWERED, status=200, body=body)).last_error
    assert error is not None and "nextExecuteAt" in error and "expected 200" not in error


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"ok": false, "retry": false}', Status.FAILED),
        (b'{"ok": false, "retry": true}', Status.PENDING),
        (b'{"ok": false, "retry": "no"}', Status.PENDING),
        (b'{"ok": true, "retry": false}', Status.COMPLETED),
        (b'{"ok": false, "retry": false, "nextExecuteAt": "2999-01-01T00:00:00Z"}', Status.PENDING),
    ],
)
def test_receiver_can_reject_retries(body: bytes, status: Status) -> None:
    after = settle(begun(), Outcome(kind=OutcomeKind.ANSWERED, status=200, body=body))
    assert (after.status, after.attempt > 0) == (status, b"nextExecuteAt" not in body)


@pytest.mark.parametrize("protocol", ResponseProtocol)
@pytest.mark.parametrize(
    ("http_status", "status"),
    [(404, Status.FAILED), (410, Status.FAILED), (400, Status.PENDING), (500, Status.PENDING), (None, Status.PENDING)],
)
def test_policy_gives_up_on_statuses(protocol: ResponseProtocol, http_status: int | None, status: Status) -> None:
    timer = begun()
    retry = as_if(timer.definition.retry, give_up_on=(404, 410))
    timer = as_if(timer, definition=as_if(timer.definition, retry=retry, protocol=protocol))
    kind = OutcomeKind.TIMED_OUT if http_status is None else OutcomeKind.ANSWERED
    after = settle(timer, Outcome(kind=kind, status=http_status))
    assert (after.status, after.attempt) == (status, 1)


@pytest.mark.parametrize("kind", [OutcomeKind.UNREACHABLE, OutcomeKind.TIMED_OUT, OutcomeKind.REFUSED])
def test_attempt_without_a_response_fails_with_its_reason(kind: OutcomeKind) -> None:
    after = settle(begun(), Outcome(kind=kind, error="because" * 1_000))
    assert after.status is Status.PENDING
    assert after.last_error is not None and len(after.last_error) == lifecycle.ERROR_LENGTH_MAX


def test_final_failure_is_not_retried() -> None:
    after = settle(begun(), Outcome(kind=OutcomeKind.REFUSED, error="closed", final=True))
    assert (after.status, after.last_error, after.attempt) == (Status.FAILED, "closed", 1)


def test_deferred_attempt_is_not_counted() -> None:
    timer = lifecycle.defer(begun(), fire_at=NOW + 1_000, now=NOW)
    assert (timer.status, timer.attempt, timer.fire_at, timer.execute_at) == (Status.PENDING, 0, NOW + 1_000, NOW)
    assert timer.deadline_at is None


# The time for which attempts are held back does not count towards the retry window.

HOUR = 3_600_000
WINDOW = as_if(pending().definition, retry=RetryPolicy(max_retries=99, max_duration_ms=HOUR, jitter=False))


def fail(timer: Timer, *, late_ms: int = 0, took_ms: int = 0) -> Timer:
    """Begin the timer when it is due, or later, and let the attempt fail."""
    at = timer.fire_at + late_ms
    begun = lifecycle.begin(timer, now=at, version=3)
    return lifecycle.settle(begun, HTTP_500, sent_at=at, now=at + took_ms, uniform=lambda a, b: b)


def attempts_within(window: Timer, **each: int) -> int:
    timer = fail(window, **each)
    while timer.status is Status.PENDING:
        timer = fail(timer, **each)
    return timer.attempt


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("deferrals", [1, 3])
def test_retry_window_starts_with_the_first_sent_attempt(away: bool, deferrals: int) -> None:
    timer = pending(definition=WINDOW)
    for n in range(deferrals):
        begun = lifecycle.begin(timer, now=NOW + n * HOUR, version=3)
        timer = lifecycle.defer(begun, fire_at=timer.fire_at, now=NOW + n * HOUR, away=away)
        assert (timer.attempt, timer.started_at) == (0, None)
    first = fail(timer, late_ms=5 * HOUR)
    assert (first.status, first.fire_at, first.started_at) == (Status.PENDING, NOW + 5 * HOUR + 30_000, NOW + 5 * HOUR)


def test_retry_window_starts_when_the_attempt_is_sent_and_not_when_it_is_begun() -> None:
    begun = lifecycle.begin(pending(definition=WINDOW), now=NOW, version=3)
    after = lifecycle.settle(begun, HTTP_500, sent_at=NOW + HOUR, now=NOW + HOUR + 9, uniform=lambda a, b: b)
    assert (after.status, after.fire_at, after.started_at) == (Status.PENDING, NOW + HOUR + 30_009, NOW + HOUR)


def test_time_for_which_retries_are_held_back_does_not_count() -> None:
    punctual = attempts_within(pending(definition=WINDOW))
    assert punctual > 5
    assert attempts_within(pending(definition=WINDOW), late_ms=2 * HOUR) == punctual
    assert attempts_within(pending(definition=WINDOW), late_ms=1) == punctual
    # The duration of attempts counts.
    assert attempts_within(pending(definition=WINDOW), took_ms=600_000) < punctual


@pytest.mark.parametrize("away", [False, True])
def test_deferral_of_a_retry_extends_the_retry_window(away: bool) -> None:
    timer = fail(pending(definition=WINDOW))
    opened = timer.started_at
    assert opened == NOW
    begun = lifecycle.begin(timer, now=timer.fire_at + 7, version=3)
    put_off = lifecycle.defer(begun, fire_at=timer.fire_at + 3 * HOUR, now=NOW, away=away)
    assert (put_off.attempt, put_off.failures, put_off.started_at) == (1, 1, NOW + 3 * HOUR)
    as_it_was = lifecycle.defer(begun, fire_at=timer.fire_at, now=NOW, away=away)
    assert as_it_was.started_at == NOW
    assert fail(put_off).status is Status.PENDING
    # An attempt sent early, by a clock that is behind, does not shorten the window.
    early = lifecycle.settle(begun, HTTP_500, sent_at=timer.fire_at - 40, now=timer.fire_at, uniform=lambda a, b: b)
    assert early.started_at == NOW


def test_lost_attempts_do_not_start_the_retry_window() -> None:
    lost = lifecycle.begin(
        lifecycle.begin(pending(definition=WINDOW), now=NOW, version=3), now=NOW + 2 * HOUR, version=4
    )
    assert lost.lost == 1
    after = lifecycle.settle(lost, HTTP_500, sent_at=NOW + 2 * HOUR, now=NOW + 2 * HOUR, uniform=lambda a, b: b)
    assert (after.status, after.started_at) == (Status.PENDING, NOW + 2 * HOUR)


@pytest.mark.parametrize("away", [False, True])
def test_deferral_keeps_the_lost_attempts_unless_the_carrier_was_unavailable(away: bool) -> None:
    lost = lifecycle.begin(begun(lost=1), now=NOW, version=4)
    after = lifecycle.defer(lost, fire_at=NOW, now=NOW, away=away)
    assert (after.lost, after.attempt) == (0 if away else 2, 1)


def test_new_firing_has_no_lost_and_no_failed_attempts() -> None:
    troubled = as_if(begun(), attempt=5, failures=3, lost=2, last_error="HTTP 500", version=3)
    waiting = as_if(troubled, status=Status.PENDING)
    answer = Outcome(kind=OutcomeKind.ANSWERED, status=200, body=b'{"ok":false,"nextExecuteAt":"2990-01-01T00:00:00Z"}')
    firings = [
        settle(troubled, answer),
        lifecycle.amend(waiting, now=NOW, execute_at=NOW + 9),
        lifecycle.replay(as_if(troubled, status=Status.FAILED), now=NOW + 9),
        lifecycle.replay(lifecycle.give_up(as_if(troubled, lost=3), now=NOW), now=NOW + 9),
    ]
    for timer in firings:
        assert (timer.attempt, timer.failures, timer.lost, timer.started_at, timer.last_error) == (0, 0, 0, None, None)
        assert timer.firing == timer.revision != troubled.firing
        assert (timer.status, timer.deadline_at is None or timer is firings[1]) == (Status.PENDING, True)


def test_amend_moves_a_pending_timer_and_starts_a_new_firing() -> None:
    retried = settle(begun(), HTTP_500)
    moved = lifecycle.amend(retried, now=NOW, execute_at=NOW + 99)
    assert (moved.execute_at, moved.fire_at, moved.attempt, moved.failures) == (NOW + 99, NOW + 99, 0, 0)
    assert moved.delivery_id != retried.delivery_id


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.PENDING])
def test_only_pending_timers_can_be_changed(status: Status) -> None:
    timer = pending(status=status)
    with pytest.raises(TimerNotPending, match=f"can't update a timer with status '{status}'"):
        lifecycle.amend(timer, now=NOW)
    with pytest.raises(TimerNotPending, match=f"can't cancel a timer with status '{status}'"):
        lifecycle.cancel(timer, now=NOW)


def test_every_write_increments_the_revision() -> None:
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
        ("10@1000", "9@999", False),  # compared as numbers
        ("7@1000", "1@2000", True),  # a new stream starts at 1 again
        ("7@1000", "8@900", True),  # the clock was set back
        ("", "1@1", True),  # created by a version without stamps
    ],
)
def test_later_command_moves_a_pending_timer(before: str, stamp: str, moves: bool) -> None:
    timer = pending(fingerprint=before)
    after = lifecycle.command(timer, execute_at=NOW + 1, stamp=stamp, now=NOW)
    if not moves:
        assert after is timer
        return
    assert (after.execute_at, after.fire_at, after.fingerprint) == (NOW + 1, NOW + 1, stamp)
    assert (after.revision, after.firing) == (8, 8)
    same = lifecycle.command(timer, execute_at=NOW, stamp=stamp, now=NOW)
    assert same == as_if(timer, fingerprint=stamp, revision=8)


@pytest.mark.parametrize("away", [False, True])
def test_command_moves_a_timer_whose_attempt_was_never_sent(away: bool) -> None:
    timer = lifecycle.defer(begun(fingerprint="1@1"), fire_at=NOW, now=NOW, away=away)
    # Older versions kept the time of the begin when they deferred a timer.
    for waiting in (timer, as_if(timer, started_at=NOW - 99)):
        after = lifecycle.command(waiting, execute_at=NOW + HOUR, stamp="2@2", now=NOW)
        assert (after.execute_at, after.fire_at, after.fingerprint) == (NOW + HOUR, NOW + HOUR, "2@2")


def test_command_does_not_change_a_timer_whose_attempt_may_have_been_sent() -> None:
    retried = settle(begun(fingerprint="1@1"), HTTP_500)
    assert retried.status is Status.PENDING
    lost = lifecycle.defer(
        lifecycle.begin(begun(fingerprint="1@1"), now=NOW, version=4), fire_at=NOW, now=NOW, away=True
    )
    assert (lost.status, lost.attempt) == (Status.PENDING, 1)  # the lost attempt may have been sent
    for timer in (retried, lost, begun(fingerprint="1@1"), lifecycle.cancel(pending(), now=NOW), settle(begun(), OK)):
        assert lifecycle.command(timer, execute_at=NOW + 1, stamp="2@2", now=NOW) is timer


def test_command_moves_a_timer_of_another_api_and_keeps_its_fingerprint() -> None:
    timer = pending(fingerprint="0123456789abcdef")
    after = lifecycle.command(timer, execute_at=NOW + 1, stamp="2@2", now=NOW)
    assert (after.execute_at, after.fingerprint) == (NOW + 1, timer.fingerprint)
    assert lifecycle.command(timer, execute_at=NOW, stamp="2@2", now=NOW) is timer
