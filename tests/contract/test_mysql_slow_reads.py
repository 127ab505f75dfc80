"""Slow reads in MySQL: the server ends them before the client stops waiting, and ends nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from duetime.errors import StoreUnavailable
from duetime.stores.mysql import pool as mysql_pool
from duetime.stores.mysql.pool import MysqlPool
from tests.mysql import MysqlServer

LIMIT_SECONDS = 0.2
ENDLESS = (
    "SELECT COUNT(*) FROM information_schema.columns AS endless, information_schema.columns AS b, "
    "information_schema.columns AS c WHERE endless.column_name < b.column_name AND b.column_name < c.column_name"
)
RUNNING = "SELECT info FROM information_schema.processlist WHERE info LIKE '%AS endless%' AND id <> CONNECTION_ID()"


@pytest.fixture(params=["mariadb", "mysql9", "tidb"])
def server(request: pytest.FixtureRequest) -> MysqlServer:
    server: MysqlServer = request.getfixturevalue(request.param)
    return server


@pytest.fixture(autouse=True)
def _limit(server: MysqlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mysql_pool, "READ_SECONDS_LESS", mysql_pool.ANSWER_SECONDS_MAX - LIMIT_SECONDS)


@pytest.fixture
def database(server: MysqlServer) -> Iterator[str]:
    yield (url := server.fresh())
    server.give_back(url)


@pytest.mark.parametrize("more", ["", " UNION ALL SELECT 1"])
async def test_slow_read_ends_on_the_server(server: MysqlServer, database: str, more: str) -> None:
    pool = MysqlPool(database, size=1)
    try:
        await pool.read("SELECT 1")  # detects the dialect
        with pytest.raises(StoreUnavailable, match=r"MySQL rejected a statement: .*exec"):
            await pool.read("SELECT 1", ENDLESS + more)
        assert server.sql(RUNNING) == [()]
    finally:
        await pool.close()


async def test_write_has_no_such_limit(database: str) -> None:
    # A commit that waits for a replica must not be interrupted.
    pool = MysqlPool(database, size=1)
    try:
        await pool.read("SELECT 1")
        await pool.write(f"DO SLEEP({3 * LIMIT_SECONDS})", then=[f"SET @slept = SLEEP({3 * LIMIT_SECONDS})"])
    finally:
        await pool.close()
