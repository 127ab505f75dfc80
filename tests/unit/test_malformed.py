"""All malformed input on every operation of both HTTP APIs, without a server: a 4xx in the API's format that names the
field, and nothing written."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from duetime.doors.http import Application, Keys, Request
from duetime.doors.http_v1 import HttpV1Door
from duetime.doors.operation import Operation
from duetime.doors.platform import PlatformDoor
from duetime.model import HttpTarget
from duetime.namespaces import Namespaces
from duetime.service import Service
from duetime.store import Filter
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry
from tests.clocks import ManualClock
from tests.doors.http_v1 import failed_as
from tests.malformed import (
    CREATE_PATHS,
    HEADERS,
    METHODS,
    NOT_JSON,
    PATH_FIELDS,
    TIMES,
    URL,
    URLS,
    WITH_BODY,
    WRONG,
    WRONG_TYPES,
    in_camel_case,
)

ID = "123e4567-e89b-42d3-a456-426614174000"
AT = "2999-01-01T00:00:00Z"
FIELDS: list[tuple[str, list[Any]]] = [
    *WRONG_TYPES.items(),
    ("execute_at", TIMES),
    ("callback_url", URLS),
    ("callback_method", METHODS),
    ("callback_headers", HEADERS),
]


UNKNOWN: dict[bytes, str] = {
    b'{"callback_paylod": 1}': "callback_paylod is not a known field; did you mean callback_payload?",
    b'{"callbackUrl": "http://a/"}': "callbackUrl is not a known field; did you mean callback_url?",
    b'{"retry_policy": {"maxRetries": 1}}': (
        "retry_policy.maxRetries is not a known field; did you mean retry_policy.max_retries?"
    ),
    b'{"callback": {"type": "nats", "topic": "a", "subject": "b"}}': (
        "callback.subject is not a known field for type nats; did you mean callback.topic?"
    ),
    b'{"callback": {"type": "nats", "topic": "a", "url": "b"}}': (
        "callback.url is not a known field for type nats; known: type, topic, key, headers, payload"
    ),
    b'{"callback": {"type": "http", "uri": 1}}': (
        "callback.uri is not a known field for type http; did you mean callback.url?"
    ),
    b'{"max_retries": 1}': "max_retries is not a known field; did you mean retry_policy.max_retries?",
    b'{"unheardOf": 1}': "unheardOf is not a known field; known: execute_at, ",
}


class Anything:
    """A deliverer that accepts every target."""

    async def check(self, target: object) -> None:
        pass


class Asked(Request):
    """A request whose body has arrived."""

    sent: bytes

    async def body(self, bytes_max: int) -> bytes:
        return self.sent


class Doors:
    """Both APIs over a memory store with one timer."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        clock = ManualClock()
        self.store = MemoryStore(clock, shards=8)
        namespaces = Namespaces(self.store, clock, lambda: None)
        self.service = Service(self.store, namespaces, {HttpTarget: Anything()}, clock, lambda *_: None)  # type: ignore[dict-item]
        platform = PlatformDoor(self.service, Keys(None), Telemetry(), request_bytes_max=1 << 18)
        http_v1 = HttpV1Door(
            *(self.service, namespaces, Keys(None), Telemetry(), None),  # type: ignore[arg-type]
            request_bytes_max=1 << 18,
            batch_bytes_max=1 << 20,
            shards=8,
        )
        self.operations = http_v1.operations()
        self.application = Application([platform, http_v1], fallback=platform, under={"/api/": http_v1})
        self.runner.run(self.store.open())
        self.runner.run(namespaces.start())
        there = {"id": ID, "executeAt": AT, "callbackUrl": URL, "payload": "untouched"}
        assert self.ask("POST", "/api/v1/timers", there)[0] == 200

    def ask(self, method: str, path: str, body: object, query: str = "") -> tuple[int, dict[str, Any]]:
        asked = Asked(method, path, query_string=query.encode())
        asked.raw_path = path.encode()
        asked.sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = self.runner.run(self.application.answer(asked))
        assert answer is not None and isinstance(answer.body, bytes)
        return answer.status, json.loads(answer.body)

    def written(self) -> object:
        return self.runner.run(self.store.page(Filter(), 10)).timers, self.runner.run(self.store.namespaces())


@pytest.fixture(scope="module")
def opened() -> Iterator[Doors]:
    doors = Doors()
    yield doors
    doors.runner.close()


