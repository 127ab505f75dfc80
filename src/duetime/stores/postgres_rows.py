"""Timers as rows of PostgreSQL and back: a batch travels as an array of rows, whose types the schema names."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec

from duetime.model import Attempt, Definition, Status, Timer
from duetime.stores.unreadable import UNREADABLE

encode = msgspec.json.Encoder().encode
_definition = msgspec.json.Decoder(Definition).decode
_attempts = msgspec.json.Decoder(tuple[Attempt, ...]).decode
_statuses = {status.value: status for status in Status}

FIXED = ("uuid", "namespace", "id", "shard", "definition", "timeout_ms", "fingerprint", "correlation_id", "created_at")
"""What is written once."""
STATE = (
    *("updated_at", "revision", "firing", "execute_at", "fire_at", "status", "attempt", "failures", "lost"),
    *("last_error", "started_at", "executed_at", "deadline_at", "version", "attempts"),
)
"""What a record changes."""
END = ("updated_at", "status", "attempt", "failures", "lost", "last_error", "executed_at", "attempts")
"""What it changes of a timer that becomes final, besides what is the same for all of those."""
NEW = (*FIXED, "revision", "execute_at", "lane")
"""What a put writes."""
FIRST = {
    **{"updated_at": "created_at", "firing": "revision", "fire_at": "execute_at", "status": "'pending'"},
    **{"attempt": "0", "failures": "0", "lost": "0", "version": "0", "attempts": "'[]'"},
}
"""What follows from that, or is the same for every timer that nothing has happened to."""

TIMER = ", ".join(Timer.__struct_fields__)
"""What to select for ``timers_of``."""
BYTES = "octet_length(definition) + octet_length(attempts)"
"""How large a timer is; PostgreSQL knows it without reading what is kept apart from the row."""
_WIDTH = len(Timer.__struct_fields__)
_DEFINITION, _STATUS, _ATTEMPTS = map(Timer.__struct_fields__.index, ("definition", "status", "attempts"))


def new(timer: Timer) -> tuple[Any, ...]:
    return (*_fixed(timer), timer.revision, timer.execute_at, timer.lane)


def live(timer: Timer) -> tuple[Any, ...]:
    """All of a timer that is not final."""
    return (*final(timer), timer.lane)


def final(timer: Timer) -> tuple[Any, ...]:
    """All of a timer that is final, which has no lane."""
    return (*_fixed(timer), *state(timer))


def _fixed(timer: Timer) -> tuple[Any, ...]:
    definition = timer.definition
    return (*_identity(timer), encode(definition).decode(), definition.timeout_ms, *_request(timer))


def state(timer: Timer) -> tuple[Any, ...]:
    return (*_state(timer), _attempts_text(timer))


def end(timer: Timer) -> tuple[Any, ...]:
    return (*_end(timer), _attempts_text(timer))


# What is before and behind the definition and its timeout, which are made; the attempts, too, stand last everywhere.
_identity, _request = attrgetter(*FIXED[:4]), attrgetter(*FIXED[6:])
_state, _end = attrgetter(*STATE[:-1]), attrgetter(*END[:-1])


def _attempts_text(timer: Timer) -> str:
    return encode(timer.attempts).decode() if timer.attempts else "[]"


def timers_of(rows: Sequence[Any]) -> tuple[list[Timer], list[tuple[Any, str]]]:
    """The timers of rows that begin with the columns ``TIMER``; apart, those that can't be read, with the reasons."""
    try:
        return [_timer_of(row) for row in rows], []
    except (KeyError, *UNREADABLE):
        pass
    timers, unreadable = [], []
    for row in rows:
        try:
            timers.append(_timer_of(row))
        except KeyError as status:
            unreadable.append((row, f"its status is {status}"))
        except UNREADABLE as error:
            unreadable.append((row, str(error)))
    return timers, unreadable


def _timer_of(row: Any) -> Timer:
    values = list(row[:_WIDTH])
    values[_DEFINITION] = _definition(values[_DEFINITION])
    values[_STATUS] = _statuses[values[_STATUS]]
    values[_ATTEMPTS] = _attempts(values[_ATTEMPTS]) if values[_ATTEMPTS] != "[]" else ()
    return Timer(*values)
