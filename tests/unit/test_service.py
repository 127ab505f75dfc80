"""The service on the memory store, by hand: what it nudges, what a stale copy costs, and namespaces with their secrets.

Several services share a store where other instances matter. The store can be slow or fail in one place at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from duetime import lifecycle, service
from duetime.errors import SecretNotFound, StoreIndeterminate, StoreUnavailable, TimerNotPending, UnknownNamespace
from duetime.model import (
    DAY_MS,
    HOUR_MS,
    Definition,
    HttpTarget,
    Namespace,
    Outcome,
    OutcomeKind,
    Status,
    Target,
    Timer,
)
from duetime.rotation import ROTATION_MS, SECRETS_MAX
from duetime.service import CHANGES_AT_ONCE, Counted, NewTimer, Service
from duetime.store import Filter, Hint, Page
from duetime.stores.memory import MemoryStore
from tests.clocks import START, ManualClock

DEFINITION = Definition(target=HttpTarget(url="http://receiver/"))
MISS = Outcome(kind=OutcomeKind.UNREACHABLE, error="connection refused")


class Nobody:
    """A deliverer that lets everything out and is asked to deliver nothing."""

    async def check(self, target: Target) -> None:
        pass


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock, shards=8)
        self.nudged: list[list[tuple[str, int]]] = []
        self.service = self.new_service()

    def new_service(self, **options: Any) -> Service:
        """Another instance on the same store."""
        return Service(self.store, {HttpTarget: Nobody()}, self.clock, self._nudge, **options)  # type: ignore[dict-item]

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
        """What another instance, or the engine, does to the timer."""
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

    def keys(self, service: Service | None = None, namespace: str = "default") -> list[bytes] | None:
        return (service or self.service).signing_keys(namespace)

    def secrets(self, namespace: str = "default") -> list[tuple[bytes, int | None]]:
        """Each with the time that it signs for yet."""
        known = self.store._namespaces[namespace].secrets
        return [(s.key, None if s.expires_at is None else s.expires_at - self.clock.now()) for s in known]


def new(id: str, in_ms: int = HOUR_MS, namespace: str = "default", stamp: str = "") -> NewTimer:
    return NewTimer(
        namespace=namespace, id=id, execute_at=START + in_ms, definition=DEFINITION, fingerprint=stamp or "same"
    )


def scene(test: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            world = World()
            await world.service.start()
            await test(world)

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


# What the engine is told.


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
async def test_an_update_nudges_the_new_time(world: World) -> None:
    await world.create("a", in_ms=50)
    for at in (7, 90):
        world.nudged.clear()
        await world.service.update("default", "a", execute_at=START + at, change=lambda same: same)
        assert world.nudged == [[("a", START + at)]]


@scene
async def test_a_command_nudges_the_time_that_it_moves_to(world: World) -> None:
    await world.service.schedule_many([new("a", 90, stamp="1@1")])
    world.nudged.clear()
    await world.service.schedule_many([new("a", 7, stamp="2@2")])
    assert [("a", START + 7)] in world.nudged
    assert (await world.get("a")).fire_at == START + 7


@scene
async def test_an_upsert_nudges_what_it_wrote(world: World) -> None:
    for at in (9, 4):
        world.nudged.clear()
        await world.service.upsert(new("a", at))
        assert world.nudged == [[("a", START + at)]]


@scene
async def test_a_replay_nudges_now_and_a_cancel_nothing(world: World) -> None:
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
async def test_a_change_of_a_namespace_has_the_engine_look_at_everything(world: World) -> None:
    await world.service.change_namespace("default", lambda before: msgspec.structs.replace(before, paused=False))
    assert world.nudged == [[]]


@scene
async def test_other_instances_are_told_of_a_namespace_that_is_new_or_changed(world: World) -> None:
    hints: list[Hint] = []
    world.store.hint = hints.append  # type: ignore[method-assign]
    await world.service.create_namespace("a", shards=None, retention_ms=None)
    assert hints == [Hint(namespaces=True)]
    await world.service.create_namespace("a", shards=None, retention_ms=None)
    assert hints == [Hint(namespaces=True)]
    await world.service.add_secret("a", b"key")
    assert hints == 2 * [Hint(namespaces=True)]


@scene
async def test_namespaces_are_not_read_without_a_reason(world: World) -> None:
    reads = 0
    namespaces = world.store.namespaces

    async def counted() -> list[Namespace]:
        nonlocal reads
        reads += 1
        assert reads < 10
        return await namespaces()

    world.store.namespaces = counted  # type: ignore[method-assign]
    running = asyncio.create_task(world.service.run())
    world.service.heard(Hint(namespaces=True))
    await settled()
    assert reads == 1
    world.service.heard(Hint(shards=True, due_at=START))
    await settled()
    assert reads == 1
    running.cancel()


@scene
async def test_changes_are_counted(world: World) -> None:
    await world.create("a", "b")
    assert world.service.changes == 0
    await world.service.update("default", "a", execute_at=START + 7, change=lambda same: same)
    await world.service.upsert(new("b", 9))
    assert world.service.changes == 2


# Changes that lose a race.


def racing(world: World, meanwhile: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Have something happen right after the store has read the next page."""
    page = world.store.page

    async def read(*arguments: Any) -> Page:
        found = await page(*arguments)
        world.store.page = page  # type: ignore[method-assign]
        await meanwhile()
        return found

    world.store.page = read  # type: ignore[method-assign]