@pytest.fixture
def doors(opened: Doors) -> Iterator[Doors]:
    """The APIs; checks at the end of the test that nothing was written."""
    before = opened.written()
    yield opened
    assert opened.written() == before


def refused(answer: tuple[int, dict[str, Any]], field: str) -> bool:
    """Whether the platform API refused the input, with a short line that names the field."""
    status, body = answer
    assert set(body) == {"code", "message", "data"}
    message = body["message"]
    short = not set("\r\n\0") & set(message) and len(message) < 300
    return (status, body["code"], body["data"]) == (400, 2, None) and message.startswith(field) and short


class TestPlatform:
    @pytest.mark.parametrize(("method", "path"), [("POST", "/timers"), ("PUT", f"/timers/{ID}")])
    def test_malformed_body_is_rejected(self, doors: Doors, method: str, path: str) -> None:
        assert not [name for name, body in NOT_JSON.items() if not refused(doors.ask(method, path, body), "body ")]

    @pytest.mark.parametrize(("field", "values"), FIELDS, ids=[f"{field}, {len(values)}" for field, values in FIELDS])
    def test_malformed_field_is_rejected(self, doors: Doors, field: str, values: list[Any]) -> None:
        fields = {"execute_at": AT, "callback_url": URL}
        assert not [
            value for value in values if not refused(doors.ask("POST", "/timers", fields | {field: value}), field)
        ]

    def test_unknown_fields_are_rejected(self, doors: Doors) -> None:
        for method, path in (("POST", "/timers"), ("PUT", f"/timers/{ID}")):
            for body, message in UNKNOWN.items():
                answer = doors.ask(method, path, body)
                assert refused(answer, "") and answer[1]["message"].startswith(message)

    @pytest.mark.parametrize("method", ["POST", "GET"])
    @pytest.mark.parametrize(
        ("query", "message"),
        [
            ("Status=pending", "Status is not a known query parameter; did you mean status?"),
            ("x=1", "x is not a known query parameter; known: status, sort, order, limit, offset"),
            ("limit=1&page=3", "page is not a known query parameter; known: status, sort, order, limit, offset"),
        ],
    )
    def test_unknown_query_parameters_are_rejected(self, doors: Doors, method: str, query: str, message: str) -> None:
        status, said = doors.ask(method, "/timers", {}, query)
        assert status == 400
        if method == "GET":
            assert said["message"] == message
        else:
            assert "is not a known query parameter" in said["message"] and "did you mean" not in said["message"]

    @pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
    def test_unknown_query_parameters_for_one_timer_are_rejected(self, doors: Doors, method: str) -> None:
        assert refused(doors.ask(method, f"/timers/{ID}", {}, "limit=1"), "limit is not a known query parameter")


