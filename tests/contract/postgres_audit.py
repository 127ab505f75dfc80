"""Audits a race in PostgreSQL with triggers that record every change of a timer and every end of a reign.

Why the check of the fence is correct: a transaction that ends a reign records, while it holds the write lock of the
shard's row and before it commits, which transactions have ended. A write under that reign that is not among them was
still open or came later. The audit takes no lock that the store does not take, so it can't hide a gap it should find.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from tests.contract.races import WAIT_SECONDS_MAX, Change, Lock

SETTING = "audit.owner"
"""The session setting that names the owner whose writes these are; without it they are a client's."""

_INSTALL = f"""
    CREATE SCHEMA audit;
    CREATE TABLE audit.changes (
        owner_id bytea, uuid bytea, revision bigint, shard int, begins boolean, ends boolean, version bigint, xid xid8
    );
    CREATE TABLE audit.reigns (shard int, owner_id bytea, version bigint, begun boolean, seen pg_snapshot);

    CREATE FUNCTION audit.note_change() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        begins boolean := TG_OP = 'UPDATE' AND NEW.status = 'executing';
        ends boolean := OLD.status = 'executing' AND NOT begins;
    BEGIN
        INSERT INTO audit.changes VALUES (
            decode(nullif(current_setting('{SETTING}', true), ''), 'hex'), OLD.uuid, OLD.revision, OLD.shard,
            begins, ends, CASE WHEN begins THEN NEW.version ELSE OLD.version END, pg_current_xact_id()
        );
        RETURN NULL;
    END $$;
    CREATE TRIGGER audit AFTER UPDATE OR DELETE ON duetime.timers FOR EACH ROW EXECUTE FUNCTION audit.note_change();
    CREATE TRIGGER audit AFTER UPDATE OR DELETE ON duetime.history FOR EACH ROW EXECUTE FUNCTION audit.note_change();

    CREATE FUNCTION audit.note_reign() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO audit.reigns VALUES (OLD.shard, OLD.owner_id, OLD.version, false, pg_current_snapshot());
        INSERT INTO audit.reigns VALUES (NEW.shard, NEW.owner_id, NEW.version, true, NULL);
        RETURN NULL;
    END $$;
    CREATE TRIGGER audit AFTER UPDATE ON duetime.shards FOR EACH ROW
        WHEN (OLD.owner_id IS DISTINCT FROM NEW.owner_id OR OLD.version <> NEW.version)
        EXECUTE FUNCTION audit.note_reign();
"""

_RESET = """
    BEGIN;
    SET LOCAL session_replication_role = replica;  -- no triggers
    DELETE FROM timers; DELETE FROM history; DELETE FROM tallies; DELETE FROM instances;
    UPDATE shards SET owner_id = NULL, version = 0, lease_until = 0;
    DELETE FROM audit.changes; DELETE FROM audit.reigns;
    COMMIT;
"""

_VIOLATIONS = """
    SELECT format('a write by %s at version %s of shard %s, whose reign had ended', c.owner_id, c.version, c.shard)
    FROM audit.changes c JOIN audit.reigns r USING (shard, owner_id, version)
    WHERE (c.begins OR c.ends) AND NOT r.begun AND NOT pg_visible_in_snapshot(c.xid, r.seen)
    UNION ALL
    SELECT format('a write by %s at version %s of shard %s, which never was its', c.owner_id, c.version, c.shard)
    FROM audit.changes c WHERE (c.begins OR c.ends) AND c.owner_id IS NOT NULL AND NOT EXISTS (
        SELECT FROM audit.reigns r
        WHERE r.begun AND (r.shard, r.owner_id, r.version) = (c.shard, c.owner_id, c.version))
    UNION ALL
    SELECT format('revision %s of %s was changed %s times', revision, uuid, count(*))
    FROM audit.changes GROUP BY uuid, revision HAVING count(*) > 1
    UNION ALL
    SELECT format('%s is there %s times', uuid, count(*))
    FROM (SELECT uuid FROM timers UNION ALL SELECT uuid FROM history) AS everything GROUP BY uuid HAVING count(*) > 1
    UNION ALL
    SELECT format('the tally of %s %s in slice %s is %s off', namespace, status, slice, sum(number)) FROM (
        SELECT namespace, status, slice, timers AS number FROM tallies
        UNION ALL SELECT namespace, status, 0, -1 FROM timers
        UNION ALL SELECT namespace, status, starts_at, -1 FROM history
            LEFT JOIN slices ON starts_at <= ended_at AND ended_at < ends_at
    ) AS both_sides GROUP BY namespace, status, slice HAVING sum(number) <> 0
"""

_LOCKS = {
    Lock.SHARD: "SELECT FROM shards WHERE shard = $1 FOR UPDATE",
    Lock.SHARD_SHARED: "SELECT FROM shards WHERE shard = $1 FOR SHARE",
    Lock.TIMERS: "SELECT FROM timers WHERE shard = $1 FOR UPDATE",
    Lock.TIMER: "SELECT FROM timers WHERE shard = $1 ORDER BY uuid LIMIT 1 FOR UPDATE",
    Lock.TALLIES: "SELECT FROM tallies WHERE $1::int IS NOT NULL ORDER BY namespace, status, slice, spread FOR UPDATE",
}


class PostgresAudit:
    def __init__(self, connection: asyncpg.Connection, url: str) -> None:
        self._connection = connection
        self._url = url

    @classmethod
    async def of(cls, url: str) -> PostgresAudit:
        connection = await asyncpg.connect(url, server_settings={"search_path": "duetime", "synchronous_commit": "off"})
        try:
            await connection.execute(_INSTALL)
        except BaseException:
            await connection.close()
            raise
        return cls(connection, url)

    def url(self, owner_id: bytes) -> str:
        return f"{self._url}?{SETTING}={owner_id.hex()}"

    async def reset(self) -> None:
        await self._connection.execute(_RESET)

    async def violations(self) -> list[str]:
        return [text for (text,) in await self._connection.fetch(_VIOLATIONS)]

    async def changes(self, kind: str) -> set[Change]:
        rows = await self._connection.fetch(
            f"SELECT owner_id, uuid, revision FROM audit.changes WHERE {kind} AND owner_id IS NOT NULL"
        )
        return {tuple(row) for row in rows}

    async def give(self, shard: int, owner_id: bytes) -> None:
        await self._connection.execute("UPDATE shards SET owner_id = $2 WHERE shard = $1", shard, owner_id)

    @asynccontextmanager
    async def locked(self, lock: Lock, shard: int) -> AsyncIterator[None]:
        async with self._connection.transaction():
            await self._connection.fetch(_LOCKS[lock], shard)
            yield

    async def waiting(self, number: int, unless: asyncio.Future[Any] | None = None) -> None:
        waits = "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted"
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            while await self._connection.fetchval(waits) < number and not (unless and unless.done()):
                pass

    async def close(self) -> None:
        await self._connection.close()
