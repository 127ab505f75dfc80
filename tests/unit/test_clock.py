"""The corrected clock."""

from __future__ import annotations

from random import Random

from duetime.clock import CorrectedClock, SystemClock
from duetime.instants import Instant


class Machine(SystemClock):
    """A machine whose clocks move only by hand."""

    def __init__(self) -> None:
        self.wall_ms = 1_700_000_000_000
        self.monotonic_s = 0.0
        self.monotonic = lambda: self.monotonic_s

    def now(self) -> Instant:
        return Instant(self.wall_ms)


def test_corrected_clock_follows_the_monotonic_clock_without_losing_a_millisecond() -> None:
    random = Random(1)
    machine = Machine()
    for _ in range(10_000):
        machine.monotonic_s = started_s = random.uniform(0, 1e8)  # up for three years
        started_ms = machine.wall_ms
        clock = CorrectedClock(machine)
        passed_ms = random.randrange(30 * 86_400_000)
        machine.monotonic_s = started_s + passed_ms / 1000
        machine.wall_ms = random.randrange(2 * 10**12)  # the clock is set
        assert clock.now() == started_ms + passed_ms


def test_corrected_clock_is_corrected_by_the_offset() -> None:
    machine = Machine()
    clock = CorrectedClock(machine)
    clock.correct(250)
    assert clock.now() == machine.wall_ms - 250
    machine.monotonic_s += 1.5
    assert clock.now() == machine.wall_ms - 250 + 1_500
    clock.correct(-40)
    assert clock.now() == machine.wall_ms + 40
