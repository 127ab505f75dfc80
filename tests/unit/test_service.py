"""The service on the memory store: nudges, lost races, and counts.

Several services share a store where other instances matter. The store can be slow or fail in one operation at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from duetime import lifecycle, service
from duetime.errors import Contended, StoreIndeterminate, StoreUnavailable, TimerConflict, TimerNotPending
from duetime.model import (
    DAY_MS,
    HOUR_MS,
    Definition,
    HttpTarget,
    Outcome,
    OutcomeKind,
    Status,
    Target,
    Timer,
)
from duetime.namespaces import Namespaces
from duetime.service import CHANGES_AT_ONCE, Counted, NewTimer, Service
from duetime.store import Filter, Page
from duetime.stores.memory import MemoryStore
from tests.clocks import START, ManualClock

DEFINITION = Definition(target=HttpTarget(url="http://receiver/"))
MISS = Outcome(kind=OutcomeKind.UNREACHABLE, error="connection refused")


class Nobody:
    """A deliverer that accepts every target and must not deliver."""

    async def check(self, target: Target) -> None:
        pass


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock, shards=8)
        self.nudged: list[list[tuple[str, int]]] = []
        self.service = self.new_service()

    def new_service(self) -> Service:
        """Another instance on the same store."""
        namespaces = Namespaces(self.store, self.clock, self._nudge)
        return Service(self.store, namespaces, {HttpTarget: Nobody()}, self.clock, self._nudge)  # type: ignore[dict-item]

    def _nudge(self, *timers: Timer) -> None:
        self.nudged.append([(timer.id, timer.fire_at) for timer in timers])

    async def create(self, *ids: str, in_ms: int = HOUR_MS) -> None:
        for id in ids:
            await self.service.create(new(id, in_ms))

    async def get(self, id: str) -> Timer:
        return await self.service.get("default", id)

    async def statuses(self) -> dict[str, Status]:
        return {timer.id: timer.status for timer in self.store._timers.values()}

    async def write(self, id: str, change: Callable[[Timer], Timer]) -> None:
        """A change by another instance or the engine."""
        before = await self.get(id)
        assert await self.store.swap(before, change(before))

    async def begin(self, id: str) -> None:
        await self.write(id, lambda timer: lifecycle.begin(timer, now=self.clock.now(), version=1))

    async def fail(self, id: str) -> None:
        def failed(timer: Timer) -> Timer:
            begun = lifecycle.begin(timer, now=START, version=1)
            no_retry = msgspec.structs.replace(begun, failures=100)
            return lifecycle.settle(no_retry, MISS, sent_at=START, now=START, uniform=max)

        await self.write(id, failed)


def new(id: str, in_ms: int = HOUR_MS, namespace: str = "default", stamp: str = "") -> NewTimer:
    return NewTimer(
        namespace=namespace, id=id, execute_at=START + in_ms, definition=DEFINITION, fingerprint=stamp or "same"
    )


def scene(test: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            world = World()
            await world.service._namespaces.start()
            await test(world)

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@scene
async def test_repeat_of_a_delay_is_recognized_in_rows_of_older_versions(world: World) -> None:
    """They have the fingerprint of a delay without its length."""
    await world.service.create(new("older", stamp="abc"))
    await world.service.create(new("newer", stamp="abc+5000"))
    for id, stamp in (("older", "abc+5000"), ("older", "abc+7000"), ("newer", "abc+5000")):
        assert (await world.service.create(new(id, stamp=stamp)))[1] is False
    for id, stamp in (("older", "abd+5000"), ("newer", "abc+7000"), ("newer", "abc")):
        with pytest.raises(TimerConflict):
            await world.service.create(new(id, stamp=stamp))


# Nudges of the engine.


@scene
async def test_a_create_nudges_its_timer_and_a_repeat_nudges_nothing(world: World) -> None:
    await world.service.create(new("a", 5))
    assert world.nudged == [[("a", START + 5)]]
    assert not (await world.service.create(new("a", 5)))[1]
    assert len(world.nudged) == 1


@scene
async def test_a_batch_nudges_all_of_its_timers(world: World) -> None:
    await world.service.create_many([new("a", 9), new("b", 2), new("c", 5)])
    assert world.nudged == [[("a", START + 9), ("b", START + 2), ("c", START + 5)]]


@scene
async def test_commands_nudge_all_of_their_timers(world: World) -> None:
    assert await world.service.schedule_many([new("a", 9, stamp="1@1"), new("b", 2, stamp="2@2")]) == [None, None]
    assert world.nudged == [[("a", START + 9), ("b", START + 2)]]


@scene
async def test_an_update_nudges_at_the_new_time(world: World) -> None:
    await world.create("a", in_ms=50)
    for at in (7, 90):
        world.nudged.clear()
        await world.service.update("default", "a", execute_at=START + at, change=lambda same: same)
        assert world.nudged == [[("a", START + at)]]


@scene
async def test_a_command_that_moves_a_timer_nudges_at_the_new_time(world: World) -> None:
    await world.service.schedule_many([new("a", 90, stamp="1@1")])
    world.nudged.clear()
    await world.service.schedule_many([new("a", 7, stamp="2@2")])
    assert [("a", START + 7)] in world.nudged
    assert (await world.get("a")).fire_at == START + 7


@scene
async def test_an_upsert_nudges_its_timer(world: World) -> None:
    for at in (9, 4):
        world.nudged.clear()
        await world.service.upsert(new("a", at))
        assert world.nudged == [[("a", START + at)]]


@scene
async def test_a_replay_nudges_now_and_a_cancel_does_not_nudge(world: World) -> None:
    await world.create("a", "b")
    await world.fail("a")
    world.nudged.clear()
    world.clock.advance(1_000)
    replayed = await world.service.replay("default", "a")
    assert world.nudged == [[("a", START + 1_000)]]
    assert (replayed.fire_at, replayed.status, replayed.execute_at) == (START + 1_000, Status.PENDING, START + HOUR_MS)
    world.nudged.clear()
    await world.service.cancel("default", "b")
    assert world.nudged == []


@scene
async def test_changes_are_counted(world: World) -> None:
    await world.create("a", "b")
    assert world.service.changes == 0
    await world.service.update("default", "a", execute_at=START + 7, change=lambda same: same)
    await world.service.upsert(new("b", 9))
    assert world.service.changes == 2


# Lost races.


def racing(world: World, meanwhile: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a callback right after the store has read the next page."""
    page = world.store.page

    async def read(*arguments: Any) -> Page:
        found = await page(*arguments)
        world.store.page = page  # type: ignore[method-assign]
        await meanwhile()
        return found

    world.store.page = read  # type: ignore[method-assign, assignment]


