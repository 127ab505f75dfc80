"""The texts of the OpenAPI document, and the errors that the operations of each API share."""

from __future__ import annotations

from typing import Any

import msgspec

from duetime.doors import http_v1, http_v1_schema, platform, platform_schema
from duetime.doors.http import (
    Forbidden,
    NotFound,
    TooManyWrongKeys,
    TooSlow,
    Unauthorized,
    UnknownCoding,
)
from duetime.doors.openapi import About, Api, ErrorResponse
from duetime.doors.origins import OTHER_SITE
from duetime.errors import (
    InvalidInput,
    NamespaceConflict,
    PayloadTooLarge,
    Quarantined,
    SecretNotFound,
    StoreUnavailable,
    TimerConflict,
    TimerNotFound,
    TimerNotPending,
    TooManyNamespaces,
    UnknownNamespace,
    Unsupported,
)

_DESCRIPTION = """\
Durable timers that call you back: create a timer, and when it is due, Duetime calls your URL, at least once, and
retries until your response says that it is done.

There are two APIs over the same timers. The HTTP v1 API is everything under /api/v1: camelCase, with namespaces,
retries, rescheduling by the response, batches and pages. Start with this one. The platform API is /timers: snake_case,
timers in the namespace "default", one attempt unless there is a retry policy, and {"code", "message", "data"} around
every response.

Every request needs the API key of the service, as X-API-Key or as Authorization: Bearer. If both are given, X-API-Key
is used. Health checks need no key.

A request body is one JSON object in UTF-8, without duplicate keys, the character U+0000 in strings, or numbers beyond
±1.8e308. It is nested at most 64 levels deep. The limit is 256 KiB, for a batch 16 MiB, unless the settings differ.
Operations that change something and have no fields accept only an empty body or {}.

A field or query parameter with an unknown name gets 400, and the message suggests the nearest known name.

Times are printed in UTC with milliseconds. Durations are whole numbers with units, the larger first: 500ms, 30s, 10m,
24h, 1h30m, 7d.

A HEAD request gets the response to a GET of the same path, without the body. A method that a path does not support
gets 405, and the Allow header lists those that it supports."""

_TAGS = {
    "timers": "A timer sends a payload to a target at a time. A request names its timer in the path, or (create, get, "
    "update, delete) in the request body.",
    "namespaces": "Scopes of timer ids. Each has its own retention, weight and signing secrets, and can be paused.",
    "overview": "The state of the whole service.",
    "cluster": "The instances that share the store, and what the store can do.",
    "platform": 'The smaller API: timers of the namespace "default", in snake_case.',
    "monitoring": "Health checks and metrics.",
}

ABOUT = About(
    title="Duetime",
    summary="Durable timers that call you back",
    description=_DESCRIPTION,
    contact={"name": "Duetime"},
    license={"name": "Apache-2.0", "identifier": "Apache-2.0"},
    security={
        "apiKey": {
            "type": "apiKey",
            "in": "header",
            "name": "X-API-Key",
            "description": "the setting API_KEY, or the contents of the key file",
        },
        "bearer": {"type": "http", "scheme": "bearer", "description": "the same key, as a bearer token"},
    },
    tags=_TAGS,
)

_RETRY_AFTER = {"Retry-After": {"description": "seconds to wait", "schema": {"type": "integer", "minimum": 0}}}
_SCHEME = {"WWW-Authenticate": {"description": "the scheme to use", "schema": {"type": "string"}}}


class InternalError(Exception):
    """Stands for whatever Duetime does not raise on purpose."""


_ERRORS = (
    Unauthorized(),
    Forbidden(OTHER_SITE),
    TimerNotFound("default", "invoice-42"),
    TooSlow(),
    TimerConflict("default", "invoice-42"),
    TimerNotPending("update", "completed"),
    PayloadTooLarge("body", "is larger than 262144 bytes"),
    UnknownCoding("gzip"),
    TooManyWrongKeys(8),
    Quarantined("timer default/invoice-42"),
    InternalError(),
    StoreUnavailable(),
)
"""One for each status and code that both APIs have."""
_HTTP_V1_ERRORS = (
    InvalidInput("delay", "must be a duration like 500ms, 30s, 10m, 24h, 1h30m or 7d"),
    *_ERRORS,
    Unsupported(
        "status",
        "can't be 'failed': this database can't list completed, failed or canceled timers. It can list: pending timers",
    ),
    UnknownNamespace("billing"),
    http_v1.NoSuchNamespace(str(UnknownNamespace("billing"))),
    SecretNotFound("billing", "8f14e45f-ceea-467f-a9f3-0f2b7a1c6d3e"),
    NotFound(),
    NamespaceConflict("namespace 'billing' already exists with a different weight"),
    TooManyNamespaces(1000),
)
_PLATFORM_ERRORS = (
    InvalidInput("callback_url", "is required"),
    *_ERRORS,
    Unsupported(
        "offset",
        "can be at most 10000 with this database; the lists of the HTTP v1 API page by cursor, without this limit",
    ),
)
_AT = "2030-01-31T09:00:00.000Z"


def _http_v1_example(error: Exception) -> tuple[int, str, Any]:
    status, failure = http_v1.failure_of(error, _AT)
    return status, failure.error, msgspec.to_builtins(failure)


def _platform_example(error: Exception) -> tuple[int, str, Any]:
    response = platform.refusal(error)
    return response.status, type(error).__name__, msgspec.json.decode(response.body)


