"""Every arrow of the state machine, each as a pure function from a timer to the timer after it.

    pending → executing          begin
    executing → completed        settle
    executing → failed           settle, when the policy is exhausted; give_up, when outcomes keep getting lost
    executing → pending          settle, for a retry or a reschedule; defer, when no attempt was made after all
    pending → canceled           cancel
    pending → pending            amend; command, when a broker's command is about a timer that is there
    pending or final → pending   renew, when a new timer takes the place of an old one
    final → pending              replay

Stores write what these return, conditionally on the revision that they started from.
"""

from __future__ import annotations

import msgspec

from duetime.errors import InvalidInput, TimerNotFinal, TimerNotPending
from duetime.model import (
    ANSWER_CHARS_KEPT_MAX,
    ATTEMPTS_KEPT_MAX,
    Attempt,
    Definition,
    Outcome,
    OutcomeKind,
    ResponseProtocol,
    Status,
    Timer,
    replace,
)
from duetime.retry import Uniform, retry_at
from duetime.timetext import parse_time

LOST_MAX = 3
"""Attempts in a row whose outcome was never recorded, after which a timer is failed instead of fired again."""

ATTEMPT_GRACE_MS = 5_000
"""What an attempt may take beyond its own timeout: waiting for a free connection before, recording after."""

ERROR_LENGTH_MAX = 500

RESCHEDULE_MS_MIN = 1_000
"""How soon an answer can have its timer fire again: one that always names the past must not make a hot loop."""


class _Answer(msgspec.Struct):
    ok: bool
    next_execute_at: str | None = msgspec.field(default=None, name="nextExecuteAt")


_answer_decoder = msgspec.json.Decoder(_Answer)


def begin(timer: Timer, *, now: int, version: int) -> Timer:
    """Count an attempt before a byte leaves. One that finds the timer executing follows an attempt that was lost."""
    return replace(
        timer,
        status=Status.EXECUTING,
        attempt=timer.attempt + 1,
        lost=timer.lost + (timer.status is Status.EXECUTING),
        started_at=now if timer.started_at is None else timer.started_at,
        deadline_at=now + timer.definition.timeout_ms + ATTEMPT_GRACE_MS,
        version=version,
        updated_at=now,
    )


def settle(timer: Timer, outcome: Outcome, *, sent_at: int, now: int, uniform: Uniform) -> Timer:
    """What the outcome of an attempt that was sent at ``sent_at`` makes of the timer."""
    error, next_execute_at = _read(timer.definition.protocol, outcome)
    error = None if error is None else error[:ERROR_LENGTH_MAX].replace("\0", "\ufffd")  # not every store holds a NUL
    attempts = (*timer.attempts, _kept(timer, outcome, error, sent_at, now))[-ATTEMPTS_KEPT_MAX:]
    if next_execute_at is not None:
        next_execute_at = max(next_execute_at, now + RESCHEDULE_MS_MIN)
        return _pending(
            timer,
            now,
            execute_at=next_execute_at,
            fire_at=next_execute_at,
            attempts=attempts,
            **_new_firing(timer),
        )
    if error is None:
        return _final(timer, Status.COMPLETED, now, None, timer.attempt, timer.failures, attempts)
    failures = timer.failures + 1
    started_at = _window_start(timer, sent_at)
    fire_at = retry_at(
        timer.definition.retry,
        failures=failures,
        started_at=started_at,
        now=now,
        retry_after_ms=outcome.retry_after_ms,
        uniform=uniform,
    )
    if fire_at is None or outcome.final:
        return _final(timer, Status.FAILED, now, error, timer.attempt, failures, attempts)
    return _pending(
        timer,
        now,
        fire_at=fire_at,
        failures=failures,
        lost=0,
        last_error=error,
        started_at=started_at,
        attempts=attempts,
    )


def give_up(timer: Timer, *, now: int) -> Timer:
    """Fail a timer whose attempts keep vanishing: something about it may be what takes instances down."""
    error = f"the outcomes of {timer.lost} attempts in a row were never recorded"
    return _final(timer, Status.FAILED, now, error, timer.attempt - 1, timer.failures, timer.attempts)


def defer(timer: Timer, *, fire_at: int, now: int, away: bool = False) -> Timer:
    """Put a begun timer back unspent, because nothing was sent. After a first attempt it is as if never begun.

    The retry window moves along with ``fire_at``. When the carrier is ``away`` as a whole, the attempts that were lost
    before are no sign against the timer.
    """
    started_at = timer.started_at
    if started_at is not None:
        started_at = None if timer.attempt == 1 else started_at + max(0, fire_at - timer.fire_at)
    lost = 0 if away else timer.lost
    return _pending(timer, now, fire_at=fire_at, attempt=timer.attempt - 1, lost=lost, started_at=started_at)


def amend(
    timer: Timer, *, now: int, execute_at: int | None = None, definition: Definition | None = None, **changes: object
) -> Timer:
    """The client's change of a pending timer: it starts a new firing, with all its attempts ahead of it."""
    if timer.status is not Status.PENDING:
        raise TimerNotPending("update", timer.status)
    at = timer.execute_at if execute_at is None else execute_at
    return replace(
        timer,
        definition=timer.definition if definition is None else definition,
        execute_at=at,
        fire_at=at,
        updated_at=now,
        **_new_firing(timer),
        **changes,
    )


