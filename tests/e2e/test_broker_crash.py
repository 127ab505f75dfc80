"""A short run of the broker's crash test, and tests of its checker."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e import broker_crash
from tests.e2e.broker_crash import Entry, Event, Ledger, judge


def test_no_command_is_lost_when_the_broker_and_the_service_are_killed(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    assert (
        broker_crash.run(
            commands=1_000, broker_kills=2, instance_kills=2, seed=seed, gap=(1.0, 3.0), directory=tmp_path
        )
        == []
    )


ENTRY = Entry(4, "acme", 1_000, confirmed=True)


def event(
    *,
    call: str = "call-4",
    message_id: str = "a",
    reached: int = 1_000,
    stored: float = 1_001,
    correlation: str = "order-1",
) -> Event:
    return Event("acme", call, correlation, message_id, reached, stored)


@pytest.mark.parametrize(
    ("entry", "events", "seen", "says"),
    [
        (ENTRY, [event()], [], None),
        (ENTRY, [event()], [event(), event()], None),  # dropped by JetStream
        (ENTRY, [], [], "lost"),
        (ENTRY, [], [event()], "lost"),
        (Entry(4, "acme", 1_000), [event()], [], "never confirmed"),
        (ENTRY, [event(stored=999.9)], [], "early by 0.100 ms"),
        (ENTRY, [event(reached=999)], [], "early by 1.000 ms"),
        (ENTRY, [event(), event()], [], "2 times in the stream"),
        (ENTRY, [event()], [event(message_id="b")], "different message ids"),
        (ENTRY, [event(correlation="order-2")], [], "another correlation id"),
        (ENTRY, [event(), event(call="call-5")], [], "nobody asked for it"),
    ],
)
def test_the_checker_finds_each_violation(
    entry: Entry, events: list[Event], seen: list[Event], says: str | None
) -> None:
    found = judge(Ledger(entries=[entry]), events, seen)
    assert len(found) == (says is not None)
    assert says is None or says in found[0]
