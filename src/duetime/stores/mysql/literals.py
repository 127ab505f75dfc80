"""Values as SQL literals: the protocol has no parameters for a packet of several statements."""

from __future__ import annotations

from collections.abc import Iterable


def literal(value: object) -> str:
    """The SQL literal for a value. The session's ``sql_mode`` makes the backslash an escape character."""
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, int):
        return str(value)
    raise TypeError(f"no SQL literal for {type(value).__name__}")


def listed(values: Iterable[object]) -> str:
    """A list in parentheses, for IN or as a row of VALUES. An empty list matches nothing."""
    return f"({', '.join(map(literal, values)) or 'NULL'})"


def rows(values: Iterable[Iterable[object]]) -> str:
    return ", ".join(map(listed, values))
