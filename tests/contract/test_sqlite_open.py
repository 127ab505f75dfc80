"""Opening a SQLite file: which files are rejected and how, which data survives, and recovery after a kill."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import apsw
import pytest

from duetime import lifecycle
from duetime.errors import SettingsError, StoreUnavailable
from duetime.model import Status
from duetime.stores.sqlite.schema import MIGRATIONS
from duetime.stores.sqlite.store import SqliteStore
from tests.clocks import START, ManualClock
from tests.contract.stores import SHARDS, sqlite
from tests.contract.timers import (
    ALICE,
    BOB,
    LEASE_MS,
    OLD_IDS,
    assert_old_lanes_fire,
    changed,
    completed,
    everything,
    existing,
    holding,
    in_old_lanes,
    old_key,
    spread,
    timer,
    with_namespace,
    with_timers,
)

ROOT = Path(__file__).parents[2]
OPEN_ELSEWHERE = """
import asyncio, sys
from pathlib import Path
from duetime.clock import SystemClock
from duetime.errors import SettingsError
from duetime.stores.sqlite.store import SqliteStore
store = SqliteStore(Path(sys.argv[1]), SystemClock(), shards=8)
try:
    asyncio.run(store.open())
    print("opened")
except SettingsError as error:
    print(error)
"""


WITHOUT_LANES = """
    DROP TABLE quarantine;
    DROP INDEX timers_due;
    DROP INDEX timers_lane;
    ALTER TABLE timers DROP COLUMN lane;
    CREATE INDEX timers_due ON timers (fire_at) WHERE status = 'pending';
"""
"""Turns the file into one of schema 3."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "duetime.db"


def bytes_of(path: Path) -> bytes:
    return path.read_bytes()


def overwrite(path: Path, content: bytes) -> None:
    path.write_bytes(content)


async def refusal(path: Path, clock: ManualClock, *, shards: int = SHARDS) -> str:
    with pytest.raises(SettingsError) as raised:
        await SqliteStore(path, clock, shards=shards).open()
    return str(raised.value)


async def test_open_creates_the_file_and_its_folder(path: Path, clock: ManualClock) -> None:
    store = await sqlite(path.parent / "deep" / "er", clock)
    await store.put(timer())
    await store.close()
    assert (path.parent / "deep" / "er" / "duetime.db").stat().st_size > 0


async def test_writer_uses_wal_with_full_sync(path: Path, clock: ManualClock) -> None:
    store = await sqlite(path.parent, clock)
    pragmas = ("journal_mode", "synchronous")
    [found] = [await store._file.write(lambda c, asked: [[c.pragma(p) for p in pragmas] for _ in asked], None)]
    assert found == ["wal", 2]
    await store.close()


async def test_readers_can_not_write(path: Path, clock: ManualClock) -> None:
    store = await sqlite(path.parent, clock)
    with pytest.raises(StoreUnavailable, match="readonly"):
        await store._file.read(lambda c: c.execute("DELETE FROM timers"))
    await store.close()


async def test_second_process_is_rejected_with_the_pid_of_the_first(path: Path, clock: ManualClock) -> None:
    store = await sqlite(path.parent, clock)
    await store.put(timer("mine"))

    def elsewhere() -> str:
        run = [sys.executable, "-c", OPEN_ELSEWHERE, str(path)]
        return subprocess.run(run, capture_output=True, text=True, timeout=30, check=True).stdout

    message = await asyncio.to_thread(elsewhere)
    assert f"{path} is in use by another Duetime process (pid {os.getpid()})" in message
    assert message.count("\n") == 1
    assert (await existing(store, "mine")).id == "mine"
    await store.put(timer("still works"))
    await store.close()
    assert await asyncio.to_thread(elsewhere) == "opened\n"


async def test_second_store_in_the_same_process_is_rejected(path: Path, clock: ManualClock) -> None:
    store = await sqlite(path.parent, clock)
    assert "is in use by another Duetime process" in await refusal(path, clock)
    await store.put(timer())
    await store.close()
    await (await sqlite(path.parent, clock)).close()


