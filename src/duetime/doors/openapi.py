"""The OpenAPI 3.1 document of an HTTP API, generated from its operations and from the types that these name.

Nothing is written twice: paths, bodies and answers are what the door registers, constraints are those of the types.
What only the code checks is said in words, in the descriptions of the types and in those here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from duetime.doors import durable_schema as schema
from duetime.doors.operation import Operation, Parameter

Json = dict[str, Any]

ALWAYS = (401, 403, 429, 500, 503)
"""The errors that any operation can answer with."""

_REF = "#/components/schemas/{name}"
_PUBLIC_NAMES = {"CamelRetryPolicy": "RetryPolicy"}
"""What a type is called in the document, where its name in the code tells it from a twin that is not in it."""

_ABOUT = """\
Durable timers that call you back: make a timer, and at its time Duetime calls your URL, at least once, and again
until your answer says that it is done.

Every request needs the key of the service, as X-API-Key or as Authorization: Bearer; when both are given the first
one counts. Every error has the shape of Failure, whose "error" is a code for programs.

A request body is one strict JSON object in UTF-8: no key twice in an object, no character U+0000 in any text, no
number beyond ±1.8e308, at most 64 levels. Fields that are not known are ignored. A body is at most 256 KiB and a
batch 16 MiB, unless the settings say otherwise.

Times are printed in UTC with milliseconds. Durations are whole numbers with units, the larger first: 500ms, 30s,
10m, 24h, 1h30m, 7d.

A HEAD is answered like the GET of its path, without the body."""

_TAGS = {
    "timers": "One promise each: call this target, with this payload, at this time. A timer is reached by its path or, "
    "in the other style, by a request body that names it (create, get, update, delete).",
    "namespaces": "Scopes of ids, each with its own retention, weight and signing secrets, that can be paused.",
    "overview": "How the service is doing, for people who look.",
    "cluster": "Who takes part.",
}

_ANSWERS = {200: "It is done.", 201: "It was made.", 204: "It is gone."}

_REFUSALS: dict[int, tuple[str, str]] = {
    400: (
        "Invalid",
        "The request breaks a rule: INVALID_INPUT, with the field in details, or UNKNOWN_NAMESPACE for a timer in a "
        "namespace that was never made.",
    ),
    401: ("Unauthorized", "The key is missing or wrong: UNAUTHORIZED."),
    403: (
        "Forbidden",
        "A service without keys (DUETIME_AUTH=none) was asked by a page of another site, or under a host name that is "
        "not its own: FORBIDDEN.",
    ),
    404: (
        "NotFound",
        "What the path or the body names is not there: TIMER_NOT_FOUND, NAMESPACE_NOT_FOUND, SECRET_NOT_FOUND, or "
        "NOT_FOUND for a path that is not UTF-8.",
    ),
    409: (
        "Conflict",
        "It is not in a state for this: TIMER_CONFLICT, NAMESPACE_CONFLICT (it exists with other parameters, or is not "
        "finished and can't be replayed), TIMER_NOT_PENDING (it is executing or finished), or TOO_MANY_NAMESPACES.",
    ),
    408: ("TooSlow", "The body came too slowly: REQUEST_TIMEOUT."),
    413: ("TooLarge", "The body is over the limit: PAYLOAD_TOO_LARGE."),
    415: ("Compressed", "The body is compressed: UNSUPPORTED_ENCODING. Send it without a Content-Encoding."),
    429: (
        "TooManyWrongKeys",
        "Many wrong keys came from this address: TOO_MANY_WRONG_KEYS. The right one works at once.",
    ),
    500: (
        "InternalError",
        "A fault of the service: INTERNAL_ERROR; or a row that it can't read: QUARANTINED. Its log has the details.",
    ),
    503: (
        "Unavailable",
        "The store can't answer now, or too many request bodies are in memory: UNAVAILABLE. Try again; a create with "
        "an id can be repeated safely.",
    ),
}
_REFUSAL_HEADERS: dict[int, Json] = {
    401: {"WWW-Authenticate": {"description": "which scheme to use", "schema": {"type": "string"}}},
    **{
        status: {"Retry-After": {"description": "seconds to wait", "schema": {"type": "integer", "minimum": 0}}}
        for status in (429, 503)
    },
}


def document(operations: Sequence[Operation], *, version: str) -> Json:
    """The document that describes these operations, ready to be encoded."""
    schemas = _Schemas(operations)
    paths: dict[str, Json] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schemas)
    statuses = {status for operation in operations for status in _refused(operation)}
    tags = dict.fromkeys(_tag(operation) for operation in operations)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Duetime",
            "version": version,
            "summary": "Durable timers that call you back",
            "description": _paragraphs(_ABOUT),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/", "description": "the service that this document came from"}],
        "security": [{"apiKey": []}, {"bearer": []}],
        "tags": [{"name": tag, "description": _TAGS.get(tag, tag)} for tag in tags],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": {_REFUSALS[status][0]: _refusal(status, schemas) for status in sorted(statuses)},
            "securitySchemes": {
                "apiKey": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "X-API-Key",
                    "description": "the setting API_KEY, or the contents of the key file",
                },
                "bearer": {"type": "http", "scheme": "bearer", "description": "the same key, as a token"},
            },
        },
    }


class _Schemas:
    """The JSON schemas of every type that the operations name, generated together so that they share components."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        types = list(dict.fromkeys(_types(operations)))
        made, components = msgspec.json.schema_components(types, ref_template=_REF)
        self._made = dict(zip(types, (_public(one) for one in made), strict=True))
        extra = {kind.__name__: kind.also for kind in types if hasattr(kind, "also")}
        self.components: dict[str, Json] = {}
        for name in sorted(components, key=lambda name: _PUBLIC_NAMES.get(name, name)):
            shown = _PUBLIC_NAMES.get(name, name)
            self.components[shown] = _public(components[name]) | {"title": shown} | extra.get(name, {})
            if "description" in self.components[shown]:
                self.components[shown]["description"] = _one_line(self.components[shown]["description"])

    def of(self, kind: Any) -> Json:
        """A schema to use in one place."""
        return dict(self._made[kind])


