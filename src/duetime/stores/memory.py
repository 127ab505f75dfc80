"""A store in memory: the reference for the contract, for tests and for users' tests. Nothing survives the process.

It does the whole of each verb without awaiting, so every verb is atomic; it is as slow as a scan, which is enough for
the thousands of timers of a test.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from duetime import lifecycle
from duetime.clock import Clock
from duetime.errors import StoreError
from duetime.model import DEFAULT_NAMESPACE, Namespace, Status, Timer
from duetime.store import UNNAMED, About, Begun, Filter, Hint, Instance, Order, Page, Place, Query, Sort, Standing


class _Shard(Struct):
    owner_id: bytes | None = None
    version: int = 0
    lease_until: int = 0


class MemoryStore:
    def __init__(self, clock: Clock, *, shards: int = 64) -> None:
        self.shards = shards
        self._clock = clock
        self._timers: dict[tuple[str, str], Timer] = {}
        self._marks: dict[tuple[str, str], int] = {}  # in order of creation
        self._mark = 0
        self._shards = [_Shard() for _ in range(shards)]
        self._instances: dict[bytes, tuple[int, About]] = {}
        default = Namespace(name=DEFAULT_NAMESPACE, shards=shards, created_at=clock.now())
        self._namespaces = {default.name: default}

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def ping(self) -> None:
        pass

    async def failure(self) -> StoreError:
        await asyncio.Event().wait()
        raise AssertionError("memory does not fail")

    async def put(self, timer: Timer) -> Timer | None:
        key = timer.namespace, timer.id
        if key in self._timers:
            return self._timers[key]
        self._mark += 1
        self._timers[key], self._marks[key] = timer, self._mark
        return None

    async def put_many(self, timers: Sequence[Timer]) -> list[Timer | None]:
        return [await self.put(timer) for timer in timers]

    async def get(self, namespace: str, id: str) -> Timer | None:
        return self._timers.get((namespace, id))

    async def swap(self, before: Timer, after: Timer | None) -> bool:
        key = before.namespace, before.id
        there = self._timers.get(key)
        if there is None or there.revision != before.revision:
            return False
        if after is None:
            del self._timers[key]
        else:
            self._timers[key] = after
        return True

    async def find(self, query: Query) -> list[Timer]:
        found = [
            t
            for t in self._timers.values()
            if t.namespace == query.namespace and (query.status is None or t.status is query.status)
        ]
        if query.sort is Sort.EXECUTE_AT:
            found.sort(key=lambda t: t.execute_at)
        if query.descending:
            found.reverse()
        return found[query.offset : query.offset + query.limit]

    async def page(self, filter: Filter, limit: int, after: Place | None = None) -> Page:
        order = filter.order

        def place(timer: Timer) -> Place:
            mark = self._marks[timer.namespace, timer.id]
            value = {
                Order.NEWEST: mark,
                Order.SOONEST: timer.execute_at,
                Order.DUE: timer.fire_at,
                Order.DEADLINE: timer.deadline_at or 0,
                Order.FINISHED: timer.updated_at,
            }[order]
            return Place(order, value, mark)

        latest_first = order in (Order.NEWEST, Order.FINISHED)

        def rank(at: Place) -> tuple[int, int]:
            return (-at.value, -at.mark) if latest_first else (at.value, at.mark)

        found = sorted(((place(t), t) for t in self._timers.values() if filter.matches(t)), key=lambda x: rank(x[0]))
        behind = [(at, t) for at, t in found if after is None or rank(at) > rank(after)]
        return Page([t for _, t in behind[:limit]], behind[limit - 1][0] if len(behind) > limit else None)

    async def tally(self, namespace: str | None = None) -> dict[Status, int]:
        counts = Counter(t.status for t in self._timers.values() if namespace in (None, t.namespace))
        return {status: counts[status] for status in Status}

    async def count(self, filter: Filter, most: int) -> int:
        return min(most, sum(map(filter.matches, self._timers.values())))

    async def forecast(self, bounds: Sequence[int], most: int) -> list[int]:
        due = sorted(t.fire_at for t in self._timers.values() if t.status is Status.PENDING)
        places = [bisect_left(due, bound) for bound in bounds]
        return [min(most, end - start) for start, end in pairwise(places)]

    async def renew(self, owner_id: bytes, lease_ms: int, about: About = UNNAMED) -> Standing:
        now = self._clock.now()
        self._instances = {o: instance for o, instance in self._instances.items() if instance[0] > now}
        self._instances[owner_id] = now + lease_ms, about
        held = {}
        for number, shard in enumerate(self._shards):
            if shard.owner_id == owner_id:
                shard.lease_until = now + lease_ms
                held[number] = shard.version
        free = frozenset(n for n, shard in enumerate(self._shards) if shard.lease_until <= now)
        serving = frozenset(o for o, (_, about) in self._instances.items() if about.serving)
        others = (s.lease_until for s in self._shards if s.lease_until > now and s.owner_id != owner_id)
        return Standing(now, held, serving, free, min(others, default=None))

    async def claim(self, owner_id: bytes, shards: Collection[int], lease_ms: int) -> dict[int, int]:
        now = self._clock.now()
        claimed = {}
        for number in shards:
            shard = self._shards[number]
            if shard.lease_until <= now or shard.owner_id == owner_id:
                shard.owner_id, shard.version, shard.lease_until = owner_id, shard.version + 1, now + lease_ms
                claimed[number] = shard.version
        return claimed

    async def release(self, owner_id: bytes, shards: Collection[int]) -> None:
        for number in shards:
            shard = self._shards[number]
            if shard.owner_id == owner_id:
                shard.owner_id, shard.lease_until = None, 0

    async def leave(self, owner_id: bytes) -> None:
        await self.release(owner_id, range(self.shards))
        self._instances.pop(owner_id, None)

    async def cluster(self) -> list[Instance]:
        now = self._clock.now()
        return [
            Instance(
                owner_id=owner_id,
                about=about,
                alive_until=until,
                shards=tuple(n for n, shard in enumerate(self._shards) if shard.owner_id == owner_id),
            )
            for owner_id, (until, about) in sorted(self._instances.items())
            if until > now
        ]

    def hint(self, hint: Hint) -> None:
        pass

    def on_hint(self, heard: Callable[[Hint], None]) -> None:
        pass

    async def begin(self, owner_id: bytes, held: Mapping[int, int], limit: int) -> Begun:
        now = self._clock.now()
        ours = {shard: version for shard, version in held.items() if self._fences(owner_id, shard, version)}
        due: list[tuple[int, Timer]] = []
        later: list[tuple[int, Timer]] = []
        for timer in self._timers.values():
            paused = self._namespaces[timer.namespace].paused
            if timer.shard not in ours or timer.status.final:
                continue
            if timer.status is Status.PENDING:
                if timer.fire_at > now:
                    later.append((timer.fire_at, timer))
                elif not paused:
                    due.append((timer.fire_at, timer))
            elif timer.version != ours[timer.shard] and timer.deadline_at is not None and not paused:
                (due if timer.deadline_at <= now else later).append((timer.deadline_at, timer))
        due.sort(key=lambda entry: entry[1].fire_at)
        begun = [lifecycle.begin(timer, now=now, version=ours[timer.shard]) for _, timer in due[:limit]]
        for timer in begun:
            self._timers[timer.namespace, timer.id] = timer
        next_at = now if len(due) > limit else min((at for at, _ in later), default=None)
        return Begun(begun, next_at, frozenset(held.keys() - ours.keys()))

    async def record(self, owner_id: bytes, changes: Sequence[tuple[Timer, Timer]]) -> list[bool]:
        return [
            self._fences(owner_id, before.shard, before.version) and await self.swap(before, after)
            for before, after in changes
        ]

    def _fences(self, owner_id: bytes, shard: int, version: int) -> bool:
        row = self._shards[shard]
        return row.owner_id == owner_id and row.version == version

    async def purge(self, *, retention_ms: int, limit: int) -> int:
        now = self._clock.now()

        def kept_ms(timer: Timer) -> int:
            own = self._namespaces[timer.namespace].retention_ms
            return retention_ms if own is None else own

        old = [key for key, t in self._timers.items() if t.status.final and t.updated_at < now - kept_ms(t)]
        for key in old[:limit]:
            del self._timers[key]
        return len(old[:limit])

    async def namespaces(self) -> list[Namespace]:
        return list(self._namespaces.values())

    async def put_namespace(self, namespace: Namespace) -> Namespace | None:
        there = self._namespaces.setdefault(namespace.name, namespace)
        return None if there is namespace else there

    async def swap_namespace(self, before: Namespace, after: Namespace) -> bool:
        if self._namespaces.get(before.name) != before:
            return False
        self._namespaces[before.name] = after
        return True
