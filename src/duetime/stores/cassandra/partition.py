"""The partition of one shard: its fence, its floor, and conditional writes to it.

Every write to a partition is a conditional batch (a lightweight transaction), and one at a time from each process:
concurrent ones of one partition delay each other until they time out. So there is a lock.

**The fence.** Batches of an owner have the condition ``owner = ? AND version = ?``. A claim writes a higher version.

**The floor.** Entries are written only above the floor, with the condition ``floor < slot``. The owner raises it, so
the entries at or below it only become fewer. ``backlog`` explains what that is for.

**Unknown results.** Every batch has an id, which it writes to ``touched`` and to the timers that it changes. If a batch
gets no answer, a serial read, which completes or ends unfinished batches, looks for the id. If it is found, the batch
was written. Otherwise nobody knows, because a batch may still be on its way: ``StoreIndeterminate``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from duetime.errors import StoreError, StoreIndeterminate
from duetime.stores.cassandra.driver import Call, Session
from duetime.stores.cassandra.rows import ROW, Row, row_of
from duetime.stores.cassandra.schema import AT_HEAD, NOBODY, TIMER

FENCED = "UPDATE timers SET touched = ? WHERE shard = ? IF owner = ? AND version = ? AND floor < ?"
OPEN = "UPDATE timers SET touched = ? WHERE shard = ? IF floor < ?"
CLAIM = "UPDATE timers SET touched = ?, owner = ?, version = ? WHERE shard = ? IF version < ?"
RELEASE = "UPDATE timers SET touched = ?, owner = ? WHERE shard = ? IF owner = ?"
RAISE = "UPDATE timers SET touched = ?, floor = ? WHERE shard = ? IF owner = ? AND version = ? AND floor < ?"
SWEPT = (
    "UPDATE timers SET touched = ?, swept = ?, lost_above = ? "
    "WHERE shard = ? IF owner = ? AND version = ? AND swept = ?"
)
STATE = "owner, version, floor, swept, lost_above, touched, revision"
"""Cassandra demands a column that is not static, besides the key."""
_STATE = f"SELECT {STATE} FROM timers WHERE shard = ? AND {AT_HEAD}"
_WRITERS = f"SELECT uuid, writer FROM timers WHERE shard = ? AND kind = {TIMER} AND lane = 0 AND at = 0 AND uuid IN ?"
_ROWS = f"SELECT {ROW} FROM timers WHERE shard = ? AND kind = {TIMER} AND lane = 0 AND at = 0 AND uuid IN ?"

ABOVE_ALL = 1 << 62
"""For batches without entries: above any floor."""
UUIDS_AT_ONCE = 100


class State(NamedTuple):
    """The static columns of a shard."""

    owner: bytes
    version: int
    floor: int
    swept: int
    lost_above: int
    touched: bytes

    @staticmethod
    def of(values: Sequence[Any]) -> State:
        """From the columns in ``STATE``."""
        return State._make(values[:-1])


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

    async def state(self, *, serial: bool = False) -> State:
        [values] = await self._session.read(_STATE, self.shard, serial=serial)
        state = State.of(values)
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

    async def raise_floor(self, owner: bytes, version: int, target: int) -> bool:
        """Raise the floor to ``target`` as the owner. Return whether it is at least there; the lock must be held."""
        id = new_id()
        if await self._apply(id, [Call(RAISE, (id, target, self.shard, owner, version, target))]):
            self.floor = target
            return True
        state = await self.state()
        return (state.owner, state.version) == (owner, version) and state.floor >= target

    async def note_swept(
        self, owner: bytes, version: int, before: int, after: int, lost_above: int, calls: Sequence[Call]
    ) -> bool:
        """Change the rows of the backlog, and ``swept`` from ``before`` to ``after``; the lock must be held."""
        id = new_id()
        changed = Call(SWEPT, (id, after, lost_above, self.shard, owner, version, before))
        return await self._apply(id, [changed, *calls])

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
            if (await self.state(serial=True)).touched == id:
                return True
            for start in range(0, len(uuids), UUIDS_AT_ONCE):
                some = uuids[start : start + UUIDS_AT_ONCE]
                if any(writer == id for _, writer in await self._session.read(_WRITERS, self.shard, some)):
                    return True
        except StoreError:
            pass
        return False
