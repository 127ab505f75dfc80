"""Rounds: parts that take turns, so that whatever else the machine does falls on a figure and its ceiling alike."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench.processes import Process

Sample = Mapping[str, Any]
Part = Callable[[], Awaitable[Sample]]


class Samples:
    """What each part brought in each round."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self.of: dict[str, list[Sample]] = {name: [] for name in parts}

    def median(self, part: str, figure: str) -> float:
        return float(statistics.median(sample[figure] for sample in self.of[part]))

    def ratio(self, part: str, ceiling: str, figure: str) -> float | None:
        """The median of the rounds' ratios of one figure of two parts."""
        pairs = zip(self.of.get(part, ()), self.of.get(ceiling, ()), strict=False)
        ratios = [above[figure] / below[figure] for above, below in pairs if below[figure]]
        return statistics.median(ratios) if ratios else None


class Bench(Struct, frozen=True):
    """What every measurement is given."""

    directory: Path
    receiver: Process
    rounds: int
    rounds_long: int  # of what takes long
    quick: bool
    started: float

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.receiver.port}/hook"

    def say(self, text: str) -> None:
        """A progress line: on a terminal each one replaces the one before."""
        clear, end = ("\r\x1b[K", "") if sys.stderr.isatty() else ("", "\n")
        print(f"{clear}[{time.monotonic() - self.started:4.0f} s] {text}", end=end, file=sys.stderr, flush=True)

    async def interleave(self, name: str, parts: Mapping[str, Part], *, long: bool = False) -> Samples:
        """Run all parts in each round, every second round backwards."""
        samples = Samples(parts)
        rounds = self.rounds_long if long else self.rounds
        for number in range(rounds):
            for part in list(parts)[:: 1 if number % 2 == 0 else -1]:
                self.say(f"{name}: round {number + 1} of {rounds}: {part}")
                samples.of[part].append(await parts[part]())
        return samples
