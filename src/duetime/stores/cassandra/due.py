"""The reads of a poll: which timers are due in an owner's shards, which attempts were lost, and when to poll again.

These reads take no lock; the batch that begins a timer checks its revision and the fence again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from duetime.instants import EPOCH, Instant
from duetime.model import Status, lane_of
from duetime.store import LANES_PAGE, Lane, Lanes, Overdue, Portion
from duetime.stores.cassandra.driver import Session
from duetime.stores.cassandra.partition import Partition, State
from duetime.stores.cassandra.schema import AT_HEAD, DUE, EXECUTING, LANE
from duetime.stores.due_selection import Candidate

REACH = 250
"""How many due timers a poll reads per shard, whatever its limit."""
REACH_LANE = 50
"""How many it reads at least per shard and lane: timers that were put in the past are all at the floor, and in order
only once they are read."""
AT_ONCE = 64
"""How many queries run at the same time."""

_ENTRY = "uuid, revision, mark, size, namespace, fire_at, destination, begun_version, deadline_at"
_STATES = f"SELECT shard, owner, version, floor, touched, revision FROM timers WHERE shard IN ? AND {AT_HEAD}"
_DUE = f"SELECT {_ENTRY} FROM timers WHERE shard = ? AND kind = {DUE} AND lane = 0 AND at > ? AND at <= ?"
_SOME_DUE = f"{_DUE} LIMIT ?"
_NEXT = f"SELECT at FROM timers WHERE shard = ? AND kind = {DUE} AND lane = 0 AND at > ? LIMIT 1"
_IN_LANE = f"SELECT {_ENTRY} FROM timers WHERE shard = ? AND kind = {LANE} AND lane = ? AND at > ? AND at <= ? LIMIT ?"
_NEXT_IN_LANE = f"SELECT {_ENTRY} FROM timers WHERE shard = ? AND kind = {LANE} AND lane = ? AND at > ? LIMIT 1"
_EXECUTING = f"SELECT {_ENTRY} FROM timers WHERE shard = ? AND kind = {EXECUTING} AND lane = 0 AND at > ?"


class Entry(NamedTuple):
    uuid: bytes
    revision: int
    mark: int
    size: int
    namespace: str
    fire_at: Instant
    destination: str
    begun_version: int
    deadline_at: Instant | None

    @property
    def lane(self) -> int:
        return lane_of(self.namespace, self.destination)

    def candidate(self, shard: int, status: Status) -> Candidate:
        return Candidate(
            *(self.fire_at, self.mark, self.uuid, self.revision, shard, self.lane, self.size, self.namespace),
            status.value,
        )


def _entries(rows: Iterable[Any]) -> list[Entry]:
    return [Entry._make(row) for row in rows]


async def each(queries: Sequence[Any]) -> list[Any]:
    """Run coroutines, a limited number at the same time."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(query: Any) -> Any:
        async with room:
            return await query

    return await asyncio.gather(*map(one, queries))


async def states(session: Session, shards: Collection[int]) -> dict[int, State]:
    if not shards:
        return {}
    return {shard: State(*state) for shard, *state, _ in await session.read(_STATES, sorted(shards))}


