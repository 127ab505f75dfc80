"""Which of several servers a store uses: the primary, wherever it is, and never an old one that has come back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from duetime.errors import StoreUnavailable
from duetime.stores.mysql.pool import MysqlPool
from duetime.stores.postgres import pool as postgres_pool
from duetime.stores.postgres.pool import PostgresPool
from tests.failover.pairs import DATABASE, MariadbPair, PostgresPair
from tests.postgres import Missing, Postgres
from tests.proxy import Proxy
from tests.skips import skip

pytestmark = pytest.mark.alone

WHERE = "SELECT inet_server_port()"


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[PostgresPair]:
    try:
        made = PostgresPair(request.param, waits=False)
    except Missing as missing:
        skip(missing)
    with made:
        made.attach()
        yield made


@pytest.fixture
def replicated() -> Iterator[MariadbPair]:
    try:
        made = MariadbPair(waits=False)
    except Missing as missing:
        skip(missing)
    with made:
        made.primary.sql(f"CREATE DATABASE {DATABASE}")
        made.primary.sql("CREATE USER owner@localhost", f"GRANT ALL ON {DATABASE}.* TO owner@localhost")
        made.attach()
        yield made


@pytest.mark.parametrize("pair", [15], indirect=True)
def test_the_primary_is_found_and_an_old_one_is_rejected(pair: PostgresPair) -> None:
    asyncio.run(_postgres(pair))


async def _postgres(pair: PostgresPair) -> None:
    old, new = pair.primary, pair.standby
    with Proxy("127.0.0.1", old.port) as address, Proxy("127.0.0.1", old.port) as silent:
        silent.hang()
        hosts = f"127.0.0.1:{silent.port},127.0.0.1:{new.port},127.0.0.1:{old.port}"
        several = PostgresPool(f"postgresql://postgres@{hosts}/postgres", size=2)
        moving = PostgresPool(address.url(pair.primary.url()), size=2)
        standby = PostgresPool(new.url(), size=1)

        async def port(pool: PostgresPool) -> int:
            [[port]] = await pool.read(WHERE)
            return int(port)

        assert await port(several) == await port(moving) == old.port
        with pytest.raises(StoreUnavailable, match="is not a primary"):
            await port(standby)

        old.kill()
        for pool in (several, moving):
            with pytest.raises(StoreUnavailable):
                await port(pool)
        await asyncio.to_thread(pair.promote)
        address.lead_to(new.port)
        assert await port(standby) == await port(several) == await port(moving) == new.port
        assert (several.failovers, moving.failovers) == (1, 1)

        await asyncio.to_thread(old.start)
        for pool in (several, moving):
            pool._drop_idle()
        address.lead_to(old.port)
        assert await port(several) == new.port
        with pytest.raises(StoreUnavailable, match=r"timeline 1, .* promoted to 2: it is an old primary"):
            await port(moving)
        address.lead_to(new.port)
        assert await port(moving) == new.port
        assert (several.failovers, moving.failovers) == (1, 1)
        for pool in (several, moving, standby):
            await pool.close()


@pytest.mark.parametrize("pair", [18], indirect=True)
def test_connections_to_the_old_primary_are_closed_after_the_first_to_the_new_one(pair: PostgresPair) -> None:
    asyncio.run(_both_live(pair))


async def _both_live(pair: PostgresPair) -> None:
    old = pair.primary
    with Proxy("127.0.0.1", old.port) as address:
        pool = PostgresPool(address.url(old.url()), size=4)
        async with pool.connection() as busy:
            assert await busy.fetchval(WHERE) == old.port
            async with pool.connection():
                """A connection that is idle from now on."""
            await asyncio.to_thread(pair.promote)
            address.lead_to(pair.primary.port)
            async with pool.connection() as idle_before, pool.connection() as new:
                assert await idle_before.fetchval(WHERE) == old.port
                assert await new.fetchval(WHERE) == pair.primary.port
        assert busy.is_closed() and idle_before.is_closed()
        [[port]] = await pool.read(WHERE)
        assert port == pair.primary.port
        await pool.close()


def test_a_silent_host_uses_only_its_share_of_the_timeout(
    postgres18: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    timeout = asyncio.timeout

    def noted(seconds: float) -> asyncio.Timeout:
        asked.append(seconds)
        return timeout(seconds)

    async def connect() -> None:
        with Proxy("127.0.0.1", postgres18.port) as silent:
            silent.hang()
            pool = PostgresPool(f"postgresql://postgres@127.0.0.1:{silent.port},127.0.0.1:{postgres18.port}/x", size=1)
            monkeypatch.setattr("duetime.stores.postgres.pool.asyncio.timeout", noted)
            with pytest.raises(StoreUnavailable, match='database "x" does not exist'):
                await pool.connect()
            await pool.close()

    asyncio.run(connect())
    assert asked[:2] == [postgres_pool.CONNECT_SECONDS_MAX / 2] * 2


def test_a_read_only_server_is_not_used(replicated: MariadbPair) -> None:
    asyncio.run(_mariadb(replicated))


async def _mariadb(pair: MariadbPair) -> None:
    old, new = pair.primary, pair.standby
    several = MysqlPool(pair.url("owner"), size=2)
    standby = MysqlPool(pair.url("owner", f"127.0.0.1:{new.port}"), size=1)

    async def port(pool: MysqlPool) -> int:
        [[(port,)]] = await pool.read("SELECT @@port")
        return int(port)

    assert await port(several) == old.port and several.server == ("127.0.0.1", old.port)
    with pytest.raises(StoreUnavailable, match="does not accept writes"):
        await port(standby)
    async with several.connection(), several.connection():
        """Two connections that are idle from now on."""

    # A switchover: the old primary still runs but accepts no more writes.
    await asyncio.to_thread(old.sql, "SET GLOBAL read_only = 1")
    await asyncio.to_thread(pair.promote)
    with pytest.raises(StoreUnavailable, match="read-only"):
        await several.write("CREATE TABLE written (x INT)")
    assert await port(several) == await port(standby) == new.port
    assert several.failovers == 1
    await several.close()
    await standby.close()
