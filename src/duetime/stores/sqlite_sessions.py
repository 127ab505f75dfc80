"""Sessions that were signed out, in SQLite. The row without an id is for all that would have ended by its time."""

from __future__ import annotations

from typing import Any

from duetime.store import ENDED_SESSIONS_MAX

_PUT = "INSERT INTO ended_sessions VALUES (?, ?) ON CONFLICT DO UPDATE SET ends_at = max(ends_at, excluded.ends_at)"


def end(connection: Any, asked: list[tuple[bytes, int, int]]) -> list[None]:
    for id, ends_at, forget_before in asked:
        connection.execute("DELETE FROM ended_sessions WHERE ends_at < ?", (forget_before,))
        noted, latest = connection.execute("SELECT count(*), max(ends_at) FROM ended_sessions").get
        if noted >= ENDED_SESSIONS_MAX:
            connection.execute("DELETE FROM ended_sessions")
            connection.execute(_PUT, (b"", latest))
        connection.execute(_PUT, (id, ends_at))
    return [None] * len(asked)


def ended(connection: Any, id: bytes, ends_at: int) -> bool:
    sql = "SELECT count(*) FROM ended_sessions WHERE id = ? OR (id = x'' AND ends_at >= ?)"
    return bool(connection.execute(sql, (id, ends_at)).get)
