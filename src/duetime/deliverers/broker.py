"""The deliverer to broker subjects: one confirmed publish per attempt, with the delivery id as the message's.

The broker drops a second message with the same id, so nobody sees a duplicate that a crash made. An attempt that could
not be published, because the broker is not connected or because of a bug of ours, is ``UNSENT`` and does not count.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from duetime.broker import Broker, BrokerAway, BrokerError, BrokerTimeout
from duetime.clock import Clock
from duetime.deliverers.bodies import body_of
from duetime.deliverers.http import is_reserved
from duetime.deliverers.unsent import unsent
from duetime.errors import InvalidInput
from duetime.model import BodyFormat, NatsTarget, Outcome, OutcomeKind, Target, Timer, Unsent

_log = logging.getLogger(__name__)


_BROKERS_OWN = frozenset({"_INBOX", "_R_", "_GR_"})


def is_brokers_own(subject: str) -> bool:
    """Whether a subject moves the broker itself (``$JS.API…``) or answers somebody's request (``_INBOX…``)."""
    return subject.startswith("$") or subject.partition(".")[0] in _BROKERS_OWN


class BrokerDeliverer:
    def __init__(self, broker: Broker | None, clock: Clock, *, events: str = "", others: Sequence[str] = ()) -> None:
        """``events`` is the subject of our own events and ``others`` what else is ours: a client's timer goes neither
        there nor below."""
        self._broker = broker
        self._clock = clock
        self._events = events
        self._ours = tuple(subject for subject in (events, *others) if subject)

    async def deliver(self, timer: Timer, timeout_ms: int) -> Outcome:
        if self._broker is None:
            return unsent(Unsent.BROKER, "this instance has no broker: set TIMER_BROKER_URL")
        try:
            target = timer.definition.target
            assert isinstance(target, NatsTarget)
            is_event = timer.definition.body is BodyFormat.EVENT and _is_below(target.subject, self._events)
            if problem := None if is_event else self._problem(target):
                # It was made when it was allowed, and it will not be again.
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
            return Outcome(kind=OutcomeKind.TIMED_OUT, error=str(error) or "the broker did not confirm in time")
        except BrokerError as error:
            # The broker is there. Counted as out of reach, one bad subject would hold up what goes to all the others.
            return Outcome(kind=OutcomeKind.REFUSED, error=str(error))
        except Exception as error:
            # The broker may have the message, so this attempt counts.
            return Outcome(kind=OutcomeKind.REFUSED, error=_logged(error, timer))
        return Outcome(kind=OutcomeKind.ANSWERED)

    async def check(self, target: Target) -> None:
        if self._broker is None:
            raise InvalidInput("callback_subject", "needs a broker, and this service has none: set TIMER_BROKER_URL")
        assert isinstance(target, NatsTarget)
        if problem := self._problem(target):
            raise InvalidInput("callback_subject", problem)

    def _problem(self, target: NatsTarget) -> str | None:
        """Why a client's timer must not be published there, as the end of a sentence."""
        if is_brokers_own(target.subject):
            return "must not be one of the broker's own subjects"
        if any(_is_below(target.subject, ours) for ours in self._ours):
            return "must not be one of Duetime's own subjects (DUETIME_BROKER_COMMANDS, _EVENTS, _DEAD_LETTERS)"
        if reserved := next(filter(is_reserved, target.headers), None):
            return f"must not be sent the header {reserved}"
        return None

    async def close(self) -> None:
        pass


def _is_below(subject: str, ours: str) -> bool:
    return bool(ours) and f"{subject}.".startswith(f"{ours}.")


def _logged(error: Exception, timer: Timer) -> str:
    _log.error("delivery of %s/%s broke", timer.namespace, timer.id, exc_info=error)
    return f"internal error: {type(error).__name__}"
