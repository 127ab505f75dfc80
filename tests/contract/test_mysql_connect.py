"""Connecting to MySQL: passwords, TLS, and invalid settings, which are rejected with one line of advice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import asyncmy
import pytest

from duetime.errors import SettingsError, StoreUnavailable
from duetime.stores.connecting import Misconfigured
from duetime.stores.mysql.pool import MysqlPool, connect_arguments
from duetime.stores.mysql.store import MysqlStore
from tests.contract.timers import timer
from tests.deliverers.conftest import Certificates
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
        protocols = [connection._proto for connection, *_ in pool._idle]
        await pool.close()
        for protocol in protocols:
            await protocol.wait_closed()  # TLS says goodbye first


def url(server: MysqlServer, rest: str = "", password: str = ESCAPED) -> str:
    return f"mysql://guest:{password}@127.0.0.1:{server.port}/guarded{rest}"


async def test_password_with_special_characters_connects(server: MysqlServer) -> None:
    assert (await ask(url(server), "SELECT CURRENT_USER()")).startswith("guest@")


CIPHER = "SHOW STATUS LIKE 'Ssl_cipher'"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module", params=["mysql9", "mariadb"])
def own(
    request: pytest.FixtureRequest, servers: dict[str, MysqlServer], authority: Certificates
) -> Iterator[MysqlServer]:
    """A server with a binary log and a certificate for 127.0.0.1, where the user ``guest`` must use TLS."""
    certificate = str(authority.issue("127.0.0.1"))
    settings: dict[str, Any] = {"log-bin": "log", "server-id": "1", "sync-binlog": "1"}
    settings |= {"ssl-ca": str(authority.authority), "ssl-cert": certificate, "ssl-key": certificate}
    with type(servers[request.param])(**settings) as server:
        server.sql(
            "CREATE DATABASE guarded",
            f"CREATE USER guest@localhost IDENTIFIED BY '{PASSWORD}' REQUIRE SSL",
            "GRANT ALL ON guarded.* TO guest@localhost",
        )
        yield server


@contextmanager
def setting(server: MysqlServer, name: str, value: str) -> Iterator[None]:
    [[[before]]] = server.sql(f"SELECT @@global.{name}")
    server.sql(f"SET GLOBAL {name} = {value}")
    try:
        yield
    finally:
        server.sql(f"SET GLOBAL {name} = {before!r}")


@pytest.mark.parametrize(
    "options",
    [
        "?ssl-mode=required",
        "?ssl-mode=verify_ca&ssl-ca={}",
        "?ssl-mode=verify_identity&ssl-ca={}",
        "?ssl-mode=VERIFY-IDENTITY&ssl-ca={}",
        "?ssl-ca={}",
    ],
)
async def test_tls_modes_connect(own: MysqlServer, authority: Certificates, options: str) -> None:
    assert "AES" in await ask(url(own, options.format(authority.authority)), CIPHER)


async def test_without_ssl_mode_nothing_is_encrypted(server: MysqlServer) -> None:
    assert await ask(url(server), CIPHER) == await ask(url(server, "?ssl-mode=disabled"), CIPHER) == ""


async def test_user_who_must_use_tls_gets_advice(own: MysqlServer) -> None:
    with pytest.raises(SettingsError, match=r"^DATABASE_URL: .*add [?]ssl-mode=required"):
        await MysqlStore(url(own)).open()


@pytest.mark.parametrize(
    ("options", "host", "reason"),
    [
        ("?ssl-mode=verify_ca", "127.0.0.1", "self-signed certificate|unable to get local issuer"),
        ("?ssl-mode=verify_identity&ssl-ca={}", "localhost", "not valid for 'localhost'"),
    ],
)
async def test_wrong_certificate_fails_the_start_at_once(
    own: MysqlServer, authority: Certificates, options: str, host: str, reason: str
) -> None:
    address = url(own, options.format(authority.authority)).replace("127.0.0.1", host)
    expected = f"^DATABASE_URL: MySQL at {host}:{own.port} .* certificate .*({reason}).*: check ssl-ca"
    with pytest.raises(SettingsError, match=expected):
        await MysqlStore(address).open()


async def test_server_without_tls_fails_the_start_at_once(servers: dict[str, MysqlServer]) -> None:
    server = servers["mariadb"]  # creates no certificate, unlike MySQL
    with pytest.raises(SettingsError, match=f"^DATABASE_URL: MySQL at 127.0.0.1:{server.port} does not support TLS"):
        await MysqlStore(url(server, "?ssl-mode=required")).open()


async def test_server_that_accepts_only_tls_fails_the_start_at_once(server: MysqlServer) -> None:
    with type(server)() as guarded:
        guarded.sql("CREATE DATABASE guarded", "SET GLOBAL require_secure_transport = ON")
        with pytest.raises(SettingsError, match=r"^DATABASE_URL: .*add [?]ssl-mode=required"):
            await MysqlStore(guarded.url("guarded")).open()


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
        ("mysql://h/d?ssl-mode=maybe", "ssl-mode must be disabled, required, verify_ca or verify_identity"),
        ("mysql://h/d?ssl-mode=preferred", "ssl-mode must be disabled, required, verify_ca or verify_identity"),
        ("mysql://h/d?ssl-mode=disabled&ssl-ca=/ca.pem", "ssl-ca has no effect with ssl-mode=disabled: remove one"),
        ("mysql://h/d?ssl-ca=/nope", "can't read the certificates in /nope: .*No such file"),
        (f"mysql://h/d?ssl-ca={__file__}", "can't read the certificates in /.*[.]py: "),
        ("mysql://h", "must be like mysql://user:password@host:3306/database"),
    ],
)
def test_invalid_url_is_rejected(text: str, error: str) -> None:
    with pytest.raises(SettingsError, match=error):
        connect_arguments(text)


@pytest.mark.parametrize(
    ("name", "value"),
    # At recovery, a server rolls back what its binary log lacks, although InnoDB has it.
    [("innodb_flush_log_at_trx_commit", "2"), ("innodb_flush_log_at_trx_commit", "0"), ("sync_binlog", "0")],
)
async def test_server_without_durable_commits_is_rejected(own: MysqlServer, name: str, value: str) -> None:
    with setting(own, name, value), pytest.raises(SettingsError, match=rf"^DATABASE_URL: .*set {name} to 1"):
        await MysqlStore(own.fresh()).open()


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


async def test_server_that_requires_primary_keys_is_rejected(own: MysqlServer) -> None:
    required = "innodb_force_primary_key" if isinstance(own, Mariadb) else "sql_require_primary_key"
    advice = f"the table history has none: set {required} to OFF"
    with setting(own, required, "1"), pytest.raises(Misconfigured, match=advice):
        await MysqlStore(own.fresh()).open()


async def test_server_that_logs_statements_is_rejected(own: MysqlServer) -> None:
    with setting(own, "binlog_format", "STATEMENT"), pytest.raises(Misconfigured, match="set binlog_format to ROW"):
        await MysqlStore(own.fresh()).open()


async def test_user_without_a_privilege_is_rejected(server: MysqlServer) -> None:
    address = server.fresh()
    name = address.rpartition("/")[2]
    server.sql(
        f"CREATE USER {name}@localhost",
        f"GRANT ALL ON {name}.* TO {name}@localhost",
        f"REVOKE CREATE ON {name}.* FROM {name}@localhost",
    )
    store = MysqlStore(address.replace("root@", f"{name}@"))
    with pytest.raises(Misconfigured, match=r"CREATE command denied .*; grant this user all privileges"):
        await store.open()
    server.sql(f"GRANT ALL ON {name}.* TO {name}@localhost")
    await store.open()
    server.sql(f"REVOKE DELETE ON {name}.* FROM {name}@localhost")
    store._pool._drop_idle()
    with pytest.raises(Misconfigured, match=r"DELETE command denied .*; grant this user all privileges"):
        await store.leave(b"a" * 16)
    await store.close()
    server.sql(f"DROP USER {name}@localhost")
    # In a thread: the event loop has yet to close the connection, whose transaction has locks.
    await asyncio.to_thread(server.give_back, address)


@pytest.mark.parametrize("fails", [True, False])
async def test_cancellation_that_the_driver_loses_ends_the_wait_for_the_server(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    # In Python 3.11, ``asyncio.wait_for`` returns its result instead of raising a cancellation that comes with it.
    connecting, closed = asyncio.Event(), asyncio.Event()

    class Connection:
        close = staticmethod(closed.set)

    async def connect(**_: object) -> Connection:
        connecting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if fails:
                raise OSError("lost") from None
        return Connection()

    monkeypatch.setattr(asyncmy, "connect", connect)
    opening = asyncio.create_task(MysqlStore("mysql://h/d").open())
    await connecting.wait()
    opening.cancel()
    await asyncio.wait((opening,))
    assert opening.cancelled() and closed.is_set() is not fails


async def test_certificates_are_read_once(monkeypatch: pytest.MonkeyPatch, authority: Certificates) -> None:
    # Reading them blocks the event loop for many milliseconds.
    contexts = []

    async def connect(ssl: object, **_: object) -> NoReturn:
        contexts.append(ssl)
        raise OSError

    monkeypatch.setattr(asyncmy, "connect", connect)
    pool = MysqlPool(f"mysql://h/d?ssl-mode=verify_ca&ssl-ca={authority.authority}", size=1)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await pool.read("SELECT 1")
    assert contexts[0] is not None and contexts[0] is contexts[1]