@scene
async def test_a_bulk_cancel_includes_changed_timers_and_skips_fired_ones(world: World) -> None:
    ids = [f"t{n:02}" for n in range(CHANGES_AT_ONCE + 8)]
    await world.create(*ids)
    other = world.new_service()
    await other._namespaces.start()

    async def meanwhile() -> None:
        await other.update("default", "t03", execute_at=START + DAY_MS, change=lambda same: same)
        await other.cancel("default", "t04")
        await other.delete("default", "t05")
        await world.begin("t35")

    racing(world, meanwhile)
    # Timers that were canceled concurrently, are executing or were deleted do not count.
    assert await world.service.cancel_all(Filter(namespace="default"), 1_000) == Counted(len(ids) - 3, False)
    statuses = await world.statuses()
    assert statuses.pop("t35") is Status.EXECUTING
    assert set(statuses) == set(ids) - {"t05", "t35"} and set(statuses.values()) == {Status.CANCELED}
    assert (await world.get("t03")).execute_at == START + DAY_MS


@scene
async def test_a_bulk_replay_includes_timers_that_failed_again_meanwhile(world: World) -> None:
    await world.create("a", "b", "c")
    for id in ("a", "b", "c"):
        await world.fail(id)

    async def meanwhile() -> None:
        await world.service.replay("default", "a")
        await world.fail("a")
        await world.service.replay("default", "b")

    racing(world, meanwhile)
    assert await world.service.replay_all(Filter(status=Status.FAILED), 10) == Counted(2, False)
    assert set((await world.statuses()).values()) == {Status.PENDING}


@pytest.mark.parametrize(("limit", "done", "more"), [(1, 1, True), (4, 4, True), (5, 5, False), (6, 5, False)])
def test_a_bulk_change_stops_at_its_limit(limit: int, done: int, more: bool) -> None:
    @scene
    async def replays(world: World) -> None:
        await world.create("a", "b", "c", "d", "e", "kept")
        for id in "abcde":
            await world.fail(id)
        assert await world.service.replay_all(Filter(status=Status.FAILED), limit) == Counted(done, more)
        statuses = list((await world.statuses()).values())
        assert statuses.count(Status.FAILED) == 5 - done

    @scene
    async def cancels(world: World) -> None:
        await world.create("a", "b", "c", "d", "e", "kept")
        await world.begin("kept")
        assert await world.service.cancel_all(Filter(namespace="default"), limit) == Counted(done, more)
        statuses = list((await world.statuses()).values())
        assert statuses.count(Status.PENDING) == 5 - done and statuses.count(Status.EXECUTING) == 1

    replays()
    cancels()


