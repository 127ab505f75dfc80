"""Which shards are ours, and until when that may be believed.

The store's row says who owns a shard; this keeps a copy that only ever errs towards owning less. A lease counts from
before the renewal was sent, minus a margin, on the monotonic clock: a stalled process wakes up distrusting itself. What
it still believes wrongly, the fence in ``begin`` and ``record`` refuses.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable

import msgspec

from duetime.clock import Clock
from duetime.errors import StoreFailed, StoreIndeterminate, StoreUnavailable
from duetime.model import Timer
from duetime.sharding import assigned
from duetime.store import UNNAMED, About, Hint, Standing, Store
from duetime.telemetry import Telemetry

log = logging.getLogger(__name__)

MOVES_PER_ROUND_MAX = 16
"""Shards on their way to another instance at one time: moves are gradual, so that nobody stops all at once."""
MOVE_WAIT_MS = 100
"""How soon to see again whether the attempts of a shard that is to move are done."""
TAKEOVER_WAIT_MS = 20
"""How long after the end of somebody's lease to look whether it was renewed."""


class Ownership:
    def __init__(
        self,
        store: Store,
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
        self._held: dict[int, int] = {}
        self._leaving: set[int] = set()
        self._suspect: set[int] = set()
        self._free: frozenset[int] = frozenset()
        self._unowned: frozenset[int] = frozenset()
        self._tells = False
        self._trusted_until = 0.0
        self._serving = False  # until it is known that our clock is right
        self._next_wait_ms = 0.0
        self._woken = asyncio.Event()
        self._ended = False

    def held(self) -> dict[int, int]:
        """The shards to begin timers of, with their versions; none once the lease may have run out."""
        if self._clock.monotonic() >= self._trusted_until:
            return {}
        return {shard: version for shard, version in self._held.items() if shard not in self._leaving}

    def shards(self) -> frozenset[int]:
        """The shards that the store said are ours, trusted or not."""
        return frozenset(self._held)

    def unowned(self) -> frozenset[int]:
        """The shards that have had no owner for two renewals, if it is up to this instance to tell."""
        return self._unowned if self._tells else frozenset()

    def holds_all(self) -> bool:
        return len(self._held) == self._store.shards

    def trusts(self, timer: Timer) -> bool:
        """Whether an attempt that was begun for us may still be sent."""
        return self._held.get(timer.shard) == timer.version and self._clock.monotonic() < self._trusted_until

    def lose(self, shards: Iterable[int]) -> None:
        """The store said that these are not ours any more."""
        for shard in shards:
            self._held.pop(shard, None)

    def distrust(self, shards: Iterable[int]) -> None:
        """A write for these went missing: act for them again only under a new version, and soon."""
        self._suspect.update(shards)
        self.lose(self._suspect)
        self.wake()

    def wake(self) -> None:
        """Something changed among the instances: see at once."""
        self._woken.set()

    async def run_once(self) -> None:
        """Renew, then move towards the shards that should be ours."""
        standing = await self._renew()
        right = abs(self.clock_offset_ms) <= self._lease_ms / 4
        if right != self._serving:
            self._serving = right
            if not right:
                log.error(
                    "this machine's clock is %d ms off the store's: giving up all shards until it is right",
                    self.clock_offset_ms,
                )
            standing = await self._renew()
            self._store.hint(Hint(shards=True))
        wanted: set[int] = set()
        if self._serving:
            wanted = assigned(self.owner_id, standing.instances, range(self._store.shards))
            claimable = (wanted & standing.free) | self._suspect
            if claimable:
                claimed = await self._store.claim(self.owner_id, claimable, self._lease_ms)
                self._held |= claimed
                self._suspect -= claimed.keys()
                self._gained()
        free = standing.free - self._held.keys()
        self._free, self._unowned = free, free & self._free
        self._tells = self.owner_id == min(standing.instances, default=self.owner_id)
        await self._move_out(self._held.keys() - wanted)
        self._telemetry.owned_shards(len(self._held))
        self._next_wait_ms = self._lease_ms / 3
        if self._leaving or self._suspect or self._clock.monotonic() >= self._trusted_until:
            self._next_wait_ms = MOVE_WAIT_MS
        elif standing.free_at is not None:
            self._next_wait_ms = min(self._next_wait_ms, standing.free_at - standing.now + TAKEOVER_WAIT_MS)

    async def _renew(self) -> Standing:
        about = msgspec.structs.replace(
            self._about,
            clock_offset_ms=self.clock_offset_ms,
            serving=self._serving,
            fires=self._telemetry.fires(),
            overdue=self._telemetry.overdue_now(),
        )
        sent, sent_at = self._clock.monotonic(), self._clock.now()
        standing = await self._store.renew(self.owner_id, self._lease_ms, about)
        self.clock_offset_ms = _offset_ms(sent_at, standing.now, self._clock.now())
        self._measured(self.clock_offset_ms)
        self._telemetry.clock_offset(self.clock_offset_ms)
        self._held = {shard: version for shard, version in standing.held.items() if shard not in self._suspect}
        self._trusted_until = sent + self._lease_ms * 0.8 / 1000
        return standing

    async def _move_out(self, shards: Iterable[int]) -> None:
        """Begin nothing more of some of these, and give up those whose attempts are done: so a move fires nothing
        twice."""
        staying = self._leaving & set(shards)
        self._leaving = staying | set(sorted(set(shards) - staying)[: MOVES_PER_ROUND_MAX - len(staying)])
        idle = [shard for shard in self._leaving if not self._busy(shard)]
        if idle:
            self.lose(idle)
            self._leaving.difference_update(idle)
            await self._store.release(self.owner_id, idle)
            self._store.hint(Hint(shards=True))

    async def leave(self) -> None:
        """Give everything up, so that others need not wait for the lease to run out."""
        self._held, self._trusted_until = {}, 0.0
        self._telemetry.owned_shards(0)
        await self._store.leave(self.owner_id)
        self._store.hint(Hint(shards=True))

    def end(self) -> None:
        """Renew no more: ``run`` ends when the renewal under way is done. Canceled, that might land after ``leave``."""
        self._ended = True
        self._woken.set()

    async def run(self) -> None:
        """Renew three times per lease, and sooner when there is a reason to, until ``end``."""
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


def _offset_ms(sent_at: int, store_at: int, answered_at: int) -> int:
    """How far the local clock is surely off the store's: an answer that took long is slow, not wrong."""
    return max(0, sent_at - store_at) + min(0, answered_at - store_at)
