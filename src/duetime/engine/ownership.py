"""Which shards are ours, and until when that may be believed.

The store's row says who owns a shard; this keeps a copy that only ever errs towards owning less. A lease counts from
before the renewal was sent, minus a margin, on the monotonic clock: a stalled process wakes up distrusting itself. What
it still believes wrongly, the fence in ``begin`` and ``record`` refuses.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from duetime.clock import Clock
from duetime.errors import StoreFailed, StoreIndeterminate, StoreUnavailable
from duetime.model import Timer
from duetime.sharding import assigned
from duetime.store import Store
from duetime.telemetry import Telemetry

log = logging.getLogger(__name__)

MOVES_PER_ROUND_MAX = 16
"""Shards given up to another instance in one round: moves are gradual, so that no instance stops all at once."""


class Ownership:
    def __init__(
        self, store: Store, clock: Clock, telemetry: Telemetry, *, lease_ms: int, owner_id: bytes | None = None
    ) -> None:
        self.owner_id = owner_id or os.urandom(16)
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._lease_ms = lease_ms
        self._held: dict[int, int] = {}
        self._suspect: set[int] = set()
        self._trusted_until = 0.0

    def held(self) -> dict[int, int]:
        """The shards to act for, with their versions; none once the lease may have run out."""
        return self._held if self._clock.monotonic() < self._trusted_until else {}

    def trusts(self, timer: Timer) -> bool:
        """Whether an attempt that was begun for us may still be sent."""
        return self.held().get(timer.shard) == timer.version

    def lose(self, shards: Iterable[int]) -> None:
        """The store said that these are not ours any more."""
        for shard in shards:
            self._held.pop(shard, None)

    def distrust(self, shards: Iterable[int]) -> None:
        """A write for these went missing: act for them again only under a new version."""
        self._suspect.update(shards)
        self.lose(self._suspect)

    async def run_once(self) -> None:
        """Renew, then move towards the shards that should be ours."""
        sent, sent_at = self._clock.monotonic(), self._clock.now()
        standing = await self._store.renew(self.owner_id, self._lease_ms)
        offset_ms = _offset_ms(sent_at, standing.now, self._clock.now())
        self._telemetry.clock_offset(offset_ms)
        if abs(offset_ms) > self._lease_ms / 4:
            log.error(
                "this machine's clock is %d ms off the store's: giving up all shards until it is right", offset_ms
            )
            await self.release()
            return
        self._held = {shard: version for shard, version in standing.held.items() if shard not in self._suspect}
        self._trusted_until = sent + self._lease_ms * 0.8 / 1000
        wanted = assigned(self.owner_id, standing.instances, range(self._store.shards))
        claimable = (wanted & standing.free) | self._suspect
        if claimable:
            self._held |= await self._store.claim(self.owner_id, claimable, self._lease_ms)
            self._suspect.clear()
        leaving = sorted(self._held.keys() - wanted)[:MOVES_PER_ROUND_MAX]
        if leaving:
            self.lose(leaving)
            await self._store.release(self.owner_id, leaving)
        self._telemetry.owned_shards(len(self._held))

    async def release(self) -> None:
        """Give everything up, so that others need not wait for the lease to run out."""
        leaving, self._held = list(self._held), {}
        self._trusted_until = 0.0
        self._telemetry.owned_shards(0)
        if leaving:
            await self._store.release(self.owner_id, leaving)

    async def run(self) -> None:
        """Renew three times per lease, and sooner while the store does not answer."""
        while True:
            wait_ms = self._lease_ms / 3
            try:
                await self.run_once()
            except StoreFailed:
                raise
            except (StoreUnavailable, StoreIndeterminate) as error:
                log.warning("could not renew the lease: %s", error)
                wait_ms = self._lease_ms / 10
            await self._clock.sleep(wait_ms / 1000)


def _offset_ms(sent_at: int, store_at: int, answered_at: int) -> int:
    """How far the local clock is surely off the store's: an answer that took long is slow, not wrong."""
    return max(0, sent_at - store_at) + min(0, answered_at - store_at)
