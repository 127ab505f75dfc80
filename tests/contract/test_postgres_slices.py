"""What a long-running reader of PostgreSQL's history blocks, and what not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest

from duetime import lifecycle
from duetime.errors import StoreUnavailable
from duetime.model import DAY_MS, Status
from duetime.stores.postgres.store import PostgresStore
from tests.clocks import ManualClock
from tests.contract.stores import Opened
from tests.contract.timers import ended, timer, with_timers

MONTH_MS = 30 * DAY_MS


@pytest.fixture
def store(runner: asyncio.Runner, opened: Opened, database: str) -> PostgresStore:
    store: PostgresStore = runner.run(opened(database))
    return store


@pytest.fixture
def backup(runner: asyncio.Runner, store: PostgresStore, database: str) -> Iterator[asyncpg.Connection]:
    """A session that reads all of history in one transaction, like pg_dump, until it is rolled back."""

    async def begun() -> asyncpg.Connection:
        connection = await asyncpg.connect(database)
        await connection.execute("BEGIN; SELECT FROM duetime.history")
        return connection

    connection = runner.run(begun())
    yield connection
    runner.run(connection.close())


async def test_reader_that_blocks_dropping_a_slice_does_not_block_creating_one(
    store: PostgresStore, backup: asyncpg.Connection, clock: ManualClock
) -> None:
    await with_timers(store, live := timer("live"), ended("old", Status.COMPLETED))
    clock.advance(100 * DAY_MS)
    assert await store.swap(live, lifecycle.cancel(live, now=clock.now()))


async def test_drop_waits_only_briefly_for_a_reader(
    store: PostgresStore, backup: asyncpg.Connection[Any], clock: ManualClock
) -> None:
    # Later statements in the lock queue wait as long as it does.
    await with_timers(store, ended("old", Status.COMPLETED))
    clock.advance(100 * DAY_MS)
    with pytest.raises(StoreUnavailable, match="lock timeout"):
        await store.purge(retention_ms=MONTH_MS, limit=100)
    await backup.execute("ROLLBACK")
    assert await store.purge(retention_ms=MONTH_MS, limit=100) == 1
