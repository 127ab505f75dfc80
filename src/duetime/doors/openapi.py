"""The OpenAPI 3.1 document of an HTTP API, generated from its operations, the types that these name, and its texts.

Nothing is written twice: paths, bodies and responses are those that the door registers, constraints those of the types.
Rules that only the code checks are in the descriptions of the types and in the texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Struct

from duetime.doors.examples import Json, example_of
from duetime.doors.operation import Operation, Parameter, Text

_LOCATION = {"description": "the path of what was created", "schema": {"type": "string", "format": "uri-reference"}}
_REF = "#/components/schemas/{name}"


class ErrorResponse(Struct, frozen=True):
    """An error that operations have in common."""

    name: str
    description: str
    headers: Json = {}


class About(Struct, frozen=True, kw_only=True):
    """The document's title, description and tags."""

    title: str
    summary: str
    description: str
    contact: Json
    license: Json
    security: Mapping[str, Json]  # the ways to send the key; any one is enough
    tags: Mapping[str, str]


class Api(Struct, frozen=True, kw_only=True):
    """What the operations of an API have in common."""

    descriptions: Mapping[int, str]  # of the responses that operations name, by status
    failure: type  # the body of every error
    errors: Mapping[int, ErrorResponse]
    error_examples: Sequence[tuple[int, str, Any]]  # the status, a name and the body
    common_errors: Sequence[int]  # the errors of every operation with a key
    parameters: Mapping[str, Any]
    """The types of parameters, by name, or by the path segment before it and its name, which takes precedence. A query
    parameter that is not listed has the type that its operation gives."""
    names: Mapping[str, str]
    """The names of types in the document, if they differ from those in the code."""


def document(about: About, apis: Sequence[tuple[Api, Sequence[Operation]]], *, version: str) -> Json:
    """The document that describes these operations."""
    return _Document(about, apis).whole(version)


class _Document:
    def __init__(self, about: About, apis: Sequence[tuple[Api, Sequence[Operation]]]) -> None:
        """The schemas of all types are generated together, so that they share components."""
        self._about = about
        self._operations = [(api, operation) for api, operations in apis for operation in operations]
        self._names = {name: shown for api, _ in apis for name, shown in api.names.items()}
        types = list(dict.fromkeys(self._types()))
        made, components = msgspec.json.schema_components(types, ref_template=_REF)
        self._made = dict(zip(types, (self._public(one) for one in made), strict=True))
        request_components = self._request_components(components)
        extra = {kind.__name__: kind.also for kind in types if hasattr(kind, "also")}
        self._schemas: dict[str, Json] = {}
        for name in sorted(components, key=self._name):
            shown = self._name(name)
            schema = _plain(self._public(components[name]), in_request=name in request_components)
            self._schemas[shown] = schema | {"title": shown} | extra.get(name, {})
            if "description" in self._schemas[shown]:
                self._schemas[shown]["description"] = _one_line(self._schemas[shown]["description"])

    def whole(self, version: str) -> Json:
        about = self._about
        paths: dict[str, Json] = {}
        responses: dict[str, Json] = {}
        for api, operation in self._operations:
            paths.setdefault(operation.path, {})[operation.method.lower()] = self._operation(api, operation)
            for status in _error_statuses(api, operation):
                responses.setdefault(api.errors[status].name, self._error(api, status))
        return {
            "openapi": "3.1.0",
            "info": {
                "title": about.title,
                "version": version,
                "summary": about.summary,
                "description": _paragraphs(about.description),
                "contact": about.contact,
                "license": about.license,
            },
            "servers": [{"url": "/", "description": "the service that this document came from"}],
            "security": [{scheme: []} for scheme in about.security],
            "tags": [{"name": tag, "description": text} for tag, text in about.tags.items()],
            "paths": paths,
            "components": {
                "schemas": self._schemas,
                "responses": dict(sorted(responses.items())),
                "securitySchemes": dict(about.security),
            },
        }

    def _types(self) -> Iterable[Any]:
        for api, operation in self._operations:
            yield api.failure
            if operation.body is not None:
                yield operation.body
            yield from (kind for kind in operation.responses.values() if not isinstance(kind, Text | None))
            yield from (_parameter_type(api, parameter) for parameter in operation.parameters)
            yield from (kind for _, kind in _path_parameters(api, operation))

    def _name(self, name: str) -> str:
        """The name of this type in the document."""
        return self._names.get(name, name)

    def _request_components(self, components: Json) -> set[str]:
        """The names of the components that requests use."""
        found: set[str] = set()
        names = [operation.body.__name__ for _, operation in self._operations if operation.body is not None]
        while names:
            name = names.pop()
            if name not in found:
                found.add(name)
                names += [reference.rpartition("/")[2] for reference in _references(components[name])]
        return found

    def _public(self, part: Any) -> Any:
        """A part of a schema whose references use the public names."""
        if isinstance(part, dict):
            return {
                key: self._public_ref(value) if key == "$ref" else self._public(value) for key, value in part.items()
            }
        return [self._public(item) for item in part] if isinstance(part, list) else part

    def _public_ref(self, reference: str) -> str:
        path, _, name = reference.rpartition("/")
        return f"{path}/{self._name(name)}"

    def _schema(self, kind: Any) -> Json:
        """A schema to use in one place."""
        return dict(self._made[kind])

    def _operation(self, api: Api, operation: Operation) -> Json:
        described: Json = {
            "operationId": _camel(operation.name),
            "summary": operation.summary,
            "description": _one_line(operation.description),
            "tags": [operation.tag],
        }
        if not operation.needs_key:
            described["security"] = []
        parameters = [
            self._parameter(name, "path", kind) | {"required": True} for name, kind in _path_parameters(api, operation)
        ]
        for given in operation.parameters:
            described_by = {"description": given.description}
            parameters.append(self._parameter(given.name, given.place, _parameter_type(api, given)) | described_by)
        if parameters:
            described["parameters"] = parameters
        if operation.body is not None:
            described["requestBody"] = {"required": True, "content": self._json(operation.body)}
        described["responses"] = {
            str(status): self._response(api, status, kind, operation.example if status < 300 else {})
            for status, kind in operation.responses.items()
        } | {
            str(status): {"$ref": f"#/components/responses/{api.errors[status].name}"}
            for status in sorted(_error_statuses(api, operation))
        }
        return described

    def _response(self, api: Api, status: int, kind: Any, values: Mapping[str, Any]) -> Json:
        response: Json = {"description": api.descriptions[status]}
        if status == 201:
            response["headers"] = {"Location": _LOCATION}
        if isinstance(kind, Text):
            response["content"] = {
                media_type: {"schema": {"type": "string"}, "example": text}
                for media_type, text in kind.examples.items()
            }
        elif kind is not None:
            response["content"] = self._json(kind, values)
        return response

    def _parameter(self, name: str, place: str, kind: Any) -> Json:
        given = self._schema(kind)
        parameter: Json = {"name": name, "in": place}
        if "description" in given:
            parameter["description"] = given.pop("description")
        return parameter | {"schema": given}

    def _error(self, api: Api, status: int) -> Json:
        error = api.errors[status]
        shown = {name: {"value": body} for of, name, body in api.error_examples if of == status}
        content = {"application/json": {"schema": self._schema(api.failure), "examples": shown}}
        response: Json = {"description": error.description, "content": content}
        return response | ({"headers": error.headers} if error.headers else {})

    def _json(self, kind: Any, values: Mapping[str, Any] = {}) -> Json:
        schema = self._schema(kind)
        example = example_of(schema, self._schemas) | self._shown(values)
        return {"application/json": {"schema": schema, "example": example}}

    def _shown(self, part: Any) -> Any:
        """A part of an example, with an example of each type in it."""
        if isinstance(part, Mapping):
            return {key: self._shown(value) for key, value in part.items()}
        if isinstance(part, list):
            return [self._shown(item) for item in part]
        return example_of(self._made[part], self._schemas) if isinstance(part, type) else part


