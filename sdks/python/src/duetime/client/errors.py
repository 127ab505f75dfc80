"""The exceptions of the client; the tree is drawn in ``duetime.client``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class DuetimeClientError(Exception):
    """The base class: catch it to catch everything that the client raises on purpose.

    ``code`` is the service's error code (``TIMER_NOT_FOUND``), ``message`` a sentence for people, ``details`` more data
    from the service (``{"field": "executeAt"}``), and ``status`` the HTTP status if there was a response.
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
    """The request breaks a rule. The message names the argument, and ``details["field"]`` is the field of the API."""

    code = "INVALID_INPUT"


class Unsupported(InvalidRequest):
    """The service's database does not support the request; the message says what it supports. ``details["field"]`` is
    the field of the API."""

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
    """The service can't serve the request now: it can't reach its database, is overloaded, or failed."""

    code = "UNAVAILABLE"


class ConnectionFailed(DuetimeClientError):
    """No complete response arrived. ``sent`` is True when the service may have carried out the request nevertheless."""

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
