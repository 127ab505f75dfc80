"""The Cassandra store as the contract tests need it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from duetime.clock import Clock
from duetime.model import Timer, timer_uuid
from duetime.store import Taken
from duetime.stores.cassandra.rows import ROW, row_of
from duetime.stores.cassandra.store import CassandraStore


class AnyShard(CassandraStore):
    """Finds timers in the shards that tests have put them into; the service computes the shard from namespace and id.
    And it returns all timers, which the store can't list."""

    _shard_of_uuid: ClassVar[dict[bytes, int]] = {}

    async def put(self, timer: Timer) -> Timer | None:
        self._shard_of_uuid[timer.uuid] = timer.shard
        return await super().put(timer)

    async def put_many(self, timers: Sequence[Timer]) -> list[Timer | Taken | None]:
        self._shard_of_uuid.update({timer.uuid: timer.shard for timer in timers})
        return await super().put_many(timers)

    async def _shard_of(self, namespace: str, id: str) -> int | None:
        return self._shard_of_uuid.get(timer_uuid(namespace, id), 0)

    async def all_timers(self) -> list[Timer]:
        """Newest first."""
        found = [
            row_of(values)
            for shard in range(self.shards)
            for values in await self._session.read(f"SELECT {ROW} FROM timers WHERE shard = ? AND kind = 0", shard)
        ]
        return [row.timer for row in sorted(found, key=lambda row: row.mark, reverse=True)]


async def opened(url: str, clock: Clock, *, shards: int) -> AnyShard:
    store = AnyShard(url, shards=shards, virtual_clock=clock)
    await store.open()
    return store
