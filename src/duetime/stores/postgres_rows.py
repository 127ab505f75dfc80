"""Timers as rows of PostgreSQL and back: a batch travels as an array of rows, whose types the schema names."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import msgspec

from duetime.model import Attempt, Definition, Status, Timer

encode = msgspec.json.Encoder().encode
_definition = msgspec.json.Decoder(Definition).decode
_attempts = msgspec.json.Decoder(tuple[Attempt, ...]).decode
_statuses = {status.value: status for status in Status}

FIXED = (
    *("uuid", "namespace", "id", "shard", "lane", "definition", "timeout_ms", "fingerprint", "correlation_id"),
    "created_at",
)
"""What is written once."""
STATE = (
    *("updated_at", "revision", "firing", "execute_at", "fire_at", "status", "attempt", "failures", "lost"),
    *("last_error", "started_at", "executed_at", "deadline_at", "version", "attempts"),
)
"""What a record changes."""
END = ("updated_at", "status", "attempt", "failures", "lost", "last_error", "executed_at", "attempts")
"""What it changes of a timer that becomes final, besides what is the same for all of those."""
NEW = (*FIXED, "revision", "execute_at")
"""What a put writes."""
FIRST = {
    **{"updated_at": "created_at", "firing": "revision", "fire_at": "execute_at", "status": "'pending'"},
    **{"attempt": "0", "failures": "0", "lost": "0", "version": "0", "attempts": "'[]'"},
}
"""What follows from that, or is the same for every timer that nothing has happened to."""

TIMER = ", ".join(Timer.__struct_fields__)
"""What to select for ``timer_of``."""
BYTES = "octet_length(definition) + octet_length(attempts)"
"""How large a timer is; PostgreSQL knows it without reading what is kept apart from the row."""
_WIDTH = len(Timer.__struct_fields__)
_DEFINITION, _STATUS, _ATTEMPTS = map(Timer.__struct_fields__.index, ("definition", "status", "attempts"))


def new(timer: Timer) -> tuple[Any, ...]:
    return (*fixed(timer), timer.revision, timer.execute_at)


def fixed(timer: Timer) -> tuple[Any, ...]:
    definition = timer.definition
    return (*_identity(timer), encode(definition).decode(), definition.timeout_ms, *_request(timer))


def state(timer: Timer) -> tuple[Any, ...]:
    return (*_state(timer), _attempts_text(timer))


def end(timer: Timer) -> tuple[Any, ...]:
    return (*_end(timer), _attempts_text(timer))


# What is before and behind the definition and its timeout, which are made; the attempts, too, stand last everywhere.
_identity, _request = attrgetter(*FIXED[:5]), attrgetter(*FIXED[7:])
_state, _end = attrgetter(*STATE[:-1]), attrgetter(*END[:-1])


def _attempts_text(timer: Timer) -> str:
    return encode(timer.attempts).decode() if timer.attempts else "[]"


def timer_of(row: Any) -> Timer:
    """The timer of a row that begins with the columns ``TIMER``."""
    values = list(row[:_WIDTH])
    values[_DEFINITION] = _definition(values[_DEFINITION])
    values[_STATUS] = _statuses[values[_STATUS]]
    values[_ATTEMPTS] = _attempts(values[_ATTEMPTS]) if values[_ATTEMPTS] != "[]" else ()
    return Timer(*values)
