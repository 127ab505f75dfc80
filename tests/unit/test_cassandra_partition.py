"""The floor of a partition, while a batch has reached only one of three replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from duetime.stores.cassandra.driver import Call
from duetime.stores.cassandra.partition import FLOOR_LAG_MS, RAISE, Partition

OWNER = b"owner"
OLD, NEW = b"old", b"new"
ENTRY_AT = 5_000
NOW = 60_000


class Session:
    """Three replicas. The batch that writes an entry at ``ENTRY_AT`` is accepted, but only the first has it."""

    def __init__(self) -> None:
        self.having = {0}

    async def read(self, statement: str, *arguments: Any, serial: bool = False) -> list[Any]:
        if "touched" in statement:
            if serial:
                self.having = {0, 1, 2}
            return [(OWNER, 1, -1, NEW if self.having & {0, 1} else OLD, 0)]
        return [(ENTRY_AT,)] if self.having & {1, 2} else []

    async def apply(self, calls: Sequence[Call]) -> bool:
        [(statement, arguments)] = calls
        assert statement == RAISE
        self.having = {0, 1, 2}  # a conditional write completes the one before
        return bool(arguments[-1] == NEW)


def test_floor_stays_below_the_entry_of_a_batch_that_one_replica_has() -> None:
    partition = Partition(Session(), 7)  # type: ignore[arg-type]
    asyncio.run(partition.raise_floor(OWNER, 1, NOW))
    assert partition.floor < ENTRY_AT < NOW - FLOOR_LAG_MS