@scene
async def test_an_update_that_loses_a_race_is_retried_on_the_new_timer(world: World) -> None:
    await world.create("a")
    swap, lost = world.store.swap, 3

    async def racy(before: Timer, after: Timer | None) -> bool:
        nonlocal lost
        if lost:
            lost -= 1
            there = await world.get("a")
            assert await swap(there, lifecycle.amend(there, now=START, execute_at=there.execute_at + 1))
        return await swap(before, after)

    world.store.swap = racy  # type: ignore[method-assign]
    changed = await world.service.update(
        "default", "a", execute_at=None, change=lambda same: same, correlation_id="mine"
    )
    assert changed == await world.get("a")
    assert (changed.execute_at, changed.correlation_id) == (START + HOUR_MS + 3, "mine")


@scene
async def test_a_change_gives_up_on_a_timer_that_keeps_changing(world: World) -> None:
    await world.create("a")

    async def never(*arguments: Any) -> bool:
        return False

    world.store.swap = never  # type: ignore[method-assign, assignment]
    for ask in (
        world.service.cancel("default", "a"),
        world.service.delete("default", "a"),
        world.service.upsert(new("a", 1)),
    ):
        with pytest.raises(Contended, match="keep changing the same timer"):
            await ask
    assert (await world.get("a")).status is Status.PENDING


@scene
async def test_a_delete_rejects_an_executing_timer(world: World) -> None:
    await world.create("a")
    await world.begin("a")
    with pytest.raises(TimerNotPending):
        await world.service.delete("default", "a")
    assert (await world.get("a")).status is Status.EXECUTING


# Batches and commands that fail in part.


@scene
async def test_a_batch_returns_results_in_order(world: World) -> None:
    await world.create("there", "other")
    answers = await world.service.create_many(
        [
            new("a", 1),
            new("lost", namespace="unknown"),
            new("there"),
            msgspec.structs.replace(new("other"), fingerprint="another"),
            new("b", 2),
        ]
    )
    shown = [(a[0].id, a[1]) if isinstance(a, tuple) else type(a).__name__ for a in answers]
    assert shown == [("a", True), "UnknownNamespace", ("there", False), "TimerConflict", ("b", True)]


@pytest.mark.parametrize("error", [StoreUnavailable("away"), StoreIndeterminate("lost")])
def test_commands_whose_move_failed_return_the_error(error: Exception) -> None:
    @scene
    async def check(world: World) -> None:
        before = [new(f"c{n}", 10 + n, stamp=f"{n + 1}@{n + 1}") for n in range(CHANGES_AT_ONCE + 3)]
        await world.service.schedule_many(before)
        failing = {"c1", f"c{CHANGES_AT_ONCE + 1}"}
        swap = world.store.swap

        async def broken(was: Timer, after: Timer | None) -> bool:
            if was.id in failing:
                raise error
            return await swap(was, after)

        world.store.swap = broken  # type: ignore[method-assign, assignment]
        moves = [new(f"c{n}", 500, stamp=f"{n + 101}@{n + 101}") for n in range(len(before))]
        answers = await world.service.schedule_many([new("fresh", stamp="99@99"), *moves])
        assert {n - 1 for n, answer in enumerate(answers) if answer is not None} == {1, CHANGES_AT_ONCE + 1}
        assert [answer for answer in answers if answer is not None] == [error, error]
        for timer in before:
            moved = (await world.get(str(timer.id))).execute_at == START + 500
            assert moved == (timer.id not in failing)

    check()


# Counts.


@scene
async def test_counts_by_filter_are_exact(world: World) -> None:
    await world.create("a", "b", "c")
    await world.service.cancel("default", "c")
    assert await world.service.count(Filter(namespace="default")) == Counted(3)
    assert await world.service.count(Filter(namespace="default", status=Status.PENDING)) == Counted(2)
    assert await world.service.count(Filter(namespace="default", id="a")) == Counted(1)


@pytest.mark.parametrize(("found", "counted"), [(2, Counted(2)), (3, Counted(3)), (4, Counted(3, True))])
def test_counting_by_filter_stops_at_a_limit(found: int, counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "COUNT_MAX", 3)

    @scene
    async def check(world: World) -> None:
        await world.create(*map(str, range(found)))
        assert await world.service.count(Filter(execute_after=START)) == counted
        assert await world.service.forecast([START, START + 2 * HOUR_MS]) == [counted]

    check()
