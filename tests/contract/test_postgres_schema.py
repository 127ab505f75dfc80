"""Migrating an older PostgreSQL database, and its schema and session settings."""

from __future__ import annotations

import asyncio

import asyncpg
import msgspec

from duetime import lifecycle
from duetime.model import Status
from duetime.stores.postgres.migration import LOCK_MS_MAX
from duetime.stores.postgres.schema import MIGRATIONS
from tests.clocks import START
from tests.contract.stores import Opened
from tests.contract.timers import (
    ALICE,
    OLD_IDS,
    assert_old_lanes_fire,
    changed,
    changed_to,
    completed,
    ended,
    everything,
    holding,
    in_old_lanes,
    old_key,
    spread,
    switch,
    timer,
    with_namespace,
    with_timers,
)
from tests.postgres import Postgres

OLDER = """
    SET search_path = duetime;
    DELETE FROM meta WHERE name = 'steps';
    UPDATE meta SET value = 1 WHERE name = 'schema';
    DROP TABLE quarantine;
    DROP TRIGGER timers_without_lane ON timers;
    DROP TRIGGER namespaces_revision ON namespaces;
    DROP FUNCTION give_lane, next_revision, lane_of;
    ALTER TABLE timers DROP COLUMN lane, DROP COLUMN parked;
    ALTER TABLE namespaces DROP COLUMN weight, DROP COLUMN revision;
    CREATE INDEX timers_seq ON timers ((seq + 0));
    CREATE INDEX history_seq ON history ((seq + 0));
    DROP TYPE new_row, end_row, move_row, whole_row, new_timer, live_timer;
"""


PARKED = """
    UPDATE meta SET value = 4 WHERE name = 'schema';
    UPDATE timers SET parked = namespace WHERE namespace IN ('resumed', 'paused');
"""
"""Completes, after ``OLDER`` and the third and fourth step, a database of schema 4 with parked timers."""


async def test_keys_of_an_older_database_are_migrated(opened: Opened, server: Postgres, database: str) -> None:
    store = await opened(database)
    live = [timer(id, at=START - 1) for id in OLD_IDS]
    final = [ended(t.id, Status.FAILED, namespace="elsewhere") for t in live]
    await with_timers(store, *live, *final)
    await store.close()
    for table, timers in (("timers", live), ("history", final)):
        for t in timers:
            server.sql(f"UPDATE duetime.{table} SET uuid = '\\x{old_key(t).hex()}' WHERE id = '{t.id}'", database)
    server.sql(OLDER, database)
    store = await opened(database)
    assert [await store.get(t.namespace, t.id) for t in live + final] == live + final
    begun = (await store.begin(ALICE, await holding(store), 10)).timers
    assert await store.record(ALICE, [(t, completed(t)) for t in begun]) == [True] * len(live)


async def test_timers_of_an_older_database_get_lanes(opened: Opened, server: Postgres, database: str) -> None:
    store = await opened(database)
    await with_namespace(store, "resumed")
    paused = await with_namespace(store, "paused", paused=True)
    await with_timers(store, *in_old_lanes())
    for name in ("resumed", "paused"):
        await with_timers(store, *(changed(t, namespace=name) for t in spread(5, at=START - 9)))
    there = (await everything(store)).values()
    canceled = lifecycle.cancel(before := timer("final"), now=START)
    await with_timers(store, before)
    assert await store.swap(before, canceled)
    await store.close()
    schema = "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'duetime' ORDER BY indexname"
    indexes = server.sql(schema, database)
    server.sql(OLDER + MIGRATIONS[2] + MIGRATIONS[3] + PARKED, database)

    store = await opened(database)
    assert server.sql(schema, database) == indexes
    rows = await store._pool.read("SELECT namespace, id, lane FROM timers")
    assert {(namespace, id): lane for namespace, id, lane in rows} == {(t.namespace, t.id): t.lane for t in there}
    assert {(n.name, n.weight, n.revision) for n in await store.namespaces()} == {
        *(("default", 1, 0), ("resumed", 1, 0), ("paused", 1, 0))
    }
    await assert_old_lanes_fire(store, paused, canceled)


