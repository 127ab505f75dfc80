"""Drops what is old from PostgreSQL: whole slices of history, and row by row what is kept for less time than the rest.

Of the namespaces and statuses that have something old, each statement drops a few timers, so nobody waits long for one
and none of them waits for another.
"""

from __future__ import annotations

from collections.abc import Mapping

from duetime.stores.postgres_pool import Connection, PostgresPool
from duetime.stores.postgres_schema import SLICE_LOCK
from duetime.stores.postgres_statements import SLICE, counted

ROWS_AT_ONCE, GROUPS_AT_ONCE = 1_000, 64
"""How many timers one statement drops, and of how many namespaces and statuses."""
LOCK_MS_MAX = 1_000
"""How long upkeep waits for a lock: everybody else waits behind it meanwhile, and it comes again in a minute."""

_OLD = "history.namespace = old.namespace AND history.status = old.status AND updated_at < before"

# $1: namespaces, $2: changed before when. Which of them have old timers, by status: one seek in an index for each.
_GROUPS = f"""
    SELECT namespace, status, before FROM (
        SELECT * FROM unnest($1::text[], $2::bigint[]) AS kept (namespace, before)
        CROSS JOIN (VALUES ('completed'), ('failed'), ('canceled')) AS final (status)
    ) AS old
    CROSS JOIN LATERAL (SELECT FROM history WHERE {_OLD} LIMIT 1) AS first
"""

_SLICE = SLICE.format(at="ended_at")
# $1: namespaces, $2: statuses, $3: changed before when, $4: limit of each. Another instance takes the ones behind.
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


async def drop_rows(pool: PostgresPool, before: Mapping[str, int], limit: int) -> int:
    """Drop up to ``limit`` timers that were changed last before the instant of their namespace; how many it was."""
    groups = list(await pool.read(_GROUPS, list(before), list(before.values()))) if before else []
    purged = 0
    while groups and purged < limit:
        number = min(GROUPS_AT_ONCE, limit - purged)
        some, groups = groups[:number], groups[number:]
        each = max(1, min(ROWS_AT_ONCE, limit - purged) // len(some))
        dropped = await pool.write(_PURGE, *zip(*some, strict=True), each)
        counts = {(namespace, status): number for namespace, status, number in dropped}
        purged += sum(counts.values())
        groups += [group for group in some if counts.get((group["namespace"], group["status"])) == each]
    return purged


async def drop_slices(connection: Connection, until: int) -> int:
    """Drop the slices that ended by then; how many timers were in them."""
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
