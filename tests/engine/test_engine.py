"""One engine on the memory store in virtual time, step by step."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from duetime.engine.engine import Engine, EngineOptions
from duetime.engine.recorder import BATCH_MAX
from duetime.errors import StoreIndeterminate, StoreUnavailable
from duetime.lifecycle import ATTEMPT_GRACE_MS, LOST_MAX
from duetime.model import Definition, HttpTarget, Outcome, OutcomeKind, RetryPolicy, Status, Target, Timer
from duetime.namespaces import Namespaces
from duetime.service import Counted, NewTimer, Service
from duetime.settings import Settings
from duetime.store import Abilities, Begun, Filter
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry
from tests.simulation.world import Machine, VirtualLoop

OK = Outcome(kind=OutcomeKind.ANSWERED, status=200, body=b'{"ok": true}')
MISS = Outcome(kind=OutcomeKind.UNREACHABLE, error="connection refused")


class Deliverer:
    """Records what is sent and returns the outcome that ``answers`` has for the timer."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        self.under_way = 0
        self.under_way_max = 0
        self.answers: Callable[[Timer], Outcome] = lambda timer: OK
        self.seconds: Callable[[Timer], float] = lambda timer: 0.01

    async def deliver(self, timer: Timer, timeout_ms: int) -> Outcome:
        self.sent.append((timer.id, timer.attempt))
        self.under_way += 1
        self.under_way_max = max(self.under_way, self.under_way_max)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await asyncio.sleep(self.seconds(timer))
        except TimeoutError:
            return Outcome(kind=OutcomeKind.TIMED_OUT, error="no answer")
        finally:
            self.under_way -= 1
        return self.answers(timer)

    async def check(self, target: Target) -> None:
        pass

    async def close(self) -> None:
        pass


class Scene:
    def __init__(self, *, shards: int = 8, **options: Any) -> None:
        self.clock = Machine()
        self.store = MemoryStore(self.clock, shards=shards)
        self.deliverer = Deliverer()
        self.telemetry = Telemetry()
        self.engine = Engine(
            self.store,
            {HttpTarget: self.deliverer},
            self.clock,
            self.telemetry,
            EngineOptions(**{"lease_ms": 3_000, **options}),
            uniform=lambda a, b: b,
            owner_id=b"engine 1",
        )
        self.namespaces = Namespaces(self.store, self.clock, self.engine.nudge)
        deliverers = {HttpTarget: self.deliverer}
        self.service = Service(self.store, self.namespaces, deliverers, self.clock, self.engine.nudge)

    def another_engine(self) -> Engine:
        """Gets some of the 8 shards; with random ids, it might get none."""
        return Engine(
            *(self.store, {HttpTarget: self.deliverer}, self.clock, Telemetry(), self.engine.options),
            owner_id=b"engine 2",
        )

    async def start(self) -> None:
        await self.namespaces.start()
        self.running = asyncio.create_task(self.engine.run())
        await asyncio.sleep(0.1)

    async def stop(self) -> None:
        self.engine.drain()
        await self.running

    async def create(
        self, id: str, *, in_ms: int = 0, host: str = "a", retries: int = 0, timeout_ms: int = 5_000
    ) -> None:
        retry = RetryPolicy(max_retries=retries, initial_interval_ms=1_000, jitter=False)
        definition = Definition(target=HttpTarget(url=f"http://{host}/"), retry=retry, timeout_ms=timeout_ms)
        at = self.clock.now() + in_ms
        await self.service.create(NewTimer(namespace="default", id=id, execute_at=at, definition=definition))

    async def status(self, id: str) -> Status:
        return (await self.service.get("default", id)).status


