"""A store in memory: the reference implementation of the contract, for our tests and those of users. Nothing survives
the process.

Methods do not await anything inside, so each is atomic. Most of them scan all timers, which is fast enough for the
thousands of timers of a test.
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
from duetime.errors import StoreError, TooManyNamespaces
from duetime.instants import EPOCH, Instant
from duetime.model import DEFAULT_NAMESPACE, Namespace, Status, Timer, destination_of
from duetime.store import (
    ALL_ABILITIES,
    BEGIN_BYTES_MAX,
    ENDED_SESSIONS_MAX,
    LANES_PAGE,
    NO_LANE_LIMITS,
    UNNAMED,
    Abilities,
    About,
    Begun,
    Cursor,
    Filter,
    Hint,
    Instance,
    Lane,
    Lanes,
    Order,
    Overdue,
    Page,
    Portion,
    Quarantine,
    Query,
    Renewal,
    Sort,
    Taken,
)
from duetime.stores.byte_budget import brief, fitting, size_of
from duetime.stores.fair_shares import deal
from duetime.stores.sql.page_orders import seq_of


class _Shard(Struct):
    owner_id: bytes | None = None
    version: int = 0
    lease_until: Instant = EPOCH


class MemoryStore:
    def __init__(self, clock: Clock, *, shards: int = 64, abilities: Abilities = ALL_ABILITIES) -> None:
        """With fewer ``abilities`` it simulates a store that has only these: calls that need more fail."""
        self.shards = shards
        self.abilities = abilities
        self._clock = clock
        self._timers: dict[tuple[str, str], Timer] = {}
        self._marks: dict[tuple[str, str], int] = {}  # in order of creation
        self._mark = 0
        self._shards = [_Shard() for _ in range(shards)]
        self._instances: dict[bytes, tuple[Instant, About]] = {}
        default = Namespace(name=DEFAULT_NAMESPACE, shards=shards, created_at=clock.now())
        self._namespaces = {default.name: default}
        # Session id → expiry. The entry with an empty id ends all sessions that expire no later than its value.
        self._ended_sessions: dict[bytes, int] = {}

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

    async def put_many(self, timers: Sequence[Timer]) -> list[Timer | Taken | None]:
        existing = [await self.put(timer) for timer in timers]
        taken = [place for place, timer in enumerate(existing) if timer is not None]
        whole = set(taken[: fitting([size_of(timer) for timer in existing if timer is not None])])
        return [
            timer if timer is None or place in whole else Taken(timer.fingerprint)
            for place, timer in enumerate(existing)
        ]

    async def get(self, namespace: str, id: str) -> Timer | None:
        return self._timers.get((namespace, id))

    async def swap(self, before: Timer, after: Timer | None) -> bool:
        key = before.namespace, before.id
        stored = self._timers.get(key)
        if stored is None or stored.revision != before.revision:
            return False
        if after is None:
            del self._timers[key]
        else:
            self._timers[key] = after
        return True

    async def page_by_offset(self, query: Query) -> list[Timer]:
        self.abilities.check_query(query)
        found = [
            t
            for t in self._timers.values()
            if t.namespace == query.namespace and (query.status is None or t.status is query.status)
        ]
        if query.sort is Sort.EXECUTE_AT:
            found.sort(key=lambda t: t.execute_at)
        if query.descending:
            found.reverse()
        page = found[query.offset : query.offset + query.limit]
        return [brief(timer) for timer in page] if query.brief else page

    async def page(self, filter: Filter, limit: int, after: Cursor | None = None) -> Page:
        self.abilities.check_filter(filter)
        order = filter.order

        def place(timer: Timer) -> Cursor:
            mark = self._marks[timer.namespace, timer.id]
            value = {
                Order.NEWEST: mark,
                Order.SOONEST: timer.execute_at,
                Order.DUE: timer.fire_at,
                Order.DEADLINE: timer.deadline_at or 0,
                Order.FINISHED: timer.updated_at,
            }[order]
            return Cursor(order, value, mark)

        latest_first = order in (Order.NEWEST, Order.FINISHED)

        def rank(at: Cursor) -> tuple[int, int]:
            mark = seq_of(at)
            return (-at.value, -mark) if latest_first else (at.value, mark)

        found = sorted(((place(t), t) for t in self._timers.values() if filter.matches(t)), key=lambda x: rank(x[0]))
        behind = [(at, t) for at, t in found if after is None or rank(at) > rank(after)]
        count = fitting([size_of(t) for _, t in behind[:limit]])
        return Page([t for _, t in behind[:count]], behind[count - 1][0] if len(behind) > count else None)

    async def tally(self, namespace: str | None = None) -> dict[Status, int]:
        counts = Counter(t.status for t in self._timers.values() if namespace in (None, t.namespace))
        return {status: counts[status] for status in Status}

    async def count(self, filter: Filter, most: int) -> int:
        self.abilities.check_filter(filter)
        return min(most, sum(map(filter.matches, self._timers.values())))

    async def forecast(self, bounds: Sequence[Instant], most: int) -> list[int]:
        due = sorted(t.fire_at for t in self._timers.values() if t.status is Status.PENDING)
        places = [bisect_left(due, bound) for bound in bounds]
        return [min(most, end - start) for start, end in pairwise(places)]

    async def renew(self, owner_id: bytes, lease_ms: int, about: About = UNNAMED) -> Renewal:
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
        return Renewal(now=now, held=held, instances=serving, free=free, free_at=min(others, default=None))

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
                shard.owner_id, shard.lease_until = None, EPOCH

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

    async def begin(
        self,
        owner_id: bytes,
        held: Mapping[int, int],
        limit: int,
        *,
        lane_max: int | None = None,
        lane_limits: Mapping[int, int] = NO_LANE_LIMITS,
    ) -> Begun:
        now, ours, due, later = self._look(owner_id, held)
        taken: Counter[int] = Counter()
        chosen: list[Timer] = []
        more = False
        for timer in due:
            if lane_max is not None and taken[timer.lane] >= lane_limits.get(timer.lane, lane_max):
                continue
            if len(chosen) == limit:
                more = True
                break
            taken[timer.lane] += 1
            chosen.append(timer)
        within = fitting([size_of(timer) for timer in chosen], BEGIN_BYTES_MAX)
        chosen, more = chosen[:within], more or within < len(chosen)
        next_at = now if more else min((at for at, _ in later), default=None)
        return Begun(self._begun(chosen, ours, now), next_at, frozenset(held.keys() - ours.keys()), more)

    async def begin_lanes(
        self, owner_id: bytes, held: Mapping[int, int], limit: int, portions: Sequence[Portion]
    ) -> Begun:
        now, ours, due, later = self._look(owner_id, held)
        in_lanes = [[timer for timer in due if timer.lane == portion.lane] for portion in portions]
        wishes = [(min(p.most, len(timers)), p.share) for p, timers in zip(portions, in_lanes, strict=True)]
        counts = _afford(deal(limit, wishes), in_lanes, [portion.share for portion in portions])
        chosen = [timer for timers, count in zip(in_lanes, counts, strict=True) for timer in timers[:count]]
        left: dict[int, Instant] = {}
        for portion, timers, count in zip(portions, in_lanes, counts, strict=True):
            ahead = (
                timer.fire_at
                for _, timer in later
                if timer.lane == portion.lane and timer.status is Status.PENDING and not self._paused(timer)
            )
            if (at := timers[count].fire_at if count < len(timers) else min(ahead, default=None)) is not None:
                left[portion.lane] = at
        begun = self._begun(sorted(chosen, key=lambda timer: timer.fire_at), ours, now)
        next_at = min(left.values(), default=None)
        return Begun(begun, next_at, frozenset(held.keys() - ours.keys()), False, left)

    def _look(
        self, owner_id: bytes, held: Mapping[int, int]
    ) -> tuple[Instant, dict[int, int], list[Timer], list[tuple[Instant, Timer]]]:
        """Return the time, the shards that this owner holds, the timers due in them, oldest first, and those that will
        be due, each with its instant."""
        now = self._clock.now()
        ours = {shard: version for shard, version in held.items() if self._fences(owner_id, shard, version)}
        due: list[Timer] = []
        later: list[tuple[Instant, Timer]] = []
        for timer in self._timers.values():
            if timer.shard not in ours or timer.status.final:
                continue
            if timer.status is Status.PENDING:
                if timer.fire_at > now:
                    later.append((timer.fire_at, timer))
                elif not self._paused(timer):
                    due.append(timer)
            elif timer.version != ours[timer.shard] and timer.deadline_at is not None and not self._paused(timer):
                if timer.deadline_at <= now:
                    due.append(timer)
                else:
                    later.append((timer.deadline_at, timer))
        due.sort(key=lambda timer: timer.fire_at)
        return now, ours, due, later

    def _paused(self, timer: Timer) -> bool:
        return self._namespaces[timer.namespace].paused

    def _begun(self, timers: Sequence[Timer], ours: Mapping[int, int], now: Instant) -> list[Timer]:
        begun = [lifecycle.begin(timer, now=now, version=ours[timer.shard]) for timer in timers]
        for timer in begun:
            self._timers[timer.namespace, timer.id] = timer
        return begun

    async def lanes(self, until: Instant, *, after: int = -1, limit: int = LANES_PAGE, due_max: int = 0) -> Lanes:
        now = self._clock.now()
        live = sorted((t for t in self._timers.values() if not t.status.final), key=lambda t: t.fire_at)
        pending = [t for t in live if t.status is Status.PENDING]
        first: dict[int, Timer] = {}
        for timer in live:
            if timer.deadline_at is None or timer.deadline_at <= now:
                first.setdefault(timer.lane, timer)
        some = sorted(lane for lane in first if lane > after)[:limit]
        found = [
            Lane(lane, timer.namespace, destination_of(timer.definition.target), timer.fire_at)
            for lane in some
            if (timer := first[lane]).fire_at <= until and not self._paused(timer)
        ]
        due = sum(timer.fire_at <= now for timer in pending)
        return Lanes(found, min(due, due_max), some[-1] if len(some) == limit else None)

    async def overdue(self, shards: Collection[int], before: Instant, most: int) -> list[Overdue]:
        lanes: dict[int, list[Timer]] = {}
        for timer in self._timers.values():
            if timer.status is Status.PENDING and timer.fire_at < before and timer.shard in shards:
                lanes.setdefault(timer.lane, []).append(timer)
        return [
            Overdue(
                *(timers[0].namespace, destination_of(timers[0].definition.target), self._paused(timers[0])),
                *(min(timer.fire_at for timer in timers), min(most, len(timers))),
            )
            for timers in lanes.values()
        ]

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

    async def namespace(self, name: str) -> Namespace | None:
        return self._namespaces.get(name)

    async def put_namespace(self, namespace: Namespace, most: int | None = None) -> Namespace | None:
        if namespace.name in self._namespaces:
            return self._namespaces[namespace.name]
        if most is not None and len(self._namespaces) >= most:
            raise TooManyNamespaces(most)
        self._namespaces[namespace.name] = namespace
        return None

    async def swap_namespace(self, before: Namespace, after: Namespace) -> bool:
        stored = self._namespaces.get(before.name)
        if stored is None or stored.revision != before.revision:
            return False
        self._namespaces[before.name] = after
        return True

    async def end_session(self, id: bytes, ends_at: Instant, *, forget_before: Instant) -> None:
        kept = {other: at for other, at in self._ended_sessions.items() if at >= forget_before}
        if len(kept) >= ENDED_SESSIONS_MAX:
            kept = {b"": max(kept.values())}
        self._ended_sessions = {**kept, id: ends_at}

    async def session_ended(self, id: bytes, ends_at: Instant) -> bool:
        return id in self._ended_sessions or ends_at <= self._ended_sessions.get(b"", -1)

    async def quarantine(self) -> Quarantine:
        return Quarantine()  # Nothing is decoded, so every timer can be read.


def _afford(counts: Sequence[int], in_lanes: Sequence[Sequence[Timer]], shares: Sequence[float]) -> list[int]:
    """Reduce the counts so that the timers fit the byte limit, by the share of each lane."""
    turns = sorted(
        ((place + 1) / share, timer.fire_at, lane, size_of(timer))
        for lane, (count, timers, share) in enumerate(zip(counts, in_lanes, shares, strict=True))
        for place, timer in enumerate(timers[:count])
    )
    within = fitting([size for *_, size in turns], BEGIN_BYTES_MAX)
    taken = Counter(lane for _, _, lane, _ in turns[:within])
    return [taken[lane] for lane in range(len(counts))]