@scene
async def test_a_bulk_cancel_cancels_what_was_changed_meanwhile_and_leaves_out_what_was_fired(world: World) -> None:
    ids = [f"t{n:02}" for n in range(CHANGES_AT_ONCE + 8)]
    await world.create(*ids)
    other = world.new_service()
    await other.start()

    async def meanwhile() -> None:
        await other.update("default", "t03", execute_at=START + DAY_MS, change=lambda same: same)
        await other.cancel("default", "t04")
        await other.delete("default", "t05")
        await world.begin("t35")

    racing(world, meanwhile)
    # One that was canceled by somebody else is not counted, nor is one that is executing or gone.
    assert await world.service.cancel_all(Filter(namespace="default"), 1_000) == Counted(len(ids) - 3, False)
    statuses = await world.statuses()
    assert statuses.pop("t35") is Status.EXECUTING
    assert set(statuses) == set(ids) - {"t05", "t35"} and set(statuses.values()) == {Status.CANCELED}
    assert (await world.get("t03")).execute_at == START + DAY_MS


@scene
async def test_a_bulk_replay_replays_what_was_replayed_and_failed_meanwhile(world: World) -> None:
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
def test_a_bulk_change_changes_as_many_as_it_may(limit: int, done: int, more: bool) -> None:
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
async def test_an_update_that_loses_a_race_starts_from_what_won(world: World) -> None:
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
async def test_a_timer_that_keeps_changing_is_given_up_and_nothing_was_changed(world: World) -> None:
    await world.create("a")

    async def never(*arguments: Any) -> bool:
        return False

    world.store.swap = never  # type: ignore[method-assign]
    for ask in (
        world.service.cancel("default", "a"),
        world.service.delete("default", "a"),
        world.service.upsert(new("a", 1)),
    ):
        with pytest.raises(StoreUnavailable, match="keeps changing"):
            await ask
    assert (await world.get("a")).status is Status.PENDING


@scene
async def test_a_delete_leaves_what_is_executing_alone(world: World) -> None:
    await world.create("a")
    await world.begin("a")
    with pytest.raises(TimerNotPending):
        await world.service.delete("default", "a")
    assert (await world.get("a")).status is Status.EXECUTING


# Batches and commands of which a part fails.


@scene
async def test_a_batch_answers_each_in_its_place(world: World) -> None:
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
def test_commands_whose_move_could_not_be_written_say_so(error: Exception) -> None:
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

        world.store.swap = broken  # type: ignore[method-assign]
        moves = [new(f"c{n}", 500, stamp=f"{n + 101}@{n + 101}") for n in range(len(before))]
        answers = await world.service.schedule_many([new("fresh", stamp="99@99"), *moves])
        assert {n - 1 for n, answer in enumerate(answers) if answer is not None} == {1, CHANGES_AT_ONCE + 1}
        assert [answer for answer in answers if answer is not None] == [error, error]
        for timer in before:
            moved = (await world.get(str(timer.id))).execute_at == START + 500
            assert moved == (timer.id not in failing)

    check()


# Namespaces.


class Slow:
    """Holds answers of one of the store's verbs back until they are let go."""

    def __init__(self, store: MemoryStore, verb: str) -> None:
        self._answers: list[asyncio.Event] = []
        ask = getattr(store, verb)

        async def slow(*arguments: Any) -> Any:
            answer, go = await ask(*arguments), asyncio.Event()
            self._answers.append(go)
            await go.wait()
            return answer

        setattr(store, verb, slow)
        self._end = lambda: setattr(store, verb, ask)

    async def asked(self) -> None:
        """Let the next answers pass; those that are held back stay so."""
        for _ in range(5):
            await asyncio.sleep(0)
        self._end()

    def let_go(self) -> None:
        for go in self._answers:
            go.set()


