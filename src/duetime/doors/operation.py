"""One operation of an HTTP API: its path, request, responses and handler. The routes and the OpenAPI document are built
from the same list of operations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from duetime.doors.http import Handler


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


def routes(operations: Sequence[Operation]) -> dict[str, dict[str, Handler]]:
    """The handlers by path shape and method."""
    found: dict[str, dict[str, Handler]] = {}
    for operation in operations:
        found.setdefault(re.sub(r"\{\w+\}", "{}", operation.path), {})[operation.method] = operation.handler
    return found
