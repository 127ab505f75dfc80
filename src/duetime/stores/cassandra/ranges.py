"""Reads the first entries in a range of slots, however many deletions lie between them.

Cassandra fails a read that passes too many tombstones (``tombstone_failure_threshold``, 100,000). Such a range is read
in parts: from its front, in steps that shrink when one fails and grow while they succeed.
"""

from __future__ import annotations

from typing import Any

from duetime.stores.cassandra.driver import Session, TooManyTombstones

FOREVER = 1 << 62
EVERY = (1 << 31) - 1
FIRST_STEP_MS = 60_000
GROWTH = 4

IN_RANGE = "at > ? AND at <= ? LIMIT ?"
"""How a statement for ``read`` ends."""


async def read(
    session: Session, statement: str, *key: Any, above: int, until: int = FOREVER, most: int = EVERY
) -> list[Any]:
    """Return up to ``most`` rows with a slot above ``above`` and at most ``until``, in their order."""
    rows: list[Any] = []
    step = until - above
    while above < until and len(rows) < most:
        end = min(until, above + step)
        try:
            rows += await session.read(statement, *key, above, end, most - len(rows))
        except TooManyTombstones:
            if end - above == 1:
                raise
            step = min(FIRST_STEP_MS, (end - above) // 2)
            continue
        above = end
        step *= GROWTH
    return rows