@scene
async def test_a_refresh_that_was_under_way_does_not_undo_what_changed_meanwhile(world: World) -> None:
    slow = Slow(world.store, "namespaces")
    refresh = asyncio.create_task(world.service.start())
    await slow.asked()
    await world.service.add_secret("default", b"key")
    await world.service.create_namespace("made", shards=None, retention_ms=None)
    slow.let_go()
    await refresh
    assert world.keys() == [b"key"]
    assert world.keys(namespace="made") == []
    assert [namespace.name for namespace in world.service.namespaces()] == ["default", "made"]


@scene
async def test_of_two_refreshes_the_newer_copy_counts_whichever_is_answered_first(world: World) -> None:
    slow = Slow(world.store, "namespaces")
    first = asyncio.create_task(world.service.start())
    await slow.asked()
    other = world.new_service()
    await other.add_secret("default", b"key")
    await world.service.start()
    assert world.keys() == [b"key"]
    slow.let_go()
    await first
    assert world.keys() == [b"key"]


@scene
async def test_a_create_of_a_namespace_that_is_answered_late_does_not_undo_a_change(world: World) -> None:
    slow = Slow(world.store, "put_namespace")
    late = asyncio.create_task(world.service.create_namespace("a", shards=None, retention_ms=None))
    await slow.asked()
    await world.service.add_secret("a", b"key")
    slow.let_go()
    assert (await late)[1]
    assert world.keys(namespace="a") == [b"key"]


@scene
async def test_of_two_changes_the_later_one_counts_whichever_is_answered_first(world: World) -> None:
    slow = Slow(world.store, "swap_namespace")
    first = asyncio.create_task(world.service.add_secret("default", b"first"))
    await slow.asked()
    await world.service.add_secret("default", b"second")
    slow.let_go()
    await first
    assert world.keys() == [b"second", b"first"]


@scene
async def test_a_change_starts_from_what_the_store_has(world: World) -> None:
    other = world.new_service()
    await other.start()
    await world.service.add_secret("default", b"one")
    await other.add_secret("default", b"two")
    await world.service.add_secret("default", b"three")
    assert [key for key, _ in world.secrets()] == [b"three", b"two", b"one"]
    assert world.keys() == [b"three", b"two", b"one"]
    with pytest.raises(UnknownNamespace):
        await world.service.add_secret("unknown", b"key")


@scene
async def test_what_other_instances_change_is_learned_from_a_hint_and_without_one(world: World) -> None:
    running = asyncio.create_task(world.service.run())
    other = world.new_service()
    await other.add_secret("default", b"one")
    await settled()
    assert world.keys() == []
    world.clock.advance(5_000)
    await settled()
    assert world.keys() == [b"one"]
    await other.add_secret("default", b"two")
    world.service.heard(Hint(namespaces=True))
    await settled()
    assert world.keys() == [b"two", b"one"]
    running.cancel()


@scene
async def test_a_namespace_that_is_not_known_has_no_keys_yet_and_is_read_at_once(world: World) -> None:
    running = asyncio.create_task(world.service.run())
    await settled()
    other = world.new_service()
    await other.create_namespace("new", shards=None, retention_ms=None)
    await other.add_secret("new", b"key")
    assert world.keys(namespace="new") is None
    await settled()
    assert world.keys(namespace="new") == [b"key"]
    running.cancel()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


# Secrets.


@scene
async def test_a_namespace_that_was_asked_for_is_known(world: World) -> None:
    other = world.new_service()
    await other.create_namespace("theirs", shards=None, retention_ms=None, weight=7)
    assert world.service.weight("theirs") == 1 and world.keys(namespace="theirs") is None
    await world.service.namespace("theirs")
    assert world.service.weight("theirs") == 7 and world.keys(namespace="theirs") == []


@scene
async def test_each_change_of_a_namespace_is_the_next_revision(world: World) -> None:
    before = await world.service.namespace("default")
    for paused in (True, False):
        await world.service.change_namespace("default", lambda n, p=paused: msgspec.structs.replace(n, paused=p))  # type: ignore[misc]
    assert world.store._namespaces["default"].revision == before.revision + 2


