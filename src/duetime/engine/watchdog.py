"""Counts overdue timers every few seconds, by the reason why they have not been begun.

The counts appear as a metric, in the instance's heartbeat (and so on the web page) and in ``/readyz``. Each instance
counts in its own shards. One instance, the same one for all, also counts in shards without an owner.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

from duetime.clock import Clock
from duetime.engine.destinations import Destinations, Trust
from duetime.engine.ownership import Ownership
from duetime.errors import StoreError
from duetime.instants import EPOCH, Instant
from duetime.model import MINUTE_MS, SECOND_MS
from duetime.overdue import OPERATOR_REASONS, OVERDUE_MS, TEXTS, Reason
from duetime.store import Overdue, Quarantine, Store
from duetime.telemetry import Telemetry

log = logging.getLogger(__name__)

SAMPLE_SECONDS = 5.0
COUNT_MAX = 10_000
"""The count of one lane stops here."""
SLOW_SECONDS = 1.0
"""If a begin takes longer, the store is slow."""
STUCK_MS = 30 * SECOND_MS
"""An instance that has had overdue timers for this long, and has begun none of them, is not ready."""
STOPPED_MS = 2 * MINUTE_MS
"""An engine that has not polled for this long has stopped. The longest poll interval is half of this."""


class Progress(Struct):
    """How the engine's polls are going."""

    waiting_since: Instant | None = None  # start of the first poll since the last success; None after a success
    looked_at: Instant = EPOCH  # when the last successful poll ended
    begun_at: Instant = EPOCH  # when a poll last began a timer
    took_seconds: float = 0.0


class Watchdog:
    def __init__(
        self,
        store: Store,
        ownership: Ownership,
        destinations: Destinations,
        clock: Clock,
        telemetry: Telemetry,
        *,
        free: Callable[[], int],
    ) -> None:
        self._store = store
        self._ownership = ownership
        self._destinations = destinations
        self._clock = clock
        self._telemetry = telemetry
        self._free = free
        self.progress = Progress()
        self.overdue: Counter[Reason] = Counter()
        self.quarantine = Quarantine()
        self._started_at = clock.now()
        self._querying_since: Instant | None = None
        self._behind_since: Instant | None = None
        self._unowned_since: Instant | None = None

    async def run(self) -> None:
        while True:
            await self._clock.sleep(SAMPLE_SECONDS)
            try:
                await self.sample()
            except Exception:  # The watchdog must keep running.
                log.exception("could not count overdue timers")

    async def sample(self) -> None:
        """Count overdue timers by reason."""
        now = self._clock.now()
        before = now - OVERDUE_MS
        found: Counter[Reason] = Counter()
        self._querying_since = self._querying_since or now
        try:
            for overdue in await self._store.overdue(self._ownership.shards(), before, COUNT_MAX):
                found[self._reason(overdue)] += overdue.timers
            unowned = self._ownership.unowned()
            for overdue in await self._store.overdue(unowned, before, COUNT_MAX) if unowned else ():
                found[Reason.PAUSED if overdue.paused else Reason.NO_OWNER] += overdue.timers
            self.quarantine = await self._store.quarantine()
            self._querying_since = None
        except StoreError as error:
            log.debug("could not count overdue timers: %s", error)
            found = Counter({Reason.STORE: max(1, self.overdue.total())})
        for reason in OPERATOR_REASONS:
            if found[reason] and not self.overdue[reason]:
                log.warning("timers are overdue %s (%d)", TEXTS[reason], found[reason])
        self._behind_since = (self._behind_since or now) if found[Reason.BEHIND] or found[Reason.STORE] else None
        self._unowned_since = (self._unowned_since or now) if found[Reason.NO_OWNER] else None
        self.overdue = found
        self._telemetry.overdue({reason: found[reason] for reason in Reason})

    def problem(self) -> str | None:
        """Why this instance is not ready, as a sentence for users; None if it is."""
        long_ago = self._clock.now() - STUCK_MS
        if self._querying_since is not None and self._querying_since < long_ago:
            return "the store is slow or does not respond"
        if self._unowned_since is not None and self._unowned_since < long_ago:
            return f"timers are overdue {TEXTS[Reason.NO_OWNER]}"
        if self._behind_since is not None and max(self._behind_since, self.progress.begun_at) < long_ago:
            return f"timers are overdue, and this instance has started none for {STUCK_MS // SECOND_MS} seconds"
        return None

    def _reason(self, overdue: Overdue) -> Reason:
        if overdue.paused:
            return Reason.PAUSED
        now, free, progress = self._clock.now(), self._free(), self.progress
        if progress.waiting_since is not None and now - progress.waiting_since > OVERDUE_MS:
            return Reason.STORE
        if free > 0 and now - max(progress.looked_at, self._started_at) > STOPPED_MS:
            return Reason.BEHIND
        destination = self._destinations.get(overdue.destination)
        if destination is not None and (
            destination.trust(now) is Trust.SUSPECT
            # The engine refills it when it is half empty, so below a third the destination is not the bottleneck.
            or self._destinations.room(destination, now, free) <= 2 * destination.held
        ):
            return Reason.DESTINATION
        return Reason.STORE if progress.took_seconds > SLOW_SECONDS else Reason.BEHIND
