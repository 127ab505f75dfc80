"""The watchdog on the memory store in virtual time: each cause is reported as the right reason."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from duetime.engine.engine import Engine
from duetime.engine.watchdog import SAMPLE_SECONDS, STOPPED_MS, STUCK_MS
from duetime.errors import StoreUnavailable
from duetime.model import HttpTarget, Status
from duetime.overdue import Reason
from duetime.store import About
from duetime.telemetry import Telemetry
from tests.engine.test_engine import Scene, on_virtual_time

STUCK_SECONDS = STUCK_MS / 1000
FAR_AWAY_SECONDS = 10_000.0


@asynccontextmanager
async def watched(scene: Scene) -> AsyncIterator[Callable[[], dict[Reason, int]]]:
    """Run the engine and its watchdog; yields a function for the overdue counts by reason."""
    await scene.start()
    watching = asyncio.create_task(scene.engine.watchdog.run())

    def overdue() -> dict[Reason, int]:
        return {reason: count for reason, count in scene.engine.watchdog.overdue.items() if count}

    yield overdue
    assert not watching.done()
    watching.cancel()
    await scene.stop()


async def sampled(samples: int = 2) -> None:
    await asyncio.sleep(samples * SAMPLE_SECONDS + 0.1)


async def pause(scene: Scene, paused: bool = True) -> None:
    await scene.namespaces.change("default", lambda n: msgspec.structs.replace(n, paused=paused))


def block(part: Any, name: str) -> asyncio.Event:
    """Make a method of the engine or the store wait for the returned event."""
    method, go = getattr(part, name), asyncio.Event()

    async def blocked(*arguments: Any, **more: Any) -> Any:
        await go.wait()
        return await method(*arguments, **more)

    setattr(part, name, blocked)
    return go


def breaks(part: Any, name: str, error: Exception) -> Callable[[], None]:
    """Make a method raise this error; returns a function that undoes it."""
    method = getattr(part, name)

    async def broken(*arguments: Any, **more: Any) -> Any:
        raise error

    setattr(part, name, broken)
    return lambda: setattr(part, name, method)


def slow_begins(scene: Scene, seconds: float) -> None:
    def slowed(begin: Callable[..., Any]) -> Callable[..., Any]:
        async def slow(*arguments: Any, **more: Any) -> Any:
            begun = await begin(*arguments, **more)
            await asyncio.sleep(seconds)
            return begun

        return slow

    store: Any = scene.store
    store.begin, store.begin_lanes = slowed(store.begin), slowed(store.begin_lanes)


@on_virtual_time
async def test_timers_that_begin_on_time_are_not_overdue() -> None:
    scene = Scene()
    async with watched(scene) as overdue:
        for n in range(50):
            await scene.create(f"t{n}", in_ms=n * 500)
        await sampled(6)
        assert overdue() == {} and scene.engine.watchdog.problem() is None


@on_virtual_time
async def test_paused_namespace_is_the_reason_and_no_problem() -> None:
    scene = Scene()
    async with watched(scene) as overdue:
        await pause(scene)
        for n in range(40):
            await scene.create(f"t{n}")
        await sampled(20)
        assert overdue() == {Reason.PAUSED: 40}
        assert scene.engine.watchdog.problem() is None
        await pause(scene, False)
        await sampled()
        assert overdue() == {}


@on_virtual_time
async def test_overdue_counts_are_in_the_heartbeat_and_in_the_metrics() -> None:
    scene = Scene()
    async with watched(scene):
        await pause(scene)
        await scene.create("a")
        await sampled(3)
        [instance] = await scene.service.cluster()
        assert instance.about.overdue == {"paused": 1}
        page = scene.telemetry.page(dict.fromkeys(Status, 0)).decode()
        assert 'duetime_overdue_timers{reason="paused"} 1.0' in page
        assert 'duetime_overdue_timers{reason="behind"} 0.0' in page


@pytest.mark.parametrize("destinations", [1, 100])
def test_hanging_destinations_are_the_reason_and_no_problem(destinations: int) -> None:
    async def scene_of() -> None:
        scene = Scene(in_flight_max=400)
        scene.deliverer.seconds = lambda timer: FAR_AWAY_SECONDS
        async with watched(scene) as overdue:
            for n in range(3_000):
                await scene.create(f"t{n}", host=f"host-{n % destinations}")
            for _ in range(5):
                await sampled()
                assert set(overdue()) == {Reason.DESTINATION}
                assert scene.engine.watchdog.problem() is None

    on_virtual_time(scene_of)()


@pytest.mark.parametrize(("seconds", "most"), [(1.0, 5), (0.2, 8), (3.0, 256)])
def test_slow_destination_is_the_reason(seconds: float, most: int) -> None:
    """Its queue is never empty, so it is always the reason why timers wait."""

    async def scene_of() -> None:
        scene = Scene(per_destination_max=most)
        scene.deliverer.seconds = lambda timer: seconds
        found: set[Reason] = set()
        async with watched(scene) as overdue:
            for n in range(2_000):
                await scene.create(f"t{n}")
            for _ in range(6):
                await asyncio.sleep(SAMPLE_SECONDS + 0.037)
                await scene.engine.watchdog.sample()
                found |= overdue().keys()
        assert found == {Reason.DESTINATION}

    on_virtual_time(scene_of)()


@on_virtual_time
async def test_a_shard_without_owner_is_reported_by_one_instance() -> None:
    scene = Scene()
    scene.engine.ownership.owner_id = b"\x01" * 16
    other = Engine(
        *(scene.store, {HttpTarget: scene.deliverer}, scene.clock, Telemetry(), scene.engine.options),
        owner_id=b"\x03" * 16,
    )

    async def idler() -> None:
        """Stays alive but does not claim the shards that the others leave to it."""
        while True:
            await scene.store.renew(b"\x02" * 16, 3_000, About())
            await asyncio.sleep(1)

    async with watched(scene) as overdue:
        tasks = [asyncio.create_task(each) for each in (other.run(), other.watchdog.run(), idler())]
        await asyncio.sleep(20)
        left = set(range(8)) - scene.engine.ownership.shards() - other.ownership.shards()
        assert left
        for n in range(100):
            await scene.create(f"t{n}")
        await sampled(3)
        waiting = len([t for n in range(100) if (t := await scene.service.get("default", f"t{n}")).shard in left])
        assert waiting and overdue() == {Reason.NO_OWNER: waiting}
        assert not other.watchdog.overdue[Reason.NO_OWNER]
        assert scene.engine.watchdog.problem() is None
        await asyncio.sleep(STUCK_SECONDS)
        assert "in shards without an owner" in str(scene.engine.watchdog.problem())
        assert other.watchdog.problem() is None

        # A pause is the reason no matter which instance owns the shard.
        await pause(scene)
        await sampled()
        assert overdue() == {Reason.PAUSED: waiting} and scene.engine.watchdog.problem() is None
        await pause(scene, False)

        tasks[2].cancel()
        await asyncio.sleep(10)
        await sampled()
        assert overdue() == {} and scene.engine.watchdog.problem() is None
        other.drain()
        await tasks[0]
        tasks[1].cancel()


@on_virtual_time
async def test_an_instance_with_a_wrong_clock_leaves_reporting_to_others() -> None:
    scene = Scene()
    scene.engine.ownership.owner_id = b"\x01" * 16
    async with watched(scene) as overdue:
        await scene.store.renew(b"\x02" * 16, 600_000, About())
        store_clock = type(scene.clock)()
        scene.store._clock = store_clock
        scene.clock.skew_ms = 5_000
        await asyncio.sleep(10)
        assert not scene.engine.ownership.shards()
        await scene.create("a", in_ms=-10_000)
        await sampled()
        assert overdue() == {}
        await scene.store.leave(b"\x02" * 16)
        await sampled()
        assert overdue() == {Reason.NO_OWNER: 1}
        scene.clock.skew_ms = 0


@on_virtual_time
async def test_engine_that_stopped_polling_becomes_a_problem() -> None:
    scene = Scene()
    async with watched(scene) as overdue:
        await asyncio.sleep(600)
        go = block(scene.engine, "look")
        await sampled()
        await scene.create("a")
        await sampled()
        assert overdue() == {Reason.BEHIND: 1}
        assert scene.engine.watchdog.problem() is None  # not yet, though the last begin was long ago
        await asyncio.sleep(STUCK_SECONDS)
        assert "started none for 30 seconds" in str(scene.engine.watchdog.problem())
        go.set()
        await sampled()
        assert overdue() == {} and scene.engine.watchdog.problem() is None
        assert await scene.status("a") is Status.COMPLETED


@on_virtual_time
async def test_an_engine_that_stopped_polling_does_not_blame_a_destination() -> None:
    scene = Scene()
    scene.deliverer.seconds = lambda timer: FAR_AWAY_SECONDS
    async with watched(scene) as overdue:
        for n in range(300):
            await scene.create(f"t{n}")
        await sampled()
        assert set(overdue()) == {Reason.DESTINATION}
        go = block(scene.engine, "look")
        await asyncio.sleep(STOPPED_MS / 1000)
        await sampled()
        assert set(overdue()) == {Reason.BEHIND}
        go.set()
        await sampled()
        assert set(overdue()) == {Reason.DESTINATION}


@on_virtual_time
async def test_an_overloaded_instance_stays_ready() -> None:
    scene = Scene(begin_max=50)
    slow_begins(scene, 0.5)
    async with watched(scene) as overdue:
        for n in range(8_000):
            await scene.create(f"t{n}", host="ab"[n % 2])
        for _ in range(5):
            await sampled()
            assert set(overdue()) == {Reason.BEHIND}
            assert scene.engine.watchdog.problem() is None


@on_virtual_time
async def test_slow_store_is_the_reason_and_no_problem() -> None:
    scene = Scene(begin_max=10)
    slow_begins(scene, 1.5)
    async with watched(scene) as overdue:
        for n in range(1_000):
            await scene.create(f"t{n}", host="abcde"[n % 5])
        await sampled()
        assert set(overdue()) == {Reason.STORE}
        assert scene.engine.watchdog.problem() is None  # it begins some


@pytest.mark.parametrize("hangs", [True, False])
def test_store_whose_begins_fail_becomes_a_problem(hangs: bool) -> None:
    async def scene_of() -> None:
        scene = Scene()
        async with watched(scene) as overdue:
            await scene.create("a", in_ms=500)
            if hangs:
                mend: Callable[[], None] = block(scene.store, "begin").set
            else:
                mend = breaks(scene.store, "begin", StoreUnavailable("no room on the disk"))
            await sampled()
            assert overdue() == {Reason.STORE: 1}
            assert scene.engine.watchdog.problem() is None
            await asyncio.sleep(STUCK_SECONDS)
            assert "started none" in str(scene.engine.watchdog.problem())
            mend()
            await sampled()
            assert overdue() == {} and scene.engine.watchdog.problem() is None

    on_virtual_time(scene_of)()


@pytest.mark.parametrize("hangs", [True, False])
def test_watchdog_survives_a_store_that_does_not_respond(hangs: bool) -> None:
    async def scene_of() -> None:
        scene = Scene()
        async with watched(scene) as overdue:
            await pause(scene)
            for n in range(40):
                await scene.create(f"t{n}")
            await sampled()
            if hangs:
                mend: Callable[[], None] = block(scene.store, "overdue").set
            else:
                mend = breaks(scene.store, "overdue", StoreUnavailable("gone"))
            await sampled()
            assert overdue() == ({Reason.PAUSED: 40} if hangs else {Reason.STORE: 40})
            assert scene.engine.watchdog.problem() is None
            await asyncio.sleep(STUCK_SECONDS)
            assert "the store is slow or does not respond" in str(scene.engine.watchdog.problem())
            mend()
            await sampled()
            assert overdue() == {Reason.PAUSED: 40} and scene.engine.watchdog.problem() is None

    on_virtual_time(scene_of)()


@on_virtual_time
async def test_an_unavailable_store_is_a_problem_even_if_nothing_was_overdue() -> None:
    scene = Scene()
    async with watched(scene) as overdue:
        mend = breaks(scene.store, "overdue", StoreUnavailable("gone"))
        await sampled(3)
        assert overdue() == {Reason.STORE: 1}
        mend()
        await sampled()
        assert overdue() == {}


def test_an_internal_error_does_not_stop_the_watchdog(caplog: pytest.LogCaptureFixture) -> None:
    async def scene_of() -> None:
        scene = Scene()
        async with watched(scene) as overdue:
            mend = breaks(scene.store, "overdue", ZeroDivisionError())
            await pause(scene)
            await scene.create("a")
            await sampled(3)
            assert overdue() == {}
            mend()
            await sampled()
            assert overdue() == {Reason.PAUSED: 1}

    with caplog.at_level(logging.ERROR):
        on_virtual_time(scene_of)()
    assert "could not count overdue timers" in caplog.text


def test_the_log_reports_once_what_operators_have_to_fix(caplog: pytest.LogCaptureFixture) -> None:
    async def scene_of() -> None:
        scene = Scene()
        async with watched(scene):
            go = block(scene.engine, "look")
            await asyncio.sleep(2)
            await scene.create("a")
            await sampled(5)
            go.set()

    with caplog.at_level(logging.WARNING):
        on_virtual_time(scene_of)()
    assert [r.getMessage() for r in caplog.records if "overdue" in r.getMessage()] == [
        "timers are overdue because the instances do not keep up (1)"
    ]
