"""Slices of history in PostgreSQL: creates the partitions that are needed, and drops old timers, by slice and by row.

Each statement deletes a few timers of each namespace and status that has old ones, so that no other statement waits
long and the groups take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from duetime.stores.postgres.pool import Connection, PostgresPool
from duetime.stores.postgres.schema import SLICE_LOCK, slice_statements
from duetime.stores.postgres.statements import SLICE, counted, now
from duetime.stores.sql.retention import drop_in_turns, missing_slices

ROWS_AT_ONCE = 1_000
"""How many timers one statement deletes."""
LOCK_MS_MAX = 1_000
"""How long upkeep waits for a lock. Other statements queue behind it meanwhile, and upkeep runs again in a minute."""

_OLD = "history.namespace = old.namespace AND history.status = old.status AND updated_at < before"

# $1: namespaces, $2: cutoff of each. Returns those with old timers, by status, with one index seek for each.
_GROUPS = f"""
    SELECT namespace, status, before FROM (
        SELECT * FROM unnest($1::text[], $2::bigint[]) AS kept (namespace, before)
        CROSS JOIN (VALUES ('completed'), ('failed'), ('canceled')) AS final (status)
    ) AS old
    CROSS JOIN LATERAL (SELECT FROM history WHERE {_OLD} LIMIT 1) AS first
"""

_SLICE = SLICE.format(at="ended_at")
# $1: namespaces, $2: statuses, $3: cutoffs, $4: limit of each. Skips rows that another instance is deleting.
_PURGE = f"""
    WITH old AS MATERIALIZED (
        SELECT each.* FROM unnest($1::text[], $2::text[], $3::bigint[]) AS old (namespace, status, before)
        CROSS JOIN LATERAL (
            SELECT uuid, ended_at FROM history WHERE {_OLD} ORDER BY updated_at LIMIT $4 FOR UPDATE SKIP LOCKED
        ) AS each
    ),
    gone AS (
        DELETE FROM history USING old WHERE history.uuid = old.uuid AND history.ended_at = old.ended_at
        RETURNING history.namespace, history.status, history.ended_at
    ), {counted(f"SELECT namespace, status, {_SLICE} AS slice, -1 AS change FROM gone")}
    SELECT namespace, status, count(*) FROM gone GROUP BY namespace, status
"""


async def make_slices(connection: Connection, at: int | None, longest_ms: int) -> int:
    """Create the slices that cover today and tomorrow, if missing. Return the store's time, or ``at`` if given."""
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", SLICE_LOCK)
        await connection.execute(f"SET LOCAL lock_timeout = {LOCK_MS_MAX}")
        store_now: int = await connection.fetchval(f"SELECT {now('$1')}", at)
        slices = {starts: ends for starts, ends in await connection.fetch("SELECT starts_at, ends_at FROM slices")}
        for starts_at, ends_at in missing_slices(store_now, slices, longest_ms):
            for statement in slice_statements(starts_at, ends_at):
                await connection.execute(statement)
    return store_now


async def drop_rows(pool: PostgresPool, before: Mapping[str, int], limit: int) -> int:
    """Delete up to ``limit`` final timers that last changed before the cutoff of their namespace. Return how many."""

    async def drop(groups: Sequence[Any], each: int) -> tuple[int, list[Any]]:
        dropped = await pool.write(_PURGE, *zip(*groups, strict=True), each)
        counts = {(namespace, status): number for namespace, status, number in dropped}
        more = [group for group in groups if counts.get((group["namespace"], group["status"])) == each]
        return sum(counts.values()), more

    groups = await pool.read(_GROUPS, list(before), list(before.values())) if before else []
    return await drop_in_turns(groups, limit, ROWS_AT_ONCE, drop)


async def drop_slices(connection: Connection, until: int) -> int:
    """Drop the slices that ended by ``until``. Return how many timers they held."""
    dropped = 0
    for starts_at, _ in await connection.fetch("SELECT starts_at, ends_at FROM slices WHERE ends_at <= $1", until):
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock($1)", SLICE_LOCK)
            await connection.execute(f"SET LOCAL lock_timeout = {LOCK_MS_MAX}")
            if await connection.fetch("DELETE FROM slices WHERE starts_at = $1 RETURNING 1", starts_at):
                await connection.execute(f"DROP TABLE history_{starts_at}")
                counts = await connection.fetch("DELETE FROM tallies WHERE slice = $1 RETURNING timers", starts_at)
                dropped += sum(number for (number,) in counts)
    return dropped
