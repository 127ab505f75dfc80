"""Quarantine in Cassandra: a timer that a begin could not read keeps its row, and an entry of its own instead of those
that polls read."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from duetime.model import Status, Timer
from duetime.stores.cassandra.driver import Call, Session
from duetime.stores.cassandra.partition import ABOVE_ALL, Partition, new_id
from duetime.stores.cassandra.rows import Row, decode, keys_of, leave, slot_of, write
from duetime.stores.cassandra.schema import QUARANTINED, TIMER
from duetime.stores.due_selection import Candidate
from duetime.stores.unreadable import QUARANTINED as STATUS
from duetime.stores.unreadable import UNREADABLE

log = logging.getLogger(__name__)

_SET_ASIDE = (
    f"UPDATE timers SET revision = ?, status = ?, slot = null, writer = ? WHERE shard = ? AND kind = {TIMER} "
    "AND lane = 0 AND at = 0 AND uuid = ? IF revision = ?"
)
_NOTE = (
    f"UPDATE timers SET revision = ?, namespace = ?, status = ?, reason = ? WHERE shard = ? AND kind = {QUARANTINED} "
    "AND lane = 0 AND at = 0 AND uuid = ?"
)
_NOTES = f"SELECT uuid, revision, status FROM timers WHERE shard = ? AND kind = {QUARANTINED} AND lane = 0 AND at = 0"


def set_aside(row: Row, found: Candidate, reason: str, writer: bytes) -> list[Call]:
    """Put a timer into quarantine, in the batch of the begin that could not read it."""
    keys = [] if row.slot is None else keys_of(found.status, found.lane, row.slot)
    revision = row.revision + 1
    return [
        Call(_SET_ASIDE, (revision, STATUS, writer, found.shard, row.uuid, row.revision)),
        Call(_NOTE, (revision, row.namespace, found.status, reason, found.shard, row.uuid)),
        *leave(found.shard, row.uuid, keys, []),
    ]


async def count(session: Session, partitions: Sequence[Partition]) -> int:
    return sum([len(await session.read(_NOTES, partition.shard)) for partition in partitions])


async def restore(session: Session, partitions: Sequence[Partition]) -> list[Timer]:
    """Restore the timers that this version can read. Return them."""
    restored = []
    for partition in partitions:
        for uuid, revision, status in await session.read(_NOTES, partition.shard):
            async with partition.lock:
                row = (await partition.rows([uuid])).get(uuid)
                if row is None or row.revision != revision:
                    continue
                try:
                    timer = decode(row.encoded)
                except UNREADABLE:
                    continue
                if timer.status != status or status not in (Status.PENDING, Status.EXECUTING):
                    continue
                timer = msgspec.structs.replace(timer, revision=revision + 1)
                slot = slot_of(timer, partition.floor)
                id = new_id()
                calls = write(timer, mark=row.mark, slot=slot, writer=id, ttl=0, before=revision)
                note = (QUARANTINED, 0, 0)
                calls += leave(partition.shard, uuid, [note], [])
                if await partition.unfenced(id, calls, ABOVE_ALL if slot is None else slot):
                    restored.append(timer)
    return restored
