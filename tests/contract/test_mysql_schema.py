"""Migrating MySQL: it commits after each DDL statement, so a step can be interrupted."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from duetime.stores.mysql import migration
from duetime.stores.mysql.schema import MIGRATIONS
from tests.clocks import ManualClock
from tests.contract.stores import SHARDS, mysql
from tests.contract.timers import ALICE, completed, holding, spread, with_timers
from tests.mysql import MysqlServer

STEP = ("CREATE TABLE IF NOT EXISTS later (n INT PRIMARY KEY)", "INSERT INTO later SELECT COUNT(*) FROM later")
"""A step of a later version. It fails or leaves more than one row if it runs twice."""

CUT_OFF = """
import asyncio, os, signal, sys
from duetime.stores.mysql import migration
from tests.clocks import ManualClock
from tests.contract.stores import mysql

url, left, run = sys.argv[1], int(sys.argv[2]), migration.run

async def counted(connection, statements):
    global left
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return await run(connection, statements)

migration.run = counted
asyncio.run(mysql(url, ManualClock()))
"""
"""Opens a store and is killed before sending one of its packets."""


@pytest.fixture(params=["mariadb", "mysql9"])
def server(request: pytest.FixtureRequest) -> MysqlServer:
    server: MysqlServer = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def database(server: MysqlServer) -> Iterator[str]:
    yield (url := server.fresh())
    server.give_back(url)


async def columns(pool: Any) -> list[Any]:
    [found] = await pool.read(
        "SELECT table_name, column_name, column_type FROM information_schema.columns "
        "WHERE table_schema = DATABASE() ORDER BY table_name, column_name"
    )
    return list(found)


@pytest.mark.parametrize("done", [1, 3, 6, 12, 13], ids=lambda done: f"after {done} packets")
async def test_next_start_completes_an_interrupted_migration(
    server: MysqlServer, database: str, clock: ManualClock, done: int
) -> None:
    whole = await mysql(server.fresh(), clock)
    command = [sys.executable, "-c", CUT_OFF, database, str(done)]
    cut_off = await asyncio.to_thread(subprocess.run, command, capture_output=True)
    assert cut_off.returncode == -signal.SIGKILL, cut_off.stderr
    store = await mysql(database, clock)
    try:
        assert await columns(store._pool) == await columns(whole._pool)
        await with_timers(store, *spread(20))
        held = await holding(store)
        assert len(held) == SHARDS
        clock.advance(1_000)
        begun = (await store.begin(ALICE, held, 100)).timers
        assert await store.record(ALICE, [(t, completed(t)) for t in begun]) == [True] * 20
    finally:
        await store.close()
        await whole.close()


async def test_step_that_was_stopped_in_the_middle_is_run_again(
    server: MysqlServer, database: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await mysql(database, clock)).close()
    step = (
        "ALTER TABLE timers ADD COLUMN one INT",
        "ALTER TABLE timers ADD KEY timers_one (one)",
        "ALTER TABLE timers DROP KEY timers_correlation_id",
        "ALTER TABLE timers ADD COLUMN two INT",
    )
    name = database.rpartition("/")[2]
    server.sql(*(statement.replace("TABLE ", f"TABLE {name}.") for statement in step[:3]))
    monkeypatch.setattr(migration, "MIGRATIONS", (*MIGRATIONS, step))
    store = await mysql(database, clock)
    assert {"one", "two"} <= {column for _, column, _ in await columns(store._pool)}
    await store.close()


async def test_concurrent_starts_migrate_the_schema_once(
    database: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await mysql(database, clock)).close()
    monkeypatch.setattr(migration, "MIGRATIONS", (*MIGRATIONS, STEP))
    stores = await asyncio.gather(*(mysql(database, clock) for _ in range(4)))
    [schema, later] = await stores[0]._pool.read("SELECT value FROM meta WHERE name = 'schema'", "SELECT n FROM later")
    for store in stores:
        await store.close()
    assert (list(schema), list(later)) == ([(len(MIGRATIONS) + 1,)], [(0,)])
