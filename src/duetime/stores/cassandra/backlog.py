"""What polls of a shard pass: only the entries of the last seconds, however long other timers have been waiting.

A deleted entry leaves a tombstone for hours, so a poll must not start at the oldest timer that waits, for example in a
paused namespace: it would pass the tombstones of everything that has fired since. Therefore the owner sweeps its shard
every few seconds. It raises the floor to a few seconds ago; from then on, no entry can appear at or below it. Only then
does it read the entries that are left there, which belong to timers that wait. It writes a row for each of their lanes,
together with the new value of ``swept``. Polls read

    entries above ``swept`` by time, and
    entries at or below it in the lanes of the backlog, one lane at a time, above the first entry that is left.

In a lane, only timers of the same lane leave tombstones.

The order matters. If the owner read before it raised the floor, it would miss entries that are written in between.
An unfinished batch cannot hide an entry: raising the floor is a conditional write, and each completes the one before.

The owner remembers ``swept`` and the lanes; nobody else can change them while it has the fence. It also remembers the
attempts that earlier owners left behind (``lost``): their entries can only disappear.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from duetime.instants import Instant
from duetime.model import lane_of
from duetime.stores.cassandra import ranges
from duetime.stores.cassandra.driver import Call, Session
from duetime.stores.cassandra.partition import Partition, State
from duetime.stores.cassandra.schema import BACKLOG, DUE, EXECUTING

LAG_MS = 2_000
"""The floor stays this far behind the store's time, for nodes whose clocks differ."""
STEP_MS = 5_000
"""A shard is swept when ``swept`` is this far behind."""
WORN_MIN = 1_000
IDLE_MS = 60_000
"""A shard with fewer deletions than ``WORN_MIN`` since it was swept is swept only this often."""
ENTRIES_MAX = 10_000
"""How many entries one sweep reads, unless more have the same slot."""
ROWS_MAX = 100
"""How many rows of lanes one batch changes."""

ENTRY = "at, uuid, revision, mark, size, namespace, fire_at, destination, begun_version, deadline_at"
EXECUTING_IN = f"SELECT {ENTRY} FROM timers WHERE shard = ? AND kind = {EXECUTING} AND lane = 0 AND {ranges.IN_RANGE}"
_FIRST_EXECUTING = f"SELECT at FROM timers WHERE shard = ? AND kind = {EXECUTING} AND lane = 0 AND {ranges.IN_RANGE}"
_LEFT = (
    f"SELECT at, namespace, destination FROM timers WHERE shard = ? AND kind = {DUE} AND lane = 0 AND {ranges.IN_RANGE}"
)
LANES = f"SELECT lane, slot, namespace, destination FROM timers WHERE shard = ? AND kind = {BACKLOG}"
_KEY = f"WHERE shard = ? AND kind = {BACKLOG} AND lane = ? AND at = 0 AND uuid = 0x"
_PUT = f"UPDATE timers SET slot = ?, namespace = ?, destination = ? {_KEY}"
_DELETE = f"DELETE FROM timers {_KEY}"


class Entry(NamedTuple):
    """What a poll reads of a timer."""

    slot: int
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


class Waiting(NamedTuple):
    """A lane with entries at or below ``swept``; the first is above ``above``."""

    above: int
    namespace: str
    destination: str


def waiting(rows: Sequence[Any]) -> dict[int, Waiting]:
    """The lanes of a backlog, from the rows of ``LANES``."""
    return {lane: Waiting(*row) for lane, *row in rows}


