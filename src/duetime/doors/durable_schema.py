"""What goes through the durable door, as types: requests are checked against them, answers are made of them, and the
OpenAPI document is generated from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from duetime.doors.retry_policy import CamelRetryPolicy, Duration
from duetime.model import OutcomeKind, Status

BATCH_MAX = 1_000
CALLBACK_TIMEOUT_MS_MAX = 3_600_000

Name = Annotated[
    str,
    Meta(min_length=1, max_length=64, pattern="^[A-Za-z0-9._-]+$", description="a namespace", examples=["default"]),
]
Id = Annotated[str, Meta(min_length=1, max_length=255, description="a timer's id, unique in its namespace")]
Time = Annotated[
    str,
    Meta(max_length=64, description="RFC 3339 with an offset or Z", examples=["2030-01-31T09:00:00Z"]),
]
Url = Annotated[str, Meta(max_length=2048, description="an absolute http or https URL")]
Method = Literal["POST", "PUT", "PATCH"]
Protocol = Annotated[
    Literal["answer", "status"],
    Meta(description='"answer": 200 with {"ok": true} completes; "status": any 2xx does'),
]
Correlation = Annotated[str, Meta(min_length=1, max_length=255, description="what belongs together, to list it by")]


class Changes(Struct, rename="camel"):
    """What a create and an update have in common; null means the same as leaving a field out, except in a payload."""

    execute_at: Time | None = None
    delay: Annotated[Duration, Meta(description="in place of executeAt: from now on")] | None = None
    callback_url: Url | None = None
    callback_subject: Annotated[str, Meta(max_length=255, description="in place of callbackUrl: NATS")] | None = None
    callback_method: Method | None = None
    callback_headers: dict[str, str] | None = None
    payload: Raw | UnsetType = UNSET
    metadata: Raw | UnsetType = UNSET
    correlation_id: Correlation | None = None
    retry_policy: CamelRetryPolicy | None = None
    callback_timeout: Duration | None = None
    response_protocol: Protocol | None = None


class CreateTimer(Changes, rename="camel"):
    """A new timer: when (executeAt or delay), where to (callbackUrl), and what with."""

    namespace: Name | None = None
    group_id: Annotated[Name, Meta(description="the older name of namespace")] | None = None
    id: Id | None = None
    timer_id: Annotated[Id, Meta(description="another name of id")] | None = None


class UpdateTimer(Changes, rename="camel"):
    """What to change of a pending timer, and which one."""

    namespace: Name | None = None
    group_id: Name | None = None
    id: Id | None = None
    timer_id: Id | None = None


class Selection(Struct, rename="camel"):
    """Which timer."""

    namespace: Name | None = None
    group_id: Name | None = None
    id: Id | None = None
    timer_id: Id | None = None


class BatchIn(Struct, rename="camel"):
    """Up to 1000 timers, each as in a create."""

    timers: Annotated[list[Raw], Meta(min_length=1, max_length=BATCH_MAX)]


class Timer(Struct, rename="camel"):
    """A timer: what was asked for, and how it stands."""

    id: str
    namespace: str
    execute_at: str
    fire_at: Annotated[str, Meta(description="when the next attempt is due, or the last one was")]
    callback_url: str | None
    callback_subject: str | None
    callback_method: str | None
    callback_headers: dict[str, str]
    payload: Any
    metadata: Any
    correlation_id: str | None
    retry_policy: CamelRetryPolicy
    callback_timeout: str
    response_protocol: str
    status: Status
    attempts: Annotated[int, Meta(description="of the current firing")]
    last_error: str | None
    created_at: str
    updated_at: str
    executed_at: str | None


class TimerPage(Struct, rename="camel"):
    timers: list[Timer]
    next_cursor: str | None


class Attempt(Struct, rename="camel"):
    """One delivery try; the latest ten are kept."""

    attempt: int
    sent_at: str
    duration: str
    outcome: OutcomeKind
    status: Annotated[int, Meta(description="of the HTTP answer")] | None
    error: str | None
    answer: Annotated[str, Meta(description="how the answer began")]


class Attempts(Struct, rename="camel"):
    attempts: list[Attempt]


class Failure(Struct, rename="camel"):
    """Every error of this door."""

    error: Annotated[str, Meta(description="a code for programs", examples=["TIMER_NOT_FOUND"])]
    message: Annotated[str, Meta(description="a sentence for people")]
    details: dict[str, Any]
    timestamp: str


class BatchResult(Struct, rename="camel", omit_defaults=True):
    """What became of one timer of a batch: the timer, or its error."""

    status: int
    timer: Timer | UnsetType = UNSET
    error: Failure | UnsetType = UNSET


class BatchOut(Struct, rename="camel"):
    results: list[BatchResult]


class ReplayIn(Struct, rename="camel"):
    """Which finished timers to replay: those of a status, by namespace or correlation id if given."""

    status: Literal["failed", "completed", "canceled"] = "failed"
    namespace: Name | None = None
    correlation_id: Correlation | None = None
    limit: Annotated[int, Meta(ge=1, le=BATCH_MAX)] = 100


class ReplayOut(Struct, rename="camel"):
    replayed: int


class NamespaceIn(Struct, rename="camel"):
    name: Name
    shards: Annotated[int, Meta(ge=1, description="how many shards to spread over; fixed")] | None = None
    retention: Annotated[str, Meta(max_length=40, description="like 30d, or forever")] | None = None


class NamespaceChanges(Struct, rename="camel"):
    retention: Annotated[str, Meta(max_length=40, description="like 30d, or forever")] | None = None
    paused: Annotated[bool, Meta(description="while paused nothing fires and creates are taken")] | None = None
    shards: int | None = None


class SecretInfo(Struct, rename="camel"):
    id: str
    created_at: str
    expires_at: str | None


class Namespace(Struct, rename="camel"):
    name: str
    shards: int
    retention: Annotated[str, Meta(description="null: as the settings say")] | None
    paused: bool
    created_at: str
    secrets: Annotated[list[SecretInfo], Meta(description="which secrets sign; never what they are")]


class Namespaces(Struct, rename="camel"):
    namespaces: list[Namespace]


class NewSecret(Struct, rename="camel"):
    """A signing secret, shown this once."""

    id: str
    secret: Annotated[str, Meta(examples=["whsec_…"])]
    created_at: str
