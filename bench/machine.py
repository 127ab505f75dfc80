"""Tells how much of the machine's CPU others used while the bench ran, so that a reader knows what to believe."""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def _busy_seconds() -> float:
    """What all processes of the machine have used, without idling and waiting for disks."""
    user, nice, system, _idle, _waiting, irq, softirq, *_ = Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / _TICK


def _own_seconds() -> float:
    """What this process and those that it started and ended have used."""
    return sum(os.times()[:4])


class Machine:
    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        self._began = time.monotonic(), _busy_seconds(), _own_seconds()

    def summary(self) -> str:
        began, busy, own = self._began
        took = time.monotonic() - began
        others = max(0.0, _busy_seconds() - busy - (_own_seconds() - own)) / (took * self._cores)
        text = f"{took:.0f} s on {self._cores} cores, of which others used {others:.0%}"
        return text + ("; read the ratios with care" if others > 0.1 else "")
