"""The state machine of a timer: one pure function for each transition, from the timer before to the timer after.

    pending → executing          begin
    executing → completed        settle
    executing → failed           settle, when no retries are left; give_up, when outcomes keep getting lost
    executing → pending          settle, for a retry or a reschedule; defer, when nothing was sent
    pending → canceled           cancel
    pending → pending            amend; command, when a broker's command is for an existing timer
    pending or final → pending   renew, when a new timer replaces an existing one
    final → pending              replay

Stores write the result on condition that the row still has the revision that it is based on.
"""

from __future__ import annotations

import re
from difflib import get_close_matches

import msgspec

from duetime.errors import InvalidInput, TimerNotFinal, TimerNotPending
from duetime.instants import Instant
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
"""After this many attempts in a row without a recorded outcome, the timer fails instead of being fired again."""

ATTEMPT_GRACE_MS = 5_000
"""How much longer than its timeout an attempt may take: to wait for a free connection, and to record the outcome."""

ERROR_LENGTH_MAX = 500
BODY_CHARS_SHOWN_MAX = 40  # in an error

RESCHEDULE_MS_MIN = 1_000
"""The shortest delay of a reschedule: a receiver that always names a past time must not cause a hot loop."""


_EXPECTED = 'expected 200 with {"ok": true} or any 2xx with an empty body; responseProtocol "status" accepts any 2xx'


class _Answer(msgspec.Struct):
    ok: bool
    retry: bool = True
    next_execute_at: str | None = msgspec.field(default=None, name="nextExecuteAt")


_answer_decoder = msgspec.json.Decoder(_Answer)
_keys_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])

_ANSWER_FIELDS = {name.lower(): name for name in _Answer.__struct_encode_fields__}
_WRONG_TYPE = re.compile(r"Expected `[^`]*`, got `([^`]*)`(?: - at `\$\.(\w+)`)?").fullmatch
_NOUNS = {
    "null": "null",
    "bool": "a boolean",
    "int": "a number",
    "float": "a number",
    "str": "a string",
    "array": "an array",
    "object": "an object",
}
KEYS_COMPARED_MAX = 32
SIMILARITY_MIN = 0.81  # "executeAt" is similar to "nextExecuteAt", "entry" is not similar to "retry"
_PLAIN_KEY = re.compile("[A-Za-z_-]{1,32}").fullmatch


def begin(timer: Timer, *, now: Instant, version: int) -> Timer:
    """Count an attempt before anything is sent. If the timer is already executing, the previous attempt was lost."""
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


def settle(timer: Timer, outcome: Outcome, *, sent_at: Instant, now: Instant, uniform: Uniform) -> Timer:
    """The timer after the outcome of an attempt that was sent at ``sent_at``."""
    error, next_execute_at, final = _read(timer.definition.protocol, outcome)
    error = None if error is None else error[:ERROR_LENGTH_MAX].replace("\0", "\ufffd")  # not every store accepts a NUL
    attempts = (*timer.attempts, _kept(timer, outcome, error, sent_at=sent_at, now=now))[-ATTEMPTS_KEPT_MAX:]
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
    if fire_at is None or final or outcome.final or outcome.status in timer.definition.retry.give_up_on:
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


def give_up(timer: Timer, *, now: Instant) -> Timer:
    """Fail a timer whose outcomes keep getting lost: the timer itself may be crashing the instances."""
    error = f"the outcomes of {timer.lost} attempts in a row were never recorded"
    return _final(timer, Status.FAILED, now, error, timer.attempt - 1, timer.failures, timer.attempts)


def defer(timer: Timer, *, fire_at: Instant, now: Instant, away: bool = False) -> Timer:
    """Make a begun timer pending again without counting the attempt, because nothing was sent.

    The retry window moves along with ``fire_at``. If the whole broker is ``away``, earlier lost attempts don't count
    against the timer.
    """
    started_at = timer.started_at
    if started_at is not None:
        started_at = None if timer.attempt == 1 else started_at + max(0, fire_at - timer.fire_at)
    lost = 0 if away else timer.lost
    return _pending(timer, now, fire_at=fire_at, attempt=timer.attempt - 1, lost=lost, started_at=started_at)


def amend(
    timer: Timer,
    *,
    now: Instant,
    execute_at: Instant | None = None,
    definition: Definition | None = None,
    **changes: object,
) -> Timer:
    """A client's change of a pending timer: it starts a new firing, whose attempts count from zero."""
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


def command(timer: Timer, *, execute_at: Instant, stamp: str, now: Instant) -> Timer:
    """A broker's command moves an existing timer that was never fired, unless a later command already did: a command
    can be redelivered after later ones."""
    before = timer.fingerprint
    if timer.status is not Status.PENDING or timer.attempt:
        return timer
    if _is_stamp(before) and not is_later(stamp, before):
        return timer
    # A timer that another API created keeps the fingerprint of its request, which identifies a repeat.
    after = stamp if _is_stamp(before) or not before else before
    if execute_at != timer.execute_at:
        return amend(timer, now=now, execute_at=execute_at, fingerprint=after)
    return timer if after == before else replace(timer, fingerprint=after)


def stamp_of(number: int, taken_at_ns: int) -> str:
    """The fingerprint of a timer that a command created: the command's number in its stream, and when it was stored."""
    return f"{number}@{taken_at_ns}"


def _is_stamp(fingerprint: str) -> bool:
    return "@" in fingerprint


