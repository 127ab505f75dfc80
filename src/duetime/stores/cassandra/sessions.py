"""Ended sessions in Cassandra. Rows with an empty id end all sessions that expire no later than their time.

Rows are only inserted and deleted, so instances can do this at the same time; a row that ends all sessions is written
before those that it replaces are deleted."""

from __future__ import annotations

from duetime.instants import Instant
from duetime.store import ENDED_SESSIONS_MAX
from duetime.stores.cassandra.driver import Session

_INSERT = "INSERT INTO ended_sessions (part, id, ends_at) VALUES (0, ?, ?)"
_DELETE = "DELETE FROM ended_sessions WHERE part = 0 AND id = ? AND ends_at = ?"
ALL = b""


async def end(session: Session, id: bytes, ends_at: Instant, *, forget_before: Instant) -> None:
    rows = await session.read("SELECT id, ends_at FROM ended_sessions WHERE part = 0")
    gone = [row for row in rows if row[1] < forget_before]
    kept = [row for row in rows if row[1] >= forget_before]
    if len(kept) >= ENDED_SESSIONS_MAX:
        latest = ALL, max(at for _, at in kept)
        await session.write(_INSERT, *latest)
        gone += [row for row in kept if row != latest]
    await session.write(_INSERT, id, ends_at)
    for row in gone:
        await session.write(_DELETE, *row)


async def ended(session: Session, id: bytes, ends_at: Instant) -> bool:
    one = "SELECT id FROM ended_sessions WHERE part = 0 AND id = ? LIMIT 1"
    every = "SELECT id FROM ended_sessions WHERE part = 0 AND id = ? AND ends_at >= ? LIMIT 1"
    return bool(await session.read(one, id) or await session.read(every, ALL, ends_at))
