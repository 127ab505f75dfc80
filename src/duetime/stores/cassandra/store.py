"""The Cassandra store: each method of the port reads what it needs and then writes a conditional batch per shard.

``partition`` explains why the batches are safe; this module decides what they contain, and reads again if one was
refused. A shard whose write has an unknown result is reported as such and does not affect the others.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from duetime import lifecycle
from duetime.clock import Clock, SystemClock
from duetime.errors import StoreError, StoreIndeterminate, StoreUnavailable
from duetime.instants import Instant
from duetime.model import DAY_MS, Namespace, Status, Timer, timer_uuid
from duetime.sharding import shard_of
from duetime.store import (
    LANES_PAGE,
    NO_LANE_LIMITS,
    UNNAMED,
    About,
    Begun,
    Cursor,
    Filter,
    Instance,
    Lanes,
    Overdue,
    Page,
    Portion,
    Query,
    Renewal,
    Taken,
)
from duetime.stores.byte_budget import fitting, in_parts, size_of
from duetime.stores.cassandra import ABILITIES, due, quarantine, schema, sessions
from duetime.stores.cassandra.backlog import Backlog
from duetime.stores.cassandra.cluster import Cluster
from duetime.stores.cassandra.driver import Call, Session, address_of
from duetime.stores.cassandra.namespaces import Namespaces
from duetime.stores.cassandra.node_clocks import NodeClocks
from duetime.stores.cassandra.opening import check
from duetime.stores.cassandra.partition import ABOVE_ALL, Partition, new_id
from duetime.stores.cassandra.rows import DELETE, Row, keys_of, leave, slot_of, write
from duetime.stores.cassandra.tallies import Tallies
from duetime.stores.connecting import wait_for_server
from duetime.stores.datagram_hints import DatagramHints
from duetime.stores.due_selection import Candidate, choose, choose_in_lanes
from duetime.stores.group_commit import GroupCommit
from duetime.stores.shared_store import SharedStore
from duetime.stores.unreadable import UNREADABLE, log_quarantined, timer_quarantined

log = logging.getLogger(__name__)

BEGIN_MAX = 1_000
BATCH_MAX = 100
BATCH_BYTES_MAX = 1 << 20
"""The maximum number of timers in one batch, and their maximum size, plus one timer."""
TRIES_MAX = 4
FORECAST_SHARDS = 8
"""From how many shards a forecast is estimated."""
TTL_SECONDS_MAX = 10 * 365 * 86_400
"""Longer retentions are unlimited: Cassandra stores no expiry after 2038."""

_UNREADABLE = (KeyError, *UNREADABLE)
_DUE_BETWEEN = (
    f"SELECT at FROM timers WHERE shard = ? AND kind = {schema.DUE} AND lane = 0 AND at >= ? AND at < ? LIMIT ?"
)


class _Attempts(NamedTuple):
    """What a begin did in one shard."""

    timers: list[Timer]
    raced: bool = False  # a timer or the shard has changed since it was read


class CassandraStore(SharedStore):
    abilities = ABILITIES
    _hints: DatagramHints
    _namespaces: Namespaces

    def __init__(
        self,
        url: str,
        *,
        shards: int = 64,
        retention_ms: int = 30 * DAY_MS,
        takeover_now: bool = False,
        virtual_clock: Clock | None = None,
    ) -> None:
        self._address = address_of(url)
        self._session = Session(self._address.hosts, self._address)
        super().__init__(Namespaces(self._session), DatagramHints(), shards=shards, retention_ms=retention_ms)
        self._clock = virtual_clock or SystemClock()
        self._virtual = virtual_clock is not None
        self._takeover_now = takeover_now
        self._partitions = [Partition(self._session, shard) for shard in range(shards)]
        self._clocks = NodeClocks(self._session, self._address.datacenter, self._clock)
        self._cluster = Cluster(self._session, self._partitions, self._hints, self._now)
        self._tallies = Tallies(self._session, self._ttl_of)
        self._puts: dict[int, GroupCommit[Timer, Timer | Taken | None]] = {}
        self._backlogs = [Backlog(self._session, partition) for partition in self._partitions]
        self._sweeping: asyncio.Task[None] | None = None
        self._seq = 0
        self._known: dict[str, Namespace] = {}

    async def open(self) -> None:
        await wait_for_server(self._session)
        await asyncio.to_thread(check, self._session, self._address)
        await asyncio.to_thread(self._session.use, self._address.keyspace)
        await asyncio.to_thread(schema.create, self._session, self._address.keyspace)
        key = await schema.fill(self._session, shards=self.shards, now=await self._now())
        await self._open_namespaces()
        restored = await quarantine.restore(self._session, self._partitions)
        for timer in restored:
            self._tallies.moved(None, timer)
        if restored:
            log.warning("restored %d quarantined timers, which this version can read", len(restored))
        self._tallies.start()
        await self._hints.start(key, self._address.hosts[0])

    async def close(self) -> None:
        for group in self._puts.values():
            await group.finish()
        if self._sweeping is not None:
            await asyncio.wait([self._sweeping])
        try:
            await self._tallies.stop()
        except StoreError as error:
            log.warning("the last counts are not written: %s", error)
        self._hints.close()
        await self._disconnect()

    async def ping(self) -> None:
        await self._open_namespaces()

    async def _version_and_time(self) -> tuple[str, int]:
        await asyncio.to_thread(self._session.connect)
        [(version,)] = await self._session.read("SELECT release_version FROM system.local")
        return f"Cassandra {version}", await self._clocks.now()

    async def _disconnect(self) -> None:
        await asyncio.to_thread(self._session.close)

    async def _now(self) -> Instant:
        return self._clock.now() if self._virtual else await self._clocks.now()

    async def _open_namespaces(self) -> dict[str, Namespace]:
        """The readable namespaces by name."""
        self._known = {namespace.name: namespace for namespace in await self.namespaces()}
        return self._known

    def _ttl_of(self, namespace: str) -> int:
        """For how many seconds a final timer of this namespace is kept; 0: forever."""
        if namespace in self._namespaces.unreadable:
            return 0
        known = self._known.get(namespace)
        kept_ms = self._retention_ms if known is None or known.retention_ms is None else known.retention_ms
        seconds = -(-kept_ms // 1000)
        return 0 if seconds > TTL_SECONDS_MAX else max(1, seconds)

    # Timers.

    async def put(self, timer: Timer) -> Timer | None:
        group = self._puts.get(timer.shard)
        if group is None:
            shard = timer.shard
            group = GroupCommit(
                lambda timers: self._put_in(shard, timers), batch_max=BATCH_MAX, size=size_of, size_max=BATCH_BYTES_MAX
            )
            self._puts[shard] = group
        existing = await group(timer)
        while isinstance(existing, Taken):
            existing = await self._get(timer.shard, timer.namespace, timer.id) or await group(timer)
        return existing

    async def put_many(self, timers: Sequence[Timer]) -> list[Timer | Taken | None]:
        places: dict[int, list[int]] = {}
        for place, timer in enumerate(timers):
            places.setdefault(timer.shard, []).append(place)

        async def put_in(shard: int, some: Sequence[int]) -> None:
            sizes = [size_of(timers[place]) for place in some]
            for part in _parts(some, sizes):
                found = await self._put_in(shard, [timers[place] for place in part])
                results.update(zip(part, found, strict=True))

        results: dict[int, Timer | Taken | None] = {}
        await due.each([put_in(*each) for each in places.items()])
        taken = [place for place in range(len(timers)) if isinstance(results[place], Timer)]
        whole = set(taken[: fitting([size_of(results[place]) for place in taken])])  # type: ignore[arg-type]
        return [
            Taken(found.fingerprint) if isinstance(found := results[place], Timer) and place not in whole else found
            for place in range(len(timers))
        ]

    async def _put_in(self, shard: int, timers: Sequence[Timer]) -> list[Timer | Taken | None]:
        """Insert the timers whose identity is free, and find the existing timer for each of the others."""
        partition = self._partitions[shard]
        results: dict[int, Timer | Taken | None] = {}
        marks = [self._mark() for _ in timers]
        async with partition.lock:
            for _ in range(TRIES_MAX + 1):
                new: dict[bytes, int] = {}  # A batch may contain an identity twice; then the second finds the first.
                for place, timer in enumerate(timers):
                    if place not in results:
                        new.setdefault(timer.uuid, place)
                if not new:
                    return [results[place] for place in range(len(timers))]
                id, calls, lowest = new_id(), [], ABOVE_ALL
                for place in new.values():
                    timer = timers[place]
                    slot = slot_of(timer, partition.floor)
                    lowest = lowest if slot is None else min(lowest, slot)
                    ttl = self._ttl_of(timer.namespace) if slot is None else 0
                    calls += write(timer, mark=marks[place], slot=slot, writer=id, ttl=ttl, before=None)
                if await partition.unfenced(id, calls, lowest):
                    for place in new.values():
                        results[place] = None
                        self._tallies.moved(None, timers[place])
                    continue
                await partition.state()
                rows = await partition.rows(list(new))
                for place, timer in enumerate(timers):
                    if place not in results and (row := rows.get(timer.uuid)):
                        try:
                            results[place] = row.timer
                        except _UNREADABLE:
                            results[place] = Taken(row.fingerprint)
        raise StoreUnavailable("the timer keeps changing; try again")

    def _mark(self) -> int:
        """A number in the order of creation. Random low bits keep the numbers of different instances apart."""
        self._seq = max(self._seq + 1, (self._clock.now() << 20) + random.getrandbits(18))
        return self._seq

    async def get(self, namespace: str, id: str) -> Timer | None:
        shard = await self._shard_of(namespace, id)
        return None if shard is None else await self._get(shard, namespace, id)

    async def _shard_of(self, namespace: str, id: str) -> int | None:
        """The shard of a timer; None if its namespace does not exist."""
        known = self._known.get(namespace) or await self.namespace(namespace)
        return None if known is None else shard_of(namespace, id, namespace_shards=known.shards, shards=self.shards)

    async def _get(self, shard: int, namespace: str, id: str) -> Timer | None:
        uuid = timer_uuid(namespace, id)
        row = (await self._partitions[shard].rows([uuid])).get(uuid)
        try:
            return row and row.timer
        except _UNREADABLE:
            raise timer_quarantined(namespace, id) from None

    async def swap(self, before: Timer, after: Timer | None) -> bool:
        partition = self._partitions[before.shard]
        uuid = before.uuid
        async with partition.lock:
            for _ in range(TRIES_MAX):
                row = (await partition.rows([uuid])).get(uuid)
                if row is None or row.revision != before.revision:
                    return False
                id = new_id()
                calls, lowest = self._change(partition, row, before.lane, after, id)
                if after is None:
                    calls.append(Call(DELETE, (partition.shard, uuid, row.revision)))
                if await partition.unfenced(id, calls, lowest):
                    self._tallies.moved(before, after)
                    return True
                await partition.state()
        raise StoreUnavailable("the timer keeps changing; try again")

    def _change(
        self, partition: Partition, row: Row, lane: int, after: Timer | None, writer: bytes
    ) -> tuple[list[Call], int]:
        """The statements that replace a timer and its entries, and the lowest slot of an entry."""
        was = keys_of(row.status, lane, row.slot)
        if after is None:
            return leave(partition.shard, row.uuid, was, []), ABOVE_ALL
        slot = slot_of(after, partition.floor)
        ttl = self._ttl_of(after.namespace) if slot is None else 0
        calls = write(after, mark=row.mark, slot=slot, writer=writer, ttl=ttl, before=row.revision)
        calls += leave(partition.shard, row.uuid, was, keys_of(after.status, after.lane, slot))
        return calls, ABOVE_ALL if slot is None else slot

    # Lists: none yet.

    async def page_by_offset(self, query: Query) -> list[Timer]:
        self.abilities.check_query(query)
        raise AssertionError("unreachable: this store has no order")

    async def page(self, filter: Filter, limit: int, after: Cursor | None = None) -> Page:
        self.abilities.check_filter(filter)
        raise AssertionError("unreachable: this store has no order")

    async def count(self, filter: Filter, most: int) -> int:
        self.abilities.check_filter(filter)
        raise AssertionError("unreachable: this store has no order")

    async def tally(self, namespace: str | None = None) -> dict[Status, int]:
        return await self._tallies.read(namespace)

    async def forecast(self, bounds: Sequence[Instant], most: int) -> list[int]:
        shards = range(0, self.shards, max(1, self.shards // FORECAST_SHARDS))
        spans = list(pairwise(bounds))
        found = await due.each(
            [self._session.read(_DUE_BETWEEN, shard, *span, most) for span in spans for shard in shards]
        )
        counts = [sum(map(len, found[place * len(shards) : (place + 1) * len(shards)])) for place in range(len(spans))]
        return [min(most, count * self.shards // len(shards)) for count in counts]

    # Shards and attempts.

    async def renew(self, owner_id: bytes, lease_ms: int, about: About = UNNAMED) -> Renewal:
        return await self._cluster.renew(owner_id, lease_ms, about)

    async def claim(self, owner_id: bytes, shards: Collection[int], lease_ms: int) -> dict[int, int]:
        return await self._cluster.claim(owner_id, shards, lease_ms)

    async def release(self, owner_id: bytes, shards: Collection[int]) -> None:
        await self._cluster.release(owner_id, shards)

    async def leave(self, owner_id: bytes) -> None:
        await self._cluster.release(owner_id, None)

    async def cluster(self) -> list[Instance]:
        return await self._cluster.instances()

    async def begin(
        self,
        owner_id: bytes,
        held: Mapping[int, int],
        limit: int,
        *,
        lane_max: int | None = None,
        lane_limits: Mapping[int, int] = NO_LANE_LIMITS,
    ) -> Begun:
        poll = await self._poll(owner_id, held)
        found, beyond = await poll.due(limit, lane_max, lane_limits)
        chosen, more = choose(found, min(limit, BEGIN_MAX), lane_max, lane_limits)
        timers, raced, unknown = await self._begin(owner_id, poll, chosen)
        more = more or beyond or raced
        next_at: Instant | None = poll.now
        if not more:
            try:
                next_at = await poll.next_at()
            except StoreUnavailable:
                if not timers:
                    raise
                # The timers were begun and must be returned. ``next_at`` is now, so that the engine polls again.
        return Begun(timers, next_at, frozenset(held.keys() - poll.ours.keys()), more, unknown=unknown)

    async def begin_lanes(
        self, owner_id: bytes, held: Mapping[int, int], limit: int, portions: Sequence[Portion]
    ) -> Begun:
        poll = await self._poll(owner_id, held)
        in_lanes, left = await poll.due_in(portions)
        chosen, counts = choose_in_lanes(in_lanes, min(limit, BEGIN_MAX), portions)
        timers, _, unknown = await self._begin(owner_id, poll, chosen)
        begun = {timer.uuid for timer in timers}
        for portion, found, count in zip(portions, in_lanes, counts, strict=True):
            rest = [each for place, each in enumerate(found) if place >= count or each.uuid not in begun]
            if rest:
                left[portion.lane] = rest[0].fire_at
        refused = frozenset(held.keys() - poll.ours.keys())
        return Begun(timers, min(left.values(), default=None), refused, False, left, unknown)

    async def _poll(self, owner_id: bytes, held: Mapping[int, int]) -> due.Poll:
        paused = await self._held_back()
        poll = due.Poll(self._session, self._partitions, self._backlogs, self._takeover_now, paused)
        await poll.start(owner_id, held, await self._now())
        self._sweep(poll)
        return poll

    async def _held_back(self) -> set[str]:
        known = await self._open_namespaces()
        return {name for name, each in known.items() if each.paused} | set(self._namespaces.unreadable)

    async def _begin(
        self, owner_id: bytes, poll: due.Poll, chosen: Sequence[Candidate]
    ) -> tuple[list[Timer], bool, frozenset[int]]:
        """Begin these timers. Return those that were begun, whether one of them had changed, and the shards where that
        is unknown."""
        by_shard: dict[int, list[Candidate]] = {}
        for each in chosen:
            by_shard.setdefault(each.shard, []).append(each)
        unknown = set()

        async def begin_in(shard: int, some: list[Candidate]) -> _Attempts:
            begun: list[Timer] = []
            raced = False
            for part in _parts(some, [each.size for each in some]):
                try:
                    attempts = await self._begin_in(owner_id, shard, poll, part)
                except StoreIndeterminate as error:
                    log.warning("shard %d: %s", shard, error)
                    unknown.add(shard)
                    break
                except StoreUnavailable:
                    if not begun:
                        raise
                    raced = True
                    break
                begun += attempts.timers
                raced = raced or attempts.raced
            return _Attempts(begun, raced)

        done = await asyncio.gather(*(begin_in(*each) for each in by_shard.items()), return_exceptions=True)
        timers: list[Timer] = []
        raced = False
        errors = [each for each in done if isinstance(each, BaseException)]
        for attempts in done:
            if not isinstance(attempts, BaseException):
                timers += attempts.timers
                raced = raced or attempts.raced
        for error in errors:
            if not isinstance(error, StoreUnavailable) or (not timers and not unknown):
                raise error
            raced = True
        place = {each.uuid: number for number, each in enumerate(chosen)}
        return sorted(timers, key=lambda timer: place[timer.uuid]), raced, frozenset(unknown)

    async def _begin_in(self, owner_id: bytes, shard: int, poll: due.Poll, some: Sequence[Candidate]) -> _Attempts:
        """Begin timers of one shard in one batch."""
        partition, version = self._partitions[shard], poll.ours[shard]
        async with partition.lock:
            rows = await partition.rows([each.uuid for each in some])
            id, calls, lowest, raced = new_id(), list[Call](), ABOVE_ALL, False
            changes: list[tuple[Timer, Timer]] = []
            unreadable: list[tuple[Row, Candidate, str]] = []
            for each in some:
                row = rows.get(each.uuid)
                if row is None or row.revision != each.revision:
                    raced = True
                    if each.status == Status.EXECUTING:
                        self._backlogs[shard].fence = None  # What is known about lost attempts is read again.
                    continue
                try:
                    timer = row.timer
                except _UNREADABLE as error:
                    reason = f"its status is {error}" if isinstance(error, KeyError) else str(error)
                    calls += quarantine.set_aside(row, each, reason, id)
                    unreadable.append((row, each, reason))
                    continue
                begun = lifecycle.begin(timer, now=poll.now, version=version)
                statements, slot = self._change(partition, row, timer.lane, begun, id)
                calls += statements
                lowest = min(lowest, slot)
                changes.append((timer, begun))
            if not calls:
                return _Attempts([], raced)
            if not await partition.fenced(id, owner_id, version, calls, lowest):
                await partition.state()
                return _Attempts([], True)
        for row, each, reason in unreadable:
            log_quarantined(row.namespace, row.id, reason)
            self._tallies.left(row.namespace, each.status)
        for before, after in changes:
            self._tallies.moved(before, after)
        backlog = self._backlogs[shard]
        backlog.worn += len(changes)
        backlog.forget({before.uuid for before, _ in changes} | {row.uuid for row, _, _ in unreadable})
        return _Attempts([after for _, after in changes], raced)

    def _sweep(self, poll: due.Poll) -> None:
        """Sweep these shards in the background where it is time, unless that is under way."""
        if self._sweeping is None or self._sweeping.done():
            behind = [shard for shard in poll.ours if self._backlogs[shard].may_sweep(poll.now)]
            if behind:
                self._sweeping = asyncio.create_task(self._sweep_each(behind, poll.now))

    async def _sweep_each(self, shards: Sequence[int], now: Instant) -> None:
        for shard in shards:
            try:
                await self._backlogs[shard].sweep(now)
            except StoreError as error:
                log.debug("shard %d is not swept: %s", shard, error)

    async def lanes(self, until: Instant, *, after: int = -1, limit: int = LANES_PAGE, due_max: int = 0) -> Lanes:
        return await due.lanes(
            *(self._session, self._partitions),
            now=await self._now(),
            until=until,
            after=after,
            limit=limit,
            due_max=due_max,
            takeover_now=self._takeover_now,
            paused=await self._held_back(),
        )

    async def overdue(self, shards: Collection[int], before: Instant, most: int) -> list[Overdue]:
        some = [self._partitions[shard] for shard in shards]
        return await due.overdue(self._session, some, before, most, await self._held_back())

    async def record(self, owner_id: bytes, changes: Sequence[tuple[Timer, Timer]]) -> list[bool | None]:
        results: list[bool | None] = [False] * len(changes)
        parts: dict[tuple[int, int], dict[bytes, int]] = {}
        for place, (before, _) in enumerate(changes):
            parts.setdefault((before.shard, before.version), {}).setdefault(before.uuid, place)
        errors: list[StoreError] = []

        async def record_in(shard: int, version: int, places: list[int]) -> None:
            sizes = [size_of(changes[place][1]) for place in places]
            for part in _parts(places, sizes):
                try:
                    done = await self._record_in(owner_id, shard, version, [changes[place] for place in part])
                except StoreError as error:
                    errors.append(error)
                    log.warning("shard %d: %s", shard, error)
                    done = [None] * len(part)
                for place, result in zip(part, done, strict=True):
                    results[place] = result

        await asyncio.gather(*(record_in(*fence, list(places.values())) for fence, places in parts.items()))
        if errors and all(isinstance(error, StoreUnavailable) for error in errors) and True not in results:
            raise errors[0]  # nothing was written
        return results

    async def _record_in(
        self, owner_id: bytes, shard: int, version: int, changes: Sequence[tuple[Timer, Timer]]
    ) -> list[bool | None]:
        """Record the outcomes of different timers of one shard in one batch."""
        partition = self._partitions[shard]
        async with partition.lock:
            for _ in range(TRIES_MAX):
                rows = await partition.rows([before.uuid for before, _ in changes])
                id, calls, lowest = new_id(), list[Call](), ABOVE_ALL
                current = []
                for before, after in changes:
                    row = rows.get(before.uuid)
                    if row is not None and row.revision == before.revision:
                        statements, slot = self._change(partition, row, before.lane, after, id)
                        calls += statements
                        lowest = min(lowest, slot)
                        current.append(before.uuid)
                if not calls:
                    return [False] * len(changes)
                if await partition.fenced(id, owner_id, version, calls, lowest):
                    recorded = set(current)
                    for before, after in changes:
                        if before.uuid in recorded:
                            self._tallies.moved(before, after)
                    return [before.uuid in recorded for before, _ in changes]
                state = await partition.state()
                if (state.owner, state.version) != (owner_id, version):
                    return [False] * len(changes)
        raise StoreUnavailable("the timers kept changing; nothing was recorded")

    # Upkeep.

    async def purge(self, *, retention_ms: int, limit: int) -> int:
        self._retention_ms = retention_ms
        return 0

    async def _quarantined(self) -> int:
        return await quarantine.count(self._session, self._partitions)

    async def end_session(self, id: bytes, ends_at: Instant, *, forget_before: Instant) -> None:
        await sessions.end(self._session, id, ends_at, forget_before=forget_before)

    async def session_ended(self, id: bytes, ends_at: Instant) -> bool:
        return await sessions.ended(self._session, id, ends_at)


def _parts(keys: Sequence[Any], sizes: Sequence[int]) -> list[Sequence[Any]]:
    """Split into parts that fit into one batch each."""
    return [
        part[start : start + BATCH_MAX]
        for part in in_parts(keys, sizes, BATCH_BYTES_MAX)
        for start in range(0, len(part), BATCH_MAX)
    ]
