"""Retention: which slices of history are created, what is expired, and in which order rows are deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from duetime.model import DAY_MS, FOREVER_MS
from duetime.stores.sql.retention import (
    GROUPS_AT_ONCE,
    SLICES_PER_RETENTION_MIN,
    Cutoffs,
    cutoffs,
    drop_in_turns,
    missing_slices,
    slice_width_ms,
)

NOON = 20_000 * DAY_MS + DAY_MS // 2
TODAY = 20_000 * DAY_MS


@pytest.mark.parametrize(
    ("retention_ms", "width_ms"),
    [
        (0, DAY_MS),
        (DAY_MS, DAY_MS),
        (27 * DAY_MS, DAY_MS),
        (28 * DAY_MS, 7 * DAY_MS),
        (111 * DAY_MS, 7 * DAY_MS),
        (112 * DAY_MS, 28 * DAY_MS),
        (FOREVER_MS, 28 * DAY_MS),
    ],
)
def test_a_slice_is_short_compared_to_the_retention(retention_ms: int, width_ms: int) -> None:
    assert slice_width_ms(retention_ms) == width_ms
    assert width_ms == DAY_MS or width_ms * SLICES_PER_RETENTION_MIN <= retention_ms


@pytest.mark.parametrize(
    ("slices", "missing"),
    [
        ({}, [(1, TODAY + DAY_MS), (TODAY + DAY_MS, TODAY + 2 * DAY_MS)]),
        ({1: NOON + DAY_MS + 1}, []),
        ({1: NOON + DAY_MS}, [(NOON + DAY_MS, TODAY + 2 * DAY_MS)]),
        (
            {1: TODAY - 300 * DAY_MS, TODAY - 300 * DAY_MS: TODAY},
            [(TODAY, TODAY + DAY_MS), (TODAY + DAY_MS, TODAY + 2 * DAY_MS)],
        ),
        ({1: TODAY - 5, NOON + 7: FOREVER_MS}, [(TODAY - 5, NOON + 7)]),
    ],
    ids=["none", "enough", "tomorrow", "down for long", "a gap of an earlier release"],
)
def test_today_and_tomorrow_have_slices_without_a_gap(slices: dict[int, int], missing: list[tuple[int, int]]) -> None:
    assert missing_slices(NOON, slices, DAY_MS) == missing
    there = sorted((slices | dict(missing)).items())
    for at in (NOON, NOON + DAY_MS):
        assert sum(starts_at <= at < ends_at for starts_at, ends_at in there) == 1


def test_slices_are_dropped_after_the_longest_retention_and_rows_before() -> None:
    kept = {"a": 30 * DAY_MS, "b": 30 * DAY_MS, "c": DAY_MS}
    assert cutoffs(NOON, kept) == Cutoffs(NOON - 30 * DAY_MS, {"c": NOON - DAY_MS})


def test_retention_below_a_day_is_exact() -> None:
    assert cutoffs(NOON, {"a": 1_000, "b": 5}).rows == {"a": NOON - 1_000, "b": NOON - 5}


class Rows:
    """Groups of old timers, and a record of the calls."""

    def __init__(self, **counts: int) -> None:
        self.counts = counts
        self.turns: list[tuple[list[str], int]] = []

    async def drop(self, groups: Sequence[str], each: int) -> tuple[int, Sequence[str]]:
        self.turns.append((list(groups), each))
        dropped = 0
        for group in groups:
            number = min(each, self.counts[group])
            self.counts[group] -= number
            dropped += number
        return dropped, [group for group in groups if self.counts[group]]


def test_groups_are_deleted_in_turns() -> None:
    rows = Rows(a=25, b=3)
    assert asyncio.run(drop_in_turns(["a", "b"], 1_000, 20, rows.drop)) == 28
    assert rows.turns == [(["a", "b"], 10), (["a"], 20)]


@pytest.mark.parametrize("limit", [1, 7, 29])
def test_no_more_than_the_limit_is_deleted(limit: int) -> None:
    rows = Rows(a=20, b=20, c=20)
    assert asyncio.run(drop_in_turns(["a", "b", "c"], limit, 12, rows.drop)) == limit


def test_turn_deletes_from_a_limited_number_of_groups() -> None:
    rows = Rows(**{f"g{n}": 1 for n in range(GROUPS_AT_ONCE + 1)})
    assert asyncio.run(drop_in_turns(list(rows.counts), 1_000, 500, rows.drop)) == GROUPS_AT_ONCE + 1
    assert [len(groups) for groups, _ in rows.turns] == [GROUPS_AT_ONCE, 1]
