"""The port for deliveries: one attempt, one ``Outcome``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from duetime.model import Outcome, Target, Timer


class Deliverer(Protocol):
    async def deliver(self, timer: Timer, timeout_ms: int) -> Outcome:
        """Make exactly one attempt for a begun timer and return its outcome within ``timeout_ms``; never raises."""

    async def check(self, target: Target) -> None:
        """Raise ``InvalidInput`` if attempts to this target would be rejected, as far as is known now."""

    async def close(self) -> None:
        """Close all connections."""


Deliverers = Mapping[type[Any], Deliverer]
"""The deliverer for each type of target."""
