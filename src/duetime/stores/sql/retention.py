"""Retention of final timers: partitions of history by time ("slices"), and the batches in which rows are deleted.

A slice is dropped when all of it is past the longest retention, which costs nothing per row. Timers of namespaces with
a shorter retention are deleted row by row. Timers with the longest retention are kept until their slice is dropped, up
to a quarter longer than configured. A retention of less than a day is applied exactly.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from duetime.model import DAY_MS

SLICES_PER_RETENTION_MIN = 4
_WIDTHS_MS = (28 * DAY_MS, 7 * DAY_MS, DAY_MS)
GROUPS_AT_ONCE = 64
"""Maximum number of groups (namespace and status) that one batch deletes from."""

Group = TypeVar("Group")


def slice_width_ms(retention_ms: int) -> int:
    """The width of a new slice. Few slices are better, because inserting a timer looks up its identity in each. Narrow
    ones are better, because a slice is dropped only when all of it is old enough."""
    return next((width for width in _WIDTHS_MS if width * SLICES_PER_RETENTION_MIN <= retention_ms), DAY_MS)


def missing_slices(now: int, slices: Mapping[int, int], longest_ms: int) -> list[tuple[int, int]]:
    """The start and end of each slice that must be created so that today and tomorrow are covered.

    There are no gaps: a slice starts where the one before it ends, however long ago, so that a clock set back still
    finds a slice. The first starts at 1, because slice 0 in the counts means live timers."""
    known = dict(slices)
    for at in (now, now + DAY_MS):
        if not any(starts_at <= at < ends_at for starts_at, ends_at in known.items()):
            starts_at = max((ends_at for ends_at in known.values() if ends_at <= at), default=1)
            ends_at = at // DAY_MS * DAY_MS + slice_width_ms(longest_ms)
            known[starts_at] = min([ends_at, *(later for later in known if later > at)])
    return sorted(known.items() - slices.items())


class Cutoffs(NamedTuple):
    """What has passed its retention: slices that ended by ``slices``, and, per namespace, timers that last changed
    before ``rows``."""

    slices: int
    rows: dict[str, int]


def cutoffs(now: int, kept_ms: Mapping[str, int]) -> Cutoffs:
    longest = max(kept_ms.values())
    return Cutoffs(now - longest, {name: now - ms for name, ms in kept_ms.items() if ms < max(longest, DAY_MS)})


async def drop_in_turns(
    groups: Sequence[Group],
    limit: int,
    rows_at_once: int,
    drop: Callable[[Sequence[Group], int], Awaitable[tuple[int, Sequence[Group]]]],
) -> int:
    """Delete up to ``limit`` timers in small batches, taking turns between the groups, so that no other write waits
    long. Return how many. ``drop`` deletes up to the given number from each of the given groups; it returns how many it
    deleted and which groups may have more."""
    left, dropped = list(groups), 0
    while left and dropped < limit:
        number = min(GROUPS_AT_ONCE, limit - dropped)
        some, left = left[:number], left[number:]
        each = max(1, min(rows_at_once, limit - dropped) // len(some))
        gone, more = await drop(some, each)
        dropped += gone
        left += more
    return dropped
