"""Makes the attempts of begun timers, within the limits of each destination, and passes the outcomes to the recorder.

An attempt that never left the process does not count. If the destination is full, the lease ran out, or the process is
out of file descriptors or lookup threads, the timer goes back to the store unchanged and keeps its due time. The
metrics count these deferrals by cause.
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
from duetime.instants import Instant
from duetime.model import MINUTE_MS, SECOND_MS, Outcome, OutcomeKind, Timer, Unsent, destination_of
from duetime.retry import Uniform
from duetime.telemetry import Telemetry

log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]

INTERNAL_MS_MIN, INTERNAL_MS_MAX = SECOND_MS, 5 * MINUTE_MS
"""Bounds of the wait after an internal error, which is a quarter of the time that the timer is overdue."""
NAMESPACE_MS = 250
"""How long a timer waits if this instance has not read its namespace yet, which another instance has just created."""
LOG_INTERVAL_MS = 10 * SECOND_MS
"""At most one log message per cause in this time; the metrics count every case."""


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
        poll_again: Callable[[], None],
        uniform: Uniform,
    ) -> None:
        self._deliverers = deliverers
        self._destinations = destinations
        self._ownership = ownership
        self._recorder = recorder
        self._clock = clock
        self._telemetry = telemetry
        self._poll_again = poll_again
        self._uniform = uniform
        self._tasks: set[asyncio.Task[None]] = set()
        self._logged_at: dict[Unsent, int] = {}
        self._draining = False

    def dispatch(self, timers: Sequence[Timer], spawn: Spawn) -> None:
        """For each timer, start an attempt, queue it for its destination, or put it back."""
        self._recorder.track(timers)
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
                destination.start(now)  # Not only in the task: the next look must count this attempt.
                destination.running += 1
                destination.enter(timer)
                task = spawn(self._deliver_queue(self._deliverers[type(target)], destination, timer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif destination.takes(now):
                self._destinations.queue(destination, timer)
            else:
                self._hold_back(destination, timer)

    def sweep(self) -> None:
        """Put stalled queues back into the store."""
        now = self._clock.now()
        for destination in self._destinations.stalled(now):
            destination.stall(now)
            self._put_queue_back(destination)

    def drain(self) -> None:
        """Start no more attempts; timers that were not sent go back to the store with their due times."""
        self._draining = True
        for timer in self._destinations.take_waiting(self._destinations.queued):
            self._put_back(timer, Unsent.DRAIN)

    def abandon(self) -> None:
        """Cancel the attempts that are still running after a drain; their outcomes are not recorded."""
        for task in self._tasks:
            task.cancel()

    async def _deliver_queue(self, deliverer: Deliverer, destination: Destination, timer: Timer | None) -> None:
        """Deliver a timer, then the timers in the queue of its destination."""
        try:
            while timer is not None:
                sent_at = self._clock.now()
                if self._may_send(timer, sent_at):
                    destination.start(sent_at)
                    self._telemetry.lateness(sent_at - timer.fire_at)
                    try:
                        outcome = await deliverer.deliver(timer, timer.definition.timeout_ms)
                    except BaseException as error:
                        outcome = _outcome_of_error(timer, error)
                    self._on_outcome(destination, timer, outcome, sent_at)
                else:
                    # Nothing was sent. The fence refuses the put-back if the shard has a new owner.
                    self._put_back(timer, Unsent.LEASE)
                destination.leave(timer)
                timer = destination.waiting.popleft() if destination.waiting else None
                self._freed(destination)
        finally:
            destination.running -= 1
            self._freed(destination)

    def _freed(self, destination: Destination) -> None:
        """Poll again once a destination with timers left in the store holds at most half of what it held."""
        if destination.behind and destination.held <= destination.low:
            destination.low = -1
            self._poll_again()

    def _may_send(self, timer: Timer, now: Instant) -> bool:
        """Whether it is certain that no other instance can make this attempt as well."""
        in_time = timer.deadline_at is None or now + timer.definition.timeout_ms <= timer.deadline_at
        return in_time and self._ownership.trusts(timer)

    def _on_outcome(self, destination: Destination, timer: Timer, outcome: Outcome, sent_at: Instant) -> None:
        now = self._clock.now()
        if outcome.kind is OutcomeKind.UNSENT:
            self._unsent(destination, timer, outcome, now)
            return
        if destination.note(outcome, now):
            log.warning("destination %s does not respond: its circuit breaker is open", destination.name)
            self._put_queue_back(destination)
        self._recorder.settle(timer, outcome, sent_at=sent_at, now=now)

    def _unsent(self, destination: Destination, timer: Timer, outcome: Outcome, now: Instant) -> None:
        cause = outcome.cause or Unsent.INTERNAL
        if now - self._logged_at.get(cause, 0) >= LOG_INTERVAL_MS:
            self._logged_at[cause] = now
            log.warning(
                "timer %s/%s was not sent and will be tried again (%s): %s",
                *(timer.namespace, timer.id, cause, outcome.error),
            )
        if cause in (Unsent.INTERNAL, Unsent.NAMESPACE):  # the destination is not the cause
            wait_ms = NAMESPACE_MS
            if cause is Unsent.INTERNAL:
                wait_ms = max(INTERNAL_MS_MIN, min((now - timer.execute_at) // 4, INTERNAL_MS_MAX))
            self._put_back(timer, cause, fire_at=now + round(self._uniform(wait_ms, 1.5 * wait_ms)))
            return
        destination.back_off(now)
        self._hold_back(destination, timer, cause)
        self._put_queue_back(destination)

    def _put_queue_back(self, destination: Destination) -> None:
        for timer in self._destinations.take_waiting([destination]):
            self._hold_back(destination, timer)

    def _hold_back(self, destination: Destination, timer: Timer, cause: Unsent = Unsent.DESTINATION) -> None:
        destination.behind = True
        self._destinations.limit(destination, timer.namespace)
        self._put_back(timer, cause)

    def _put_back(self, timer: Timer, cause: Unsent, fire_at: Instant | None = None) -> None:
        self._telemetry.deferred(cause)
        fire_at = timer.fire_at if fire_at is None else fire_at
        away = cause is Unsent.BROKER
        self._recorder.add(timer, lifecycle.defer(timer, fire_at=fire_at, now=self._clock.now(), away=away))


def _outcome_of_error(timer: Timer, error: BaseException) -> Outcome:
    """The outcome of an attempt whose deliverer raised an error; it does not count as an attempt."""
    task = asyncio.current_task()
    # A CancelledError may come from something that the deliverer awaited: re-raise only if this task is canceled.
    if not isinstance(error, Exception | asyncio.CancelledError) or (task is not None and task.cancelling()):
        raise error
    log.error("timer %s/%s: delivering it raised an error", timer.namespace, timer.id, exc_info=error)
    return Outcome(kind=OutcomeKind.UNSENT, cause=Unsent.INTERNAL, error="internal error, see the log")
