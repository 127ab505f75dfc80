"""Quarantine in PostgreSQL of begun timers that can't be read, until a program can read them.

A quarantined timer stays in ``timers``, so that its identity remains in use, with a status and a ``fire_at`` that no
poll finds. The table ``quarantine`` holds its previous values. Its begin is undone, as ``lifecycle.defer`` would.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

from duetime.errors import StoreError
from duetime.model import Timer
from duetime.stores.postgres.pool import Connection, PostgresPool
from duetime.stores.postgres.rows import timers_of
from duetime.stores.postgres.statements import counted, now
from duetime.stores.sql.rules import QUARANTINED_TIMER, assigned, quarantined
from duetime.stores.unreadable import QUARANTINED, log_quarantined

log = logging.getLogger(__name__)

PAGE = 500
LIVE = ("pending", "executing")

# $1: owner, $2: now, $3: shards, $4…: of each timer namespace, seq, revision, shard, status before, fire_at, reason.
QUARANTINE = f"""
    WITH clock AS MATERIALIZED (SELECT {now("$2")} AS now),
    fence AS MATERIALIZED (
        SELECT shard, version AS fenced_by FROM shards WHERE shard = ANY ($3) AND owner_id = $1
        ORDER BY shard FOR SHARE
    ),
    bad AS MATERIALIZED (
        SELECT * FROM unnest($4::text[], $5::bigint[], $6::bigint[], $7::int[], $8::text[], $9::bigint[], $10::text[])
        AS bad (in_namespace, place, was, in_shard, status_before, due_at, reason) JOIN fence ON fence.shard = in_shard
    ),
    quarantined AS (
        UPDATE timers SET {assigned(quarantined())}
        FROM bad
        WHERE namespace = in_namespace AND seq = place AND revision = was AND version = fenced_by
        RETURNING uuid, namespace, id, status_before, due_at, reason
    ),
    kept AS (
        INSERT INTO quarantine
        SELECT uuid, namespace, id, CASE status_before WHEN 'executing' THEN 'pending' ELSE status_before END, due_at,
            reason, (SELECT now FROM clock)
        FROM quarantined
        ON CONFLICT (uuid) DO UPDATE SET status = excluded.status, fire_at = excluded.fire_at,
            reason = excluded.reason, quarantined_at = excluded.quarantined_at
    ), {
    counted(f'''
        SELECT namespace, 'executing' AS status, 0 AS slice, -1 AS change FROM quarantined
        UNION ALL SELECT namespace, '{QUARANTINED}', 0, 1 FROM quarantined
    ''')
}
    SELECT namespace, id, reason FROM quarantined
"""

# $1: after which uuid, $2: limit.
FIND = f"""
    SELECT {QUARANTINED_TIMER}, uuid FROM quarantine JOIN timers USING (uuid)
    WHERE uuid > $1 AND timers.status = '{QUARANTINED}' ORDER BY uuid LIMIT $2
"""

# $1: uuids.
RESTORE = f"""
    WITH back AS (DELETE FROM quarantine WHERE uuid = ANY ($1) RETURNING *),
    restored AS (
        UPDATE timers SET status = back.status, fire_at = back.fire_at, revision = timers.revision + 1
        FROM back WHERE timers.uuid = back.uuid AND timers.status = '{QUARANTINED}'
        RETURNING timers.namespace, timers.status
    ), {
    counted(f'''
        SELECT namespace, '{QUARANTINED}' AS status, 0 AS slice, -1 AS change FROM restored
        UNION ALL SELECT namespace, status, 0, 1 FROM restored
    ''')
}
    SELECT count(*) AS number FROM restored
"""

COUNT = "SELECT count(*) AS number FROM quarantine"


class PendingQuarantine:
    """Begun rows that could not be read and are not yet in quarantine. If quarantining them fails, the next begin
    retries it."""

    def __init__(self, pool: PostgresPool) -> None:
        self._pool = pool
        self.rows: list[tuple[Any, str]] = []

    async def put(self, owner_id: bytes, at: int | None) -> None:
        named = ("namespace", "seq", "revision", "shard", "status_before", "fire_at")
        columns: Sequence[Collection[object]] = [[row[name] for row, _ in self.rows] for name in named]
        reasons = [reason for _, reason in self.rows]
        try:
            done = await self._pool.write(QUARANTINE, owner_id, at, set(columns[3]), *columns, reasons)
        except StoreError as error:
            log.warning("%d timers can't be read, and quarantining them failed, will retry: %s", len(reasons), error)
            return  # The other begun timers must not wait for this.
        self.rows.clear()
        for namespace, id, reason in done:
            log_quarantined(namespace, id, reason)


def begun_of(rows: Sequence[Any], pending: PendingQuarantine) -> list[Timer]:
    """Decode the timers that a begin returned; unreadable ones are added to ``pending``."""
    odd = [row for row in rows if row["status_before"] not in LIVE]
    if odd:
        rows = [row for row in rows if row["status_before"] in LIVE]
        pending.rows += [(row, f"its status is '{row['status_before']}'") for row in odd]
    timers, unreadable = timers_of(rows)
    pending.rows += unreadable
    return timers


async def restore(connection: Connection) -> int:
    """Restore the timers that this program can read. Return how many."""
    behind, restored = b"", 0
    while rows := await connection.fetch(FIND, behind, PAGE):
        behind = rows[-1]["uuid"]
        _, unreadable = timers_of(rows)
        readable = {row["uuid"] for row in rows} - {row["uuid"] for row, _ in unreadable}
        restored += await connection.fetchval(RESTORE, readable)
    return restored
