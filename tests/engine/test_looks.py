"""When an engine polls, and which hints it sends to other instances, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from duetime.engine.alarm import Alarm
from duetime.engine.engine import PURGE_BATCH, Engine
from duetime.errors import StoreError, StoreIndeterminate, StoreUnavailable
from duetime.model import HOUR_MS, Definition, HttpTarget, Outcome, OutcomeKind, Status, Unsent
from duetime.service import NewTimer
from duetime.store import About, Hint
from duetime.telemetry import Telemetry
from tests.engine.test_engine import MISS, OK, Scene
from tests.engine.test_isolation import on_virtual_time
from tests.simulation.world import Machine

OURS, OTHER = b"1" * 16, b"2" * 16
"""Fixed, and so is which shards each of them should own."""


class Told(Scene):
    """One engine that polls every ten seconds unless nudged, and records its hints."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"look_interval_ms": 10_000, **options})
        self.engine.ownership.owner_id = OURS
        self.hints: list[Hint] = []
        self.store.hint = self.hints.append  # type: ignore[method-assign, assignment]

    async def share(self) -> None:
        """Another instance has some of the shards."""
        await self.store.renew(OTHER, 1_000_000, About(serving=True))
        self.engine.ownership.wake()
        await asyncio.sleep(1)
        free = [n for n, shard in enumerate(self.store._shards) if shard.owner_id is None]
        assert free and set(await self.store.claim(OTHER, free, 1_000_000)) == set(free)
        self.hints.clear()

    def new(self, id: str, in_ms: int, host: str = "a") -> NewTimer:
        definition = Definition(target=HttpTarget(url=f"http://{host}/"))
        return NewTimer(namespace="default", id=id, execute_at=self.clock.now() + in_ms, definition=definition)

    async def sent(self) -> list[str]:
        return sorted(id for id, _ in self.deliverer.sent if not id.startswith("hang"))


@on_virtual_time
async def test_each_timer_of_a_batch_fires_at_its_time() -> None:
    scene = Told(look_interval_ms=60_000)
    await scene.start()
    await scene.service.create_many([scene.new("c", 9_000), scene.new("a", 1_000), scene.new("b", 5_000)])
    for seconds, sent in ((0.99, []), (0.1, ["a"]), (3.9, ["a"]), (0.1, ["a", "b"]), (4.0, ["a", "b", "c"])):
        await asyncio.sleep(seconds)
        assert await scene.sent() == sent
    await scene.stop()


@on_virtual_time
@pytest.mark.parametrize(("first_ms", "then_ms"), [(50_000, 2_000), (2_000, 50_000)])
async def test_a_moved_timer_fires_at_its_new_time(first_ms: int, then_ms: int) -> None:
    scene = Told(look_interval_ms=60_000)
    await scene.start()
    await scene.create("a", in_ms=first_ms)
    at = scene.clock.now() + then_ms
    await scene.service.update("default", "a", execute_at=at, change=lambda same: same)
    await asyncio.sleep(then_ms / 1000 - 0.01)
    assert scene.deliverer.sent == []
    await asyncio.sleep(0.02)
    assert scene.deliverer.sent == [("a", 1)]
    await scene.stop()


@on_virtual_time
async def test_a_retry_fires_at_its_time_without_a_regular_look() -> None:
    scene = Told(look_interval_ms=60_000)
    scene.deliverer.answers = lambda timer: OK if timer.attempt == 2 else MISS
    await scene.start()
    await scene.create("a", retries=1)
    await asyncio.sleep(1.1)
    assert scene.deliverer.sent == [("a", 1), ("a", 2)]
    await scene.stop()


@on_virtual_time
async def test_setting_the_clock_back_does_not_delay_the_next_look() -> None:
    clock = Machine()
    alarm = Alarm(clock, interval_ms=1_000)
    alarm.reset()
    clock.skew_ms -= HOUR_MS
    async with asyncio.timeout(1.01):
        await alarm.wait()
    alarm.reset()
    alarm.nudge(clock.now() + 300)
    alarm.nudge(clock.now() + 600)  # The earliest one wins.
    started = clock.monotonic()
    await alarm.wait()
    assert clock.monotonic() - started == pytest.approx(0.3, abs=0.002)