class Poll:
    """One poll of an owner: the store's time, and which of the shards it believes to hold it still owns."""

    def __init__(
        self, session: Session, partitions: Sequence[Partition], takeover_now: bool, paused: Collection[str]
    ) -> None:
        self._session = session
        self._partitions = partitions
        self._takeover_now = takeover_now
        self._paused = paused
        self.now = EPOCH
        self.ours: dict[int, int] = {}
        self._lost: list[tuple[int, Entry]] = []
        """The attempts of older versions of our shards."""

    async def start(self, owner_id: bytes, held: Mapping[int, int], now: Instant, clean: set[tuple[int, int]]) -> None:
        """``clean`` contains the shards, with their version, without attempts of older versions. No new ones can
        appear there, because the fence keeps out older owners."""
        self.now = now
        found = await states(self._session, held)
        for shard, state in found.items():
            self._partitions[shard].floor = state.floor
        self.ours = {
            shard: version
            for shard, version in held.items()
            if (found[shard].owner, found[shard].version) == (owner_id, version)
        }
        unclean = [shard for shard, version in self.ours.items() if (shard, version) not in clean]
        executing = await each([self._session.read(_EXECUTING, shard, self._floor(shard)) for shard in unclean])
        for shard, rows in zip(unclean, executing, strict=True):
            older = [entry for entry in _entries(rows) if entry.begun_version != self.ours[shard]]
            if older:
                self._lost += [(shard, entry) for entry in older if entry.deadline_at is not None]
            else:
                clean.add((shard, self.ours[shard]))

    def _floor(self, shard: int) -> int:
        return self._partitions[shard].floor

    def _is_lost(self, entry: Entry) -> bool:
        return self._takeover_now or (entry.deadline_at is not None and entry.deadline_at <= self.now)

    def _lost_now(self) -> list[Candidate]:
        return [
            entry.candidate(shard, Status.EXECUTING)
            for shard, entry in self._lost
            if self._is_lost(entry) and entry.namespace not in self._paused
        ]

    async def due(self, limit: int) -> tuple[list[Candidate], bool]:
        """Return the oldest due timers, and whether there may be more."""
        reach = max(limit + 1, REACH)
        found = await each(
            [self._session.read(_SOME_DUE, shard, self._floor(shard), self.now, reach) for shard in self.ours]
        )
        candidates = self._lost_now()
        for shard, rows in zip(self.ours, found, strict=True):
            candidates += self._open(shard, rows)
        return sorted(candidates), any(len(rows) >= reach for rows in found)

    def _open(self, shard: int, rows: Sequence[Any]) -> list[Candidate]:
        """The entries as candidates, without those of namespaces that are paused or held back."""
        return [
            entry.candidate(shard, Status.PENDING) for entry in _entries(rows) if entry.namespace not in self._paused
        ]

    async def next_at(self) -> Instant | None:
        """Return when the next timer falls due or the next attempt will be lost."""
        found = await each([self._session.read(_NEXT, shard, self.now) for shard in self.ours])
        times = [at for rows in found for (at,) in rows]
        for _, entry in self._lost:
            if not self._is_lost(entry) and entry.namespace not in self._paused and entry.deadline_at is not None:
                times.append(entry.deadline_at)
        return None if not times else Instant(min(times))

    async def due_in(self, portions: Sequence[Portion]) -> tuple[list[list[Candidate]], dict[int, Instant]]:
        """Return the due timers of each lane, one more than its limit, and when the next timer of each falls due."""
        places = [(p.lane, p.most, shard) for p in portions for shard in self.ours]
        found = await each(
            [
                self._session.read(_IN_LANE, shard, lane, self._floor(shard), self.now, max(most + 1, REACH_LANE))
                for lane, most, shard in places
            ]
        )
        later = await each([self._session.read(_NEXT_IN_LANE, shard, lane, self.now) for lane, _, shard in places])
        in_lanes: dict[int, list[Candidate]] = {portion.lane: [] for portion in portions}
        next_at: dict[int, Instant] = {}
        for (lane, _, shard), rows, ahead in zip(places, found, later, strict=True):
            in_lanes[lane] += self._open(shard, rows)
            for entry in _entries(ahead):
                if entry.namespace not in self._paused:
                    next_at[lane] = min(entry.fire_at, next_at.get(lane, entry.fire_at))
        for candidate in self._lost_now():
            if candidate.lane in in_lanes:
                in_lanes[candidate.lane].append(candidate)
        return [sorted(in_lanes[portion.lane])[: portion.most + 1] for portion in portions], next_at


async def _pending(session: Session, partitions: Sequence[Partition], until: int) -> list[tuple[int, Entry]]:
    """Every pending timer that is due by then in these shards."""
    found = await each([session.read(_DUE, some.shard, some.floor, until) for some in partitions])
    return [
        (partition.shard, entry)
        for partition, rows in zip(partitions, found, strict=True)
        for entry in _entries(rows)
        if entry.fire_at <= until
    ]


async def lanes(
    session: Session,
    partitions: Sequence[Partition],
    *,
    now: Instant,
    until: Instant,
    after: int,
    limit: int,
    due_max: int,
    takeover_now: bool,
    paused: Collection[str],
) -> Lanes:
    """Reads every entry up to ``until``: the cost grows with the number of due timers."""
    found = await states(session, [some.shard for some in partitions])
    for partition in partitions:
        partition.floor = found[partition.shard].floor
    pending = await _pending(session, partitions, max(now, until))
    executing = await each([session.read(_EXECUTING, some.shard, found[some.shard].floor) for some in partitions])
    live = [entry for _, entry in pending]
    for partition, rows in zip(partitions, executing, strict=True):
        version = found[partition.shard].version
        live += [
            entry
            for entry in _entries(rows)
            if (entry.deadline_at is not None and entry.deadline_at <= now)
            or (takeover_now and entry.begun_version != version)
        ]
    first: dict[int, Entry] = {}
    for entry in live:
        if entry.fire_at <= until and (entry.lane not in first or entry.fire_at < first[entry.lane].fire_at):
            first[entry.lane] = entry
    some = sorted(lane for lane in first if lane > after)[:limit]
    listed = [
        Lane(lane, entry.namespace, entry.destination, entry.fire_at)
        for lane in some
        if (entry := first[lane]).namespace not in paused
    ]
    due = sum(entry.fire_at <= now for _, entry in pending)
    return Lanes(listed, min(due, due_max), some[-1] if len(some) == limit else None)


async def overdue(
    session: Session, partitions: Sequence[Partition], before: Instant, most: int, paused: Collection[str]
) -> list[Overdue]:
    lanes: dict[int, list[Entry]] = {}
    for _, entry in await _pending(session, partitions, before - 1):
        lanes.setdefault(entry.lane, []).append(entry)
    return [
        Overdue(
            *(entries[0].namespace, entries[0].destination, entries[0].namespace in paused),
            *(min(entry.fire_at for entry in entries), min(most, len(entries))),
        )
        for _, entries in sorted(lanes.items())[:LANES_PAGE]
    ]
