"""Makes the attempts of begun timers, within the limits of each destination, and hands what came of them on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from duetime import lifecycle
from duetime.clock import Clock
from duetime.deliverer import Deliverer, Deliverers
from duetime.engine.destinations import SATURATED_MS, Destination, Destinations
from duetime.engine.ownership import Ownership
from duetime.engine.recorder import Recorder
from duetime.model import Outcome, OutcomeKind, Timer
from duetime.retry import Uniform
from duetime.telemetry import Telemetry

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Dispatcher:
    def __init__(
        self,
        deliverers: Deliverers,
        ownership: Ownership,
        recorder: Recorder,
        clock: Clock,
        telemetry: Telemetry,
        *,
        per_destination_max: int,
        queue_max: int,
        uniform: Uniform,
    ) -> None:
        self._deliverers = deliverers
        self._ownership = ownership
        self._recorder = recorder
        self._clock = clock
        self._telemetry = telemetry
        self._uniform = uniform
        self._destinations = Destinations(per_destination_max, queue_max)
        self._workers: set[asyncio.Task[None]] = set()
        self._draining = False

    def dispatch(self, timers: Sequence[Timer], spawn: Spawn) -> None:
        """Start an attempt of each, queue it for its destination, or put it back."""
        self._recorder.expect(timers)
        now = self._clock.now()
        for timer in timers:
            if timer.lost >= lifecycle.LOST_MAX:
                self._recorder.add(timer, lifecycle.give_up(timer, now=now))
                continue
            target = timer.definition.target
            deliverer = self._deliverers[type(target)]
            destination = self._destinations[deliverer.destination(target)]
            put_off_ms = destination.put_off_ms(now)
            if self._draining:
                self._put_back(timer, timer.fire_at)
            elif put_off_ms is not None:
                self._put_back(timer, now + put_off_ms)
            elif destination.free():
                destination.running += 1
                destination.start(now)  # Already here: the next look must see that this one has things under way.
                worker = spawn(self._work(deliverer, destination, timer))
                self._workers.add(worker)
                worker.add_done_callback(self._workers.discard)
            else:
                self._destinations.queue(destination, timer)

    def backlog(self) -> int:
        """How many begun timers wait for a destination that is taking them one after the other."""
        return self._destinations.backlog(self._clock.now())

    def drain(self) -> None:
        """Start nothing more: what has not been sent goes back to the store, due as it was."""
        self._draining = True
        for timer in self._destinations.take_waiting():
            self._put_back(timer, timer.fire_at)

    def abandon(self) -> None:
        """Stop the attempts that a drain did not wait for; their outcome stays unrecorded."""
        for worker in self._workers:
            worker.cancel()

    async def _work(self, deliverer: Deliverer, destination: Destination, timer: Timer | None) -> None:
        """Deliver a timer, and then what has been waiting for the same destination."""
        try:
            while timer is not None:
                sent_at = self._clock.now()
                if self._may_leave(timer, sent_at):
                    destination.start(sent_at)
                    self._telemetry.lateness(sent_at - timer.fire_at)
                    outcome = await deliverer.deliver(timer, timer.definition.timeout_ms)
                    self._ended(destination, timer, outcome, sent_at)
                else:
                    # Nothing was sent, so it goes back unspent, if it is still ours to put back: the fence judges that.
                    self._put_back(timer, timer.fire_at)
                timer = destination.waiting.popleft() if destination.waiting else None
        finally:
            destination.running -= 1

    def _may_leave(self, timer: Timer, now: int) -> bool:
        """Whether no successor can be about to make this attempt, too."""
        in_time = timer.deadline_at is None or now + timer.definition.timeout_ms <= timer.deadline_at
        return in_time and self._ownership.trusts(timer)

    def _ended(self, destination: Destination, timer: Timer, outcome: Outcome, sent_at: int) -> None:
        now = self._clock.now()
        if destination.note(outcome, now):
            for waiting in destination.waiting:
                self._put_back(waiting, now + (destination.put_off_ms(now) or 0))
            destination.waiting.clear()
        if outcome.kind is OutcomeKind.AWAY:
            self._put_back(timer, now + (destination.put_off_ms(now) or SATURATED_MS), away=True)
        else:
            self._recorder.settle(timer, outcome, sent_at, now)

    def _put_back(self, timer: Timer, fire_at: int, *, away: bool = False) -> None:
        now = self._clock.now()
        if fire_at > now:
            # Spread out what was put off together, lest it come back together.
            fire_at += round(self._uniform(0, fire_at - now) / 2)
        self._telemetry.deferred()
        self._recorder.add(timer, lifecycle.defer(timer, fire_at=fire_at, now=now, away=away))
