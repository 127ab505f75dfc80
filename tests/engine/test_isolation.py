"""Isolation: engines on the memory store in virtual time, with destinations that hang, refuse or break, and bursts.

A host is named after its behavior (``hang-3``), so that scenes are easy to read. Lateness is in virtual time: it
includes polls that came late, but not the time that a poll takes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import wraps
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from duetime.engine.destinations import BREAK_MS, PROBES, SLOT_BYTES
from duetime.engine.engine import Engine, EngineOptions
from duetime.errors import StoreUnavailable
from duetime.instants import Instant
from duetime.model import (
    ABSENT,
    HOUR_MS,
    Definition,
    HttpTarget,
    Outcome,
    OutcomeKind,
    RetryPolicy,
    Status,
    Target,
    Timer,
    Unsent,
    destination_of,
)
from duetime.namespaces import Namespaces
from duetime.service import NewTimer, Service
from duetime.store import Begun, Lanes, Portion
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry
from tests.simulation.world import Machine, VirtualLoop

OK = Outcome(kind=OutcomeKind.ANSWERED, status=200, body=b'{"ok": true}')
MISS = Outcome(kind=OutcomeKind.UNREACHABLE, error="connection refused")
SILENCE = Outcome(kind=OutcomeKind.TIMED_OUT, error="no answer")
PROMPT_MS = 50


def on_virtual_time(scene: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(scene)
    def test(*arguments: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(scene(*arguments, **named))

    return test


def host_of(timer: Timer) -> str:
    return destination_of(timer.definition.target).removeprefix("http://").removesuffix(":80")


class WatchedStore(MemoryStore):
    """Counts the writes for each kind of host."""

    def __init__(self, clock: Machine) -> None:
        super().__init__(clock, shards=8)
        self.begins: Counter[str] = Counter()
        self.put_back: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def _note(self, begun: Begun) -> Begun:
        self.calls["begin"] += 1
        self.begins.update(host_of(timer).split("-")[0] for timer in begun.timers)
        return begun

    async def begin(self, *arguments: Any, **limits: Any) -> Begun:
        return self._note(await super().begin(*arguments, **limits))

    async def begin_lanes(
        self, owner_id: bytes, held: Mapping[int, int], limit: int, portions: Sequence[Portion]
    ) -> Begun:
        return self._note(await super().begin_lanes(owner_id, held, limit, portions))

    async def lanes(self, until: Instant, **limits: Any) -> Lanes:
        self.calls["lanes"] += 1
        return await super().lanes(until, **limits)

    async def record(self, owner_id: bytes, changes: Sequence[tuple[Timer, Timer]]) -> list[bool]:
        self.put_back.update(
            host_of(before).split("-")[0]
            for before, after in changes
            if after.status is Status.PENDING and after.attempt < before.attempt
        )
        return await super().record(owner_id, changes)


class Hosts:
    """The deliverer: each kind of host behaves in its own way, unless ``behaves`` overrides that."""

    def __init__(self, clock: Machine) -> None:
        self.behaves: dict[str, str | Callable[[Timer], Outcome]] = {}
        self.sent: list[Timer] = []
        self.attempts: Counter[str] = Counter()
        self.under_way: Counter[str] = Counter()
        self.under_way_max: Counter[str] = Counter()
        self.lateness_ms: dict[str, list[int]] = defaultdict(list)
        self._clock = clock

    async def deliver(self, timer: Timer, timeout_ms: int) -> Outcome:
        host = host_of(timer)
        kind = host.split("-")[0]
        self.sent.append(timer)
        self.attempts[kind] += 1
        self.lateness_ms[kind].append(self._clock.now() - timer.fire_at)
        self.under_way[host] += 1
        self.under_way_max[host] = max(self.under_way[host], self.under_way_max[host])
        try:
            behavior = self.behaves.get(host, self.behaves.get(kind, kind))
            if not isinstance(behavior, str):
                await asyncio.sleep(0.001)
                return behavior(timer)
            match behavior:
                case "hang":
                    await asyncio.sleep(timeout_ms / 1000)
                    return SILENCE
                case "dead":
                    await asyncio.sleep(0.001)
                    return MISS
                case "slow":
                    await asyncio.sleep(5)
                case "break":
                    raise RuntimeError("a bug of ours")
                case "well":
                    await asyncio.sleep(0.01)
                case unknown:
                    raise AssertionError(f"how does {unknown} behave?")
            return OK
        finally:
            self.under_way[host] -= 1

    async def check(self, target: Target) -> None:
        pass

    async def close(self) -> None:
        pass


class Scene:
    def __init__(self, *, weights: Mapping[str, int] | None = None, **options: Any) -> None:
        self.clock = Machine()
        self.store = WatchedStore(self.clock)
        self.hosts = Hosts(self.clock)
        self.weights = weights or {}
        self.options = EngineOptions(**{"lease_ms": 3_000, **options})
        self.looks = self.engines = 0
        self.by_lane: Counter[bool] = Counter()
        self.running: list[tuple[Engine, asyncio.Task[None]]] = []
        self.engine = self.new_engine()
        self.namespaces = Namespaces(self.store, self.clock, self.nudge, auto=True)
        self.service = Service(self.store, self.namespaces, {HttpTarget: self.hosts}, self.clock, self.nudge)

    def new_engine(self) -> Engine:
        self.engines += 1
        engine = Engine(
            self.store,
            {HttpTarget: self.hosts},
            self.clock,
            Telemetry(),
            self.options,
            uniform=lambda low, high: high,
            weight=lambda name: self.weights.get(name, 1),
            owner_id=b"engine %d" % self.engines,  # with random ids, one engine may get none of so few shards
        )
        look = engine.look

        async def counted(spawn: Any) -> bool:
            self.looks += 1
            self.by_lane[engine.lanes.active] += 1
            return await look(spawn)

        engine.look = counted  # type: ignore[method-assign]
        return engine

    def nudge(self, *timers: Timer) -> None:
        for engine, _ in self.running:
            engine.nudge(*timers)

    async def run(self, engine: Engine | None = None) -> None:
        engine = engine or self.engine
        self.running.append((engine, asyncio.create_task(engine.run())))
        await asyncio.sleep(0.2)

    async def __aenter__(self) -> Scene:
        await self.namespaces.start()
        await self.run()
        return self

    async def __aexit__(self, *exception: object) -> None:
        for _, running in self.running:
            assert not running.done(), "the engine ended"
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def new(
        self,
        id: str,
        host: str,
        *,
        namespace: str = "default",
        in_ms: int = 0,
        timeout_ms: int = 30_000,
        retries: int = 0,
        payload: Raw = ABSENT,
    ) -> NewTimer:
        retry = RetryPolicy(max_retries=retries, initial_interval_ms=1_000, jitter=False)
        target = HttpTarget(url=f"http://{host}/")
        definition = Definition(target=target, retry=retry, timeout_ms=timeout_ms, payload=payload)
        return NewTimer(namespace=namespace, id=id, execute_at=self.clock.now() + in_ms, definition=definition)

    async def create(self, news: Iterable[NewTimer]) -> None:
        assert all(isinstance(made, tuple) for made in await self.service.create_many(list(news)))

    async def herd(self, count: int, host: str | Callable[[int], str], **fields: Any) -> None:
        name = fields.get("namespace", "default")
        at = host if callable(host) else lambda n: host
        await self.create(self.new(f"{name}-{at(0)}-{n}", at(n), **fields) for n in range(count))

    async def trickle(self, seconds: float, host: str | Callable[[int], str] = "well", **fields: Any) -> None:
        """Twenty timers a second, each due at once."""
        for n in range(round(20 * seconds)):
            at = host(n) if callable(host) else host
            await self.create([self.new(f"trickle-{self.clock.now()}", at, **fields)])
            await asyncio.sleep(0.05)

    async def pause(self, namespace: str, paused: bool = True) -> None:
        await self.namespaces.create(namespace)
        await self.namespaces.change(namespace, lambda before: msgspec.structs.replace(before, paused=paused))

    def by_status(self, host: str | None = None, namespace: str | None = None) -> Counter[Status]:
        return Counter(
            timer.status
            for timer in self.store._timers.values()
            if namespace in (None, timer.namespace) and (host is None or host_of(timer).split("-")[0] == host)
        )

    def live(self, host: str | None = None) -> int:
        counts = self.by_status(host)
        return counts[Status.PENDING] + counts[Status.EXECUTING]

    def worst_ms(self, host: str = "well") -> int:
        return max(self.hosts.lateness_ms[host])

    def check_ended(self) -> None:
        """Everything is final, and the engine holds nothing."""
        assert not self.live()
        for engine, _ in self.running:
            assert engine.recorder.slots_in_flight == 0 and not engine.recorder.slots_by_namespace
            assert not any(engine.recorder.timers_by_shard.values())
            assert not engine.destinations.queued
            for destination in engine.destinations._known.values():
                assert not destination.held and not destination.slots

    def check_sent_once(self) -> None:
        """No attempt was sent twice, and each completed timer got one response."""
        attempts = [(timer.namespace, timer.id, timer.attempt) for timer in self.hosts.sent]
        assert len(attempts) == len(set(attempts))


# Destinations that hang.


@on_virtual_time
@pytest.mark.parametrize("namespace", ["default", "other"])
async def test_a_hanging_destination_does_not_delay_others(namespace: str) -> None:
    async with Scene() as scene:
        await scene.herd(3_000, "hang")
        await scene.trickle(20, namespace=namespace)
        assert len(scene.hosts.lateness_ms["well"]) == 400 and scene.worst_ms() <= PROMPT_MS
        writes = scene.store.begins["hang"] + scene.store.put_back["hang"]
        assert writes <= 2 * scene.hosts.attempts["hang"]


@on_virtual_time
@pytest.mark.parametrize("namespace", ["default", "other"])
async def test_many_hanging_destinations_leave_slots_for_others(namespace: str) -> None:
    async with Scene(in_flight_max=4_096) as scene:
        await scene.herd(20 * 300, lambda n: f"hang-{n % 20}")
        await scene.trickle(10, namespace=namespace)
        assert len(scene.hosts.lateness_ms["well"]) == 200 and scene.worst_ms() <= PROMPT_MS
        assert scene.store.begins["hang"] + scene.store.put_back["hang"] <= 2 * scene.hosts.attempts["hang"]


@on_virtual_time
async def test_a_timeout_of_an_hour_does_not_keep_slots_from_others() -> None:
    async with Scene() as scene:
        await scene.herd(17 * 256, lambda n: f"hang-{n % 17}", timeout_ms=HOUR_MS)
        await scene.trickle(10)
        assert len(scene.hosts.lateness_ms["well"]) == 200 and scene.worst_ms() <= PROMPT_MS


@on_virtual_time
@pytest.mark.parametrize(("kind", "per_host"), [("hang", 4), ("dead", 4), ("hang", 1)])
async def test_hundreds_of_dead_destinations_do_not_stop_working_ones(kind: str, per_host: int) -> None:
    """Even in the same namespace: hanging destinations must not use up its share."""
    async with Scene() as scene:
        await scene.herd(600 * per_host, lambda n: f"{kind}-{n % 600}", timeout_ms=HOUR_MS)
        await scene.trickle(5, "well-known")
        await scene.trickle(5, lambda n: f"well-{n}")
        assert len(scene.hosts.lateness_ms["well"]) == 200
        # The first ones are due while it is unknown which of these destinations respond.
        late = sorted(scene.hosts.lateness_ms["well"])
        assert late[-10] <= PROMPT_MS and late[-1] <= 500


@on_virtual_time
async def test_proven_destinations_that_start_to_hang_leave_slots_for_others() -> None:
    """Their windows are wide open."""
    async with Scene() as scene:
        scene.hosts.behaves["hang"] = "well"
        await scene.herd(20 * 150, lambda n: f"hang-{n % 20}", namespace="before")
        await asyncio.sleep(5)
        assert not scene.live()
        scene.store._timers.clear()
        del scene.hosts.behaves["hang"]
        await scene.herd(20 * 250, lambda n: f"hang-{n % 20}", timeout_ms=HOUR_MS)
        await scene.trickle(2, namespace="other")
        assert scene.worst_ms() <= PROMPT_MS
        await asyncio.sleep(1)
        scene.hosts.lateness_ms.clear()
        await scene.trickle(5)
        assert len(scene.hosts.lateness_ms["well"]) == 100 and scene.worst_ms() <= PROMPT_MS


@on_virtual_time
async def test_a_new_destination_is_served_promptly_while_thousands_hang() -> None:
    async with Scene() as scene:
        await scene.herd(2_000, lambda n: f"hang-{n % 40}", timeout_ms=HOUR_MS)
        await asyncio.sleep(3)
        await scene.trickle(3, lambda n: f"well-{n}")
        assert len(scene.hosts.lateness_ms["well"]) == 60 and scene.worst_ms() <= PROMPT_MS


@on_virtual_time
async def test_a_destination_that_failed_once_is_served_while_others_hang() -> None:
    async with Scene(in_flight_max=64) as scene:
        scene.hosts.behaves["flaky"] = lambda timer: MISS if timer.id == "first" else OK
        await scene.herd(500, lambda n: f"hang-{n % 20}", timeout_ms=HOUR_MS)
        await asyncio.sleep(10)
        await scene.create([scene.new("first", "flaky", timeout_ms=1_000)])
        await asyncio.sleep(2)
        await scene.trickle(5, "flaky")
        assert len(scene.hosts.lateness_ms["flaky"]) == 101
        assert max(scene.hosts.lateness_ms["flaky"][1:]) <= 500


@on_virtual_time
async def test_many_destinations_with_one_timer_each_are_served_promptly() -> None:
    """More of them are ready than one look serves."""
    async with Scene() as scene:
        await scene.herd(3_000, lambda n: f"hang-{n % 20}")
        await asyncio.sleep(2)
        assert scene.engine.lanes.active
        for round_ in range(4):
            scene.hosts.lateness_ms.clear()
            await scene.create(scene.new(f"{round_}-{n}", f"well-{n}") for n in range(300))
            await asyncio.sleep(1.5)
            assert len(scene.hosts.lateness_ms["well"]) == 300
            # At first, it is unknown whether they respond.
            assert scene.worst_ms() <= (PROMPT_MS if round_ else 300)


# Destinations that respond slowly, or are shared.


@on_virtual_time
@pytest.mark.parametrize("namespaces", [1, 10, 64])
async def test_a_slow_destination_causes_few_writes(namespaces: int) -> None:
    async with Scene() as scene:
        for n in range(namespaces):
            await scene.herd(1_280 // namespaces, "slow", namespace=f"namespace-{n}")
        await asyncio.sleep(60)
        scene.check_ended()
        assert scene.store.begins["slow"] <= 2 * scene.hosts.attempts["slow"]


@on_virtual_time
@pytest.mark.parametrize("per_namespace", [4, 20])
async def test_a_dead_destination_of_many_namespaces_causes_few_writes(per_namespace: int) -> None:
    async with Scene() as scene:
        for n in range(100):
            await scene.herd(per_namespace, "dead", namespace=f"namespace-{n}")
        await asyncio.sleep(2)
        begins, attempts = scene.store.begins["dead"], scene.hosts.attempts["dead"]
        await asyncio.sleep(58)
        probes = scene.hosts.attempts["dead"] - attempts
        assert 0 < probes <= 4 * PROBES
        assert scene.store.begins["dead"] - begins <= 2 * probes


# Bursts.


@on_virtual_time
async def test_a_burst_of_one_namespace_does_not_delay_another() -> None:
    async with Scene() as scene:
        scene.hosts.behaves["herd"] = "well"
        await scene.herd(4_000, "herd", namespace="many")
        await scene.trickle(1, namespace="few")
        assert len(scene.hosts.lateness_ms["well"]) == 20 and scene.worst_ms() <= PROMPT_MS
        await asyncio.sleep(5)
        scene.check_ended()


@on_virtual_time
@pytest.mark.parametrize("shared", [True, False])
async def test_bursts_progress_by_weight(shared: bool) -> None:
    """Where they compete: for a destination, or for slots."""
    limits: dict[str, Any] = {"per_destination_max": 16} if shared else {"in_flight_max": 64, "begin_max": 64}

    def of_its_own(namespace: str) -> Callable[[int], str]:
        return lambda n: f"well-{namespace}-{n % 5}"

    async with Scene(weights={"heavy": 3}, **limits) as scene:
        for name in ("light", "heavy"):
            await scene.herd(600, "well" if shared else of_its_own(name), namespace=name)
        for _ in range(10_000):
            await asyncio.sleep(0.005)
            heavy = scene.by_status(namespace="heavy")[Status.COMPLETED]
            if heavy >= 400:
                break
        light = scene.by_status(namespace="light")[Status.COMPLETED]
        assert heavy / 4.5 < light < heavy / 2
        await asyncio.sleep(60)
        scene.check_ended()


@on_virtual_time
@pytest.mark.parametrize("by_lane", [False, True])
async def test_one_namespace_leaves_slots_for_others_even_if_there_are_few(by_lane: bool) -> None:
    async with Scene(in_flight_max=64) as scene:
        if by_lane:
            await scene.pause("asleep")
            await scene.herd(1_000, "well", namespace="asleep")
            scene.engine._go_by_lane()
        scene.hosts.behaves["slow"] = "well"
        await scene.herd(30, lambda n: f"slow-{n}", namespace="before")
        await asyncio.sleep(2)
        del scene.hosts.behaves["slow"]
        assert scene.engine.lanes.active == by_lane
        await scene.herd(400, lambda n: f"slow-{n % 30}", namespace="many")
        await asyncio.sleep(0.2)
        scene.hosts.lateness_ms.clear()
        await scene.trickle(3, namespace="few")
        assert len(scene.hosts.lateness_ms["well"]) == 60 and scene.worst_ms() <= PROMPT_MS


# Destinations that refuse.


@on_virtual_time
async def test_a_refusing_destination_gets_growing_pauses_and_then_everything() -> None:
    async with Scene() as scene:
        await scene.herd(400, "dead", retries=20)
        await asyncio.sleep(0.5)
        rounds: list[tuple[int, int]] = []
        for _ in range(3):
            before, waited_ms = scene.hosts.attempts["dead"], 0
            while scene.hosts.attempts["dead"] == before:
                await asyncio.sleep(0.1)
                waited_ms += 100
            await asyncio.sleep(0.1)
            rounds.append((waited_ms + 100, scene.hosts.attempts["dead"] - before))
        assert [probes for _, probes in rounds] == [PROBES] * 3
        waits = [wait_ms for wait_ms, _ in rounds]
        assert all(
            n * BREAK_MS - 600 <= wait_ms <= n * BREAK_MS + 1_200 for n, wait_ms in zip((1, 2, 4), waits, strict=True)
        )
        assert scene.store.put_back["dead"] == 0
        scene.hosts.behaves["dead"] = "well"
        scene.hosts.under_way_max.clear()
        assert scene.by_status()[Status.PENDING] == 400
        widths = []
        for _ in range(12_000):
            await asyncio.sleep(0.01)
            if width := scene.hosts.under_way["dead"]:
                widths.append(width)
        assert widths[0] <= PROBES and widths[1] <= 3 * PROBES, "it is back, and everything comes at once"
        assert max(widths) > 10 * PROBES
        assert scene.by_status()[Status.COMPLETED] == 400
        scene.check_ended()
        scene.check_sent_once()


# Unsent attempts.


@on_virtual_time
async def test_a_deliverer_that_raises_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    async with Scene() as scene:
        await scene.herd(100, lambda n: f"break-{n % 3}")
        await scene.trickle(2)
        assert scene.worst_ms() <= PROMPT_MS
        assert scene.by_status("break")[Status.PENDING] == 100
        assert {timer.attempt for timer in scene.store._timers.values() if host_of(timer) != "well"} == {0}
        await asyncio.sleep(120)
        times = [timer.updated_at for timer in scene.hosts.sent if timer.id == "default-break-0-0"]
        waits = [after - before for before, after in pairwise(times)]
        assert waits == sorted(waits) and waits[0] <= 2_000 and waits[-1] >= 10_000
        scene.hosts.behaves["break"] = "well"
        await asyncio.sleep(300)
        assert scene.by_status()[Status.COMPLETED] == len(scene.store._timers)
        assert {timer.attempt for timer in scene.store._timers.values()} == {1}
        scene.check_ended()


@on_virtual_time
async def test_a_deliverer_whose_inner_task_is_canceled_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """As when several attempts wait for one lookup, and the first of them gives up."""
    caplog.set_level(logging.CRITICAL)
    async with Scene() as scene:
        canceled = True

        def outcome(timer: Timer) -> Outcome:
            if canceled:
                raise asyncio.CancelledError
            return OK

        scene.hosts.behaves["odd"] = outcome
        await scene.herd(10, "odd")
        await asyncio.sleep(3)
        assert scene.by_status()[Status.PENDING] == 10
        canceled = False
        await asyncio.sleep(30)
        assert scene.by_status()[Status.COMPLETED] == 10
        scene.check_ended()


@on_virtual_time
@pytest.mark.parametrize(
    "cause", [Unsent.DESCRIPTORS, Unsent.LOOKUPS, Unsent.BROKER, Unsent.INTERNAL, Unsent.NAMESPACE]
)
async def test_an_unsent_attempt_does_not_count(cause: Unsent, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    async with Scene() as scene:
        outcome = Outcome(kind=OutcomeKind.UNSENT, cause=cause, error="there is none left")
        scene.hosts.behaves["short"] = lambda timer: outcome
        await scene.herd(200, lambda n: f"short-{n % 4}")
        await scene.trickle(10)
        assert scene.worst_ms() <= PROMPT_MS
        assert scene.by_status("short")[Status.PENDING] == 200
        if cause not in (Unsent.INTERNAL, Unsent.NAMESPACE):
            # All attempts in flight at first, then a few probes from time to time.
            assert scene.store.begins["short"] <= 200 + 4 * 6 * PROBES
        scene.hosts.behaves["short"] = "well"
        await asyncio.sleep(60)
        assert scene.by_status()[Status.COMPLETED] == len(scene.store._timers)
        done = [timer for timer in scene.store._timers.values() if host_of(timer) != "well"]
        assert {(timer.attempt, timer.failures, timer.lost) for timer in done} == {(1, 0, 0)}
        scene.check_ended()


# Pauses.


@on_virtual_time
@pytest.mark.parametrize("count", [300, 2_500])
async def test_a_paused_namespace_delays_no_other_and_fires_all_when_resumed(count: int) -> None:
    async with Scene() as scene:
        await scene.pause("asleep")
        scene.hosts.behaves["sleeper"] = "well"
        await scene.herd(count, lambda n: f"sleeper-{n % 7}", namespace="asleep")
        await scene.herd(1_500, lambda n: f"hang-{n % 20}")
        await scene.trickle(5)
        assert scene.worst_ms() <= PROMPT_MS and not scene.hosts.attempts["sleeper"]
        await scene.pause("asleep", False)
        await asyncio.sleep(3)
        assert scene.hosts.attempts["sleeper"] == count
        assert scene.by_status("sleeper")[Status.COMPLETED] == count


# Two engines.


@on_virtual_time
async def test_two_engines_in_trouble_lose_nothing_and_fire_nothing_twice() -> None:
    async with Scene(in_flight_max=128) as scene:
        await scene.run(scene.new_engine())
        await asyncio.sleep(10)
        assert all(engine.ownership.held() for engine, _ in scene.running)
        await scene.herd(600, lambda n: f"hang-{n % 30}", timeout_ms=5_000)
        await scene.herd(200, lambda n: f"dead-{n % 4}", namespace="other")
        await scene.herd(400, lambda n: f"slow-{n % 3}", namespace="third")
        await scene.trickle(10)
        assert sorted(scene.hosts.lateness_ms["well"])[-10] <= PROMPT_MS
        third = scene.new_engine()
        await scene.run(third)
        await scene.trickle(10)
        third.drain()
        await scene.running.pop()[1]
        await asyncio.sleep(600)
        scene.check_ended()
        scene.check_sent_once()
        assert len(scene.hosts.sent) == len(scene.store._timers) == 1_600
        assert {timer.attempt for timer in scene.store._timers.values()} == {1}


# Switching between looks by age and by lane.


@on_virtual_time
@pytest.mark.parametrize("options", [{}, {"in_flight_max": 32}, {"in_flight_max": 3, "per_destination_max": 2}])
async def test_after_trouble_the_engine_returns_to_oldest_first_with_a_clean_state(
    options: dict[str, Any],
) -> None:
    async with Scene(**options) as scene:
        await scene.herd(900, lambda n: f"hang-{n % 25}", timeout_ms=500)
        await scene.herd(300, lambda n: f"well-{n % 50}", namespace="other")
        await scene.herd(100, lambda n: f"dead-{n % 3}", namespace="third", retries=1)
        for _ in range(3_600):
            await asyncio.sleep(1)
            if not scene.live():
                break
        await asyncio.sleep(5)
        scene.check_ended()
        assert scene.by_lane[True] and not scene.engine.lanes.active
        assert not scene.engine.lanes._known
        await asyncio.sleep(BREAK_MS / 1000 + 70)
        scene.hosts.lateness_ms.clear()
        await scene.trickle(1, "well-1")
        assert scene.worst_ms() <= PROMPT_MS
        assert not scene.engine.destinations.limited


@on_virtual_time
async def test_timers_that_fall_due_between_slow_surveys_are_not_late() -> None:
    """While timers are begun by lane, only a survey finds a lane whose timers were created long ago."""
    async with Scene() as scene:
        lanes = scene.store.lanes

        async def slow(until: Instant, **limits: Any) -> Lanes:
            found = await lanes(until, **limits)
            await asyncio.sleep(0.4)
            return found

        scene.store.lanes = slow  # type: ignore[method-assign]
        await scene.create(scene.new(f"later-{n}", f"well-{n}", in_ms=200 * n) for n in range(150))
        await scene.herd(2_000, lambda n: f"hang-{n % 20}", timeout_ms=HOUR_MS)
        await asyncio.sleep(31)
        assert len(scene.hosts.lateness_ms["well"]) == 150
        late = sorted(scene.hosts.lateness_ms["well"])
        assert late[-8] <= PROMPT_MS and late[-1] <= 1_000  # some fell due during the first survey


@on_virtual_time
async def test_timers_created_during_a_look_are_not_late() -> None:
    """The look may have read their lane before they were written."""
    async with Scene() as scene:
        begin_lanes = scene.store.begin_lanes

        async def slow(*arguments: Any) -> Begun:
            begun = await begin_lanes(*arguments)
            await asyncio.sleep(0.03)
            return begun

        scene.store.begin_lanes = slow  # type: ignore[method-assign, assignment]
        await scene.herd(2_000, lambda n: f"hang-{n % 20}", timeout_ms=HOUR_MS)
        await asyncio.sleep(2)
        for n in range(300):
            await scene.create([scene.new(f"one-{n}", "well")])
            await asyncio.sleep(0.017)
        await asyncio.sleep(1)
        assert len(scene.hosts.lateness_ms["well"]) == 300 and scene.worst_ms() <= 100


# The cost of waiting.


HELD_BACK: list[tuple[int, Callable[[int], str], dict[str, int], int]] = [
    (1_000, lambda n: "hang", {}, 3),
    (1_000, lambda n: "dead", {}, 3),
    (1_000, lambda n: f"hang-{n % 5}", {}, 12),
    (3_000, lambda n: f"hang-{n % 500}", {}, 12),
    (3_000, lambda n: f"dead-{n % 13}", {}, 15),
    (500, lambda n: f"hang-{n % 50}", {"in_flight_max": 16}, 15),
]
"""How many timers for which hosts, and how many looks a second they may cost."""


@on_virtual_time
@pytest.mark.parametrize(("count", "host", "options", "looks_max"), HELD_BACK)
async def test_held_back_timers_need_few_looks(
    count: int, host: Callable[[int], str], options: dict[str, Any], looks_max: int
) -> None:
    async with Scene(**options) as scene:
        for n in range(10):  # so that their waits are not in step
            news = [scene.new(f"{n}-{m}", host(10 * m + n), timeout_ms=HOUR_MS) for m in range(count // 10)]
            await scene.create(news)
            await asyncio.sleep(0.113)
        await asyncio.sleep(2)
        scene.looks = 0
        scene.store.calls.clear()
        await asyncio.sleep(20)
        assert scene.live() > count / 3
        assert scene.looks <= 20 * looks_max
        assert scene.store.calls["begin"] + scene.store.calls["lanes"] <= 20 * 4


@on_virtual_time
async def test_not_every_burst_causes_a_survey() -> None:
    """Each has more due than a look begins, but little enough to return to the oldest first."""
    async with Scene(begin_max=20) as scene:
        for n in range(100):
            await scene.create(scene.new(f"{n}-{m}", f"well-{m}") for m in range(60))
            await asyncio.sleep(0.05)
        assert scene.by_lane[True] and scene.worst_ms() <= PROMPT_MS
        assert 0 < scene.store.calls["lanes"] <= 10


@on_virtual_time
async def test_an_unavailable_store_is_not_polled_constantly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    async with Scene(lease_ms=120_000) as scene:
        away = True
        begin_lanes, lanes = scene.store.begin_lanes, scene.store.lanes

        async def no_begin(*arguments: Any) -> Begun:
            scene.store.calls["begin"] += away
            if away:
                raise StoreUnavailable("away")
            return await begin_lanes(*arguments)

        async def no_lanes(until: Instant, **limits: Any) -> Lanes:
            scene.store.calls["lanes"] += away
            if away:
                raise StoreUnavailable("away")
            return await lanes(until, **limits)

        await scene.herd(3_000, lambda n: f"hang-{n % 20}", timeout_ms=2_000)
        await asyncio.sleep(1)
        scene.store.begin_lanes = no_begin  # type: ignore[method-assign, assignment]
        scene.store.lanes = no_lanes  # type: ignore[method-assign]
        scene.store.calls.clear()
        await asyncio.sleep(10)
        assert 0 < scene.store.calls["begin"] <= 200 and 0 < scene.store.calls["lanes"] <= 20
        away = False
        scene.hosts.behaves["hang"] = "well"
        await scene.trickle(2)
        await asyncio.sleep(120)
        scene.check_ended()


# Large payloads.


@on_virtual_time
async def test_large_payloads_take_several_slots() -> None:
    async with Scene(in_flight_max=100) as scene:
        large = Raw(b'"' + b"x" * (9 * SLOT_BYTES) + b'"')
        await scene.herd(200, lambda n: f"slow-{n % 40}", payload=large)
        sizes = []
        for _ in range(30):
            await asyncio.sleep(1)
            sizes.append(scene.engine.recorder.slots_in_flight)
        # The first look does not know how large they are.
        assert max(sizes) <= 500 and 0 < max(sizes[6:]) <= 100
        scene.hosts.lateness_ms.clear()
        await scene.trickle(3, namespace="other")
        assert len(scene.hosts.lateness_ms["well"]) == 60 and scene.worst_ms() <= PROMPT_MS
        await asyncio.sleep(600)
        scene.check_ended()
