"""Quarantine in MySQL of begun timers that can't be read, until a program can read them.

A quarantined timer stays in ``timers``, so that its identity remains in use, with a status and a ``fire_at`` that no
poll finds. The table ``quarantine`` holds its previous values. Its begin is undone, as ``lifecycle.defer`` would.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, NamedTuple

from duetime.errors import StoreError
from duetime.stores.mysql.literals import listed, literal
from duetime.stores.mysql.pool import MysqlPool
from duetime.stores.mysql.rows import timers_of
from duetime.stores.mysql.statements import count, fence, go
from duetime.stores.sql.rules import QUARANTINED_TIMER, assigned, quarantined
from duetime.stores.sql.tallies import Tally, moved
from duetime.stores.unreadable import QUARANTINED, log_quarantined

log = logging.getLogger(__name__)

PAGE = 500


class UnreadableTimer(NamedTuple):
    """A begun timer that could not be read."""

    uuid: bytes
    revision: int
    shard: int
    version: int
    namespace: str
    id: str
    fire_at: int
    status_before: str
    reason: str


class PendingQuarantine:
    """Begun timers that could not be read and are not yet in quarantine. If quarantining them fails, the next begin
    retries it."""

    def __init__(self, pool: MysqlPool) -> None:
        self._pool = pool
        self.rows: list[UnreadableTimer] = []

    async def put(self, owner_id: bytes, now: str) -> None:
        bad, self.rows = self.rows, []
        for each in bad:
            try:
                done = await self._put(owner_id, each, now)
            except StoreError as error:
                why = "timer %s/%s can't be read, and quarantining it failed, will retry: %s"
                log.warning(why, each.namespace, each.id, error)
                self.rows.append(each)
                continue  # The other begun timers must not wait for this.
            if done:
                log_quarantined(each.namespace, each.id, each.reason)

    async def _put(self, owner_id: bytes, bad: UnreadableTimer, now: str) -> bool:
        back = "pending" if bad.status_before == "executing" else bad.status_before
        row = (bad.uuid, bad.namespace, bad.id, back, bad.fire_at, bad.reason)
        tally: Tally = Counter()
        moved(tally, bad.namespace, "executing", QUARANTINED)
        results = await self._pool.write(
            fence(self._pool.dialect, owner_id, [(bad.shard, bad.version)]),
            go(self._pool.dialect, [(bad.uuid, bad.revision)]),
            f"DELETE FROM quarantine WHERE uuid = {literal(bad.uuid)} AND @go",
            f"INSERT INTO quarantine SELECT {listed(row)[1:-1]}, {now} FROM DUAL WHERE @go",
            f"UPDATE timers SET {assigned(quarantined())} WHERE uuid = {literal(bad.uuid)} AND @go",
            *count(tally),
        )
        return results[4].affected == 1


async def restore(pool: MysqlPool) -> int:
    """Restore the timers that this program can read. Return how many."""
    behind, restored = b"", 0
    while True:
        [rows] = await pool.read(
            f"SELECT {QUARANTINED_TIMER}, quarantine.uuid, timers.revision, quarantine.fire_at "
            f"FROM quarantine JOIN timers ON timers.uuid = quarantine.uuid WHERE quarantine.uuid > {literal(behind)} "
            f"AND timers.status = '{QUARANTINED}' ORDER BY quarantine.uuid LIMIT {PAGE}"
        )
        if not rows:
            return restored
        behind = rows[-1][-3]
        for row in rows:
            restored += await _restore(pool, row)


async def _restore(pool: MysqlPool, row: Any) -> int:
    readable, _ = timers_of([row])
    if not readable:
        return 0
    [timer] = readable
    uuid, revision, fire_at = row[-3:]
    tally: Tally = Counter()
    moved(tally, timer.namespace, QUARANTINED, timer.status)
    results = await pool.write(
        go(pool.dialect, [(uuid, revision)], fenced=False),
        f"UPDATE timers SET status = '{timer.status}', fire_at = {fire_at}, revision = revision + 1 "
        f"WHERE uuid = {literal(uuid)} AND @go",
        f"DELETE FROM quarantine WHERE uuid = {literal(uuid)} AND @go",
        *count(tally),
    )
    return results[1].affected