def command(timer: Timer, *, execute_at: int, stamp: str, now: int) -> Timer:
    """A broker's command about a timer that is there moves it until it is first fired, unless a later command has been
    here: one whose taker died is given out again, and may come behind others."""
    before = timer.fingerprint
    if timer.status is not Status.PENDING or timer.attempt:
        return timer
    if _is_stamp(before) and not is_later(stamp, before):
        return timer
    # What another door made keeps the fingerprint of that request, by which a repeat of it is known.
    after = stamp if _is_stamp(before) or not before else before
    if execute_at != timer.execute_at:
        return amend(timer, now=now, execute_at=execute_at, fingerprint=after)
    return timer if after == before else replace(timer, fingerprint=after)


def stamp_of(number: int, taken_at_ns: int) -> str:
    """What a timer keeps of a command, as its fingerprint: its number in the stream, and when the stream took it."""
    return f"{number}@{taken_at_ns}"


def _is_stamp(fingerprint: str) -> bool:
    return "@" in fingerprint


def is_later(stamp: str, than: str) -> bool:
    """Whether a command is a later one: by its number, or by its time where the numbers of a new stream begin anew. In
    doubt, as when a clock was put back, it is: one that is taken twice does less harm than one that is left out."""
    return any(int(one) > int(other) for one, other in zip(stamp.split("@"), than.split("@"), strict=True))


def renew(before: Timer, new: Timer) -> Timer:
    """A new timer in the place of one that is not executing: the same identity, everything else its own."""
    if before.status is Status.EXECUTING:
        raise TimerNotPending("replace", before.status)
    revision = before.revision + 1
    return msgspec.structs.replace(new, revision=revision, firing=revision, created_at=before.created_at)


def replay(timer: Timer, *, now: int) -> Timer:
    """Fire a finished timer once more, now: a new firing of the same promise."""
    if not timer.status.final:
        raise TimerNotFinal(timer.status)
    return _pending(timer, now, fire_at=now, executed_at=None, **_new_firing(timer))


def cancel(timer: Timer, *, now: int) -> Timer:
    if timer.status is not Status.PENDING:
        raise TimerNotPending("cancel", timer.status)
    return replace(timer, status=Status.CANCELED, updated_at=now)


def _new_firing(timer: Timer) -> dict[str, object]:
    """What starts anew with a firing: its delivery id, and all its attempts are ahead of it."""
    return {
        "firing": timer.revision + 1,
        "attempt": 0,
        "failures": 0,
        "lost": 0,
        "started_at": None,
        "last_error": None,
    }


def _window_start(timer: Timer, sent_at: int) -> int:
    """When the retry window of a failed attempt opened: with the first attempt that failed, and as much later as the
    attempts after it were sent late. So what holds an attempt back, here or in the store, spends none of it."""
    if not timer.failures or timer.started_at is None:
        return sent_at
    return timer.started_at + max(0, sent_at - timer.fire_at)


def _pending(timer: Timer, now: int, **changes: object) -> Timer:
    return replace(timer, status=Status.PENDING, deadline_at=None, version=0, updated_at=now, **changes)


def _final(
    timer: Timer,
    status: Status,
    now: int,
    error: str | None,
    attempt: int,
    failures: int,
    attempts: tuple[Attempt, ...],
) -> Timer:
    return msgspec.structs.replace(  # as ``replace`` does; spelled out, because what is passed on in a dict costs twice
        timer,
        revision=timer.revision + 1,
        status=status,
        attempt=attempt,
        failures=failures,
        last_error=error,
        executed_at=now,
        deadline_at=None,
        version=0,
        attempts=attempts,
        updated_at=now,
    )


def _kept(timer: Timer, outcome: Outcome, error: str | None, sent_at: int, now: int) -> Attempt:
    """What is kept of an attempt: enough to see why it went as it did."""
    answer = outcome.body[: 4 * ANSWER_CHARS_KEPT_MAX].decode("utf-8", "replace").replace("\0", "\ufffd")
    return Attempt(
        timer.attempt,
        sent_at,
        max(0, now - sent_at),
        outcome.kind,
        outcome.status,
        error,
        answer[:ANSWER_CHARS_KEPT_MAX],
        timer.firing,
    )


def _read(protocol: ResponseProtocol, outcome: Outcome) -> tuple[str | None, int | None]:
    """The error of an outcome, or the instant that a rescheduling answer names; neither means success."""
    if outcome.kind is not OutcomeKind.ANSWERED:
        return outcome.error or str(outcome.kind), None
    if outcome.status is None:
        return None, None  # A broker has no more to say than that it has the message.
    if protocol is ResponseProtocol.STATUS:
        return (None if 200 <= outcome.status < 300 else outcome.error or f"HTTP {outcome.status}"), None
    if outcome.status != 200:
        return outcome.error or f"HTTP {outcome.status}", None
    try:
        answer = _answer_decoder.decode(outcome.body)
        if answer.ok:
            return None, None
        if answer.next_execute_at is not None:
            return None, parse_time(answer.next_execute_at, "nextExecuteAt")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidInput) as error:
        return f'the answer is not {{"ok": …}}: {error}', None
    return 'the receiver answered {"ok": false}', None
