"""Asks the store every few seconds whether each due timer is begun, or held back for a reason that has a name.

What it finds is published as a metric, in the heartbeat of the instance and so on the page, and in ``/readyz``. An
instance looks after its own shards; one of them, the same for all, looks after shards that nobody owns.

    paused         the namespace is paused
    destination    the destination can't take more now: it is full, slow, or its breaker is open
    no_owner       no instance owns the shard
    behind         there is more to do than this instance gets done, or it has stopped working
    store          the store does not answer, or takes long
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

from duetime.clock import Clock
from duetime.engine.destinations import Destinations, Trust
from duetime.engine.ownership import Ownership
from duetime.errors import StoreError
from duetime.model import MINUTE_MS, SECOND_MS
from duetime.store import Overdue, Quarantine, Store
from duetime.telemetry import Telemetry

log = logging.getLogger(__name__)

SAMPLE_SECONDS = 5.0
GRACE_MS = 2 * SECOND_MS
"""A timer is overdue when it has been due for this long."""
COUNT_MAX = 10_000
"""Where counting the timers of one lane stops."""
SLOW_SECONDS = 1.0
"""A begin that takes longer is a slow store."""
STUCK_MS = 30 * SECOND_MS
"""An instance that has overdue timers for this long and begins none of them is not ready."""
STOPPED_MS = 2 * MINUTE_MS
"""An engine that has not looked for this long has stopped: the longest interval between two looks is half of it."""


class Reason(enum.StrEnum):
    PAUSED = "paused"
    DESTINATION = "destination"
    NO_OWNER = "no_owner"
    BEHIND = "behind"
    STORE = "store"


OURS = (Reason.NO_OWNER, Reason.BEHIND, Reason.STORE)
"""What is for operators to mend; the others are up to those who paused or receive."""


class Progress(Struct):
    """What the engine says of its looks."""

    waiting_since: int | None = None  # when the first look started that has not ended well; None after a good one
    looked_at: int = 0  # when the latest one ended well
    begun_at: int = 0  # when one last began a timer
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
        self._asking_since: int | None = None
        self._behind_since: int | None = None
        self._unowned_since: int | None = None

    async def run(self) -> None:
        while True:
            await self._clock.sleep(SAMPLE_SECONDS)
            try:
                await self.sample()
            except Exception:  # Whoever watches must go on.
                log.exception("could not see what is overdue")

    async def sample(self) -> None:
        """Count what is overdue, by reason."""
        now = self._clock.now()
        before = now - GRACE_MS
        found: Counter[Reason] = Counter()
        self._asking_since = self._asking_since or now
        try:
            for overdue in await self._store.overdue(self._ownership.shards(), before, COUNT_MAX):
                found[self._reason(overdue)] += overdue.timers
            unowned = self._ownership.unowned()
            for overdue in await self._store.overdue(unowned, before, COUNT_MAX) if unowned else ():
                found[Reason.PAUSED if overdue.paused else Reason.NO_OWNER] += overdue.timers
            self.quarantine = await self._store.quarantine()
            self._asking_since = None
        except StoreError as error:
            log.debug("could not ask the store what is overdue: %s", error)
            found = Counter({Reason.STORE: max(1, self.overdue.total())})
        for reason in OURS:
            if found[reason] and not self.overdue[reason]:
                log.warning("%d timers are overdue: %s", found[reason], _SAYS[reason])
        self._behind_since = (self._behind_since or now) if found[Reason.BEHIND] or found[Reason.STORE] else None
        self._unowned_since = (self._unowned_since or now) if found[Reason.NO_OWNER] else None
        self.overdue = found
        self._telemetry.overdue({reason: found[reason] for reason in Reason})

    def problem(self) -> str | None:
        """Why this instance does not do its work, in a sentence; None if it does."""
        long_ago = self._clock.now() - STUCK_MS
        if self._asking_since is not None and self._asking_since < long_ago:
            return _SAYS[Reason.STORE]
        if self._unowned_since is not None and self._unowned_since < long_ago:
            return f"timers are overdue: {_SAYS[Reason.NO_OWNER]}"
        if self._behind_since is not None and max(self._behind_since, self.progress.begun_at) < long_ago:
            return f"timers are overdue, and this instance has begun none for {STUCK_MS // SECOND_MS} seconds"
        return None

    def _reason(self, overdue: Overdue) -> Reason:
        if overdue.paused:
            return Reason.PAUSED
        now, free, progress = self._clock.now(), self._free(), self.progress
        if progress.waiting_since is not None and now - progress.waiting_since > GRACE_MS:
            return Reason.STORE
        if free > 0 and now - max(progress.looked_at, self._started_at) > STOPPED_MS:
            return Reason.BEHIND
        destination = self._destinations.get(overdue.destination)
        if destination is not None and (
            destination.trust(now) is Trust.SUSPECT
            # The engine fills it up again when it is half empty: at less than a third it is not what we wait for.
            or self._destinations.room(destination, now, free) <= 2 * destination.held
        ):
            return Reason.DESTINATION
        return Reason.STORE if progress.took_seconds > SLOW_SECONDS else Reason.BEHIND


_SAYS = {
    Reason.NO_OWNER: "no instance owns their shards",
    Reason.BEHIND: "this instance does not keep up with them",
    Reason.STORE: "the store does not answer, or takes long",
}
