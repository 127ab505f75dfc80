"""The clock of MySQL: the store reads the right time whatever the time zone of the server."""

from __future__ import annotations

import pytest

from duetime.clock import SystemClock
from duetime.model import HOUR_MS
from duetime.stores.mysql.pool import MysqlPool
from tests.mysql import MysqlServer

BERLIN = "CET-1CEST,M3.5.0,M10.5.0/3"
SUMMER_MS = 1_761_438_600_123
"""2025-10-26 02:30 in Berlin, for the first time: half an hour before the end of summer time."""


@pytest.mark.parametrize("kind", ["mariadb", "mysql9"])
async def test_time_is_right_in_the_hour_that_occurs_twice(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_class = type(request.getfixturevalue(kind))
    monkeypatch.setenv("TZ", BERLIN)
    both = SUMMER_MS, SUMMER_MS + HOUR_MS
    with server_class() as server:
        [[shown]] = server.sql("SELECT FROM_UNIXTIME({}), FROM_UNIXTIME({})".format(*(at // 1000 for at in both)))
        assert str(shown[0]) == str(shown[1]) == "2025-10-26 02:30:00"
        pool = MysqlPool(server.fresh(), size=1)
        try:
            for at in both:
                await pool.execute(f"SET timestamp = {at / 1000:.3f}")
                [[(now,)]] = await pool.read(f"SELECT {pool.dialect.now}")
                assert now == at
        finally:
            await pool.close()


@pytest.mark.parametrize("kind", ["tidb"])
async def test_time_of_tidb_does_not_depend_on_the_time_zone(kind: str, request: pytest.FixtureRequest) -> None:
    server: MysqlServer = request.getfixturevalue(kind)
    pool = MysqlPool(server.url(), size=1)
    try:
        await pool.execute("SET SESSION time_zone = '+05:00'")
        [[(now,)]] = await pool.read(f"SELECT {pool.dialect.now}")
        assert abs(now - SystemClock().now()) < HOUR_MS // 2
    finally:
        await pool.close()
