"""The exceptions of the client (the tree is drawn in ``duetime.client``) and which response raises which of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class DuetimeClientError(Exception):
    """The base class: catch it to catch everything that the client raises on purpose.

    ``code`` is the server's error code (``TIMER_NOT_FOUND``), ``message`` a sentence for people, ``details`` more data
    from the server (``{"field": "executeAt"}``), and ``status`` the HTTP status if there was a response.
    """

    code = "ERROR"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        details: Mapping[str, Any] | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.details = dict(details or {})
        self.status = status


class InvalidRequest(DuetimeClientError):
    """The request breaks a rule; ``details["field"]`` names the field."""

    code = "INVALID_INPUT"


class Unsupported(InvalidRequest):
    """The server's database does not support the request; the message says what it supports. ``details["field"]`` names
    the field."""

    code = "UNSUPPORTED"


class Unauthorized(DuetimeClientError):
    """The API key is missing or wrong."""

    code = "UNAUTHORIZED"


class NotFound(DuetimeClientError):
    """The timer, namespace or secret does not exist."""

    code = "NOT_FOUND"


class Conflict(DuetimeClientError):
    """The id or name is taken, or the timer's status does not allow the operation."""

    code = "CONFLICT"


class NotPending(DuetimeClientError):
    """The timer is executing or finished, so it can no longer be changed."""

    code = "TIMER_NOT_PENDING"


class Unavailable(DuetimeClientError):
    """The server can't serve the request now: it can't reach its database, is overloaded, or failed."""

    code = "UNAVAILABLE"


class ConnectionFailed(DuetimeClientError):
    """No complete response arrived. ``sent`` is True when the server may have carried out the request nevertheless."""

    code = "CONNECTION_FAILED"

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class UnexpectedResponse(DuetimeClientError):
    """The response is not one that Duetime sends: another server may listen at this URL."""

    code = "UNEXPECTED_RESPONSE"


class InvalidSignature(DuetimeClientError):
    """The callback was not signed with this secret, is too old, or was changed on its way."""

    code = "INVALID_SIGNATURE"


class Failure(msgspec.Struct, frozen=True):
    """The body of an error response."""

    error: str
    message: str
    details: dict[str, Any] = {}


_failure = msgspec.json.Decoder(Failure)

_BY_STATUS: dict[int, type[DuetimeClientError]] = {
    401: Unauthorized,
    404: NotFound,
    409: Conflict,
    429: Unavailable,
}


def error_of(status: int, failure: Failure) -> DuetimeClientError:
    kind = _BY_STATUS.get(status, Unavailable if status >= 500 else InvalidRequest)
    if failure.error == NotPending.code:
        kind = NotPending
    elif failure.error == Unsupported.code:
        kind = Unsupported
    elif failure.error == "TOO_MANY_WRONG_KEYS":
        kind = Unauthorized
    return kind(failure.message, code=failure.error, details=failure.details, status=status)


def error_from(status: int, body: bytes, url: str) -> DuetimeClientError:
    """The exception for a response with this status and body."""
    try:
        failure = _failure.decode(body)
    except msgspec.MsgspecError:
        failure = None
    if failure is not None and failure.error.isupper():  # other servers say "Not Found"
        return error_of(status, failure)
    if status == 429 or (status >= 500 and status != 501):
        # A proxy in front of the server, for example, that can't reach it.
        return Unavailable(f"{url} responded with status {status}", status=status)
    return not_duetime(url, f"status {status}", status)


def not_duetime(url: str, reason: str, status: int) -> UnexpectedResponse:
    return UnexpectedResponse(f"{url} responds, but not like Duetime ({reason})", status=status)
