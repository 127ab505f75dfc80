"""A timer as rows of its shard's partition: the timer itself, and the entries that a poll reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from duetime.model import Status, Timer, destination_of
from duetime.stores.byte_budget import size_of
from duetime.stores.cassandra.driver import Call
from duetime.stores.cassandra.schema import DUE, EXECUTING, LANE, TIMER

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Timer).decode

_ROW = f"WHERE shard = ? AND kind = {TIMER} AND lane = 0 AND at = 0 AND uuid = ?"
WRITE = (
    "UPDATE timers USING TTL ? SET revision = ?, mark = ?, size = ?, namespace = ?, id = ?, fingerprint = ?, "
    f"status = ?, slot = ?, writer = ?, timer = ? {_ROW} IF revision = ?"
)
DELETE = f"DELETE FROM timers {_ROW} IF revision = ?"
ENTER = (
    "UPDATE timers SET revision = ?, mark = ?, size = ?, namespace = ?, fire_at = ?, destination = ?, "
    "begun_version = ?, deadline_at = ? WHERE shard = ? AND kind = ? AND lane = ? AND at = ? AND uuid = ?"
)
LEAVE = "DELETE FROM timers WHERE shard = ? AND kind = ? AND lane = ? AND at = ? AND uuid = ?"

Key = tuple[int, int, int]
"""Where an entry is: kind, lane, slot."""


class Row(NamedTuple):
    """The row of a timer as it was read; ``timer`` is not decoded yet."""

    uuid: bytes
    revision: int
    mark: int
    size: int
    status: str
    slot: int | None  # where its entry is; None for final timers
    writer: bytes
    encoded: bytes
    namespace: str
    id: str
    fingerprint: str

    @property
    def timer(self) -> Timer:
        """Decode the timer; raises one of ``UNREADABLE`` or KeyError."""
        timer = decode(self.encoded)
        if timer.status != self.status:
            raise KeyError(self.status)
        return timer


ROW = "uuid, revision, mark, size, status, slot, writer, timer, namespace, id, fingerprint"


def row_of(values: Any) -> Row:
    return Row._make(values)


def entry_at(timer: Timer) -> int | None:
    """When a poll must find the timer; None for final timers."""
    if timer.status is Status.PENDING:
        return timer.fire_at
    if timer.status is Status.EXECUTING:
        return timer.fire_at if timer.deadline_at is None else timer.deadline_at
    return None


def slot_of(timer: Timer, floor: int) -> int | None:
    """Where the entry of a timer goes: at its time, but above the floor, below which no poll looks."""
    at = entry_at(timer)
    return None if at is None else max(at, floor + 1)


def keys_of(status: str, lane: int, slot: int | None) -> list[Key]:
    """Where the entries of a timer are."""
    if slot is None:
        return []
    if status == Status.EXECUTING:
        return [(EXECUTING, 0, slot)]
    return [(DUE, 0, slot), (LANE, lane, slot)]


def write(timer: Timer, *, mark: int, slot: int | None, writer: bytes, ttl: int, before: int | None) -> list[Call]:
    """Write the timer and its entries if the stored one has the revision ``before``; None: if there is none."""
    encoded, size, uuid = encode(timer), size_of(timer), timer.uuid
    namespace = timer.namespace
    names = namespace, timer.id, timer.fingerprint
    state = timer.status.value, slot, writer, encoded
    calls = [Call(WRITE, (ttl, timer.revision, mark, size, *names, *state, timer.shard, uuid, before))]
    destination = destination_of(timer.definition.target)
    for kind, lane, at in keys_of(timer.status, timer.lane, slot):
        row = timer.revision, mark, size, namespace, timer.fire_at, destination, timer.version, timer.deadline_at
        calls.append(Call(ENTER, (*row, timer.shard, kind, lane, at, uuid)))
    return calls


def leave(shard: int, uuid: bytes, keys: list[Key], but: list[Key]) -> list[Call]:
    """Delete these entries. Those in ``but`` are written by the same batch, in which a deletion would win."""
    return [Call(LEAVE, (shard, *key, uuid)) for key in keys if key not in but]
