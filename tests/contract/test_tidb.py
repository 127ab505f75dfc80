"""Specifics of TiDB: pessimistic transactions, and the clock of the cluster instead of the connected server's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from duetime.clock import SystemClock
from duetime.model import DAY_MS, Status
from duetime.store import Filter
from duetime.stores.mysql import pool as mysql_pool
from duetime.stores.mysql.store import MysqlStore
from tests.contract.timers import ALICE, LEASE_MS, completed, holding, timer
from tests.mysql import MysqlServer

HOUR_MS = 3_600_000


@pytest.fixture(params=["tidb"])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    server: MysqlServer = request.getfixturevalue(request.param)
    yield (url := server.fresh())
    server.give_back(url)


@pytest.fixture
def store(runner: asyncio.Runner, database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[MysqlStore]:
    """A store on a server whose own clock is at 1970 and whose transactions are optimistic by default."""
    wrong = ("SET SESSION timestamp = 1", "SET SESSION tidb_txn_mode = 'optimistic'")
    monkeypatch.setattr(mysql_pool, "_SESSION", (*wrong, *mysql_pool._SESSION))
    store = MysqlStore(database, shards=8)
    runner.run(store.open())
    yield store
    runner.run(store.close())


async def test_cluster_clock_decides_what_is_due(store: MysqlStore) -> None:
    before = SystemClock().now() - HOUR_MS
    held = await holding(store)
    at = (await store.renew(ALICE, LEASE_MS)).now
    assert before < at < before + 2 * HOUR_MS
    assert [[instance.owner_id] for instance in await store.cluster()] == [[ALICE]]
    assert await store.put_many([timer("due", at=at - 5), timer("later", at=at + HOUR_MS)]) == [None, None]
    [begun] = (await store.begin(ALICE, held, 10)).timers
    assert begun.id == "due" and begun.started_at is not None and begun.started_at >= at
    assert len((await store.page(Filter(status=Status.EXECUTING), 10)).timers) == 1
    assert await store.count(Filter(status=Status.EXECUTING), 10) == 1
    assert await store.record(ALICE, [(begun, completed(begun))]) == [True]
    assert await store.purge(retention_ms=DAY_MS, limit=10) == 0
    version, off_ms = await store.examine(SystemClock())
    assert "TiDB" in version and abs(off_ms) < HOUR_MS


async def test_time_is_null_outside_a_transaction(store: MysqlStore) -> None:
    [[(alone,)]] = [result.rows for result in await store._pool.execute(f"SELECT {store._pool.dialect.now}")]
    assert alone is None


async def test_transactions_are_pessimistic_read_committed(store: MysqlStore) -> None:
    asked = "SELECT @@tidb_txn_mode, @@transaction_isolation"
    assert [result.rows for result in await store._pool.write(asked)] == [(("pessimistic", "READ-COMMITTED"),)]
