"""The tables, and the data of a new database.

``timers`` has one partition per shard, so that one conditional batch can change timers of a shard together with its
fence. Its rows are of several kinds:

    static             the fence (owner, version), the floor and ``touched``: see ``partition``; ``swept`` and
                       ``lost_above``: see ``backlog``
    kind HEAD          one row, to read the static columns by: a read without it would pass deleted timers
    kind TIMER         the timer, whole; ``slot`` says where its entry is. A final one expires.
    kind EXECUTING     an entry per executing timer, at the deadline of its attempt
    kind DUE           an entry per pending timer, at its fire time
    kind LANE          the same entries by lane
    kind QUARANTINED   an entry per timer that a begin could not read
    kind BACKLOG       a row per lane with entries that polls no longer pass

``cluster`` has one partition with the leases of all shards and the live instances. Every table is created with an id
that is derived from its name, so instances that start at the same time create the same one.

How it fails: ``SettingsError`` for a database that this program must not use.
"""

from __future__ import annotations

import os
from uuid import UUID, uuid5

import msgspec

from duetime.errors import SettingsError
from duetime.instants import Instant
from duetime.model import DEFAULT_NAMESPACE, Namespace
from duetime.stores.cassandra.driver import Call, Session
from duetime.stores.datagram_hints import KEY_BYTES

SCHEMA = 1
HEAD, TIMER, EXECUTING, DUE, LANE, QUARANTINED, BACKLOG = range(-1, 6)
AT_HEAD = f"kind = {HEAD} AND lane = 0 AND at = 0 AND uuid = 0x"
_HEAD = f"INSERT INTO timers (shard, kind, lane, at, uuid, revision) VALUES (?, {HEAD}, 0, 0, 0x, 0)"
"""Only an insert makes a row that exists without its columns. To check a condition on static columns alone, Cassandra
reads the first row that exists, without its columns: it must be this one, or the read passes all tombstones."""
GC_GRACE_SECONDS = 3 * 3600
"""How long deletions are kept: a node that was down for longer must be repaired before it comes back."""
NOBODY = b""
"""The owner of a shard without one."""

_TABLES = {
    "timers": f"""(
        shard int, kind tinyint, lane bigint, at bigint, uuid blob,
        owner blob STATIC, version bigint STATIC, floor bigint STATIC, swept bigint STATIC,
        lost_above bigint STATIC, touched blob STATIC,
        revision bigint, mark bigint, size int, namespace text, id text, fingerprint text,
        status text, slot bigint, writer blob, timer blob,
        fire_at bigint, destination text, begun_version bigint, deadline_at bigint, reason text,
        PRIMARY KEY ((shard), kind, lane, at, uuid)
    ) WITH gc_grace_seconds = {GC_GRACE_SECONDS} AND compaction = {{'class': 'UnifiedCompactionStrategy'}}""",
    "cluster": """(
        part tinyint, kind tinyint, key blob,
        owner blob, version bigint, lease_until bigint,
        about blob, serving boolean, alive_until bigint, address text,
        PRIMARY KEY ((part), kind, key)
    ) WITH gc_grace_seconds = 86400""",
    "namespaces": """(
        part tinyint, name text, changes bigint STATIC, number int STATIC, definition blob, revision bigint,
        PRIMARY KEY ((part), name)
    ) WITH gc_grace_seconds = 86400""",
    "tallies": """(
        part tinyint, process blob, namespace text, status text, day bigint, timers bigint,
        PRIMARY KEY ((part), process, namespace, status, day)
    ) WITH gc_grace_seconds = 86400""",
    "ended_sessions": """(
        part tinyint, id blob, ends_at bigint, PRIMARY KEY ((part), id, ends_at)
    ) WITH gc_grace_seconds = 86400""",
    "meta": "(name text PRIMARY KEY, number bigint, bytes blob) WITH gc_grace_seconds = 86400",
}
TABLES = tuple(_TABLES)
_IDS = UUID("6f0c8d1e-5a7b-4a44-9c1d-2b6f3e0a9d57")

_encode = msgspec.json.Encoder().encode


def create(session: Session, keyspace: str) -> None:
    """Create the tables that are missing; blocks."""
    for name, definition in _TABLES.items():
        id = uuid5(_IDS, f"{keyspace}.{name}")
        session.run(f"CREATE TABLE IF NOT EXISTS {keyspace}.{name} {definition} AND id = {id}")


async def fill(session: Session, *, shards: int, now: Instant) -> bytes:
    """Write what a new database contains, if it is not there. Every step may be repeated, and by several instances at
    once; ``meta`` comes last. Return the key of hints."""
    meta = {name: number for name, number in await session.read("SELECT name, number FROM meta")}
    if meta.get("schema", 0) > SCHEMA:
        raise SettingsError(
            f"DATABASE_URL: this database was written by a newer Duetime (schema {meta['schema']}, this program knows "
            f"{SCHEMA}): run that version or a later one"
        )
    await _note(session, "shards", number=shards)
    [(made,)] = await session.read("SELECT number FROM meta WHERE name = 'shards'")
    if made != shards:
        raise SettingsError(
            f"DUETIME_SHARDS is {shards}, but this database was created with {made}: the number of shards is "
            f"fixed, set it to {made}"
        )
    if "schema" not in meta:
        for shard in range(shards):
            await session.apply(
                [
                    Call(
                        "UPDATE timers SET owner = ?, version = 0, floor = -1, swept = -1, lost_above = -1, "
                        "touched = ? WHERE shard = ? IF version = null",
                        (NOBODY, NOBODY, shard),
                    ),
                    Call(_HEAD, (shard,)),
                ]
            )
        await session.apply(
            [
                Call(
                    "UPDATE cluster SET version = 0, lease_until = 0 WHERE part = 0 AND kind = 0 AND key = ? "
                    "IF version = null",
                    (shard_key(shard),),
                )
                for shard in range(shards)
            ]
        )
        default = Namespace(name=DEFAULT_NAMESPACE, shards=shards, created_at=now)
        await session.apply(
            [
                Call("UPDATE namespaces SET changes = 0, number = 1 WHERE part = 0 IF changes = null"),
                Call(
                    "UPDATE namespaces SET definition = ?, revision = 0 WHERE part = 0 AND name = ?",
                    (_encode(default), default.name),
                ),
            ]
        )
        await _note(session, "hint key", key=os.urandom(KEY_BYTES))
        await _note(session, "schema", number=SCHEMA)
    [(key,)] = await session.read("SELECT bytes FROM meta WHERE name = 'hint key'")
    return bytes(key)


async def _note(session: Session, name: str, number: int | None = None, key: bytes | None = None) -> None:
    await session.apply(
        [Call("INSERT INTO meta (name, number, bytes) VALUES (?, ?, ?) IF NOT EXISTS", (name, number, key))]
    )


def shard_key(shard: int) -> bytes:
    return shard.to_bytes(4, "big")
