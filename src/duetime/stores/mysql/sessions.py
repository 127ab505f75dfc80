"""Ended sessions in MySQL. The row with an empty id ends all sessions that expire no later than its time."""

from __future__ import annotations

from duetime.instants import Instant
from duetime.store import ENDED_SESSIONS_MAX
from duetime.stores.mysql.literals import listed, literal

_LATER = "ON DUPLICATE KEY UPDATE ends_at = GREATEST(ended_sessions.ends_at, {})"


def end(id: bytes, ends_at: Instant, *, forget_before: Instant) -> tuple[str, ...]:
    too_many = f"@recorded >= {ENDED_SESSIONS_MAX}"
    return (
        # One at a time: otherwise the last DELETE could delete a row that @latest does not include.
        "INSERT INTO ended_sessions VALUES ('', 0) ON DUPLICATE KEY UPDATE ends_at = ended_sessions.ends_at",
        f"DELETE FROM ended_sessions WHERE ends_at < {forget_before}",
        "SET @recorded = (SELECT COUNT(*) FROM ended_sessions)",
        "SET @latest = (SELECT MAX(ends_at) FROM ended_sessions)",
        f"DELETE FROM ended_sessions WHERE {too_many}",
        f"INSERT INTO ended_sessions SELECT '', @latest FROM DUAL WHERE {too_many} {_LATER.format('@latest')}",
        f"INSERT INTO ended_sessions VALUES {listed((id, ends_at))} {_LATER.format(ends_at)}",
    )


def ended(id: bytes, ends_at: Instant) -> str:
    return f"SELECT 1 FROM ended_sessions WHERE id = {literal(id)} OR (id = '' AND ends_at >= {ends_at}) LIMIT 1"
