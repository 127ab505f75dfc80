"""The partition of one shard: its fence, its floor, and conditional writes to it.

Every write to a partition is a conditional batch (a lightweight transaction), and one at a time from each process:
concurrent ones of one partition delay each other until they time out. So there is a lock.

**The fence.** Batches of an owner have the condition ``owner = ? AND version = ?``. A claim writes a higher version.

**The floor.** A deleted entry stays as a tombstone for hours, and tombstones at the head of the due range would make
every poll slower. So a poll reads only entries above the floor, which the owner raises now and then. Whoever writes an
entry puts it above the floor, with the condition ``floor < slot``. That alone loses timers: an entry may be written
after the owner has looked below the new floor and before it raises it. So every batch also changes ``touched``, and the
floor is raised only if ``touched`` is as it was before the look. That is read serially: another read may find the
``touched`` of a batch that only one replica has so far, and the look may then ask the replicas that lack its entries. A
serial read brings the batch to a majority first.

**Unknown results.** Every batch has an id, which it writes to ``touched`` and to the timers that it changes. If a batch
gets no answer, a serial read, which completes or ends unfinished batches, looks for the id. If it is found, the batch
was written. Otherwise nobody knows, because a batch may still be on its way: ``StoreIndeterminate``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import NamedTuple

from duetime.errors import StoreError, StoreIndeterminate
from duetime.stores.cassandra.driver import Call, Session
from duetime.stores.cassandra.rows import ROW, Row, row_of
from duetime.stores.cassandra.schema import AT_HEAD, DUE, EXECUTING, NOBODY, TIMER

FENCED = "UPDATE timers SET touched = ? WHERE shard = ? IF owner = ? AND version = ? AND floor < ?"
OPEN = "UPDATE timers SET touched = ? WHERE shard = ? IF floor < ?"
CLAIM = "UPDATE timers SET touched = ?, owner = ?, version = ? WHERE shard = ? IF version < ?"
RELEASE = "UPDATE timers SET touched = ?, owner = ? WHERE shard = ? IF owner = ?"
RAISE = "UPDATE timers SET floor = ? WHERE shard = ? IF owner = ? AND version = ? AND touched = ?"
_STATE = f"SELECT owner, version, floor, touched, revision FROM timers WHERE shard = ? AND {AT_HEAD}"
"""Cassandra demands a column that is not static, besides the key."""
_WRITERS = f"SELECT uuid, writer FROM timers WHERE shard = ? AND kind = {TIMER} AND lane = 0 AND at = 0 AND uuid IN ?"
_ROWS = f"SELECT {ROW} FROM timers WHERE shard = ? AND kind = {TIMER} AND lane = 0 AND at = 0 AND uuid IN ?"
_FIRST = "SELECT at FROM timers WHERE shard = ? AND kind = {} AND lane = 0 AND at > ? LIMIT 1"

ABOVE_ALL = 1 << 62
"""For batches without entries: above any floor."""
FLOOR_LAG_MS = 2_000
"""The floor stays this far behind the store's time, for nodes whose clocks differ."""
FLOOR_STEP_MS = 5_000
"""The floor is raised when it is this far behind."""
UUIDS_AT_ONCE = 100


class State(NamedTuple):
    """The fence and the floor of a shard."""

    owner: bytes
    version: int
    floor: int
    touched: bytes


def new_id() -> bytes:
    return os.urandom(8)


class Partition:
    def __init__(self, session: Session, shard: int) -> None:
        self.shard = shard
        self.lock = asyncio.Lock()
        """Held while reading what a batch is based on and writing it."""
        self.floor = -1
        """The floor as last read; the real one may be higher."""
        self._session = session
        self._raised_at = 0

    async def state(self, *, serial: bool = False) -> State:
        [values] = await self._session.read(_STATE, self.shard, serial=serial)
        state = State._make(values[:-1])
        self.floor = state.floor
        return state

    async def rows(self, uuids: Sequence[bytes]) -> dict[bytes, Row]:
        """The rows of these timers."""
        found: dict[bytes, Row] = {}
        for start in range(0, len(uuids), UUIDS_AT_ONCE):
            for values in await self._session.read(_ROWS, self.shard, uuids[start : start + UUIDS_AT_ONCE]):
                row = row_of(values)
                if row.revision is not None:
                    found[row.uuid] = row
        return found

    async def fenced(self, id: bytes, owner: bytes, version: int, calls: Sequence[Call], lowest: int) -> bool:
        """Write as the owner; ``lowest`` is the lowest slot of an entry."""
        return await self._apply(id, [Call(FENCED, (id, self.shard, owner, version, lowest)), *calls])

    async def unfenced(self, id: bytes, calls: Sequence[Call], lowest: int) -> bool:
        """Write as a client."""
        return await self._apply(id, [Call(OPEN, (id, self.shard, lowest)), *calls])

    async def claim(self, owner: bytes, version: int) -> bool:
        """Write this fence unless a later one is there. Return whether it is there now."""
        async with self.lock:
            id = new_id()
            if await self._apply(id, [Call(CLAIM, (id, owner, version, self.shard, version))]):
                return True
            state = await self.state()
            return (state.owner, state.version) == (owner, version)

    async def release(self, owner: bytes) -> None:
        async with self.lock:
            id = new_id()
            await self._apply(id, [Call(RELEASE, (id, NOBODY, self.shard, owner))])

    def may_raise(self, now: int) -> bool:
        """Whether the floor is low and it is time for another try: a timer that waits may hold it down."""
        return self.floor + FLOOR_STEP_MS + FLOOR_LAG_MS <= now and now >= self._raised_at + FLOOR_STEP_MS

    async def raise_floor(self, owner: bytes, version: int, now: int) -> bool:
        """Raise the floor to just below the first entry, if this owner still has the shard and nobody has written to
        it since before the look."""
        self._raised_at = now
        async with self.lock:
            state = await self.state(serial=True)
            target = now - FLOOR_LAG_MS
            if (state.owner, state.version) != (owner, version) or target < state.floor + FLOOR_STEP_MS:
                return False
            for kind in (EXECUTING, DUE):
                for (at,) in await self._session.read(_FIRST.format(kind), self.shard, state.floor):
                    target = min(target, at - 1)
            if target < state.floor + FLOOR_STEP_MS:
                return False
            raised = await self._session.apply([Call(RAISE, (target, self.shard, owner, version, state.touched))])
            if raised:
                self.floor = target
            return raised

    async def _apply(self, id: bytes, calls: Sequence[Call]) -> bool:
        try:
            return await self._session.apply(calls)
        except StoreIndeterminate as error:
            if await self._was_written(id, calls):
                return True
            raise error

    async def _was_written(self, id: bytes, calls: Sequence[Call]) -> bool:
        """Whether a serial read finds this batch; False if that is unknown."""
        uuids = [call.arguments[-2] for call in calls if "writer = ?" in call.statement]
        try:
            [(_, _, _, touched, _)] = await self._session.read(_STATE, self.shard, serial=True)
            if touched == id:
                return True
            for start in range(0, len(uuids), UUIDS_AT_ONCE):
                some = uuids[start : start + UUIDS_AT_ONCE]
                if any(writer == id for _, writer in await self._session.read(_WRITERS, self.shard, some)):
                    return True
        except StoreError:
            pass
        return False
