"""Exact counts of timers by namespace and status, without a scan: every statement that changes timers updates them.

The counts of final timers are kept per slice of history and dropped with it; those of live timers belong to slice 0.
On database servers each count is spread over a few rows, so that concurrent writers seldom wait for one row lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from duetime.model import Status, Timer

SPREAD = 8
LIVE_SLICE = 0
"""The slice of timers that are not in history."""

Tally = Counter[tuple[str, str, int | str]]
"""The change of each count, by namespace, status and slice; a string is an SQL expression for the slice."""


def moved(
    tally: Tally, namespace: str, was: str, becomes: str, number: int = 1, *, slice: int | str = LIVE_SLICE
) -> None:
    """Move live timers from one status to another; ``slice`` is where the new status is counted."""
    tally[namespace, was, LIVE_SLICE] -= number
    tally[namespace, becomes, slice] += number


def recorded(changes: Iterable[tuple[Timer, Timer]], *, slice: int | str = LIVE_SLICE) -> Tally:
    """The changes of the counts when each begun timer is replaced by its state after the attempt."""
    tally: Tally = Counter()
    alike = Counter([(before.namespace, before.status, after.status) for before, after in changes])
    for (namespace, was, becomes), number in alike.items():
        moved(tally, namespace, was, becomes, number, slice=slice if becomes.final else LIVE_SLICE)
    return tally


def by_status(rows: Iterable[Any]) -> dict[Status, int]:
    """The result of ``tally``, from rows of (status, number)."""
    counts = {status: int(number) for status, number in rows}
    return {status: counts.get(status.value, 0) for status in Status}
