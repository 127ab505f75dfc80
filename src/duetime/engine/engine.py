"""Looks for what is due, begins it in the store and hands it out; and starts, drains and stops the parts."""

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
from duetime.model import DAY_MS, MINUTE_MS, SECOND_MS, Timer, destination_of, lane_of
from duetime.retry import Uniform
from duetime.store import UNNAMED, About, Begun, Hint, Store
from duetime.telemetry import Telemetry

log = logging.getLogger(__name__)

UNHELD_WAIT_SECONDS = 0.05
FULL_WAIT_SECONDS = 0.25
AGAIN_MS = SECOND_MS
"""How soon to look again after the store failed."""
RETURN_MS = 20
"""How soon to look for a timer that was put back."""
LANE_MAX = 16
"""How many timers of one lane a look begins when nothing is known of its destination."""
BY_AGE_MAX = 256
"""How many timers a look begins when it does not know for whom they are."""
REACH = 1_000
"""So many due timers are too many to take them oldest first, unless all of them can be taken."""
BY_LANE_MS = 1_000
"""How long timers are begun by lane at least: to begin with that takes a survey."""
RELAX_MS = 1_000
OPEN_MS = 100
"""Pauses of destinations end at multiples of this: hundreds of them need few looks."""
SURVEY_AHEAD_MS = 1_000
SURVEY_GAP_SECONDS = 0.05
SURVEY_REST = 10
"""A survey of the lanes rests for so many times as long as it took."""
LOOK_GAP_SECONDS = 0.002
"""Between a look that found everything and the next one: what falls due meanwhile shares a commit."""
PURGE_BATCH = 10_000
PURGE_REST_SECONDS = 0.01
"""Between two batches of old timers at least. It is as long as the batch took: upkeep has half of the time at most."""


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
            room=lambda: self.alarm.nudge(0),
            uniform=uniform,
        )
        self.watchdog = Watchdog(
            store, self.ownership, self.destinations, corrected, telemetry, free=lambda: self._free()
        )
        self.lanes = Lanes()
        self._relax_at = 0
        self._survey_now = asyncio.Event()
        self._by_lane_since = 0
        self._survey_rest = 0.0
        self._surveyed_until = 0
        """What falls due later is found by the next survey."""
        self._draining = asyncio.Event()
        self._looking_at: dict[int, int] = {}
        """The shards of a begin that is under way: what it brings is not expected by anybody yet."""

    def nudge(self, *timers: Timer) -> None:
        """Timers were written: by a client of ours, and maybe for another owner. None: look at everything anew."""
        if not timers:
            self._survey_now.set()
            self.alarm.nudge(0)
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
        """Another instance knows something."""
        if hint.due_at is not None:
            self.alarm.nudge(hint.due_at)
            self._survey_now.set()
        if hint.shards:
            self.ownership.wake()

    def _returned(self, timer: Timer) -> None:
        """A timer is pending again. One that was put back is due already: what held it back may last."""
        self.alarm.nudge(max(timer.fire_at, self._clock.now() + RETURN_MS))
        if self.lanes.active:
            self.lanes.learn_timer(timer)

    def _freed(self) -> None:
        """Slots have become free."""
        if self.lanes.short:
            self.alarm.nudge(0)

    def _free(self) -> int:
        return self.options.in_flight_max - self.recorder.under_way

    def _begin_max(self) -> int:
        """How many timers a look begins at most: of the slots that are free it leaves half to the next one."""
        return max(1, min(self.options.begin_max, self._free() // 2))

    async def look(self, spawn: Spawn) -> bool:
        """Begin what is due, as much as can be delivered soon, and hand it out; whether there may be more of it."""
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
            log.warning("could not look for due timers: %s", error)
            self.alarm.nudge(self._clock.now() + AGAIN_MS)
            return False
        except StoreIndeterminate as error:
            log.warning("the fate of a begin is unknown, claiming the shards anew: %s", error)
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
        if more:
            self.alarm.nudge(0)
        return more

    async def _look_by_age(self, held: Mapping[int, int], limit: int, spawn: Spawn) -> tuple[Begun, bool]:
        """Begin the oldest that are due. A lane brings no more than a new destination takes, or what is known of it."""
        now, free = self._clock.now(), self._free()
        if now >= self._relax_at:
            self.destinations.relax(now, free, LANE_MAX)
            self._relax_at = now + RELAX_MS
        limits = self.destinations.limits(now, free, self._weight)
        spare = (free - self.options.in_flight_max // 2) // self.recorder.size_max
        limit = max(1, min(limit, BY_AGE_MAX, spare))
        begun = await self._store.begin(self.ownership.owner_id, held, limit, lane_max=LANE_MAX, wide=limits)
        self.dispatcher.dispatch(begun.timers, spawn)
        if begun.next_at is not None and not begun.more:
            self.alarm.nudge(begun.next_at)
        again = self._see_limits(begun, limits)
        if begun.more or self._free() < self.options.in_flight_max // 2:
            self._go_by_lane()
        return begun, again

    def _see_limits(self, begun: Begun, limits: Mapping[int, int]) -> bool:
        """Find the lanes that the look took all of that it might; whether some of them can take more at once."""
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
                if destination.opens_at is not None and destination.opens_at > now:
                    self.alarm.nudge(-(-destination.opens_at // OPEN_MS) * OPEN_MS)
                elif emptied:  # Others can have what these did not need.
                    again |= self.destinations.room(destination, now, free) > 0
        for (namespace, name), count in taken.items():
            lane = lane_of(namespace, name)
            if count < limits.get(lane, LANE_MAX):
                continue
            destination = self.destinations[name]
            destination.lanes.pop(lane, None)  # to the end: others are first the next time
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

    def _survey_until(self) -> int:
        ahead_ms = self.options.look_interval_ms + SURVEY_AHEAD_MS + round(1000 * self._survey_rest)
        return self._clock.now() + ahead_ms

    def _go_by_age(self) -> None:
        for namespace, name in self.lanes.end(self._clock.now()):
            destination = self.destinations[name]
            if destination.behind:
                self.destinations.limit(destination, namespace)

    async def _look_by_lane(self, held: Mapping[int, int], limit: int, spawn: Spawn) -> tuple[Begun | None, bool]:
        """Begin a portion of each lane that has something due and whose destination can take it."""
        portions, next_at = self.lanes.portions(
            self.destinations,
            now=self._clock.now(),
            limit=limit,
            free=self._free(),
            in_flight=self.recorder.by_namespace,
            weight=self._weight,
            size=self.recorder.size,
        )
        if next_at is not None:
            self.alarm.nudge(next_at)
        if not portions:
            return None, False
        begun = await self._store.begin_lanes(self.ownership.owner_id, held, limit, portions)
        behind = self.lanes.begun(portions, begun, self._clock.now())
        self.dispatcher.dispatch(begun.timers, spawn)
        for name in behind:
            self.destinations[name].fall_behind()
        if begun.next_at is not None:
            self.alarm.nudge(begun.next_at)
        return begun, len(begun.timers) == limit

    async def _survey(self) -> None:
        """While timers are begun by lane, find lanes that nobody told of, and see when that can end."""
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
                log.warning("could not see which lanes have due timers: %s", error)
                due = REACH
            self.alarm.nudge(0)
            lasted = self._clock.now() - self._by_lane_since >= BY_LANE_MS
            if lasted and due < REACH // 2 and self._free() >= self.options.in_flight_max // 2:
                self._go_by_age()
                continue
            took = self._clock.monotonic() - started
            self._survey_rest = SURVEY_REST * took
            # The next one ends before what this one looked ahead to is over.
            left = (self._surveyed_until - self._clock.now()) / 1000 - took
            await self._clock.sleep(max(SURVEY_GAP_SECONDS, min(self._survey_rest, left)))
            left = (self._surveyed_until - self._clock.now()) / 1000 - took
            await self._clock.sleep(min(self.options.look_interval_ms / 1000, left), self._survey_now)
            self._survey_now.set()

    async def _survey_once(self) -> int:
        """Learn which lanes have timers that are due by the next survey; how many are due in all, up to a limit."""
        self._surveyed_until = until = self._survey_until()
        page = await self._store.lanes(until, due_max=REACH)
        due = page.due
        self.lanes.learn_all(page.lanes)
        while page.next is not None:
            self.alarm.nudge(0)
            page = await self._store.lanes(until, after=page.next)
            self.lanes.learn_all(page.lanes)
        return due

    async def run(self) -> None:
        """Fire timers until ``drain`` is called; then finish what is in flight and give the shards up."""
        async with asyncio.TaskGroup() as upkeep:
            owning = upkeep.create_task(self.ownership.run())
            loops = [upkeep.create_task(loop) for loop in (self.recorder.run(), self._survey(), self._purge())]
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
                log.warning("could not release the shards, their leases will run out: %s", error)

    def drain(self) -> None:
        """Begin and start nothing more."""
        self._draining.set()
        self.dispatcher.drain()
        self.alarm.nudge(0)
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
                await self.alarm.ring()

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
        """Drop what is older than its retention, as fast as timers can finish, and not faster than the store can."""
        while True:
            started = self._clock.monotonic()
            try:
                dropped = await self._store.purge(retention_ms=self.options.retention_ms, limit=PURGE_BATCH)
            except StoreFailed:
                raise
            except StoreError as error:
                log.warning("could not drop old timers: %s", error)
                dropped = 0
            took = self._clock.monotonic() - started
            interval = self.options.purge_interval_ms / 1000
            await self._clock.sleep(max(PURGE_REST_SECONDS, took) if dropped >= PURGE_BATCH else interval)
