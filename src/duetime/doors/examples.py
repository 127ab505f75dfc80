"""Examples for the OpenAPI document, made from its schemas: each field has its own example, or a plain value of its
type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]

_PLAIN = {"boolean": True, "integer": 1, "number": 1.5}
"""There is no text that would do: each has an example of its own."""


def example_of(schema: Json, schemas: Mapping[str, Json]) -> Any:
    """A value that keeps the schema, without the fields that an object may lack."""
    for several in ("examples", "enum"):
        if several in schema:
            return schema[several][0]
    if "$ref" in schema:
        return example_of(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return example_of(schema[choice][0], schemas)
    kind = schema["type"] if isinstance(schema["type"], str) else schema["type"][0]
    if kind == "object":
        properties = schema["properties"]
        return {name: example_of(properties[name], schemas) for name in properties if name in schema["required"]}
    if kind == "array":
        return [example_of(schema["items"], schemas)]
    return _PLAIN[kind]