async def test_file_of_a_newer_schema_is_rejected(path: Path, clock: ManualClock) -> None:
    store = await sqlite(path.parent, clock)
    await store.close()
    connection = apsw.Connection(str(path))
    connection.pragma("user_version", len(MIGRATIONS) + 1)
    connection.close()
    message = await refusal(path, clock)
    assert "newer Duetime" in message
    assert str(path) in message
    assert apsw.Connection(str(path)).pragma("user_version") == len(MIGRATIONS) + 1


async def test_file_of_another_program_is_rejected(path: Path, clock: ManualClock) -> None:
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE theirs (x); INSERT INTO theirs VALUES (42)")
    connection.close()
    assert "another program" in await refusal(path, clock)
    connection = apsw.Connection(str(path))
    assert connection.execute("SELECT group_concat(name), (SELECT x FROM theirs) FROM sqlite_schema").get == (
        "theirs",
        42,
    )


async def test_file_of_another_program_is_unchanged(path: Path, clock: ManualClock) -> None:
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    before = bytes_of(path)
    await refusal(path, clock)
    assert bytes_of(path) == before


async def test_file_that_is_not_a_database_is_rejected(path: Path, clock: ManualClock) -> None:
    overwrite(path, b"Dear diary, " * 1000)
    assert f"can't open {path}" in await refusal(path, clock)
    assert bytes_of(path) == b"Dear diary, " * 1000


async def test_unwritable_path_is_rejected(path: Path, clock: ManualClock) -> None:
    await (await sqlite(path.parent, clock)).close()
    # There is a file instead of the folder.
    assert "can't write beside" in await refusal(path / "duetime.db", clock)


async def test_keys_of_an_older_file_are_migrated(path: Path, clock: ManualClock) -> None:
    store = await sqlite(path.parent, clock)
    timers = [timer(id, at=START - 1) for id in OLD_IDS]
    await with_timers(store, *timers)
    await store.close()
    connection = apsw.Connection(str(path))
    connection.executemany("UPDATE timers SET uuid = ? WHERE id = ?", [(old_key(t), t.id) for t in timers])
    connection.execute(WITHOUT_LANES)
    connection.pragma("user_version", 2)
    connection.close()
    store = await sqlite(path.parent, clock)
    assert [await store.get("default", t.id) for t in timers] == timers
    begun = (await store.begin(ALICE, await holding(store), 10)).timers
    assert await store.record(ALICE, [(t, completed(t)) for t in begun]) == [True] * len(timers)
    await store.close()


async def test_timers_of_an_older_file_get_lanes(path: Path, clock: ManualClock) -> None:
    store = await sqlite(path.parent, clock)
    await with_namespace(store, "resumed")
    paused = await with_namespace(store, "paused", paused=True)
    await with_timers(store, *in_old_lanes())
    for name in ("resumed", "paused"):
        await with_timers(store, *(changed(t, namespace=name) for t in spread(5, at=START - 9)))
    canceled = lifecycle.cancel(before := timer("final"), now=START)
    await with_timers(store, before)
    assert await store.swap(before, canceled)
    there = (await everything(store)).values()
    await store.close()
    connection = apsw.Connection(str(path))
    schema = "SELECT name, sql FROM sqlite_schema WHERE type = 'index' ORDER BY name"
    indexes = connection.execute(schema).fetchall()
    connection.execute(WITHOUT_LANES + MIGRATIONS[3])
    connection.execute("UPDATE timers SET parked = namespace WHERE namespace IN ('resumed', 'paused')")
    old_namespace = "CAST(json_remove(CAST(definition AS TEXT), '$.weight', '$.revision') AS BLOB)"
    connection.execute(f"UPDATE namespaces SET definition = {old_namespace}")
    connection.pragma("user_version", 4)
    connection.close()

    store = await sqlite(path.parent, clock)
    connection = apsw.Connection(str(path))
    assert connection.execute(schema).fetchall() == indexes
    lanes = {
        (namespace, id): lane for namespace, id, lane in connection.execute("SELECT namespace, id, lane FROM timers")
    }
    connection.close()
    assert lanes == {(t.namespace, t.id): t.lane for t in there}
    assert {(n.name, n.weight, n.revision) for n in await store.namespaces()} == {
        *(("default", 1, 0), ("resumed", 1, 0), ("paused", 1, 0))
    }
    await assert_old_lanes_fire(store, paused, canceled)
    await store.close()


