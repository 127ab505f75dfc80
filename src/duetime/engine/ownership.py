"""Tracks which shards this instance owns, and until when it can rely on that.

The shard's row in the store names its owner. This module keeps a copy, which may list fewer shards than we own but
never more. A lease is measured on the monotonic clock, from before the renewal was sent and minus a margin, so a
process that was stalled no longer trusts its lease when it resumes. If the copy is wrong anyway, the fence in ``begin``
and ``record`` refuses the write.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable

import msgspec

from duetime.clock import Clock
from duetime.errors import StoreFailed, StoreIndeterminate, StoreUnavailable
from duetime.instants import Instant
from duetime.model import Timer
from duetime.sharding import assigned
from duetime.store import UNNAMED, About, Hint, Renewal, Shards
from duetime.telemetry import Telemetry

log = logging.getLogger(__name__)

MOVES_PER_ROUND_MAX = 16
"""The most shards that move to other instances at the same time, so that work never stops in all shards at once."""
MOVE_WAIT_MS = 100
"""How often to check whether the attempts of a leaving shard are done."""
TAKEOVER_WAIT_MS = 20
"""How long after another instance's lease ends to check whether it was renewed."""


class Ownership:
    def __init__(
        self,
        store: Shards,
        clock: Clock,
        telemetry: Telemetry,
        *,
        lease_ms: int,
        about: About = UNNAMED,
        owner_id: bytes | None = None,
        busy: Callable[[int], bool] = lambda shard: False,
        measured: Callable[[int], None] = lambda offset_ms: None,
        gained: Callable[[], None] = lambda: None,
    ) -> None:
        self.owner_id = owner_id or os.urandom(16)
        self.clock_offset_ms = 0
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._lease_ms = lease_ms
        self._about = about
        self._busy = busy
        self._measured = measured
        self._gained = gained
        self._failovers = 0
        self._held: dict[int, int] = {}
        self._leaving: set[int] = set()
        self._suspect: set[int] = set()
        self._free: frozenset[int] = frozenset()
        self._unowned: frozenset[int] = frozenset()
        self._reports_unowned = False
        self._trusted_until = 0.0
        self._serving = False  # until the first renewal shows that our clock is right
        self._next_wait_ms = 0.0
        self._woken = asyncio.Event()
        self._ended = False

    def held(self) -> dict[int, int]:
        """The shards in which to begin timers, with their versions; none once the lease may have run out."""
        if self._clock.monotonic() >= self._trusted_until:
            return {}
        return {shard: version for shard, version in self._held.items() if shard not in self._leaving}

    def shards(self) -> frozenset[int]:
        """The shards that were ours at the last renewal, even if the lease may have run out."""
        return frozenset(self._held)

    def unowned(self) -> frozenset[int]:
        """The shards without an owner for two renewals, if this is the instance that reports them."""
        return self._unowned if self._reports_unowned else frozenset()

    def holds_all(self) -> bool:
        return len(self._held) == self._store.shards

    def trusts(self, timer: Timer) -> bool:
        """Whether an attempt that this instance has begun may still be sent."""
        return self._held.get(timer.shard) == timer.version and self._clock.monotonic() < self._trusted_until

    def lose(self, shards: Iterable[int]) -> None:
        """Drop shards that we own no longer, according to the store."""
        for shard in shards:
            self._held.pop(shard, None)

    def distrust(self, shards: Iterable[int]) -> None:
        """Claim these again under a new version before acting for them: a write's result is unknown."""
        self._suspect.update(shards)
        self.lose(self._suspect)
        self.wake()

    def wake(self) -> None:
        """Renew at once: the set of instances or shards has changed."""
        self._woken.set()

    async def run_once(self) -> None:
        """Renew the lease, then claim and release shards towards the ones that should be ours."""
        renewal = await self._renew()
        right = abs(self.clock_offset_ms) <= self._lease_ms / 4
        if right != self._serving:
            self._serving = right
            if not right:
                log.error(
                    "this machine's clock is %d ms off the store's: releasing all shards until the difference is "
                    "at most %d ms; synchronize the clock with NTP",
                    *(self.clock_offset_ms, self._lease_ms // 4),
                )
            renewal = await self._renew()
            self._store.hint(Hint(shards=True))
        wanted: set[int] = set()
        if self._serving:
            wanted = assigned(self.owner_id, renewal.instances, range(self._store.shards))
            claimable = (wanted & renewal.free) | self._suspect
            if claimable:
                claimed = await self._store.claim(self.owner_id, claimable, self._lease_ms)
                self._held |= claimed
                self._suspect -= claimed.keys()
                self._gained()
        free = renewal.free - self._held.keys()
        self._free, self._unowned = free, free & self._free
        self._reports_unowned = self.owner_id == min(renewal.instances, default=self.owner_id)
        # With a wrong clock, suspect shards are not claimed again: they are released like the others.
        suspect = set() if self._serving else self._suspect
        await self._move_out((self._held.keys() | suspect) - wanted)
        self._telemetry.owned_shards(len(self._held))
        self._next_wait_ms = self._lease_ms / 3
        if self._leaving or self._suspect or self._clock.monotonic() >= self._trusted_until:
            self._next_wait_ms = MOVE_WAIT_MS
        elif renewal.free_at is not None:
            self._next_wait_ms = min(self._next_wait_ms, renewal.free_at - renewal.now + TAKEOVER_WAIT_MS)

    async def _renew(self) -> Renewal:
        about = msgspec.structs.replace(
            self._about,
            clock_offset_ms=self.clock_offset_ms,
            serving=self._serving,
            fires=self._telemetry.fires(),
            overdue=self._telemetry.overdue_now(),
        )
        sent, sent_at = self._clock.monotonic(), self._clock.now()
        renewal = await self._store.renew(self.owner_id, self._lease_ms, about)
        self.clock_offset_ms = _offset_ms(sent_at=sent_at, store_at=renewal.now, answered_at=self._clock.now())
        self._measured(self.clock_offset_ms)
        self._telemetry.clock_offset(self.clock_offset_ms)
        if renewal.failovers != self._failovers:
            # The store has failed over and may have lost records: their timers are executing again. An attempt counts
            # as lost only if its version is older than its shard's, so the shards need new versions.
            self._failovers = renewal.failovers
            self._suspect.update(renewal.held)
        self._suspect &= renewal.held.keys()  # a shard that is not ours any more needs no new version from us
        self._held = {shard: version for shard, version in renewal.held.items() if shard not in self._suspect}
        self._trusted_until = sent + self._lease_ms * 0.8 / 1000
        return renewal

    async def _move_out(self, shards: Iterable[int]) -> None:
        """Stop beginning timers of some of these shards, and release those whose attempts are done, so that a move
        fires no timer twice."""
        staying = self._leaving & set(shards)
        self._leaving = staying | set(sorted(set(shards) - staying)[: MOVES_PER_ROUND_MAX - len(staying)])
        idle = [shard for shard in self._leaving if not self._busy(shard)]
        if idle:
            self.lose(idle)
            self._leaving.difference_update(idle)
            await self._store.release(self.owner_id, idle)
            self._store.hint(Hint(shards=True))

    async def leave(self) -> None:
        """Release everything, so that other instances need not wait until the lease runs out."""
        self._held, self._trusted_until = {}, 0.0
        self._telemetry.owned_shards(0)
        await self._store.leave(self.owner_id)
        self._store.hint(Hint(shards=True))

    def end(self) -> None:
        """Stop renewing: ``run`` returns after the current renewal. Not canceled, because it could then take effect
        after ``leave``."""
        self._ended = True
        self._woken.set()

    async def run(self) -> None:
        """Renew three times per lease, or sooner if needed, until ``end``."""
        while not self._ended:
            self._woken.clear()
            try:
                await self.run_once()
                wait_ms = self._next_wait_ms
            except StoreFailed:
                raise
            except (StoreUnavailable, StoreIndeterminate) as error:
                log.warning("could not renew the lease: %s", error)
                wait_ms = self._lease_ms / 10
            if not self._ended:
                await self._clock.sleep(wait_ms / 1000, self._woken)


def _offset_ms(*, sent_at: Instant, store_at: Instant, answered_at: Instant) -> int:
    """The least that the local clock must be off the store's: a slow response alone does not count as an offset."""
    return max(0, sent_at - store_at) + min(0, answered_at - store_at)
