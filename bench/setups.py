"""The setups that are measured: Duetime on SQLite, on PostgreSQL, and on PostgreSQL with two workers.

A setup makes the databases that a server starts on: empty, filled, or a copy of one that was filled once.
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
from duetime.stores.postgres import PostgresStore
from duetime.stores.sqlite import SqliteStore
from tests.postgres import Postgres

Address = Path | str
SQLITE, POSTGRES, POSTGRES_2 = SETUPS = ("SQLite", "PostgreSQL", "PostgreSQL, 2 workers")
SHARED_SECONDS_MAX = 60.0
LEASE_OF_MANY = "3s"  # instead of 10 s, so that the workers have shared the shards out soon after the start


class Setup(Protocol):
    name: str
    workers: int
    start_ms: int
    """From the filling of a database until its server is surely up."""

    async def create(self, base: Address | None = None) -> Address:
        """A new database: empty, or a copy of one that nobody has open."""
        ...

    async def drop(self, address: Address) -> None: ...

    async def fill(self, address: Address, timers: Iterable[Timer]) -> None:
        """Put the timers into it, before a server has it."""
        ...

    async def multiply(self, address: Address, count: int) -> None:
        """Make so many more pending timers out of the only one there is."""
        ...

    async def disk_bytes(self, address: Address) -> int: ...

    def store_cpu_seconds(self) -> float:
        """What the database's own processes have used so far."""
        ...

    @asynccontextmanager
    def serve(self, directory: Path, address: Address) -> AsyncIterator[Process]:
        """A ready server on it; with several workers, each has its share."""
        ...


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
    """PostgreSQL 18 as it comes, ``fsync`` on, all databases on one server."""

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
        """Return when the shards are shared out, about evenly."""
        until = time.monotonic() + SHARED_SECONDS_MAX
        while time.monotonic() < until:
            _, text = await server.get("/api/v1/cluster")
            shares = [len(instance["shards"]) for instance in msgspec.json.decode(text)["instances"]]
            if len(shares) == self.workers and min(shares) * self.workers >= 0.6 * SHARDS:
                return
            await asyncio.sleep(0.05)
        raise BenchError(f"the {self.workers} workers did not share the shards out in time")
