"""Deferrals use up no retries, and few slots need few looks: one engine in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from duetime.engine.destinations import BREAK_AFTER, SLOT_BYTES
from duetime.model import HOUR_MS, Outcome, OutcomeKind, RetryPolicy, Status, Unsent
from duetime.store import Begun, Portion
from tests.engine.test_isolation import MISS, OK, PROMPT_MS, Scene, on_virtual_time


@on_virtual_time
async def test_an_unknown_namespace_does_not_delay_others_at_the_same_destination() -> None:
    async with Scene() as scene:
        unknown = Outcome(kind=OutcomeKind.UNSENT, cause=Unsent.NAMESPACE, error="not known yet")
        scene.hosts.behaves["shared"] = lambda timer: unknown if timer.namespace == "new" else OK
        await scene.herd(200, "shared", namespace="new")
        scene.hosts.lateness_ms.clear()
        for n in range(40):
            await scene.create([scene.new(f"other-{n}", "shared")])
            await asyncio.sleep(0.05)
        sent = [timer for timer in scene.hosts.sent if timer.namespace == "default"]
        assert len(sent) == 40 and all(timer.updated_at - timer.fire_at <= PROMPT_MS for timer in sent)
        scene.hosts.behaves["shared"] = "well"
        known_at = scene.clock.now()
        await asyncio.sleep(1)
        done = [timer for timer in scene.store._timers.values() if timer.namespace == "new"]
        assert {(timer.status, timer.attempt) for timer in done} == {(Status.COMPLETED, 1)}
        assert max(timer.updated_at for timer in done) - known_at <= 500


@on_virtual_time
@pytest.mark.parametrize("cause", [Unsent.BROKER, Unsent.DESCRIPTORS, Unsent.INTERNAL])
@pytest.mark.parametrize("failures", [0, 2])
async def test_time_without_a_needed_resource_does_not_count_towards_the_retry_window(
    cause: Unsent, failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Half an hour without, and a window of ten minutes: there are as many attempts as if it had always been there."""
    caplog.set_level(logging.CRITICAL)
    async with Scene() as scene:
        short = False
        unsent = Outcome(kind=OutcomeKind.UNSENT, cause=cause, error="there is none")
        scene.hosts.behaves["odd"] = lambda timer: unsent if short else MISS
        retry = RetryPolicy(max_retries=99, initial_interval_ms=60_000, max_duration_ms=600_000, jitter=False)
        new = scene.new("a", "odd")
        new = msgspec.structs.replace(new, definition=msgspec.structs.replace(new.definition, retry=retry))
        short = failures == 0
        await scene.create([new])
        await asyncio.sleep(45 * failures)
        short = True
        await asyncio.sleep(1_800)
        timer = await scene.service.get("default", "a")
        assert (timer.status, timer.attempt, timer.failures) == (Status.PENDING, failures, failures)
        short = False
        await asyncio.sleep(1_200)
        timer = await scene.service.get("default", "a")
        # After 0, 1, 3 and 7 minutes; the next one would be after 15.
        assert (timer.status, timer.attempt, timer.failures) == (Status.FAILED, 4, 4)


@on_virtual_time
@pytest.mark.parametrize("outcome", [MISS, Outcome(kind=OutcomeKind.UNSENT, cause=Unsent.LOOKUPS, error="none")])
async def test_the_queue_of_a_destination_that_falls_silent_is_put_back_unsent(outcome: Outcome) -> None:
    async with Scene(per_destination_max=2) as scene:
        await scene.herd(100, "well")
        await asyncio.sleep(0.5)
        scene.hosts.behaves["well"] = lambda timer: outcome
        sent = scene.hosts.attempts["well"]
        await scene.create(scene.new(f"late-{n}", "well", retries=9) for n in range(100))
        await asyncio.sleep(0.9)
        assert 0 < scene.hosts.attempts["well"] - sent <= BREAK_AFTER + 2
        assert scene.store.put_back["well"] > 10  # There was a queue.
        assert not scene.engine.destinations.queued and scene.engine.recorder.slots_in_flight == 0
        scene.hosts.behaves["well"] = "well"
        await asyncio.sleep(120)
        assert scene.by_status()[Status.COMPLETED] == 200
        scene.check_ended()


