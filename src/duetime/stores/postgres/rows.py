"""Conversion between timers and PostgreSQL rows. A batch is sent as an array of a composite type of the schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from duetime.model import Timer
from duetime.stores.sql import columns
from duetime.stores.sql.columns import WIDTH, attempts_of, definition_of, status_of

BYTES = "octet_length(definition) + octet_length(attempts)"
"""The size of a timer. PostgreSQL computes it without reading values stored out of line (TOAST)."""
_DEFINITION, _STATUS, _ATTEMPTS = map(Timer.__struct_fields__.index, ("definition", "status", "attempts"))


def timers_of(rows: Sequence[Any]) -> tuple[list[Timer], list[tuple[Any, str]]]:
    return columns.timers_of(rows, _timer_of)


def _timer_of(row: Any) -> Timer:
    values = list(row[:WIDTH])
    values[_DEFINITION] = definition_of(values[_DEFINITION])
    values[_STATUS] = status_of(values[_STATUS])
    values[_ATTEMPTS] = attempts_of(values[_ATTEMPTS]) if values[_ATTEMPTS] != "[]" else ()
    return Timer(*values)
