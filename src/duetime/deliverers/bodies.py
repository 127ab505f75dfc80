"""Builds the body of a callback in the format that the timer's API defines, for HTTP and NATS."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from duetime.instants import Instant
from duetime.model import BodyFormat, Timer
from duetime.timetext import format_time


class _Envelope(Struct, frozen=True, rename="camel"):
    id: str
    namespace: str
    execute_at: str
    attempt: int
    payload: Raw


class _Reached(Struct, frozen=True, rename="camel", tag="DueTimeReached", tag_field="_tag"):
    tenant_id: str
    service_call_id: str
    reached_at: str


class _Event(Struct, frozen=True, rename="camel"):
    id: str
    type: str
    aggregate_id: str  # the serviceCallId
    tenant_id: str
    timestamp_ms: int
    payload: _Reached
    correlation_id: str | UnsetType = UNSET


_PAYLOAD = BodyFormat.PAYLOAD  # looking up an enum member is slow
_NULL = Raw(b"null")
_encode = msgspec.json.Encoder().encode


def body_of(timer: Timer, now: Instant) -> bytes:
    """The body of an attempt that is sent at ``now``."""
    definition = timer.definition
    payload = definition.payload
    if definition.body is _PAYLOAD:
        return bytes(payload)
    if definition.body is BodyFormat.ENVELOPE:
        return _encode(
            _Envelope(timer.id, timer.namespace, format_time(timer.execute_at), timer.attempt, payload or _NULL)
        )
    return _encode(
        _Event(
            id=_event_id(timer),
            type="DueTimeReached",
            aggregate_id=timer.id,
            tenant_id=timer.namespace,
            timestamp_ms=now,
            payload=_Reached(timer.namespace, timer.id, format_time(now)),
            correlation_id=UNSET if timer.correlation_id is None else timer.correlation_id,
        )
    )


def _event_id(timer: Timer) -> str:
    """A version 7 UUID from the due time and the delivery id: unique per firing, the same for each of its attempts."""
    time = max(timer.execute_at, timer.created_at).to_bytes(6, "big").hex()  # a timer created late is due at once
    own = timer.delivery_id.replace("-", "")
    return f"{time[:8]}-{time[8:]}-7{own[13:16]}-a{own[17:20]}-{own[20:]}"
