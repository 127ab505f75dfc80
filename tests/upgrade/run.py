"""Upgrade and rollback under load: previous release only, both, this version only, both, previous release, this
version.

Instances are stopped gracefully, so nothing may be delivered twice. Around each switch, one namespace is paused, has
timers fall due meanwhile, and is resumed by the other version; other namespaces have secrets, and each of their
callbacks must be signed.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.postgres import Postgres
from tests.servers import Receiver, until
from tests.upgrade.load import NAMESPACES, Load
from tests.upgrade.program import ROOT, Instance, last_release

PATIENCE_SECONDS = 60.0
HELD = 5
"""The number of timers that fall due while their namespace is paused, in addition to the load."""


@dataclass(frozen=True)
class Options:
    rate: float = 100.0
    phase_seconds: float = 20.0
    rounds: int = 1
    seed: int = 1
    say: Callable[[str], None] = print


class Upgrade:
    def __init__(self, options: Options, directory: Path, database_url: str, receiver: Receiver) -> None:
        self._options = options
        self._directory = directory
        self._url = database_url
        self._sources = {"old": last_release(directory / "last-release"), "new": ROOT / "src"}
        self._numbers = itertools.count()
        self._members: dict[int, Instance] = {}
        self.load = Load(receiver, rate=options.rate, seed=options.seed)

    async def run(self) -> None:
        await self._start(0, "old")
        await self._start(1, "old")
        await self._make_namespaces()
        running = asyncio.create_task(self.load.run())
        try:
            await self._phase("the last release alone")
            for _ in range(self._options.rounds):
                await self._pause()  # The previous release parks timers that fall due.
                await self._replace(1, "new")
                await self._phase("both, upgrading")
                await self._change_by_turns()
                await self._replace(0, "new")
                await self._resume()
                await self._phase("this version alone")
                await self._pause()  # This version leaves them in their lanes.
                await self._replace(1, "old")
                await self._phase("both, rolling back")
                await self._replace(0, "old")
                await self._resume()
                await self._phase("the last release alone again")
            await self._pause()
            await self._replace(1, "new")
            await self._replace(0, "new")
            await self._resume()
            await self._phase("this version again")
        finally:
            self.load.stop()
            await running
        with suppress(AssertionError):  # The check reports what is missing.
            await asyncio.to_thread(until, "all have come", lambda: not self.load.open_timers(), PATIENCE_SECONDS)
        await asyncio.sleep(0.5)  # for unexpected callbacks

    async def _start(self, place: int, version: str) -> None:
        instance = Instance(
            self._directory / f"instance-{next(self._numbers)}-{version}", self._sources[version], self._url
        )
        self._members[place] = instance
        await asyncio.to_thread(instance.start)
        self.load.serving.append(instance)

    async def _replace(self, place: int, version: str) -> None:
        """Replace the running instance with one of this version."""
        before = self._members[place]
        self.load.serving.remove(before)
        await asyncio.to_thread(before.stop)
        await self._start(place, version)

    async def _phase(self, name: str) -> None:
        self._options.say(f"{name}: {len(self.load.timers)} timers so far")
        await asyncio.sleep(self._options.phase_seconds)

    async def _make_namespaces(self) -> None:
        for name in NAMESPACES[1:]:
            await self._asked("POST", "/namespaces", {"name": name})
            made = await self._asked("POST", f"/namespaces/{name}/secrets")
            self.load.secrets[name] = [made["secret"]]

    async def _change_by_turns(self) -> None:
        """Each version changes namespaces that the other one has written."""
        new, old = self._members[1], self._members[0]
        there: dict[str, object] = {}
        for instance, change in (
            (new, {"weight": 3}),
            (old, {"retention": "40d"}),
            (new, {"retention": "50d"}),
            (old, {"retention": "60d"}),
            (new, {"paused": False}),
        ):
            there = await self._asked("PATCH", "/namespaces/signed", change, instance)
        if (there["weight"], there["retention"]) != (3, "60d"):
            self.load.wrong.append(f"a change of a namespace was lost: {there}")

    async def _pause(self) -> None:
        await self._asked("PATCH", "/namespaces/held", {"paused": True})
        for _ in range(HELD):
            await self.load.live("held", 0.05)

    async def _resume(self) -> None:
        await self._asked("PATCH", "/namespaces/held", {"paused": False})

    async def _asked(
        self, method: str, path: str, body: object = None, instance: Instance | None = None
    ) -> dict[str, Any]:
        answer = await self.load.ask(method, path, body, of=instance)
        assert answer is not None and answer.status < 300, answer
        said: dict[str, Any] = answer.body
        return said

    def close(self) -> None:
        for instance in self._members.values():
            with suppress(ProcessLookupError):
                instance.kill()


def run(options: Options, postgres: Postgres) -> Load:
    with tempfile.TemporaryDirectory(prefix="duetime-upgrade-") as directory, Receiver() as receiver:
        url = postgres.fresh()
        upgrade = Upgrade(options, Path(directory), url, receiver)
        try:
            asyncio.run(upgrade.run())
        finally:
            upgrade.close()
            postgres.give_back(url)
        return upgrade.load
