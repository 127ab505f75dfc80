"""The broker deliverer: one publish per attempt, and an attempt that does not reach the broker does not count."""

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
from duetime.model import BodyFormat, Definition, HttpTarget, NatsTarget, Outcome, OutcomeKind, Target, Timer, Unsent
from tests.clocks import all_at

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
    timer = Timer("default", "t-1", 0, definition, *all_at(1), revision=9, firing=7, attempt=2)
    return asyncio.run(BrokerDeliverer(broker, clock).deliver(timer, 10_000))


def logged_errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.levelno == logging.ERROR]
    return [record.exc_info[0].__name__ for record in records if record.exc_info and record.exc_info[0]]


def test_a_publish_uses_the_delivery_id_as_message_id(clock: Any) -> None:
    _: Deliverer = BrokerDeliverer(None, clock)
    broker = FakeBroker()
    assert deliver(broker, clock) == Outcome(kind=OutcomeKind.ANSWERED)
    ((subject, headers, id),) = broker.published
    assert (subject, headers) == ("a.b", {"x": "y", "duetime-attempt": "2"})
    assert len(id) == 36


def test_without_a_broker_the_attempt_does_not_count(clock: Any) -> None:
    outcome = deliver(FakeBroker(BrokerAway("the broker is not connected")), clock)
    assert outcome == Outcome(kind=OutcomeKind.UNSENT, cause=Unsent.BROKER, error="the broker is not connected")
    outcome = deliver(None, clock)
    assert (outcome.kind, outcome.cause) == (OutcomeKind.UNSENT, Unsent.BROKER)
    with pytest.raises(InvalidInput, match="TIMER_BROKER_URL"):
        asyncio.run(BrokerDeliverer(None, clock).check(TARGET))


def test_errors_of_the_broker_become_outcomes(clock: Any) -> None:
    assert deliver(FakeBroker(BrokerTimeout("late")), clock) == Outcome(kind=OutcomeKind.TIMED_OUT, error="late")
    assert deliver(FakeBroker(BrokerError("no stream")), clock) == Outcome(kind=OutcomeKind.REFUSED, error="no stream")


def test_an_internal_error_before_the_publish_does_not_count(
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


OURS = {"events": "due.events", "others": ("in.commands", "dead")}
CLOSED = [
    *("due.events", "due.events.tenant", "in.commands", "in.commands.a.b", "dead", "dead.letters"),
    *("$JS.API.STREAM.PURGE.APP", "$SYS.x", "$", "$KV.a", "_INBOX", "_INBOX.a.b", "_R_.a", "_GR_.a"),
]
OPEN = [
    "due",
    "due.eventsx",
    "due.event",
    "in",
    "in.command",
    "deadly",
    "x.dead",
    "_INBOXES.a",
    "a.$JS.API",
    "a._INBOX",
]
STEERING = [
    "Nats-Rollup",
    "nats-rollup",
    "NATS-MSG-ID",
    "Nats-Expected-Last-Sequence",
    "duetime-attempt",
    "Content-Length",
]


def attempt(broker: FakeBroker, clock: Any, target: NatsTarget, body: BodyFormat = BodyFormat.ENVELOPE) -> Outcome:
    definition = Definition(target=target, body=body)
    timer = Timer("default", "t-1", 0, definition, *all_at(1), revision=9, firing=7, attempt=1)
    return asyncio.run(BrokerDeliverer(broker, clock, **OURS).deliver(timer, 10_000))  # type: ignore[arg-type]


@pytest.mark.parametrize("subject", CLOSED)
def test_own_subjects_are_rejected_at_creation_and_for_older_timers(clock: Any, subject: str) -> None:
    broker, target = FakeBroker(), NatsTarget(subject=subject)
    with pytest.raises(InvalidInput, match=r"^callback_subject must not be one of"):
        asyncio.run(BrokerDeliverer(broker, clock, **OURS).check(target))  # type: ignore[arg-type]
    outcome = attempt(broker, clock, target)
    assert (outcome.kind, outcome.final) == (OutcomeKind.REFUSED, True)
    assert outcome.error is not None and outcome.error.startswith("the callback subject must not be one of")
    assert broker.published == []


@pytest.mark.parametrize("subject", OPEN)
def test_other_subjects_are_allowed(clock: Any, subject: str) -> None:
    broker, target = FakeBroker(), NatsTarget(subject=subject)
    asyncio.run(BrokerDeliverer(broker, clock, **OURS).check(target))  # type: ignore[arg-type]
    assert attempt(broker, clock, target).kind is OutcomeKind.ANSWERED


def test_our_events_go_only_to_the_subject_of_events(clock: Any) -> None:
    broker = FakeBroker()
    assert attempt(broker, clock, NatsTarget(subject="due.events.a"), BodyFormat.EVENT).kind is OutcomeKind.ANSWERED
    assert len(broker.published) == 1
    assert attempt(broker, clock, NatsTarget(subject="in.commands.a"), BodyFormat.EVENT).final
    assert len(broker.published) == 1


@pytest.mark.parametrize("header", STEERING)
def test_headers_that_control_the_broker_are_rejected_for_older_timers(clock: Any, header: str) -> None:
    broker = FakeBroker()
    outcome = attempt(broker, clock, NatsTarget(subject="a.b", headers={"x": "y", header: "sub"}))
    assert (outcome.kind, outcome.final) == (OutcomeKind.REFUSED, True)
    assert outcome.error is not None and header in outcome.error
    assert broker.published == []
