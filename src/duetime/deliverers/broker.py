"""The deliverer to broker subjects: one confirmed publish per attempt, with the delivery id as the message's.

The broker drops a second message with the same id, so a duplicate that a crash made is not seen by anybody. While the
broker is away nothing is spent: the attempt goes back and comes again.
"""

from __future__ import annotations

import asyncio

from duetime.broker import Broker, BrokerAway, BrokerError, BrokerTimeout
from duetime.clock import Clock
from duetime.deliverers.bodies import body_of
from duetime.errors import InvalidInput
from duetime.model import NatsTarget, Outcome, OutcomeKind, Target, Timer


class BrokerDeliverer:
    def __init__(self, broker: Broker | None, clock: Clock) -> None:
        self._broker = broker
        self._clock = clock

    async def deliver(self, timer: Timer, timeout_ms: int) -> Outcome:
        target = timer.definition.target
        assert isinstance(target, NatsTarget)
        if self._broker is None:
            return Outcome(kind=OutcomeKind.AWAY, error="this instance has no broker: set TIMER_BROKER_URL")
        headers = {**target.headers, "duetime-attempt": str(timer.attempt)}
        body = body_of(timer, self._clock.now())
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._broker.publish(
                    target.subject, body, headers, id=timer.delivery_id, timeout=timeout_ms / 1000
                )
        except BrokerAway as error:
            return Outcome(kind=OutcomeKind.AWAY, error=str(error))
        except (BrokerTimeout, TimeoutError) as error:
            return Outcome(kind=OutcomeKind.TIMED_OUT, error=str(error) or "the broker did not confirm in time")
        except BrokerError as error:
            # The broker is there. Counted as out of reach, one bad subject would hold up what goes to all the others.
            return Outcome(kind=OutcomeKind.REFUSED, error=str(error))
        return Outcome(kind=OutcomeKind.ANSWERED)

    async def check(self, target: Target) -> None:
        if self._broker is None:
            raise InvalidInput("callback_subject", "needs a broker, and this service has none: set TIMER_BROKER_URL")

    def destination(self, target: Target) -> str:
        return "broker"

    async def close(self) -> None:
        pass