def is_later(stamp: str, than: str) -> bool:
    """Whether a command is later: by number, or by time, because a new stream restarts the numbers. If they disagree,
    as after a clock was set back, it counts as later: applying it twice does less harm than dropping it."""
    return any(int(one) > int(other) for one, other in zip(stamp.split("@"), than.split("@"), strict=True))


def renew(before: Timer, new: Timer) -> Timer:
    """The new timer, as the replacement of one with the same identity that is not executing."""
    if before.status is Status.EXECUTING:
        raise TimerNotPending("replace", before.status)
    revision = before.revision + 1
    return msgspec.structs.replace(new, revision=revision, firing=revision, created_at=before.created_at)


def replay(timer: Timer, *, now: Instant) -> Timer:
    """Fire a finished timer again, now, as a new firing."""
    if not timer.status.final:
        raise TimerNotFinal(timer.status)
    return _pending(timer, now, fire_at=now, executed_at=None, **_new_firing(timer))


def cancel(timer: Timer, *, now: Instant) -> Timer:
    if timer.status is not Status.PENDING:
        raise TimerNotPending("cancel", timer.status)
    return replace(timer, status=Status.CANCELED, updated_at=now)


def _new_firing(timer: Timer) -> dict[str, object]:
    """The fields that a new firing resets: the root of its delivery id, and all counts of attempts."""
    return {
        "firing": timer.revision + 1,
        "attempt": 0,
        "failures": 0,
        "lost": 0,
        "started_at": None,
        "last_error": None,
    }


def _window_start(timer: Timer, sent_at: Instant) -> Instant:
    """When the retry window opened: when the first failed attempt was sent, plus the delays of the attempts after it.
    So time for which an attempt was held back does not count."""
    if not timer.failures or timer.started_at is None:
        return sent_at
    return timer.started_at + max(0, sent_at - timer.fire_at)


def _pending(timer: Timer, now: Instant, **changes: object) -> Timer:
    return replace(timer, status=Status.PENDING, deadline_at=None, version=0, updated_at=now, **changes)


def _final(
    timer: Timer,
    status: Status,
    now: Instant,
    error: str | None,
    attempt: int,
    failures: int,
    attempts: tuple[Attempt, ...],
) -> Timer:
    return msgspec.structs.replace(  # the same as ``replace``, inlined: passing keywords on costs twice as much
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


def _kept(timer: Timer, outcome: Outcome, error: str | None, *, sent_at: Instant, now: Instant) -> Attempt:
    """The record of an attempt for its timer's history."""
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


def _read(protocol: ResponseProtocol, outcome: Outcome) -> tuple[str | None, Instant | None, bool]:
    """The error, the time to reschedule to, and whether the receiver rejects retries. No error and no time: success."""
    if outcome.kind is not OutcomeKind.ANSWERED:
        return outcome.error or str(outcome.kind), None, False
    status, body = outcome.status, outcome.body
    if status is None:
        return None, None, False  # A broker reports no status: it only acks the message.
    if not 200 <= status < 300:
        return outcome.error or f"HTTP {status}", None, False
    if protocol is ResponseProtocol.STATUS or not body or body.isspace():
        return None, None, False
    if status != 200:
        return f"HTTP {status} with a body: {_EXPECTED}", None, False
    try:
        answer = _answer_decoder.decode(body)
        if answer.ok:
            return None, None, False
        if answer.next_execute_at is not None:
            return None, parse_time(answer.next_execute_at, "nextExecuteAt"), False
    except InvalidInput as error:
        return f"in the response body, {error}", None, False
    except RecursionError:
        return f"the response body is nested too deeply; {_EXPECTED}", None, False
    except msgspec.ValidationError as error:
        return _body_fault(str(error), body), None, False
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = body[: 4 * BODY_CHARS_SHOWN_MAX].decode("utf-8", "replace")
        shown = text if len(text) <= BODY_CHARS_SHOWN_MAX else text[: BODY_CHARS_SHOWN_MAX - 1] + "…"
        return f'the response body "{shown}" is not JSON; {_EXPECTED}', None, False
    if answer.retry:
        return 'the receiver responded {"ok": false}' + _misspelling(body), None, False
    return 'the receiver responded {"ok": false, "retry": false}' + _misspelling(body), None, True


def _body_fault(message: str, body: bytes) -> str:
    """What is wrong with a response body, by the message of msgspec."""
    wrong = _WRONG_TYPE(message)
    if wrong is None:
        fault = "has no field ok" if "missing" in message else "has a number that is too large"
        return f"the response body {fault}; {_EXPECTED}{_misspelling(body)}"
    noun, field = _NOUNS.get(wrong[1], wrong[1]), wrong[2]
    if field is None:
        return f"the response body is {noun}; {_EXPECTED}"
    if field == "nextExecuteAt":
        return f"in the response body, nextExecuteAt is {noun}, not a string"
    return f"in the response body, {field} is {noun}, not true or false; {_EXPECTED}"


def _misspelling(body: bytes) -> str:
    """The end of an error for a body with a key that is probably a misspelled field."""
    try:
        keys = [key for key in _keys_decoder.decode(body) if _PLAIN_KEY(key)][:KEYS_COMPARED_MAX]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    for key in keys:
        near = get_close_matches(re.sub("[_-]", "", key).lower(), _ANSWER_FIELDS, 1, SIMILARITY_MIN)
        if near and (meant := _ANSWER_FIELDS[near[0]]) not in keys:
            return f"; {key} is not a known field; did you mean {meant}?"
    return ""
