"""Pulses: one reader of the store serves all listeners, none runs without listeners, and no backlog builds up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest

from duetime.activity import Activity
from duetime.doors import event_stream as module
from duetime.doors.event_stream import ALIVE, PULSE_SECONDS, SILENCE_SECONDS, Pulses
from duetime.doors.http import TooBusy
from duetime.errors import StoreUnavailable
from duetime.model import Status
from duetime.namespaces import Namespaces
from duetime.service import Service
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry
from tests.clocks import ManualClock
from tests.contract.timers import timer


class Store(MemoryStore):
    """Counts its reads, and fails on demand."""

    asked = 0
    fails = False

    async def tally(self, namespace: str | None = None) -> dict[Status, int]:
        self.asked += 1
        if self.fails:
            raise StoreUnavailable("away")
        return await super().tally(namespace)


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = Store(self.clock, shards=8)
        self.telemetry = Telemetry()
        self.namespaces = Namespaces(self.store, self.clock, lambda: None)
        self.service = Service(self.store, self.namespaces, {}, self.clock, lambda *timers: None)
        self.activity = Activity(self.store.cluster, self.telemetry, self.clock, owner_id=b"us")
        self.pulses = Pulses(self.service, self.activity)

    async def pass_time(self, seconds: float = PULSE_SECONDS) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        self.clock.advance(round(seconds * 1000))
        for _ in range(20):
            await asyncio.sleep(0)


class Listener:
    """Reads a stream as it comes, or slowly on demand."""

    def __init__(self, stream: AsyncGenerator[bytes, None], tasks: asyncio.TaskGroup) -> None:
        self.heard: list[bytes] = []
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.task = tasks.create_task(self._read(stream))

    async def _read(self, stream: AsyncGenerator[bytes, None]) -> None:
        async for piece in stream:
            self.heard.append(piece)
            await self.may_read.wait()

    def pulse(self, place: int = -1) -> dict[str, Any]:
        first, second, *rest = self.heard[place].split(b"\n")
        assert first == b"event: pulse" and rest == [b"", b""]
        data: dict[str, Any] = json.loads(second.removeprefix(b"data: "))
        assert set(data) == {"now", "statuses", "activity", "changes"}
        return data


Scene = Callable[[World, asyncio.TaskGroup], Coroutine[Any, Any, None]]


def play(scene: Scene) -> None:
    async def played() -> None:
        world = World()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(world.pulses.run())
            await scene(world, tasks)
            world.pulses.end()
            running.cancel()

    asyncio.run(played())


def test_the_store_is_not_read_without_listeners() -> None:
    async def scene(world: World, tasks: asyncio.TaskGroup) -> None:
        await world.pass_time(60)
        assert world.store.asked == 0
        listeners = [Listener(world.pulses.listen(), tasks) for _ in range(50)]
        for _ in range(3):
            await world.pass_time()
        assert 3 <= world.store.asked <= 4  # for all of them together
        for listener in listeners:
            listener.task.cancel()
        await world.pass_time()
        asked = world.store.asked
        for _ in range(5):
            await world.pass_time()
        assert world.store.asked <= asked + 1

    play(scene)


def test_a_pulse_is_sent_at_once_and_then_only_after_changes() -> None:
    async def scene(world: World, tasks: asyncio.TaskGroup) -> None:
        listener = Listener(world.pulses.listen(), tasks)
        await world.pass_time(0)
        assert listener.pulse()["statuses"]["pending"] == 0 and listener.pulse()["activity"] is None
        for _ in range(3):
            await world.pass_time()
        assert len(listener.heard) == 1
        await world.store.put(timer())
        await world.pass_time()
        assert len(listener.heard) == 2 and listener.pulse()["statuses"]["pending"] == 1
        assert listener.pulse()["changes"] > listener.pulse(0)["changes"]
        late = Listener(world.pulses.listen(), tasks)
        await world.pass_time(0)
        assert late.pulse()["changes"] == listener.pulse()["changes"]  # it gets what it missed at once

    play(scene)


def test_changes_that_keep_all_counts_send_a_pulse_too() -> None:
    async def scene(world: World, tasks: asyncio.TaskGroup) -> None:
        await world.namespaces.start()
        await world.store.put(there := timer())
        listener = Listener(world.pulses.listen(), tasks)
        await world.pass_time(0)
        seen = [listener.pulse()["changes"]]
        await world.service.update("default", there.id, execute_at=there.execute_at + 1, change=lambda same: same)
        await world.pass_time()
        seen.append(listener.pulse()["changes"])
        world.telemetry.lateness(5)  # a timer that fired and was rescheduled
        await world.pass_time()
        seen.append(listener.pulse()["changes"])
        assert seen == sorted(set(seen))
        await world.activity.sample()
        await world.activity.sample()
        await world.pass_time()
        assert listener.pulse()["activity"] is not None and listener.pulse()["changes"] == seen[-1]

    play(scene)


def test_keep_alives_are_sent_even_if_the_store_is_unavailable() -> None:
    async def scene(world: World, tasks: asyncio.TaskGroup) -> None:
        listener = Listener(world.pulses.listen(), tasks)
        await world.pass_time(0)
        world.store.fails = True
        await world.pass_time(SILENCE_SECONDS)
        await world.pass_time(SILENCE_SECONDS)
        assert listener.heard[1:] == [ALIVE, ALIVE]
        world.store.fails = False
        await world.store.put(timer())
        await world.pass_time()
        assert listener.pulse()["statuses"]["pending"] == 1

    play(scene)


def test_slow_readers_skip_pulses_and_get_the_latest() -> None:
    async def scene(world: World, tasks: asyncio.TaskGroup) -> None:
        listener = Listener(world.pulses.listen(), tasks)
        listener.may_read.clear()
        await world.pass_time(0)
        for n in range(20):
            await world.store.put(timer(f"t{n}"))
            await world.pass_time()
        assert len(listener.heard) == 1
        listener.may_read.set()
        await world.pass_time()
        await world.store.put(timer("last"))
        await world.pass_time()
        assert listener.pulse()["statuses"]["pending"] == 21 and len(listener.heard) <= 4

    play(scene)


def test_the_number_of_listeners_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LISTENERS_MAX", 3)

    async def scene(world: World, tasks: asyncio.TaskGroup) -> None:
        listeners = [Listener(world.pulses.listen(), tasks) for _ in range(3)]
        await world.pass_time(0)
        with pytest.raises(TooBusy, match="maximum of 3 event streams"):
            world.pulses.listen()
        listeners[0].task.cancel()
        await world.pass_time(0)
        Listener(world.pulses.listen(), tasks)
        await world.pass_time(0)
        assert listeners[1].heard

    play(scene)


def test_all_streams_end_at_once_on_shutdown() -> None:
    async def scene(world: World, tasks: asyncio.TaskGroup) -> None:
        listeners = [Listener(world.pulses.listen(), tasks) for _ in range(3)]
        await world.pass_time(0)
        world.pulses.end()
        await world.pass_time(0)
        assert all(listener.task.done() and len(listener.heard) == 1 for listener in listeners)
        with pytest.raises(TooBusy, match="stopping"):
            world.pulses.listen()

    play(scene)
