"""The processes: one PostgreSQL, instances that share it, and whatever stands between them.

Everything is started here and ended here, by its id. What is asked of the database goes over connections of our own,
past the proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import asyncpg

from duetime.sharding import assigned
from duetime.stores.postgres import PostgresStore
from tests.chaos import launcher, watch
from tests.ports import free_port
from tests.postgres import Postgres
from tests.proxy import Proxy
from tests.servers import KEY, Duetime

ROOT = Path(__file__).parents[2]
LEASE_SECONDS = 3.0
SHARDS = 64


class Member(Duetime):
    """One instance of the cluster, on a port that stays its own, known to the database by a role of its own."""

    def __init__(self, directory: Path, *, role: str, database_url: str, bug: str | None, movable_clock: bool) -> None:
        self.role = role
        self.owner_id = b""
        self.clock = directory / "clock" if movable_clock else None
        self._program = ["-m", "duetime"]
        if bug or movable_clock:
            self._program = ["-m", "tests.chaos.launcher"]
            self._program += ["--bug", bug] if bug else []
            self._program += ["--clock", "clock"] if movable_clock else []
        super().__init__(
            directory,
            start=False,
            PORT=str(free_port()),
            PYTHONPATH=str(ROOT),
            DATABASE_URL=database_url.replace("//postgres@", f"//{role}@"),
            DUETIME_LEASE_TTL=f"{LEASE_SECONDS:g}s",
            DUETIME_ALLOW_PRIVATE_TARGETS="on",
        )
        self.port = int(self._env["PORT"])
        if self.clock:
            launcher.set_offset(self.clock, 0)

    def spawn(self) -> None:
        assert self.process is None or self.process.poll() is not None, "is running already"
        self._starts += 1
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self._program, "serve"],
                cwd=self.directory,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def metric(self, name: str) -> float:
        page = self.request("GET", "/metrics", headers={"X-API-Key": KEY}).body.decode()
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.split()[0] == name)


class Cluster:
    def __init__(
        self, directory: Path, *, instances: int, bug: str | None, proxied: bool, movable_clocks: bool
    ) -> None:
        self.postgres = Postgres(18)
        self._url = self.postgres.url()
        self.proxy: Proxy | None = None
        try:
            asyncio.run(self._prepare(instances))
            if proxied:
                self.proxy = Proxy("127.0.0.1", self.postgres.port)
        except BaseException:
            self.close()
            raise
        self.members = [
            Member(
                directory / f"instance-{number}",
                role=f"instance_{number}",
                database_url=self.proxy.url(self._url) if self.proxy else self._url,
                bug=bug,
                movable_clock=movable_clocks,
            )
            for number in range(instances)
        ]

    async def _prepare(self, instances: int) -> None:
        store = PostgresStore(self._url, shards=SHARDS)
        await store.open()
        await store.close()
        connection = await asyncpg.connect(self._url)
        try:
            await connection.execute(watch.INSTALL)
            for number in range(instances):
                await connection.execute(f"CREATE ROLE instance_{number} SUPERUSER LOGIN")
        finally:
            await connection.close()

    async def start(self) -> None:
        for member in self.members:
            member.spawn()
        for member in self.members:
            await self.wait_ready(member)
        await self.wait("every shard has an owner", self._all_owned)

    async def restart(self, member: Member) -> None:
        member.spawn()
        await self.wait_ready(member)

    async def wait_ready(self, member: Member) -> None:
        """Wait until it serves, and learn under which name it owns shards."""
        await asyncio.to_thread(member.wait_ready)
        statement = "SELECT owner_id FROM duetime.instances WHERE convert_from(about, 'UTF8')::json->>'name' LIKE $1"
        found: list[Any] = []

        async def known() -> bool:
            found[:] = await self.query(statement, f"%:{member.pid}")
            return bool(found)

        await self.wait(f"{member.role} is known to the others", known)
        member.owner_id = found[0][0]

    async def unowned(self) -> frozenset[int]:
        return frozenset(
            shard for (shard,) in await self.query("SELECT shard FROM duetime.shards WHERE owner_id IS NULL")
        )

    async def assigned_to(self, member: Member) -> frozenset[int]:
        """The shards that the others think this instance should own, for as long as they think that it lives."""
        alive = {owner_id for (owner_id,) in await self.query("SELECT owner_id FROM duetime.instances WHERE serving")}
        return frozenset(assigned(member.owner_id, alive, range(SHARDS)))

    async def _all_owned(self) -> bool:
        return not await self.unowned()

    async def wait(self, what: str, condition: Any, seconds: float = 30.0) -> None:
        """Until a condition of the database holds."""
        deadline = time.monotonic() + seconds
        while not await condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {seconds:g} s")
            await asyncio.sleep(0.02)

    async def query(self, statement: str, *arguments: object) -> list[Any]:
        connection = await asyncpg.connect(self._url, timeout=10)
        try:
            return list(await connection.fetch(statement, *arguments, timeout=20))
        finally:
            await connection.close()

    async def shards_of(self, member: Member) -> frozenset[int]:
        rows = await self.query("SELECT shard FROM duetime.shards WHERE owner_id = $1", member.owner_id)
        return frozenset(shard for (shard,) in rows)

    async def in_flight(self, member: Member) -> frozenset[str]:
        """The timers whose attempts this instance has begun and not recorded."""
        rows = await self.query(
            "SELECT id FROM duetime.timers JOIN duetime.shards USING (shard) "
            "WHERE status = 'executing' AND timers.version = shards.version AND owner_id = $1",
            member.owner_id,
        )
        return frozenset(id for (id,) in rows)

    async def live(self) -> int:
        """How many timers are not final."""
        [(count,)] = await self.query("SELECT count(*) FROM duetime.timers")
        return int(count)

    def close(self) -> None:
        for member in getattr(self, "members", []):
            with contextlib.suppress(ProcessLookupError):
                member.kill()
        if self.proxy is not None:
            self.proxy.close()
        self.postgres.close()
