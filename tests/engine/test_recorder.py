"""The recorder, step by step: refused writes, failures and unknown results of the store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from duetime import lifecycle
from duetime.engine import recorder as module
from duetime.engine.ownership import Ownership
from duetime.engine.recorder import RETRY_SECONDS, Recorder
from duetime.errors import StoreError, StoreIndeterminate, StoreUnavailable
from duetime.model import Attempt, Definition, HttpTarget, Outcome, OutcomeKind, RetryPolicy, Status, Timer
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry
from tests.clocks import all_at
from tests.engine.test_isolation import on_virtual_time
from tests.simulation.world import EPOCH_MS, Machine

OK = Outcome(kind=OutcomeKind.ANSWERED, status=200, body=b'{"ok": true}')
MISS = Outcome(kind=OutcomeKind.UNREACHABLE, error="connection refused")
SHARDS = 8


class World(MemoryStore):
    """A store, the batches that it was told to record, and the timers that the recorder returned."""

    def __init__(self) -> None:
        self.clock = Machine()
        super().__init__(self.clock, shards=SHARDS)
        self.telemetry = Telemetry()
        self.ownership = Ownership(self, self.clock, self.telemetry, lease_ms=10_000)
        self.returned: list[tuple[str, int]] = []
        self.freed = 0
        self.asked: list[list[str]] = []
        self.fails: list[StoreError] = []
        self.doubtful: set[str] = set()
        """Timers for which the store reports an unknown result."""
        self.meanwhile: list[tuple[Timer, Timer]] = []
        """Outcomes that arrive while the store fails."""
        self.recorder = Recorder(
            self,
            self.ownership,
            lambda timer: self.returned.append((timer.id, timer.fire_at)),
            self.clock,
            self.telemetry,
            freed=self._freed,
            uniform=lambda low, high: high,
        )

    def _freed(self) -> None:
        self.freed += 1

    async def record(self, owner_id: bytes, changes: Sequence[tuple[Timer, Timer]]) -> list[bool]:
        self.asked.append([before.id for before, _ in changes])
        if self.fails:
            while self.meanwhile:
                self.recorder.add(*self.meanwhile.pop())
            raise self.fails.pop(0)
        recorded = await super().record(owner_id, changes)
        known = (before.id not in self.doubtful for before, _ in changes)
        return [done if sure else None for done, sure in zip(recorded, known, strict=True)]  # type: ignore[misc]

    async def begun(self, *ids: str) -> list[Timer]:
        """Timers that this instance has begun, each in a different shard."""
        await self.ownership.run_once()
        retry = RetryPolicy(max_retries=1, initial_interval_ms=3_000, jitter=False)
        definition = Definition(target=HttpTarget(url="http://a/"), retry=retry)
        for shard, id in enumerate(ids):
            at = EPOCH_MS
            await self.put(Timer("default", id, shard, definition, *all_at(at), 1, 1))
        timers = (await self.begin(self.ownership.owner_id, self.ownership.held(), 100)).timers
        assert sorted(timer.id for timer in timers) == sorted(ids)
        self.recorder.track(timers)
        return timers

    def settle(self, timer: Timer, outcome: Outcome) -> None:
        self.recorder.settle(timer, outcome, sent_at=self.clock.now(), now=self.clock.now())

    async def status(self, id: str) -> Status:
        timer = await self.get("default", id)
        assert timer is not None
        return timer.status


@on_virtual_time
async def test_only_timers_that_are_pending_again_are_returned() -> None:
    world = World()
    a, b, c = await world.begun("a", "b", "c")
    world.settle(a, OK)
    world.settle(b, MISS)
    world.recorder.add(c, lifecycle.defer(c, fire_at=EPOCH_MS + 9, now=EPOCH_MS))
    await world.recorder.run_once()
    assert sorted(world.returned) == [("b", EPOCH_MS + 3_000), ("c", EPOCH_MS + 9)]
    assert [await world.status(id) for id in "abc"] == [Status.COMPLETED, Status.PENDING, Status.PENDING]
    assert world.recorder.slots_in_flight == 0 and world.recorder.recorded.is_set() and world.freed == 1


@on_virtual_time
async def test_an_unavailable_store_gets_the_same_batch_again_before_newer_ones() -> None:
    world = World()
    a, b, c = await world.begun("a", "b", "c")
    running = asyncio.create_task(world.recorder.run())
    world.fails = [StoreUnavailable("away"), StoreUnavailable("away")]
    world.meanwhile = [(c, lifecycle.settle(c, OK, sent_at=EPOCH_MS, now=EPOCH_MS, uniform=max))]
    world.settle(a, OK)
    world.settle(b, OK)
    await asyncio.sleep(0.1)
    assert world.asked == [["a", "b"]] and world.recorder.slots_in_flight == 3
    assert not world.recorder.recorded.is_set() and world.recorder.has_in_flight(a.shard)
    await asyncio.sleep(RETRY_SECONDS)
    assert world.asked[1:] == [["a", "b", "c"]]
    await asyncio.sleep(RETRY_SECONDS)
    assert len(world.asked) == 3 and world.recorder.slots_in_flight == 0
    assert {await world.status(id) for id in "abc"} == {Status.COMPLETED}
    assert world.ownership.held().keys() == set(range(SHARDS))
    running.cancel()


@on_virtual_time
async def test_after_an_indeterminate_record_the_shards_are_claimed_again_without_a_repeat() -> None:
    world = World()
    a, b, _ = await world.begun("a", "b", "c")
    world.fails = [StoreIndeterminate("lost")]
    world.settle(a, OK)
    world.settle(b, MISS)
    await world.recorder.run_once()
    assert world.ownership.held().keys() == set(range(SHARDS)) - {a.shard, b.shard}
    assert world.recorder.slots_in_flight == 1 and world.recorder.recorded.is_set() and world.returned == []
    assert not world.recorder.has_in_flight(a.shard) and not world.recorder.has_in_flight(b.shard)
    await world.recorder.run_once()
    assert len(world.asked) == 1


@on_virtual_time
async def test_indeterminate_outcomes_affect_only_their_own_shards() -> None:
    world = World()
    a, b, c = await world.begun("a", "b", "c")
    world.doubtful = {"a"}
    for timer in (a, b, c):
        world.settle(timer, MISS)
    await world.recorder.run_once()
    assert world.ownership.held().keys() == set(range(SHARDS)) - {a.shard}
    assert sorted(id for id, _ in world.returned) == ["b", "c"]
    assert world.recorder.slots_in_flight == 0 and world.recorder.recorded.is_set()
    assert b"duetime_fenced_writes_total 0.0" in world.telemetry.own_page()
    await world.recorder.run_once()
    assert len(world.asked) == 1


@on_virtual_time
async def test_refused_record_is_counted_and_returns_nothing() -> None:
    world = World()
    a, b = await world.begun("a", "b")
    world._shards[a.shard].version += 1  # It has another owner by now.
    world.settle(a, MISS)
    world.settle(b, MISS)
    await world.recorder.run_once()
    assert world.returned == [("b", EPOCH_MS + 3_000)]
    assert await world.status("a") is Status.EXECUTING
    assert b"duetime_fenced_writes_total 1.0" in world.telemetry.own_page()
    assert world.recorder.slots_in_flight == 0


@on_virtual_time
async def test_a_batch_is_limited_and_the_rest_is_recorded_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_MAX", 3)
    world = World()
    timers = await world.begun(*"abcdefgh")
    for timer in timers[:2]:
        world.recorder.add(timer, lifecycle.defer(timer, fire_at=EPOCH_MS, now=EPOCH_MS))
    for timer in timers[2:]:
        world.settle(timer, OK)
    running = asyncio.create_task(world.recorder.run())
    await asyncio.sleep(1)
    assert [len(batch) for batch in world.asked] == [3, 3, 2]
    assert sorted(id for batch in world.asked for id in batch) == list("abcdefgh")
    assert world.recorder.slots_in_flight == 0 and not world.recorder.slots_by_namespace
    running.cancel()


@on_virtual_time
async def test_batch_is_limited_by_the_attempts_it_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ATTEMPTS_MAX", 25)
    world = World()
    timers = await world.begun(*"abcdef")
    kept = Attempt(1, EPOCH_MS, 1, OutcomeKind.TIMED_OUT)
    for count, timer in zip((0, 12, 13, 30, 5, 3), timers, strict=True):
        after = lifecycle.defer(timer, fire_at=EPOCH_MS, now=EPOCH_MS)
        world.recorder.add(timer, msgspec.structs.replace(after, attempts=(kept,) * count))
    for _ in range(3):
        await world.recorder.run_once()
    assert [len(batch) for batch in world.asked] == [3, 1, 2]
    assert world.recorder.slots_in_flight == 0


@on_virtual_time
async def test_a_shard_is_busy_until_the_last_of_its_outcomes_is_recorded() -> None:
    world = World()
    a, _ = await world.begun("a", "b")
    world.settle(a, OK)
    assert world.recorder.has_in_flight(a.shard)
    await world.recorder.run_once()
    assert not world.recorder.has_in_flight(a.shard) and world.recorder.has_in_flight(1 - a.shard)
