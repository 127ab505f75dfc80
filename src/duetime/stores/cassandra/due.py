"""The reads of a poll: which timers are due in an owner's shards, which attempts were lost, and when to poll again.

These reads take no lock; the batch that begins a timer checks its revision and the fence again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from duetime.instants import EPOCH, Instant
from duetime.model import Status
from duetime.store import LANES_PAGE, Lane, Lanes, Overdue, Portion
from duetime.stores.cassandra import ranges
from duetime.stores.cassandra.backlog import ENTRY, EXECUTING_IN, LANES, Backlog, Entry, Waiting, waiting
from duetime.stores.cassandra.driver import Session
from duetime.stores.cassandra.partition import STATE, Partition, State
from duetime.stores.cassandra.schema import AT_HEAD, DUE, LANE
from duetime.stores.due_selection import Candidate

REACH = 250
"""How many due timers a poll reads per shard, whatever its limit."""
REACH_LANE = 50
"""How many it reads at least per shard and lane: timers that were put in the past are all at the floor, and in order
only once they are read."""
BACKLOG_MAX = 256
"""How many lanes of backlogs one poll by age reads."""
SURVEY_MAX = 1_000
"""How many due timers of each shard a list of lanes reads. The lanes of the others are listed once a sweep has found
them, a few seconds later."""
EXACT_MAX = 1_000
"""How many lanes of backlogs a list or a report looks into. It knows less about the others."""
AT_ONCE = 64
"""How many queries run at the same time."""

_STATES = f"SELECT shard, {STATE} FROM timers WHERE shard IN ? AND {AT_HEAD}"
_DUE = f"SELECT {ENTRY} FROM timers WHERE shard = ? AND kind = {DUE} AND lane = 0 AND {ranges.IN_RANGE}"
_NEXT = f"SELECT at FROM timers WHERE shard = ? AND kind = {DUE} AND lane = 0 AND {ranges.IN_RANGE}"
_IN_LANE = f"SELECT {ENTRY} FROM timers WHERE shard = ? AND kind = {LANE} AND lane = ? AND {ranges.IN_RANGE}"
_TIMES_IN_LANE = f"SELECT fire_at FROM timers WHERE shard = ? AND kind = {LANE} AND lane = ? AND {ranges.IN_RANGE}"


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
    return {shard: State.of(values) for shard, *values in await session.read(_STATES, sorted(shards))}


def _entries(rows: Sequence[Any]) -> list[Entry]:
    return [Entry._make(row) for row in rows]


def _candidate(shard: int, entry: Entry, status: Status) -> Candidate:
    return Candidate(
        *(entry.fire_at, entry.mark, entry.uuid, entry.revision, shard, entry.lane, entry.size, entry.namespace),
        status.value,
    )


class Poll:
    """One poll of an owner: the store's time, and which of the shards it believes to hold it still owns."""

    def __init__(
        self,
        session: Session,
        partitions: Sequence[Partition],
        backlogs: Sequence[Backlog],
        takeover_now: bool,
        paused: Collection[str],
    ) -> None:
        self._session = session
        self._partitions = partitions
        self._backlogs = backlogs
        self._takeover_now = takeover_now
        self._paused = paused
        self.now = EPOCH
        self.ours: dict[int, int] = {}

    async def start(self, owner_id: bytes, held: Mapping[int, int], now: Instant) -> None:
        self.now = now
        found = await states(self._session, held)
        for shard, state in found.items():
            self._partitions[shard].floor = state.floor
        self.ours = {
            shard: version
            for shard, version in held.items()
            if (found[shard].owner, found[shard].version) == (owner_id, version)
        }
        await each(
            [
                self._backlogs[shard].load(owner_id, version, found[shard])
                for shard, version in self.ours.items()
                if self._backlogs[shard].fence != (owner_id, version)
            ]
        )

    def _is_lost(self, entry: Entry) -> bool:
        return self._takeover_now or (entry.deadline_at is not None and entry.deadline_at <= self.now)

    def _lost_now(self) -> list[Candidate]:
        return [
            _candidate(shard, entry, Status.EXECUTING)
            for shard in self.ours
            for entry in self._backlogs[shard].lost
            if self._is_lost(entry) and entry.namespace not in self._paused
        ]

    async def due(
        self, limit: int, lane_max: int | None, lane_limits: Mapping[int, int]
    ) -> tuple[list[Candidate], bool]:
        """Return the oldest due timers, and whether there may be more besides those that are over a lane's limit."""
        reach = max(limit + 1, REACH)
        wanted = [
            (shard, lane)
            for shard in self.ours
            for lane, waits in self._backlogs[shard].lanes.items()
            if waits.namespace not in self._paused and (lane_max is None or lane_limits.get(lane, lane_max))
        ]
        above = {shard: self._backlogs[shard].swept for shard in self.ours}  # A sweep may raise it during the reads.
        beyond = len(wanted) > BACKLOG_MAX
        if beyond:
            wanted = sorted(wanted, key=lambda place: self._backlogs[place[0]].above(place[1]))[:BACKLOG_MAX]

        async def in_backlog(shard: int, lane: int) -> tuple[list[Candidate], bool]:
            lane_limit = None if lane_max is None else lane_limits.get(lane, lane_max)
            most = reach if lane_limit is None else min(reach, max(lane_limit + 1, REACH_LANE))
            entries = await self._waiting(shard, lane, most)
            return self._open(shard, entries), lane_limit is None and len(entries) == most

        async def in_shard(shard: int) -> tuple[list[Candidate], bool]:
            rows = await ranges.read(self._session, _DUE, shard, above=above[shard], until=self.now, most=reach)
            return self._open(shard, _entries(rows)), len(rows) == reach

        found = await each([in_shard(shard) for shard in self.ours] + [in_backlog(*place) for place in wanted])
        candidates = {candidate.uuid: candidate for some, _ in found for candidate in some}
        return sorted([*candidates.values(), *self._lost_now()]), beyond or any(more for _, more in found)

    async def _waiting(self, shard: int, lane: int, most: int) -> list[Entry]:
        """The first timers of a lane of the backlog."""
        backlog = self._backlogs[shard]
        swept = backlog.swept
        rows = await ranges.read(
            self._session, _IN_LANE, shard, lane, above=backlog.above(lane), until=swept, most=most
        )
        backlog.learn(lane, rows[0][0] if rows else None, swept)
        return _entries(rows)

    def _open(self, shard: int, entries: Sequence[Entry]) -> list[Candidate]:
        """The entries as candidates, without those of namespaces that are paused or held back."""
        return [_candidate(shard, entry, Status.PENDING) for entry in entries if entry.namespace not in self._paused]

    async def next_at(self) -> Instant | None:
        """Return when the next timer falls due or the next attempt will be lost."""
        found = await each([ranges.read(self._session, _NEXT, shard, above=self.now, most=1) for shard in self.ours])
        times = [at for rows in found for (at,) in rows]
        for shard in self.ours:
            for entry in self._backlogs[shard].lost:
                if not self._is_lost(entry) and entry.namespace not in self._paused and entry.deadline_at is not None:
                    times.append(entry.deadline_at)
        return None if not times else Instant(min(times))

    async def due_in(self, portions: Sequence[Portion]) -> tuple[list[list[Candidate]], dict[int, Instant]]:
        """Return the due timers of each lane, one more than its limit, and when the next timer of each falls due."""

        async def in_lane(shard: int, lane: int, most: int) -> list[Entry]:
            backlog = self._backlogs[shard]
            swept = backlog.swept
            rows = await ranges.read(self._session, _IN_LANE, shard, lane, above=backlog.above(lane), most=most)
            backlog.learn(lane, rows[0][0] if rows and rows[0][0] <= swept else None, swept)
            return _entries(rows)

        places = [(shard, p.lane, max(p.most + 1, REACH_LANE)) for p in portions for shard in self.ours]
        in_lanes: dict[int, list[Candidate]] = {portion.lane: [] for portion in portions}
        next_at: dict[int, Instant] = {}
        for (shard, lane, _), entries in zip(places, await each([in_lane(*place) for place in places]), strict=True):
            in_lanes[lane] += self._open(shard, [entry for entry in entries if entry.slot <= self.now])
            for entry in entries:
                if entry.slot > self.now and entry.namespace not in self._paused:
                    next_at[lane] = min(entry.fire_at, next_at.get(lane, entry.fire_at))
        for candidate in self._lost_now():
            if candidate.lane in in_lanes:
                in_lanes[candidate.lane].append(candidate)
        return [sorted(in_lanes[portion.lane])[: portion.most + 1] for portion in portions], next_at


