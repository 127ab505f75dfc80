"""Which response raises which exception, with a message in the words of the Python client.

The API names fields in camelCase and shows values as JSON. The messages of the client name its arguments, whatever else
the sentence says; ``details`` stay as the API sent them.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from duetime.client.errors import (
    Conflict,
    DuetimeClientError,
    InvalidRequest,
    NotFound,
    NotPending,
    Unauthorized,
    Unavailable,
    UnexpectedResponse,
    Unsupported,
)
from duetime.client.values import FIELDS, FILTERS, POLICY_FIELDS

_ARGUMENTS = {field: name for name, field in (FIELDS | POLICY_FIELDS | FILTERS).items()} | {"nextCursor": "next_cursor"}
_IN_JSON = re.compile(r'"(\w+)": (?=")').sub
_OUTSIDE_QUOTES = re.compile(r"""(?<!['"\w])[a-z]+[A-Z]\w*(?!['"\w])""").sub


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
    message = in_python(failure.message) if issubclass(kind, InvalidRequest) else failure.message
    return kind(message, code=failure.error, details=failure.details, status=status)


def in_python(text: str) -> str:
    """The text with the arguments of the client in place of the API's fields: ``executeAt`` is ``execute_at``, and
    ``"namespace": "*"`` is ``namespace="*"``. Other text within quotes is what the caller gave."""

    def pair(found: re.Match[str]) -> str:
        return f"{_ARGUMENTS[found[1]]}=" if found[1] in _ARGUMENTS else found[0]

    return _OUTSIDE_QUOTES(lambda found: _ARGUMENTS.get(found[0], found[0]), _IN_JSON(pair, text))


def error_from(status: int, body: bytes, url: str) -> DuetimeClientError:
    """The exception for a response with this status and body."""
    try:
        failure = _failure.decode(body)
    except msgspec.MsgspecError:
        failure = None
    if failure is not None and failure.error.isupper():  # other servers say "Not Found"
        return error_of(status, failure)
    if status == 429 or (status >= 500 and status != 501):
        # A proxy in front of the service, for example, that can't reach it.
        return Unavailable(f"{url} responded with status {status}", status=status)
    return not_duetime(url, f"status {status}", status)


def not_duetime(url: str, reason: str, status: int) -> UnexpectedResponse:
    return UnexpectedResponse(f"{url} responds, but not like Duetime ({reason})", status=status)
