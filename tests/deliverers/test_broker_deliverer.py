"""One publish per attempt, and what does not reach the broker spends nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from duetime.broker import BrokerAway, BrokerError, BrokerTimeout
from duetime.deliverer import Deliverer
from duetime.deliverers import broker as module
from duetime.deliverers.broker import BrokerDeliverer
from duetime.errors import InvalidInput
from duetime.model import Definition, HttpTarget, NatsTarget, Outcome, OutcomeKind, Target, Timer, Unsent

TARGET = NatsTarget(subject="a.b", headers={"x": "y"})


class FakeBroker:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.published: list[tuple[str, Mapping[str, str], str]] = []

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str], *, id: str, timeout: float) -> None:
        if self.error is not None:
            raise self.error
        self.published.append((subject, headers, id))


def deliver(broker: Any, clock: Any, target: Target = TARGET) -> Outcome:
    definition = Definition(target=target)
    timer = Timer("default", "t-1", 0, definition, 1, 1, 1, 1, revision=9, firing=7, attempt=2)
    return asyncio.run(BrokerDeliverer(broker, clock).deliver(timer, 10_000))


def logged_errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.levelno == logging.ERROR]
    return [record.exc_info[0].__name__ for record in records if record.exc_info and record.exc_info[0]]


def test_a_publish_has_the_delivery_id(clock: Any) -> None:
    _: Deliverer = BrokerDeliverer(None, clock)
    broker = FakeBroker()
    assert deliver(broker, clock) == Outcome(kind=OutcomeKind.ANSWERED)
    ((subject, headers, id),) = broker.published
    assert (subject, headers) == ("a.b", {"x": "y", "duetime-attempt": "2"})
    assert len(id) == 36


def test_without_a_broker_nothing_is_spent(clock: Any) -> None:
    outcome = deliver(FakeBroker(BrokerAway("the broker is away")), clock)
    assert outcome == Outcome(kind=OutcomeKind.UNSENT, cause=Unsent.BROKER, error="the broker is away")
    outcome = deliver(None, clock)
    assert (outcome.kind, outcome.cause) == (OutcomeKind.UNSENT, Unsent.BROKER)
    with pytest.raises(InvalidInput, match="TIMER_BROKER_URL"):
        asyncio.run(BrokerDeliverer(None, clock).check(TARGET))


def test_what_the_broker_says_counts(clock: Any) -> None:
    assert deliver(FakeBroker(BrokerTimeout("late")), clock) == Outcome(kind=OutcomeKind.TIMED_OUT, error="late")
    assert deliver(FakeBroker(BrokerError("no stream")), clock) == Outcome(kind=OutcomeKind.REFUSED, error="no stream")


def test_an_internal_error_before_the_publish_spends_nothing(
    clock: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def body_of(*_: object) -> bytes:
        raise KeyError

    broker = FakeBroker()
    outcome = deliver(broker, clock, HttpTarget(url="http://x/"))
    assert (outcome.kind, outcome.cause) == (OutcomeKind.UNSENT, Unsent.INTERNAL)
    monkeypatch.setattr(module, "body_of", body_of)
    outcome = deliver(broker, clock)
    assert outcome == Outcome(kind=OutcomeKind.UNSENT, cause=Unsent.INTERNAL, error="internal error: KeyError")
    assert broker.published == []
    assert logged_errors(caplog) == ["AssertionError", "KeyError"]


def test_an_internal_error_in_the_publish_is_a_failed_attempt(clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    outcome = deliver(FakeBroker(KeyError()), clock)
    assert outcome == Outcome(kind=OutcomeKind.REFUSED, error="internal error: KeyError")
    assert logged_errors(caplog) == ["KeyError"]
