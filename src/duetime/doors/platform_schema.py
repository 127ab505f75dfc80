"""The types of the platform API, as in ``http_v1_schema``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from duetime.doors.http_v1_schema import Created, Estimated, Headers, Metadata, Method, Shown, Time, Url
from duetime.doors.retry_policy import SnakeRetryPolicy
from duetime.model import Status
from duetime.store import Sort

LIMIT_DEFAULT, LIMIT_MAX = 50, 200
OFFSET_MAX = 10**9
KEY_CHARS_MAX = 255

T = TypeVar("T")

_UUID = "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}"
EXAMPLE_ID = "8f14e45f-ceea-467f-a9f3-0f2b7a1c6d3e"
_EXAMPLE_URL = "https://example.com/hooks/timer"

Id = Annotated[
    str,
    Meta(
        description="the timer's id, a UUID",
        examples=[EXAMPLE_ID],
        extra_json_schema={"format": "uuid", "pattern": f"^{_UUID}$"},
    ),
]
ShownId = Annotated[
    str,
    Meta(
        description="a UUID; a list also has timers of the HTTP v1 API, whose ids are any text", examples=[EXAMPLE_ID]
    ),
]
Payload = Annotated[
    Raw,
    Meta(description="any JSON, including null; sent as the body byte for byte. Without a payload, the body is empty"),
]
Order = Annotated[
    Literal["desc", "asc"], Meta(description="descending or ascending", extra_json_schema={"default": "desc"})
]

PARAMETERS: dict[str, Any] = {
    "id": Id,
    "sort": Annotated[Sort, Meta(extra_json_schema={"default": "created_at"})],
    "order": Order,
    "limit": Annotated[int, Meta(ge=1, le=LIMIT_MAX, extra_json_schema={"default": LIMIT_DEFAULT})],
    "offset": Annotated[int, Meta(ge=0, le=OFFSET_MAX, extra_json_schema={"default": 0})],
}
"""The types of parameters in paths and queries."""


class HttpCallback(Struct, tag_field="type", tag="http", forbid_unknown_fields=True):
    """An HTTP request. In an update, omitted fields keep their values."""

    url: Url | None = None
    method: Method | None = None
    headers: Headers | None = None
    payload: Payload | UnsetType = UNSET


class NatsCallback(Struct, tag_field="type", tag="nats", forbid_unknown_fields=True):
    """A NATS message, published to the subject `topic`, or `topic.key` if there is a key. Needs a broker."""

    topic: Annotated[str, Meta(description="the subject, or its beginning", examples=["orders.due"])]
    key: Annotated[str, Meta(description="the rest of the subject", examples=["order-7"])] | None = None
    headers: Headers | None = None
    payload: Payload | UnsetType = UNSET


class PlatformChanges(Struct, forbid_unknown_fields=True):
    """What to change in a pending timer. Omitted fields and null keep the value; but payloads and metadata can be set
    to null."""

    also: ClassVar[dict[str, Any]] = {"examples": [{"execute_at": "2030-01-31T10:00:00Z"}]}

    execute_at: (
        Annotated[Time, Meta(description="when to fire, at least 5 seconds ahead: RFC 3339 with an offset or Z")] | None
    ) = None
    callback_url: Url | None = None
    callback_method: Method | None = None
    callback_headers: Headers | None = None
    callback_payload: Payload | UnsetType = UNSET
    metadata: Metadata | UnsetType = UNSET
    retry_policy: SnakeRetryPolicy | None = None
    callback: HttpCallback | NatsCallback | None = None


class CreatePlatformTimer(PlatformChanges):
    """A new timer: `execute_at`, and either `callback_url` with the fields that belong to it, or `callback`. Null
    counts as omitted, except in payloads and metadata, where it is a value. Without a `retry_policy` there is one
    attempt."""

    also: ClassVar[dict[str, Any]] = {
        "required": ["execute_at"],
        "examples": [
            {
                "execute_at": "2030-01-31T09:00:00Z",
                "callback_url": _EXAMPLE_URL,
                "callback_payload": {"invoice": 42},
                "metadata": {"team": "billing"},
                "idempotency_key": "invoice-42",
            },
            {
                "execute_at": "2030-01-31T09:00:00Z",
                "callback": {"type": "http", "url": _EXAMPLE_URL, "payload": {"invoice": 42}},
            },
            {
                "execute_at": "2030-01-31T09:00:00Z",
                "callback": {"type": "nats", "topic": "orders.due", "key": "order-7", "payload": {"order": 7}},
            },
        ],
    }

    idempotency_key: (
        Annotated[
            str,
            Meta(
                description="a repeat with the same key and the same body gets 200 with the existing timer",
                examples=["invoice-42"],
                extra_json_schema={"minLength": 1, "maxLength": KEY_CHARS_MAX},
            ),
        ]
        | None
    ) = None


class PlatformSummary(Struct):
    """The main fields of a timer."""

    id: ShownId
    created_at: Created
    execute_at: Annotated[Shown, Meta(description="when the timer is to fire")]
    callback_url: Annotated[str, Meta(description="null for a NATS callback", examples=[_EXAMPLE_URL])] | None
    callback_method: Annotated[str, Meta(description="null for a NATS callback", examples=["POST"])] | None
    status: Status
    executed_at: Annotated[Shown | None, Meta(description="when it completed or failed", examples=[None])]


class PlatformUpdated(PlatformSummary):
    """The main fields of a timer, and the time of its last change."""

    updated_at: Created


class ShownNatsCallback(Struct, tag_field="type", tag="nats"):
    """The NATS message of a timer."""

    topic: Annotated[str, Meta(description="the whole subject, with the key if there was one", examples=["orders.due"])]
    headers: Annotated[dict[str, str] | None, Meta(examples=[None])]


class PlatformTimer(PlatformUpdated):
    """A timer with everything that it was created with."""

    callback_headers: Annotated[dict[str, str] | None, Meta(examples=[None])]
    callback_payload: Annotated[Any, Meta(description="null also when there was none", examples=[{"invoice": 42}])]
    last_error: Annotated[str | None, Meta(description="why the latest attempt failed", examples=[None])]
    metadata: Annotated[Any, Meta(description="null also when there was none", examples=[{"team": "billing"}])]
    callback: ShownNatsCallback | UnsetType = UNSET


class PlatformPage(Struct, omit_defaults=True):
    """A page of timers, and how many match in total."""

    timers: list[PlatformSummary]
    total: Annotated[int, Meta(description="how many timers the filter matches", examples=[1])]
    limit: Annotated[int, Meta(examples=[LIMIT_DEFAULT])]
    offset: Annotated[int, Meta(examples=[0])]
    estimated: Annotated[Estimated, Meta(description="true when total is an estimate; absent when it is exact")] = False


class PlatformCanceled(Struct):
    """A canceled timer."""

    id: Id
    status: Annotated[Status, Meta(examples=["canceled"])]


class Health(Struct):
    """Whether the store can be read and written."""

    status: Annotated[Literal["up", "degraded"], Meta(examples=["up"])]
    database: Annotated[Literal["connected", "disconnected"], Meta(examples=["connected"])]
    timestamp: Shown


class Success(Struct, Generic[T]):
    """A successful response of the platform API."""

    code: Annotated[int, Meta(description="always 0", examples=[0], extra_json_schema={"minimum": 0, "maximum": 0})]
    message: Annotated[str, Meta(description="for people", examples=["success"])]
    data: T


class Unhealthy(Struct):
    """The store can't be read or written."""

    code: Annotated[int, Meta(description="always 1", examples=[1], extra_json_schema={"minimum": 1, "maximum": 1})]
    message: Annotated[str, Meta(description="for people", examples=["database connection failed"])]
    data: Annotated[
        Health,
        Meta(
            extra_json_schema={
                "examples": [
                    {"status": "degraded", "database": "disconnected", "timestamp": "2030-01-31T09:00:00.000Z"}
                ]
            }
        ),
    ]


class RefusedField(Struct):
    """The field that the database does not support."""

    field: Annotated[str, Meta(examples=["offset"])]


class PlatformFailure(Struct):
    """Every error of the platform API."""

    code: Annotated[
        int,
        Meta(
            extra_json_schema={"minimum": 1, "maximum": 5},
            description="1 internal error, 2 invalid input, 3 not found, 4 unauthorized, 5 not supported by this "
            "database",
            examples=[2],
        ),
    ]
    message: Annotated[str, Meta(description="for people", examples=["callback_url is required"])]
    data: Annotated[RefusedField | None, Meta(description="with code 5 the field, otherwise null", examples=[None])]
