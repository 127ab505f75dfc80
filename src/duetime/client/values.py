"""What goes in and out of a client, as types: frozen values for what the server says, typed dicts for what it is told.

Instants are ``datetime`` with a time zone and durations are ``timedelta``; on the way in, both may also be text as the
API takes it. A payload or metadata is any value that JSON can hold.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypedDict

import msgspec
from msgspec import Struct

from duetime.client.errors import InvalidRequest
from duetime.errors import InvalidInput
from duetime.model import OutcomeKind, Status
from duetime.timetext import format_duration, format_time, parse_duration

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


class Duration(timedelta):
    """A ``timedelta`` that prints as the API writes it: ``30s``, ``1h30m``."""

    def __str__(self) -> str:
        return duration_text(self, "duration")


def time_text(value: datetime | str, field: str) -> str:
    if isinstance(value, str):
        return value
    if value.tzinfo is None:
        raise InvalidRequest(f"{field} must know its time zone: add tzinfo=UTC, or another", details={"field": field})
    # Rounded up to the millisecond, as the server does it: never too early.
    ms = -((_EPOCH - value) // _MILLISECOND)
    if ms < 0:
        raise InvalidRequest(f"{field} must not lie before 1970", details={"field": field})
    return format_time(ms)


def duration_text(value: timedelta | str, field: str) -> str:
    if isinstance(value, str):
        return value
    ms = -(-value // _MILLISECOND)
    if ms < 0:
        raise InvalidRequest(f"{field} must not be negative", details={"field": field})
    return format_duration(ms)


# --- what the server says ------------------------------------------------------------------------------------------


class RetryPolicy(Struct, frozen=True, kw_only=True, rename="camel"):
    """When a failed attempt is tried again."""

    max_retries: int
    max_retry_attempts_duration: Duration
    initial_interval: Duration
    backoff_multiplier: float
    max_interval: Duration
    jitter: bool


class Timer(Struct, frozen=True, kw_only=True, rename="camel"):
    """A timer: what was asked for, and how it stands."""

    id: str
    namespace: str
    execute_at: datetime
    fire_at: datetime  # when the next attempt is due, or the last one was
    callback_url: str | None
    callback_subject: str | None
    callback_method: str | None
    callback_headers: dict[str, str]
    payload: Any
    metadata: Any
    correlation_id: str | None
    retry_policy: RetryPolicy
    callback_timeout: Duration
    response_protocol: str
    status: Status
    attempts: int  # of the current firing
    last_error: str | None
    created_at: datetime
    updated_at: datetime
    executed_at: datetime | None


class TimerPage(Struct, frozen=True, kw_only=True, rename="camel"):
    timers: list[Timer]
    next_cursor: str | None


class Attempt(Struct, frozen=True, kw_only=True, rename="camel"):
    """One delivery try; the latest ten of a timer are kept."""

    attempt: int
    sent_at: datetime
    duration: Duration
    outcome: OutcomeKind
    status: int | None  # of the HTTP answer
    error: str | None
    answer: str  # how the answer began


class Attempts(Struct, frozen=True):
    attempts: list[Attempt]


class SecretInfo(Struct, frozen=True, kw_only=True, rename="camel"):
    """A secret that signs; never what it is."""

    id: str
    created_at: datetime
    expires_at: datetime | None


class Namespace(Struct, frozen=True, kw_only=True, rename="camel"):
    name: str
    shards: int
    retention: str | None  # like "30d", or "forever"; None: as the server's settings say
    weight: int = 1  # its share when more is due than can be delivered
    paused: bool
    created_at: datetime
    secrets: list[SecretInfo]


class Namespaces(Struct, frozen=True):
    namespaces: list[Namespace]


class Instance(Struct, frozen=True, kw_only=True, rename="camel"):
    """A process that takes part."""

    id: str
    name: str  # its machine and process
    version: str  # of the program
    started_at: datetime
    alive_until: datetime
    serving: bool  # False while its clock is too far off the store's
    clock_offset: str
    shards: list[int]  # whose timers it fires


class Cluster(Struct, frozen=True, kw_only=True, rename="camel"):
    """The instances that share the store, and who owns what."""

    instances: list[Instance]
    shards: int  # how many there are
    unowned: list[int]


class NewSecret(Struct, frozen=True, kw_only=True, rename="camel"):
    """A signing secret, shown this once."""

    id: str
    secret: str
    created_at: datetime


class Health(Struct, frozen=True, kw_only=True):
    status: str  # "up" or "degraded"
    database: str
    timestamp: datetime  # the server's time


def _duration(kind: type, given: Any) -> Any:
    if kind is not Duration:
        raise NotImplementedError(kind)
    try:
        return Duration(milliseconds=parse_duration(given, "duration"))
    except (InvalidInput, TypeError) as error:
        raise ValueError(str(error)) from None


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decode(body: bytes, kind: Any) -> Any:
    """An answer as a value of this kind; ``msgspec.MsgspecError`` when it is not one."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind, dec_hook=_duration)
    return decoder.decode(body)


def to_json(value: Any) -> str:
    """A value, or a container of some, as the JSON that the server would write, indented."""

    def plain(given: Any) -> str:
        return time_text(given, "") if isinstance(given, datetime) else str(given)

    built = msgspec.to_builtins(value, builtin_types=(datetime,), enc_hook=str)
    return json.dumps(built, indent=2, ensure_ascii=False, default=plain)


# --- what the server is told ---------------------------------------------------------------------------------------


class RetryOptions(TypedDict, total=False):
    """What is left out keeps its default."""

    max_retries: int
    max_retry_attempts_duration: timedelta | str
    initial_interval: timedelta | str
    backoff_multiplier: float
    max_interval: timedelta | str
    jitter: bool


class Changes(TypedDict, total=False):
    """What can be said about a timer: when (``execute_at`` or ``delay``), where to, what with. None but in a payload or
    metadata, where it is a value, means the same as leaving a field out."""

    execute_at: datetime | str | None
    delay: timedelta | str | None
    callback_url: str | None
    callback_subject: str | None
    callback_method: Literal["POST", "PUT", "PATCH"] | None
    callback_headers: dict[str, str] | None
    payload: Any
    metadata: Any
    correlation_id: str | None
    retry_policy: RetryPolicy | RetryOptions | None
    callback_timeout: timedelta | str | None
    response_protocol: Literal["answer", "status"] | None


class NewTimer(Changes, total=False):
    """A timer that is to be made."""

    namespace: str | None
    id: str | None
