"""Slices of history in MySQL: creates the partitions for today and tomorrow, and drops old timers.

A partition has only an end. It starts where the one before it ends, and the first one contains all earlier rows, so
that a clock set back finds a slice although MySQL adds partitions only at the end.

Timers with a shorter retention than the longest are deleted row by row, a few of each namespace and status at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from duetime.errors import StoreUnavailable
from duetime.stores.mysql.literals import listed, literal
from duetime.stores.mysql.pool import MysqlPool, lock, run, unlock
from duetime.stores.mysql.statements import count, go, slice_of
from duetime.stores.sql.retention import GROUPS_AT_ONCE, drop_in_turns, missing_slices
from duetime.stores.sql.tallies import Tally

ROWS_AT_ONCE = 500
LOCK, LOCK_SECONDS_MAX = "duetime slices", 5
_PARTITIONS = (
    "SELECT partition_name, partition_description FROM information_schema.partitions "
    "WHERE table_schema = DATABASE() AND table_name = 'history' AND partition_name REGEXP '^p[1-9][0-9]*$'"
)
FINAL = ("completed", "failed", "canceled")

Group = tuple[str, str, int]
"""The final timers of one namespace with one status that changed last before an instant."""


async def make_slices(connection: Any, now: int, longest_ms: int) -> None:
    """Create the slices that cover today and tomorrow, if missing."""
    await _lock(connection)
    [found, listed] = await run(connection, [_PARTITIONS, "SELECT starts_at FROM slices"])
    slices = {int(name[1:]): int(ends_at) for name, ends_at in found.rows}
    for starts_at in slices.keys() - {starts_at for (starts_at,) in listed.rows}:
        # An earlier run was killed after its ALTER.
        await run(connection, [_list(starts_at, slices[starts_at])])
    covered = dict(pairwise([1, *sorted(slices.values())]))
    for starts_at, ends_at in missing_slices(now, covered, longest_ms):
        # ALTER commits. It comes first, because it may fail: then no row could lie in a slice that is listed already. A
        # timer that becomes final in between has no slice to be counted in; it is rejected, and its write is retried.
        await run(
            connection,
            [
                "SET SESSION lock_wait_timeout = 1",
                f"ALTER TABLE history ADD PARTITION (PARTITION p{starts_at} VALUES LESS THAN ({ends_at}))",
                "SET SESSION lock_wait_timeout = 4",
                _list(starts_at, ends_at),
            ],
        )
    await unlock(connection, LOCK)


def _list(starts_at: int, ends_at: int) -> str:
    return f"REPLACE INTO slices VALUES ({starts_at}, {ends_at})"


async def _lock(connection: Any) -> None:
    if not await lock(connection, LOCK, LOCK_SECONDS_MAX):
        raise StoreUnavailable("another instance is changing the partitions of history")


async def drop_slices(connection: Any, until: int) -> int:
    """Drop the slices that ended by ``until``. Return how many timers they held."""
    ended = f"SELECT starts_at FROM slices WHERE ends_at <= {until} ORDER BY starts_at"
    await _lock(connection)
    [found, existing] = await run(connection, [ended, _PARTITIONS])
    partitions = {name for name, _ in existing.rows}
    dropped = 0
    for (starts_at,) in found.rows:
        # DROP PARTITION commits first. If the process is killed here, only counts are left, for the next run to delete.
        drop = f"ALTER TABLE history DROP PARTITION p{starts_at}"
        [number, *_] = await run(
            connection,
            [
                f"SELECT COALESCE(SUM(timers), 0) FROM tallies WHERE slice = {starts_at}",
                "SET SESSION lock_wait_timeout = 1",
                *([drop] if f"p{starts_at}" in partitions else []),
                f"DELETE FROM tallies WHERE slice = {starts_at}",
                f"DELETE FROM slices WHERE starts_at = {starts_at}",
                "SET SESSION lock_wait_timeout = 4",
            ],
        )
        dropped += int(number.rows[0][0])
    await unlock(connection, LOCK)
    return dropped


async def drop_rows(pool: MysqlPool, before: Mapping[str, int], limit: int) -> int:
    """Delete up to ``limit`` final timers that last changed before the cutoff of their namespace. Return how many."""

    async def drop(groups: Sequence[Group], each: int) -> tuple[int, list[Group]]:
        counts = [await _drop(pool, *group, each) for group in groups]
        return sum(counts), [group for group, number in zip(groups, counts, strict=True) if number == each]

    return await drop_in_turns(await _groups(pool, before), limit, ROWS_AT_ONCE, drop)


async def _groups(pool: MysqlPool, before: Mapping[str, int]) -> list[Group]:
    """Return the namespaces and statuses that have old timers, with one index seek for each."""
    found: list[Group] = []
    kept = list(before.items())
    for start in range(0, len(kept), GROUPS_AT_ONCE):
        some = [(name, status, at) for name, at in kept[start : start + GROUPS_AT_ONCE] for status in FINAL]
        first = await pool.read(*(f"SELECT 1 FROM {_old(*group)} LIMIT 1" for group in some))
        found += [group for group, rows in zip(some, first, strict=True) if rows]
    return found


def _old(name: str, status: str, before: int) -> str:
    return (
        f"history FORCE INDEX (history_final) WHERE namespace = {literal(name)} AND status = {literal(status)} "
        f"AND updated_at < {before}"
    )


async def _drop(pool: MysqlPool, name: str, status: str, before: int, most: int) -> int:
    """Delete a few timers. Another instance may delete the same ones: the second of the two finds some missing, changes
    nothing and selects again."""
    while True:
        [found] = await pool.read(
            f"SELECT uuid, revision, {slice_of('ended_at')} "
            f"FROM {_old(name, status, before)} ORDER BY updated_at LIMIT {most}"
        )
        if not found:
            return 0
        tally: Tally = Counter((name, status, starts_at) for _, _, starts_at in found)
        results = await pool.write(
            go(pool.dialect, [(uuid, revision) for uuid, revision, _ in found], fenced=False, table="history"),
            f"DELETE FROM history WHERE uuid IN {listed(row[0] for row in found)} AND @go",
            *count(Counter({key: -number for key, number in tally.items()})),
        )
        if results[1].affected:
            return results[1].affected
