"""The port through which an attempt leaves: one request, one ``Outcome``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from duetime.model import Outcome, Target, Timer


class Deliverer(Protocol):
    async def deliver(self, timer: Timer, timeout_ms: int) -> Outcome:
        """Make exactly one attempt for a begun timer and say what came of it, within ``timeout_ms``; never raises."""

    async def check(self, target: Target) -> None:
        """Raise ``InvalidInput`` for a target that no attempt would be let out to, as far as can be told now."""

    async def close(self) -> None:
        """Let go of every connection."""


Deliverers = Mapping[type[Any], Deliverer]
"""Who delivers to which kind of target."""
