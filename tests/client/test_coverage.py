"""The clients cover the HTTP v1 API: each operation of the OpenAPI document, with all of its fields and parameters."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from duetime.client import AsyncClient, Client
from duetime.client.calls import Call
from tests.servers import Duetime

FILTERS: dict[str, Any] = {
    "namespace": "n",
    "id": "i",
    "correlation_id": "c",
    "execute_after": "2030-01-01T00:00:00Z",
    "execute_before": "2031-01-01T00:00:00Z",
}
CHANGES: dict[str, Any] = {
    "execute_at": "2030-01-01T00:00:00Z",
    "delay": "1s",
    "callback_url": "http://x",
    "callback_subject": "s",
    "callback_method": "PUT",
    "callback_headers": {},
    "payload": 1,
    "metadata": 2,
    "correlation_id": "c",
    "retry_policy": {"max_retries": 1},
    "callback_timeout": "1s",
    "response_protocol": "status",
}
NEW: dict[str, Any] = {"namespace": "n", "id": "i", **CHANGES}

# By operationId: the call that the client's method of this name makes with all of its arguments.
CALLS: dict[str, tuple[str, Call[Any]]] = {
    "create": ("create", Client.create(**NEW)),
    "upsert": ("upsert", Client.upsert(**NEW)),
    "batch": ("batch_ids", Client.batch_ids([NEW])),  # type: ignore[list-item]
    "list": ("page", Client.page(**FILTERS, status="failed", limit=1, cursor="c")),
    "count": ("count", Client.count(**FILTERS, status="failed")),
    "get": ("get", Client.get("i", namespace="n")),
    "update": ("update", Client.update("i", namespace="n", **CHANGES)),
    "delete": ("delete", Client.delete("i", namespace="n")),
    "attempts": ("attempts", Client.attempts("i", namespace="n")),
    "cancel": ("cancel", Client.cancel("i", namespace="n")),
    "cancelMany": ("cancel_all", Client.cancel_all(**FILTERS).call(0)),
    "replay": ("replay", Client.replay("i", namespace="n")),
    "replayMany": ("replay_all", Client.replay_all(**FILTERS).call(0)),
    "namespaces": ("namespaces", Client.namespaces()),
    "namespace": ("namespace", Client.namespace("n")),
    "createNamespace": ("create_namespace", Client.create_namespace("n", shards=1, retention="1d", weight=1)),
    "changeNamespace": ("update_namespace", Client.update_namespace("n", retention="1d", weight=1, paused=True)),
    "addSecret": ("add_secret", Client.add_secret("n")),
    "deleteSecret": ("delete_secret", Client.delete_secret("n", "s")),
    "overview": ("overview", Client.overview()),
    "cluster": ("cluster", Client.cluster()),
}
# The same operations again, with the id in the body instead of the path.
ALTERNATIVES = {"getSelected": "get", "updateSelected": "update", "deleteSelected": "delete"}
# Other names of namespace and id, and the shards of a namespace, which can't change.
NOT_SENT = {"groupId", "timerId"}
FIXED = {"changeNamespace": {"shards"}}


@pytest.fixture(scope="module")
def document(service: Duetime) -> dict[str, Any]:
    answer = service.request("GET", "/api/v1/openapi.json", headers={})
    assert answer.status == 200
    found: dict[str, Any] = answer.body
    return found


@pytest.fixture(scope="module")
def operations(document: dict[str, Any]) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Method, path and description of each operation of the v1 API by its operationId."""
    return {
        operation["operationId"]: (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        if path.startswith("/api/v1/")
        for method, operation in methods.items()
    }


def resolved(document: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in part:
        return part
    found = document
    for name in part["$ref"].split("/")[1:]:
        found = found[name]
    return resolved(document, found)


def fields(document: dict[str, Any], schema: dict[str, Any]) -> set[str]:
    """The names of all fields of an object, also where its schema is composed of others."""
    schema = resolved(document, schema)
    parts = [part for kind in ("allOf", "anyOf", "oneOf") for part in schema.get(kind, ())]
    return set(schema.get("properties", ())).union(*(fields(document, part) for part in parts))


def test_every_operation_has_a_method(operations: dict[str, Any]) -> None:
    assert operations.keys() == CALLS.keys() | ALTERNATIVES.keys() and set(ALTERNATIVES.values()) <= CALLS.keys()
    for method, _ in CALLS.values():
        assert callable(getattr(Client, method)) and callable(getattr(AsyncClient, method))


@pytest.mark.parametrize("id", CALLS)
def test_method_sends_all_fields_and_parameters_of_its_operation(
    document: dict[str, Any], operations: dict[str, tuple[str, str, dict[str, Any]]], id: str
) -> None:
    method, path, operation = operations[id]
    call = CALLS[id][1]
    assert call.method == method and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", path), call.path)
    parameters = [resolved(document, parameter) for parameter in operation.get("parameters", ())]
    assert set(call.query) == {each["name"] for each in parameters if each["in"] == "query"}
    assert set(call.headers) == {each["name"].lower() for each in parameters if each["in"] == "header"}
    if "requestBody" in operation:
        schema = resolved(document, operation["requestBody"])["content"]["application/json"]["schema"]
        assert call.body is not None
        assert set(json.loads(call.body)) == fields(document, schema) - NOT_SENT - FIXED.get(id, set())
    else:
        assert call.body is None
