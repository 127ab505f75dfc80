"""The stores that the contract is held against: one line each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from duetime.clock import Clock
from duetime.store import Store
from duetime.stores.memory import MemoryStore
from duetime.stores.postgres import PostgresStore
from duetime.stores.sqlite import SqliteStore

SHARDS = 8


class Contender(Struct, frozen=True):
    """How to get a store of one kind, opened; whether a second one finds what the first one left; and where it lives:
    in a folder, or in a database of the server that a fixture names."""

    opened: Callable[[Any, Clock], Awaitable[Store]]
    reopens: bool
    server: str | None = None


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


STORES = {
    "memory": Contender(memory, reopens=False),
    "sqlite": Contender(sqlite, reopens=True),
    "postgres15": Contender(postgres, reopens=True, server="postgres15"),
    "postgres18": Contender(postgres, reopens=True, server="postgres18"),
}
