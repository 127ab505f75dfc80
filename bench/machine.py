"""The machine: its hardware, and which processes used its CPU, so that a reader can judge the results."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

from bench.processes import cpu_of_all

T = TypeVar("T")
_TICK = os.sysconf("SC_CLK_TCK")
CORES = os.cpu_count() or 1
OTHERS_SHARE_MAX = 0.1


def _busy_seconds() -> float:
    """What the cores were not free for: all processes, and what the host of a virtual machine gave to others; without
    idling and waiting for disks."""
    figures = Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    user, nice, system, _idle, _waiting, irq, softirq, stolen, *_ = map(int, figures)
    return (user + nice + system + irq + softirq + stolen) / _TICK


def _own_seconds() -> float:
    """The CPU time of this process and of those that it started."""
    return cpu_of_all(os.getpid())


async def busy_share(work: Awaitable[T]) -> tuple[T, float]:
    """The result, and the share of all cores that was busy meanwhile."""
    busy, began = _busy_seconds(), time.monotonic()
    result = await work
    return result, (_busy_seconds() - busy) / ((time.monotonic() - began) * CORES)


class Machine:
    """Measures from its creation on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._since = self._now()

    def _now(self) -> tuple[float, float, float]:
        return time.monotonic(), _busy_seconds(), _own_seconds()

    def seconds(self) -> float:
        return time.monotonic() - self._began

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Exclude this block: when processes are killed with their children, their CPU times are lost."""
        before = self._now()
        try:
            yield
        finally:
            parts = zip(self._since, before, self._now(), strict=True)
            self._since = cast(tuple[float, float, float], tuple(at + then - was for at, was, then in parts))

    def others_share(self) -> float:
        """The share of all cores that others used, on this machine or on its host."""
        took, busy, own = (now - since for now, since in zip(self._now(), self._since, strict=True))
        return max(0.0, busy - own) / (took * CORES)

    def summary(self) -> str:
        others = self.others_share()
        text = f"{self.seconds():.0f} s on {CORES} cores, of which others used {others:.0%}"
        return text + ("; read the ratios with care" if others > OTHERS_SHARE_MAX else "")


def description() -> str:
    """One line: processor, cores, memory, system."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    processor = models[0] if models else platform.machine()
    return f"{processor}, {CORES} cores, {memory:.0f} GiB of memory, {platform.system()} {platform.release()}"