@on_virtual_time
async def test_lateness_is_measured_when_the_attempt_is_sent() -> None:
    scene = Told()
    await scene.start()
    await scene.create("on time", in_ms=500)
    await asyncio.sleep(1)
    punctual = scene.telemetry.fires()
    await scene.create("late", in_ms=-60_000)
    await asyncio.sleep(0.1)
    late = scene.telemetry.fires()
    assert (sum(punctual), sum(late)) == (1, 2)
    assert next(n for n, count in enumerate(late) if count != punctual[n]) > punctual.index(1)
    await scene.stop()


@on_virtual_time
async def test_a_single_instance_sends_no_hints() -> None:
    scene = Told()
    await scene.start()
    scene.hints.clear()
    await scene.create("a", in_ms=500)
    assert scene.hints == []
    await scene.stop()


@on_virtual_time
async def test_hints_are_sent_for_timers_due_before_the_next_regular_look() -> None:
    scene = Told()
    await scene.start()
    await scene.share()
    now = scene.clock.now()
    await scene.create("soon", in_ms=500)
    assert scene.hints == [Hint(due_at=now + 500)]
    await scene.create("later", in_ms=10_000)
    assert len(scene.hints) == 1
    await scene.service.create_many([scene.new("x", 99_000), scene.new("y", 700)])
    assert scene.hints[1:] == [Hint(due_at=now + 700)]
    await scene.stop()


@on_virtual_time
async def test_a_hint_of_another_instance_brings_the_look_forward() -> None:
    scene = Told()
    scene.service._nudge = lambda *timers: None
    await scene.start()
    await asyncio.sleep(1)
    await scene.create("a", in_ms=500)
    scene.engine.heard(Hint(due_at=scene.clock.now() + 500))
    await asyncio.sleep(0.6)
    assert scene.deliverer.sent == [("a", 1)]
    await scene.stop()


@on_virtual_time
async def test_a_hint_about_free_shards_makes_an_instance_claim_them_at_once() -> None:
    scene = Told(lease_ms=30_000)
    await scene.start()
    await scene.share()
    assert len(scene.engine.ownership.held()) < 8
    await scene.store.leave(OTHER)
    await asyncio.sleep(0.05)
    assert len(scene.engine.ownership.held()) < 8
    scene.engine.heard(Hint(shards=True))
    await asyncio.sleep(0.05)
    assert len(scene.engine.ownership.held()) == 8
    await scene.stop()


@on_virtual_time
async def test_an_instance_that_leaves_sends_a_hint() -> None:
    scene = Told()
    await scene.start()
    scene.hints.clear()
    await scene.stop()
    assert scene.hints[-1] == Hint(shards=True)


@on_virtual_time
async def test_a_drain_puts_back_unsent_timers_without_using_up_retries() -> None:
    """Queued timers go back to the store, and so do timers that a look begins during the drain."""
    scene = Told(per_destination_max=2)
    await scene.start()
    for n in range(30):  # Fast responses, so that the destination gets a queue.
        await scene.create(f"quick-{n}")
    await asyncio.sleep(0.9)
    scene.deliverer.seconds = lambda timer: 2.0
    begin = scene.store.begin

    async def slow(*arguments: Any, **limits: Any) -> Any:
        begun = await begin(*arguments, **limits)
        await asyncio.sleep(0.2)
        return begun

    for n in range(10):
        await scene.create(f"slow-{n}")
    await asyncio.sleep(0.1)
    assert scene.engine.destinations.queued
    scene.store.begin = slow  # type: ignore[method-assign]
    await scene.create("late", host="b")
    await asyncio.sleep(0.1)
    sent = len(scene.deliverer.sent)
    await scene.stop()
    assert len(scene.deliverer.sent) == sent
    timers = list(scene.store._timers.values())
    assert {timer.status for timer in timers} == {Status.COMPLETED, Status.PENDING}
    waiting = [timer for timer in timers if timer.status is Status.PENDING]
    assert "late" in {timer.id for timer in waiting}
    assert {(timer.attempt, timer.started_at) for timer in waiting} == {(0, None)}
    assert len(timers) - len(waiting) == sent


