"""Checks every response that a test of the HTTP APIs gets against the OpenAPI document: status, headers and body."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import jsonschema_rs

from tests.doors.test_openapi import DOCUMENT
from tests.servers import Answer

# Statuses that the server sends before it has found an operation, or without one.
ANYWHERE = {405, 414, 431}


def check_answer(method: str, path: str, answer: Answer) -> None:
    """Fail if the document does not allow this response. Responses to unknown paths are not checked."""
    operation = operation_of("get" if method == "HEAD" else method.lower(), path.partition("?")[0])
    if operation is None or answer.status in ANYWHERE:
        return
    assert str(answer.status) in operation["responses"], (method, path, answer)
    described = _resolved(operation["responses"][str(answer.status)])
    for name in described.get("headers", ()):
        assert name.lower() in answer.headers, (name, method, path, answer)
    if method == "HEAD":
        return
    content = described.get("content", {})
    if not content:
        assert answer.body == b"", (method, path, answer)
        return
    media_type = answer.headers["content-type"].partition(";")[0]
    assert media_type in content, (method, path, answer)
    if media_type == "application/json":
        _validator(operation["operationId"], answer.status).validate(answer.body)


@lru_cache
def operation_of(method: str, path: str) -> dict[str, Any] | None:
    for template, methods in DOCUMENT["paths"].items():
        if method in methods and re.fullmatch(re.sub(r"{\w+}", "[^/]+", template), path):
            found: dict[str, Any] = methods[method]
            return found
    return None


def _resolved(response: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in response:
        found: dict[str, Any] = DOCUMENT["components"]["responses"][response["$ref"].rpartition("/")[2]]
        return found
    return response


@lru_cache
def _validator(operation_id: str, status: int) -> Any:
    operation = next(
        one for methods in DOCUMENT["paths"].values() for one in methods.values() if one["operationId"] == operation_id
    )
    schema = _resolved(operation["responses"][str(status)])["content"]["application/json"]["schema"]
    whole = schema | {"components": DOCUMENT["components"]}
    return jsonschema_rs.Draft202012Validator(whole, validate_formats=True)