class TestDurable:
    @pytest.mark.parametrize(("method", "path"), WITH_BODY)
    def test_malformed_body_is_rejected(self, doors: Doors, method: str, path: str) -> None:
        for name, body in NOT_JSON.items():
            status, said = doors.ask(method, f"/api/v1{path.replace('there', ID)}", in_camel_case(body))
            assert status == 400, (name, said)
            # A batch may be nested two levels deeper than its timers.
            alone = path.endswith("batch") and said["message"].endswith(" is not a known field")
            failed_as(said, "INVALID_INPUT", None if alone else "body")

    def test_malformed_timer_in_a_batch_is_rejected(self, doors: Doors) -> None:
        """JSON that is not a timer is refused alone; invalid JSON fails the whole batch."""
        for name, body in NOT_JSON.items():
            status, said = doors.ask("POST", "/api/v1/timers/batch", b'{"timers": [' + in_camel_case(body) + b"]}")
            assert status in (200, 400), (name, said)
            if status == 200:
                assert {result["status"] for result in said["results"]} <= {400}, name
            else:
                failed_as(said, "INVALID_INPUT")

    @pytest.mark.parametrize(
        ("method", "path", "field"),
        [
            *(("POST", path, field) for path in CREATE_PATHS for field in WRONG),
            *(("PUT", f"/timers/default/{ID}", field) for field in WRONG if field not in PATH_FIELDS),
        ],
    )
    def test_malformed_field_is_rejected(self, doors: Doors, method: str, path: str, field: str) -> None:
        outer, _, inner = field.partition(".")
        for value in WRONG[field]:
            body: dict[str, Any] = {"id": "wrong", "executeAt": AT, "callbackUrl": URL}
            if outer == "timerId" or method == "PUT":
                del body["id"]
            status, said = doors.ask(method, f"/api/v1{path}", body | {outer: {inner: value} if inner else value})
            assert status == 400, (value, said)
            failed_as(said, "INVALID_INPUT")
            told = said["details"]["field"]
            assert told == field or (field, told) == ("timerId", "id"), (value, said)
            assert not set("\r\n\0") & set(said["message"]) and len(said["message"]) < 400

    def test_every_operation_rejects_unknown_fields(self, doors: Doors) -> None:
        taking = [operation for operation in doors.operations if operation.body is not None]
        assert len(taking) > 10
        for operation in taking:
            status, said = doors.ask(operation.method, _path(operation), {"unheardOf": 1})
            assert status == 400 and len(said["message"]) < 400
            assert said["message"].startswith("unheardOf is not a known field; known: "), operation.path
            assert not {"groupId", "timerId"} & set(re.findall(r"\w+", said["message"]))
            failed_as(said, "INVALID_INPUT", "unheardOf")

    @pytest.mark.parametrize(
        ("field", "meant"),
        [
            *((name, "payload") for name in ("callback_paylod", "callbackPaylod", "callback_payload", "body")),
            *((name, "id") for name in ("idempotency_key", "idempotencyKey", "key", "timer_ids")),
            *((name, "retryPolicy.maxRetries") for name in ("maxRetries", "max_retries", "retries")),
            *(("topic", "callbackSubject"), ("jitter", "retryPolicy.jitter"), ("url", "callbackUrl")),
        ],
    )
    def test_unknown_field_of_a_create_gets_the_name_that_is_meant(self, doors: Doors, field: str, meant: str) -> None:
        status, said = doors.ask("POST", "/api/v1/timers", {field: 1})
        assert (status, said["message"]) == (400, f"{field} is not a known field; did you mean {meant}?")

    def test_every_operation_rejects_unknown_query_parameters(self, doors: Doors) -> None:
        for operation in doors.operations:
            known = next((given.name for given in operation.parameters if given.place == "query"), "")
            for query in ("unheardOf=1", f"{known}=default&unheardOf") if known else ("unheardOf=1",):
                status, said = doors.ask(operation.method, _path(operation), {"unheardOf": 1}, query)
                names = ", ".join(given.name for given in operation.parameters if given.place == "query")
                advice = f"known: {names}" if names else "this operation takes no query parameters"
                message = f"unheardOf is not a known query parameter; {advice}"
                assert (status, said["message"]) == (400, message), operation.path
                failed_as(said, "INVALID_INPUT", "unheardOf")

    def test_unknown_field_in_a_timer_of_a_batch_rejects_that_timer(self, doors: Doors) -> None:
        bad = [{"callback_url": 1}, {"retryPolicy": {"maxRetry": 1}}]
        status, said = doors.ask("POST", "/api/v1/timers/batch", {"timers": [*bad, {}]})
        assert status == 200
        assert [result["error"]["message"] for result in said["results"]] == [
            "callback_url is not a known field; did you mean callbackUrl?",
            "retryPolicy.maxRetry is not a known field; did you mean retryPolicy.maxRetries?",
            "callbackUrl is required unless callbackSubject is given",
        ]

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({"delay": 5}, 'delay must be a string like "30s" or null, not a number'),
            ({"executeAt": 5}, 'executeAt must be a string like "2030-01-31T09:00:00Z" or null, not a number'),
            (
                {"retryPolicy": {"maxInterval": 5}},
                'retryPolicy.maxInterval must be a string like "10m" or null, not a number',
            ),
        ],
    )
    def test_value_of_the_wrong_type_gets_an_example(self, doors: Doors, body: object, message: str) -> None:
        status, said = doors.ask("POST", "/api/v1/timers", body)
        assert (status, said["message"]) == (400, message)

    @pytest.mark.parametrize("timers", [[{}], [{"x": 1}], []])
    def test_unknown_field_beside_the_timers_rejects_the_batch(self, doors: Doors, timers: list[object]) -> None:
        for body in ({"timer": 1, "timers": timers}, {"timers": timers, "timer": 1}):
            status, said = doors.ask("POST", "/api/v1/timers/batch", body)
            assert status == 400
            failed_as(said, "INVALID_INPUT", "timer" if timers else None)


def _path(operation: Operation) -> str:
    return operation.path.replace("{namespace}", "default").replace("{name}", "default").replace("{id}", ID)
