"""Connecting to MySQL: passwords, TLS, and invalid settings, which are rejected with one line of advice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from duetime.errors import SettingsError, StoreUnavailable
from duetime.stores.mysql.pool import MysqlPool, connect_arguments
from duetime.stores.mysql.store import MysqlStore
from tests.contract.timers import timer
from tests.mysql import Mariadb, Mysql, MysqlServer

PASSWORD = "p w:d/@ü%"
ESCAPED = "p%20w%3Ad%2F%40%C3%BC%25"


@pytest.fixture(scope="module")
def servers(mysql9: MysqlServer, mariadb: MysqlServer) -> dict[str, MysqlServer]:
    for server in (mysql9, mariadb):
        server.sql(
            "CREATE DATABASE IF NOT EXISTS guarded",
            f"CREATE USER IF NOT EXISTS guest@localhost IDENTIFIED BY '{PASSWORD}'",
            "GRANT ALL ON guarded.* TO guest@localhost",
        )
    return {"mysql9": mysql9, "mariadb": mariadb}


@pytest.fixture(params=["mysql9", "mariadb"])
def server(request: pytest.FixtureRequest, servers: dict[str, MysqlServer]) -> Iterator[MysqlServer]:
    yield servers[request.param]


async def ask(url: str, what: str) -> str:
    pool = MysqlPool(url, size=1)
    try:
        [[row]] = await pool.read(what)
        return str(row[-1])
    finally:
        await pool.close()


def url(server: MysqlServer, rest: str = "", password: str = ESCAPED) -> str:
    return f"mysql://guest:{password}@127.0.0.1:{server.port}/guarded{rest}"


async def test_password_with_special_characters_connects(server: MysqlServer) -> None:
    assert (await ask(url(server), "SELECT CURRENT_USER()")).startswith("guest@")


async def test_tls_modes_connect(servers: dict[str, MysqlServer]) -> None:
    server = servers["mysql9"]  # creates its own certificates
    authority = server.directory / "data/ca.pem"
    cipher = "SHOW STATUS LIKE 'Ssl_cipher'"
    assert await ask(url(server), cipher) == ""
    assert "AES" in await ask(url(server, "?ssl-mode=required"), cipher)
    assert "AES" in await ask(url(server, f"?ssl-mode=verify_ca&ssl-ca={authority}"), cipher)
    for refused in ("?ssl-mode=verify_ca", f"?ssl-mode=verify_identity&ssl-ca={authority}"):
        with pytest.raises(StoreUnavailable, match="certificate verify failed"):
            await ask(url(server, refused), cipher)


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("mysql://guest:wrong@127.0.0.1:{}/guarded", "Access denied for user 'guest'"),
        ("mysql://root@127.0.0.1:{}/nowhere", "Unknown database 'nowhere'"),
    ],
)
async def test_wrong_connection_settings_fail_the_start_at_once(server: MysqlServer, address: str, error: str) -> None:
    with pytest.raises(SettingsError, match=f"^DATABASE_URL: MySQL: {error}"):
        await MysqlStore(address.format(server.port)).open()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("mysql://h/d?charset=latin1", "unknown parameters in mysql:// URL: charset; use ssl-mode and ssl-ca"),
        ("mysql://h/d?ssl-mode=maybe", "ssl-mode must be one of"),
        ("mysql://h", "must be like mysql://user:password@host:3306/database"),
    ],
)
def test_invalid_url_is_rejected(text: str, error: str) -> None:
    with pytest.raises(SettingsError, match=error):
        connect_arguments(text)


async def test_server_without_durable_commits_is_rejected() -> None:
    settings: dict[str, Any] = {"innodb-flush-log-at-trx-commit": "2"}
    with Mariadb(**settings) as server, pytest.raises(SettingsError, match="set innodb_flush_log_at_trx_commit to 1"):
        await MysqlStore(server.fresh()).open()


async def test_server_that_accepts_only_small_packets_is_rejected() -> None:
    settings: dict[str, Any] = {"max-allowed-packet": "8M"}
    with Mariadb(**settings) as server, pytest.raises(SettingsError, match="max_allowed_packet"):
        await MysqlStore(server.fresh()).open()


async def test_new_connection_checks_that_commits_are_durable() -> None:
    with Mariadb() as server:
        store = MysqlStore(server.fresh())
        await store.open()
        server.sql("SET GLOBAL innodb_flush_log_at_trx_commit = 2")  # as on a replica that was promoted
        store._pool._drop_idle()
        with pytest.raises(StoreUnavailable, match="before it is on disk"):
            await store.put(timer("a"))
        server.sql("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
        assert await store.put(timer("a")) is None
        await store.close()


async def test_database_name_may_have_64_characters(server: MysqlServer) -> None:
    name = "d" * 64
    server.sql(f"CREATE DATABASE {name}", f"GRANT ALL ON {name}.* TO guest@localhost")
    store = MysqlStore(url(server).replace("/guarded", f"/{name}"))
    await store.open()
    await store.close()
    server.sql(f"DROP DATABASE {name}")


async def test_read_only_server_is_unhealthy(servers: dict[str, MysqlServer]) -> None:
    with Mysql() as server:
        store = MysqlStore(server.fresh())
        await store.open()
        await store.ping()
        server.sql("SET GLOBAL read_only = 1")
        with pytest.raises(StoreUnavailable, match="does not accept writes"):
            await store.ping()
        await store.close()
