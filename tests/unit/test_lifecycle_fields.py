"""Every transition of a timer, field by field: what it changes, and that it changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import asdict
from msgspec.structs import replace as as_if

from duetime import lifecycle
from duetime.errors import TimerNotFinal, TimerNotPending
from duetime.instants import CreatedAt, DeadlineAt, ExecuteAt, FireAt, Instant, StartedAt
from duetime.model import (
    ANSWER_CHARS_KEPT_MAX,
    ATTEMPTS_KEPT_MAX,
    Attempt,
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
SENT_AT, ENDED_AT = NOW + 20, NOW + 50
EARLIER = Attempt(1, NOW - 900, 4, OutcomeKind.ANSWERED, 500, "HTTP 500", "oops", 7)

EXECUTING = Timer(
    namespace="default",
    id="a",
    shard=1,
    definition=Definition(
        target=HttpTarget(url="http://example.com/"),
        retry=RetryPolicy(max_retries=2, initial_interval_ms=1_000, jitter=False),
        timeout_ms=2_000,
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
    executed_at=None,
    deadline_at=DeadlineAt(NOW + 7_000),
    version=4,
    attempts=(EARLIER,),
)
PENDING = as_if(EXECUTING, status=Status.PENDING, deadline_at=None, version=0)
FINAL = as_if(PENDING, status=Status.FAILED, executed_at=NOW - 10)
NEW_FIRING: dict[str, object] = {
    **{"firing": 21, "attempt": 0, "failures": 0, "lost": 0, "started_at": None, "last_error": None},
}


def changes(before: Timer, after: Timer) -> dict[str, Any]:
    """The new values of the fields that differ. Every transition increments the revision by one."""
    assert after.revision == before.revision + 1
    fields = asdict(as_if(after, revision=before.revision))
    return {name: value for name, value in fields.items() if value != getattr(before, name)}


def kept(outcome: Outcome, error: str | None, answer: str = "") -> tuple[Attempt, ...]:
    attempt = Attempt(3, SENT_AT, ENDED_AT - SENT_AT, outcome.kind, outcome.status, error, answer, 7)
    return (EARLIER, attempt)


def settled(timer: Timer, outcome: Outcome) -> Timer:
    return lifecycle.settle(timer, outcome, sent_at=SENT_AT, now=ENDED_AT, uniform=lambda low, high: high)


@pytest.mark.parametrize(("before", "lost"), [(PENDING, 1), (EXECUTING, 2)])
def test_begin_sets_the_attempt_its_deadline_and_version(before: Timer, lost: int) -> None:
    after = lifecycle.begin(before, now=ENDED_AT, version=9)
    assert changes(before, after) == {
        **({"status": Status.EXECUTING} if before is PENDING else {}),
        **({"lost": lost} if lost != before.lost else {}),
        **{"attempt": 4, "deadline_at": ENDED_AT + 2_000 + lifecycle.ATTEMPT_GRACE_MS},
        **{"version": 9, "updated_at": ENDED_AT},
    }
    first = lifecycle.begin(as_if(before, started_at=None), now=ENDED_AT, version=9)
    assert first.started_at == ENDED_AT


def test_success_completes_the_timer() -> None:
    outcome = Outcome(kind=OutcomeKind.ANSWERED, status=200, body=b'{"ok": true}')
    assert changes(EXECUTING, settled(EXECUTING, outcome)) == {
        **{"status": Status.COMPLETED, "last_error": None, "executed_at": ENDED_AT, "updated_at": ENDED_AT},
        **{"deadline_at": None, "version": 0, "attempts": kept(outcome, None, '{"ok": true}')},
    }


def test_failure_is_retried() -> None:
    outcome = Outcome(kind=OutcomeKind.ANSWERED, status=503, error="HTTP 503", retry_after_ms=5_000)
    assert changes(EXECUTING, settled(EXECUTING, outcome)) == {
        **{"status": Status.PENDING, "fire_at": ENDED_AT + 5_000, "failures": 2, "lost": 0, "last_error": "HTTP 503"},
        "started_at": NOW - 880,  # moved by the delay of the attempt
        **{"deadline_at": None, "version": 0, "updated_at": ENDED_AT, "attempts": kept(outcome, "HTTP 503")},
    }


def test_last_failure_fails_the_timer() -> None:
    before = as_if(EXECUTING, failures=2)
    outcome = Outcome(kind=OutcomeKind.TIMED_OUT)
    assert changes(before, settled(before, outcome)) == {
        **{"status": Status.FAILED, "failures": 3, "last_error": "timed_out", "executed_at": ENDED_AT},
        **{"deadline_at": None, "version": 0, "updated_at": ENDED_AT, "attempts": kept(outcome, "timed_out")},
    }


def test_final_failure_fails_the_timer() -> None:
    after = settled(EXECUTING, Outcome(kind=OutcomeKind.REFUSED, error="no", final=True))
    assert (after.status, after.failures, after.last_error) == (Status.FAILED, 2, "no")


@pytest.mark.parametrize(
    ("failures", "started_at", "status"),
    [
        *((1, ENDED_AT - 520, Status.PENDING), (1, ENDED_AT - 521, Status.FAILED)),  # the attempt was sent 20 ms late
        *((1, None, Status.PENDING), (0, ENDED_AT - 10_000, Status.PENDING)),
    ],
)
def test_retry_window_starts_with_the_first_failed_attempt(
    failures: int, started_at: int | None, status: Status
) -> None:
    policy = RetryPolicy(
        max_retries=9, initial_interval_ms=1_000, backoff_multiplier=1.0, max_duration_ms=1_500, jitter=False
    )
    definition = as_if(EXECUTING.definition, retry=policy)
    before = as_if(EXECUTING, definition=definition, failures=failures, started_at=started_at)
    assert settled(before, Outcome(kind=OutcomeKind.UNREACHABLE, error="refused")).status is status


@pytest.mark.parametrize(
    ("ahead_ms", "in_ms"), [(60_000, 60_000), (999, 1_000), (0, 1_000), (-86_400_000, 1_000), (1_001, 1_001)]
)
def test_response_reschedules_the_timer(ahead_ms: int, in_ms: int) -> None:
    body = b'{"ok": false, "nextExecuteAt": "%s"}' % format_time(ENDED_AT + ahead_ms).encode()
    outcome = Outcome(kind=OutcomeKind.ANSWERED, status=200, body=body)
    at = ENDED_AT + in_ms  # at least a second ahead, so that a time in the past can't cause a busy loop
    assert changes(EXECUTING, settled(EXECUTING, outcome)) == {
        **{"status": Status.PENDING, "execute_at": at, "fire_at": at, "deadline_at": None, "version": 0},
        **{"updated_at": ENDED_AT, "attempts": kept(outcome, None, body.decode()), **NEW_FIRING},
    }


def test_ack_of_the_broker_completes_the_timer() -> None:
    after = settled(EXECUTING, Outcome(kind=OutcomeKind.ANSWERED))
    assert (after.status, after.last_error) == (Status.COMPLETED, None)


@pytest.mark.parametrize(
    ("protocol", "status", "error", "expected"),
    [
        *(("status", 200, None, None), ("status", 299, None, None), ("status", 199, None, "HTTP 199")),
        *(("status", 300, None, "HTTP 300"), ("status", 300, "moved", "moved"), ("answer", 204, None, None)),
        *(("answer", 500, "HTTP 500: no", "HTTP 500: no"), ("answer", 404, None, "HTTP 404")),
    ],
)
def test_response_sets_the_last_error(protocol: str, status: int, error: str | None, expected: str | None) -> None:
    definition = as_if(EXECUTING.definition, protocol=ResponseProtocol(protocol))
    outcome = Outcome(kind=OutcomeKind.ANSWERED, status=status, error=error)
    assert settled(as_if(EXECUTING, definition=definition), outcome).last_error == expected


def test_number_and_size_of_kept_attempts_are_limited() -> None:
    body = ("é" * 10_000).encode()
    before = as_if(EXECUTING, attempts=(EARLIER,) * ATTEMPTS_KEPT_MAX)
    outcome = Outcome(kind=OutcomeKind.ANSWERED, status=500, body=body, error="a\0b" + "c" * 10_000)
    after = settled(before, outcome)
    assert len(after.attempts) == ATTEMPTS_KEPT_MAX and after.attempts[-1].number == 3
    assert after.attempts[-1].answer == "é" * ANSWER_CHARS_KEPT_MAX
    assert after.last_error == after.attempts[-1].error
    assert after.last_error == "a\ufffdb" + "c" * (lifecycle.ERROR_LENGTH_MAX - 3)


def test_duration_is_not_negative() -> None:
    after = lifecycle.settle(
        EXECUTING, Outcome(kind=OutcomeKind.ANSWERED), sent_at=ENDED_AT + 9, now=ENDED_AT, uniform=max
    )
    assert after.attempts[-1].duration_ms == 0


def test_give_up_fails_the_timer() -> None:
    assert changes(EXECUTING, lifecycle.give_up(EXECUTING, now=ENDED_AT)) == {
        **{"status": Status.FAILED, "attempt": 2, "executed_at": ENDED_AT, "updated_at": ENDED_AT},
        **{"deadline_at": None, "version": 0},
        "last_error": "the outcomes of 1 attempts in a row were never recorded",
    }


@pytest.mark.parametrize(
    ("attempt", "away", "more"),
    [
        *((3, False, {"started_at": NOW - 801}), (2, False, {"started_at": NOW - 801})),  # moved with ``fire_at``
        *((1, False, {"started_at": None}), (1, True, {"started_at": None, "lost": 0})),
        (3, True, {"started_at": NOW - 801, "lost": 0}),
    ],
)
def test_defer_puts_the_timer_back(attempt: int, away: bool, more: dict[str, object]) -> None:
    before = as_if(EXECUTING, attempt=attempt)
    assert changes(before, lifecycle.defer(before, fire_at=NOW + 99, now=ENDED_AT, away=away)) == {
        **{"status": Status.PENDING, "attempt": attempt - 1, "fire_at": NOW + 99, "updated_at": ENDED_AT},
        **{"deadline_at": None, "version": 0, **more},
    }


def test_amend_starts_a_new_firing() -> None:
    other = as_if(EXECUTING.definition, timeout_ms=9)
    moved = lifecycle.amend(PENDING, now=ENDED_AT, execute_at=NOW + 99, definition=other, correlation_id="else")
    assert changes(PENDING, moved) == {
        **{"execute_at": NOW + 99, "fire_at": NOW + 99, "definition": other, "correlation_id": "else"},
        **{"updated_at": ENDED_AT, **NEW_FIRING},
    }
    assert changes(PENDING, lifecycle.amend(PENDING, now=ENDED_AT)) == {
        **{"fire_at": PENDING.execute_at, "updated_at": ENDED_AT, **NEW_FIRING},
    }


def test_cancel_changes_only_the_status() -> None:
    after = lifecycle.cancel(PENDING, now=ENDED_AT)
    assert changes(PENDING, after) == {"status": Status.CANCELED, "updated_at": ENDED_AT}


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED, Status.CANCELED])
def test_replay_starts_a_new_firing(status: Status) -> None:
    before = as_if(FINAL, status=status)
    assert changes(before, lifecycle.replay(before, now=ENDED_AT)) == {
        **{"status": Status.PENDING, "fire_at": ENDED_AT, "executed_at": None, "updated_at": ENDED_AT},
        **NEW_FIRING,
    }


@pytest.mark.parametrize("before", [PENDING, EXECUTING])
def test_only_final_timers_can_be_replayed(before: Timer) -> None:
    with pytest.raises(TimerNotFinal):
        lifecycle.replay(before, now=NOW)


@pytest.mark.parametrize("before", [PENDING, FINAL])
def test_renew_keeps_the_time_of_creation(before: Timer) -> None:
    new = as_if(PENDING, revision=1, firing=1, created_at=NOW, attempt=0, last_error=None, attempts=())
    assert lifecycle.renew(before, new) == as_if(new, revision=21, firing=21, created_at=before.created_at)


def test_executing_timer_can_not_be_replaced() -> None:
    with pytest.raises(TimerNotPending, match="can't replace a timer with status 'executing'"):
        lifecycle.renew(EXECUTING, PENDING)


def test_command_that_moves_a_timer_starts_a_new_firing() -> None:
    before = as_if(PENDING, started_at=None, attempt=0, fingerprint="7@1000")
    assert changes(before, lifecycle.command(before, execute_at=NOW + 99, stamp="8@1001", now=ENDED_AT)) == {
        **{"execute_at": NOW + 99, "fire_at": NOW + 99, "fingerprint": "8@1001", "updated_at": ENDED_AT},
        **{name: value for name, value in NEW_FIRING.items() if name not in ("started_at", "attempt")},
    }