FEW_SLOTS: dict[str, list[tuple[str, int, dict[str, Any]]]] = {
    "idle": [],
    "full": [("hang", 1, {"timeout_ms": HOUR_MS})],
    "later": [("well", 20, {"in_ms": 10_000})],
    "herd": [("well", 300, {})],
    "herd that hangs": [("hang", 50, {"timeout_ms": HOUR_MS})],
    "herd that times out": [("hang", 50, {"timeout_ms": 2_000})],
    "dead": [("dead", 50, {"retries": 3})],
    "many dead": [(f"dead-{n}", 3, {"retries": 3}) for n in range(30)],
    "shortage": [("short", 20, {}), ("well", 20, {})],
    "namespaces": [(kind, 60, {"namespace": name}) for name in "abc" for kind in ("well", "slow")],
    "large": [(kind, 10, {"payload": Raw(b"1" * 3 * SLOT_BYTES)}) for kind in ("well", "slow")],
    "paused": [("well", 50, {"namespace": "paused"})],
}


@on_virtual_time
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("herds", FEW_SLOTS.values(), ids=FEW_SLOTS.keys())
async def test_few_slots_need_few_looks(slots: int, herds: list[tuple[str, int, dict[str, Any]]]) -> None:
    """As many as there are attempts, and a few a second."""
    seconds = 20
    async with Scene(in_flight_max=slots) as scene:
        await scene.pause("paused")
        outcome = Outcome(kind=OutcomeKind.UNSENT, cause=Unsent.DESCRIPTORS, error="there is none left")
        scene.hosts.behaves["short"] = lambda timer: outcome
        scene.store.calls.clear()
        for host, count, fields in herds:
            await scene.herd(count, host, **fields)
        for _ in range(10 * seconds):
            await asyncio.sleep(0.1)
            attempts = scene.hosts.attempts.total()
            assert scene.engine.recorder.slots_in_flight <= slots * 4  # a large payload takes four
            assert scene.store.calls["begin"] <= 2 * attempts + 4 * seconds
            assert scene.store.calls["lanes"] <= 4 * seconds
            assert scene.looks <= 4 * attempts + 10 * seconds


@on_virtual_time
@pytest.mark.parametrize("slots", [1, 2, 5, 40, 1_000])
async def test_no_look_begins_more_than_the_free_slots(slots: int) -> None:
    async with Scene(in_flight_max=slots, begin_max=200) as scene:
        asked: list[tuple[int, int]] = []
        begin, begin_lanes = scene.store.begin, scene.store.begin_lanes

        async def by_age(owner_id: bytes, held: Any, limit: int, **limits: Any) -> Begun:
            asked.append((limit, slots - scene.engine.recorder.slots_in_flight))
            return await begin(owner_id, held, limit, **limits)

        async def by_lane(owner_id: bytes, held: Any, limit: int, portions: Sequence[Portion]) -> Begun:
            asked.append((limit, slots - scene.engine.recorder.slots_in_flight))
            return await begin_lanes(owner_id, held, limit, portions)

        scene.store.begin, scene.store.begin_lanes = by_age, by_lane  # type: ignore[method-assign]
        await scene.herd(2 * slots + 50, lambda n: f"slow-{n % 50}")
        for _ in range(300):
            await asyncio.sleep(0.1)
            assert scene.engine.recorder.slots_in_flight <= slots
        # Half of what is free, so that something is left for the next that comes.
        assert asked and all(limit <= max(1, min(200, free // 2)) for limit, free in asked)
        assert all(free > 0 for _, free in asked)
