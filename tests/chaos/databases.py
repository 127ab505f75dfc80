"""The databases that a cluster can share: how to prepare, query and damage each, and the shapes of its responses.

Queries are SQL that all of them accept, with ``$1`` for the first argument. Texts may be returned as bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

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


class Database(Protocol):
    answers: Answers

    @property
    def server(self) -> Server: ...

    @property
    def url(self) -> str: ...

    async def prepare(self, shards: int, roles: Sequence[str]) -> None:
        """Create the tables, the witness, and a role for each instance."""

    async def query(self, statement: str, *arguments: Any) -> list[Any]: ...

    def crash(self) -> None:
        """Stop the server so that its next start needs recovery."""

    def close(self) -> None: ...


class PostgresDatabase:
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


class MysqlDatabase:
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


DATABASES: dict[str, Callable[[], Database]] = {
    "postgres": lambda: PostgresDatabase(lambda: Postgres(18)),
    "mariadb": lambda: MysqlDatabase(Mariadb),
    "mysql": lambda: MysqlDatabase(Mysql),
}
CHECKS: dict[str, Callable[[], object]] = {
    "postgres": lambda: home(18),
    "mariadb": Mariadb.check,
    "mysql": Mysql.check,
}
"""Raise ``Missing`` if the server is not installed."""
