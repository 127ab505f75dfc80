"""One operation of an HTTP API: its path, request, responses and handler. The routes and the OpenAPI document are built
from the same list of operations."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from duetime.doors import wire
from duetime.doors.decode_threads import off_loop
from duetime.doors.http import Handler, Request, Response

BODY_ERRORS = (408, 413, 415)
"""The errors that any operation which reads its body may have."""


class Parameter(Struct, frozen=True):
    """A parameter of the query, or a header."""

    name: str
    type: Any
    description: str
    place: str = "query"


class Text(Struct, frozen=True):
    """A response that is text: an example in each media type."""

    examples: Mapping[str, str]


class Operation(Struct, frozen=True, kw_only=True):
    method: str
    path: str  # with its parameters in braces
    tag: str
    name: str
    summary: str
    description: str
    handler: Handler
    body: type | None = None
    responses: Mapping[int, Any]  # a type, a ``Text``, or None for an empty response
    parameters: Sequence[Parameter] = ()  # besides those in the path
    errors: Sequence[int] = ()  # the statuses of errors besides those of all operations with a key
    needs_key: bool = True
    example: Mapping[str, Any] = {}
    """Values that replace those of the type in an example of the response. A type in it stands for its own example."""


class _NoFields(Struct, forbid_unknown_fields=True):
    """The body of an operation that takes no fields."""


_no_fields_decoder = msgspec.json.Decoder(_NoFields)


def without_fields(handler: Handler, bytes_max: int) -> Handler:
    """Wrap the handler of an operation that takes no fields, so that a client that sends some learns that they have
    no effect. The body may be empty or ``{}``."""

    @functools.wraps(handler)
    async def checked(request: Request) -> Response:
        body = (await request.body(bytes_max)).strip()
        if body:
            await off_loop(request, body, wire.decode, body, _NoFields, _no_fields_decoder)
        return await handler(request)

    return checked


def routes(operations: Sequence[Operation]) -> dict[str, dict[str, Handler]]:
    """The handlers by path shape and method."""
    found: dict[str, dict[str, Handler]] = {}
    for operation in operations:
        found.setdefault(re.sub(r"\{\w+\}", "{}", operation.path), {})[operation.method] = operation.handler
    return found