def on_virtual_time(scene: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def test() -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(scene())

    test.__name__, test.__doc__ = scene.__name__, scene.__doc__
    return test


@on_virtual_time
async def test_a_timer_fires_at_its_time_and_is_completed() -> None:
    scene = Scene()
    await scene.start()
    await scene.create("a", in_ms=60_000)
    await asyncio.sleep(59.999)
    assert scene.deliverer.sent == []
    await asyncio.sleep(0.1)
    assert scene.deliverer.sent == [("a", 1)]
    assert await scene.status("a") is Status.COMPLETED
    await scene.stop()


@on_virtual_time
async def test_a_nudge_brings_the_look_forward() -> None:
    scene = Scene(look_interval_ms=10_000)
    await scene.start()
    await scene.create("a", in_ms=500)
    await asyncio.sleep(0.6)
    assert scene.deliverer.sent == [("a", 1)]
    await scene.stop()


@on_virtual_time
async def test_a_lost_nudge_makes_a_timer_late_but_loses_none() -> None:
    scene = Scene(look_interval_ms=1_000)
    scene.service._nudge = lambda *timers: None
    await scene.start()
    await scene.create("a", in_ms=500)
    await asyncio.sleep(2)
    assert scene.deliverer.sent == [("a", 1)]
    await scene.stop()


@on_virtual_time
async def test_a_failed_attempt_is_retried_by_the_retry_policy() -> None:
    scene = Scene()
    scene.deliverer.answers = lambda timer: OK if timer.attempt == 3 else MISS
    await scene.start()
    await scene.create("a", retries=5)
    await asyncio.sleep(0.5)
    assert scene.deliverer.sent == [("a", 1)]
    await asyncio.sleep(1)
    assert scene.deliverer.sent == [("a", 1), ("a", 2)]
    await asyncio.sleep(2)
    assert await scene.status("a") is Status.COMPLETED
    await scene.stop()


@on_virtual_time
async def test_one_hanging_destination_does_not_delay_another() -> None:
    scene = Scene(in_flight_max=40, per_destination_max=5, begin_max=10)
    scene.deliverer.seconds = lambda timer: 4.0 if "slow" in timer.definition.target.url else 0.01  # type: ignore[union-attr]
    await scene.start()
    for n in range(100):
        await scene.create(f"slow-{n}", host="slow")
    for n in range(100):
        await scene.create(f"fast-{n}", host="fast")
    await asyncio.sleep(1.9)
    assert sum(id.startswith("fast") for id, _ in scene.deliverer.sent) == 100
    assert sum(id.startswith("slow") for id, _ in scene.deliverer.sent) == 5
    await asyncio.sleep(300)
    assert sorted(id for id, _ in scene.deliverer.sent) == sorted(
        f"{k}-{n}" for k in ("slow", "fast") for n in range(100)
    )
    assert scene.deliverer.under_way_max <= 10
    await scene.stop()


@on_virtual_time
async def test_a_destination_gets_its_timers_after_it_recovers() -> None:
    scene = Scene(per_destination_max=10)
    down = True
    scene.deliverer.answers = lambda timer: MISS if down else OK
    await scene.start()
    for n in range(60):
        await scene.create(f"timer-{n}")
    await asyncio.sleep(4)
    tried = len(scene.deliverer.sent)
    assert tried < 60
    down = False
    await asyncio.sleep(60)
    states = [await scene.status(f"timer-{n}") for n in range(60)]
    assert states.count(Status.COMPLETED) >= 60 - tried
    assert all(attempt == 1 for _, attempt in scene.deliverer.sent)
    await scene.stop()


@on_virtual_time
async def test_a_drain_records_what_is_in_flight_and_releases_the_shards() -> None:
    scene = Scene()
    scene.deliverer.seconds = lambda timer: 2.0
    await scene.start()
    for n in range(20):
        await scene.create(f"timer-{n}")
    await asyncio.sleep(0.5)
    await scene.create("later", in_ms=100)
    await scene.stop()
    assert [await scene.status(f"timer-{n}") for n in range(20)] == [Status.COMPLETED] * 20
    assert await scene.status("later") is Status.PENDING
    assert all(shard.owner_id is None for shard in scene.store._shards)


@on_virtual_time
async def test_more_outcomes_than_a_batch_holds_are_recorded_in_several() -> None:
    scene = Scene(per_destination_max=4_000, begin_max=4_000)
    record, batches = scene.store.record, []

    async def watched(owner_id: bytes, changes: Any) -> list[bool]:
        batches.append(len(changes))
        if len(batches) == 1:
            scene.deliverer.seconds = lambda timer: 0.01
            await scene.create("meanwhile")
            await asyncio.sleep(0.1)
            raise StoreUnavailable("for once")
        return await record(owner_id, changes)

    scene.store.record = watched  # type: ignore[method-assign]
    scene.deliverer.seconds = lambda timer: 0.5
    await scene.start()
    for n in range(2 * BATCH_MAX):
        await scene.create(f"timer-{n}")
    await asyncio.sleep(60)
    assert max(batches) <= BATCH_MAX
    counts = await scene.store.tally("default")
    assert counts[Status.COMPLETED] == 2 * BATCH_MAX + 1
    await scene.stop()


@on_virtual_time
async def test_a_drain_times_out() -> None:
    scene = Scene(drain_ms=1_000)
    scene.deliverer.seconds = lambda timer: 4.0
    await scene.start()
    await scene.create("a")
    await asyncio.sleep(0.5)
    await scene.stop()
    assert await scene.status("a") is Status.EXECUTING


@on_virtual_time
async def test_a_begin_with_unknown_result_loses_no_timer() -> None:
    scene = Scene()
    begin = scene.store.begin
    lose = True

    async def lossy(*arguments: Any, **limits: Any) -> Begun:
        nonlocal lose
        begun = await begin(*arguments, **limits)
        if lose and begun.timers:
            lose = False
            raise StoreIndeterminate("the answer was lost")
        return begun

    scene.store.begin = lossy  # type: ignore[method-assign]
    await scene.start()
    await scene.create("a")
    await asyncio.sleep(20)
    assert scene.deliverer.sent == [("a", 2)]
    assert await scene.status("a") is Status.COMPLETED
    await scene.stop()


async def in_doubt(verb: str) -> None:
    """The store once reports an unknown result for one shard of 64: only that shard is claimed again, and no timer is
    lost."""
    scene = Scene(shards=64)
    store = scene.store
    ask, claim, doubtful = getattr(store, verb), store.claim, set[int]()
    claimed: list[set[int]] = []

    async def watched(owner_id: bytes, shards: Collection[int], lease_ms: int) -> dict[int, int]:
        claimed.append(set(shards))
        return await claim(owner_id, shards, lease_ms)

    async def doubting_begin(*arguments: Any, **limits: Any) -> Begun:
        begun: Begun = await ask(*arguments, **limits)
        if doubtful or not begun.timers:
            return begun
        doubtful.add(shard := begun.timers[0].shard)
        sure = [timer for timer in begun.timers if timer.shard != shard]
        return msgspec.structs.replace(begun, timers=sure, unknown=frozenset(doubtful))

    async def doubting_record(owner_id: bytes, changes: Any) -> list[bool | None]:
        if doubtful:
            return list(await ask(owner_id, changes))
        doubtful.add(shard := changes[0][0].shard)
        sure = [change for change in changes if change[0].shard != shard]
        recorded = iter(await ask(owner_id, sure))
        return [None if before.shard == shard else next(recorded) for before, _ in changes]

    setattr(store, verb, doubting_record if verb == "record" else doubting_begin)
    store.claim = watched  # type: ignore[method-assign]
    await scene.start()
    if verb == "begin_lanes":
        scene.engine._go_by_lane()
    for n in range(100):
        await scene.create(f"timer-{n}", host=f"host-{n}", in_ms=500)
    await asyncio.sleep(1)
    [shard] = doubtful
    assert claimed == [set(range(64)), {shard}]
    assert [row.version for row in store._shards] == [1 + (number == shard) for number in range(64)]
    waiting = [timer for timer in store._timers.values() if timer.status is not Status.COMPLETED]
    assert waiting and {timer.shard for timer in waiting} == {shard}
    await asyncio.sleep(20)
    assert (await store.tally())[Status.COMPLETED] == 100
    attempts = Counter(id for id, _ in scene.deliverer.sent)
    again = {timer.id for timer in waiting} if verb == "record" else set()
    assert attempts == {f"timer-{n}": 1 + (f"timer-{n}" in again) for n in range(100)}
    await scene.stop()


@on_virtual_time
async def test_an_indeterminate_begin_affects_only_its_shard() -> None:
    await in_doubt("begin")


@on_virtual_time
async def test_an_indeterminate_begin_by_lane_affects_only_its_shard() -> None:
    await in_doubt("begin_lanes")


@on_virtual_time
async def test_an_indeterminate_record_affects_only_its_shard() -> None:
    await in_doubt("record")


@on_virtual_time
async def test_a_timer_that_repeatedly_crashes_its_owner_fails() -> None:
    scene = Scene()
    await scene.start()
    await scene.create("a", in_ms=1_000)
    timer = await scene.service.get("default", "a")
    poisoned = msgspec.structs.replace(
        timer, status=Status.EXECUTING, attempt=3, lost=LOST_MAX - 1, deadline_at=0, version=0
    )
    assert await scene.store.swap(timer, poisoned)
    await asyncio.sleep(3)
    after = await scene.service.get("default", "a")
    assert after.status is Status.FAILED and "never recorded" in str(after.last_error)
    assert scene.deliverer.sent == []
    await scene.stop()


@on_virtual_time
async def test_a_process_that_stalled_past_its_lease_sends_nothing() -> None:
    scene = Scene()
    await scene.start()
    await scene.create("a", in_ms=1_000)
    timer = await scene.service.get("default", "a")
    begun = (await scene.store.begin(scene.engine.ownership.owner_id, scene.engine.ownership.held(), 1)).timers
    assert begun == [] and scene.engine.ownership.held()
    scene.engine.ownership._trusted_until = 0.0
    scene.engine.dispatcher.dispatch([timer], asyncio.get_running_loop().create_task)
    await asyncio.sleep(0.1)
    assert scene.deliverer.sent == []
    await scene.stop()


@on_virtual_time
async def test_a_timer_that_waited_too_long_for_its_deadline_is_put_back_unsent() -> None:
    scene = Scene(per_destination_max=1)
    left: list[tuple[str, int, bool]] = []

    def seconds(timer: Timer) -> float:
        assert timer.deadline_at is not None
        in_time = scene.clock.now() + timer.definition.timeout_ms <= timer.deadline_at
        left.append((timer.id, timer.attempt, in_time))
        return ATTEMPT_GRACE_MS / 1000 - 1

    scene.deliverer.seconds = seconds
    await scene.start()
    for id in ("a", "b", "c"):
        await scene.create(id, in_ms=1_000)
    await asyncio.sleep(30)
    assert left == [("a", 1, True), ("b", 1, True), ("c", 1, True)]
    await scene.stop()


@on_virtual_time
async def test_an_instance_with_a_wrong_clock_releases_its_shards() -> None:
    scene = Scene()
    await scene.start()
    assert scene.engine.ownership.held()
    scene.clock.skew_ms += 1
    store_clock = Machine()
    scene.store._clock = store_clock
    scene.clock.skew_ms = 5_000
    await asyncio.sleep(2)
    assert not scene.engine.ownership.held()
    scene.clock.skew_ms = 0
    await asyncio.sleep(2)
    assert scene.engine.ownership.held()
    await scene.stop()


@on_virtual_time
async def test_a_slow_store_does_not_count_as_a_wrong_clock() -> None:
    """If it released the shards, the outcomes in flight would be refused and their timers fired twice."""
    scene = Scene(lease_ms=4_000)
    renew = scene.store.renew

    async def slow(*arguments: Any) -> Any:
        await asyncio.sleep(0.2)
        renewal = await renew(*arguments)
        await asyncio.sleep(1.2)
        return renewal

    scene.store.renew = slow  # type: ignore[method-assign, assignment]
    scene.deliverer.seconds = lambda timer: 4.5
    await scene.start()
    await asyncio.sleep(3)
    await scene.create("a")
    await asyncio.sleep(60)
    assert scene.deliverer.sent == [("a", 1)]
    assert await scene.status("a") is Status.COMPLETED
    await scene.stop()


@on_virtual_time
async def test_a_second_instance_takes_its_share_and_gives_it_back() -> None:
    scene = Scene()
    await scene.start()
    assert len(scene.engine.ownership.held()) == 8
    other = scene.another_engine()
    running = asyncio.create_task(other.run())
    await asyncio.sleep(10)
    mine, theirs = set(scene.engine.ownership.held()), set(other.ownership.held())
    assert mine | theirs == set(range(8)) and not mine & theirs
    other.drain()
    await running
    await asyncio.sleep(10)
    assert len(scene.engine.ownership.held()) == 8
    await scene.stop()


@on_virtual_time
async def test_a_shard_does_not_move_during_a_begin() -> None:
    """The timers of that begin could not be recorded any more and would wait for their deadlines."""
    scene = Scene()
    begin = scene.store.begin

    async def slow(*arguments: Any, **limits: Any) -> Any:
        begun = await begin(*arguments, **limits)
        await asyncio.sleep(0.3)
        return begun

    scene.store.begin = slow  # type: ignore[method-assign]
    await scene.start()
    for n in range(200):
        await scene.create(f"t{n}", in_ms=50 * n)
    other = scene.another_engine()
    running = asyncio.create_task(other.run())
    await asyncio.sleep(20)
    assert len(other.ownership.held()) > 0
    assert sorted(scene.deliverer.sent) == sorted((f"t{n}", 1) for n in range(200))
    other.drain()
    await running
    await scene.stop()


@pytest.mark.parametrize("count", [1, 300])
def test_overdue_timers_fire_oldest_first(count: int) -> None:
    async def scene_of() -> None:
        scene = Scene(per_destination_max=1, in_flight_max=1_000)
        for n in range(count):
            await scene.namespaces.start()
            await scene.create(f"timer-{n:03}", in_ms=-60_000 + n)
        await scene.start()
        await asyncio.sleep(30)
        sent = [id for id, _ in scene.deliverer.sent]
        assert sent == sorted(sent) and len(sent) == count
        await scene.stop()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scene_of())


