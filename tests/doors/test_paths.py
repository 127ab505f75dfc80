"""Behavior common to all paths: keys, methods, unknown paths, malformed requests, probes and metrics."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doors.platform import UNKNOWN_ID, URL, refused, success
from tests.openmetrics import families
from tests.servers import KEY, Duetime, Receiver, instant, until, unused_address

LOCKED = [
    ("GET", "/timers"),
    ("POST", "/timers"),
    ("GET", f"/timers/{UNKNOWN_ID}"),
    ("PUT", f"/timers/{UNKNOWN_ID}"),
    ("DELETE", f"/timers/{UNKNOWN_ID}"),
    ("GET", "/metrics"),
    ("POST", "/clock"),
]
OPEN = ["/health", "/healthz", "/livez", "/readyz"]


def error_body(answer: bytes, status: int) -> dict[str, object]:
    """Assert that the raw response has this status and the platform API's error format; returns its body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"content-type: application/json" in head.lower()
    parsed: dict[str, object] = json.loads(body)
    assert set(parsed) == {"code", "message", "data"} and parsed["data"] is None and parsed["message"]
    return parsed


WRONG_KEYS: list[dict[str, str]] = [
    {},
    {"X-API-Key": ""},
    {"X-API-Key": "wrong-key"},
    {"X-API-Key": KEY[:-1]},
    {"X-API-Key": KEY + "0"},
    {"X-API-Key": KEY.upper()},
    {"X-API-Key": "Bearer " + KEY},
    {"Authorization": KEY},
    {"Authorization": ""},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer "},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Basic " + KEY},
    {"Cookie": "X-API-Key=" + KEY},
    {"X-API-Key": "wrong-key", "Authorization": "Bearer " + KEY},
    {"X-API-Key": "schlüssel"},
]


class TestKeys:
    @pytest.mark.parametrize(("method", "path"), LOCKED)
    def test_missing_or_wrong_key_is_rejected(self, service: Duetime, method: str, path: str) -> None:
        for headers in WRONG_KEYS:
            answer = service.request(method, path, body=b"{", headers=headers, source=unused_address())
            refused(answer, 401, 4, "^unauthorized: ")
            assert KEY not in str(answer) and "wrong" not in str(answer.body), headers

    @pytest.mark.parametrize(
        "headers",
        [
            {"X-API-Key": KEY},
            {"x-api-key": KEY},
            {"Authorization": "Bearer " + KEY},
            {"authorization": "bearer " + KEY},
            {"Authorization": "BEARER   " + KEY},
        ],
    )
    def test_both_headers_for_the_key_are_accepted(self, service: Duetime, headers: dict[str, str]) -> None:
        success(service.request("GET", "/timers", headers=headers), 200, "success")
        assert service.request("GET", "/metrics", headers=headers).status == 200

    @pytest.mark.parametrize("path", OPEN)
    @pytest.mark.parametrize("headers", [{}, {"X-API-Key": "wrong"}])
    def test_probes_need_no_key(self, service: Duetime, path: str, headers: dict[str, str]) -> None:
        assert service.request("GET", path, headers=headers).status == 200

    def test_key_in_the_query_is_ignored(self, service: Duetime) -> None:
        refused(service.request("GET", f"/timers?api_key={KEY}&x-api-key={KEY}", headers={}), 401, 4, "unauthorized")

    def test_create_without_the_key_writes_nothing(self, service: Duetime) -> None:
        before = service.total()
        body = {"execute_at": service.ahead(60), "callback_url": URL}
        refused(service.request("POST", "/timers", json=body, headers={}), 401, 4, "unauthorized")
        assert service.total() == before

    def test_keys_are_not_logged(self, service: Duetime) -> None:
        wrong = {"X-API-Key": "a-wrong-key-that-somebody-mistyped"}
        service.request("GET", "/timers", headers=wrong, source=unused_address())
        assert KEY not in service.stderr and "mistyped" not in service.stderr

    def test_setting_disables_keys(self, start_service: Callable[..., Duetime]) -> None:
        service = start_service(bare=True, DUETIME_AUTH="none")
        success(service.request("GET", "/timers", headers={}), 200, "success")
        success(service.request("GET", "/timers", headers={"X-API-Key": "whatever"}), 200, "success")
        assert service.request("GET", "/metrics", headers={}).status == 200
        assert not (service.directory / "duetime.key").exists()


