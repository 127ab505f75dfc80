"""Writes what came of attempts: one fenced batch at a time, gathered while the one before it is under way."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from duetime import lifecycle
from duetime.clock import Clock
from duetime.engine.alarm import Alarm
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
        alarm: Alarm,
        clock: Clock,
        telemetry: Telemetry,
        *,
        uniform: Uniform,
    ) -> None:
        self._store = store
        self._ownership = ownership
        self._alarm = alarm
        self._clock = clock
        self._telemetry = telemetry
        self._uniform = uniform
        self._outcomes: list[tuple[Timer, Outcome, int, int]] = []
        self._changes: list[tuple[Timer, Timer]] = []
        self._some = asyncio.Event()
        self.recorded = asyncio.Event()
        """Set whenever a batch has been dealt with."""
        self.under_way = 0
        """Begun timers whose outcome has not been dealt with yet: what the instance has in flight."""
        self._under_way: Counter[int] = Counter()  # the same by shard

    def expect(self, timers: Sequence[Timer]) -> None:
        """These were begun: their outcomes will come."""
        self.under_way += len(timers)
        self._under_way.update(timer.shard for timer in timers)

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
        self.under_way -= len(batch)
        self._under_way.subtract(before.shard for before, _ in batch)
        self.recorded.set()

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
                self._alarm.nudge(after.fire_at)
        self._done(batch)

    async def run(self) -> None:
        while True:
            await self._some.wait()
            if len(self._changes) + len(self._outcomes) < BATCH_WORTH:
                await self._clock.sleep(GATHER_SECONDS)
            await self.run_once()
