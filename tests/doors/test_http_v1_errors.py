"""Errors of the HTTP v1 API: one format, the right code, and no 5xx for a mistake of the client.

``tests/unit/test_malformed.py`` sends every malformed input to every operation; the tests here send some of each kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest

from tests.doors.http_v1 import BASE, URL, HttpV1, failed_as, failure, success
from tests.malformed import CREATE_PATHS, KINDS, NOT_JSON, WITH_BODY, WRONG, in_camel_case
from tests.servers import KEY, Duetime, unused_address

LIMIT = 256 * 1024
WITHOUT_FIELDS = [
    *(("POST", "/timers/default/missing/cancel"), ("POST", "/timers/default/missing/replay")),
    *(("DELETE", "/timers/default/missing"), ("POST", "/namespaces/missing/secrets")),
    ("DELETE", "/namespaces/missing/secrets/x"),
]
WITHOUT_BODY = [
    *(("GET", "/timers"), ("GET", "/timers/default/there"), ("DELETE", "/timers/default/there")),
    *(("GET", "/timers/default/there/attempts"), ("POST", "/timers/default/there/replay")),
    *(("GET", "/namespaces"), ("GET", "/namespaces/default"), ("POST", "/namespaces/default/secrets")),
    ("DELETE", "/namespaces/default/secrets/x"),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpV1]:
    with HttpV1(tmp_path_factory.mktemp("http-v1-errors")) as service:
        service.make(id="there", delay="1000h", payload="untouched")
        yield service
        [there] = service.pages("", 10)
        assert there["payload"] == "untouched"  # rejected requests wrote nothing
        assert [entry["name"] for entry in success(service.api("GET", "/namespaces"))["namespaces"]] == ["default"]
        assert "Traceback" not in service.stderr, service.stderr


class TestBodies:
    @pytest.mark.parametrize(("method", "path"), WITH_BODY)
    def test_body_that_is_no_json_object_is_rejected(self, service: HttpV1, method: str, path: str) -> None:
        for name in KINDS:
            answer = service.api(method, path, body=in_camel_case(NOT_JSON[name]))
            assert answer.status == 400, (name, answer)
            # A batch can be two levels deeper, so it reaches the check of its fields.
            field = "timers" if path.endswith("batch") and answer.body["message"] == "timers is required" else "body"
            failure(answer, 400, "INVALID_INPUT", field)

    @pytest.mark.parametrize("name", ["array", "truncated"])
    def test_malformed_entry_is_rejected_alone_and_malformed_json_rejects_the_batch(
        self, service: HttpV1, name: str
    ) -> None:
        answer = service.api("POST", "/timers/batch", body=b'{"timers": [' + in_camel_case(NOT_JSON[name]) + b"]}")
        assert answer.status in (200, 400)
        if answer.status == 200:
            assert {result["status"] for result in answer.body["results"]} == {400}
        else:
            failure(answer, 400, "INVALID_INPUT")

    @pytest.mark.parametrize(("method", "path"), [entry for entry in WITH_BODY if "batch" not in entry[1]])
    def test_too_large_body_is_rejected(self, service: HttpV1, method: str, path: str) -> None:
        body = json.dumps({"payload": "x" * LIMIT}).encode()
        failure(service.api(method, path, body=body), 413, "PAYLOAD_TOO_LARGE", "body")

    @pytest.mark.parametrize(("method", "path"), [entry for entry in WITH_BODY if "batch" not in entry[1]])
    def test_too_large_chunked_body_is_rejected(self, service: HttpV1, method: str, path: str) -> None:
        head = f"{method} {BASE}{path} HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nTransfer-Encoding: chunked\r\n"
        chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
        answer = service.raw(f"{head}Connection: close\r\n\r\n".encode() + chunk * 9 + b"0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413 "), answer[:200]
        failed_as(json.loads(answer.partition(b"\r\n\r\n")[2]), "PAYLOAD_TOO_LARGE", "body")


class TestWithoutFields:
    """Operations without fields, for a timer and a namespace that do not exist: nothing else is wrong."""

    @pytest.mark.parametrize(("method", "path"), WITHOUT_FIELDS)
    def test_body_must_be_empty(self, service: HttpV1, method: str, path: str) -> None:
        for body in (b"", b"\n", b"{}"):
            assert service.api(method, path, body=body).status == 404
        error = failure(service.api(method, path, {"delay": "1d"}), 400, "INVALID_INPUT", "delay")
        assert error["message"] == "delay is not a known field; this operation takes no fields"
        for body in (b"null", b"[]", b"{", b"delay=1d"):
            failure(service.api(method, path, body=body), 400, "INVALID_INPUT", "body")

    @pytest.mark.parametrize(("method", "path"), WITHOUT_FIELDS)
    def test_body_has_the_limits_of_other_operations(self, service: HttpV1, method: str, path: str) -> None:
        failure(service.api(method, path, body=b" " * (LIMIT + 1)), 413, "PAYLOAD_TOO_LARGE", "body")
        headers = {"X-API-Key": KEY, "Content-Encoding": "gzip"}
        failure(service.api(method, path, body=b"{}", headers=headers), 415, "UNSUPPORTED_ENCODING")


class TestFields:
    @pytest.mark.parametrize(
        ("method", "path", "field"),
        [
            *(("POST", CREATE_PATHS[n % 2], field) for n, field in enumerate(WRONG)),
            *(("PUT", "/timers/default/there", field) for field in ("executeAt", "retryPolicy.maxRetries")),
        ],
    )
    def test_wrong_values_are_rejected(self, service: HttpV1, method: str, path: str, field: str) -> None:
        outer, _, inner = field.partition(".")
        for value in WRONG[field][:2]:
            body: dict[str, Any] = {"id": "wrong", "executeAt": "2999-01-01T00:00:00Z", "callbackUrl": URL}
            if outer == "timerId" or method == "PUT":
                del body["id"]
            answer = service.api(method, path, body | {outer: {inner: value} if inner else value})
            assert answer.status == 400, (value, answer)
            error = failure(answer, 400, "INVALID_INPUT")
            named = error["details"]["field"]
            assert named == field or (field, named) == ("timerId", "id"), (value, error)

    @pytest.mark.parametrize("delay", [5, True, [], {}, "", "-1s", "soon", "1.5s", "100000000000d", "s", "1 s", "１s"])
    @pytest.mark.parametrize("path", CREATE_PATHS)
    def test_invalid_delays_are_rejected(self, service: HttpV1, path: str, delay: Any) -> None:
        failure(service.api("POST", path, {"delay": delay, "callbackUrl": URL}), 400, "INVALID_INPUT", "delay")

    @pytest.mark.parametrize("path", ["/timers/get", "/timers/update", "/timers/delete"])
    @pytest.mark.parametrize(
        "selection", [{}, {"timerId": ""}, {"timerId": 5}, {"id": "x" * 256}, {"timerId": "a\u0001"}]
    )
    def test_invalid_timer_ids_in_bodies_are_rejected(self, service: HttpV1, path: str, selection: Any) -> None:
        failure(service.api("POST", path, selection), 400, "INVALID_INPUT")

    def test_update_with_two_times_is_rejected(self, service: HttpV1) -> None:
        both = {"delay": "1h", "executeAt": "2999-01-01T00:00:00Z"}
        failure(service.api("PUT", "/timers/default/there", both), 400, "INVALID_INPUT", "delay")

    def test_subject_without_a_broker_is_rejected(self, service: HttpV1) -> None:
        body = {"delay": "1h", "callbackSubject": "orders.due"}
        failure(service.api("POST", "/timers", body), 400, "INVALID_INPUT", "callbackSubject")


def test_maximum_callback_timeout_is_a_setting(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("timeouts")
    with HttpV1(directory) as service:
        service.make(id="slow", delay="1h", callbackTimeout="1h")
    with HttpV1(directory, DUETIME_MAX_CALLBACK_TIMEOUT="1m") as service:
        fields = {"callbackUrl": URL, "delay": "1h"}
        failed = failure(service.api("POST", "/timers", {**fields, "callbackTimeout": "61s"}), 400, "INVALID_INPUT")
        assert failed["message"] == "callbackTimeout must be from 1ms to 1m"
        assert service.make(delay="1h", callbackTimeout="1m")["callbackTimeout"] == "1m"
        # A timeout that was accepted earlier stays until an update changes it.
        assert success(service.api("PUT", "/timers/default/slow", {"payload": 1}))["callbackTimeout"] == "1h"
        failure(service.api("PUT", "/timers/default/slow", {"callbackTimeout": "1h"}), 400, "INVALID_INPUT")


UNKNOWN = [
    *("/api/", "/api/v1", "/api/v1/", "/api/v2/timers", "/api/v1/nothing", "/api/v1/timers/"),
    *("/api/v1/Timers", "/api//v1/timers", "/api/v1/timers/a/b/c/d", "/api/v1/timers/default/there/nothing"),
    *("/api/v1/timers/default/%ff", "/api/v1/namespaces/default/nothing", "/api/v1/%2e%2e/timers"),
]


class TestPaths:
    @pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
    def test_unknown_paths_are_not_found(self, service: HttpV1, method: str) -> None:
        for path in UNKNOWN:
            failure(service.request(method, path, body=b"{}"), 404, "NOT_FOUND")

    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            *(
                ("PATCH", "/timers", "GET, HEAD, POST"),
                ("DELETE", "/timers", "GET, HEAD, POST"),
                ("GET", "/timers/batch", "POST"),
            ),
            *(("GET", "/timers/create", "POST"), ("PUT", "/timers/get", "POST"), ("GET", "/timers/replay", "POST")),
            *(("POST", "/timers/default/there", "DELETE, GET, HEAD, PUT"), ("PUT", "/namespaces", "GET, HEAD, POST")),
            *(("DELETE", "/namespaces/default", "GET, HEAD, PATCH"), ("GET", "/namespaces/default/secrets", "POST")),
            *(("GET", "/timers/default/there/replay", "POST"), ("OPTIONS", "/timers", "GET, HEAD, POST")),
        ],
    )
    def test_wrong_method_is_rejected_with_the_allowed_ones(
        self, service: HttpV1, method: str, path: str, allowed: str
    ) -> None:
        answer = service.api(method, path)
        failure(answer, 405, "METHOD_NOT_ALLOWED")
        assert answer.headers["allow"] == allowed

    @pytest.mark.parametrize("namespace", ["a%20b", "%00", "%C3%BC", "x" * 65, "a%2Fb"])
    @pytest.mark.parametrize(
        ("method", "rest"), [("GET", ""), ("DELETE", ""), ("GET", "/attempts"), ("POST", "/replay")]
    )
    def test_invalid_namespaces_in_paths_are_rejected(
        self, service: HttpV1, namespace: str, method: str, rest: str
    ) -> None:
        answer = service.api(method, f"/timers/{namespace}/there{rest}")
        in_path = failure(answer, 400, "INVALID_INPUT", "namespace")
        selection = {"namespace": unquote(namespace), "timerId": "there"}
        in_body = failure(service.api("POST", "/timers/get", selection), 400, "INVALID_INPUT")
        if "%00" not in namespace:  # no body may contain it
            assert in_body["message"] == in_path["message"]

    @pytest.mark.parametrize("id", ["%00", "%01", "%7F", "%C2%85", "x" * 256, "%0A"])
    def test_invalid_ids_in_paths_are_rejected(self, service: HttpV1, id: str) -> None:
        failure(service.api("GET", f"/timers/default/{id}"), 400, "INVALID_INPUT", "id")
        failure(service.api("PUT", f"/timers/default/{id}", {"payload": 1}), 400, "INVALID_INPUT", "id")

    def test_head_is_a_get_without_its_body(self, service: HttpV1) -> None:
        answer = service.api("HEAD", "/timers/default/there")
        assert answer.status == 200 and answer.body == b"" and int(answer.headers["content-length"]) > 0


class TestKeys:
    @pytest.mark.parametrize(("method", "path"), [*WITH_BODY, *WITHOUT_BODY])
    def test_every_operation_needs_a_key(self, service: HttpV1, method: str, path: str) -> None:
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
            answer = service.api(method, path, body=b"{", headers=headers, source=unused_address())
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
    def test_both_headers_for_the_key_are_accepted(self, service: HttpV1, headers: dict[str, str]) -> None:
        assert success(service.api("GET", "/timers/default/there", headers=headers))["id"] == "there"
        assert service.request("GET", "/metrics", headers=headers).status == 200

    def test_no_key_is_needed_if_authentication_is_off(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        directory = tmp_path_factory.mktemp("open")
        with Duetime(directory, bare=True, DUETIME_AUTH="none", HOST="127.0.0.1") as service:
            assert service.request("GET", f"{BASE}/timers", headers={}).status == 200


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz", "/api/v1/openapi.json", "/docs"])
def test_probes_and_documents_need_no_key(service: HttpV1, path: str) -> None:
    assert service.request("GET", path, headers={}).status == 200


class TestMetrics:
    def creates(self, service: HttpV1) -> float:
        page = service.request("GET", "/metrics").body.decode()
        lines = [line for line in page.splitlines() if line.startswith('duetime_creates_total{api="http_v1"}')]
        return float(lines[0].split()[-1]) if lines else 0.0

    def test_repeated_creates_are_counted_once(self, service: HttpV1) -> None:
        before = self.creates(service)
        for _ in range(3):
            success(service.api("POST", "/timers", {"id": "counted", "delay": "1h", "callbackUrl": URL}))
        counted = self.creates(service)
        success(service.api("DELETE", "/timers/default/counted"), 204)
        assert counted == before + 1

    def test_repeated_creates_in_batches_are_counted_once(self, service: HttpV1) -> None:
        before = self.creates(service)
        for _ in range(3):
            service.batch([{"id": "counted in a batch", "delay": "1h", "callbackUrl": URL}])
        counted = self.creates(service)
        success(service.api("DELETE", "/timers/default/counted%20in%20a%20batch"), 204)
        assert counted == before + 1

    @pytest.mark.parametrize(
        "name",
        [
            *("duetime_timers", "duetime_creates", "duetime_attempts", "duetime_lateness_seconds"),
            *("duetime_begin_seconds", "duetime_record_seconds", "duetime_owned_shards", "duetime_fenced_writes"),
            *("timer_commands_received_total", "timer_schedules_processed_total", "timer_polling_duration_seconds"),
        ],
    )
    def test_metric_is_exported(self, service: HttpV1, name: str) -> None:
        assert f"# HELP {name}" in service.request("GET", "/metrics").body.decode()
