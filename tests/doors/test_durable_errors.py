"""Every error of the durable door: one shape, the right code, and never a 5xx for what a client got wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.doors.durable import BASE, URL, Durable, failed_as, failure, success
from tests.doors.test_malformed import HEADERS, NOT_JSON, TIMES, URLS
from tests.servers import KEY, Duetime, stranger

LIMIT = 256 * 1024
TAKES_A_BODY = [
    *(("POST", f"/timers{rest}") for rest in ("", "/create", "/batch", "/get", "/update", "/delete", "/replay")),
    *(("PUT", "/timers/default/there"), ("POST", "/namespaces"), ("PATCH", "/namespaces/default")),
]
TAKES_NONE = [
    *(("GET", "/timers"), ("GET", "/timers/default/there"), ("DELETE", "/timers/default/there")),
    *(("GET", "/timers/default/there/attempts"), ("POST", "/timers/default/there/replay")),
    *(("GET", "/namespaces"), ("GET", "/namespaces/default"), ("POST", "/namespaces/default/secrets")),
    ("DELETE", "/namespaces/default/secrets/x"),
]
MAKERS = ["/timers", "/timers/create"]


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Durable]:
    with Durable(tmp_path_factory.mktemp("durable-errors")) as door:
        door.make(id="there", delay="1000h", payload="untouched")
        yield door
        [there] = door.pages("", 10)
        assert there["payload"] == "untouched"  # and nothing else was written
        assert [entry["name"] for entry in success(door.api("GET", "/namespaces"))["namespaces"]] == ["default"]
        assert "Traceback" not in door.stderr, door.stderr


def in_camels(body: bytes) -> bytes:
    for snake, camel in ((b"execute_at", b"executeAt"), (b"callback_url", b"callbackUrl"), (b"callback_", b"")):
        body = body.replace(snake, camel)
    return body


class TestBodies:
    @pytest.mark.parametrize(("method", "path"), TAKES_A_BODY)
    def test_what_is_no_json_object(self, door: Durable, method: str, path: str) -> None:
        for name, body in NOT_JSON.items():
            answer = door.api(method, path, body=in_camels(body))
            assert answer.status == 400, (name, answer)
            # A batch may be nested deeper by the two levels around its timers.
            field = "timers" if path.endswith("batch") and answer.body["message"] == "timers is required" else "body"
            failure(answer, 400, "INVALID_INPUT", field)

    @pytest.mark.parametrize("name", NOT_JSON)
    def test_inside_a_batch(self, door: Durable, name: str) -> None:
        """What is JSON and no timer is refused alone; what is no JSON breaks the whole."""
        answer = door.api("POST", "/timers/batch", body=b'{"timers": [' + in_camels(NOT_JSON[name]) + b"]}")
        assert answer.status in (200, 400)
        if answer.status == 200:
            assert {result["status"] for result in answer.body["results"]} == {400}
        else:
            failure(answer, 400, "INVALID_INPUT")

    @pytest.mark.parametrize(("method", "path"), [entry for entry in TAKES_A_BODY if "batch" not in entry[1]])
    def test_too_large(self, door: Durable, method: str, path: str) -> None:
        body = json.dumps({"payload": "x" * LIMIT}).encode()
        failure(door.api(method, path, body=body), 413, "PAYLOAD_TOO_LARGE", "body")

    @pytest.mark.parametrize(("method", "path"), [entry for entry in TAKES_A_BODY if "batch" not in entry[1]])
    def test_too_large_in_chunks(self, door: Durable, method: str, path: str) -> None:
        head = f"{method} {BASE}{path} HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nTransfer-Encoding: chunked\r\n"
        chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
        answer = door.raw(f"{head}Connection: close\r\n\r\n".encode() + chunk * 9 + b"0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413 "), answer[:200]
        failed_as(json.loads(answer.partition(b"\r\n\r\n")[2]), "PAYLOAD_TOO_LARGE", "body")


WRONG: dict[str, list[Any]] = {
    "namespace": [5, True, [], {}, "", "a b", "a/b", "ü", "x" * 65, "a\n"],
    "groupId": [5, [], "", "a b"],
    "id": [5, True, [], {}, "", "x" * 256, "a\u0001", "\u007f", "\u0085", "a\tb"],
    "timerId": [5, "", "x" * 256],
    "executeAt": [5, 5.5, True, [], {}, 4102444800, *TIMES],
    "callbackUrl": [5, True, [], {}, [URL], *URLS],
    "callbackMethod": [5, [], "", "GET", "DELETE", "post", "POST ", "TRACE"],
    "callbackHeaders": [5, "X: y", True, [], [["a", "b"]], {"X-A": 1}, {"X-A": None}, *HEADERS],
    "callbackSubject": [5, [], {}, "x" * 256],
    "correlationId": [5, True, [], {}, "", "x" * 256],
    "callbackTimeout": [5, True, [], "", "0s", "-1s", "1.5s", "soon", "30", "2h", "1s1s", "9" * 40 + "s", "100000d"],
    "responseProtocol": [5, [], "", "Status", "json", "ANSWER"],
    "retryPolicy": [5, "none", True, []],
    "retryPolicy.maxRetries": [-1, 1001, 1.5, "3", True, [], 10**30],
    "retryPolicy.backoffMultiplier": [0, 0.5, -1, 1001, "2", True, [], 1e300],
    "retryPolicy.initialInterval": [5, "", "0s", "1ms", "99ms", "x", "-1s", [], "1e3s", "100000000d"],
    "retryPolicy.maxInterval": [5, "", "x", {}],
    "retryPolicy.maxRetryAttemptsDuration": [5, "", "x", "24", True],
    "retryPolicy.jitter": [1, "false", [], 0],
}
NAMES = ("namespace", "groupId", "id", "timerId")  # which an update has in its path


class TestFields:
    @pytest.mark.parametrize(
        ("method", "path", "field"),
        [
            *(("POST", path, field) for path in MAKERS for field in WRONG),
            *(("PUT", "/timers/default/there", field) for field in WRONG if field not in NAMES),
        ],
    )
    def test_wrong_values(self, door: Durable, method: str, path: str, field: str) -> None:
        outer, _, inner = field.partition(".")
        for value in WRONG[field]:
            body: dict[str, Any] = {"id": "wrong", "executeAt": "2999-01-01T00:00:00Z", "callbackUrl": URL}
            if outer == "timerId":
                del body["id"]
            answer = door.api(method, path, body | {outer: {inner: value} if inner else value})
            assert answer.status == 400, (value, answer)
            error = failure(answer, 400, "INVALID_INPUT")
            told = error["details"]["field"]
            assert told == field or (field, told) == ("timerId", "id"), (value, error)
            assert not set("\r\n\0") & set(error["message"]) and len(error["message"]) < 400

    @pytest.mark.parametrize("delay", [5, True, [], {}, "", "-1s", "soon", "1.5s", "100000000000d", "s", "1 s", "１s"])
    @pytest.mark.parametrize("path", MAKERS)
    def test_delays(self, door: Durable, path: str, delay: Any) -> None:
        failure(door.api("POST", path, {"delay": delay, "callbackUrl": URL}), 400, "INVALID_INPUT", "delay")

    @pytest.mark.parametrize("path", ["/timers/get", "/timers/update", "/timers/delete"])
    @pytest.mark.parametrize("named", [{}, {"timerId": ""}, {"timerId": 5}, {"id": "x" * 256}, {"timerId": "a\u0001"}])
    def test_selections(self, door: Durable, path: str, named: Any) -> None:
        failure(door.api("POST", path, named), 400, "INVALID_INPUT")

    def test_an_update_with_two_times(self, door: Durable) -> None:
        both = {"delay": "1h", "executeAt": "2999-01-01T00:00:00Z"}
        failure(door.api("PUT", "/timers/default/there", both), 400, "INVALID_INPUT", "delay")

    def test_a_subject_without_a_broker(self, door: Durable) -> None:
        body = {"delay": "1h", "callbackSubject": "orders.due"}
        failure(door.api("POST", "/timers", body), 400, "INVALID_INPUT", "callbackSubject")


def test_the_longest_timeout_is_a_setting(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("timeouts")
    with Durable(directory) as door:
        door.make(id="slow", delay="1h", callbackTimeout="1h")
    with Durable(directory, DUETIME_MAX_CALLBACK_TIMEOUT="1m") as door:
        fields = {"callbackUrl": URL, "delay": "1h"}
        failed = failure(door.api("POST", "/timers", {**fields, "callbackTimeout": "61s"}), 400, "INVALID_INPUT")
        assert failed["message"] == "callbackTimeout must be from 1ms to 1m"
        assert door.make(delay="1h", callbackTimeout="1m")["callbackTimeout"] == "1m"
        # What was accepted before stays as it is until a request changes it.
        assert success(door.api("PUT", "/timers/default/slow", {"payload": 1}))["callbackTimeout"] == "1h"
        failure(door.api("PUT", "/timers/default/slow", {"callbackTimeout": "1h"}), 400, "INVALID_INPUT")


class TestPaths:
    @pytest.mark.parametrize(
        "path",
        [
            *("/api/", "/api/v1", "/api/v1/", "/api/v2/timers", "/api/v1/nothing", "/api/v1/timers/"),
            *("/api/v1/Timers", "/api//v1/timers", "/api/v1/timers/a/b/c/d", "/api/v1/timers/default/there/nothing"),
            *("/api/v1/timers/default/%ff", "/api/v1/namespaces/default/nothing", "/api/v1/%2e%2e/timers"),
        ],
    )
    @pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
    def test_unknown(self, door: Durable, method: str, path: str) -> None:
        failure(door.request(method, path, body=b"{}"), 404, "NOT_FOUND")

    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            *(("PATCH", "/timers", "GET, POST"), ("DELETE", "/timers", "GET, POST"), ("GET", "/timers/batch", "POST")),
            *(("GET", "/timers/create", "POST"), ("PUT", "/timers/get", "POST"), ("GET", "/timers/replay", "POST")),
            *(("POST", "/timers/default/there", "DELETE, GET, PUT"), ("PUT", "/namespaces", "GET, POST")),
            *(("DELETE", "/namespaces/default", "GET, PATCH"), ("GET", "/namespaces/default/secrets", "POST")),
            *(("GET", "/timers/default/there/replay", "POST"), ("OPTIONS", "/timers", "GET, POST")),
        ],
    )
    def test_wrong_method(self, door: Durable, method: str, path: str, allowed: str) -> None:
        answer = door.api(method, path)
        failure(answer, 405, "METHOD_NOT_ALLOWED")
        assert answer.headers["allow"] == allowed

    @pytest.mark.parametrize("namespace", ["a%20b", "%00", "%C3%BC", "x" * 65, "a%2Fb"])
    @pytest.mark.parametrize(
        ("method", "rest"), [("GET", ""), ("DELETE", ""), ("GET", "/attempts"), ("POST", "/replay")]
    )
    def test_bad_namespaces(self, door: Durable, namespace: str, method: str, rest: str) -> None:
        answer = door.api(method, f"/timers/{namespace}/there{rest}")
        failure(answer, 400, "INVALID_INPUT", "namespace")

    @pytest.mark.parametrize("id", ["%00", "%01", "%7F", "%C2%85", "x" * 256, "%0A", ""])
    def test_bad_ids(self, door: Durable, id: str) -> None:
        failure(door.api("GET", f"/timers/default/{id}"), 400, "INVALID_INPUT", "id")
        failure(door.api("PUT", f"/timers/default/{id}", {"payload": 1}), 400, "INVALID_INPUT", "id")

    def test_a_head_is_a_get_without_its_body(self, door: Durable) -> None:
        answer = door.api("HEAD", "/timers/default/there")
        assert answer.status == 200 and answer.body == b"" and int(answer.headers["content-length"]) > 0


class TestKeys:
    @pytest.mark.parametrize(("method", "path"), [*TAKES_A_BODY, *TAKES_NONE])
    def test_every_operation_needs_one(self, door: Durable, method: str, path: str) -> None:
        wrong: list[dict[str, str]] = [
            *({}, {"X-API-Key": ""}, {"X-API-Key": KEY[:-1]}, {"X-API-Key": KEY + "x"}, {"X-API-Key": KEY.upper()}),
            *({"Authorization": KEY}, {"Authorization": f"Basic {KEY}"}, {"Authorization": "Bearer"}),
            *(
                {"Authorization": f"Bearer {KEY[:-1]}"},
                {"X-API-Key": "é"},
                {"X-API-Key": "x", "Authorization": "Bearer"},
            ),
        ]
        for headers in wrong:
            answer = door.api(method, path, body=b"{", headers=headers, source=stranger())
            failure(answer, 401, "UNAUTHORIZED")
            assert answer.headers["www-authenticate"] == "Bearer" and KEY not in json.dumps(answer.body)

    @pytest.mark.parametrize(
        "headers",
        [
            {"X-API-Key": KEY},
            {"x-api-key": KEY},
            {"Authorization": f"Bearer {KEY}"},
            {"authorization": f"bearer {KEY}"},
        ],
    )
    def test_both_ways(self, door: Durable, headers: dict[str, str]) -> None:
        assert success(door.api("GET", "/timers/default/there", headers=headers))["id"] == "there"
        assert door.request("GET", "/metrics", headers=headers).status == 200

    def test_none_where_keys_are_off(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        directory = tmp_path_factory.mktemp("open")
        with Duetime(directory, bare=True, DUETIME_AUTH="none", HOST="127.0.0.1") as service:
            assert service.request("GET", f"{BASE}/timers", headers={}).status == 200


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz", "/api/v1/openapi.json", "/docs"])
def test_what_needs_no_key(door: Durable, path: str) -> None:
    assert door.request("GET", path, headers={}).status == 200


class TestMetrics:
    def created(self, door: Durable) -> float:
        page = door.request("GET", "/metrics").body.decode()
        lines = [line for line in page.splitlines() if line.startswith('duetime_creates_total{door="durable"}')]
        return float(lines[0].split()[-1]) if lines else 0.0

    def test_creates_are_counted_once(self, door: Durable) -> None:
        before = self.created(door)
        for _ in range(3):
            success(door.api("POST", "/timers", {"id": "counted", "delay": "1h", "callbackUrl": URL}))
        counted = self.created(door)
        success(door.api("DELETE", "/timers/default/counted"), 204)
        assert counted == before + 1

    def test_creates_of_a_batch_are_counted_once(self, door: Durable) -> None:
        before = self.created(door)
        for _ in range(3):
            door.batch([{"id": "counted in a batch", "delay": "1h", "callbackUrl": URL}])
        counted = self.created(door)
        success(door.api("DELETE", "/timers/default/counted%20in%20a%20batch"), 204)
        assert counted == before + 1

    @pytest.mark.parametrize(
        "name",
        [
            *("duetime_timers", "duetime_creates", "duetime_attempts", "duetime_lateness_seconds"),
            *("duetime_begin_seconds", "duetime_record_seconds", "duetime_owned_shards", "duetime_fenced_writes"),
            *("timer_commands_received_total", "timer_schedules_processed_total", "timer_polling_duration_seconds"),
        ],
    )
    def test_names(self, door: Durable, name: str) -> None:
        assert f"# HELP {name}" in door.request("GET", "/metrics").body.decode()
