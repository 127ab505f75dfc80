"""The PostgreSQL server for tests: it survives restarts and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from tests.mysql import MysqlServer
from tests.postgres import Postgres
from tests.servers import NotStarted, until


@pytest.fixture(params=["postgres15", "postgres18"])
def server(request: pytest.FixtureRequest) -> Postgres:
    server: Postgres = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def url(server: Postgres) -> Iterator[str]:
    url = server.fresh()
    yield url
    server.give_back(url)


def test_the_server_has_the_requested_version_and_syncs(server: Postgres, request: pytest.FixtureRequest) -> None:
    assert server.sql("SHOW server_version").split(".")[0] in request.node.name
    assert server.sql("SHOW fsync") == "on"


def test_each_fresh_database_is_empty(server: Postgres) -> None:
    first, second = server.fresh(), server.fresh()
    assert first != second
    server.sql("CREATE TABLE t (n int); CREATE SCHEMA s CREATE TABLE t (n int)", first)

    async def while_connected() -> str:
        left_open = await asyncpg.connect(first)
        server.give_back(first)
        again = server.fresh()
        with pytest.raises(asyncpg.PostgresError):
            await left_open.execute("SELECT 1")
        return again

    assert asyncio.run(while_connected()) == first
    assert server.sql("SELECT count(*) FROM pg_class WHERE relname = 't'", first) == "0"
    server.sql("CREATE TABLE t (n int)", first)
    server.give_back(first)
    server.give_back(second)


@pytest.mark.parametrize("end", ["fast", "immediate", "kill"])
def test_committed_data_survives_a_restart(server: Postgres, url: str, end: str) -> None:
    server.sql("CREATE TABLE t (n int)", url)
    server.sql("INSERT INTO t VALUES (7)", url)
    if end == "kill":
        server.kill()
    else:
        server.stop(end)
    with pytest.raises(AssertionError, match="refused"):
        server.sql("SELECT 1", url)
    server.start()
    assert server.sql("SELECT n FROM t", url) == "7"
    assert ("was not properly shut down" in server.log) == (end != "fast")


def test_a_paused_server_does_not_respond_until_resumed(server: Postgres, url: str) -> None:
    async def ask() -> None:
        connected = await asyncpg.connect(url)
        server.pause()
        try:
            old = asyncio.create_task(connected.fetchval("SELECT 1"))
            new = asyncio.create_task(asyncpg.connect(url))
            answered, _ = await asyncio.wait([old, new], timeout=0.2)
        finally:
            server.resume()
        assert not answered
        assert await old == 1
        await (await new).close()
        await connected.close()

    asyncio.run(ask())


def test_a_server_that_does_not_start_shows_the_reason(postgres18: Postgres) -> None:
    postgres18.stop()
    taken = socket.create_server(("127.0.0.1", postgres18.port))
    with taken, pytest.raises(NotStarted, match="Address already in use"):
        postgres18.start()
    postgres18.start()


def test_nothing_is_left_behind_when_the_tests_are_killed() -> None:
    code = (
        "from tests.postgres import Postgres; server = Postgres(18); "
        "print(server.process.pid, server.directory, flush=True); server.pause(); input()"
    )
    tests = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with tests:
        assert tests.stdout is not None
        pid, directory = tests.stdout.readline().split()
        assert psutil.pid_exists(int(pid))
        os.kill(tests.pid, signal.SIGKILL)
    until("the directory is gone", lambda: not Path(directory).exists())
    until("the server is gone", lambda: not psutil.pid_exists(int(pid)) or _is_dead(int(pid)))


def _is_dead(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_remembered_rows_are_restored(postgres18: Postgres) -> None:
    url = postgres18.fresh()
    postgres18.sql("CREATE SCHEMA duetime CREATE TABLE kept (a int) CREATE TABLE empty (a int)", url)
    postgres18.sql("INSERT INTO duetime.kept VALUES (1)", url)
    postgres18.remember(url)
    postgres18.sql("UPDATE duetime.kept SET a = 2; INSERT INTO duetime.empty VALUES (3)", url)
    postgres18.sql("CREATE TABLE duetime.new (a int)", url)
    assert postgres18.restore(url)
    assert postgres18.sql("SELECT * FROM duetime.kept UNION ALL SELECT * FROM duetime.empty", url) == "1"
    assert postgres18.sql("SELECT to_regclass('duetime.new') IS NULL", url) == "t"
    postgres18.sql("DROP TABLE duetime.kept", url)
    assert not postgres18.restore(url)


def test_remembered_rows_are_restored_in_mariadb(mariadb: MysqlServer) -> None:
    url = mariadb.fresh()
    name = url.rpartition("/")[2]
    mariadb.sql(f"CREATE TABLE {name}.kept (a int)", f"CREATE TABLE {name}.empty (a int)")
    mariadb.sql(f"INSERT INTO {name}.kept VALUES (1)")
    mariadb.remember(url)
    mariadb.sql(f"UPDATE {name}.kept SET a = 2", f"INSERT INTO {name}.empty VALUES (3)")
    assert mariadb.restore(url)
    [rows] = mariadb.sql(f"SELECT * FROM {name}.kept UNION ALL SELECT * FROM {name}.empty")
    assert list(rows) == [(1,)]
    mariadb.sql(f"CREATE TABLE {name}.new (a int)")
    assert not mariadb.restore(url)
