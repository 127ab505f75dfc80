"""A simulated world in one thread: an event loop whose time jumps, machines that crash and stall, and a network that
loses responses.

Nothing here sleeps: when every task waits, the time jumps to the next timer of the loop. All randomness comes from one
seeded generator, so a seed determines the whole history.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from duetime.clock import SystemClock
from duetime.errors import StoreIndeterminate, StoreUnavailable
from duetime.instants import Instant
from duetime.model import Outcome, OutcomeKind, Target, Timer, Unsent, destination_of
from duetime.store import UNNAMED, About, Begun, Lanes, Portion, Renewal
from duetime.stores.memory import MemoryStore

T = TypeVar("T")

EPOCH_MS = Instant(1_800_000_000_000)


class _JumpingSelector(selectors.SelectSelector):
    """A selector that never waits: it adds the time that the loop would have slept to its clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everything waits for something that will never happen")
        if not ready and timeout:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


class Machine(SystemClock):
    """One computer: its clock, which may be wrong, and whether it is stopped."""

    def __init__(self, skew_ms: int = 0) -> None:
        self.skew_ms = skew_ms
        self._running = asyncio.Event()
        self._running.set()

    def now(self) -> Instant:
        return EPOCH_MS + int(asyncio.get_running_loop().time() * 1000) + self.skew_ms

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float, until: asyncio.Event | None = None) -> None:
        await super().sleep(seconds, until)
        await self.gate()

    async def gate(self) -> None:
        """Block here while the machine is stopped."""
        await self._running.wait()

    async def stall(self, seconds: float) -> None:
        self._running.clear()
        await asyncio.sleep(seconds)
        self._running.set()


class Faults:
    """The probability of each fault, for every call."""

    def __init__(self, seed: int, level: float) -> None:
        self.random = random.Random(seed)
        self.level = level
        self.looks_by_lane = 0

    def strikes(self, chance: float) -> bool:
        return self.random.random() < chance * self.level


class FaultyStore:
    """A machine's connection to the shared store: slow, and sometimes it breaks before or after the write.

    It also checks the store: everything that ``begin`` and ``record`` let through must have been fenced, and no timer
    of a paused namespace is begun.
    """

    def __init__(self, store: MemoryStore, machine: Machine, faults: Faults) -> None:
        self._store = store
        self._machine = machine
        self._faults = faults
        self.shards = store.shards

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def _call(self, verb: Callable[[], Awaitable[T]]) -> T:
        draw = self._faults.random
        await self._machine.gate()
        await asyncio.sleep(draw.random() * 0.01)
        if self._faults.strikes(0.02):
            raise StoreUnavailable("the store refused the connection")
        if self._faults.strikes(0.01):
            raise StoreIndeterminate("the request was lost")
        answer = await verb()
        await asyncio.sleep(draw.random() * 0.01)
        await self._machine.gate()
        if self._faults.strikes(0.01):
            raise StoreIndeterminate("the answer was lost")
        return answer

    def _owns(self, owner_id: bytes, shard: int, version: int) -> bool:
        row = self._store._shards[shard]
        return (row.owner_id, row.version) == (owner_id, version)

    async def put(self, timer: Timer) -> Timer | None:
        return await self._call(lambda: self._store.put(timer))

    async def get(self, namespace: str, id: str) -> Timer | None:
        return await self._call(lambda: self._store.get(namespace, id))

    async def swap(self, before: Timer, after: Timer | None) -> bool:
        return await self._call(lambda: self._store.swap(before, after))

    async def renew(self, owner_id: bytes, lease_ms: int, about: About = UNNAMED) -> Renewal:
        return await self._call(lambda: self._store.renew(owner_id, lease_ms, about))

    async def claim(self, owner_id: bytes, shards: Collection[int], lease_ms: int) -> dict[int, int]:
        return await self._call(lambda: self._store.claim(owner_id, shards, lease_ms))

    async def release(self, owner_id: bytes, shards: Collection[int]) -> None:
        await self._call(lambda: self._store.release(owner_id, shards))

    async def leave(self, owner_id: bytes) -> None:
        await self._call(lambda: self._store.leave(owner_id))

    async def begin(self, owner_id: bytes, held: Mapping[int, int], limit: int, **limits: Any) -> Begun:
        return await self._begin(owner_id, lambda: self._store.begin(owner_id, held, limit, **limits))

    async def begin_lanes(
        self, owner_id: bytes, held: Mapping[int, int], limit: int, portions: Sequence[Portion]
    ) -> Begun:
        self._faults.looks_by_lane += 1
        return await self._begin(owner_id, lambda: self._store.begin_lanes(owner_id, held, limit, portions))

    async def lanes(self, until: Instant, **limits: Any) -> Lanes:
        return await self._call(lambda: self._store.lanes(until, **limits))

    async def _begin(self, owner_id: bytes, begin: Callable[[], Awaitable[Begun]]) -> Begun:
        async def watched() -> Begun:
            begun = await begin()
            for timer in begun.timers:
                assert self._owns(owner_id, timer.shard, timer.version), f"unfenced begin of {timer.id}"
                assert not self._store._namespaces[timer.namespace].paused, f"{timer.id} was begun during a pause"
            return begun

        return await self._call(watched)

    async def record(self, owner_id: bytes, changes: Sequence[tuple[Timer, Timer]]) -> Sequence[bool | None]:
        async def watched() -> Sequence[bool | None]:
            recorded = await self._store.record(owner_id, changes)
            for (before, _), done in zip(changes, recorded, strict=True):
                assert not done or self._owns(owner_id, before.shard, before.version), f"unfenced record of {before.id}"
            return recorded

        return await self._call(watched)


