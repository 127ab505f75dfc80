"""The types of the HTTP v1 API: requests are validated against them, responses are built from them, and the OpenAPI
document is generated from them.

A rule that msgspec checks is a constraint. A rule that ``wire`` or ``timetext`` checks, with better messages, is in
``extra_json_schema``, for the document only; tests compare the two. A rule for a request as a whole is in ``also``.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from duetime.doors.retry_policy import SPAN, CamelRetryPolicy, Duration, RetryPolicyOut
from duetime.model import OutcomeKind, Status
from duetime.overdue import Reason
from duetime.store import Order, TimeSource

BASE = "/api/v1"
BATCH_MAX = 1_000
WEIGHT_MAX = 100

_DAY, _CLOCK = "[0-9]{4}-[0-9]{2}-[0-9]{2}", "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_SHOWN = {"format": "date-time"}

Name = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=64,
        description="the namespace",
        examples=["default"],
        extra_json_schema={"pattern": "^[A-Za-z0-9._-]+$"},
    ),
]
Id = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=255,
        description="the timer's id, unique in its namespace: any text without control characters",
        examples=["invoice-42"],
        extra_json_schema={"pattern": r"^[^\x00-\x1f\x7f-\x9f]+$"},
    ),
]
SecretId = Annotated[str, Meta(description="the secret's id", examples=["8f14e45f-ceea-467f-a9f3-0f2b7a1c6d3e"])]
Time = Annotated[
    str,
    Meta(
        max_length=64,
        description="RFC 3339 with an offset or Z, in the years 1970 to 9999; rounded up to milliseconds",
        examples=["2030-01-31T09:00:00Z"],
        extra_json_schema={
            "format": "date-time",
            "pattern": rf"^{_DAY}[Tt]{_CLOCK}(\.[0-9]{{1,9}})?([Zz]|[+-]([01][0-9]|2[0-3]):?[0-5][0-9])$",
        },
    ),
]
Shown = Annotated[str, Meta(examples=["2030-01-31T09:00:00.000Z"], extra_json_schema=_SHOWN)]
Created = Annotated[Shown, Meta(examples=["2030-01-30T12:00:00.000Z"])]
Retention = Annotated[
    str,
    Meta(
        max_length=40,
        description="how long finished timers are kept: at least 1s, or forever",
        examples=["30d"],
        extra_json_schema={"pattern": f"^(forever|{SPAN})$", "minLength": 2},
    ),
]
Weight = Annotated[
    int,
    Meta(
        ge=1,
        le=WEIGHT_MAX,
        description="the namespace's share of the capacity when more is due than can be delivered: weight 3 gets three "
        "times the share of weight 1; 1 by default",
        examples=[3],
    ),
]
Url = Annotated[
    str,
    Meta(
        max_length=2048,
        description="where to send the callback: an absolute http or https URL in ASCII, without user name or "
        "password. Private addresses are rejected unless DUETIME_ALLOW_PRIVATE_TARGETS allows them",
        examples=["https://example.com/hooks/timer"],
        extra_json_schema={"pattern": r"^[Hh][Tt][Tt][Pp][Ss]?://[A-Za-z0-9_.:\[\]-]+([/?#][!-\[\]-~]*)?$"},
    ),
]
HeaderName = Annotated[str, Meta(extra_json_schema={"pattern": r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"})]
HeaderValue = Annotated[str, Meta(extra_json_schema={"pattern": r"^[\t\x20-\x7e\xa0-\xff]*$"})]
Headers = Annotated[
    dict[HeaderName, HeaderValue],
    Meta(
        description="headers of the callback, at most 16 KiB in total. Rejected: Host, Content-Length, Connection and "
        "other headers of the connection, those that Duetime sets (webhook-…, duetime-…, traceparent), nats-…, and "
        "the same name twice, ignoring case",
        examples=[{"X-Tenant": "acme"}],
        extra_json_schema={"maxProperties": 64},
    ),
]
Method = Annotated[
    Literal["POST", "PUT", "PATCH"], Meta(description="the HTTP method of the callback; POST by default")
]
Protocol = Annotated[
    Literal["answer", "status"],
    Meta(
        description='what completes the timer. "answer", the default: 200 with {"ok": true}, or any 2xx with an empty '
        'body. "status": any 2xx'
    ),
]
Payload = Annotated[Raw, Meta(description="any JSON, including null; sent in the callback byte for byte")]
Metadata = Annotated[Raw, Meta(description="any JSON; stored with the timer and never sent")]
Correlation = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=255,
        description="any text that related timers share; lists can filter by it",
        examples=["order-7"],
        extra_json_schema={"pattern": r"^[^\x00]+$"},
    ),
]
Estimated = Annotated[bool, Meta(description="true if this is an estimate; absent if it is exact")]
Unowned = Annotated[list[int], Meta(description="shards without an owner: their timers wait", examples=[[]])]
Overdue = Annotated[
    dict[str, int],
    Meta(
        description="how many timers have been due for two seconds and not started, by reason; only reasons that "
        "apply now",
        examples=[{"paused": 2, "destination": 1}],
        extra_json_schema={"propertyNames": {"enum": [reason.value for reason in Reason]}},
    ),
]
Group = Annotated[Name, Meta(description="the older name of namespace; if both are given, they must be equal")]
TimerId = Annotated[Id, Meta(description="another name of id; if both are given, they must be equal")]

PARAMETERS: dict[str, Any] = {
    "namespace": Name,
    "name": Name,
    "id": Id,
    "secrets/{id}": SecretId,
    "executeAfter": Time,
    "executeBefore": Time,
    "limit": Annotated[int, Meta(ge=1, le=1_000, extra_json_schema={"default": 50})],
}
"""The types of parameters in paths and queries, for the document."""


class Changes(Struct, rename="camel", forbid_unknown_fields=True):
    """What to change in a pending timer. Omitted fields and null keep the value; but payload and metadata can be set to
    null. At most one of executeAt, which must be in the future, and delay; at most one of callbackUrl
    and callbackSubject."""

    also: ClassVar[dict[str, Any]] = {"examples": [{"delay": "10m"}]}

    execute_at: (
        Annotated[
            Time,
            Meta(
                description="when to fire: RFC 3339 with an offset or Z, to the year 9999, rounded up to milliseconds"
            ),
        ]
        | None
    ) = None
    delay: (
        Annotated[Duration, Meta(description="the time from now, at most 100 years; in place of executeAt")] | None
    ) = None
    callback_url: Url | None = None
    callback_subject: (
        Annotated[
            str,
            Meta(
                max_length=255,
                description="the NATS subject to publish to, in place of callbackUrl; needs a broker",
                examples=["orders.due"],
            ),
        ]
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
            Duration,
            Meta(description="how long an attempt may take, at most DUETIME_MAX_CALLBACK_TIMEOUT (1h); 30s by default"),
        ]
        | None
    ) = None
    response_protocol: Protocol | None = None


class CreateTimer(Changes, rename="camel"):
    """A new timer. Give either executeAt (in the future) or delay, and either callbackUrl or callbackSubject. The
    namespace is "default" and the id is generated unless they are given. Null counts as omitted, except in payload and
    metadata, where it is a value."""

    also: ClassVar[dict[str, Any]] = {
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
    """Which timer, by its id or timerId (one is required), and its namespace unless it is "default"; and what to change
    in it. At most one of executeAt, which must be in the future, and delay; at most one of callbackUrl and
    callbackSubject. Omitted fields and null keep the value; but payload and metadata can be set to null."""

    also: ClassVar[dict[str, Any]] = {"examples": [{"timerId": "invoice-42", "delay": "10m"}]}

    namespace: Name | None = None
    group_id: Group | None = None
    id: Id | None = None
    timer_id: TimerId | None = None


class Selection(Struct, rename="camel", forbid_unknown_fields=True):
    """Which timer: its id or timerId (one is required), and its namespace unless it is "default"."""

    also: ClassVar[dict[str, Any]] = {"examples": [{"timerId": "invoice-42"}]}

    namespace: Name | None = None
    group_id: Group | None = None
    id: Id | None = None
    timer_id: TimerId | None = None


class BatchIn(Struct, rename="camel", forbid_unknown_fields=True):
    """Up to 1000 timers, each as in a create. If one is rejected, its result has the error; the others are created."""

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
    """A timer: what was requested, and its state."""

    id: Annotated[str, Meta(examples=["invoice-42"])]
    namespace: Annotated[str, Meta(examples=["default"])]
    execute_at: Annotated[Shown, Meta(description="the requested time")]
    fire_at: Annotated[Shown, Meta(description="the time of the next attempt, or of the last one")]
    callback_url: Annotated[str | None, Meta(examples=["https://example.com/hooks/timer"])]
    callback_subject: Annotated[str | None, Meta(description="the NATS subject, if it has no URL", examples=[None])]
    callback_method: Annotated[str | None, Meta(examples=["POST"])]
    callback_headers: Annotated[dict[str, str], Meta(examples=[{}])]
    payload: Annotated[
        Any, Meta(description="as it was given; null also when there was none", examples=[{"invoice": 42}])
    ]
    metadata: Annotated[Any, Meta(description="as it was given; null also when there was none", examples=[None])]
    correlation_id: Annotated[str | None, Meta(examples=[None])]
    retry_policy: RetryPolicyOut
    callback_timeout: Annotated[str, Meta(examples=["30s"])]
    response_protocol: Annotated[str, Meta(examples=["answer"])]
    status: Annotated[Status, Meta(extra_json_schema={"examples": ["pending"]})]
    attempts: Annotated[int, Meta(description="how many attempts the current firing had", examples=[0])]
    last_error: Annotated[str | None, Meta(description="why the latest attempt failed", examples=[None])]
    created_at: Created
    updated_at: Created
    executed_at: Annotated[Shown | None, Meta(description="when it completed or failed", examples=[None])]


class TimerPage(Struct, rename="camel"):
    """A page of timers."""

    timers: list[Timer]
    next_cursor: Annotated[
        str | None, Meta(description="the cursor of the next page; null on the last", examples=[None])
    ]


class Attempt(Struct, rename="camel"):
    """One delivery try; the latest ten are kept."""

    attempt: Annotated[int, Meta(description="its number within its firing, from 1")]
    sent_at: Shown
    duration: Annotated[str, Meta(examples=["120ms"])]
    outcome: OutcomeKind
    status: Annotated[int | None, Meta(description="the HTTP status of the response", examples=[503])]
    error: Annotated[str | None, Meta(description="why it failed", examples=["HTTP 503"])]
    answer: Annotated[
        str, Meta(description="the first 200 characters of the response body", examples=["try again later"])
    ]
    delivery_id: Annotated[
        str | None,
        Meta(
            description="the delivery id of its firing, sent as webhook-id; null for attempts of old versions",
            examples=["11f6ad8e-c52a-5984-abaa-fd7c3b516503"],
        ),
    ]


class Attempts(Struct, rename="camel"):
    """The latest attempts, oldest first."""

    attempts: list[Attempt]


class Failure(Struct, rename="camel"):
    """Every error of the HTTP v1 API."""

    error: Annotated[str, Meta(description="a code for programs", examples=["INVALID_INPUT"])]
    message: Annotated[
        str,
        Meta(
            description="a sentence for people",
            examples=["delay must be a duration like 500ms, 30s, 10m, 24h, 1h30m or 7d"],
        ),
    ]
    details: Annotated[
        dict[str, Any], Meta(description="the field, for invalid input; otherwise empty", examples=[{"field": "delay"}])
    ]
    timestamp: Shown


class BatchResult(Struct, rename="camel", omit_defaults=True):
    """The result for one timer of a batch: the timer (or its id, with `Prefer: return=minimal`), or its error."""

    status: Annotated[int, Meta(description="the status that a single create would have got", examples=[200, 409])]
    timer: Timer | UnsetType = UNSET
    id: Annotated[str, Meta(description="in place of the timer, with `Prefer: return=minimal`")] | UnsetType = UNSET
    error: Failure | UnsetType = UNSET


class BatchOut(Struct, rename="camel"):
    """A result for each timer of a batch."""

    results: Annotated[list[BatchResult], Meta(description="in the order of the timers")]


NameOrAll = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=64,
        description='the namespace; "*" or nothing for all',
        examples=["default"],
        extra_json_schema={"pattern": r"^([A-Za-z0-9._-]+|\*)$"},
    ),
]


class CancelIn(Struct, rename="camel", forbid_unknown_fields=True):
    """Which pending timers to cancel: those that match all given fields. At least one filter is required; the namespace
    "*" is one."""

    also: ClassVar[dict[str, Any]] = {"examples": [{"namespace": "default", "correlationId": "order-7"}]}

    namespace: NameOrAll | None = None
    id: Id | None = None
    correlation_id: Correlation | None = None
    execute_after: Annotated[Time, Meta(description="scheduled at this time or later")] | None = None
    execute_before: Annotated[Time, Meta(description="scheduled before this time")] | None = None
    limit: Annotated[int, Meta(ge=1, le=BATCH_MAX, description="the maximum number of timers")] = 100


class CancelOut(Struct, rename="camel"):
    """How many timers were canceled."""

    canceled: Annotated[int, Meta(examples=[3])]
    more: Annotated[bool, Meta(description="true if more timers may match: repeat the request", examples=[False])]


class ReplayIn(CancelIn, rename="camel"):
    """Which finished timers to replay: those with the status that match all other given fields."""

    also: ClassVar[dict[str, Any]] = {"examples": [{"status": "failed", "namespace": "default", "limit": 100}]}

    status: Literal["failed", "completed", "canceled"] = "failed"


class ReplayOut(Struct, rename="camel"):
    """How many timers were replayed."""

    replayed: Annotated[int, Meta(examples=[3])]
    more: Annotated[bool, Meta(description="true if more timers may match: repeat the request", examples=[False])]


class Count(Struct, rename="camel", omit_defaults=True):
    """How many timers match."""

    timers: Annotated[int, Meta(examples=[3])]
    more: Annotated[bool, Meta(description="true if there are more: counting stopped here", examples=[False])]
    estimated: Estimated = False


class NamespaceIn(Struct, rename="camel", forbid_unknown_fields=True):
    """A new namespace."""

    also: ClassVar[dict[str, Any]] = {"examples": [{"name": "billing", "retention": "30d"}]}

    name: Name
    shards: (
        Annotated[int, Meta(ge=1, description="how many shards its timers use, all by default; can't be changed later")]
        | None
    ) = None
    retention: Retention | None = None
    weight: Weight | None = None


class NamespaceChanges(Struct, rename="camel", forbid_unknown_fields=True):
    """What to change in a namespace. Omitted fields and null keep the value."""

    also: ClassVar[dict[str, Any]] = {"examples": [{"paused": True}]}

    retention: Retention | None = None
    weight: Weight | None = None
    paused: (
        Annotated[bool, Meta(description="while true, no timer of the namespace fires; creates are accepted")] | None
    ) = None
    shards: Annotated[int, Meta(description="can't be changed: only the current number is accepted")] | None = None


class SecretInfo(Struct, rename="camel"):
    """A signing secret, without the secret itself."""

    id: SecretId
    created_at: Created
    expires_at: Annotated[Shown | None, Meta(description="when it stops signing; null for the newest", examples=[None])]


class Namespace(Struct, rename="camel"):
    """A namespace: a scope of ids with its own settings."""

    name: Annotated[str, Meta(examples=["billing"])]
    shards: Annotated[int, Meta(description="how many shards its timers use", examples=[64])]
    retention: Annotated[
        str | None,
        Meta(description="how long finished timers are kept; null: as DUETIME_RETENTION says", examples=["30d"]),
    ]
    weight: Annotated[Weight, Meta(examples=[1])]
    paused: Annotated[bool, Meta(examples=[False])]
    created_at: Created
    secrets: Annotated[list[SecretInfo], Meta(description="the secrets that sign callbacks, without their keys")]


class Namespaces(Struct, rename="camel"):
    """All namespaces, by name."""

    namespaces: list[Namespace]


class Instance(Struct, rename="camel"):
    """A running process of Duetime."""

    id: Annotated[str, Meta(examples=["5f0c1f8a9d3b4e6f8a1b2c3d4e5f6071"])]
    name: Annotated[str, Meta(description="its host name and process id", examples=["timers-1:4711"])]
    version: Annotated[str, Meta(description="the version of Duetime", examples=["0.1.0"])]
    started_at: Created
    alive_until: Annotated[Shown, Meta(description="when it counts as dead, unless it sends a heartbeat before")]
    serving: Annotated[bool, Meta(description="false while its clock differs too much from the store's")]
    clock_offset: Annotated[
        str, Meta(description="its clock minus the store's; the real difference may be larger", examples=["-1s200ms"])
    ]
    shards: Annotated[list[int], Meta(description="the shards that it owns", examples=[[0, 1, 2]])]


class Abilities(Struct, rename="camel"):
    """What the database can do. Requests that need more get 400 UNSUPPORTED."""

    orders: Annotated[
        list[Order],
        Meta(
            description="the orders in which it can list timers: newest (no filter, an id or a correlation id), "
            "soonest (a time range), due (pending timers), deadline (executing timers), finished (final ones)",
            examples=[[order.value for order in Order]],
        ),
    ]
    offset_max: Annotated[int | None, Meta(description="the highest offset of GET /timers; null: any", examples=[None])]
    counts_exactly: Annotated[bool, Meta(description="false: counts are estimates")]
    expires_history: Annotated[
        bool, Meta(description="true: the database itself deletes old finished timers", examples=[False])
    ]
    time_source: Annotated[
        TimeSource,
        Meta(
            description="the clock that decides what is due: the store's, or that of each instance's machine",
            extra_json_schema={"examples": ["store"]},
        ),
    ]


class Cluster(Struct, rename="camel"):
    """The instances that share the store, the shards, and what the database can do."""

    instances: list[Instance]
    shards: Annotated[int, Meta(description="the number of shards", examples=[64])]
    unowned: Unowned
    abilities: Abilities


class ActivityPoint(Struct, rename="camel"):
    """What the whole cluster did in one step of time."""

    at: Annotated[Shown, Meta(description="the end of the step")]
    fires_per_second: Annotated[float, Meta(description="attempts sent per second", examples=[120.5])]
    lateness_p50_ms: Annotated[
        float | None, Meta(description="the median time from due to sent; null: nothing was sent", examples=[4.1])
    ]
    lateness_p99_ms: Annotated[
        float | None, Meta(description="the 99th percentile of that time; null: nothing was sent", examples=[18.0])
    ]


class ForecastStep(Struct, rename="camel", omit_defaults=True):
    """How many pending timers fall due in a period."""

    at: Annotated[Shown, Meta(description="its beginning")]
    timers: Annotated[int, Meta(examples=[3])]
    more: Annotated[bool, Meta(description="true if there are more: counting stopped here", examples=[False])]
    estimated: Estimated = False


class Forecast(Struct, rename="camel"):
    """How many timers fall due, minute by minute and hour by hour."""

    hour: Annotated[list[ForecastStep], Meta(description="each of the next 60 minutes")]
    day: Annotated[list[ForecastStep], Meta(description="each of the next 24 hours")]


class DestinationFailures(Struct, rename="camel"):
    """The failed timers of one destination."""

    destination: Annotated[str, Meta(examples=["https://example.com:443"])]
    timers: Annotated[int, Meta(examples=[3])]
    last_error: Annotated[str | None, Meta(description="the error of the latest of them", examples=["HTTP 503"])]
    last_at: Annotated[Shown, Meta(description="when the latest of them failed")]


class Failures(Struct, rename="camel"):
    """Where timers fail."""

    of: Annotated[int, Meta(description="how many of the latest failed timers were examined", examples=[3])]
    destinations: Annotated[list[DestinationFailures], Meta(description="at most 20, most failures first")]


class Overview(Struct, rename="camel", omit_defaults=True):
    """How the service is doing: what it did, what falls due, what fails, and its instances."""

    now: Shown
    statuses: Annotated[
        dict[Status, int],
        Meta(description="how many timers have each status", examples=[{"pending": 40, "completed": 1200}]),
    ]
    since: Annotated[Shown, Meta(description="since when the responding instance has measured activity")]
    step_seconds: Annotated[int, Meta(description="the time between two points of activity", examples=[5])]
    activity: Annotated[
        list[ActivityPoint],
        Meta(description="the last hour, oldest first, with gaps where the store was not available"),
    ]
    forecast: Forecast
    overdue: Annotated[Count, Meta(description="pending timers that have been due for more than two seconds")]
    overdue_reasons: Overdue
    failures: Annotated[Failures | None, Meta(description="null when the database can't list failed timers")]
    instances: list[Instance]
    shards: Annotated[int, Meta(description="the number of shards", examples=[64])]
    unowned: Unowned
    estimated: Annotated[Estimated, Meta(description="true when statuses are estimates; absent when exact")] = False


class NewSecret(Struct, rename="camel"):
    """A new signing secret. It is shown only in this response."""

    id: SecretId
    secret: Annotated[
        str, Meta(description="the key that signs callbacks: receivers verify signatures with it", examples=["whsec_…"])
    ]
    created_at: Created