class Backlog:
    """The backlog of one shard, as its owner sees it."""

    def __init__(self, session: Session, partition: Partition) -> None:
        self._session = session
        self._partition = partition
        self.fence: tuple[bytes, int] | None = None
        """The owner and version for which the rest is valid."""
        self.swept = -1
        self.lanes: dict[int, Waiting] = {}
        self.lost: list[Entry] = []
        self.worn = 0
        """How many entries this process has deleted since the last sweep."""
        self._lost_above = -1
        self._changed: set[int] = set()
        """The lanes whose rows are out of date."""
        self._tried_at = 0

    async def load(self, owner: bytes, version: int, state: State) -> None:
        """Read what is remembered, as the new owner; ``state`` was read after the claim."""
        shard = self._partition.shard
        lanes = waiting(await self._session.read(LANES, shard))
        executing = await ranges.read(self._session, EXECUTING_IN, shard, above=state.lost_above)
        entries = [Entry._make(row) for row in executing]
        self.lost = [each for each in entries if each.begun_version != version and each.deadline_at is not None]
        self.swept, self._lost_above, self.lanes = state.swept, state.lost_above, lanes
        self._changed.clear()
        self.worn = WORN_MIN
        self.fence = owner, version

    def above(self, lane: int) -> int:
        """All entries of this lane are above this slot."""
        found = self.lanes.get(lane)
        return self.swept if found is None else found.above

    def learn(self, lane: int, first: int | None, swept: int) -> None:
        """Remember the first entry that a read found in a lane of the backlog, or that it found none up to ``swept``,
        which may have been raised since."""
        found = self.lanes.get(lane)
        if found is None:
            return
        if first is not None and found.above < first - 1 < self.swept:
            self.lanes[lane] = found._replace(above=first - 1)
            self._changed.add(lane)
        elif first is None and swept == self.swept:
            del self.lanes[lane]
            self._changed.add(lane)

    def forget(self, uuids: Collection[bytes]) -> None:
        """These timers were begun: they are no longer lost."""
        if self.lost:
            self.lost = [each for each in self.lost if each.uuid not in uuids]

    def may_sweep(self, now: int) -> bool:
        behind = now - LAG_MS - self.swept
        return (
            self.fence is not None
            and behind >= STEP_MS
            and now >= self._tried_at + STEP_MS
            and (self.worn >= WORN_MIN or now >= self._tried_at + IDLE_MS)
        )

    async def sweep(self, now: int) -> bool:
        """Raise the floor and then ``swept``, as far as the entries in between fit. Return whether that was done."""
        if self.fence is None:
            return False
        self._tried_at = now
        owner, version = self.fence
        partition, target, before, worn = self._partition, now - LAG_MS, self.swept, self.worn
        async with partition.lock:
            if target <= before or not await partition.raise_floor(owner, version, target):
                return False
        target, left = await self._left(before, target)
        [*executing] = await ranges.read(
            self._session, _FIRST_EXECUTING, partition.shard, above=self._lost_above, until=target, most=1
        )
        lost_above = max(self._lost_above, min([target, *(at - 1 for (at,) in executing)]))
        async with partition.lock:
            written: set[int] = set()
            while True:  # A read may remove a lane during each write; it then has only new entries.
                new = {lane: each for lane, each in left.items() if lane not in self.lanes and lane not in written}
                if len(new) <= ROWS_MAX:
                    break
                some = dict(islice(new.items(), ROWS_MAX))
                written |= some.keys()
                if not await self._write(owner, version, before, before, self._lost_above, some):
                    return False
            changed = list(islice(self._changed, ROWS_MAX))
            self._changed.difference_update(changed)
            rows = {lane: self.lanes.get(lane, left.get(lane)) for lane in changed} | new
            if not await self._write(owner, version, before, target, lost_above, rows):
                return False
            for lane in left.keys() - self.lanes.keys():
                self.lanes[lane] = left[lane]
                self._changed.add(lane)
            self.swept, self._lost_above = target, lost_above
            self.worn -= worn
        return True

    async def _left(self, above: int, until: int) -> tuple[int, dict[int, Waiting]]:
        """Return how far the entries were read, and their lanes."""
        shard = self._partition.shard
        rows = await ranges.read(self._session, _LEFT, shard, above=above, until=until, most=ENTRIES_MAX)
        if len(rows) == ENTRIES_MAX:
            until = rows[-1][0] - 1
            if until > above:
                rows = [row for row in rows if row[0] <= until]
            else:
                until += 1
                rows = await ranges.read(self._session, _LEFT, shard, above=above, until=until)
        lanes: dict[int, Waiting] = {}
        for at, namespace, destination in rows:
            lanes.setdefault(lane_of(namespace, destination), Waiting(at - 1, namespace, destination))
        return until, lanes

    async def _write(
        self, owner: bytes, version: int, before: int, after: int, lost_above: int, lanes: Mapping[int, Waiting | None]
    ) -> bool:
        shard = self._partition.shard
        calls = [
            Call(_DELETE, (shard, lane)) if each is None else Call(_PUT, (*each, shard, lane))
            for lane, each in lanes.items()
        ]
        written = False
        try:
            written = await self._partition.note_swept(owner, version, before, after, lost_above, calls)
        finally:
            if not written and self.fence == (owner, version):
                self.fence = None  # The rows may say something else now: they are read again.
        return written
