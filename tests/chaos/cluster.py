"""The processes: one database, the instances that share it, and the proxies between them.

Everything is started and stopped here, by process id.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from duetime.sharding import assigned
from tests.chaos import launcher
from tests.chaos.databases import DATABASES, Database
from tests.ports import free_port
from tests.proxy import Proxy
from tests.servers import KEY, Duetime

ROOT = Path(__file__).parents[2]
LEASE_SECONDS = 3.0
SHARDS = 64


class Member(Duetime):
    """One instance of the cluster, on a fixed port, with its own role in the database."""

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
            DATABASE_URL=database_url,
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
        self, directory: Path, *, server: str, instances: int, bug: str | None, proxied: bool, movable_clocks: bool
    ) -> None:
        self.database = self._database(server)
        self.proxy: Proxy | None = None
        self.members: list[Member] = []
        roles = [f"instance_{number}" for number in range(instances)]
        try:
            asyncio.run(self.database.prepare(SHARDS, roles))
            if proxied:
                self.proxy = Proxy("127.0.0.1", self.database.server.port)
            self.members += [
                Member(
                    directory / role.replace("_", "-"),
                    role=role,
                    database_url=self._url_of(role),
                    bug=bug,
                    movable_clock=movable_clocks,
                )
                for role in roles
            ]
        except BaseException:
            self.close()
            raise

    def _database(self, server: str) -> Database:
        return DATABASES[server]()

    def _url_of(self, role: str) -> str:
        """The URL with which this instance connects to the database."""
        url = self.proxy.url(self.database.url) if self.proxy else self.database.url
        return re.sub("//[^@]*@", f"//{role}@", url)

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
        """Wait until it serves, and find the name under which it owns shards."""
        await asyncio.to_thread(member.wait_ready)
        name = f":{member.pid}"

        async def known() -> bool:
            for owner_id, (about, _) in (await self.database.instances()).items():
                if about.endswith(name):
                    member.owner_id = owner_id
                    return True
            return False

        await self.wait(f"{member.role} is known to the others", known)

    async def unowned(self) -> frozenset[int]:
        return frozenset(shard for shard, owner_id in (await self.database.owners()).items() if owner_id is None)

    async def assigned_to(self, member: Member) -> frozenset[int]:
        """The shards that this instance should own according to the others, as long as they consider it alive."""
        alive = {owner_id for owner_id, (_, serving) in (await self.database.instances()).items() if serving}
        return frozenset(assigned(member.owner_id, alive, range(SHARDS)))

    async def _all_owned(self) -> bool:
        return not await self.unowned()

    async def wait(self, what: str, condition: Any, seconds: float = 30.0) -> None:
        """Wait until a condition in the database holds."""
        deadline = time.monotonic() + seconds
        while not await condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {seconds:g} s")
            await asyncio.sleep(0.02)

    async def shards_of(self, member: Member) -> frozenset[int]:
        owners = await self.database.owners()
        return frozenset(shard for shard, owner_id in owners.items() if owner_id == member.owner_id)

    async def in_flight(self, member: Member) -> frozenset[str]:
        return await self.database.in_flight(member.owner_id)

    def close(self) -> None:
        for member in self.members:
            with contextlib.suppress(ProcessLookupError):
                member.kill()
        if self.proxy is not None:
            self.proxy.close()
        self.database.close()
