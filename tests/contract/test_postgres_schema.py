"""Opening a PostgreSQL database: it is made once, kept, and refused where it does not fit."""

from __future__ import annotations

import asyncio

import asyncpg
import msgspec
import pytest

from duetime import lifecycle
from duetime.errors import SettingsError
from duetime.model import DEFAULT_NAMESPACE, Status
from duetime.stores.postgres import PostgresStore
from duetime.stores.postgres_opening import LOCK_MS_MAX
from duetime.stores.postgres_schema import MIGRATIONS
from tests.clocks import START, ManualClock
from tests.contract.stores import SHARDS
from tests.contract.timers import (
    ALICE,
    LEASE_MS,
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
"""Makes the database, after ``OLDER`` and the third and fourth step, one of schema 4 with timers that are held back."""


async def refusal(url: str, *, shards: int = SHARDS) -> str:
    store = PostgresStore(url, shards=shards, virtual_clock=ManualClock())
    with pytest.raises(SettingsError) as raised:
        await store.open()
    await store.close()
    assert "\n" not in str(raised.value)
    return str(raised.value)


async def test_of_many_that_open_an_empty_database_at_once_one_makes_it(opened, database: str) -> None:
    stores = await asyncio.gather(*(opened(database) for _ in range(8)))
    for n, store in enumerate(stores):
        await store.put(timer(f"t{n}"))
    assert len(await everything(stores[0])) == 8
    assert [n.name for n in await stores[1].namespaces()] == [DEFAULT_NAMESPACE]
    assert len(await stores[2].claim(ALICE, range(SHARDS), LEASE_MS)) == SHARDS
    assert len(await stores[3]._pool.read("SELECT FROM slices")) == 1


async def test_another_number_of_shards_is_refused(opened, database: str) -> None:
    await opened(database)
    said = await refusal(database, shards=SHARDS + 1)
    assert "DUETIME_SHARDS is 9" in said
    assert "set it to 8" in said
    await opened(database)


async def test_a_newer_schema_is_refused_and_left_alone(opened, server: Postgres, database: str) -> None:
    await opened(database)
    newer = len(MIGRATIONS) + 1
    server.sql(f"UPDATE duetime.meta SET value = {newer} WHERE name = 'schema'", database)
    said = await refusal(database)
    assert "newer Duetime" in said
    assert f"schema {newer}" in said
    assert server.sql("SELECT value FROM duetime.meta WHERE name = 'schema'", database) == str(newer)


async def test_the_keys_of_an_older_database_are_brought_up(opened, server: Postgres, database: str) -> None:
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


async def test_the_timers_of_an_older_database_get_their_lanes(opened, server: Postgres, database: str) -> None:
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


async def test_a_program_of_before_works_on_the_same_tables(opened, server: Postgres, database: str) -> None:
    store = await opened(database)
    assert server.sql("SELECT value FROM duetime.meta WHERE name = 'schema'", database) == "4"
    await with_timers(store, *(old := in_old_lanes()))
    # A row as a program writes it that knows nothing of lanes.
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
    assert definition == msgspec.json.encode(whole)  # It compares this, byte by byte.
    namespace = await switch(store, namespace, weight=7)
    changed_there = msgspec.json.encode({**whole, "retention_ms": 5})
    update = "UPDATE namespaces SET paused = true, definition = $2 WHERE definition = $1 RETURNING 1"
    assert await store._pool.write(update, definition, changed_there)
    assert not await store.swap_namespace(namespace, changed_to(namespace, weight=9))
    [there] = await store.namespaces()
    assert (there.weight, there.retention_ms, there.revision) == (7, 5, namespace.revision + 1)
    await switch(store, there, weight=9)


async def test_a_step_waits_for_no_lock_that_others_wait_for(opened, server: Postgres, database: str) -> None:
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
        for _ in range(20):  # Whatever the step is doing, others get through.
            await other.execute("UPDATE duetime.timers SET updated_at = updated_at", timeout=4 * LOCK_MS_MAX / 1000)
        assert not opening.done()
        await writing.rollback()
        store = await opening
        assert not await store._pool.read("SELECT FROM timers WHERE lane = 0")
    finally:
        await busy.close()
        await other.close()


async def test_reopening_keeps_everything(opened, database: str) -> None:
    store = await opened(database)
    await with_namespace(store, "elsewhere", paused=True)
    await with_timers(store, *spread(20, at=START - 20), ended("done", Status.COMPLETED, namespace="elsewhere"))
    held = await holding(store)
    await store.begin(ALICE, held, 5)
    before = await everything(store), await store.tally(), await store.namespaces()
    await store.close()
    again = await opened(database)
    assert (await everything(again), await again.tally(), await again.namespaces()) == before
    assert (await again.renew(ALICE, LEASE_MS)).held == held


async def test_it_lives_in_a_schema_of_its_own(opened, server: Postgres, database: str) -> None:
    # A database that somebody else uses, too, with names like ours.
    server.sql("CREATE TABLE timers (theirs int); CREATE TABLE meta (theirs int)", database)
    store = await opened(database)
    await store.put(timer())
    await store.close()
    assert server.sql("SELECT count(*) FROM public.timers", database) == "0"
    assert server.sql("SELECT count(*) FROM duetime.timers", database) == "1"


async def test_a_commit_is_waited_for(opened, database: str) -> None:
    store = await opened(database)
    assert await store._pool.read("SHOW synchronous_commit") == [("on",)]