class Received:
    """One request as the receiver saw it."""

    def __init__(self, timer: Timer, at: int) -> None:
        self.timer = timer
        self.at = at
        self.attempt = timer.attempt
        self.delivery_id = timer.delivery_id


class Network:
    """The receivers of all callbacks, and the connections to them.

    Faults may lose what was done. Besides, there is trouble that must lose nothing: receivers that never respond, and
    attempts that are not sent because of a shortage.
    """

    def __init__(self, clock: Machine, faults: Faults) -> None:
        self.received: dict[str, list[Received]] = {}
        self.left: dict[str, list[Timer]] = {}
        """The attempts that were sent, received or not."""
        self.hanging: set[str] = set()
        self.unsent = 0.0
        """The probability that an attempt is not sent."""
        self._clock = clock
        self._faults = faults

    async def send(self, timer: Timer) -> Outcome:
        draw = self._faults.random
        await asyncio.sleep(draw.random() * 0.05)
        if draw.random() < self.unsent:
            cause = draw.choice([Unsent.DESCRIPTORS, Unsent.LOOKUPS, Unsent.INTERNAL, Unsent.BROKER])
            return Outcome(kind=OutcomeKind.UNSENT, cause=cause, error="something has run out")
        self.left.setdefault(timer.id, []).append(timer)
        if destination_of(timer.definition.target) in self.hanging:
            await asyncio.Event().wait()
        if self._faults.strikes(0.05):
            return Outcome(kind=OutcomeKind.UNREACHABLE, error="connection refused")
        self.received.setdefault(timer.id, []).append(Received(timer, self._clock.now()))
        await asyncio.sleep(draw.random() * (3.0 if self._faults.strikes(0.05) else 0.05))
        if self._faults.strikes(0.1):
            return Outcome(kind=OutcomeKind.ANSWERED, status=500, error="HTTP 500")
        return Outcome(kind=OutcomeKind.ANSWERED, status=200, body=b'{"ok": true}')


class Postman:
    """The deliverer of one machine."""

    def __init__(self, network: Network, machine: Machine) -> None:
        self._network = network
        self._machine = machine

    async def deliver(self, timer: Timer, timeout_ms: int) -> Outcome:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                outcome = await self._network.send(timer)
        except TimeoutError:
            outcome = Outcome(kind=OutcomeKind.TIMED_OUT, error="no answer")
        await self._machine.gate()
        return outcome

    async def check(self, target: Target) -> None:
        pass

    async def close(self) -> None:
        pass
