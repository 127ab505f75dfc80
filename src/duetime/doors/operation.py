"""One operation of an HTTP API: where it is, what it takes and gives, and who does it. Routes and documents are made
from the same list of these."""

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


class Operation(Struct, frozen=True, kw_only=True):
    method: str
    path: str  # with its parameters in braces
    name: str
    summary: str
    handler: Handler
    takes: type | None = None
    gives: Mapping[int, type | None]
    given: Sequence[Parameter] = ()  # besides those in the path
    refuses: Sequence[int] = ()  # the statuses of errors besides 401, 500 and 503

    @property
    def parameters(self) -> list[str]:
        return re.findall(r"\{(\w+)\}", self.path)


def routes(operations: Sequence[Operation]) -> dict[str, dict[str, Handler]]:
    """The handlers by path shape and method."""
    found: dict[str, dict[str, Handler]] = {}
    for operation in operations:
        found.setdefault(re.sub(r"\{\w+\}", "{}", operation.path), {})[operation.method] = operation.handler
    return found
