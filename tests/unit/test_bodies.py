"""Bodies of callbacks: the format of each API, and the id of an event."""

from __future__ import annotations

import json
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from duetime import lifecycle
from duetime.deliverers.bodies import body_of
from duetime.instants import Instant
from duetime.model import BodyFormat, Definition, NatsTarget, Outcome, OutcomeKind, Timer

NOW = Instant(1_800_000_000_000)


def timer(body: BodyFormat = BodyFormat.EVENT, payload: bytes = b"", **fields: object) -> Timer:
    values = {
        "namespace": "acme",
        "id": "call",
        "shard": 0,
        "definition": Definition(target=NatsTarget(subject="a.b"), body=body, payload=Raw(payload)),
        "execute_at": NOW,
        "fire_at": NOW,
        "created_at": NOW,
        "updated_at": NOW,
        "revision": 1,
        "firing": 1,
    }
    return Timer(**(values | fields))  # type: ignore[arg-type]


def begun(timer: Timer, now: Instant = NOW) -> Timer:
    return lifecycle.begin(timer, now=now, version=1)


def event_id(timer: Timer, now: Instant = NOW) -> uuid.UUID:
    return uuid.UUID(json.loads(body_of(timer, now))["id"])


@settings(derandomize=True, deadline=None, database=None)
@given(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20),
    st.integers(0, (1 << 48) - 1),
    st.integers(0, (1 << 48) - 1),
)
def test_the_id_of_an_event_is_a_uuid_of_version_7(id: str, firing: int, at: int) -> None:
    made = event_id(begun(timer(id=id, firing=firing, execute_at=at, created_at=0)))
    assert made.version == 7 and made.variant == uuid.RFC_4122
    assert made.int >> 80 == at


@pytest.mark.parametrize("due", [-62_135_596_800_000, 0, NOW - 1])
def test_the_id_of_an_event_due_before_its_command_has_the_time_of_the_command(due: int) -> None:
    assert event_id(begun(timer(execute_at=due, fire_at=due, created_at=NOW), NOW + 9)).int >> 80 == NOW


def test_the_event_id_is_the_same_for_all_attempts_of_a_firing() -> None:
    first = begun(timer())
    failed = lifecycle.settle(
        first, Outcome(kind=OutcomeKind.TIMED_OUT), sent_at=NOW, now=NOW + 5, uniform=lambda low, high: high
    )
    second = begun(failed, NOW + 60_000)
    assert second.attempt == 2 and event_id(second, NOW + 60_000) == event_id(first)
    lost = begun(first, NOW + 90_000)  # its outcome was never recorded
    assert event_id(lost, NOW + 90_000) == event_id(first)


def test_the_event_id_is_the_same_after_a_deferral() -> None:
    first = begun(timer(), NOW + 7)
    late = lifecycle.settle(
        first, Outcome(kind=OutcomeKind.TIMED_OUT), sent_at=NOW + 700, now=NOW + 900, uniform=lambda low, high: high
    )
    put_off = lifecycle.defer(begun(late, late.fire_at + 50), fire_at=late.fire_at + 90_000, now=NOW)
    assert event_id(begun(put_off, put_off.fire_at + 3)) == event_id(begun(late, late.fire_at)) == event_id(first)


def test_the_event_id_is_the_same_after_a_wait_for_the_broker() -> None:
    first = begun(timer())
    deferred = lifecycle.defer(first, fire_at=NOW + 1_000, now=NOW, away=True)
    assert event_id(begun(deferred, NOW + 1_000), NOW + 1_000) == event_id(first)


def test_each_firing_has_its_own_event_id() -> None:
    first = begun(timer())
    done = lifecycle.settle(first, Outcome(kind=OutcomeKind.ANSWERED), sent_at=NOW, now=NOW, uniform=max)
    again = begun(lifecycle.replay(done, now=NOW))
    assert event_id(again) != event_id(first)


def test_each_timer_has_its_own_event_id_even_in_the_same_millisecond() -> None:
    assert len({event_id(begun(timer(id=f"c{n}", firing=n % 3))) for n in range(1000)}) == 1000


def test_event_has_the_documented_fields() -> None:
    body = json.loads(body_of(begun(timer(correlation_id="c")), NOW + 7))
    assert body.pop("id")
    assert body == {
        "type": "DueTimeReached",
        "aggregateId": "call",
        "tenantId": "acme",
        "timestampMs": NOW + 7,
        "payload": {
            "_tag": "DueTimeReached",
            "tenantId": "acme",
            "serviceCallId": "call",
            "reachedAt": "2027-01-15T08:00:00.007Z",
        },
        "correlationId": "c",
    }
    assert "correlationId" not in json.loads(body_of(begun(timer()), NOW))


@pytest.mark.parametrize("payload", [b"", b"null", b"1E5", b'{ "a":1 }'])
def test_payload_is_the_body_byte_for_byte(payload: bytes) -> None:
    assert body_of(begun(timer(BodyFormat.PAYLOAD, payload)), NOW) == payload


@pytest.mark.parametrize("payload", [b"", b"null", b"1E5", b'{ "a":1 }'])
def test_envelope_contains_the_payload_byte_for_byte(payload: bytes) -> None:
    body = body_of(begun(timer(BodyFormat.ENVELOPE, payload)), NOW)
    assert body == (
        b'{"id":"call","namespace":"acme","executeAt":"2027-01-15T08:00:00.000Z","attempt":1,"payload":%b}'
        % (payload or b"null")
    )
