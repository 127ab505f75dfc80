"""The columns of a timer, and conversion between timers and rows, for all SQL stores.

A new field of ``model.Timer`` needs no change here: it becomes part of ``LATER``, at the end of every row. It does need
a migration in each store, and must be a number, a string, or one of these or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, get_type_hints

import msgspec

from duetime.model import Attempt, Definition, Status, Timer
from duetime.stores.unreadable import UNREADABLE

IDENTITY = ("uuid", "namespace", "id", "shard")
"""Never changes."""
REQUEST = ("definition", "timeout_ms", "fingerprint", "correlation_id", "created_at")
"""Changed only by clients."""
FIXED = (*IDENTITY, *REQUEST)
STATE = (
    *("updated_at", "revision", "firing", "execute_at", "fire_at", "status", "attempt", "failures", "lost"),
    *("last_error", "started_at", "executed_at", "deadline_at", "version", "attempts"),
)
"""Changed by ``record``."""
LATER = tuple(name for name in Timer.__struct_fields__ if name not in (*FIXED, *STATE))
"""Fields added to ``model.Timer`` since the first release."""
NEW = (*FIXED, "revision", "execute_at", "lane", *LATER)
"""The columns that a put sets from the timer."""
INITIAL = {
    **{"updated_at": "created_at", "firing": "revision", "fire_at": "execute_at", "status": "'pending'"},
    **{"attempt": "0", "failures": "0", "lost": "0", "version": "0", "attempts": "'[]'"},
}
"""The remaining columns of a new timer: copies of the columns above, or constants."""
MOVE = (*STATE, *LATER)
FINAL = (*FIXED, *STATE, *LATER)
"""All columns of a final timer. A live one also has a lane."""
LIVE = (*FIXED, *STATE, "lane", *LATER)

TIMER = ", ".join(Timer.__struct_fields__)
"""The select list that ``timers_of`` expects."""
WIDTH = len(Timer.__struct_fields__)
TEXTS = frozenset(name for name, kind in get_type_hints(Timer).items() if kind in (str, str | None, Status))
"""The text columns. ``definition`` and ``attempts`` are JSON and not among them."""

encode = msgspec.json.Encoder().encode
definition_of = msgspec.json.Decoder(Definition).decode
attempts_of = msgspec.json.Decoder(tuple[Attempt, ...]).decode
status_of = {status.value: status for status in Status}.__getitem__


def values_of(columns: Sequence[str]) -> Callable[[Timer], tuple[Any, ...]]:
    """Return a function that converts a timer to the values of these columns."""
    values = attrgetter(*("definition.timeout_ms" if name == "timeout_ms" else name for name in columns))
    definition = columns.index("definition") if "definition" in columns else None
    attempts = columns.index("attempts") if "attempts" in columns else None

    def of(timer: Timer) -> tuple[Any, ...]:
        row = list(values(timer))
        if definition is not None:
            row[definition] = encode(row[definition]).decode()
        if attempts is not None:
            row[attempts] = encode(row[attempts]).decode() if row[attempts] else "[]"
        return tuple(row)

    return of


new_row, move_row = values_of(NEW), values_of(MOVE)
final_row, live_row = values_of(FINAL), values_of(LIVE)


def timers_of(rows: Sequence[Any], timer_of: Callable[[Any], Timer]) -> tuple[list[Timer], list[tuple[Any, str]]]:
    """Decode rows that start with the columns ``TIMER``. Return the timers and, separately, each unreadable row with
    the reason."""
    try:
        return [timer_of(row) for row in rows], []
    except (KeyError, *UNREADABLE):
        pass
    timers, unreadable = [], []
    for row in rows:
        try:
            timers.append(timer_of(row))
        except KeyError as status:
            unreadable.append((row, f"its status is {status}"))
        except UNREADABLE as error:
            unreadable.append((row, str(error)))
    return timers, unreadable
