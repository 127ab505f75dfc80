"""Conversion between timers and MySQL rows. Text arrives as bytes; JSON is decoded from the bytes into the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from duetime.model import Timer
from duetime.stores.mysql.literals import listed, literal
from duetime.stores.sql import columns
from duetime.stores.sql.columns import TEXTS, WIDTH, attempts_of, definition_of, status_of

_FIELDS = Timer.__struct_fields__
_TEXTS = [_FIELDS.index(name) for name in sorted(TEXTS) if name != "status"]
_DEFINITION, _STATUS, _ATTEMPTS = map(_FIELDS.index, ("definition", "status", "attempts"))


def derived(names: Sequence[str], values: Sequence[tuple[Any, ...]]) -> str:
    """A derived table with these rows."""
    first = ", ".join(f"{literal(value)} AS {name}" for name, value in zip(names, values[0], strict=True))
    return "(SELECT " + " UNION ALL SELECT ".join([first, *(listed(row)[1:-1] for row in values[1:])]) + ")"


def timers_of(rows: Sequence[Any]) -> tuple[list[Timer], list[tuple[Any, str]]]:
    return columns.timers_of(rows, _timer_of)


def _timer_of(row: Any) -> Timer:
    values = list(row[:WIDTH])
    for place in _TEXTS:
        if values[place] is not None:
            values[place] = values[place].decode()
    values[_DEFINITION] = definition_of(values[_DEFINITION])
    values[_STATUS] = status_of(values[_STATUS])
    values[_ATTEMPTS] = attempts_of(values[_ATTEMPTS]) if values[_ATTEMPTS] != b"[]" else ()
    return Timer(*values)
