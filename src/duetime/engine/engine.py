"""Polls for due timers, begins them in the store and dispatches them; also starts, drains and stops the engine's parts.

One poll is called a look. While few timers are due, a look begins the oldest ones ("by age"). While many are due, it
begins a portion of each lane ("by lane"), and a survey asks the store now and then which lanes have due timers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from random import uniform as random_uniform

from msgspec import Struct

from duetime.clock import Clock, CorrectedClock
from duetime.deliverer import Deliverers
from duetime.engine.alarm import Alarm
from duetime.engine.destinations import Destinations
from duetime.engine.dispatcher import Dispatcher, Spawn
from duetime.engine.lanes import Lanes
from duetime.engine.ownership import Ownership
from duetime.engine.recorder import Recorder
from duetime.engine.watchdog import Watchdog
from duetime.errors import StoreError, StoreFailed, StoreIndeterminate, StoreUnavailable
from duetime.instants import EPOCH, Instant
from duetime.model import DAY_MS, MINUTE_MS, SECOND_MS, Timer, destination_of, lane_of
from duetime.retry import Uniform
from duetime.store import UNNAMED, About, Begun, Hint, Store
from duetime.telemetry import Telemetry

log = logging.getLogger(__name__)

UNHELD_WAIT_SECONDS = 0.05
FULL_WAIT_SECONDS = 0.25
RETRY_MS = SECOND_MS
"""How soon to poll again after the store failed."""
RETURN_MS = 20
"""How soon to poll for a timer that was put back."""
LANE_MAX = 16
"""The most timers of one lane that a look begins if its destination has no limit of its own."""
BY_AGE_MAX = 256
"""The most timers that a look by age begins: it can't know their namespaces and destinations in advance."""
SURVEY_DUE_MAX = 1_000
"""A survey counts due timers up to this number. Looks by age can resume below half of it."""
BY_LANE_MS = 1_000
"""The shortest time by lane: switching to it costs a survey."""
RELAX_MS = 1_000
PAUSE_END_STEP_MS = 100
"""Polls for destinations whose pause ends happen at multiples of this, so that one poll serves many of them."""
SURVEY_AHEAD_MS = 1_000
SURVEY_GAP_SECONDS = 0.05
SURVEY_REST = 10
"""The pause after a survey, as a multiple of the time that it took."""
LOOK_GAP_SECONDS = 0.002
"""The pause after a look that left nothing due: timers that fall due meanwhile share a commit."""
PURGE_BATCH = 10_000
PURGE_REST_SECONDS = 0.01
"""The shortest pause between two purge batches. The pause is as long as the batch took, so purging takes at most half
of the time."""


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
        weight: Callable[[str], int] = lambda namespace: 1,
    ) -> None:
        self.options = options or EngineOptions()
        self._store = store
        self._telemetry = telemetry
        self._weight = weight
        self.clock = self._clock = corrected = CorrectedClock(clock)
        """The clock for everything except ``Ownership``, which measures how far the machine's clock is off."""
        self.ownership = Ownership(
            store,
            clock,
            telemetry,
            lease_ms=self.options.lease_ms,
            about=about,
            owner_id=owner_id,
            busy=lambda shard: shard in self._looking_at or self.recorder.has_in_flight(shard),
            measured=corrected.correct,
            gained=lambda: self.nudge(),
        )
        self.alarm = Alarm(corrected, interval_ms=self.options.look_interval_ms)
        self.recorder = Recorder(
            store, self.ownership, self._returned, corrected, telemetry, freed=self._freed, uniform=uniform
        )
        self.destinations = Destinations(
            cap=self.options.per_destination_max,
            queue_max=2 * self.options.begin_max,
            in_flight_max=self.options.in_flight_max,
        )
        self.dispatcher = Dispatcher(
            deliverers,
            self.destinations,
            self.ownership,
            self.recorder,
            corrected,
            telemetry,
            poll_again=lambda: self.alarm.nudge(EPOCH),
            uniform=uniform,
        )
        self.watchdog = Watchdog(
            store, self.ownership, self.destinations, corrected, telemetry, free=lambda: self._free()
        )
        self.lanes = Lanes()
        self._relax_at = EPOCH
        self._survey_now = asyncio.Event()
        self._by_lane_since = EPOCH
        self._survey_rest = 0.0
        self._surveyed_until = EPOCH
        """Timers that fall due later than this are found by the next survey."""
        self._draining = asyncio.Event()
        self._looking_at: dict[int, int] = {}
        """The shards of the begin in progress: the recorder does not count its timers yet."""

    def nudge(self, *timers: Timer) -> None:
        """Poll in time for these timers, which a client of this instance has written; another instance may own them.
        Without timers: poll and survey at once."""
        if not timers:
            self._survey_now.set()
            self.alarm.nudge(EPOCH)
            return
        at = timers[0].fire_at if len(timers) == 1 else min(timer.fire_at for timer in timers)
        self.alarm.nudge(at)
        if self.lanes.active:
            for timer in timers:
                if timer.fire_at < self._surveyed_until:
                    self.lanes.learn_timer(timer)
        if not self.ownership.holds_all() and at < self._clock.now() + self.options.look_interval_ms:
            self._store.hint(Hint(due_at=at))

    def heard(self, hint: Hint) -> None:
        """Handle a hint from another instance."""
        if hint.due_at is not None:
            self.alarm.nudge(hint.due_at)
            self._survey_now.set()
        if hint.shards:
            self.ownership.wake()

    def _returned(self, timer: Timer) -> None:
        """A timer is pending again. If it was put back, it is due already, but its obstacle may last: wait a little."""
        self.alarm.nudge(max(timer.fire_at, self._clock.now() + RETURN_MS))
        if self.lanes.active:
            self.lanes.learn_timer(timer)

    def _freed(self) -> None:
        """Poll if the last look was short of slots: some have become free."""
        if self.lanes.short:
            self.alarm.nudge(EPOCH)

    def _free(self) -> int:
        return self.options.in_flight_max - self.recorder.slots_in_flight

    def _begin_max(self) -> int:
        """The most timers that a look begins: it leaves half of the free slots to the next look."""
        return max(1, min(self.options.begin_max, self._free() // 2))

    async def look(self, spawn: Spawn) -> bool:
        """Begin as many due timers as can be delivered soon, and dispatch them. Returns whether more may be due."""
        self._looking_at = held = dict(self.ownership.held())
        self.alarm.reset()
        self.dispatcher.sweep()
        started = self._clock.monotonic()
        progress = self.watchdog.progress
        progress.waiting_since = progress.waiting_since or self._clock.now()
        try:
            look = self._look_by_lane if self.lanes.active else self._look_by_age
            begun, more = await look(held, self._begin_max(), spawn)
        except StoreUnavailable as error:
            log.warning("could not poll for due timers: %s", error)
            self.alarm.nudge(self._clock.now() + RETRY_MS)
            return False
        except StoreIndeterminate as error:
            log.warning("unknown whether timers were begun, claiming the shards again: %s", error)
            self.ownership.distrust(held)
            return False
        finally:
            self._looking_at = {}
        progress.waiting_since, progress.looked_at = None, self._clock.now()
        progress.took_seconds = self._clock.monotonic() - started
        self._telemetry.begin_took(progress.took_seconds)
        if begun is not None:
            if begun.timers:
                progress.begun_at = progress.looked_at
            self._telemetry.fenced(len(begun.refused))
            self.ownership.lose(begun.refused)
            if begun.unknown:
                log.warning("unknown whether timers were begun, claiming the shards again: %s", sorted(begun.unknown))
                self.ownership.distrust(begun.unknown)
        if more:
            self.alarm.nudge(EPOCH)
        return more

    async def _look_by_age(self, held: Mapping[int, int], limit: int, spawn: Spawn) -> tuple[Begun, bool]:
        """Begin the oldest due timers: of each lane at most ``LANE_MAX``, or the limit of its destination."""
        now, free = self._clock.now(), self._free()
        if now >= self._relax_at:
            self.destinations.relax(now, free, LANE_MAX)
            self._relax_at = now + RELAX_MS
        limits = self.destinations.limits(now, free, self._weight)
        spare = (free - self.options.in_flight_max // 2) // self.recorder.size_max
        limit = max(1, min(limit, BY_AGE_MAX, spare))
        begun = await self._store.begin(self.ownership.owner_id, held, limit, lane_max=LANE_MAX, lane_limits=limits)
        self.dispatcher.dispatch(begun.timers, spawn)
        if begun.next_at is not None and not begun.more:
            self.alarm.nudge(begun.next_at)
        again = self._update_limits(begun, limits)
        if begun.more or self._free() < self.options.in_flight_max // 2:
            self._go_by_lane()
        return begun, again

    def _update_limits(self, begun: Begun, limits: Mapping[int, int]) -> bool:
        """Update the limited lanes: add those that reached their limit in this look. Returns whether to look again at
        once because some destination has room for more."""
        now, free, again = self._clock.now(), self._free(), False
        taken: Counter[tuple[str, str]] = Counter()
        if len(begun.timers) >= LANE_MAX or limits:
            taken.update((timer.namespace, destination_of(timer.definition.target)) for timer in begun.timers)
        counts = {lane_of(*names): count for names, count in taken.items()}
        for destination in self.destinations.limited:
            emptied = [lane for lane in destination.lanes if counts.get(lane, 0) < limits.get(lane, 0)]
            if not begun.more:
                for lane in emptied:
                    del destination.lanes[lane]
            destination.behind = False
            if any(not limits.get(lane) for lane in destination.lanes):
                destination.fall_behind()
                if destination.paused_until is not None and destination.paused_until > now:
                    self.alarm.nudge(Instant(-(-destination.paused_until // PAUSE_END_STEP_MS) * PAUSE_END_STEP_MS))
                elif emptied:  # Other lanes can use what these did not need.
                    again |= self.destinations.room(destination, now, free) > 0
        for (namespace, name), count in taken.items():
            lane = lane_of(namespace, name)
            if count < limits.get(lane, LANE_MAX):
                continue
            destination = self.destinations[name]
            destination.lanes.pop(lane, None)  # move to the end: other lanes come first next time
            self.destinations.limit(destination, namespace)
            destination.fall_behind()
            again |= self.destinations.room(destination, now, free) >= LANE_MAX
        return again

    def _go_by_lane(self) -> None:
        if not self.lanes.active:
            self._by_lane_since = self._clock.now()
        self.lanes.active = True
        self._surveyed_until = self._survey_until()
        self._survey_now.set()

    def _survey_until(self) -> Instant:
        ahead_ms = self.options.look_interval_ms + SURVEY_AHEAD_MS + round(1000 * self._survey_rest)
        return self._clock.now() + ahead_ms

    def _go_by_age(self) -> None:
        for namespace, name in self.lanes.end(self._clock.now()):
            destination = self.destinations[name]
            if destination.behind:
                self.destinations.limit(destination, namespace)

    async def _look_by_lane(self, held: Mapping[int, int], limit: int, spawn: Spawn) -> tuple[Begun | None, bool]:
        """Begin a portion of each lane that has due timers and whose destination has room."""
        portions, next_at = self.lanes.portions(
            self.destinations,
            now=self._clock.now(),
            limit=limit,
            free=self._free(),
            in_flight=self.recorder.slots_by_namespace,
            weight=self._weight,
            size=self.recorder.size,
        )
        if next_at is not None:
            self.alarm.nudge(next_at)
        if not portions:
            return None, False
        begun = await self._store.begin_lanes(self.ownership.owner_id, held, limit, portions)
        behind = self.lanes.update_after_look(portions, begun, self._clock.now())
        self.dispatcher.dispatch(begun.timers, spawn)
        for name in behind:
            self.destinations[name].fall_behind()
        if begun.next_at is not None:
            self.alarm.nudge(begun.next_at)
        return begun, len(begun.timers) == limit

    async def _survey(self) -> None:
        """While timers are begun by lane, find lanes that no nudge reported, and switch back to "by age" in time."""
        while True:
            await self._survey_now.wait()
            self._survey_now.clear()
            if not self.lanes.active:
                continue
            started = self._clock.monotonic()
            try:
                due = await self._survey_once()
            except StoreFailed:
                raise
            except StoreError as error:
                log.warning("could not read which lanes have due timers: %s", error)
                due = SURVEY_DUE_MAX
            self.alarm.nudge(EPOCH)
            lasted = self._clock.now() - self._by_lane_since >= BY_LANE_MS
            if lasted and due < SURVEY_DUE_MAX // 2 and self._free() >= self.options.in_flight_max // 2:
                self._go_by_age()
                continue
            took = self._clock.monotonic() - started
            self._survey_rest = SURVEY_REST * took
            # The next survey must end before the time that this one looked ahead to.
            left = (self._surveyed_until - self._clock.now()) / 1000 - took
            await self._clock.sleep(max(SURVEY_GAP_SECONDS, min(self._survey_rest, left)))
            left = (self._surveyed_until - self._clock.now()) / 1000 - took
            await self._clock.sleep(min(self.options.look_interval_ms / 1000, left), self._survey_now)
            self._survey_now.set()

    async def _survey_once(self) -> int:
        """Learn which lanes have timers due before the next survey. Returns how many are due now, at most
        ``SURVEY_DUE_MAX``."""
        self._surveyed_until = until = self._survey_until()
        page = await self._store.lanes(until, due_max=SURVEY_DUE_MAX)
        due = page.due
        self.lanes.learn_all(page.lanes)
        while page.next is not None:
            self.alarm.nudge(EPOCH)
            page = await self._store.lanes(until, after=page.next)
            self.lanes.learn_all(page.lanes)
        return due

    async def run(self) -> None:
        """Fire timers until ``drain`` is called; then finish the attempts in flight and release the shards."""
        async with asyncio.TaskGroup() as upkeep:
            owning = upkeep.create_task(self.ownership.run())
            loops = [upkeep.create_task(loop) for loop in (self.recorder.run(), self._survey())]
            if not self._store.abilities.expires_history:
                loops.append(upkeep.create_task(self._purge()))
            async with asyncio.TaskGroup() as attempts:
                await self._fire(attempts.create_task)
                await self._finish()
                self.dispatcher.abandon()
            self.ownership.end()
            await asyncio.wait([owning], timeout=self.options.lease_ms / 1000)
            for task in (owning, *loops):
                task.cancel()
            await asyncio.wait([owning, *loops])
            try:
                await self.ownership.leave()
            except StoreError as error:
                log.warning("could not release the shards; their leases will run out: %s", error)

    def drain(self) -> None:
        """Begin no more timers and start no more attempts."""
        self._draining.set()
        self.dispatcher.drain()
        self.alarm.nudge(EPOCH)
        self.recorder.recorded.set()

    async def _fire(self, spawn: Spawn) -> None:
        while not self._draining.is_set():
            if self._free() <= 0:
                self.recorder.recorded.clear()
                await self._clock.sleep(FULL_WAIT_SECONDS, self.recorder.recorded)
            elif not self.ownership.held():
                await self._clock.sleep(UNHELD_WAIT_SECONDS, self._draining)
            else:
                if not await self.look(spawn):
                    await self._clock.sleep(LOOK_GAP_SECONDS)
                await self.alarm.wait()

    async def _finish(self) -> None:
        until = self._clock.monotonic() + self.options.drain_ms / 1000
        while self.recorder.slots_in_flight and (left := until - self._clock.monotonic()) > 0:
            self.recorder.recorded.clear()
            await self._clock.sleep(left, self.recorder.recorded)
        if self.recorder.slots_in_flight:
            log.warning(
                "%d timers had no recorded outcome when DUETIME_DRAIN_TIMEOUT ended: they will fire again",
                self.recorder.timers_by_shard.total(),
            )
        else:
            log.info("all outcomes are recorded")

    async def _purge(self) -> None:
        """Delete finished timers past their retention: as fast as timers finish, but without overloading the store."""
        while True:
            started = self._clock.monotonic()
            try:
                dropped = await self._store.purge(retention_ms=self.options.retention_ms, limit=PURGE_BATCH)
            except StoreFailed:
                raise
            except StoreError as error:
                log.warning("could not delete old timers: %s", error)
                dropped = 0
            took = self._clock.monotonic() - started
            interval = self.options.purge_interval_ms / 1000
            await self._clock.sleep(max(PURGE_REST_SECONDS, took) if dropped >= PURGE_BATCH else interval)
