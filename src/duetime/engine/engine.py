"""Looks for what is due, begins it in the store and hands it out; and starts, drains and stops the parts."""

from __future__ import annotations

import asyncio
import logging
from random import uniform as random_uniform

from msgspec import Struct

from duetime.clock import Clock, CorrectedClock
from duetime.deliverer import Deliverers
from duetime.engine.alarm import Alarm
from duetime.engine.destinations import PATIENCE_MS
from duetime.engine.dispatcher import Dispatcher, Spawn
from duetime.engine.ownership import Ownership
from duetime.engine.recorder import Recorder
from duetime.errors import StoreError, StoreFailed, StoreIndeterminate, StoreUnavailable
from duetime.model import DAY_MS, MINUTE_MS, SECOND_MS
from duetime.retry import Uniform
from duetime.store import UNNAMED, About, Hint, Store
from duetime.telemetry import Telemetry

log = logging.getLogger(__name__)

UNHELD_WAIT_SECONDS = 0.05
LOOK_GAP_SECONDS = 0.002
"""Between a look that found everything and the next one: what falls due meanwhile shares a commit."""
PURGE_BATCH = 500


class EngineOptions(Struct, frozen=True, kw_only=True):
    lease_ms: int = 10 * SECOND_MS
    look_interval_ms: int = SECOND_MS
    begin_max: int = 500
    in_flight_max: int = 4096
    per_destination_max: int = 256
    drain_ms: int = 25 * SECOND_MS
    retention_ms: int = 30 * DAY_MS
    purge_interval_ms: int = MINUTE_MS


class Engine:
    def __init__(
        self,
        store: Store,
        deliverers: Deliverers,
        clock: Clock,
        telemetry: Telemetry,
        options: EngineOptions | None = None,
        *,
        uniform: Uniform = random_uniform,
        owner_id: bytes | None = None,
        about: About = UNNAMED,
    ) -> None:
        self.options = options or EngineOptions()
        self._store = store
        self._telemetry = telemetry
        self.clock = self._clock = corrected = CorrectedClock(clock)
        """What everybody but the ownership, which measures how far the machine's is off, takes the time from."""
        self.ownership = Ownership(
            store,
            clock,
            telemetry,
            lease_ms=self.options.lease_ms,
            about=about,
            owner_id=owner_id,
            busy=lambda shard: shard in self._looking_at or self.recorder.expects(shard),
            measured=corrected.correct,
        )
        self.alarm = Alarm(corrected, interval_ms=self.options.look_interval_ms)
        self.recorder = Recorder(store, self.ownership, self.alarm, corrected, telemetry, uniform=uniform)
        self.dispatcher = Dispatcher(
            deliverers,
            self.ownership,
            self.recorder,
            corrected,
            telemetry,
            per_destination_max=self.options.per_destination_max,
            queue_max=2 * self.options.begin_max,
            uniform=uniform,
        )
        self._draining = asyncio.Event()
        self._looking_at: dict[int, int] = {}
        """The shards of a begin that is under way: what it brings is not expected by anybody yet."""

    def nudge(self, at: int) -> None:
        """A timer was written that falls due at ``at``: by a client of ours, and maybe for another owner."""
        self.alarm.nudge(at)
        if not self.ownership.holds_all() and at < self._clock.now() + self.options.look_interval_ms:
            self._store.hint(Hint(due_at=at))

    def heard(self, hint: Hint) -> None:
        """Another instance knows something."""
        if hint.due_at is not None:
            self.alarm.nudge(hint.due_at)
        if hint.shards:
            self.ownership.wake()

    async def look(self, spawn: Spawn) -> bool:
        """Begin what is due, as much as can be delivered soon, and hand it out; whether there may be more of it."""
        limit = min(self.options.begin_max, self.options.in_flight_max - self.recorder.under_way)
        self._looking_at = held = dict(self.ownership.held())
        try:
            return await self._look(held, limit, spawn)
        finally:
            self._looking_at = {}

    async def _look(self, held: dict[int, int], limit: int, spawn: Spawn) -> bool:
        self.alarm.reset()
        started = self._clock.monotonic()
        try:
            begun = await self._store.begin(self.ownership.owner_id, held, limit)
        except StoreUnavailable as error:
            log.warning("could not look for due timers: %s", error)
            return False
        except StoreIndeterminate as error:
            log.warning("the fate of a begin is unknown, claiming the shards anew: %s", error)
            self.ownership.distrust(held)
            return False
        self._telemetry.begin_took(self._clock.monotonic() - started)
        self._telemetry.fenced(len(begun.refused))
        self.ownership.lose(begun.refused)
        self.dispatcher.dispatch(begun.timers, spawn)
        if begun.next_at is not None:
            self.alarm.nudge(begun.next_at)
        return len(begun.timers) == limit

    async def run(self) -> None:
        """Fire timers until ``drain`` is called; then finish what is in flight and give the shards up."""
        async with asyncio.TaskGroup() as upkeep:
            loops = [upkeep.create_task(loop) for loop in (self.ownership.run(), self.recorder.run(), self._purge())]
            async with asyncio.TaskGroup() as attempts:
                await self._fire(attempts.create_task)
                await self._finish()
                self.dispatcher.abandon()
            for task in loops:
                task.cancel()
            try:
                await self.ownership.leave()
            except StoreError as error:
                log.warning("could not release the shards, their leases will run out: %s", error)

    def drain(self) -> None:
        """Begin and start nothing more."""
        self._draining.set()
        self.dispatcher.drain()
        self.alarm.nudge(0)
        self.recorder.recorded.set()

    async def _fire(self, spawn: Spawn) -> None:
        while not self._draining.is_set():
            if self._has_enough():
                self.recorder.recorded.clear()
                await self._clock.sleep(PATIENCE_MS / 1000, self.recorder.recorded)
            elif not self.ownership.held():
                await self._clock.sleep(UNHELD_WAIT_SECONDS, self._draining)
            else:
                if not await self.look(spawn):
                    await self._clock.sleep(LOOK_GAP_SECONDS)
                await self.alarm.ring()

    def _has_enough(self) -> bool:
        """Whether to begin more only later: what is begun must leave soon, and a look should bring a good batch. One
        batch may wait while the next is begun, which takes long when the store is busy."""
        batch = min(self.options.begin_max, self.options.in_flight_max // 4)
        room = self.options.in_flight_max - self.recorder.under_way
        return room < batch or self.dispatcher.backlog() > batch

    async def _finish(self) -> None:
        until = self._clock.monotonic() + self.options.drain_ms / 1000
        while self.recorder.under_way and (left := until - self._clock.monotonic()) > 0:
            self.recorder.recorded.clear()
            await self._clock.sleep(left, self.recorder.recorded)
        if self.recorder.under_way:
            log.warning("%d attempts were still under way: they will be fired again", self.recorder.under_way)
        else:
            log.info("every outcome is recorded")

    async def _purge(self) -> None:
        """Drop what is older than its retention, a little at a time."""
        while True:
            try:
                dropped = await self._store.purge(retention_ms=self.options.retention_ms, limit=PURGE_BATCH)
            except StoreFailed:
                raise
            except StoreError as error:
                log.warning("could not drop old timers: %s", error)
                dropped = 0
            await self._clock.sleep(0.1 if dropped == PURGE_BATCH else self.options.purge_interval_ms / 1000)
