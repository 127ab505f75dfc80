"""The measured setups: Duetime on SQLite, on PostgreSQL, and on PostgreSQL with two workers.

A setup creates the databases on which servers start: empty, filled, or a copy of a filled one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from bench.cloning import clone_postgres, clone_sqlite
from bench.processes import BenchError, Process, cpu_of_all, duetime
from bench.timers import SHARDS, bytes_of, copy, fill_store, remove
from duetime.clock import SystemClock
from duetime.model import Timer
from duetime.stores.postgres.store import PostgresStore
from duetime.stores.sqlite.store import SqliteStore
from tests.postgres import Postgres

Address = Path | str
SQLITE, POSTGRES, POSTGRES_2 = SETUPS = ("SQLite", "PostgreSQL", "PostgreSQL, 2 workers")
SHARED_SECONDS_MAX = 60.0
LEASE_OF_MANY = "3s"  # instead of 10 s, so that the workers have shared the shards out soon after the start


class Served(Protocol):
    """Enough to start a service on an empty database."""

    name: str

    async def create(self, base: Address | None = None) -> Address:
        """A new database: empty, or a copy of one that is not open."""
        ...

    async def drop(self, address: Address) -> None: ...

    def store_cpu_seconds(self) -> float:
        """The CPU time of the database's own processes so far."""
        ...

    @asynccontextmanager
    def serve(self, directory: Path, address: Address) -> AsyncIterator[Process]:
        """A ready server on it; several workers each have their share of the shards."""
        ...


class Setup(Served, Protocol):
    workers: int
    start_ms: int
    """The longest time from filling a database until its server is up."""

    async def fill(self, address: Address, timers: Iterable[Timer]) -> None:
        """Put the timers into it before a server starts."""
        ...

    async def multiply(self, address: Address, count: int) -> None:
        """Create this many more pending timers from the only one."""
        ...

    async def disk_bytes(self, address: Address) -> int: ...


class Sqlite:
    name = SQLITE
    workers = 1
    start_ms = 1_500

    def __init__(self, directory: Path) -> None:
        self._files = (directory / f"timers{number}.db" for number in itertools.count())

    async def create(self, base: Address | None = None) -> Address:
        file = next(self._files)
        if base is not None:
            await asyncio.to_thread(copy, Path(base), file)
        return file

    async def drop(self, address: Address) -> None:
        remove(Path(address))

    async def fill(self, address: Address, timers: Iterable[Timer]) -> None:
        await fill_store(SqliteStore(Path(address), SystemClock(), shards=SHARDS), timers)

    async def multiply(self, address: Address, count: int) -> None:
        await asyncio.to_thread(clone_sqlite, Path(address), count)

    async def disk_bytes(self, address: Address) -> int:
        return bytes_of(Path(address))

    def store_cpu_seconds(self) -> float:
        return 0.0

    @asynccontextmanager
    async def serve(self, directory: Path, address: Address) -> AsyncIterator[Process]:
        async with duetime(directory, address) as server:
            yield server


class PostgresDatabases:
    """PostgreSQL 18 with default settings, ``fsync`` on, all databases on one server."""

    def __init__(self, postgres: Postgres, workers: int = 1) -> None:
        self._postgres = postgres
        self.workers = workers
        self.name = POSTGRES if workers == 1 else POSTGRES_2
        self.start_ms = 2_000 if workers == 1 else 5_000
        self._names = (f"bench{workers}_{number}" for number in itertools.count())

    async def _sql(self, statement: str, address: Address | None = None) -> str:
        return await asyncio.to_thread(self._postgres.sql, statement, None if address is None else str(address))

    async def create(self, base: Address | None = None) -> Address:
        name = next(self._names)
        if base is None:
            return await asyncio.to_thread(self._postgres.create_database, name)
        template = str(base).rpartition("/")[2]
        await self._sql(f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY file_copy')
        return self._postgres.url(name)

    async def drop(self, address: Address) -> None:
        await self._sql(f'DROP DATABASE "{str(address).rpartition("/")[2]}" WITH (FORCE)')

    async def fill(self, address: Address, timers: Iterable[Timer]) -> None:
        await fill_store(PostgresStore(str(address), shards=SHARDS), timers)

    async def multiply(self, address: Address, count: int) -> None:
        await clone_postgres(str(address), count)

    async def disk_bytes(self, address: Address) -> int:
        return int(await self._sql("SELECT pg_database_size(current_database())", address))

    def store_cpu_seconds(self) -> float:
        assert self._postgres.process is not None
        return cpu_of_all(self._postgres.process.pid)

    @asynccontextmanager
    async def serve(self, directory: Path, address: Address) -> AsyncIterator[Process]:
        more = {} if self.workers == 1 else {"DUETIME_LEASE_TTL": LEASE_OF_MANY}
        async with duetime(directory, address, DUETIME_WORKERS=str(self.workers), **more) as server:
            await self._shared(server)
            yield server

    async def _shared(self, server: Process) -> None:
        """Wait until the shards are distributed about evenly."""
        until = time.monotonic() + SHARED_SECONDS_MAX
        while time.monotonic() < until:
            _, text = await server.get("/api/v1/cluster")
            shares = [len(instance["shards"]) for instance in msgspec.json.decode(text)["instances"]]
            if len(shares) == self.workers and min(shares) * self.workers >= 0.6 * SHARDS:
                return
            await asyncio.sleep(0.05)
        raise BenchError(f"the {self.workers} workers did not distribute the shards in time")
