"""The store's time: the median of the clocks of up to three nodes, so that one wrong clock fires nothing early.

The nodes are asked every second or so; in between, the time passes as on this machine's monotonic clock. Each answer is
taken as old as it can be, so the result is never ahead of the nodes. While only two nodes answer, the earlier clock
counts.
"""

from __future__ import annotations

import asyncio
import logging
from statistics import median_low

from duetime.clock import Clock
from duetime.errors import StoreError, StoreUnavailable
from duetime.instants import Instant
from duetime.stores.cassandra.driver import NOBODY_ASKED, Session

log = logging.getLogger(__name__)

ASKED_MAX = 3
FRESH_SECONDS = 1.0
THIRD_SECONDS = 0.05
"""How long to wait for the third answer once there are two."""
SKEW_MS_MAX = 500
NOW = "SELECT to_unix_timestamp(now()) FROM system.local"


class NodeClocks:
    def __init__(self, session: Session, datacenter: str | None, clock: Clock) -> None:
        self._session = session
        self._datacenter = datacenter
        self._clock = clock
        self._asking = asyncio.Lock()
        self._ahead_ms = 0.0
        """The store's time minus the monotonic clock."""
        self._asked_at: float | None = None
        self._warned = False

    async def now(self) -> Instant:
        async with self._asking:
            if self._asked_at is None or self._clock.monotonic() - self._asked_at > FRESH_SECONDS:
                await self._ask()
        return Instant(int(self._ahead_ms + self._clock.monotonic() * 1000))

    async def _ask(self) -> None:
        nodes = [node for node in self._session.nodes() if self._datacenter in (None, node.datacenter)]
        nodes = sorted(nodes, key=lambda node: str(node.address))[:ASKED_MAX]
        if not nodes:
            raise StoreUnavailable(NOBODY_ASKED)
        asked_at = self._clock.monotonic()
        answers = {asyncio.ensure_future(self._ahead(node)) for node in nodes}
        try:
            aheads = await self._answered(answers)
        finally:
            for answer in answers:
                answer.cancel()
        self._ahead_ms = median_low(aheads)
        self._asked_at = asked_at
        apart = round(max(aheads) - min(aheads))
        if (apart > SKEW_MS_MAX) is not self._warned:
            self._warned = not self._warned
            if self._warned:
                log.warning("the clocks of the nodes differ by about %d ms: timers may fire late; run NTP", apart)

    async def _answered(self, waiting: set[asyncio.Task[float]]) -> list[float]:
        """The answers of all nodes, or of two of them if others are slow."""
        aheads: list[float] = []
        errors: list[BaseException] = []
        while waiting:
            patience = THIRD_SECONDS if len(aheads) >= 2 else None
            done, waiting = await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            for answer in done:
                error = answer.exception()
                if error is None:
                    aheads.append(answer.result())
                elif isinstance(error, StoreError):
                    errors.append(error)
                else:
                    raise error
            if not done:
                break
        if not aheads:
            raise errors[0]
        return aheads

    async def _ahead(self, node: object) -> float:
        [(now,)] = await self._session.read_on(node, NOW)
        return float(now - self._clock.monotonic() * 1000)
