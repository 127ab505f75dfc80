"""The stores that the contract tests run against, one entry each."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from msgspec import Struct

from duetime.clock import Clock
from duetime.store import ALL_ABILITIES, Abilities, Store
from duetime.stores.cassandra import ABILITIES
from duetime.stores.memory import MemoryStore
from duetime.stores.mysql.store import MysqlStore
from duetime.stores.postgres.store import PostgresStore
from duetime.stores.sqlite.store import SqliteStore

SHARDS = 8

Opened = Callable[[str], Coroutine[Any, Any, PostgresStore]]
"""Opens a store on a database."""
Reopen = Callable[[Store], Coroutine[Any, Any, Store]]
"""Closes a store and opens another one on its data."""


class Contender(Struct, frozen=True):
    """How to open a store of one kind; whether its data is persistent; its location: a folder, or a database of the
    server that a fixture provides; whether that understands SQL; and what the store can do."""

    opened: Callable[[Any, Clock], Coroutine[Any, Any, Store]]
    reopens: bool
    server: str | None = None
    sql: bool = True
    abilities: Abilities = ALL_ABILITIES


async def memory(_folder: Path, clock: Clock) -> Store:
    store = MemoryStore(clock, shards=SHARDS)
    await store.open()
    return store


async def sqlite(folder: Path, clock: Clock) -> SqliteStore:
    store = SqliteStore(folder / "duetime.db", clock, shards=SHARDS)
    await store.open()
    return store


async def postgres(url: str, clock: Clock) -> PostgresStore:
    store = PostgresStore(url, shards=SHARDS, virtual_clock=clock)
    await store.open()
    return store


async def mysql(url: str, clock: Clock) -> MysqlStore:
    store = MysqlStore(url, shards=SHARDS, virtual_clock=clock)
    await store.open()
    return store


async def cassandra(url: str, clock: Clock) -> Store:
    from tests.contract.cassandra_store import opened  # needs the driver, which only its own tests need

    return await opened(url, clock, shards=SHARDS)


STORES = {
    "memory": Contender(memory, reopens=False),
    "sqlite": Contender(sqlite, reopens=True),
    "postgres15": Contender(postgres, reopens=True, server="postgres15"),
    "postgres18": Contender(postgres, reopens=True, server="postgres18"),
    "mariadb": Contender(mysql, reopens=True, server="mariadb"),
    "mysql9": Contender(mysql, reopens=True, server="mysql9"),
    "tidb": Contender(mysql, reopens=True, server="tidb"),
    "cassandra": Contender(cassandra, reopens=True, server="cassandra", sql=False, abilities=ABILITIES),
}
