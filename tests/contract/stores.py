"""The stores that the contract is held against: one line each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from msgspec import Struct

from duetime.clock import Clock
from duetime.store import Store
from duetime.stores.memory import MemoryStore
from duetime.stores.sqlite import SqliteStore

SHARDS = 8


class Contender(Struct, frozen=True):
    """How to get a store of one kind, opened; and whether a second one finds what the first one left."""

    opened: Callable[[Path, Clock], Awaitable[Store]]
    reopens: bool


async def memory(_folder: Path, clock: Clock) -> Store:
    store = MemoryStore(clock, shards=SHARDS)
    await store.open()
    return store


async def sqlite(folder: Path, clock: Clock) -> SqliteStore:
    store = SqliteStore(folder / "duetime.db", clock, shards=SHARDS)
    await store.open()
    return store


STORES = {
    "memory": Contender(memory, reopens=False),
    "sqlite": Contender(sqlite, reopens=True),
}
