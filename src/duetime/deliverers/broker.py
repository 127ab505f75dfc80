"""The deliverer for broker subjects: one acknowledged publish per attempt, with the delivery id as message id.

The broker drops a second message with the same id, so a crash causes no duplicates. An attempt that could not be
published because the broker is not connected, or because of a bug in Duetime, is ``UNSENT`` and does not count.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from duetime.broker import Broker, BrokerAway, BrokerError, BrokerTimeout
from duetime.clock import Clock
from duetime.deliverers.bodies import body_of
from duetime.deliverers.unsent import unsent
from duetime.errors import InvalidInput
from duetime.model import BodyFormat, NatsTarget, Outcome, OutcomeKind, Target, Timer, Unsent
from duetime.targets import is_brokers_own, is_reserved

_log = logging.getLogger(__name__)


class BrokerDeliverer:
    def __init__(self, broker: Broker | None, clock: Clock, *, events: str = "", others: Sequence[str] = ()) -> None:
        """``events`` is the subject of our own events, ``others`` are our other subjects: clients' timers may not
        publish to any of them or below."""
        self._broker = broker
        self._clock = clock
        self._events = events
        self._ours = tuple(subject for subject in (events, *others) if subject)

    async def deliver(self, timer: Timer, timeout_ms: int) -> Outcome:
        if self._broker is None:
            return unsent(Unsent.BROKER, "no broker is configured: set TIMER_BROKER_URL")
        try:
            target = timer.definition.target
            assert isinstance(target, NatsTarget)
            is_event = timer.definition.body is BodyFormat.EVENT and _is_below(target.subject, self._events)
            if problem := None if is_event else self._problem(target):
                # The rules were different when it was created; retrying would not help.
                return Outcome(kind=OutcomeKind.REFUSED, error=f"the callback subject {problem}", final=True)
            headers = {**target.headers, "duetime-attempt": str(timer.attempt)}
            body = body_of(timer, self._clock.now())
            delivery_id = timer.delivery_id
        except Exception as error:
            return unsent(Unsent.INTERNAL, _logged(error, timer))
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._broker.publish(target.subject, body, headers, id=delivery_id, timeout=timeout_ms / 1000)
        except BrokerAway as error:
            return unsent(Unsent.BROKER, str(error))
        except (BrokerTimeout, TimeoutError) as error:
            return Outcome(kind=OutcomeKind.TIMED_OUT, error=str(error) or "the broker sent no ack in time")
        except BrokerError as error:
            # The broker is up. If this counted as unreachable, one bad subject would hold back all the others.
            return Outcome(kind=OutcomeKind.REFUSED, error=str(error))
        except Exception as error:
            # The broker may have received the message, so this attempt counts.
            return Outcome(kind=OutcomeKind.REFUSED, error=_logged(error, timer))
        return Outcome(kind=OutcomeKind.ANSWERED)

    async def check(self, target: Target) -> None:
        if self._broker is None:
            raise InvalidInput("callback_subject", "needs a broker, and none is configured: set TIMER_BROKER_URL")
        assert isinstance(target, NatsTarget)
        if problem := self._problem(target):
            raise InvalidInput("callback_subject", problem)

    def _problem(self, target: NatsTarget) -> str | None:
        """Why a client's timer must not publish to this target, as the end of a sentence; None if it may."""
        if is_brokers_own(target.subject):
            return "must not be one of the broker's own subjects"
        if any(_is_below(target.subject, ours) for ours in self._ours):
            return "must not be one of Duetime's own subjects (DUETIME_BROKER_COMMANDS, _EVENTS, _DEAD_LETTERS)"
        if reserved := next(filter(is_reserved, target.headers), None):
            return f"must not be used with the reserved header {reserved}"
        return None

    async def close(self) -> None:
        pass


def _is_below(subject: str, ours: str) -> bool:
    return bool(ours) and f"{subject}.".startswith(f"{ours}.")


def _logged(error: Exception, timer: Timer) -> str:
    _log.error("timer %s/%s: delivering it raised an error", timer.namespace, timer.id, exc_info=error)
    return f"internal error: {type(error).__name__}"
