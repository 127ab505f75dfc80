"""Rounds: parts that take turns, so that other load on the machine affects a figure and its ceiling equally."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from bench.processes import Process
from bench.setups import Setup
from tests.postgres import Postgres

Sample = Mapping[str, Any]
Part = Callable[[], Awaitable[Sample]]
Parts = Mapping[str, Part]
T = TypeVar("T")
ROUND = "round"
"""The round of a sample."""


class Samples:
    """The samples of each part of a measurement in each round."""

    def __init__(self, of: Mapping[str, Sequence[Sample]]) -> None:
        self.of = of

    def __contains__(self, part: str) -> bool:
        return bool(self.of.get(part))

    def by_round(self, part: str, figure: str) -> dict[int, float]:
        samples = enumerate(self.of.get(part, ()))
        return {one.get(ROUND, place): one[figure] for place, one in samples if one.get(figure) is not None}

    def each(self, part: str, figure: str) -> list[float]:
        return list(self.by_round(part, figure).values())

    def median(self, part: str, figure: str) -> float | None:
        """None if the part did not run, or does not have the figure."""
        values = self.each(part, figure)
        return float(statistics.median(values)) if values else None

    def ratio(self, part: str, ceiling: str, figure: str) -> float | None:
        """The median of the rounds' ratios of one figure of two parts."""
        return ratio(self.by_round(part, figure), self.by_round(ceiling, figure))

    def middle(self, part: str, figure: str) -> Sample | None:
        """The whole sample of the round with the median figure."""
        there = [sample for sample in self.of.get(part, ()) if sample.get(figure) is not None]
        return sorted(there, key=lambda sample: float(sample[figure]))[(len(there) - 1) // 2] if there else None


def ratio(above: Mapping[int, float], below: Mapping[int, float]) -> float | None:
    """The median of the ratios of the rounds that have both."""
    ratios = [above[number] / below[number] for number in above.keys() & below.keys() if below[number]]
    return statistics.median(ratios) if ratios else None


class Bench(Struct, frozen=True):
    """The context of every measurement."""

    directory: Path
    receiver: Process
    postgres: Postgres | None  # None: it is not on this machine
    setups: Sequence[Setup]
    quick: bool
    started: float

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.receiver.port}/hook"

    def say(self, text: str) -> None:
        """A progress line: on a terminal each one replaces the one before."""
        clear, end = ("\r\x1b[K", "") if sys.stderr.isatty() else ("", "\n")
        print(f"{clear}[{time.monotonic() - self.started:4.0f} s] {text}", end=end, file=sys.stderr, flush=True)


def spread(blocks: Sequence[Sequence[T]], guests: Sequence[T]) -> list[T]:
    """The blocks one after another, with the guests spread evenly between them, the last one at the end."""
    turns: list[T] = []
    placed = 0
    for number, block in enumerate(blocks, 1):
        turns += block
        until = len(guests) * number // len(blocks)
        turns += guests[placed:until]
        placed = until
    return turns + list(guests[placed:])
