"""Audits a race in MySQL with triggers that record every change of a timer and every end of a reign.

Why the check of the fence is correct: a transaction that ends a reign records, while it holds the write lock of the
shard's row and before it commits, which changes under that reign are committed; it skips rows that are still locked.
The audit waits for no lock and blocks no transaction, so it can't hide a gap that it should find.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncmy

from duetime.stores.mysql.literals import literal
from duetime.stores.mysql.pool import connect_arguments, run
from tests.contract.races import OWNERS, WAIT_SECONDS_MAX, Change, Lock

_OWNER = "(SELECT owner_id FROM audit_owners WHERE user = SUBSTRING_INDEX(USER(), '@', 1))"


def _user(owner_id: bytes) -> str:
    return owner_id.decode().rstrip(".")


def _noted(table: str, event: str, changed: str, begins: str) -> str:
    return f"""CREATE TRIGGER audit_{table}_{event} AFTER {event} ON {table} FOR EACH ROW
        INSERT INTO audit_changes (owner_id, uuid, revision, shard, begins, ends, version)
        SELECT {_OWNER}, OLD.uuid, OLD.revision, OLD.shard, {begins}, OLD.status = 'executing' AND NOT {begins},
            CASE WHEN {begins} THEN {"NEW" if event == "UPDATE" else "OLD"}.version ELSE OLD.version END
        FROM DUAL WHERE {changed}"""


_CHANGED = "NEW.revision <> OLD.revision OR NEW.status <> OLD.status"
_INSTALL = (
    "CREATE TABLE audit_owners (user VARCHAR(64) PRIMARY KEY, owner_id BINARY(16))",
    """CREATE TABLE audit_changes (
        n BIGINT AUTO_INCREMENT PRIMARY KEY, owner_id BINARY(16), uuid BINARY(16), revision BIGINT, shard INT,
        begins BOOLEAN NOT NULL DEFAULT FALSE, ends BOOLEAN NOT NULL DEFAULT FALSE, version BIGINT,
        came BOOLEAN NOT NULL DEFAULT FALSE, KEY (shard, owner_id, version)
    )""",
    "CREATE TABLE audit_reigns (shard INT, owner_id BINARY(16), version BIGINT, begun BOOLEAN)",
    "CREATE TABLE audit_committed (n BIGINT)",
    """CREATE TRIGGER audit_timers_insert AFTER INSERT ON timers FOR EACH ROW
        INSERT INTO audit_changes (uuid, revision, came) VALUES (NEW.uuid, NEW.revision, TRUE)""",
    _noted("timers", "UPDATE", _CHANGED, "NEW.status = 'executing'"),
    _noted("timers", "DELETE", "TRUE", "FALSE"),
    _noted("history", "UPDATE", _CHANGED, "FALSE"),
    _noted("history", "DELETE", "TRUE", "FALSE"),
    """CREATE TRIGGER audit_shards AFTER UPDATE ON shards FOR EACH ROW BEGIN
        IF NOT OLD.owner_id <=> NEW.owner_id OR OLD.version <> NEW.version THEN
            INSERT INTO audit_reigns VALUES (OLD.shard, OLD.owner_id, OLD.version, FALSE);
            INSERT INTO audit_committed SELECT n FROM audit_changes
            WHERE shard = OLD.shard AND owner_id = OLD.owner_id AND version = OLD.version FOR UPDATE SKIP LOCKED;
            INSERT INTO audit_reigns VALUES (NEW.shard, NEW.owner_id, NEW.version, TRUE);
        END IF;
    END""",
)

_RESET = (
    "UPDATE shards SET owner_id = NULL, version = 0, lease_until = 0",
    *(f"DELETE FROM {table}" for table in ("timers", "history", "tallies", "instances")),
    *(f"DELETE FROM audit_{table}" for table in ("changes", "reigns", "committed")),
)

_VIOLATIONS = (
    """SELECT CONCAT('a write by ', c.owner_id, ' at version ', c.version, ' of shard ', c.shard, ', whose reign ended')
    FROM audit_changes c JOIN audit_reigns r USING (shard, owner_id, version)
    WHERE (c.begins OR c.ends) AND NOT r.begun AND c.n NOT IN (SELECT n FROM audit_committed)""",
    """SELECT CONCAT('a write by ', owner_id, ' at version ', version, ' of shard ', shard, ', which never was its')
    FROM audit_changes c WHERE (begins OR ends) AND owner_id IS NOT NULL AND NOT EXISTS (
        SELECT 1 FROM audit_reigns r
        WHERE r.begun AND (r.shard, r.owner_id, r.version) = (c.shard, c.owner_id, c.version))""",
    # A put that finds a final timer deletes the row that it inserted, and may insert it again.
    """SELECT CONCAT('revision ', revision, ' of ', HEX(uuid), ' was changed ', SUM(NOT came), ' times')
    FROM audit_changes GROUP BY uuid, revision HAVING SUM(NOT came) > GREATEST(1, SUM(came))""",
    """SELECT CONCAT(HEX(uuid), ' is there ', COUNT(*), ' times')
    FROM (SELECT uuid FROM timers UNION ALL SELECT uuid FROM history) AS both_tables
    GROUP BY uuid HAVING COUNT(*) > 1""",
    """SELECT CONCAT('the tally of ', namespace, ' ', status, ' in slice ', slice, ' is ', SUM(number), ' off') FROM (
        SELECT namespace, status, slice, timers AS number FROM tallies
        UNION ALL SELECT namespace, status, 0, -1 FROM timers
        UNION ALL SELECT namespace, status, (SELECT MIN(starts_at) FROM slices WHERE ended_at < ends_at), -1
            FROM history
    ) AS both_sides GROUP BY namespace, status, slice HAVING SUM(number) <> 0""",
)

_LOCKS = {
    Lock.SHARD: "SELECT 1 FROM shards WHERE shard = {} FOR UPDATE",
    Lock.SHARD_SHARED: "SELECT 1 FROM shards WHERE shard = {} LOCK IN SHARE MODE",
    Lock.TIMERS: "SELECT 1 FROM timers FORCE INDEX (PRIMARY) WHERE shard = {} ORDER BY uuid FOR UPDATE",
    Lock.TIMER: "SELECT 1 FROM timers FORCE INDEX (PRIMARY) WHERE shard = {} ORDER BY uuid LIMIT 1 FOR UPDATE",
    Lock.TALLIES: "SELECT 1 FROM tallies WHERE {} >= 0 ORDER BY namespace, status, slice, spread FOR UPDATE",
}


class MysqlAudit:
    def __init__(self, connection: Any, url: str) -> None:
        self._connection = connection
        self._url = url

    @classmethod
    async def of(cls, url: str) -> MysqlAudit:
        connection = await asyncmy.connect(**connect_arguments(url))
        try:
            await run(
                connection, ["SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED", "SET SESSION sql_notes = 0"]
            )
            for statement in _INSTALL:
                await run(connection, [statement])
            for owner_id in OWNERS:
                user = _user(owner_id)
                await run(connection, [f"CREATE USER IF NOT EXISTS {user}@localhost"])
                await run(connection, [f"GRANT ALL ON *.* TO {user}@localhost"])
                await run(connection, [f"INSERT INTO audit_owners VALUES ('{user}', {literal(owner_id)})"])
        except BaseException:
            connection.close()
            raise
        return cls(connection, url)

    def url(self, owner_id: bytes) -> str:
        return self._url.replace("//root@", f"//{_user(owner_id)}@")

    async def reset(self) -> None:
        await run(self._connection, ["START TRANSACTION", *_RESET, "COMMIT"])

    async def violations(self) -> list[str]:
        return [str(text) for result in await run(self._connection, _VIOLATIONS) for (text,) in result.rows]

    async def changes(self, kind: str) -> set[Change]:
        asked = f"SELECT owner_id, uuid, revision FROM audit_changes WHERE {kind} AND owner_id IS NOT NULL"
        [found] = await run(self._connection, [asked])
        return {tuple(row) for row in found.rows}

    async def give(self, shard: int, owner_id: bytes) -> None:
        await run(self._connection, [f"UPDATE shards SET owner_id = {literal(owner_id)} WHERE shard = {shard}"])

    @asynccontextmanager
    async def locked(self, lock: Lock, shard: int) -> AsyncIterator[None]:
        await run(self._connection, ["START TRANSACTION", _LOCKS[lock].format(shard)])
        try:
            yield
        finally:
            await run(self._connection, ["ROLLBACK"])

    async def waiting(self, number: int, unless: asyncio.Future[Any] | None = None) -> None:
        waits = "SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'"
        async with asyncio.timeout(WAIT_SECONDS_MAX):
            while not (unless and unless.done()):
                [found] = await run(self._connection, [waits])
                if int(found.rows[0][1]) >= number:
                    break

    async def close(self) -> None:
        self._connection.close()