def _types(operations: Sequence[Operation]) -> Iterable[Any]:
    yield schema.Failure
    for operation in operations:
        if operation.takes is not None:
            yield operation.takes
        yield from (kind for kind in operation.gives.values() if kind is not None)
        yield from (_given_type(parameter) for parameter in operation.given)
        yield from (kind for _, kind in _path_parameters(operation))


def _public(part: Any) -> Any:
    """A part of a schema whose references use the public names."""
    if isinstance(part, dict):
        return {key: _public_ref(value) if key == "$ref" else _public(value) for key, value in part.items()}
    return [_public(item) for item in part] if isinstance(part, list) else part


def _public_ref(reference: str) -> str:
    path, _, name = reference.rpartition("/")
    return f"{path}/{_PUBLIC_NAMES.get(name, name)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _paragraphs(text: str) -> str:
    return "\n\n".join(_one_line(paragraph) for paragraph in text.split("\n\n"))


def _operation(operation: Operation, schemas: _Schemas) -> Json:
    described: Json = {
        "operationId": _camel(operation.name),
        "summary": operation.summary,
        "tags": [_tag(operation)],
    }
    parameters = [
        _parameter(name, "path", kind, schemas) | {"required": True} for name, kind in _path_parameters(operation)
    ]
    for given in operation.given:
        described_by = {"description": given.description}
        parameters.append(_parameter(given.name, given.place, _given_type(given), schemas) | described_by)
    if parameters:
        described["parameters"] = parameters
    if operation.takes is not None:
        described["requestBody"] = {"required": True, "content": _json(schemas.of(operation.takes))}
    described["responses"] = {
        str(status): {"description": _ANSWERS[status]} | ({} if kind is None else {"content": _json(schemas.of(kind))})
        for status, kind in operation.gives.items()
    } | {
        str(status): {"$ref": f"#/components/responses/{_REFUSALS[status][0]}"}
        for status in sorted(_refused(operation))
    }
    return described


def _parameter(name: str, place: str, kind: Any, schemas: _Schemas) -> Json:
    given = schemas.of(kind)
    parameter: Json = {"name": name, "in": place}
    if "description" in given:
        parameter["description"] = given.pop("description")
    return parameter | {"schema": given}


def _path_parameters(operation: Operation) -> list[tuple[str, Any]]:
    """The parameters in the path with their types, which are those of the segment before them and the name, or of the
    name alone."""
    segments = operation.path.split("/")
    found = []
    for before, segment in pairwise(segments):
        if segment.startswith("{"):
            name = segment[1:-1]
            found.append((name, schema.PARAMETERS.get(f"{before}/{segment}") or schema.PARAMETERS[name]))
    return found


def _given_type(parameter: Parameter) -> Any:
    return schema.PARAMETERS.get(parameter.name, parameter.type)


def _refusal(status: int, schemas: _Schemas) -> Json:
    answer: Json = {"description": _REFUSALS[status][1], "content": _json(schemas.of(schema.Failure))}
    if status in _REFUSAL_HEADERS:
        answer["headers"] = _REFUSAL_HEADERS[status]
    return answer


def _refused(operation: Operation) -> set[int]:
    return {*ALWAYS, *operation.refuses}


def _json(content: Json) -> Json:
    return {"application/json": {"schema": content}}


def _tag(operation: Operation) -> str:
    """What the operation is about: the first word of its path after the version."""
    return operation.path.split("/")[3]


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)
