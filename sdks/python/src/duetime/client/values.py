"""The values that the client returns (frozen) and the dictionaries that it takes, as types.

A time is a ``datetime`` with a time zone and a duration a ``timedelta``. As an argument, both may also be text in the
format of the API. A payload or metadata is any value that JSON can represent.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypedDict

import msgspec
from msgspec import Struct

from duetime.client.errors import InvalidRequest

DEFAULT_NAMESPACE = "default"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_UNITS = {
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": _MILLISECOND,
}
_DURATION = re.compile("".join(f"(?:([0-9]{{1,15}}){unit})?" for unit in _UNITS)).fullmatch


# --- times and durations -------------------------------------------------------------------------------------------


class Duration(timedelta):
    """A ``timedelta`` that prints as the API writes it: ``30s``, ``1h30m``."""

    def __str__(self) -> str:
        return duration_text(self, "duration")


def time_text(value: datetime | str, name: str, field: str | None = None) -> str:
    """``2030-01-31T09:00:00.000Z``. Errors name the argument, and in ``details`` the field of the API."""
    if isinstance(value, str):
        return value
    if not isinstance(value, datetime):
        raise TypeError(f'{name} must be a datetime or a time such as "2030-01-31T09:00:00Z", not {value!r}')
    if value.tzinfo is None:
        raise InvalidRequest(f"{name} needs a time zone: add tzinfo=UTC, for example", details={"field": field or name})
    if value < _EPOCH:
        raise InvalidRequest(f"{name} must not be before 1970", details={"field": field or name})
    # Rounded up to the millisecond, as in the service: a timer never fires too early.
    value = value.astimezone(UTC) + timedelta(microseconds=-value.microsecond % 1000)
    return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def duration_text(value: timedelta | str, name: str, field: str | None = None) -> str:
    """Like ``1h30m``, rounded up to the millisecond. Hours stay hours below two days: ``36h``."""
    if isinstance(value, str):
        return value
    if not isinstance(value, timedelta):
        example = f"{value}s" if type(value) is int and value >= 0 else "30s"
        raise TypeError(f'{name} must be a timedelta or a duration such as "{example}", not {value!r}')
    if value < timedelta(0):
        raise InvalidRequest(f"{name} must not be negative", details={"field": field or name})
    left = -(-value // _MILLISECOND) * _MILLISECOND
    parts = []
    for unit, size in _UNITS.items():
        if unit != "d" or left >= timedelta(days=2):
            count, left = divmod(left, size)
            parts += [f"{count}{unit}"] if count else []
    return "".join(parts) or "0s"


def duration_of(text: str) -> Duration:
    """A duration as the service writes it; ``ValueError`` for anything else."""
    match = _DURATION(text)
    if match is None or not text:
        raise ValueError(f"{text!r} is not a duration")
    counted = zip(match.groups(), _UNITS.values(), strict=True)
    total = sum((int(count) * size for count, size in counted if count), timedelta(0))
    return Duration(total.days, total.seconds, total.microseconds)


# --- what the client returns ---------------------------------------------------------------------------------------


class Status(enum.StrEnum):
    """The status of a timer."""

    PENDING = "pending"
    EXECUTING = "executing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELED = "canceled"

    @property
    def final(self) -> bool:
        """Whether the timer is finished: it does not fire unless it is replayed."""
        return self not in (Status.PENDING, Status.EXECUTING)


class OutcomeKind(enum.StrEnum):
    """How one delivery attempt ended."""

    ANSWERED = "answered"  # the receiver responded
    UNREACHABLE = "unreachable"  # no connection, or it broke before the response
    TIMED_OUT = "timed_out"
    REFUSED = "refused"  # the service did not allow the address, or the broker did not take the message
    UNSENT = "unsent"  # the service could not send it: the attempt does not count


class RetryPolicy(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """When the service retries a failed attempt."""

    max_retries: int
    max_retry_attempts_duration: Duration
    initial_interval: Duration
    backoff_multiplier: float
    max_interval: Duration
    jitter: bool
    give_up_on: tuple[int, ...] | None = None  # HTTP statuses that fail the timer at once; None: an older service


class Timer(Struct, frozen=True, kw_only=True, rename="camel"):
    """A timer: its definition and its current state."""

    id: str
    namespace: str
    execute_at: datetime
    fire_at: datetime  # when the next attempt is due, or the last one was due
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
    """One page of a list."""

    timers: list[Timer]
    next_cursor: str | None  # None on the last page


class Count(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A number of timers."""

    timers: int
    more: bool  # True: there are more, the count stopped at its limit
    estimated: bool = False  # True: the service's database keeps no exact number


class Attempt(Struct, frozen=True, kw_only=True, rename="camel"):
    """One delivery attempt. The service keeps the latest ten of a timer."""

    attempt: int
    sent_at: datetime
    duration: Duration
    outcome: OutcomeKind
    status: int | None  # of the HTTP response
    error: str | None
    answer: str  # response body (its beginning)
    delivery_id: str | None = None  # the callback's webhook-id


class Attempts(Struct, frozen=True):
    attempts: list[Attempt]


class SecretInfo(Struct, frozen=True, kw_only=True, rename="camel"):
    """A signing secret, without the secret itself."""

    id: str
    created_at: datetime
    expires_at: datetime | None  # None for the newest