@on_virtual_time
async def test_old_timers_are_purged_as_fast_as_timers_can_finish() -> None:
    """The pause before the next batch is as long as the last batch took."""
    scene = Scene()
    dropped = 0

    async def purge(*, retention_ms: int, limit: int) -> int:
        nonlocal dropped
        await asyncio.sleep(0.1)
        dropped += limit
        return limit

    scene.store.purge = purge  # type: ignore[method-assign]
    await scene.start()
    await asyncio.sleep(10)
    assert dropped >= 10 * 30_000
    await scene.stop()


@on_virtual_time
async def test_a_store_that_expires_history_itself_is_not_purged() -> None:
    async def purge(*, retention_ms: int, limit: int) -> int:
        raise AssertionError("there is nothing to purge")

    scene = Scene()
    scene.store.purge = purge  # type: ignore[method-assign]
    scene.store.abilities = Abilities(expires_history=True)
    await scene.start()
    await asyncio.sleep(100)
    await scene.stop()


@on_virtual_time
async def test_a_bulk_change_continues_after_short_pages() -> None:
    scene = Scene()
    await scene.namespaces.start()
    definition = Definition(target=HttpTarget(url="http://a/"), payload=Raw(b'"%s"' % (b"x" * 400_000)))
    for n in range(30):
        new = NewTimer(namespace="default", id=f"t{n}", execute_at=scene.clock.now() + 10**6, definition=definition)
        await scene.service.create(new)
    pending = Filter(status=Status.PENDING)
    assert len((await scene.store.page(pending, 30)).timers) < 30
    assert await scene.service.cancel_all(Filter(), 25) == Counted(25, more=True)
    assert await scene.service.cancel_all(Filter(), 25) == Counted(5)
    assert (await scene.store.tally())[Status.CANCELED] == 30
    assert await scene.service.replay_all(Filter(status=Status.CANCELED), 1_000) == Counted(30)


def test_engine_defaults_equal_the_default_settings() -> None:
    options, settings = EngineOptions(), Settings()
    assert options == EngineOptions(
        lease_ms=settings.lease_ttl_ms,
        look_interval_ms=settings.timer_polling_interval_ms,
        begin_max=settings.timer_batch_size,
        in_flight_max=settings.max_in_flight,
        per_destination_max=settings.max_per_destination,
        drain_ms=settings.drain_timeout_ms,
        retention_ms=settings.retention_ms or 0,
    )