@on_virtual_time
@pytest.mark.parametrize(("left_ms", "leaves"), [(5_000, True), (4_999, False)])
async def test_an_attempt_is_sent_only_if_its_timeout_ends_before_its_deadline(left_ms: int, leaves: bool) -> None:
    """After the deadline, another instance may make the same attempt."""
    scene = Told(look_interval_ms=60_000)
    await scene.start()
    await scene.create("a", in_ms=30_000, timeout_ms=5_000)
    timer = await scene.service.get("default", "a")
    begun = msgspec.structs.replace(
        timer,
        status=Status.EXECUTING,
        attempt=1,
        version=scene.engine.ownership.held()[timer.shard],
        deadline_at=scene.engine.clock.now() + left_ms,
    )
    assert await scene.store.swap(timer, begun)
    scene.engine.dispatcher.dispatch([begun], asyncio.get_running_loop().create_task)
    await asyncio.sleep(0.1)
    assert scene.deliverer.sent == ([("a", 1)] if leaves else [])
    after = await scene.service.get("default", "a")
    assert (after.status, after.attempt) == ((Status.COMPLETED, 1) if leaves else (Status.PENDING, 0))
    await scene.stop()


@on_virtual_time
@pytest.mark.parametrize(("cause", "lost"), [(Unsent.BROKER, 0), (Unsent.DESCRIPTORS, 2)])
async def test_only_deferrals_for_the_broker_reset_lost_attempts(cause: Unsent, lost: int) -> None:
    scene = Told()
    scene.deliverer.answers = lambda timer: Outcome(kind=OutcomeKind.UNSENT, cause=cause, error="none")
    await scene.start()
    await scene.create("a", in_ms=500)
    timer = await scene.service.get("default", "a")
    assert await scene.store.swap(timer, msgspec.structs.replace(timer, attempt=2, lost=2, started_at=1))
    await asyncio.sleep(0.7)
    after = await scene.service.get("default", "a")
    assert scene.deliverer.sent[0] == ("a", 3)
    assert (after.status, after.attempt, after.lost) == (Status.PENDING, 2, lost)
    await scene.stop()


@on_virtual_time
async def test_shards_refused_by_the_store_are_dropped_at_once() -> None:
    scene = Told(lease_ms=60_000)
    await scene.start()
    for shard in scene.store._shards[:3]:  # as after a failover that lost the latest writes
        shard.owner_id, shard.version = OTHER, shard.version + 1
    await scene.create("a", in_ms=0)
    await asyncio.sleep(0.1)
    assert set(scene.engine.ownership.held()) == {3, 4, 5, 6, 7}
    await scene.stop()


@on_virtual_time
async def test_a_shard_does_not_move_while_it_has_attempts_in_flight() -> None:
    scene = Told(look_interval_ms=500)
    scene.deliverer.seconds = lambda timer: 4.0
    await scene.start()
    for n in range(40):
        await scene.create(f"t{n}")
    await asyncio.sleep(0.2)
    deliverers = {HttpTarget: scene.deliverer}
    other = Engine(scene.store, deliverers, scene.clock, Telemetry(), scene.engine.options, owner_id=OTHER)
    running = asyncio.create_task(other.run())
    await asyncio.sleep(3)
    assert not other.ownership.held()
    await asyncio.sleep(3)
    assert other.ownership.held()
    assert {(timer.status, timer.attempt) for timer in scene.store._timers.values()} == {(Status.COMPLETED, 1)}
    other.drain()
    await running
    await scene.stop()


@on_virtual_time
@pytest.mark.parametrize(("dropped", "times"), [(PURGE_BATCH, 60), (PURGE_BATCH - 1, 2), (0, 2)])
async def test_purging_continues_without_a_long_pause_while_there_are_many_old_timers(dropped: int, times: int) -> None:
    scene = Told()
    asked: list[int] = []

    async def purge(*, retention_ms: int, limit: int) -> int:
        asked.append(limit)
        await asyncio.sleep(0.5)  # The pause is just as long.
        return dropped

    scene.store.purge = purge  # type: ignore[method-assign]
    await scene.start()
    await asyncio.sleep(61)
    assert times <= len(asked) <= times + 2 and set(asked) == {PURGE_BATCH}
    await scene.stop()


# By lane, while half of the slots hang.