class Namespace(Struct, frozen=True, kw_only=True, rename="camel"):
    """A scope of timer ids with its own settings."""

    name: str
    shards: int
    retention: str | None  # like "30d", or "forever"; None: the service's default
    weight: int = 1  # its share when more is due than can be delivered
    paused: bool
    created_at: datetime
    secrets: list[SecretInfo]


class Namespaces(Struct, frozen=True):
    namespaces: list[Namespace]


class Instance(Struct, frozen=True, kw_only=True, rename="camel"):
    """One process of the cluster."""

    id: str
    name: str  # host and process id
    version: str  # of the service
    started_at: datetime
    alive_until: datetime
    serving: bool  # False while its clock differs too much from the database's
    clock_offset: str
    shards: list[int]  # the shards that it owns, whose timers it fires


class Abilities(Struct, frozen=True, kw_only=True, rename="camel"):
    """What the service's database supports. Requests that it does not support raise ``Unsupported``."""

    orders: list[str]  # the orders in which it can list timers
    offset_max: int | None
    counts_exactly: bool
    expires_history: bool  # the database removes old finished timers itself
    time_source: str  # whose clock decides what is due: "store", or "machine" for each instance's own


class Cluster(Struct, frozen=True, kw_only=True, rename="camel"):
    """The instances that share a database, the shards they own, and what the database supports."""

    instances: list[Instance]
    shards: int  # the total number
    unowned: list[int]  # shards without an owner: their timers wait
    abilities: Abilities | None = None  # None from a service that does not report them


class ActivityPoint(Struct, frozen=True, kw_only=True, rename="camel"):
    """What the cluster did in one step of time."""

    at: datetime  # the end of the step
    fires_per_second: float  # attempts sent
    lateness_p50_ms: float | None
    lateness_p99_ms: float | None


class ForecastStep(Struct, frozen=True, kw_only=True, rename="camel"):
    """How many pending timers fall due in one step of time."""

    at: datetime  # the start of the step
    timers: int
    more: bool
    estimated: bool = False


class Forecast(Struct, frozen=True, kw_only=True):
    """What falls due."""

    hour: list[ForecastStep]  # the next 60 minutes
    day: list[ForecastStep]  # the next 24 hours


class DestinationFailures(Struct, frozen=True, kw_only=True, rename="camel"):
    """Failed timers of one destination."""

    destination: str  # like "https://example.com:443"
    timers: int
    last_error: str | None
    last_at: datetime


class Failures(Struct, frozen=True, kw_only=True):
    """The destinations whose timers fail."""

    of: int  # how many of the latest failed timers were examined
    destinations: list[DestinationFailures]  # at most 20, most failures first


class Overview(Struct, frozen=True, kw_only=True, rename="camel"):
    """The state of the service: what it did, what falls due, what fails, and its instances."""

    now: datetime
    statuses: dict[Status, int]
    since: datetime  # when the instance that responded began to record activity
    step_seconds: int  # between two points of ``activity``
    activity: list[ActivityPoint]  # the latest hour, oldest first
    forecast: Forecast
    overdue: Count
    overdue_reasons: dict[str, int]
    failures: Failures | None  # None when the database can't list failed timers
    instances: list[Instance]
    shards: int
    unowned: list[int]
    estimated: bool = False  # True: ``statuses`` are estimates


class NewSecret(Struct, frozen=True, kw_only=True, rename="camel"):
    """A new signing secret. The service shows it only once."""

    id: str
    secret: str
    created_at: datetime


class Health(Struct, frozen=True, kw_only=True):
    """The health of the service."""

    status: str  # "up" or "degraded"
    database: str
    timestamp: datetime  # the service's time


def _duration(kind: type, given: Any) -> Any:
    if kind is not Duration:
        raise NotImplementedError(kind)
    try:
        return duration_of(given)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decode(body: bytes, kind: Any) -> Any:
    """The body of a response as a value of this type; ``msgspec.MsgspecError`` if it does not fit."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind, dec_hook=_duration)
    return decoder.decode(body)


def to_json(value: Any) -> str:
    """A value (or a container of values) as indented JSON, in the format of the API."""

    def plain(given: Any) -> str:
        return time_text(given, "") if isinstance(given, datetime) else str(given)

    built = msgspec.to_builtins(value, builtin_types=(datetime,), enc_hook=str)
    return json.dumps(built, indent=2, ensure_ascii=False, default=plain)


# --- what the client takes -----------------------------------------------------------------------------------------


class RetryOptions(TypedDict, total=False):
    """A retry policy; fields that are left out have their defaults."""

    max_retries: int
    max_retry_attempts_duration: timedelta | str
    initial_interval: timedelta | str
    backoff_multiplier: float
    max_interval: timedelta | str
    jitter: bool
    give_up_on: Sequence[int]


class Changes(TypedDict, total=False):
    """The changeable fields of a timer: when it fires (``execute_at`` or ``delay``), where it is sent, and with what.
    None means the same as leaving the field out, except for a payload or metadata, where None is JSON's null."""

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
    """A timer to create."""

    namespace: str | None
    id: str | None


# --- the names of the API ------------------------------------------------------------------------------------------


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


FIELDS = {name: _camel(name) for name in NewTimer.__annotations__}
FILTERS = {
    name: _camel(name) for name in ("namespace", "id", "status", "correlation_id", "execute_after", "execute_before")
}
POLICY_FIELDS = dict(zip(RetryPolicy.__struct_fields__, RetryPolicy.__struct_encode_fields__, strict=True))
"""The field of the API for each argument of the client."""