def _path_parameters(api: Api, operation: Operation) -> list[tuple[str, Any]]:
    """The parameters in the path with their types."""
    types = api.parameters
    found = []
    for before, segment in pairwise(operation.path.split("/")):
        if segment.startswith("{"):
            name = segment[1:-1]
            found.append((name, types.get(f"{before}/{segment}") or types[name]))
    return found


def _parameter_type(api: Api, parameter: Parameter) -> Any:
    return api.parameters.get(parameter.name, parameter.type)


def _error_statuses(api: Api, operation: Operation) -> set[int]:
    """The statuses of the errors of the operation."""
    return {*(api.common_errors if operation.needs_key else ()), *operation.errors} - {*operation.responses}


def _references(part: Any) -> Iterable[str]:
    if isinstance(part, dict):
        if "$ref" in part:
            yield part["$ref"]
        part = list(part.values())
    if isinstance(part, list):
        for item in part:
            yield from _references(item)


def _plain(part: Any, *, in_request: bool) -> Any:
    """The part of a schema in terms that client generators understand. Optional fields of requests do not allow null
    here, although the code treats null as omitted; fields of responses may be null."""
    if isinstance(part, list):
        return [_plain(item, in_request=in_request) for item in part]
    if not isinstance(part, dict):
        return part
    part = {key: _plain(value, in_request=in_request) for key, value in part.items()}
    if part.get("anyOf", ())[1:] == [{"type": "null"}]:
        value = part.pop("anyOf")[0]
        if in_request:
            part = value | {key: given for key, given in part.items() if key != "default"}
        elif "type" in value:
            part = value | part | {"type": [value["type"], "null"]}
        else:
            part["anyOf"] = [value, {"type": "null"}]
    if "enum" in part:
        part.setdefault("type", "string")
    # The schemas tell the kinds apart; with a discriminator, clients in Rust send its field twice.
    if part.pop("discriminator", None):
        part["oneOf"] = part.pop("anyOf")
    return part


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _paragraphs(text: str) -> str:
    return "\n\n".join(_one_line(paragraph) for paragraph in text.split("\n\n"))


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)