async def test_different_number_of_shards_is_rejected(path: Path, clock: ManualClock) -> None:
    store = await sqlite(path.parent, clock)
    await store.close()
    message = await refusal(path, clock, shards=SHARDS + 1)
    assert "DUETIME_SHARDS is 9" in message
    assert "set it to 8" in message
    # A rejected open releases the file.
    await (await sqlite(path.parent, clock)).close()


async def test_closed_store_rejects_calls(path: Path, clock: ManualClock) -> None:
    store = await sqlite(path.parent, clock)
    under_way = [asyncio.ensure_future(store.put(t)) for t in spread(50)]
    await asyncio.sleep(0)
    await store.close()
    # Earlier calls finish, later ones are rejected.
    assert await asyncio.gather(*under_way) == [None] * 50
    for late in (store.put(timer()), store.get("default", "t0"), store.ping()):
        with pytest.raises(StoreUnavailable, match="closed"):
            await late
    again = await sqlite(path.parent, clock)
    assert len(await everything(again)) == 50
    await again.close()


async def test_attempts_of_a_dead_process_are_begun_once_its_shards_are_claimed(path: Path, clock: ManualClock) -> None:
    # The file lock proves that the process is dead, so there is no need to wait for a deadline.
    store = await sqlite(path.parent, clock)
    held = await holding(store, ALICE)
    await with_timers(store, *spread(5, at=START - 10))
    begun = (await store.begin(ALICE, held, 10)).timers
    await store.close()
    clock.advance(LEASE_MS)
    assert begun[0].deadline_at is not None and clock.now() < begun[0].deadline_at
    again = await sqlite(path.parent, clock)
    held = await holding(again, BOB)
    taken = (await again.begin(BOB, held, 10)).timers
    assert [(t.id, t.attempt, t.lost, t.delivery_id) for t in taken] == [
        (t.id, t.attempt + 1, t.lost + 1, t.delivery_id) for t in begun
    ]
    assert all(t.deadline_at == lifecycle.begin(t, now=clock.now(), version=1).deadline_at for t in taken)
    assert await again.record(ALICE, [(t, lifecycle.give_up(t, now=START)) for t in begun]) == [False] * 5
    assert await again.tally() == dict.fromkeys(Status, 0) | {Status.EXECUTING: 5}
    await again.close()


async def test_shards_of_a_dead_process_are_free_at_once(path: Path, clock: ManualClock) -> None:
    store = await sqlite(path.parent, clock)
    await store.renew(ALICE, LEASE_MS)
    await holding(store, ALICE)
    await store.close()
    again = await sqlite(path.parent, clock)
    try:
        standing = await again.renew(BOB, LEASE_MS)
        assert (standing.free, standing.instances) == (frozenset(range(SHARDS)), frozenset({BOB}))
        assert set(await again.claim(BOB, range(SHARDS), LEASE_MS)) == set(range(SHARDS))
    finally:
        await again.close()


async def test_kill_loses_no_acknowledged_write(path: Path, clock: ManualClock) -> None:
    rng = random.Random(9)
    acknowledged: list[str] = []

    def put_until_killed(prefix: str) -> None:
        run = [sys.executable, "-m", "tests.contract.putter", str(path), prefix]
        with subprocess.Popen(run, stdout=subprocess.PIPE, cwd=ROOT) as process:
            assert process.stdout is not None
            first = [process.stdout.readline() for _ in range(rng.randrange(1, 300))]
            process.kill()
            lines = b"".join(first) + process.stdout.read()
        assert all(first), "the putter ended by itself; see stderr"
        # The kill may have truncated the last line.
        acknowledged.extend(line.decode() for line in lines.splitlines(keepends=True) if line.endswith(b"\n"))

    for kill in range(5):
        await asyncio.to_thread(put_until_killed, f"kill{kill}")
        connection = apsw.Connection(str(path))
        assert connection.pragma("integrity_check") == "ok"
        there = {id for (id,) in connection.execute("SELECT id FROM timers")}
        connection.close()
        lost = [id for id in map(str.strip, acknowledged) if id not in there]
        assert not lost, f"{len(lost)} of {len(acknowledged)} were acknowledged and are lost"
        store = await sqlite(path.parent, clock)
        assert (await store.tally())[Status.PENDING] == len(there)
        assert (await existing(store, acknowledged[-1].strip())).status is Status.PENDING
        await store.close()
    assert len(acknowledged) > 100