_RESPONSE_DESCRIPTIONS = {200: "Success.", 201: "Created.", 204: "Deleted. The response has no body."}

_FORBIDDEN = "a page of another site sent the request, or its Host is not allowed. Only with DUETIME_AUTH=none."
_COMPRESSED = "the body is compressed. Send it without a Content-Encoding."
_TOO_LARGE = "the body is larger than the settings allow."
_TOO_SLOW = "the body came too slowly."
_WRONG_KEY = "the key is missing or wrong."
_WRONG_KEYS = "many wrong keys came from this address. The right key is accepted at once."
_BUSY = "the store is not available, or too many request bodies are in memory. Try again: a create with an"

_ERROR_RESPONSES = {
    400: ErrorResponse(
        "Invalid",
        "INVALID_INPUT: the request is invalid. UNSUPPORTED: this database can't do it. Both name the field in "
        "details. UNKNOWN_NAMESPACE: the namespace of the timer does not exist.",
    ),
    401: ErrorResponse("Unauthorized", f"UNAUTHORIZED: {_WRONG_KEY}", _SCHEME),
    403: ErrorResponse("Forbidden", f"FORBIDDEN: {_FORBIDDEN}"),
    404: ErrorResponse(
        "NotFound",
        "TIMER_NOT_FOUND, NAMESPACE_NOT_FOUND, SECRET_NOT_FOUND: it does not exist. NOT_FOUND: the path is not UTF-8.",
    ),
    408: ErrorResponse("TooSlow", f"REQUEST_TIMEOUT: {_TOO_SLOW}"),
    409: ErrorResponse(
        "Conflict",
        "TIMER_CONFLICT: the timer exists with different parameters, or can't be replayed because it is not finished. "
        "TIMER_NOT_PENDING: the timer is executing or finished. NAMESPACE_CONFLICT: the namespace exists with other "
        "settings. TOO_MANY_NAMESPACES: DUETIME_MAX_NAMESPACES is reached.",
    ),
    413: ErrorResponse("TooLarge", f"PAYLOAD_TOO_LARGE: {_TOO_LARGE}"),
    415: ErrorResponse("Compressed", f"UNSUPPORTED_ENCODING: {_COMPRESSED}"),
    429: ErrorResponse("TooManyWrongKeys", f"TOO_MANY_WRONG_KEYS: {_WRONG_KEYS}", _RETRY_AFTER),
    500: ErrorResponse(
        "InternalError",
        "INTERNAL_ERROR: see the server's log for details. QUARANTINED: this version can't read the stored timer.",
    ),
    503: ErrorResponse("Unavailable", f"UNAVAILABLE: {_BUSY} id can be repeated safely.", _RETRY_AFTER),
}

_PLATFORM_ERROR_RESPONSES = {
    400: ErrorResponse(
        "PlatformInvalid",
        "Code 2: the request is invalid, or the timer is not pending. Code 5: this database can't do it; data names "
        "the field.",
    ),
    401: ErrorResponse("PlatformUnauthorized", f"Code 4: {_WRONG_KEY}"),
    403: ErrorResponse("PlatformForbidden", f"Code 4: {_FORBIDDEN}"),
    404: ErrorResponse("PlatformNotFound", "Code 3: the timer does not exist."),
    408: ErrorResponse("PlatformTooSlow", f"Code 2: {_TOO_SLOW}"),
    409: ErrorResponse("PlatformConflict", "Code 2: the idempotency_key was used with another body."),
    413: ErrorResponse("PlatformTooLarge", f"Code 2: {_TOO_LARGE}"),
    415: ErrorResponse("PlatformCompressed", f"Code 2: {_COMPRESSED}"),
    429: ErrorResponse("PlatformTooManyWrongKeys", f"Code 4: {_WRONG_KEYS}", _RETRY_AFTER),
    500: ErrorResponse(
        "PlatformInternalError",
        "Code 1: see the server's log for details, or this version can't read the stored timer.",
    ),
    503: ErrorResponse("PlatformUnavailable", f"Code 1: {_BUSY} idempotency_key can be repeated safely.", _RETRY_AFTER),
}

HTTP_V1 = Api(
    descriptions=_RESPONSE_DESCRIPTIONS,
    failure=http_v1_schema.Failure,
    errors=_ERROR_RESPONSES,
    error_examples=[_http_v1_example(error) for error in _HTTP_V1_ERRORS],
    common_errors=(400, 401, 403, 429, 500, 503),
    parameters=http_v1_schema.PARAMETERS,
    names={"CamelRetryPolicy": "RetryPolicy"},
)

PLATFORM = Api(
    descriptions=_RESPONSE_DESCRIPTIONS
    | {500: "The store can't be read or written.", 503: "The service is not ready."},
    failure=platform_schema.PlatformFailure,
    errors=_PLATFORM_ERROR_RESPONSES,
    error_examples=[_platform_example(error) for error in _PLATFORM_ERRORS],
    common_errors=(401, 403, 429, 500, 503),
    parameters=platform_schema.PARAMETERS,
    names={
        "SnakeRetryPolicy": "PlatformRetryPolicy",
        "Success_PlatformSummary_": "PlatformSummaryEnvelope",
        "Success_PlatformUpdated_": "PlatformUpdatedEnvelope",
        "Success_PlatformTimer_": "PlatformTimerEnvelope",
        "Success_PlatformPage_": "PlatformPageEnvelope",
        "Success_PlatformCanceled_": "PlatformCanceledEnvelope",
        "Success_Health_": "HealthEnvelope",
    },
)
