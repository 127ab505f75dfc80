"""What a client raises: the tree that is drawn in ``duetime.client``, and which answer of the server is which error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class DuetimeClientError(Exception):
    """The root: catch it to catch whatever a client raises on purpose.

    ``code`` is the server's word for programs (``TIMER_NOT_FOUND``), ``message`` its sentence for people, ``details``
    what it says besides (``{"field": "executeAt"}``); ``status`` is that of the HTTP answer, if there was one.
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
    """What was asked breaks a rule; ``details["field"]`` names the field."""

    code = "INVALID_INPUT"


class Unauthorized(DuetimeClientError):
    """The key is missing or is not the server's."""

    code = "UNAUTHORIZED"


class NotFound(DuetimeClientError):
    """There is no such timer, namespace or secret."""

    code = "NOT_FOUND"


class Conflict(DuetimeClientError):
    """The name is taken by something else, or the timer is not in a state that allows this."""

    code = "CONFLICT"


class NotPending(DuetimeClientError):
    """The timer is executing or finished, so that it can no longer be changed."""

    code = "TIMER_NOT_PENDING"


class Unavailable(DuetimeClientError):
    """The server can't do it now: its store is away, it is overloaded, or it has failed."""

    code = "UNAVAILABLE"


class ConnectionFailed(DuetimeClientError):
    """There was no whole answer. ``sent`` says whether the server may have done what was asked all the same."""

    code = "CONNECTION_FAILED"

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class UnexpectedAnswer(DuetimeClientError):
    """What answered does not speak like Duetime: is the URL right?"""

    code = "UNEXPECTED_ANSWER"


class InvalidSignature(DuetimeClientError):
    """A callback is not from the server, is not fresh, or was changed on its way."""

    code = "INVALID_SIGNATURE"


class Failure(msgspec.Struct, frozen=True):
    """An error as the durable door writes it."""

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
    elif failure.error == "TOO_MANY_WRONG_KEYS":
        kind = Unauthorized
    return kind(failure.message, code=failure.error, details=failure.details, status=status)


def refused(status: int, body: bytes) -> DuetimeClientError:
    """The error that an answer with this status and body stands for."""
    try:
        return error_of(status, _failure.decode(body))
    except msgspec.MsgspecError:
        # A proxy that can't reach the server speaks for itself.
        if status in _BY_STATUS or status >= 500:
            kind = _BY_STATUS.get(status, Unavailable)
            return kind(f"the server answered with status {status}", status=status)
        return UnexpectedAnswer(f"status {status}, and no error that Duetime would give", status=status)
