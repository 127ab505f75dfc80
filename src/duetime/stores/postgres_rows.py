"""Timers as rows of PostgreSQL and back: a batch travels as one array per column, which ``unnest`` makes rows of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from duetime.model import Attempt, Definition, Status, Timer

encode = msgspec.json.Encoder().encode
_definition = msgspec.json.Decoder(Definition).decode
_attempts = msgspec.json.Decoder(tuple[Attempt, ...]).decode
_statuses = {status.value: status for status in Status}

FIXED = {
    **{"uuid": "bytea", "namespace": "text", "id": "text", "shard": "int", "definition": "text"},
    **{"timeout_ms": "bigint", "fingerprint": "text", "correlation_id": "text", "created_at": "bigint"},
}
"""What is written once, with its types."""
STATE = {
    **{"updated_at": "bigint", "revision": "bigint", "firing": "bigint", "execute_at": "bigint"},
    **{"fire_at": "bigint", "status": "text", "attempt": "int", "failures": "int", "lost": "int"},
    **{"last_error": "text", "started_at": "bigint", "executed_at": "bigint", "deadline_at": "bigint"},
    **{"version": "bigint", "attempts": "text"},
}
"""What a record changes."""
NEW = FIXED | {"revision": "bigint", "execute_at": "bigint"}
"""What a put writes."""
FIRST = {
    **{"updated_at": "created_at", "firing": "revision", "fire_at": "execute_at", "status": "'pending'"},
    **{"attempt": "0", "failures": "0", "lost": "0", "version": "0", "attempts": "'[]'"},
}
"""What follows from that, or is the same for every timer that nothing has happened to."""

TIMER = ", ".join(Timer.__struct_fields__)
"""What to select for ``timer_of``."""


def fixed(timer: Timer) -> tuple[Any, ...]:
    definition = timer.definition
    return (
        *(timer.uuid, timer.namespace, timer.id, timer.shard, encode(definition).decode(), definition.timeout_ms),
        *(timer.fingerprint, timer.correlation_id, timer.created_at),
    )


def state(timer: Timer) -> tuple[Any, ...]:
    return (
        *(timer.updated_at, timer.revision, timer.firing, timer.execute_at, timer.fire_at, timer.status.value),
        *(timer.attempt, timer.failures, timer.lost, timer.last_error, timer.started_at, timer.executed_at),
        *(timer.deadline_at, timer.version, encode(timer.attempts).decode() if timer.attempts else "[]"),
    )


def timer_of(row: Any) -> Timer:
    """The timer of a row that begins with the columns ``TIMER``. Spelled out: it is hot."""
    return Timer(
        namespace=row[0],
        id=row[1],
        shard=row[2],
        definition=_definition(row[3]),
        execute_at=row[4],
        fire_at=row[5],
        created_at=row[6],
        updated_at=row[7],
        revision=row[8],
        firing=row[9],
        fingerprint=row[10],
        correlation_id=row[11],
        status=_statuses[row[12]],
        attempt=row[13],
        failures=row[14],
        lost=row[15],
        last_error=row[16],
        started_at=row[17],
        executed_at=row[18],
        deadline_at=row[19],
        version=row[20],
        attempts=_attempts(row[21]) if row[21] != "[]" else (),
    )


def columns_of(rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
    """Rows turned into one list per column."""
    return [list(column) for column in zip(*rows, strict=True)]


def unnest(columns: dict[str, str], first: int) -> str:
    """The FROM of a batch whose columns are the parameters from ``first`` on, in the order of the rows."""
    arrays = ", ".join(f"${number}::{kind}[]" for number, kind in enumerate(columns.values(), first))
    return f"unnest({arrays}) AS batch ({', '.join(columns)})"
