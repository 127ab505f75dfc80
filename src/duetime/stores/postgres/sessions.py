"""Ended sessions in PostgreSQL. The row with an empty id ends all sessions that expire no later than its time."""

from __future__ import annotations

from duetime.instants import Instant
from duetime.store import ENDED_SESSIONS_MAX
from duetime.stores.postgres.pool import Connection

_PUT = """
    INSERT INTO ended_sessions VALUES ($1, $2)
    ON CONFLICT (id) DO UPDATE SET ends_at = greatest(ended_sessions.ends_at, excluded.ends_at)
"""
ENDED = "SELECT FROM ended_sessions WHERE id = $1 OR (id = '' AND ends_at >= $2)"


async def end(connection: Connection, id: bytes, ends_at: Instant, *, forget_before: Instant) -> None:
    async with connection.transaction():
        # One at a time: two transactions that delete the same rows in different orders would wait for each other.
        await connection.execute("LOCK TABLE ended_sessions IN SHARE ROW EXCLUSIVE MODE")
        await connection.execute("DELETE FROM ended_sessions WHERE ends_at < $1", forget_before)
        if await connection.fetchval("SELECT count(*) FROM ended_sessions") >= ENDED_SESSIONS_MAX:
            latest = await connection.fetchval("SELECT max(ends_at) FROM ended_sessions")
            await connection.execute("DELETE FROM ended_sessions")
            await connection.execute(_PUT, b"", latest)
        await connection.execute(_PUT, id, ends_at)
