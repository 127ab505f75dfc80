"""The minimal cost of a put, a begin and a record on MySQL and MariaDB: plain statements through the driver.

They write the same rows into the tables of the store, with as few statements as each step needs: the fence and the
rows, without checking for existing identities, without counts by status, and without decoding the rows into timers.
Each transaction is one packet and its commit is as durable as the store's. The text of an insert is built before the
clock starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncmy

from bench.timers import SHARDS
from duetime.lifecycle import ATTEMPT_GRACE_MS
from duetime.model import Timer
from duetime.stores.mysql.literals import listed, literal
from duetime.stores.mysql.pool import connect_arguments
from duetime.stores.sql.columns import FINAL, INITIAL, NEW, TIMER, new_row


class RawMysql:
    """One connection to a database of the store; ``owner_id`` owns its shards."""

    def __init__(self, url: str, owner_id: bytes) -> None:
        self._url = url
        self._seq = 0
        shards = f"SELECT COUNT(*) FROM shards WHERE owner_id = {literal(owner_id)} LOCK IN SHARE MODE"
        self._fence = f"SET @ok = ({shards}) = {SHARDS}"

    async def open(self) -> None:
        self._connection = await asyncmy.connect(**connect_arguments(self._url))
        await self._send("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")

    def close(self) -> None:
        self._connection.close()

    async def _send(self, *statements: str) -> Sequence[Any]:
        """Send the statements as one packet and return the rows of the last one."""
        async with self._connection.cursor() as cursor:
            await cursor.execute(";\n".join(statements))
            while await cursor.nextset():
                pass
            rows: Sequence[Any] = await cursor.fetchall() if cursor.description else ()
            return rows

    def insert(self, timers: Sequence[Timer]) -> str:
        """Build the statement for ``put``."""
        rows = []
        for timer in timers:
            self._seq += 1
            first = ", ".join(str(getattr(timer, value, value)) for value in INITIAL.values())
            rows.append(f"({self._seq}, {listed(new_row(timer))[1:-1]}, {first})")
        return f"INSERT INTO timers (seq, {', '.join((*NEW, *INITIAL))}) VALUES {', '.join(rows)}"

    async def put(self, insert: str) -> None:
        await self._send("START TRANSACTION", insert, "COMMIT")

    async def begin(self, now: int, count: int) -> Sequence[Any]:
        """Select the due timers, begin them and read them again."""
        due = await self._send(
            f"SELECT uuid FROM timers FORCE INDEX (timers_due) WHERE fire_at <= {now} AND status = 'pending' "
            f"ORDER BY fire_at, seq LIMIT {count}"
        )
        self._begun = listed(uuid for (uuid,) in due)
        return await self._send(
            *("START TRANSACTION", self._fence),
            f"UPDATE timers SET status = 'executing', attempt = attempt + 1, started_at = {now}, version = 1, "
            f"deadline_at = {now} + timeout_ms + {ATTEMPT_GRACE_MS}, updated_at = {now}, revision = revision + 1 "
            f"WHERE uuid IN {self._begun} AND status = 'pending' AND @ok",
            "COMMIT",
            f"SELECT {TIMER}, uuid FROM timers WHERE uuid IN {self._begun}",
        )

    async def record(self, now: int, attempts: str) -> None:
        """Move the timers begun last into history; ``attempts`` is the stored list of attempts of each."""
        values = dict(zip(FINAL, FINAL, strict=True)) | {
            "status": "'completed'",
            "updated_at": str(now),
            "executed_at": str(now),
            "deadline_at": "NULL",
            "version": "0",
            "revision": "revision + 1",
            "attempts": literal(attempts),
        }
        await self._send(
            *("START TRANSACTION", self._fence),
            f"INSERT INTO history (seq, ended_at, {', '.join(values)}) "
            f"SELECT seq, {now}, {', '.join(values.values())} FROM timers WHERE uuid IN {self._begun} AND @ok",
            f"DELETE FROM timers WHERE uuid IN {self._begun} AND @ok",
            "COMMIT",
        )
