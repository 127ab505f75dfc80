"""Opening a PostgreSQL database: makes the schema or brings it up to date, beside instances that work on it.

``meta`` says how far the schema is: ``steps`` counts the entries of ``MIGRATIONS`` that were done, and ``schema`` is
the last of them that a program has to know to work here. So a program runs on a schema that is newer than itself as
long as the steps that it does not know only add to it.

A step that needs a lock gives up after a moment, lets through whoever came meanwhile, and tries again. So no working
instance waits long, and when it and a step wait for each other, the step gives in.

How it fails: ``SettingsError`` for a database that this program must not use.
"""

from __future__ import annotations

import asyncio

from duetime.errors import SettingsError
from duetime.model import DEFAULT_NAMESPACE, Namespace
from duetime.stores.postgres_namespaces import namespace_row
from duetime.stores.postgres_pool import BUSY, Connection
from duetime.stores.postgres_schema import BREAKING, MIGRATIONS, SCHEMA, InBatches

MIGRATION_LOCK, STEPS_LOCK = 4_711_001, 4_711_003
"""Of those who start together one makes the tables, and one does the steps beside them. The first lock is the one that
programs of before ask for, with little patience: it is held for a moment only."""
LOCK_MS_MAX = 500
"""Less than the second after which PostgreSQL looks for those who wait for each other, and ends one of them."""
AGAIN_SECONDS = 0.1

_SET_META = "INSERT INTO meta VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET value = excluded.value"


async def bring_up(connection: Connection, *, shards: int, now: str, at: int | None) -> None:
    """Make what is missing; ``now`` is the store's clock in SQL, and ``at`` its argument."""
    await connection.execute("SET statement_timeout = 0")
    await connection.execute("SELECT pg_advisory_lock($1)", STEPS_LOCK)
    try:
        done = await _make(connection, shards, now, at)
        for number, script in enumerate(MIGRATIONS[done:], done + 1):
            await _do(connection, number, script)
    finally:
        if not connection.is_closed():
            await connection.execute("SELECT pg_advisory_unlock($1)", STEPS_LOCK)
            await connection.execute("RESET statement_timeout; RESET lock_timeout")


async def _make(connection: Connection, shards: int, now: str, at: int | None) -> int:
    """Make the tables up to the last step that may not be left out, and all of them where there are none; how many
    steps are done."""
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", MIGRATION_LOCK)
        await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
        await connection.execute("CREATE TABLE IF NOT EXISTS meta (name text PRIMARY KEY, value int NOT NULL)")
        meta = {name: value for name, value in await connection.fetch("SELECT name, value FROM meta")}
        schema = meta.get("schema", 0)
        if schema > len(MIGRATIONS):
            raise SettingsError(
                f"DATABASE_URL: this database was written by a newer Duetime (schema {schema}, this program "
                f"knows {len(MIGRATIONS)}): run that version or a later one"
            )
        steps: int = meta.get("steps", schema)
        for script in MIGRATIONS[steps : BREAKING if steps else None]:
            if not isinstance(script, InBatches):  # which has rows to change
                await connection.execute(script)
        steps = max(steps, BREAKING) if steps else len(MIGRATIONS)
        await connection.execute(_SET_META, "steps", steps)
        await connection.execute(_SET_META, "schema", max(schema, BREAKING))
        found = meta.get("shards")
        if found is None:
            await connection.execute(_SET_META, "shards", shards)
            await connection.execute("INSERT INTO shards (shard) SELECT generate_series(0, $1::int - 1)", shards)
            default = Namespace(
                name=DEFAULT_NAMESPACE, shards=shards, created_at=await connection.fetchval(f"SELECT {now}", at)
            )
            name, paused, definition, *_ = namespace_row(default)
            statement = "INSERT INTO namespaces (name, paused, definition) VALUES ($1, $2, $3)"
            await connection.execute(statement, name, paused, definition)
        elif found != shards:
            raise SettingsError(
                f"DUETIME_SHARDS is {shards}, but this database was made with {found}: the number of shards "
                f"is fixed, set it to {found}"
            )
        return steps


async def _do(connection: Connection, number: int, script: str) -> None:
    await connection.execute(f"SET lock_timeout = {LOCK_MS_MAX}")
    while True:
        try:
            if isinstance(script, InBatches):
                await connection.execute(str(script))
                await connection.execute(_SET_META, "steps", number)
                return
            async with connection.transaction():
                await connection.execute(script)
                await connection.execute(_SET_META, "steps", number)
                return
        except BUSY:
            await asyncio.sleep(AGAIN_SECONDS)
