"""The tables of the SQLite store and how older files are brought up to them: forward only, one step per entry.

A timer has one row from its creation to the end of its retention. What keeps the hot path small is not a second
table but partial indexes: ``timers_due`` holds pending timers alone, ``timers_executing`` those under way,
``timers_final`` the history by age; ``timers_lane`` has the pending ones by lane, so that a look can pass over lanes
that are held back. Firing a timer moves entries between small indexes; it never touches the big random one on ``uuid``
(docs/decisions/0003, 0023).
"""

from __future__ import annotations

from pathlib import Path

from duetime.errors import SettingsError
from duetime.model import lane_of
from duetime.stores.sqlite_rows import Connection
from duetime.stores.targets import destination_in

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
    # The key of a timer whose id is a UUID begins like that (docs/decisions/0013); it was the hash alone.
    f"""
    UPDATE timers SET uuid = unhex(substr(id, 1, 8) || substr(id, 10, 2) || substr(hex(uuid), 1, 22))
    WHERE id GLOB '{"-".join(_HEX * digits for digits in (8, 4, 4, 4, 12))}';
    """,
    # What is due in a paused namespace is kept apart (docs/decisions/0019).
    """
    ALTER TABLE timers ADD COLUMN parked TEXT NOT NULL DEFAULT '';
    DROP INDEX timers_due;
    CREATE INDEX timers_due ON timers (fire_at) WHERE status = 'pending' AND parked = '';
    CREATE INDEX timers_parked ON timers (parked, fire_at) WHERE parked > '';
    """,
    # Lanes take the place of parking: what is held back is passed over, and never written (docs/decisions/0023). With
    # its lane behind the order of pages, a timer that is passed over is not read.
    """
    DROP INDEX timers_due;
    DROP INDEX timers_parked;
    ALTER TABLE timers DROP COLUMN parked;
    ALTER TABLE timers ADD COLUMN lane INTEGER NOT NULL DEFAULT 0;
    UPDATE timers SET lane = duetime_lane(namespace, definition);
    CREATE INDEX timers_due ON timers (fire_at, seq, lane) WHERE status = 'pending';
    CREATE INDEX timers_lane ON timers (lane, fire_at) WHERE status = 'pending';
    """,
    # With thousands of namespaces, a page of all finished timers does not ask each of them, and a look does not read
    # them all to see which are paused. An index of one column for each status costs a record a tenth of what one of
    # two columns for all of them does (docs/decisions/0025).
    """
    CREATE INDEX IF NOT EXISTS timers_completed ON timers (updated_at) WHERE status = 'completed';
    CREATE INDEX IF NOT EXISTS timers_failed ON timers (updated_at) WHERE status = 'failed';
    CREATE INDEX IF NOT EXISTS timers_canceled ON timers (updated_at) WHERE status = 'canceled';
    CREATE INDEX IF NOT EXISTS namespaces_paused ON namespaces (name) WHERE paused;
    """,
    # Sessions that were signed out before their end (docs/decisions/0028). The row without an id is for all that would
    # have ended by its time.
    """
    CREATE TABLE IF NOT EXISTS ended_sessions (id BLOB PRIMARY KEY, ends_at INTEGER NOT NULL) STRICT, WITHOUT ROWID;
    """,
    # The timers that a program could not read, with what they were before (docs/decisions/0026).
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
    """For rows that were written before there were lanes."""
    return lane_of(namespace, destination_in(definition))
