"""The deliverer to broker subjects: one confirmed publish per attempt, with the delivery id as the message's.

The broker drops a second message with the same id, so nobody sees a duplicate that a crash made. An attempt that could
not be published, because the broker is not connected or because of a bug of ours, is ``UNSENT`` and does not count.
"""

from __future__ import annotations

import asyncio
import logging

from duetime.broker import Broker, BrokerAway, BrokerError, BrokerTimeout
from duetime.clock import Clock
from duetime.deliverers.bodies import body_of
from duetime.deliverers.unsent import unsent
from duetime.errors import InvalidInput
from duetime.model import NatsTarget, Outcome, OutcomeKind, Target, Timer, Unsent

_log = logging.getLogger(__name__)


class BrokerDeliverer:
    def __init__(self, broker: Broker | None, clock: Clock) -> None:
        self._broker = broker
        self._clock = clock

    async def deliver(self, timer: Timer, timeout_ms: int) -> Outcome:
        if self._broker is None:
            return unsent(Unsent.BROKER, "this instance has no broker: set TIMER_BROKER_URL")
        try:
            target = timer.definition.target
            assert isinstance(target, NatsTarget)
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

    async def close(self) -> None:
        pass


def _logged(error: Exception, timer: Timer) -> str:
    _log.error("delivery of %s/%s broke", timer.namespace, timer.id, exc_info=error)
    return f"internal error: {type(error).__name__}"