class ByLane(Told):
    def __init__(self, **options: Any) -> None:
        super().__init__(in_flight_max=100, **options)
        self.deliverer.seconds = lambda timer: 4_000.0 if "hang" in timer.definition.target.url else 0.01  # type: ignore[union-attr]

    async def start(self) -> None:
        await super().start()
        for n in range(60):
            await self.create(f"hang-{n}", host=f"hang-{n % 20}", timeout_ms=4_000_000)
        for n in range(40):  # Make the destination proven.
            await self.create(f"well-{n}", host="well")
        await asyncio.sleep(5)
        assert self.engine.lanes.active
        self.deliverer.sent.clear()


@on_virtual_time
async def test_all_lanes_of_a_batch_are_polled() -> None:
    scene = ByLane()
    await scene.start()
    await scene.service.create_many([scene.new(id, 0, host=f"new-{id}") for id in "abc"])
    await asyncio.sleep(0.1)
    assert await scene.sent() == ["a", "b", "c"]
    scene.engine.drain()


@on_virtual_time
async def test_timers_left_in_a_lane_fire_at_their_times() -> None:
    scene = ByLane()
    await scene.start()
    nudge, scene.service._nudge = scene.service._nudge, lambda *timers: None
    await scene.service.create_many([scene.new("b", 700, host="well"), scene.new("c", 1_400, host="well")])
    scene.service._nudge = nudge
    await scene.create("a", host="well")
    for seconds, sent in ((0.1, ["a"]), (0.7, ["a", "b"]), (0.7, ["a", "b", "c"])):
        await asyncio.sleep(seconds)
        assert await scene.sent() == sent
    scene.engine.drain()


@on_virtual_time
async def test_a_hint_triggers_a_survey_for_unknown_lanes() -> None:
    scene = ByLane()
    await scene.start()
    scene.service._nudge = lambda *timers: None
    await asyncio.sleep(0.3)
    await scene.create("a", host="new")
    scene.engine.heard(Hint(due_at=scene.clock.now()))
    await asyncio.sleep(0.2)
    assert await scene.sent() == ["a"]
    scene.engine.drain()


# With a minute between regular looks.


@on_virtual_time
async def test_timers_of_a_claimed_shard_are_polled_at_once() -> None:
    scene = Told(look_interval_ms=60_000, lease_ms=3_000)
    await scene.start()
    await scene.share()
    for n in range(40):
        await scene.create(f"t{n}", in_ms=500)
    await asyncio.sleep(1)
    ours = len(scene.deliverer.sent)
    assert 0 < ours < 40
    await scene.store.leave(OTHER)
    scene.engine.ownership.wake()
    await asyncio.sleep(0.2)
    assert len(scene.deliverer.sent) == 40
    await scene.stop()


@on_virtual_time
@pytest.mark.parametrize("error", [StoreUnavailable("away"), StoreIndeterminate("lost")])
async def test_a_failed_look_is_retried_soon(error: StoreError) -> None:
    scene = Told(look_interval_ms=60_000)
    begin, fails = scene.store.begin, True

    async def failing(*arguments: Any, **limits: Any) -> Any:
        if fails:
            raise error
        return await begin(*arguments, **limits)

    await scene.start()
    await scene.create("a", in_ms=2_000)
    scene.store.begin = failing  # type: ignore[method-assign]
    await asyncio.sleep(3)
    fails = False
    await asyncio.sleep(1.1)
    assert scene.deliverer.sent == [("a", 1)]
    await scene.stop()


@on_virtual_time
async def test_two_engines_fire_each_timer_once_and_on_time_by_hints_alone() -> None:
    scene = Told()
    deliverers = {HttpTarget: scene.deliverer}
    other = Engine(scene.store, deliverers, scene.clock, Telemetry(), scene.engine.options, owner_id=OTHER)

    def hint(hint: Hint) -> None:
        for engine in (scene.engine, other):
            engine.heard(hint)

    scene.store.hint = hint  # type: ignore[method-assign]
    await scene.start()
    running = asyncio.create_task(other.run())
    await asyncio.sleep(10)
    assert scene.engine.ownership.held() and other.ownership.held()
    for n in range(40):
        await scene.create(f"t{n:02}", in_ms=500)
    await asyncio.sleep(0.6)
    assert sorted(scene.deliverer.sent) == [(f"t{n:02}", 1) for n in range(40)]
    other.drain()
    await running
    await scene.stop()