class _Found(NamedTuple):
    """What a shard has that is due or waits."""

    recent: list[Entry]
    swept: int
    waiting: dict[int, Waiting]
    executing: list[Entry]
    version: int


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
    found = await states(session, [some.shard for some in partitions])

    async def in_shard(shard: int) -> _Found:
        state = found[shard]
        recent = await ranges.read(
            session, _DUE, shard, above=state.swept, until=max(now, until, state.swept), most=SURVEY_MAX
        )
        executing = await ranges.read(
            session, EXECUTING_IN, shard, above=state.lost_above, until=ranges.FOREVER if takeover_now else now
        )
        listed = waiting(await session.read(LANES, shard))
        return _Found(_entries(recent), state.swept, listed, _entries(executing), state.version)

    first: dict[int, Lane] = {}

    def learn(lane: int, namespace: str, destination: str, fire_at: Instant) -> None:
        if fire_at <= until and (lane not in first or fire_at < first[lane].fire_at):
            first[lane] = Lane(lane, namespace, destination, fire_at)

    due = 0
    places: list[tuple[int, _Found, int]] = []
    for shard, each_found in enumerate(await each([in_shard(some.shard) for some in partitions])):
        due += sum(entry.fire_at <= now for entry in each_found.recent)
        lost = [
            entry
            for entry in each_found.executing
            if (entry.deadline_at is not None and entry.deadline_at <= now)
            or (takeover_now and entry.begun_version != each_found.version)
        ]
        for entry in [*each_found.recent, *lost]:
            learn(entry.lane, entry.namespace, entry.destination, entry.fire_at)
        places += [(shard, each_found, lane) for lane in each_found.waiting]
    for _, each_found, lane in places[EXACT_MAX:]:
        waits = each_found.waiting[lane]
        learn(lane, waits.namespace, waits.destination, Instant(waits.above + 1))
        due += 1
    for start in range(0, min(len(places), EXACT_MAX), AT_ONCE):
        some = places[start : min(start + AT_ONCE, EXACT_MAX)]
        most = max(REACH_LANE, due_max - due)
        ends = await each(
            [
                ranges.read(
                    session, _TIMES_IN_LANE, shard, lane, above=one.waiting[lane].above, until=one.swept, most=most
                )
                for shard, one, lane in some
            ]
        )
        for (_, one, lane), times in zip(some, ends, strict=True):
            due += len(times)
            if times:
                waits = one.waiting[lane]
                learn(lane, waits.namespace, waits.destination, min(times)[0])
    some_lanes = sorted(lane for lane in first if lane > after)[:limit]
    listed = [first[lane] for lane in some_lanes if first[lane].namespace not in paused]
    return Lanes(listed, min(due, due_max), some_lanes[-1] if len(some_lanes) == limit else None)