UNKNOWN_PATHS = [
    "/nothing",
    "/timers/" + UNKNOWN_ID + "/replay",
    "/timers//",
    "/timers//" + UNKNOWN_ID,
    "/timers/" + UNKNOWN_ID + "//",
    "/Timers",
    "//timers",
    "/timers/../health",
    "/%ff",
    "/timers/%ff",
    "/timers/%F0%28%8C%28",
    "/%00",
    "/..%2f..%2fetc%2fpasswd",
    "/%2ftimers",
    "/timers%2f",
    "/%2Fmetrics",
    "/" + "x" * 5000,
]


class TestPaths:
    @pytest.mark.parametrize("method", ["GET", "POST", "PURGE"])
    def test_unknown_paths_are_not_found(self, service: Duetime, method: str) -> None:
        for path in UNKNOWN_PATHS:
            refused(service.request(method, path), 404, 3, "^this path does not exist; ")

    @pytest.mark.parametrize(
        "path",
        [
            *("/timers", f"/timers/{UNKNOWN_ID}", "/health", "/metrics", "/docs", "/session"),
            *("/api/v1/timers", "/api/v1/timers/default/a", "/api/v1/timers/default/%20", "/api/v1/namespaces"),
        ],
    )
    def test_error_for_a_trailing_slash_suggests_the_path_without_it(self, service: Duetime, path: str) -> None:
        answer = service.request("GET", f"{path}/")
        message = f"this path ends with a slash and does not exist; did you mean {path}?"
        assert (answer.status, answer.body["message"]) == (404, message)

    @pytest.mark.parametrize(
        ("path", "meant"),
        [
            *(("/api/v1/timers/abc", "/api/v1/timers/default/abc"), ("/api/v1/timer", "/api/v1/timers")),
            *(("/api/timers", "/api/v1/timers"), ("/v1/timers", "/api/v1/timers"), ("/Timers", "/timers")),
            *(("/metric", "/metrics"), ("/api/v1/namespaces/secrets/x", "/api/v1/namespaces/default/secrets/x")),
        ],
    )
    def test_error_for_an_unknown_path_suggests_a_known_one(self, service: Duetime, path: str, meant: str) -> None:
        answer = service.request("GET", path)
        assert (answer.status, answer.body["message"]) == (404, f"this path does not exist; did you mean {meant}?")

    @pytest.mark.parametrize(
        ("method", "path"),
        [("GET", "default"), ("PUT", "default"), ("DELETE", "default"), ("GET", "default/"), ("GET", "billing/")],
    )
    def test_error_for_a_missing_id_shows_the_whole_path(self, service: Duetime, method: str, path: str) -> None:
        answer = service.request(method, f"/api/v1/timers/{path}")
        message = "this path needs an id: /api/v1/timers/{namespace}/{id}"
        assert (answer.status, answer.body["message"]) == (404, message)

    @pytest.mark.parametrize("path", ["/nothing", "/api/v1/timer/default/x", "/timers/a/b", "/metrics" * 9])
    def test_error_for_another_path_leads_to_the_documents(self, service: Duetime, path: str) -> None:
        answer = service.request("GET", path)
        assert (answer.status, answer.body["message"]) == (404, "this path does not exist; /docs describes the API")

    @pytest.mark.parametrize(
        "path",
        [
            *("/livez", "/readyz", "/health", "/healthz", "/metrics", "/", "/docs", "/api/v1/openapi.json"),
            *("/ui/app.js",),
        ],
    )
    def test_probes_and_pages_ignore_query_parameters(self, service: Duetime, path: str) -> None:
        assert service.request("GET", f"{path}?probe=1&_=2", headers={"X-API-Key": KEY}).status == 200

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            *(("GET", "/session"), ("POST", "/session"), ("DELETE", "/session"), ("GET", "/clock"), ("POST", "/clock")),
            ("GET", "/api/v1/events"),
        ],
    )
    def test_other_paths_reject_unknown_query_parameters(self, service: Duetime, method: str, path: str) -> None:
        answer = service.request(method, f"{path}?x=1", json={"apiKey": KEY}, headers={"X-API-Key": KEY})
        assert (answer.status, answer.body["message"]) == (
            400,
            "x is not a known query parameter; this operation takes no query parameters",
        )

    @pytest.mark.parametrize(
        "path", ["/api%2fv1/timers", "/api/v1%2Ftimers", "/ui%2Findex.html", "/api/v1/timers%2Fbatch"]
    )
    def test_escaped_slash_does_not_separate_segments(self, service: Duetime, path: str) -> None:
        """A proxy that restricts paths does not treat it as a slash either."""
        assert service.request("GET", path, headers={"X-API-Key": KEY}).status == 404

    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            ("PUT", "/timers", "GET, HEAD, POST"),
            ("DELETE", "/timers", "GET, HEAD, POST"),
            ("PATCH", f"/timers/{UNKNOWN_ID}", "DELETE, GET, HEAD, PUT"),
            ("POST", f"/timers/{UNKNOWN_ID}", "DELETE, GET, HEAD, PUT"),
            ("OPTIONS", "/timers", "GET, HEAD, POST"),
            ("POST", "/health", "GET, HEAD"),
            ("DELETE", "/metrics", "GET, HEAD"),
            ("POST", "/readyz", "GET, HEAD"),
            ("TRACE", "/livez", "GET, HEAD"),
        ],
    )
    def test_wrong_method_is_rejected_with_the_allowed_ones(
        self, service: Duetime, method: str, path: str, allowed: str
    ) -> None:
        answer = service.request(method, path)
        refused(answer, 405, 2, f"allows only {allowed}$")
        assert answer.headers["allow"] == allowed

    @pytest.mark.parametrize("path", ["/timers", "/health", "/livez", "/readyz", "/metrics", f"/timers/{UNKNOWN_ID}"])
    def test_head_is_get_without_the_body(self, service: Duetime, path: str) -> None:
        get, head = service.request("GET", path), service.request("HEAD", path)
        assert (head.status, head.body) == (get.status, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
        if path in ("/livez", "/readyz"):
            assert head.headers["content-length"] == get.headers["content-length"] != "0"

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            *(("GET", path) for path in ("/timers", "/metrics", "/health", "/livez", "/readyz", "/session", "/clock")),
            *(("GET", f"/api/v1/{name}") for name in ("timers", "namespaces", "overview", "cluster", "nothing")),
            *(
                ("POST", "/timers"),
                ("POST", "/api/v1/timers"),
                ("DELETE", "/session"),
                ("PUT", "/livez"),
                ("GET", "/x"),
            ),
        ],
    )
    @pytest.mark.parametrize("headers", [{"X-API-Key": KEY}, {}], ids=["with the key", "without"])
    def test_responses_must_not_be_cached(
        self, service: Duetime, method: str, path: str, headers: dict[str, str]
    ) -> None:
        assert service.request(method, path, headers=headers).headers["cache-control"] == "no-store"

    def test_connection_serves_many_requests(self, service: Duetime) -> None:
        one = f"GET /timers?limit=1 HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
            for _ in range(3):
                connection.sendall(one)
                data = b""
                while b'"offset":0}}' not in data:
                    data += connection.recv(65536)
                assert data.startswith(b"HTTP/1.1 200 ")

    def test_pipelined_requests_are_answered_in_order(self, service: Duetime) -> None:
        one = b"GET %b HTTP/1.1\r\nHost: a\r\nConnection: %b\r\n\r\n"
        requests = [(b"/livez", b"keep-alive"), (b"/nothing", b"keep-alive"), (b"/readyz", b"close")]
        answer = service.raw(b"".join(one % each for each in requests))
        places = [answer.find(text) for text in (b'"alive"', b"path does not exist", b'"ready"')]
        assert -1 not in places and places == sorted(places)