@scene
async def test_a_rotation_gives_the_secret_before_its_end_once(world: World) -> None:
    await world.service.add_secret("default", b"a")
    assert world.secrets() == [(b"a", None)]
    world.clock.advance(HOUR_MS)
    await world.service.add_secret("default", b"b")
    assert world.secrets() == [(b"b", None), (b"a", ROTATION_MS)]
    world.clock.advance(HOUR_MS)
    await world.service.add_secret("default", b"c")
    assert world.secrets() == [(b"c", None), (b"b", ROTATION_MS), (b"a", ROTATION_MS - HOUR_MS)]
    assert world.keys() == [b"c", b"b", b"a"]
    world.clock.advance(ROTATION_MS - HOUR_MS - 1)
    assert world.keys() == [b"c", b"b", b"a"]
    world.clock.advance(1)
    assert world.keys() == [b"c", b"b"]
    world.clock.advance(HOUR_MS)
    assert world.keys() == [b"c"]
    world.clock.advance(365 * DAY_MS)
    assert world.keys() == [b"c"]


@scene
async def test_when_the_newest_secret_is_deleted_the_one_before_it_stays(world: World) -> None:
    await world.service.add_secret("default", b"a")
    await world.service.add_secret("default", b"b")
    world.clock.advance(HOUR_MS)
    newest = await world.service.add_secret("default", b"c")
    await world.service.delete_secret("default", newest.id)
    assert world.secrets() == [(b"b", None), (b"a", ROTATION_MS - HOUR_MS)]
    world.clock.advance(ROTATION_MS)
    assert world.keys() == [b"b"]
    world.clock.advance(365 * DAY_MS)
    assert world.keys() == [b"b"]


@scene
async def test_a_secret_that_has_expired_is_never_revived(world: World) -> None:
    await world.service.add_secret("default", b"a")
    await world.service.add_secret("default", b"b")
    world.clock.advance(ROTATION_MS // 2)
    newest = await world.service.add_secret("default", b"c")
    world.clock.advance(ROTATION_MS // 2)
    await world.service.delete_secret("default", newest.id)
    assert world.keys() == [b"b"]  # which has some time left; the other has not
    world.clock.advance(365 * DAY_MS)
    assert world.keys() == [b"b"]
    newest = await world.service.add_secret("default", b"d")
    world.clock.advance(ROTATION_MS)
    await world.service.delete_secret("default", newest.id)
    assert world.keys() == [] and world.secrets() == []


@scene
async def test_a_rotation_forgets_what_has_expired(world: World) -> None:
    for key in (b"a", b"b"):
        await world.service.add_secret("default", key)
    world.clock.advance(ROTATION_MS)
    await world.service.add_secret("default", b"c")
    assert world.secrets() == [(b"c", None), (b"b", ROTATION_MS)]


@scene
async def test_deleting_an_older_secret_leaves_the_others_as_they_are(world: World) -> None:
    made = [await world.service.add_secret("default", key) for key in (b"a", b"b", b"c")]
    await world.service.delete_secret("default", made[1].id)
    assert world.secrets() == [(b"c", None), (b"a", ROTATION_MS)]
    world.clock.advance(ROTATION_MS)
    await world.service.delete_secret("default", made[0].id)  # It has expired and can still be named.
    assert world.secrets() == [(b"c", None)]
    with pytest.raises(SecretNotFound):
        await world.service.delete_secret("default", made[0].id)
    assert world.secrets() == [(b"c", None)]


@scene
async def test_the_number_of_secrets_is_limited_and_the_newest_are_kept(world: World) -> None:
    keys = [b"%d" % n for n in range(SECRETS_MAX + 3)]
    for key in keys:
        await world.service.add_secret("default", key)
    assert world.keys() == keys[: -SECRETS_MAX - 1 : -1] and len(world.secrets()) == SECRETS_MAX


@scene
async def test_two_instances_that_rotate_at_once_lose_no_secret(world: World) -> None:
    services = [world.service, *(world.new_service() for _ in range(3))]
    await asyncio.gather(*(service.add_secret("default", b"%d" % n) for n, service in enumerate(services)))
    assert sorted(key for key, _ in world.secrets()) == [b"0", b"1", b"2", b"3"]
    assert [left for _, left in world.secrets()] == [None] + 3 * [ROTATION_MS]


# Counting.


@scene
async def test_counts_are_exact_and_by_filter(world: World) -> None:
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
