"""Ended sessions in SQLite. The row with an empty id ends all sessions that expire no later than its time."""

from __future__ import annotations

from typing import Any

from duetime.instants import Instant
from duetime.store import ENDED_SESSIONS_MAX

_PUT = "INSERT INTO ended_sessions VALUES (?, ?) ON CONFLICT DO UPDATE SET ends_at = max(ends_at, excluded.ends_at)"


def end(connection: Any, arguments: list[tuple[bytes, Instant, Instant]]) -> list[None]:
    for id, ends_at, forget_before in arguments:
        connection.execute("DELETE FROM ended_sessions WHERE ends_at < ?", (forget_before,))
        recorded, latest = connection.execute("SELECT count(*), max(ends_at) FROM ended_sessions").get
        if recorded >= ENDED_SESSIONS_MAX:
            connection.execute("DELETE FROM ended_sessions")
            connection.execute(_PUT, (b"", latest))
        connection.execute(_PUT, (id, ends_at))
    return [None] * len(arguments)


def ended(connection: Any, id: bytes, ends_at: Instant) -> bool:
    sql = "SELECT count(*) FROM ended_sessions WHERE id = ? OR (id = x'' AND ends_at >= ?)"
    return bool(connection.execute(sql, (id, ends_at)).get)
