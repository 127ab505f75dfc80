"""Writes what came of attempts: one fenced batch at a time, gathered while the one before it is under way."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from duetime import lifecycle
from duetime.clock import Clock
from duetime.engine.destinations import slots_of
from duetime.engine.ownership import Ownership
from duetime.errors import StoreIndeterminate, StoreUnavailable
from duetime.model import Outcome, Status, Timer
from duetime.retry import Uniform
from duetime.store import Store
from duetime.telemetry import Telemetry

log = logging.getLogger(__name__)

BATCH_MAX = 1_000
RETRY_SECONDS = 0.2
BATCH_WORTH = 64
GATHER_SECONDS = 0.004
"""How long a small batch waits for company: nobody waits for a record, and a commit costs one as much as ten."""


class Recorder:
    def __init__(
        self,
        store: Store,
        ownership: Ownership,
        nudge: Callable[[Timer], None],
        clock: Clock,
        telemetry: Telemetry,
        *,
        freed: Callable[[], None],
        uniform: Uniform,
    ) -> None:
        self._store = store
        self._ownership = ownership
        self._nudge = nudge
        self._clock = clock
        self._telemetry = telemetry
        self._freed = freed
        self._uniform = uniform
        self._outcomes: list[tuple[Timer, Outcome, int, int]] = []
        self._changes: list[tuple[Timer, Timer]] = []
        self._some = asyncio.Event()
        self.recorded = asyncio.Event()
        """Set whenever a batch has been dealt with."""
        self.under_way = 0
        """The slots of begun timers whose outcome has not been dealt with yet: what the instance has in flight."""
        self.by_namespace: Counter[str] = Counter()
        self._sizes: dict[str, float] = {}  # of namespaces with large payloads
        self._under_way: Counter[int] = Counter()  # timers by shard

    def expect(self, timers: Sequence[Timer]) -> None:
        """These were begun: their outcomes will come."""
        for timer in timers:
            slots = slots_of(timer)
            if slots > 1 or self._sizes:
                self._weigh(timer.namespace, slots)
            self.under_way += slots
            self.by_namespace[timer.namespace] += slots
            self._under_way[timer.shard] += 1

    def _weigh(self, namespace: str, slots: int) -> None:
        size = max(slots, 0.9 * self._sizes.get(namespace, 1.0) + 0.1 * slots)
        if size < 1.5:
            self._sizes.pop(namespace, None)
        else:
            self._sizes[namespace] = size

    def size(self, namespace: str) -> int:
        """How many slots a timer of this namespace takes, as the large ones of late did."""
        return round(self._sizes.get(namespace, 1.0))

    @property
    def size_max(self) -> int:
        return round(max(self._sizes.values(), default=1.0))

    def expects(self, shard: int) -> bool:
        """Whether an outcome of this shard is yet to come or to be recorded."""
        return self._under_way[shard] > 0

    def add(self, before: Timer, after: Timer) -> None:
        self._changes.append((before, after))
        self._some.set()

    def settle(self, timer: Timer, outcome: Outcome, sent_at: int, now: int) -> None:
        """An attempt has ended. What that makes of its timer is worked out with the others of a batch, in a row, which
        takes half as long as one at a time between requests (docs/decisions/0017)."""
        self._outcomes.append((timer, outcome, sent_at, now))
        self._some.set()

    def _settle(self, most: int) -> None:
        outcomes, self._outcomes = self._outcomes[:most], self._outcomes[most:]
        for timer, outcome, sent_at, now in outcomes:
            after = lifecycle.settle(timer, outcome, sent_at=sent_at, now=now, uniform=self._uniform)
            self._telemetry.attempted(outcome.kind, after.status)
            self._changes.append((timer, after))

    def _done(self, batch: list[tuple[Timer, Timer]]) -> None:
        for timer, _ in batch:
            slots = slots_of(timer)
            self.under_way -= slots
            self.by_namespace[timer.namespace] -= slots
            self._under_way[timer.shard] -= 1
        for namespace in [name for name, slots in self.by_namespace.items() if not slots]:
            del self.by_namespace[namespace]
        self.recorded.set()
        self._freed()

    async def run_once(self) -> None:
        """Record what there is, at most one batch."""
        self._settle(max(0, BATCH_MAX - len(self._changes)))
        batch, self._changes = self._changes[:BATCH_MAX], self._changes[BATCH_MAX:]
        if not self._changes and not self._outcomes:
            self._some.clear()
        if not batch:
            return
        started = self._clock.monotonic()
        try:
            recorded = await self._store.record(self._ownership.owner_id, batch)
        except StoreUnavailable as error:
            # Nothing was written, so the same conditional write may be sent again; the fence judges it then.
            log.warning("could not record %d outcomes, trying again: %s", len(batch), error)
            self._changes[:0] = batch
            self._some.set()
            await self._clock.sleep(RETRY_SECONDS)
            return
        except StoreIndeterminate as error:
            log.warning(
                "the fate of %d recorded outcomes is unknown, claiming their shards anew: %s", len(batch), error
            )
            self._ownership.distrust({before.shard for before, _ in batch})
            self._done(batch)
            return
        self._telemetry.record_took(self._clock.monotonic() - started)
        self._telemetry.fenced(recorded.count(False))
        for (_, after), done in zip(batch, recorded, strict=True):
            if done and after.status is Status.PENDING:
                self._nudge(after)
        self._done(batch)

    async def run(self) -> None:
        while True:
            await self._some.wait()
            if len(self._changes) + len(self._outcomes) < BATCH_WORTH:
                await self._clock.sleep(GATHER_SECONDS)
            await self.run_once()