class TestNotHttp:
    @pytest.mark.parametrize(
        "message",
        [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS handshake
            b"nonsense\r\n\r\n",
            b"GET /timers HTTP/9.9\r\n\r\n",
            b"GET /timers HTTP/1.1\r\nbad header\r\n\r\n",
            b"GET /timers HTTP/1.1\r\nA b: c\r\n\r\n",
            b"GET /timers HTTP/1.1\r\nX: a\x00b\r\n\r\n",
            b"GET /tim\x00ers HTTP/1.1\r\nHost: a\r\n\r\n",
            b"POST /timers HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
            b"POST /timers HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
            b"POST /timers HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\n",
            b"POST /timers HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            b"POST /timers HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"POST /timers HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        ],
        ids=lambda message: repr(message[:60]),
    )
    def test_malformed_http_is_rejected(self, service: Duetime, message: bytes) -> None:
        message = message.replace(b"Host: a\r\n", b"Host: a\r\nX-API-Key: " + KEY.encode() + b"\r\n")
        assert error_body(service.raw(message), 400)["code"] == 2

    def test_incomplete_request_has_no_effect(self, service: Duetime) -> None:
        before = service.total()
        body = b'{"execute_at": "2999-01-01T00:00:00Z", "callback_url": "http://127.0.0.1:9/"}'
        head = f"POST /timers HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nContent-Length: {len(body) + 1}\r\n\r\n"
        service.raw(head.encode() + body, leave=True)  # the client closes one byte too early
        service.raw(head.encode() + body[:20], leave=True)
        service.raw(head.encode()[:40], leave=True)
        assert service.request("GET", "/livez").status == 200
        assert service.total() == before

    def test_websocket_upgrade_is_ignored(self, service: Duetime) -> None:
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        headers = {"X-API-Key": KEY, "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", **upgrade}
        success(service.request("GET", "/timers", headers=headers), 200, "success")


class TestOperations:
    def test_probes_respond_alive_and_ready(self, service: Duetime) -> None:
        assert service.request("GET", "/livez").body == {"status": "alive"}
        assert service.request("GET", "/readyz").body["status"] == "ready"

    def test_metrics_count_creates_and_attempts(
        self, start_service: Callable[..., Duetime], receiver: Receiver
    ) -> None:
        service = start_service(virtual_clock=True)  # in the shared service, timers of other tests might fire

        def metric(name: str) -> float:
            page = service.request("GET", "/metrics").body.decode()
            return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name))

        answer = service.request("GET", "/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        created, attempts = metric("duetime_creates_total"), metric("duetime_attempts_total")
        completed, late = metric('duetime_timers{status="completed"}'), metric("duetime_lateness_seconds_count")
        service.fired(receiver.url("/metrics"))
        until("the attempt is counted", lambda: metric("duetime_attempts_total") == attempts + 1)
        assert metric("duetime_creates_total") == created + 1
        assert metric("duetime_lateness_seconds_count") == late + 1
        assert metric('duetime_timers{status="completed"}') == completed + 1 == service.total("completed")
        assert metric("duetime_owned_shards") == 64

    def test_openmetrics_is_negotiated(self, service: Duetime) -> None:
        accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
        answer = service.request("GET", "/metrics", headers={"X-API-Key": KEY, "Accept": accept})
        assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        page = families(answer.body)
        assert page["duetime_timers"].type == "gauge" and page["duetime_creates"].type == "counter"

    def test_setting_allows_metrics_without_a_key(self, start_service: Callable[..., Duetime]) -> None:
        service = start_service(DUETIME_METRICS_AUTH="none")
        assert service.request("GET", "/metrics", headers={}).status == 200
        refused(service.request("GET", "/timers", headers={}), 401, 4, "unauthorized")

    def test_clock_can_not_be_moved_by_default(self, start_service: Callable[..., Duetime]) -> None:
        service = start_service()
        for answer in (service.request("GET", "/clock"), service.request("POST", "/clock", json={"advance": "3d"})):
            refused(answer, 404, 3, "^/clock exists only on a server that was started with --virtual-clock$")

    def test_clock_rejects_unknown_fields(self, service: Duetime) -> None:
        refused(
            service.request("POST", "/clock", json={"advance": "1s", "x": 1}),
            400,
            2,
            "^x is not a known field; known: advance$",
        )

    @pytest.mark.parametrize("body", [{}, {"advance": "x"}, {"advance": 3}, {"advance": "-3s"}, {"advance": "40000d"}])
    def test_clock_rejects_invalid_durations(self, service: Duetime, body: object) -> None:
        refused(service.request("POST", "/clock", json=body), 400, 2, "^advance ")

    def test_health_is_500_without_the_database(self, tmp_path: Path) -> None:
        # The first write to a damaged file ends the service, so its engine must not write during this test.
        idle: dict[str, Any] = {"TIMER_POLLING_INTERVAL": "60000", "DUETIME_LEASE_TTL": "5m"}
        with Duetime(tmp_path / "run", **idle) as service:
            never = b"duetime_begin_seconds_count 0.0"
            until("the engine has polled", lambda: never not in service.request("GET", "/metrics").body)
            for name in ("duetime.db", "duetime.db-wal"):
                with open(tmp_path / "run" / name, "r+b") as file:
                    file.write(b"\xff" * os.fstat(file.fileno()).st_size)
            refused(service.request("GET", "/timers"), 503, 1, "^database error")
            answer = service.request("GET", "/health", headers={})
            assert answer.status == 500, answer
            assert (answer.body["code"], answer.body["message"]) == (1, "database connection failed")
            data = answer.body["data"]
            assert (data["status"], data["database"]) == ("degraded", "disconnected") and instant(data["timestamp"])
