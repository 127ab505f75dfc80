"""The tables of the SQLite store, and their migrations: forward only, one entry per step.

A timer is one row from its creation to the end of its retention. Partial indexes, instead of a second table, keep the
hot path small: ``timers_due`` contains only pending timers, ``timers_executing`` the executing ones, and
``timers_final`` the final ones by age. ``timers_lane`` contains the pending timers by lane, so that a poll can skip
lanes that are held back. Firing a timer moves entries between small indexes; it never changes the large random index on
``uuid`` (docs/decisions/0003, 0023).
"""

from __future__ import annotations

from pathlib import Path

from duetime.errors import SettingsError
from duetime.model import lane_of
from duetime.stores.sqlite.rows import Connection
from duetime.stores.stored_destination import destination_in

_HEX = "[0-9A-Fa-f]"

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE meta (name TEXT PRIMARY KEY, value ANY NOT NULL) STRICT, WITHOUT ROWID;

    CREATE TABLE shards (
        shard       INTEGER PRIMARY KEY,
        owner_id    BLOB,
        version     INTEGER NOT NULL DEFAULT 0,
        lease_until INTEGER NOT NULL DEFAULT 0
    ) STRICT;

    CREATE TABLE instances (owner_id BLOB PRIMARY KEY, alive_until INTEGER NOT NULL) STRICT, WITHOUT ROWID;

    CREATE TABLE namespaces (
        name       TEXT PRIMARY KEY,
        paused     INTEGER NOT NULL,
        retention_ms INTEGER,
        definition BLOB NOT NULL
    ) STRICT, WITHOUT ROWID;

    CREATE TABLE timers (
        seq            INTEGER PRIMARY KEY,  -- created_at << 20, plus a counter: the order of creation
        uuid           BLOB NOT NULL,
        namespace      TEXT NOT NULL,
        id             TEXT NOT NULL,
        shard          INTEGER NOT NULL,
        definition     TEXT NOT NULL,
        timeout_ms     INTEGER NOT NULL,
        fingerprint    TEXT NOT NULL,
        correlation_id TEXT,
        created_at     INTEGER NOT NULL,
        updated_at     INTEGER NOT NULL,
        revision       INTEGER NOT NULL,
        firing         INTEGER NOT NULL,
        execute_at     INTEGER NOT NULL,
        fire_at        INTEGER NOT NULL,
        status         TEXT NOT NULL,
        attempt        INTEGER NOT NULL,
        failures       INTEGER NOT NULL,
        lost           INTEGER NOT NULL,
        last_error     TEXT,
        started_at     INTEGER,
        executed_at    INTEGER,
        deadline_at    INTEGER,
        version        INTEGER NOT NULL,
        attempts       TEXT NOT NULL
    ) STRICT;

    CREATE UNIQUE INDEX timers_uuid ON timers (uuid);
    CREATE INDEX timers_due ON timers (fire_at) WHERE status = 'pending';
    CREATE INDEX timers_executing ON timers (deadline_at) WHERE status = 'executing';
    CREATE INDEX timers_final ON timers (namespace, status, updated_at) WHERE status NOT IN ('pending', 'executing');

    -- For lists: newest first, soonest first, and what belongs together. A rowid ends every index: each has an order.
    CREATE INDEX timers_namespace ON timers (namespace);
    CREATE INDEX timers_execute_at ON timers (execute_at);
    CREATE INDEX timers_correlation_id ON timers (correlation_id) WHERE correlation_id IS NOT NULL;

    -- Exact counts without a scan, kept by the transactions that change them.
    CREATE TABLE tallies (
        namespace TEXT NOT NULL,
        status    TEXT NOT NULL,
        timers    INTEGER NOT NULL,
        PRIMARY KEY (namespace, status)
    ) STRICT, WITHOUT ROWID;
    """,
    """
    DROP TABLE instances;
    CREATE TABLE instances (
        owner_id    BLOB PRIMARY KEY,
        alive_until INTEGER NOT NULL,
        serving     INTEGER NOT NULL,
        about       BLOB NOT NULL
    ) STRICT, WITHOUT ROWID;
    """,
    # The key of a timer whose id is a UUID starts like the id (docs/decisions/0013); before, it was only the hash.
    f"""
    UPDATE timers SET uuid = unhex(substr(id, 1, 8) || substr(id, 10, 2) || substr(hex(uuid), 1, 22))
    WHERE id GLOB '{"-".join(_HEX * digits for digits in (8, 4, 4, 4, 12))}';
    """,
    # Due timers of paused namespaces are kept apart (docs/decisions/0019).
    """
    ALTER TABLE timers ADD COLUMN parked TEXT NOT NULL DEFAULT '';
    DROP INDEX timers_due;
    CREATE INDEX timers_due ON timers (fire_at) WHERE status = 'pending' AND parked = '';
    CREATE INDEX timers_parked ON timers (parked, fire_at) WHERE parked > '';
    """,
    # Lanes replace parking: timers that are held back are skipped instead of written (docs/decisions/0023). The index
    # contains the lane, so that a skipped timer's row is not read.
    """
    DROP INDEX timers_due;
    DROP INDEX timers_parked;
    ALTER TABLE timers DROP COLUMN parked;
    ALTER TABLE timers ADD COLUMN lane INTEGER NOT NULL DEFAULT 0;
    UPDATE timers SET lane = duetime_lane(namespace, definition);
    CREATE INDEX timers_due ON timers (fire_at, seq, lane) WHERE status = 'pending';
    CREATE INDEX timers_lane ON timers (lane, fire_at) WHERE status = 'pending';
    """,
    # With thousands of namespaces, a page of all final timers must not query each namespace, and a poll must not read
    # all of them to find the paused ones. A one-column index per status costs a record a tenth of what a two-column
    # index for all statuses would (docs/decisions/0025).
    """
    CREATE INDEX IF NOT EXISTS timers_completed ON timers (updated_at) WHERE status = 'completed';
    CREATE INDEX IF NOT EXISTS timers_failed ON timers (updated_at) WHERE status = 'failed';
    CREATE INDEX IF NOT EXISTS timers_canceled ON timers (updated_at) WHERE status = 'canceled';
    CREATE INDEX IF NOT EXISTS namespaces_paused ON namespaces (name) WHERE paused;
    """,
    # Sessions that ended before their expiry (docs/decisions/0028). The row with an empty id ends all sessions that
    # expire no later than its time.
    """
    CREATE TABLE IF NOT EXISTS ended_sessions (id BLOB PRIMARY KEY, ends_at INTEGER NOT NULL) STRICT, WITHOUT ROWID;
    """,
    # The timers that a program could not read, with their previous status (docs/decisions/0026).
    """
    CREATE TABLE quarantine (
        uuid           BLOB PRIMARY KEY,
        namespace      TEXT NOT NULL,
        id             TEXT NOT NULL,
        status         TEXT NOT NULL,  -- what it goes back to
        reason         TEXT NOT NULL,
        quarantined_at INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    """,
)


def migrate(connection: Connection, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").get
    if version == 0 and connection.execute("SELECT count(*) FROM sqlite_schema").get:
        raise SettingsError(f"DATABASE_URL: {path} is a SQLite file of another program; give Duetime one of its own")
    if version > len(MIGRATIONS):
        raise SettingsError(
            f"DATABASE_URL: {path} was written by a newer Duetime (schema {version}, this program knows "
            f"{len(MIGRATIONS)}): run that version or a later one"
        )
    connection.create_scalar_function("duetime_lane", _lane, 2)
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        connection.execute(script)
        connection.execute(f"PRAGMA user_version = {number}")


def _lane(namespace: str, definition: str) -> int:
    """The lane of a row from before lanes existed."""
    return lane_of(namespace, destination_in(definition))
