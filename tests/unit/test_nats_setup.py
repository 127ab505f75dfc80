"""Problems of existing streams, and which subjects a stream covers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from duetime.brokers import nats
from duetime.brokers.nats import Names, NatsBroker


@pytest.mark.parametrize(
    ("pattern", "subject"),
    [
        ("a.b", "a.b"),
        ("a.*", "a.b"),
        ("*.*", "a.b"),
        ("a.*", "a.*"),
        ("*.*", "a.*"),
        ("a.>", "a.*"),
        ("a.>", "a.b.c"),
        (">", "a"),
        (">", "a.*"),
        ("*.>", "a.b.*"),
        ("a.*.c", "a.b.c"),
    ],
)
def test_pattern_covers_subject(pattern: str, subject: str) -> None:
    assert nats._covers(pattern, subject)


@pytest.mark.parametrize(
    ("pattern", "subject"),
    [
        ("a.b", "a.*"),  # one of many
        ("a.b", "a"),
        ("a", "a.b"),
        ("a.*", "a"),
        ("a.*", "a.b.c"),
        ("a.>", "a"),
        ("*.>", "a"),
        ("b.*", "a.*"),
        ("a.*.c", "a.*.*"),
        ("a.b.>", "a.*.c"),
        ("ab", "a"),
    ],
)
def test_pattern_does_not_cover_subject(pattern: str, subject: str) -> None:
    assert not nats._covers(pattern, subject)


def _judged(**changes: Any) -> list[str]:
    wanted = NatsBroker("nats://127.0.0.1", Names())._streams()[0]
    return nats._problems(wanted, wanted.evolve(**changes))


def test_streams_created_by_duetime_have_no_problems() -> None:
    broker = NatsBroker("nats://127.0.0.1", Names())
    for config in broker._streams():
        there = config.evolve(duplicate_window=config.duplicate_window or 120.0)  # the server's default
        assert nats._problems(config, there) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"subjects": ["timer.commands.schedule.acme"]}, "does not have the subject timer.commands.schedule.*"),
        ({"subjects": None}, "does not have the subject timer.commands.schedule.*"),
        ({"storage": StorageType.MEMORY}, "stored in memory"),
        ({"discard": DiscardPolicy.OLD, "max_msgs": 10}, "drops its oldest messages silently"),
        ({"discard": DiscardPolicy.OLD, "max_bytes": 10}, "drops its oldest messages silently"),
        ({"max_msgs_per_subject": 1}, "keeps 1 messages per subject"),
        ({"max_age": 3600.0}, "drops messages silently after 3600 s"),
        ({"no_ack": True}, "sends no acks"),
        ({"duplicate_window": 60.0}, "forgets message ids after 60 s"),
        ({"retention": RetentionPolicy.INTEREST}, "while it has no consumer"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_stream_that_may_lose_messages_has_problems(changes: dict[str, Any], problem: str) -> None:
    [found] = _judged(**changes)
    assert problem in found


@pytest.mark.parametrize(
    "changes",
    [
        {"subjects": ["timer.>"]},
        {"subjects": ["other", "timer.commands.*.*"]},
        {"discard": DiscardPolicy.OLD},  # never full
        {"discard": DiscardPolicy.OLD, "max_msgs": -1, "max_bytes": -1},
        {"max_msgs": 10},  # rejects new messages, so the publisher gets an error
        {"max_msgs_per_subject": 5, "discard_new_per_subject": True},
        {"max_age": 7 * 86_400.0},
        {"duplicate_window": 120.0},
        {"retention": RetentionPolicy.LIMITS},
    ],
    ids=str,
)
def test_an_equivalent_stream_has_no_problems(changes: dict[str, Any]) -> None:
    assert _judged(**changes) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ack_policy": AckPolicy.NONE}, "explicit acks"),
        ({"ack_policy": AckPolicy.ALL}, "explicit acks"),
        ({"max_deliver": 3}, "drops a command after 3 deliveries"),
        ({"deliver_subject": "push"}, "push consumer"),
        ({"filter_subject": "timer.commands.schedule.acme"}, "does not deliver all"),
        ({"filter_subjects": ["a", "b"]}, "does not deliver all"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_consumer_that_may_lose_commands_has_problems(changes: dict[str, Any], problem: str) -> None:
    broker = NatsBroker("nats://127.0.0.1", Names())
    [found] = broker._consumer_problems(ConsumerConfig(durable_name="duetime").evolve(**changes))
    assert problem in found
    for well in ({}, {"max_deliver": -1}, {"filter_subject": "timer.commands.>"}, {"filter_subjects": ["x", ">"]}):
        assert broker._consumer_problems(ConsumerConfig(durable_name="duetime").evolve(**well)) == []


def test_sequence_number_and_time_of_a_command_are_parsed() -> None:
    at = 1_700_000_000_000_000_000
    assert nats._place("$JS.ACK.TIMER_COMMANDS.duetime.2.17.33.1700000000000000000.4") == (17, at)
    assert nats._place("$JS.ACK.hub.ACCOUNT.TIMER_COMMANDS.duetime.2.17.33.1700000000000000000.4") == (17, at)
    assert nats._place("$JS.ACK.hub.ACCOUNT.TIMER_COMMANDS.duetime.2.17.33.1700000000000000000.4.random") == (17, at)


def test_publish_acks_are_decoded() -> None:
    assert nats._published(b'{"stream": "S", "seq": 7, "duplicate": true}').error is None
    failure = nats._published(b'{"error": {"code": 503, "err_code": 10077, "description": "full"}}').error
    assert failure is not None and failure.description == "full"
    with pytest.raises(msgspec.MsgspecError):
        nats._published(b"hello")


def test_the_stream_of_commands_is_a_work_queue() -> None:
    config: StreamConfig = NatsBroker("nats://127.0.0.1", Names())._streams()[0]
    assert config.retention == RetentionPolicy.WORK_QUEUE and not config.max_age