async def overdue(
    session: Session, partitions: Sequence[Partition], before: Instant, most: int, paused: Collection[str]
) -> list[Overdue]:
    """Of one lane, only a part of ``most`` timers is counted in each shard."""
    if not partitions:
        return []
    found = await states(session, [some.shard for some in partitions])
    part = max(REACH_LANE, most // len(partitions))
    times: dict[int, list[Instant]] = {}
    names: dict[int, tuple[str, str]] = {}

    async def recent(shard: int) -> None:
        above = found[shard].swept
        rows = await ranges.read(session, _DUE, shard, above=above, until=max(above, before - 1), most=part)
        for entry in _entries(rows):
            names[entry.lane] = entry.namespace, entry.destination
            times.setdefault(entry.lane, []).append(entry.fire_at)

    async def waited(shard: int, lane: int, waits: Waiting) -> None:
        names[lane] = waits.namespace, waits.destination
        until = found[shard].swept
        rows = await ranges.read(session, _TIMES_IN_LANE, shard, lane, above=waits.above, until=until, most=part)
        times.setdefault(lane, []).extend(at for (at,) in rows if at < before)

    await each([recent(some.shard) for some in partitions])
    backlogs = await each([session.read(LANES, some.shard) for some in partitions])
    places = [
        (some.shard, lane, waits)
        for some, rows in zip(partitions, backlogs, strict=True)
        for lane, waits in waiting(rows).items()
    ]
    await each([waited(*place) for place in places[:EXACT_MAX]])
    for _, lane, waits in places[EXACT_MAX:]:
        names[lane] = waits.namespace, waits.destination
        times.setdefault(lane, []).append(Instant(waits.above + 1))
    return [
        Overdue(*names[lane], names[lane][0] in paused, min(ats), min(most, len(ats)))
        for lane, ats in sorted(times.items())[:LANES_PAGE]
        if ats
    ]
