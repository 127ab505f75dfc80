"""What the database itself saw of a race: triggers that write down every change of a timer and every end of a reign.

A reign is an owner at a version of a shard. Why the check of the fence is sound: whoever ends a reign notes, while it
has the shard's row locked for writing and before it commits, which transactions had ended by then. A write under that
reign which is not among them was still open or yet to come, so it may commit after the reign has ended. Nothing here
takes a lock that the store does not take, so the audit closes no gap that it is to find.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import asyncpg

SETTING = "audit.owner"
"""A session with this setting writes as that owner; one without it is a client."""

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

WAIT_SECONDS_MAX = 30.0

Change = tuple[bytes, bytes, int]
"""An owner, a timer's uuid, and the revision that its write found."""


class Violated(AssertionError):
    """Something happened that must not happen."""


class Audit:
    """One more connection to the database of a store that is open. It also holds locks, to stop others."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.connection = connection

    @classmethod
    async def of(cls, url: str) -> Audit:
        connection = await asyncpg.connect(url, server_settings={"search_path": "duetime", "synchronous_commit": "off"})
        try:
            await connection.execute(_INSTALL)
        except BaseException:
            await connection.close()
            raise
        return cls(connection)

    @staticmethod
    def url(url: str, owner_id: bytes) -> str:
        """Where this owner connects, so that its writes are known by it."""
        return f"{url}?{SETTING}={owner_id.hex()}"

    async def reset(self) -> None:
        """Empty the database: the next race starts from nothing."""
        await self.connection.execute(_RESET)

    async def check(self, begun: Collection[Change] = (), recorded: Collection[Change] = ()) -> None:
        """Raise ``Violated`` unless all is well, and unless what the owners were told is what happened."""
        wrong = [text for (text,) in await self.connection.fetch(_VIOLATIONS)]
        wrong += await self._untrue("begins", begun)
        wrong += await self._untrue("ends", recorded)
        if wrong:
            raise Violated("; ".join(wrong))

    async def _untrue(self, kind: str, told: Collection[Change]) -> list[str]:
        rows: list[Any] = await self.connection.fetch(
            f"SELECT owner_id, uuid, revision FROM audit.changes WHERE {kind} AND owner_id IS NOT NULL"
        )
        happened = {tuple(row) for row in rows}
        return [f"{kind}: somebody was told of {sorted(told)}, but {sorted(happened)} happened"] * (
            len(told) != len(set(told)) or set(told) != happened
        )

    async def waiting(self, number: int, unless: asyncio.Future[Any] | None = None) -> None:
        """Return once this many statements wait for a lock, or once one is done, as with a bug it may be."""
        waits = "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted"
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            while await self.connection.fetchval(waits) < number and not (unless and unless.done()):
                pass

    async def close(self) -> None:
        await self.connection.close()
