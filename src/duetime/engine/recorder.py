"""Writes the results of attempts, one fenced batch at a time. Results gather while the previous batch is written."""

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
from duetime.instants import Instant
from duetime.model import Outcome, Status, Timer
from duetime.retry import Uniform
from duetime.store import Attempts
from duetime.telemetry import Telemetry

log = logging.getLogger(__name__)

BATCH_MAX = 1_000
ATTEMPTS_MAX = 1_500
"""How many stored attempts a batch may have: with the longest errors and response bodies they take up to 13 MB in a
statement, and some servers take no more than 16."""
RETRY_SECONDS = 0.2
BATCH_WORTH = 64
GATHER_SECONDS = 0.004
"""How long a small batch waits for more results. Nothing waits for a record, and a commit of one costs as much as of
ten."""


class Recorder:
    def __init__(
        self,
        store: Attempts,
        ownership: Ownership,
        returned: Callable[[Timer], None],
        clock: Clock,
        telemetry: Telemetry,
        *,
        freed: Callable[[], None],
        uniform: Uniform,
    ) -> None:
        self._store = store
        self._ownership = ownership
        self._returned = returned
        self._clock = clock
        self._telemetry = telemetry
        self._freed = freed
        self._uniform = uniform
        self._outcomes: list[tuple[Timer, Outcome, Instant, Instant]] = []
        self._changes: list[tuple[Timer, Timer]] = []
        self._has_work = asyncio.Event()
        self.recorded = asyncio.Event()
        """Set after each batch."""
        self.slots_in_flight = 0
        """Slots of begun timers whose outcome is not recorded yet: what the instance has in flight."""
        self.slots_by_namespace: Counter[str] = Counter()
        self.timers_by_shard: Counter[int] = Counter()
        self._sizes: dict[str, float] = {}  # slots per timer, of namespaces with large payloads

    def track(self, timers: Sequence[Timer]) -> None:
        """Count these begun timers as in flight until their outcomes are recorded."""
        for timer in timers:
            slots = slots_of(timer)
            if slots > 1 or self._sizes:
                self._weigh(timer.namespace, slots)
            self.slots_in_flight += slots
            self.slots_by_namespace[timer.namespace] += slots
            self.timers_by_shard[timer.shard] += 1

    def _weigh(self, namespace: str, slots: int) -> None:
        size = max(slots, 0.9 * self._sizes.get(namespace, 1.0) + 0.1 * slots)
        if size < 1.5:
            self._sizes.pop(namespace, None)
        else:
            self._sizes[namespace] = size

    def size(self, namespace: str) -> int:
        """An estimate of the slots that a timer of this namespace takes, from its recent large ones."""
        return round(self._sizes.get(namespace, 1.0))

    @property
    def size_max(self) -> int:
        return round(max(self._sizes.values(), default=1.0))

    def has_in_flight(self, shard: int) -> bool:
        """Whether this shard has timers in flight, or outcomes that are not recorded."""
        return self.timers_by_shard[shard] > 0

    def add(self, before: Timer, after: Timer) -> None:
        self._changes.append((before, after))
        self._has_work.set()

    def settle(self, timer: Timer, outcome: Outcome, *, sent_at: Instant, now: Instant) -> None:
        """Take the outcome of an attempt. The timer's next state is computed later, for the whole batch in a row: that
        takes half as long as one at a time between requests (docs/decisions/0017)."""
        self._outcomes.append((timer, outcome, sent_at, now))
        self._has_work.set()

    def _settle(self, most: int) -> None:
        outcomes, self._outcomes = self._outcomes[:most], self._outcomes[most:]
        for timer, outcome, sent_at, now in outcomes:
            after = lifecycle.settle(timer, outcome, sent_at=sent_at, now=now, uniform=self._uniform)
            self._telemetry.attempted(outcome.kind, after.status)
            self._changes.append((timer, after))

    def _done(self, batch: list[tuple[Timer, Timer]]) -> None:
        for timer, _ in batch:
            slots = slots_of(timer)
            self.slots_in_flight -= slots
            self.slots_by_namespace[timer.namespace] -= slots
            self.timers_by_shard[timer.shard] -= 1
        for namespace in [name for name, slots in self.slots_by_namespace.items() if not slots]:
            del self.slots_by_namespace[namespace]
        self.recorded.set()
        self._freed()

    async def run_once(self) -> None:
        """Record at most one batch."""
        self._settle(max(0, BATCH_MAX - len(self._changes)))
        count = _fitting(self._changes)
        batch, self._changes = self._changes[:count], self._changes[count:]
        if not self._changes and not self._outcomes:
            self._has_work.clear()
        if not batch:
            return
        started = self._clock.monotonic()
        try:
            recorded = await self._store.record(self._ownership.owner_id, batch)
        except StoreUnavailable as error:
            # Nothing was written, so the same conditional write is safe to repeat; the fence still applies.
            log.warning("could not record %d outcomes, retrying: %s", len(batch), error)
            self._changes[:0] = batch
            self._has_work.set()
            await self._clock.sleep(RETRY_SECONDS)
            return
        except StoreIndeterminate as error:
            log.warning("unknown whether %d outcomes were recorded, claiming their shards again: %s", len(batch), error)
            self._ownership.distrust({before.shard for before, _ in batch})
            self._done(batch)
            return
        self._telemetry.record_took(self._clock.monotonic() - started)
        self._telemetry.fenced(recorded.count(False))
        unknown: set[int] = set()
        for (before, after), done in zip(batch, recorded, strict=True):
            if done:
                if after.status is Status.PENDING:
                    self._returned(after)
            elif done is None:
                unknown.add(before.shard)
        if unknown:
            log.warning("unknown whether outcomes were recorded, claiming their shards again: %s", sorted(unknown))
            self._ownership.distrust(unknown)
        self._done(batch)

    async def run(self) -> None:
        while True:
            await self._has_work.wait()
            if len(self._changes) + len(self._outcomes) < BATCH_WORTH:
                await self._clock.sleep(GATHER_SECONDS)
            await self.run_once()


def _fitting(changes: Sequence[tuple[Timer, Timer]]) -> int:
    """How many of these go into one batch."""
    attempts = 0
    for count, (_, after) in enumerate(changes[:BATCH_MAX]):
        attempts += len(after.attempts)
        if attempts > ATTEMPTS_MAX and count:
            return count
    return min(len(changes), BATCH_MAX)