async def test_previous_release_works_on_the_same_tables(opened: Opened, server: Postgres, database: str) -> None:
    store = await opened(database)
    assert server.sql("SELECT value FROM duetime.meta WHERE name = 'schema'", database) == "4"
    await with_timers(store, *(old := in_old_lanes()))
    # A row written by a release without lanes.
    columns = "seq, uuid, namespace, id, shard, definition, timeout_ms, fingerprint, created_at, updated_at, revision, "
    columns += "firing, execute_at, fire_at, status, attempt, failures, lost, version, attempts"
    unlike = columns.replace("uuid", "sha256(uuid)").replace("seq,", "seq + 1000,", 1).replace(" id,", " id || '+',")
    server.sql(f"SET search_path = duetime; INSERT INTO timers ({columns}) SELECT {unlike} FROM timers", database)
    rows = await store._pool.read("SELECT id, lane FROM timers")
    lanes = {id: lane for id, lane in rows}
    assert len(lanes) == 2 * len(old)
    assert all(lanes[f"{t.id}+"] == t.lane == lanes[t.id] for t in old)

    [namespace] = await store.namespaces()
    first = {name: getattr(namespace, name) for name in ("name", "shards", "created_at")}
    whole = {**first, "retention_ms": None, "paused": False, "secrets": []}
    [(definition,)] = await store._pool.read("SELECT definition FROM namespaces")
    assert definition == msgspec.json.encode(whole)  # The previous release compares this byte by byte.
    namespace = await switch(store, namespace, weight=7)
    changed_there = msgspec.json.encode({**whole, "retention_ms": 5})
    update = "UPDATE namespaces SET paused = true, definition = $2 WHERE definition = $1 RETURNING 1"
    assert await store._pool.write(update, definition, changed_there)
    assert not await store.swap_namespace(namespace, changed_to(namespace, weight=9))
    [there] = await store.namespaces()
    assert (there.weight, there.retention_ms, there.revision) == (7, 5, namespace.revision + 1)
    await switch(store, there, weight=9)


async def test_migration_step_does_not_block_others_while_waiting_for_a_lock(
    opened: Opened, server: Postgres, database: str
) -> None:
    store = await opened(database)
    await with_timers(store, *in_old_lanes())
    await store.close()
    server.sql(OLDER + MIGRATIONS[2] + MIGRATIONS[3] + PARKED, database)
    busy, other = await asyncpg.connect(database), await asyncpg.connect(database)
    try:
        writing = busy.transaction()
        await writing.start()
        await busy.execute("LOCK TABLE duetime.timers IN ROW EXCLUSIVE MODE")
        opening = asyncio.create_task(opened(database))
        for _ in range(20):  # Whatever the step is doing, other statements proceed.
            await other.execute("UPDATE duetime.timers SET updated_at = updated_at", timeout=4 * LOCK_MS_MAX / 1000)
        assert not opening.done()
        await writing.rollback()
        store = await opening
        assert not await store._pool.read("SELECT FROM timers WHERE lane = 0")
    finally:
        await busy.close()
        await other.close()


async def test_tables_are_in_a_schema_of_their_own(opened: Opened, server: Postgres, database: str) -> None:
    # A database in which another program has tables with the same names.
    server.sql("CREATE TABLE timers (theirs int); CREATE TABLE meta (theirs int)", database)
    store = await opened(database)
    await store.put(timer())
    await store.close()
    assert server.sql("SELECT count(*) FROM public.timers", database) == "0"
    assert server.sql("SELECT count(*) FROM duetime.timers", database) == "1"


async def test_commits_are_synchronous(opened: Opened, database: str) -> None:
    store = await opened(database)
    assert [tuple(row) for row in await store._pool.read("SHOW synchronous_commit")] == [("on",)]
