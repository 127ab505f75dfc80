"""Opening a PostgreSQL database: creates or migrates the schema while other instances may be using it.

``meta`` records the version of the schema: ``steps`` is the number of ``MIGRATIONS`` applied, and ``schema`` is the
last one that a program must know in order to use the database. So a program can run on a schema newer than itself as
long as the steps that it does not know only add to it.

A step that needs a lock gives up after a short timeout, so that waiting statements can proceed, and tries again. So no
running instance waits long, and in a deadlock between an instance and a step, the step is the one that gives up.

How it fails: ``SettingsError`` for a database that this program must not use.
"""

from __future__ import annotations

import asyncio

from duetime.errors import SettingsError
from duetime.model import DEFAULT_NAMESPACE, Namespace
from duetime.stores.postgres.namespaces import namespace_row
from duetime.stores.postgres.pool import BUSY, STATEMENT_MS_MAX, Connection
from duetime.stores.postgres.schema import BREAKING, MIGRATIONS, SCHEMA, InBatches

MIGRATION_LOCK, STEPS_LOCK = 4_711_001, 4_711_003
"""Advisory locks: of the instances that start at the same time, one creates the tables and one runs the later steps.
Older releases also take the first lock, with a short timeout, so it is held only briefly."""
LOCK_MS_MAX = 500
"""Less than PostgreSQL's ``deadlock_timeout`` of one second, so that a step gives up before an instance is chosen as
the victim of a deadlock."""
RETRY_SECONDS = 0.1

_SET_META = "INSERT INTO meta VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET value = excluded.value"


async def migrate(connection: Connection, *, shards: int, now: str, at: int | None) -> None:
    """Create or migrate the schema; ``now`` is the store's clock in SQL, and ``at`` its argument."""
    await connection.execute("SET statement_timeout = 0")
    await connection.execute("SELECT pg_advisory_lock($1)", STEPS_LOCK)
    try:
        done = await _create(connection, shards, now, at)
        for number, script in enumerate(MIGRATIONS[done:], done + 1):
            await _run_step(connection, number, script)
    finally:
        if not connection.is_closed():
            await connection.execute("SELECT pg_advisory_unlock($1)", STEPS_LOCK)
            await connection.execute(f"SET statement_timeout = {STATEMENT_MS_MAX}; RESET lock_timeout")


async def _create(connection: Connection, shards: int, now: str, at: int | None) -> int:
    """Apply the steps up to the last required one, or all of them to an empty database. Return how many steps are
    applied."""
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
            if not isinstance(script, InBatches):  # these change rows and run later, outside this transaction
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
                f"DUETIME_SHARDS is {shards}, but this database was created with {found}: the number of shards "
                f"is fixed, set it to {found}"
            )
        return steps


async def _run_step(connection: Connection, number: int, script: str) -> None:
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
            await asyncio.sleep(RETRY_SECONDS)
