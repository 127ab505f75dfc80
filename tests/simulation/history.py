"""One seeded history: clients create, cancel and move timers, instances fire them, and every kind of fault happens in
between. Then the faults stop, and the ledger is checked.

Timers belong to several namespaces, one of which is paused from time to time, and go to several receivers, some of
which hang. They fall due in waves, and an instance has few slots, so it has to begin timers by lane.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from duetime.engine.engine import Engine, EngineOptions
from duetime.errors import StoreError, TimerNotPending
from duetime.instants import EPOCH
from duetime.model import Definition, HttpTarget, Namespace, RetryPolicy, Status, Timer, destination_of
from duetime.namespaces import Namespaces
from duetime.service import NewTimer, Service
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry
from tests.simulation.world import Faults, FaultyStore, Machine, Network, Postman, VirtualLoop

T = TypeVar("T")

LEASE_MS = 3_000
SHARDS = 16
INSTANCES = 3
TIMERS = 200
NAMESPACES = {"default": 1, "heavy": 3, "paused": 1}
"""Namespaces with their weights."""
HOSTS = [f"http://receiver-{n}/" for n in range(8)]
WAVE_MS = 10_000
UNSENT = 0.1
OPTIONS = EngineOptions(lease_ms=LEASE_MS, look_interval_ms=500, in_flight_max=6, per_destination_max=3, begin_max=20)
STORM_SECONDS = 60.0
CALM_SECONDS = 240.0
RETRY = RetryPolicy(max_retries=8, initial_interval_ms=200, max_interval_ms=2_000)


class Ledger:
    """What clients were told, and therefore what must hold."""

    def __init__(self) -> None:
        self.created: set[str] = set()
        self.canceled_at: dict[str, int] = {}
        self.moved: dict[str, list[tuple[int, int]]] = {}  # id → (acknowledged at, due at)


class History:
    def __init__(self, seed: int, *, level: float = 1.0, store: Callable[[Machine], MemoryStore] | None = None) -> None:
        self.seed = seed
        self.level = level
        self._make_store = store or (lambda clock: MemoryStore(clock, shards=SHARDS))

    def run(self) -> None:
        """Run the history; raises ``AssertionError`` if a guarantee was broken."""
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            try:
                runner.run(self._live())
            except Exception as broken:
                error: BaseException = broken
                while isinstance(error, BaseExceptionGroup):
                    error = error.exceptions[0]
                kind = AssertionError if isinstance(error, AssertionError) else RuntimeError
                raise kind(f"seed {self.seed}, faults × {self.level}: {error!r}") from error

    async def _live(self) -> None:
        self.random = random.Random(self.seed)
        self.faults = Faults(self.seed + 1, self.level)
        self.clock = Machine()
        self.store = self._make_store(self.clock)
        self.network = Network(self.clock, self.faults)
        self.network.unsent = UNSENT
        for name, weight in NAMESPACES.items():
            if name != "default":
                namespace = Namespace(name=name, shards=SHARDS, created_at=self.clock.now(), weight=weight)
                await self.store.put_namespace(namespace)
        self.ledger = Ledger()
        self.storm = True
        self.engines: dict[int, Engine] = {}
        self._instances = [asyncio.create_task(self._instance(n)) for n in range(INSTANCES)]
        clients = [asyncio.create_task(self._client(n)) for n in range(TIMERS)]
        others = [asyncio.create_task(each()) for each in (self._thief, self._pauser, self._hanger)]
        await asyncio.sleep(STORM_SECONDS)
        self.storm, self.faults.level, self.network.unsent = False, 0.0, 0.0
        await asyncio.gather(*others, *clients)
        await self._settled()
        for engine in self.engines.values():
            engine.drain()
        await asyncio.gather(*self._instances)
        self._check()

    # Instances.

    async def _instance(self, number: int) -> None:
        """Run one process after another, each ended by a crash, until the faults stop."""
        while True:
            skewed = self.faults.strikes(0.1)
            machine = Machine(
                self.random.choice([-5_000, 5_000, 3_600_000]) if skewed else self.random.randint(-50, 50)
            )
            engine = self.engines[number] = Engine(
                FaultyStore(self.store, machine, self.faults),
                {HttpTarget: Postman(self.network, machine)},
                machine,
                Telemetry(),
                OPTIONS,
                uniform=self.random.uniform,
                owner_id=self.random.randbytes(16),
                weight=NAMESPACES.__getitem__,
            )
            running = asyncio.create_task(engine.run())
            while self.storm and not running.done():
                await asyncio.sleep(self.random.uniform(0.5, 8))
                if self.faults.strikes(0.25):
                    await machine.stall(self.random.uniform(0.1, 3 * LEASE_MS / 1000))
                if self.faults.strikes(0.15):
                    engine.drain()
                    break
                if self.faults.strikes(0.25):
                    running.cancel()
                    break
            if not self.storm:
                machine.skew_ms = 0
            try:
                await running
            except asyncio.CancelledError:
                if not running.cancelled():
                    raise
            if not self.storm:
                return

    async def _thief(self) -> None:
        """End leases early, as after a failover to a replica that lost the latest writes."""
        while self.storm:
            await asyncio.sleep(self.random.uniform(1, 10))
            if self.faults.strikes(0.3):
                for shard in self.random.sample(self.store._shards, 4):
                    shard.lease_until = EPOCH

    async def _pauser(self) -> None:
        while self.storm:
            for paused in (True, False):
                await asyncio.sleep(self.random.uniform(1, 10))
                self.store._namespaces["paused"] = msgspec.structs.replace(
                    self.store._namespaces["paused"], paused=paused
                )
                self._nudge()

    async def _hanger(self) -> None:
        """Make some receivers hang for a while."""
        while self.storm:
            hosts = self.random.sample(HOSTS, self.random.randint(0, 4))
            self.network.hanging = {destination_of(HttpTarget(url=url)) for url in hosts}
            await asyncio.sleep(self.random.uniform(3, 15))
        self.network.hanging = set()

    # Clients.

    async def _until_told(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Repeat a request with the same id until there is a response."""
        while True:
            try:
                return await ask()
            except StoreError:
                await asyncio.sleep(0.1)

    async def _client(self, number: int) -> None:
        await asyncio.sleep(self.random.uniform(0, STORM_SECONDS * 0.8))
        machine = Machine()
        store = FaultyStore(self.store, machine, self.faults)
        namespaces = Namespaces(store, machine, self._nudge)
        service = Service(
            store,
            namespaces,
            {HttpTarget: Postman(self.network, machine)},
            machine,
            self._nudge,
        )
        await namespaces.start()
        id = f"timer-{number}"
        namespace = self.random.choice(list(NAMESPACES))
        execute_at = self.clock.now() + self.random.randint(0, 15_000)
        if self.random.random() < 0.5:
            execute_at += -execute_at % WAVE_MS
        target = HttpTarget(url=self.random.choice(HOSTS))
        definition = Definition(target=target, retry=RETRY, timeout_ms=2_000)
        await self._until_told(
            lambda: service.create(NewTimer(namespace=namespace, id=id, execute_at=execute_at, definition=definition))
        )
        self.ledger.created.add(id)
        self.ledger.moved[id] = [(0, execute_at)]
        if self.random.random() < 0.5:
            await asyncio.sleep(self.random.uniform(0, 15))
        else:  # Just when it fires, for a race.
            await asyncio.sleep(max(0.0, (execute_at - self.clock.now()) / 1000 + self.random.uniform(-0.05, 0.05)))
        choice = self.random.random()
        try:
            if choice < 0.25:
                await self._until_told(lambda: service.cancel(namespace, id))
                self.ledger.canceled_at[id] = self.clock.now()
            elif choice < 0.5:
                moved_to = self.clock.now() + self.random.randint(0, 15_000)
                await self._until_told(
                    lambda: service.update(namespace, id, execute_at=moved_to, change=lambda same: same)
                )
                self.ledger.moved[id].append((self.clock.now(), moved_to))
        except TimerNotPending:
            pass  # The request lost the race and failed.

    def _nudge(self, *timers: Timer) -> None:
        for engine in self.engines.values():
            engine.nudge(*timers)

    # The check.

    async def _settled(self) -> None:
        until = self.clock.monotonic() + CALM_SECONDS
        while live := [timer.id for timer in self.store._timers.values() if not timer.status.final]:
            assert self.clock.monotonic() < until, f"never finished: {live}"
            assert all(not task.done() or task.exception() is None for task in self._instances)
            await asyncio.sleep(0.5)

    def _check(self) -> None:
        timers = {timer.id: timer for timer in self.store._timers.values()}
        for id in self.ledger.created:
            assert id in timers, f"{id} was acknowledged and is lost"
            self._check_one(timers[id])

    def _check_one(self, timer: Timer) -> None:
        id = timer.id
        received = self.network.received.get(id, [])
        told = self.ledger.moved[id]
        assert timer.status.final, f"{id} was never finished"
        for one in received:
            # The last acknowledged state before this request was sent; a move in progress may have taken effect.
            due = [at for told_at, at in told if told_at <= one.at]
            assert one.at >= min(due[-1], one.timer.execute_at), f"{id} fired early"
            assert one.timer.execute_at in [at for _, at in told] or len(told) == 1, (
                f"{id} fired for a time it never had"
            )
        if id in self.ledger.canceled_at:
            assert timer.status is Status.CANCELED, f"{id} was canceled and is {timer.status}"
            late = [one for one in received if one.at > self.ledger.canceled_at[id]]
            assert not late, f"{id} fired after its cancel was acknowledged"
        if timer.status is Status.COMPLETED:
            assert received, f"{id} is completed and nobody received it"
        for firing in {one.timer.firing for one in received}:
            of_firing = [one for one in received if one.timer.firing == firing]
            assert len({one.delivery_id for one in of_firing}) == 1, f"{id}: one firing, several delivery ids"
            attempts = [one.attempt for one in of_firing]
            assert len(attempts) == len(set(attempts)), f"{id}: an attempt was sent twice"
        # Without lost outcomes, the deliveries equal the records.
        last = [one for one in received if one.timer.firing == timer.firing]
        unrecorded = timer.attempt - timer.failures - (timer.status is Status.COMPLETED)
        assert len(last) <= timer.attempt, f"{id}: more requests than attempts"
        assert unrecorded >= 0, f"{id}: {timer.attempt} attempts and {timer.failures} failures"
        if self.level == 0:
            left = [one.attempt for one in self.network.left.get(id, []) if one.firing == timer.firing]
            assert unrecorded == 0 and left == list(range(1, timer.attempt + 1)), f"{id}: attempts {left} were sent"
            assert len(last) == (timer.status is Status.COMPLETED), f"{id}: received {len(last)} times without a fault"
