"""Makes the attempts of begun timers, within the limits of each destination, and hands what came of them on.

Nothing that did not leave us is counted: a timer whose destination can't take it, whose lease ran out, or for which we
ran out of descriptors or lookups goes back to the store as it was, due as it was, and is logged and counted by cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from duetime import lifecycle
from duetime.clock import Clock
from duetime.deliverer import Deliverer, Deliverers
from duetime.engine.destinations import Destination, Destinations
from duetime.engine.ownership import Ownership
from duetime.engine.recorder import Recorder
from duetime.model import MINUTE_MS, SECOND_MS, Outcome, OutcomeKind, Timer, Unsent, destination_of
from duetime.retry import Uniform
from duetime.telemetry import Telemetry

log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]

INTERNAL_MS_MIN, INTERNAL_MS_MAX = SECOND_MS, 5 * MINUTE_MS
"""How long a timer waits after an error of ours; a quarter of the time that it is overdue, within these."""
NAMESPACE_MS = 250
"""How long a timer waits until its namespace, which another instance made just now, is known here."""
SAY_MS = 10 * SECOND_MS
"""How often the log says that something could not be sent for the same cause; metrics count them all."""


class Dispatcher:
    def __init__(
        self,
        deliverers: Deliverers,
        destinations: Destinations,
        ownership: Ownership,
        recorder: Recorder,
        clock: Clock,
        telemetry: Telemetry,
        *,
        room: Callable[[], None],
        uniform: Uniform,
    ) -> None:
        self._deliverers = deliverers
        self._destinations = destinations
        self._ownership = ownership
        self._recorder = recorder
        self._clock = clock
        self._telemetry = telemetry
        self._room = room
        self._uniform = uniform
        self._workers: set[asyncio.Task[None]] = set()
        self._said_at: dict[Unsent, int] = {}
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
            destination = self._destinations[destination_of(target)]
            if self._draining:
                self._put_back(timer, Unsent.DRAIN)
            elif destination.free(now):
                destination.start(now)  # Already here: the next look must see that this one has things under way.
                destination.running += 1
                destination.enter(timer)
                worker = spawn(self._work(self._deliverers[type(target)], destination, timer))
                self._workers.add(worker)
                worker.add_done_callback(self._workers.discard)
            elif destination.takes(now):
                self._destinations.queue(destination, timer)
            else:
                self._hold_back(destination, timer)

    def sweep(self) -> None:
        """Put the queues back that stand still."""
        now = self._clock.now()
        for destination in self._destinations.stalled(now):
            destination.stall(now)
            self._put_queue_back(destination)

    def drain(self) -> None:
        """Start nothing more: what has not been sent goes back to the store, due as it was."""
        self._draining = True
        for timer in self._destinations.take_waiting(self._destinations.queued):
            self._put_back(timer, Unsent.DRAIN)

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
                    try:
                        outcome = await deliverer.deliver(timer, timer.definition.timeout_ms)
                    except BaseException as error:
                        outcome = _broke(timer, error)
                    self._ended(destination, timer, outcome, sent_at)
                else:
                    # Nothing was sent, so it goes back unspent, if it is still ours to put back: the fence judges that.
                    self._put_back(timer, Unsent.LEASE)
                destination.leave(timer)
                timer = destination.waiting.popleft() if destination.waiting else None
                self._freed(destination)
        finally:
            destination.running -= 1
            self._freed(destination)

    def _freed(self, destination: Destination) -> None:
        """A destination that could not take all that is due may have room for a good part of it now."""
        if destination.behind and destination.held <= destination.low:
            destination.low = -1
            self._room()

    def _may_leave(self, timer: Timer, now: int) -> bool:
        """Whether no successor can be about to make this attempt, too."""
        in_time = timer.deadline_at is None or now + timer.definition.timeout_ms <= timer.deadline_at
        return in_time and self._ownership.trusts(timer)

    def _ended(self, destination: Destination, timer: Timer, outcome: Outcome, sent_at: int) -> None:
        now = self._clock.now()
        if outcome.kind is OutcomeKind.UNSENT:
            self._unsent(destination, timer, outcome, now)
            return
        if destination.note(outcome, now):
            log.warning("%s does not answer: pausing its timers", destination.name)
            self._put_queue_back(destination)
        self._recorder.settle(timer, outcome, sent_at, now)

    def _unsent(self, destination: Destination, timer: Timer, outcome: Outcome, now: int) -> None:
        cause = outcome.cause or Unsent.INTERNAL
        if now - self._said_at.get(cause, 0) >= SAY_MS:
            self._said_at[cause] = now
            log.warning("%s/%s was not sent (%s): %s", timer.namespace, timer.id, cause, outcome.error)
        if cause in (Unsent.INTERNAL, Unsent.NAMESPACE):  # neither says anything about the destination
            wait_ms = NAMESPACE_MS
            if cause is Unsent.INTERNAL:
                wait_ms = max(INTERNAL_MS_MIN, min((now - timer.execute_at) // 4, INTERNAL_MS_MAX))
            self._put_back(timer, cause, fire_at=now + round(self._uniform(wait_ms, 1.5 * wait_ms)))
            return
        destination.hold(now)
        self._hold_back(destination, timer, cause)
        self._put_queue_back(destination)

    def _put_queue_back(self, destination: Destination) -> None:
        for timer in self._destinations.take_waiting([destination]):
            self._hold_back(destination, timer)

    def _hold_back(self, destination: Destination, timer: Timer, cause: Unsent = Unsent.DESTINATION) -> None:
        destination.behind = True
        self._destinations.limit(destination, timer.namespace)
        self._put_back(timer, cause)

    def _put_back(self, timer: Timer, cause: Unsent, fire_at: int | None = None) -> None:
        self._telemetry.deferred(cause)
        fire_at = timer.fire_at if fire_at is None else fire_at
        away = cause is Unsent.BROKER
        self._recorder.add(timer, lifecycle.defer(timer, fire_at=fire_at, now=self._clock.now(), away=away))


def _broke(timer: Timer, error: BaseException) -> Outcome:
    """The outcome of an attempt whose deliverer raised: the engine goes on, and the attempt does not count."""
    task = asyncio.current_task()
    # Something that the deliverer waited for may have been canceled; an attempt that was itself canceled ends.
    if not isinstance(error, Exception | asyncio.CancelledError) or (task is not None and task.cancelling()):
        raise error
    log.error("delivery of %s/%s broke", timer.namespace, timer.id, exc_info=error)
    return Outcome(kind=OutcomeKind.UNSENT, cause=Unsent.INTERNAL, error="an error of ours, see the log")
