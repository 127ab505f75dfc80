"""What goes through the durable door, as types: requests are checked against them, answers are made of them, and the
OpenAPI document is generated from them.

A rule that msgspec checks is written as a constraint. One that ``wire`` or ``timetext`` checks, in better words than
msgspec has, is written for the document alone, as ``extra_json_schema``; tests hold the two together. What goes for a
request as a whole is its ``also``.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from duetime.doors.retry_policy import CamelRetryPolicy, Duration
from duetime.engine.watchdog import Reason
from duetime.model import OutcomeKind, Status

BATCH_MAX = 1_000
WEIGHT_MAX = 100

_SPAN = "([0-9]{1,15}d)?([0-9]{1,15}h)?([0-9]{1,15}m)?([0-9]{1,15}s)?([0-9]{1,15}ms)?"
_DAY, _CLOCK = "[0-9]{4}-[0-9]{2}-[0-9]{2}", "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_SHOWN = {"format": "date-time"}

Name = Annotated[
    str,
    Meta(min_length=1, max_length=64, pattern="^[A-Za-z0-9._-]+$", description="a namespace", examples=["default"]),
]
Id = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=255,
        description="a timer's id, unique in its namespace: any text without control characters",
        examples=["invoice-42"],
        extra_json_schema={"pattern": r"^[^\x00-\x1f\x7f-\x9f]+$"},
    ),
]
SecretId = Annotated[str, Meta(description="a secret's id", examples=["8f14e45f-ceea-467f-a9f3-0f2b7a1c6d3e"])]
Time = Annotated[
    str,
    Meta(
        max_length=64,
        description="RFC 3339 with an offset or Z, in the years 1970 to 9999; finer than a millisecond is rounded up",
        examples=["2030-01-31T09:00:00Z"],
        extra_json_schema={
            "format": "date-time",
            "pattern": rf"^{_DAY}[Tt]{_CLOCK}(\.[0-9]{{1,9}})?([Zz]|[+-]([01][0-9]|2[0-3]):?[0-5][0-9])$",
        },
    ),
]
Shown = Annotated[str, Meta(examples=["2030-01-31T09:00:00.000Z"], extra_json_schema=_SHOWN)]
Span = Annotated[Duration, Meta(extra_json_schema={"pattern": f"^{_SPAN}$", "minLength": 2})]
Retention = Annotated[
    str,
    Meta(
        max_length=40,
        description="how long finished timers are kept: like 30d, at least 1s, or forever",
        examples=["30d"],
        extra_json_schema={"pattern": f"^(forever|{_SPAN})$", "minLength": 2},
    ),
]
Weight = Annotated[
    int,
    Meta(
        ge=1,
        le=WEIGHT_MAX,
        description="its share when more is due than can be delivered: weight 3 gets three times the share of weight 1",
        examples=[3],
    ),
]
Url = Annotated[
    str,
    Meta(
        max_length=2048,
        description="an absolute http or https URL in ASCII, without user name or password; not an address that the "
        "service is kept from, such as a private one",
        examples=["https://example.com/hooks/timer"],
        extra_json_schema={"pattern": r"^[Hh][Tt][Tt][Pp][Ss]?://[A-Za-z0-9_.:\[\]-]+([/?#][!-\[\]-~]*)?$"},
    ),
]
HeaderName = Annotated[str, Meta(extra_json_schema={"pattern": r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"})]
HeaderValue = Annotated[str, Meta(extra_json_schema={"pattern": r"^[\t\x20-\x7e\xa0-\xff]*$"})]
Headers = Annotated[
    dict[HeaderName, HeaderValue],
    Meta(
        description="headers of the callback, 16 KiB together; not Host, Content-Length, Connection and the like, nor "
        "those that Duetime sets (webhook-…, duetime-…, traceparent); no name twice, whatever its case",
        examples=[{"X-Tenant": "acme"}],
        extra_json_schema={"maxProperties": 64},
    ),
]
Method = Annotated[Literal["POST", "PUT", "PATCH"], Meta(description="of the callback: POST unless given")]
Protocol = Annotated[
    Literal["answer", "status"],
    Meta(description='"answer": 200 with {"ok": true} completes; "status": any 2xx does'),
]
Payload = Annotated[Raw, Meta(description="any JSON, null included: sent with the callback, as it was written")]
Metadata = Annotated[Raw, Meta(description="any JSON, kept for you and not sent")]
Correlation = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=255,
        description="what belongs together, to list it by",
        examples=["order-7"],
        extra_json_schema={"pattern": r"^[^\x00]+$"},
    ),
]
Group = Annotated[Name, Meta(description="the older name of namespace; if both are given they must be equal")]
TimerId = Annotated[Id, Meta(description="another name of id; if both are given they must be equal")]

PARAMETERS: dict[str, Any] = {
    "namespace": Name,
    "name": Name,
    "id": Id,
    "secrets/{id}": SecretId,
    "executeAfter": Time,
    "executeBefore": Time,
    "limit": Annotated[int, Meta(ge=1, le=1_000, extra_json_schema={"default": 50})],
}
"""What stands in paths and queries, as the door checks it, for the document. The longer key counts where two fit; a
parameter of the query that is not here has the type that its operation gives."""


def _given(name: str, *absent: str) -> dict[str, Any]:
    """That a field is there and not null, and others are not, in JSON schema."""
    return {
        "required": [name],
        "properties": {name: {"type": "string"}} | {other: {"type": "null"} for other in absent},
    }


_IDENTIFIED = {"anyOf": [_given("id"), _given("timerId")]}
_ONE_TIME_AT_MOST = {"anyOf": [{"properties": {name: {"type": "null"}}} for name in ("delay", "executeAt")]}


class Changes(Struct, rename="camel"):
    """What to change of a pending timer; null means the same as leaving a field out, except in a payload. Not both of
    executeAt, which must be in the future, and delay."""

    also: ClassVar[dict[str, Any]] = {**_ONE_TIME_AT_MOST, "examples": [{"delay": "10m"}]}

    execute_at: Time | None = None
    delay: Annotated[Span, Meta(description="in place of executeAt: from now on, at most 100 years")] | None = None
    callback_url: Url | None = None
    callback_subject: (
        Annotated[str, Meta(max_length=255, description="in place of callbackUrl: NATS. Refused without a broker")]
        | None
    ) = None
    callback_method: Method | None = None
    callback_headers: Headers | None = None
    payload: Payload | UnsetType = UNSET
    metadata: Metadata | UnsetType = UNSET
    correlation_id: Correlation | None = None
    retry_policy: CamelRetryPolicy | None = None
    callback_timeout: (
        Annotated[
            Span,
            Meta(
                description="how long an attempt may take, 30s unless given; at most DUETIME_MAX_CALLBACK_TIMEOUT (1h)"
            ),
        ]
        | None
    ) = None
    response_protocol: Protocol | None = None


class CreateTimer(Changes, rename="camel"):
    """A new timer: when (executeAt, in the future, or delay), where to (callbackUrl), and what with. The namespace is
    "default" and the id is made unless they are given; null means the same as leaving a field out, except in a payload.
    """

    also: ClassVar[dict[str, Any]] = {
        "allOf": [
            {"anyOf": [_given("executeAt", "delay"), _given("delay", "executeAt")]},
            _given("callbackUrl", "callbackSubject"),
        ],
        "examples": [
            {
                "id": "invoice-42",
                "executeAt": "2030-01-31T09:00:00Z",
                "callbackUrl": "https://example.com/hooks/timer",
                "payload": {"invoice": 42},
                "retryPolicy": {"maxRetries": 5, "initialInterval": "10s"},
            }
        ],
    }

    namespace: Name | None = None
    group_id: Group | None = None
    id: Id | None = None
    timer_id: TimerId | None = None


class UpdateTimer(Changes, rename="camel"):
    """What to change of a pending timer, and which one: its id or timerId, and its namespace unless it is "default"."""

    also: ClassVar[dict[str, Any]] = {
        "allOf": [_IDENTIFIED, _ONE_TIME_AT_MOST],
        "examples": [{"timerId": "invoice-42", "delay": "10m"}],
    }

    namespace: Name | None = None
    group_id: Group | None = None
    id: Id | None = None
    timer_id: TimerId | None = None


class Selection(Struct, rename="camel"):
    """Which timer: its id or timerId, and its namespace unless it is "default"."""

    also: ClassVar[dict[str, Any]] = {**_IDENTIFIED, "examples": [{"timerId": "invoice-42"}]}

    namespace: Name | None = None
    group_id: Group | None = None
    id: Id | None = None
    timer_id: TimerId | None = None


class BatchIn(Struct, rename="camel"):
    """Up to 1000 timers, each as in a create. One that is refused does not stop the others: its result says why."""

    also: ClassVar[dict[str, Any]] = {
        "examples": [
            {
                "timers": [
                    {"id": "a", "delay": "1h", "callbackUrl": "https://example.com/hooks/timer"},
                    {"id": "b", "delay": "2h", "callbackUrl": "https://example.com/hooks/timer"},
                ]
            }
        ]
    }

    timers: Annotated[
        list[Annotated[Raw, Meta(extra_json_schema={"$ref": "#/components/schemas/CreateTimer"})]],
        Meta(min_length=1, max_length=BATCH_MAX),
    ]


class Timer(Struct, rename="camel"):
    """A timer: what was asked for, and how it stands."""

    id: str
    namespace: str
    execute_at: Annotated[Shown, Meta(description="when it was asked for")]
    fire_at: Annotated[Shown, Meta(description="when the next attempt is due, or the last one was")]
    callback_url: str | None
    callback_subject: str | None
    callback_method: str | None
    callback_headers: dict[str, str]
    payload: Annotated[Any, Meta(description="as it was given; null also when there was none")]
    metadata: Annotated[Any, Meta(description="as it was given; null also when there was none")]
    correlation_id: str | None
    retry_policy: CamelRetryPolicy
    callback_timeout: str
    response_protocol: str
    status: Status
    attempts: Annotated[int, Meta(description="of the current firing")]
    last_error: Annotated[str, Meta(description="why the latest attempt failed")] | None
    created_at: Shown
    updated_at: Shown
    executed_at: Annotated[Shown, Meta(description="when it was completed or failed")] | None


class TimerPage(Struct, rename="camel"):
    """Some timers, and where to go on."""

    timers: list[Timer]
    next_cursor: Annotated[str, Meta(description="the cursor of the next page; null on the last one")] | None


class Attempt(Struct, rename="camel"):
    """One delivery try; the latest ten are kept."""

    attempt: Annotated[int, Meta(description="its number in its firing, from 1")]
    sent_at: Shown
    duration: Annotated[str, Meta(examples=["120ms"])]
    outcome: OutcomeKind
    status: Annotated[int, Meta(description="of the HTTP answer")] | None
    error: Annotated[str, Meta(description="for people")] | None
    answer: Annotated[str, Meta(description="how the answer began")]
    delivery_id: (
        Annotated[str, Meta(description="of the firing it belongs to: the callback's webhook-id; null for old ones")]
        | None
    )


class Attempts(Struct, rename="camel"):
    """The latest attempts, oldest first."""

    attempts: list[Attempt]


class Failure(Struct, rename="camel"):
    """Every error of this door."""

    error: Annotated[str, Meta(description="a code for programs", examples=["TIMER_NOT_FOUND"])]
    message: Annotated[str, Meta(description="a sentence for people")]
    details: Annotated[dict[str, Any], Meta(description="for invalid input: the field", examples=[{"field": "delay"}])]
    timestamp: Shown


class BatchResult(Struct, rename="camel", omit_defaults=True):
    """What became of one timer of a batch: the timer, or its id where that is enough, or its error."""

    status: Annotated[int, Meta(description="what a create of its own would have answered", examples=[200, 409])]
    timer: Timer | UnsetType = UNSET
    id: Annotated[str, Meta(description="in the place of the timer, with `Prefer: return=minimal`")] | UnsetType = UNSET
    error: Failure | UnsetType = UNSET


class BatchOut(Struct, rename="camel"):
    """A result for each timer of a batch."""

    results: Annotated[list[BatchResult], Meta(description="in the order of the timers")]


class CancelIn(Struct, rename="camel"):
    """Which pending timers to cancel: all that match what is given."""

    also: ClassVar[dict[str, Any]] = {"examples": [{"namespace": "default", "correlationId": "order-7"}]}

    namespace: Name | None = None
    id: Id | None = None
    correlation_id: Correlation | None = None
    execute_after: Annotated[Time, Meta(description="due at this time or later")] | None = None
    execute_before: Annotated[Time, Meta(description="due before this time")] | None = None
    limit: Annotated[int, Meta(ge=1, le=BATCH_MAX)] = 100


class CancelOut(Struct, rename="camel"):
    """How many timers will not fire."""

    canceled: int
    more: Annotated[bool, Meta(description="whether there may be more of them: ask again")]


class ReplayIn(CancelIn, rename="camel"):
    """Which finished timers to replay: those of a status that match what else is given."""

    also: ClassVar[dict[str, Any]] = {"examples": [{"status": "failed", "namespace": "default", "limit": 100}]}

    status: Literal["failed", "completed", "canceled"] = "failed"


class ReplayOut(Struct, rename="camel"):
    """How many timers will fire once more."""

    replayed: int
    more: Annotated[bool, Meta(description="whether there may be more of them: ask again")]


class Count(Struct, rename="camel"):
    """How many timers there are."""

    timers: int
    more: Annotated[bool, Meta(description="that there are more: counting stopped there")]


class NamespaceIn(Struct, rename="camel"):
    """A new namespace."""

    also: ClassVar[dict[str, Any]] = {"examples": [{"name": "billing", "retention": "30d"}]}

    name: Name
    shards: Annotated[int, Meta(ge=1, description="how many shards to spread over, all unless given; fixed")] | None = (
        None
    )
    retention: Retention | None = None
    weight: (
        Annotated[Weight, Meta(description="its share when more is due than can be delivered; 1 unless given")] | None
    ) = None


class NamespaceChanges(Struct, rename="camel"):
    """What to change of a namespace; null means the same as leaving a field out."""

    also: ClassVar[dict[str, Any]] = {"examples": [{"paused": True}]}

    retention: Retention | None = None
    weight: Weight | None = None
    paused: Annotated[bool, Meta(description="while paused nothing fires and creates are taken")] | None = None
    shards: Annotated[int, Meta(description="fixed: only the number that it has is taken")] | None = None


class SecretInfo(Struct, rename="camel"):
    """A signing secret, without the secret."""

    id: str
    created_at: Shown
    expires_at: Annotated[Shown, Meta(description="until when it signs too; null for the newest")] | None


class Namespace(Struct, rename="camel"):
    """A namespace: a scope of ids with settings of its own."""

    name: str
    shards: int
    retention: Annotated[str, Meta(description="null: as the settings say")] | None
    weight: Weight
    paused: bool
    created_at: Shown
    secrets: Annotated[list[SecretInfo], Meta(description="which secrets sign; never what they are")]


class Namespaces(Struct, rename="camel"):
    """All namespaces, by name."""

    namespaces: list[Namespace]


class Instance(Struct, rename="camel"):
    """A process that takes part."""

    id: str
    name: Annotated[str, Meta(description="its machine and process", examples=["timers-1:4711"])]
    version: Annotated[str, Meta(description="of the program")]
    started_at: Shown
    alive_until: Annotated[str, Meta(description="when it counts as gone, unless it says before that it lives")]
    serving: Annotated[bool, Meta(description="false while its clock is too far off the store's")]
    clock_offset: Annotated[str, Meta(description="how far its clock is surely off the store's", examples=["-1s200ms"])]
    shards: Annotated[list[int], Meta(description="the shards whose timers it fires")]


class Cluster(Struct, rename="camel"):
    """The instances that share the store, and who owns what."""

    instances: list[Instance]
    shards: Annotated[int, Meta(description="how many there are")]
    unowned: Annotated[list[int], Meta(description="shards that nobody owns now: their timers wait")]


class Point(Struct, rename="camel"):
    """What the whole cluster did in one step of time."""

    at: Annotated[Shown, Meta(description="when the step ended")]
    fires_per_second: Annotated[float, Meta(description="attempts sent")]
    lateness_p50_ms: Annotated[float, Meta(description="half of them were sent within this of being due")] | None
    lateness_p99_ms: Annotated[float, Meta(description="all but one in a hundred were")] | None


class Stretch(Struct, rename="camel"):
    """How many pending timers fall due in a stretch of time."""

    at: Annotated[Shown, Meta(description="when it begins")]
    timers: int
    more: Annotated[bool, Meta(description="that there are more: counting stopped there")]


class Forecast(Struct, rename="camel"):
    """What is going to fall due."""

    hour: Annotated[list[Stretch], Meta(description="the next 60 minutes, one by one")]
    day: Annotated[list[Stretch], Meta(description="the next 24 hours, one by one")]


class DestinationFailures(Struct, rename="camel"):
    """Failed timers that were meant for one destination."""

    destination: Annotated[str, Meta(examples=["https://example.com:443"])]
    timers: int
    last_error: Annotated[str, Meta(description="of the latest of them")] | None
    last_at: Annotated[Shown, Meta(description="when that failed")]


class Failures(Struct, rename="camel"):
    """Where timers fail."""

    of: Annotated[int, Meta(description="how many of the latest failed timers were looked at")]
    destinations: Annotated[list[DestinationFailures], Meta(description="at most 20, those with most failures first")]


class Overview(Struct, rename="camel"):
    """How the service is doing: what it did, what is ahead, what fails, and who does it."""

    now: Shown
    statuses: Annotated[dict[Status, int], Meta(description="how many timers there are of each status")]
    since: Annotated[Shown, Meta(description="since when the instance that answers has been watching")]
    step_seconds: Annotated[int, Meta(description="between two points of activity")]
    activity: Annotated[list[Point], Meta(description="the latest hour, oldest first; gaps where the store was away")]
    forecast: Forecast
    overdue: Annotated[Count, Meta(description="pending timers whose time passed more than a second ago")]
    overdue_reasons: Annotated[
        dict[Reason, int],
        Meta(
            description="how many timers have been due for two seconds and are not begun, by reason; only reasons that "
            "apply now, as the instances last reported",
            examples=[{"paused": 40, "destination": 200}],
            extra_json_schema={"propertyNames": {"$ref": "#/components/schemas/Reason"}},
        ),
    ]
    failures: Failures
    instances: list[Instance]
    shards: Annotated[int, Meta(description="how many there are")]
    unowned: Annotated[list[int], Meta(description="shards that nobody owns now: their timers wait")]


class NewSecret(Struct, rename="camel"):
    """A signing secret, shown this once."""

    id: str
    secret: Annotated[str, Meta(description="what to check signatures with", examples=["whsec_…"])]
    created_at: Shown
