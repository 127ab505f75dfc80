"""The databases that a cluster can share: how to prepare, inspect and damage each, and the shapes of its responses.

Tests inspect a database over connections of their own, without the proxy. The SQL databases are queried with SQL that
all of them accept, with ``$1`` for the first argument; they may return texts as bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import asyncpg

from duetime.stores.mysql.literals import literal
from duetime.stores.mysql.pool import MysqlPool
from duetime.stores.mysql.store import MysqlStore
from duetime.stores.postgres.store import PostgresStore
from tests.chaos import mysql_answers, postgres_answers, watch
from tests.chaos.answers import Answers
from tests.mysql import Mariadb, Mysql, MysqlServer
from tests.postgres import Postgres, home

CONNECT_SECONDS, ANSWER_SECONDS = 10, 20


class Server(Protocol):
    port: int

    def start(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...


class Stored(NamedTuple):
    """A timer as it is in the database, live or final."""

    id: str
    status: str
    last_error: str | None


class Database(Protocol):
    answers: Answers

    @property
    def server(self) -> Server: ...

    @property
    def url(self) -> str: ...

    async def prepare(self, shards: int, roles: Sequence[str]) -> None:
        """Create the tables, the witness, and a role for each instance."""

    async def instances(self) -> dict[bytes, tuple[str, bool]]:
        """The name of each live instance, and whether it claims shards."""

    async def owners(self) -> dict[int, bytes | None]:
        """The owner of each shard."""

    async def in_flight(self, owner_id: bytes) -> frozenset[str]:
        """The timers whose attempts this instance has begun and not recorded."""

    async def live(self) -> list[Any]:
        """The timers that are not final, with details for a report."""

    async def due(self, before_ms: int) -> int:
        """The number of pending timers that are due."""

    async def stored(self) -> list[Stored]:
        """Every timer."""

    async def stale(self) -> list[Any]:
        """The writes of stale owners that the witness has seen."""

    def crash(self) -> None:
        """Stop the server so that its next start needs recovery."""

    def close(self) -> None: ...


class SqlDatabase:
    """What SQL can tell about every database that understands it."""

    async def query(self, statement: str, *arguments: Any) -> list[Any]:
        raise NotImplementedError

    async def instances(self) -> dict[bytes, tuple[str, bool]]:
        rows = await self.query("SELECT owner_id, about, serving FROM duetime.instances")
        return {owner_id: (json.loads(about)["name"], bool(serving)) for owner_id, about, serving in rows}

    async def owners(self) -> dict[int, bytes | None]:
        return {shard: owner_id for shard, owner_id in await self.query("SELECT shard, owner_id FROM duetime.shards")}

    async def in_flight(self, owner_id: bytes) -> frozenset[str]:
        rows = await self.query(
            "SELECT id FROM duetime.timers JOIN duetime.shards USING (shard) "
            "WHERE status = 'executing' AND timers.version = shards.version AND owner_id = $1",
            owner_id,
        )
        return frozenset(text(id) for (id,) in rows)

    async def live(self) -> list[Any]:
        columns = "id, status, attempt, lost, version, deadline_at, fire_at, shard"
        return await self.query(f"SELECT {columns} FROM duetime.timers")

    async def due(self, before_ms: int) -> int:
        due = f"status = 'pending' AND fire_at < {before_ms}"
        [(count,)] = await self.query(f"SELECT count(*) FROM duetime.timers WHERE {due}")
        return int(count)

    async def stored(self) -> list[Stored]:
        tables = ("timers", "history")
        rows = [
            row for table in tables for row in await self.query(f"SELECT id, status, last_error FROM duetime.{table}")
        ]
        return [Stored(text(id), text(status), error and text(error)) for id, status, error in rows]

    async def stale(self) -> list[Any]:
        return await self.query(watch.STALE)


def text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()


class PostgresDatabase(SqlDatabase):
    answers = postgres_answers.ANSWERS

    def __init__(self, server: Callable[[], Postgres]) -> None:
        self._server = server()

    @property
    def server(self) -> Postgres:
        return self._server

    @property
    def url(self) -> str:
        return self.server.url()

    async def prepare(self, shards: int, roles: Sequence[str]) -> None:
        store = PostgresStore(self.url, shards=shards)
        await store.open()
        await store.close()
        connection = await asyncpg.connect(self.url)
        try:
            await connection.execute(watch.POSTGRES)
            for role in roles:
                await connection.execute(f"CREATE ROLE {role} SUPERUSER LOGIN")
        finally:
            await connection.close()

    async def query(self, statement: str, *arguments: Any) -> list[Any]:
        connection = await asyncpg.connect(self.url, timeout=CONNECT_SECONDS)
        try:
            return list(await connection.fetch(statement, *arguments, timeout=ANSWER_SECONDS))
        finally:
            await connection.close()

    def crash(self) -> None:
        self.server.stop("immediate")

    def close(self) -> None:
        self.server.close()


class MysqlDatabase(SqlDatabase):
    answers = mysql_answers.ANSWERS

    def __init__(self, server: Callable[[], MysqlServer]) -> None:
        self._server = server()

    @property
    def server(self) -> MysqlServer:
        return self._server

    @property
    def url(self) -> str:
        return self.server.url("duetime")

    async def prepare(self, shards: int, roles: Sequence[str]) -> None:
        self.server.sql("CREATE DATABASE duetime")
        store = MysqlStore(self.url, shards=shards)
        await store.open()
        await store.close()
        users = [
            text
            for role in roles
            for text in (f"CREATE USER {role}@localhost", f"GRANT ALL ON duetime.* TO {role}@localhost")
        ]
        self.server.sql(*watch.MYSQL, *users)

    async def query(self, statement: str, *arguments: Any) -> list[Any]:
        pool = MysqlPool(self.url, size=1)
        try:
            [rows] = await pool.read(re.sub(r"\$(\d+)", lambda at: literal(arguments[int(at[1]) - 1]), statement))
            return list(rows)
        finally:
            await pool.close()

    def crash(self) -> None:
        self.server.kill()

    def close(self) -> None:
        self.server.close()


def _cassandra() -> Database:
    from tests.cassandra import Cassandra  # needs the driver, which only its own tests need
    from tests.chaos.cassandra_nodes import NODES, CassandraDatabase

    return CassandraDatabase(lambda: Cassandra(NODES, sync="periodic", own_network=True))


def _check_cassandra() -> None:
    from tests.cassandra import Cassandra

    Cassandra.check()


DATABASES: dict[str, Callable[[], Database]] = {
    "postgres": lambda: PostgresDatabase(lambda: Postgres(18)),
    "mariadb": lambda: MysqlDatabase(Mariadb),
    "mysql": lambda: MysqlDatabase(Mysql),
    "cassandra": _cassandra,
}
CHECKS: dict[str, Callable[[], object]] = {
    "postgres": lambda: home(18),
    "mariadb": Mariadb.check,
    "mysql": Mysql.check,
    "cassandra": _check_cassandra,
}
"""Raise ``Missing`` if the server is not installed."""
