"""Opening a MySQL database: creates or migrates the tables.

``meta`` records the version of the schema. Of the instances that start at the same time, one creates the tables, under
a named lock of the server. How it fails: ``SettingsError`` for a database that this program must not use.
"""

from __future__ import annotations

import os
from typing import Any

from duetime.errors import SettingsError
from duetime.instants import Instant
from duetime.model import DEFAULT_NAMESPACE, Namespace
from duetime.stores.datagram_hints import KEY_BYTES
from duetime.stores.mysql.literals import listed
from duetime.stores.mysql.namespaces import namespace_row
from duetime.stores.mysql.pool import ServerError, lock, run, unlock
from duetime.stores.mysql.schema import MIGRATIONS

LOCK, LOCK_SECONDS_MAX = "duetime migration", 300
_DONE = frozenset({1060, 1061, 1091})
"""The column or index exists, or was dropped: an earlier start was stopped in the middle of the step."""


async def migrate(connection: Any, *, shards: int, now: Instant) -> None:
    """Create or migrate the schema; ``now`` is the store's time."""
    if not await lock(connection, LOCK, LOCK_SECONDS_MAX):
        raise SettingsError(
            "DATABASE_URL: another instance has been migrating the schema for five minutes: wait until it has "
            "finished, then start again"
        )
    await _create(connection, shards, now)
    await unlock(connection, LOCK)


async def _create(connection: Any, shards: int, now: Instant) -> None:
    await run(
        connection,
        ["CREATE TABLE IF NOT EXISTS meta (name VARCHAR(64) PRIMARY KEY, value BIGINT NOT NULL) ENGINE = InnoDB"],
    )
    [found] = await run(connection, ["SELECT name, value FROM meta"])
    meta = dict(found.rows)
    done = meta.get("schema", 0)
    if done > len(MIGRATIONS):
        raise SettingsError(
            f"DATABASE_URL: this database was written by a newer Duetime (schema {done}, this program knows "
            f"{len(MIGRATIONS)}): run that version or a later one"
        )
    for number, statements in enumerate(MIGRATIONS[done:], done + 1):
        for statement in statements:
            try:
                await run(connection, [statement])
            except ServerError as error:
                if error.args[0] not in _DONE:
                    raise
        await run(connection, [f"REPLACE INTO meta VALUES ('schema', {number})"])
    if "shards" not in meta:
        default = Namespace(name=DEFAULT_NAMESPACE, shards=shards, created_at=now)
        await run(
            connection,
            [
                "START TRANSACTION",
                f"INSERT INTO shards (shard) VALUES {', '.join(f'({shard})' for shard in range(shards))}",
                f"INSERT INTO namespaces VALUES {listed(namespace_row(default))}",
                f"INSERT INTO hint_key VALUES {listed((1, os.urandom(KEY_BYTES)))}",
                f"INSERT INTO meta VALUES ('shards', {shards})",
                "COMMIT",
            ],
        )
    elif meta["shards"] != shards:
        raise SettingsError(
            f"DUETIME_SHARDS is {shards}, but this database was created with {meta['shards']}: the number of shards is "
            f"fixed, set it to {meta['shards']}"
        )
