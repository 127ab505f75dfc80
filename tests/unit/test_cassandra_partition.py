"""A sweep of a partition, while a batch has reached only one of three replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from duetime.stores.cassandra.backlog import LAG_MS, Backlog
from duetime.stores.cassandra.driver import Call
from duetime.stores.cassandra.partition import RAISE, SWEPT, Partition, State

OWNER = b"owner"
ENTRY_AT = 5_000
NOW = 60_000


class Session:
    """Three replicas. The batch that writes an entry at ``ENTRY_AT`` is accepted, but only the first has it. Reads ask
    the other two."""

    def __init__(self) -> None:
        self.having = {0}
        self.written: list[Call] = []

    async def read(self, statement: str, *arguments: Any, serial: bool = False) -> list[Any]:
        has_entry = "kind = 2" in statement and self.having >= {1, 2}
        return [(ENTRY_AT, "default", "https://a.example")] if has_entry else []

    async def apply(self, calls: Sequence[Call]) -> bool:
        self.having = {0, 1, 2}  # a conditional write completes the one before
        self.written += calls
        return True


def test_sweep_finds_the_entry_of_a_batch_that_one_replica_has() -> None:
    session: Any = Session()
    backlog = Backlog(session, Partition(session, 7))

    async def sweep() -> None:
        await backlog.load(OWNER, 1, State(OWNER, 1, -1, -1, -1, b""))
        assert await backlog.sweep(NOW)

    asyncio.run(sweep())
    assert backlog.swept == NOW - LAG_MS
    assert [waits.above for waits in backlog.lanes.values()] == [ENTRY_AT - 1]
    assert [call.statement for call in session.written if call.statement in (RAISE, SWEPT)] == [RAISE, SWEPT]
    assert len(session.written) == 3, "the row of the lane is written in the batch that changes ``swept``"
