"""What every path has in common: keys, methods, paths that are none, and what operators ask."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.doors.shape import NOBODY, URL, refused, success
from tests.servers import KEY, Duetime, Receiver, instant, stranger, until

LOCKED = [
    ("GET", "/timers"),
    ("POST", "/timers"),
    ("GET", f"/timers/{NOBODY}"),
    ("PUT", f"/timers/{NOBODY}"),
    ("DELETE", f"/timers/{NOBODY}"),
    ("GET", "/metrics"),
    ("POST", "/clock"),
]
OPEN = ["/health", "/livez", "/readyz"]


def shaped(answer: bytes, status: int) -> dict[str, object]:
    """The body of a raw answer, which must have this status and the door's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"content-type: application/json" in head.lower()
    parsed: dict[str, object] = json.loads(body)
    assert set(parsed) == {"code", "message", "data"} and parsed["data"] is None and parsed["message"]
    return parsed


class TestKeys:
    @pytest.mark.parametrize(("method", "path"), LOCKED)
    @pytest.mark.parametrize(
        "headers",
        [
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
        ],
        ids=lambda headers: ",".join(headers) or "nothing",
    )
    def test_without_the_key_there_is_nothing(
        self, service: Duetime, method: str, path: str, headers: dict[str, str]
    ) -> None:
        answer = service.request(method, path, body=b"{", headers=headers, source=stranger())
        refused(answer, 401, 4, "^unauthorized$")
        assert KEY not in str(answer) and "wrong" not in str(answer.body)

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
    def test_with_it_there_is(self, service: Duetime, headers: dict[str, str]) -> None:
        success(service.request("GET", "/timers", headers=headers), 200, "success")
        assert service.request("GET", "/metrics", headers=headers).status == 200

    @pytest.mark.parametrize("path", OPEN)
    @pytest.mark.parametrize("headers", [{}, {"X-API-Key": "wrong"}])
    def test_some_paths_need_none(self, service: Duetime, path: str, headers: dict[str, str]) -> None:
        assert service.request("GET", path, headers=headers).status == 200

    def test_the_key_in_the_query_is_not_a_key(self, service: Duetime) -> None:
        refused(service.request("GET", f"/timers?api_key={KEY}&x-api-key={KEY}", headers={}), 401, 4, "unauthorized")

    def test_nothing_is_written_without_it(self, service: Duetime) -> None:
        before = service.total()
        body = {"execute_at": service.ahead(60), "callback_url": URL}
        refused(service.request("POST", "/timers", json=body, headers={}), 401, 4, "unauthorized")
        assert service.total() == before

    def test_the_key_is_not_logged(self, service: Duetime) -> None:
        wrong = {"X-API-Key": "a-wrong-key-that-somebody-mistyped"}
        service.request("GET", "/timers", headers=wrong, source=stranger())
        assert KEY not in service.stderr and "mistyped" not in service.stderr

    def test_without_keys_by_choice(self, alone: Callable[..., Duetime]) -> None:
        service = alone(bare=True, DUETIME_AUTH="none")
        success(service.request("GET", "/timers", headers={}), 200, "success")
        success(service.request("GET", "/timers", headers={"X-API-Key": "whatever"}), 200, "success")
        assert service.request("GET", "/metrics", headers={}).status == 200
        assert not (service.directory / "duetime.key").exists()


class TestPaths:
    @pytest.mark.parametrize(
        "path",
        [
            "/nothing",
            "/timers/" + NOBODY + "/",
            "/timers/" + NOBODY + "/replay",
            "/Timers",
            "//timers",
            "/timers/../health",
            "/health/",
            "/%ff",
            "/timers/%ff",
            "/timers/%F0%28%8C%28",
            "/%00",
            "/..%2f..%2fetc%2fpasswd",
            "/%2ftimers",
            "/timers%2f",
            "/%2Fmetrics",
            "/" + "x" * 5000,
        ],
        ids=lambda path: path[:30],
    )
    @pytest.mark.parametrize("method", ["GET", "POST", "PURGE"])
    def test_nothing_there(self, service: Duetime, method: str, path: str) -> None:
        answer = service.request(method, path)
        refused(answer, 404, 3, "^there is nothing at this path$")

    @pytest.mark.parametrize(
        "path", ["/api%2fv1/timers", "/api/v1%2Ftimers", "/ui%2Findex.html", "/api/v1/timers%2Fbatch"]
    )
    def test_an_escaped_slash_is_not_a_slash(self, service: Duetime, path: str) -> None:
        """A proxy in front that guards paths would not see it either."""
        assert service.request("GET", path, headers={"X-API-Key": KEY}).status == 404

    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            ("PUT", "/timers", "GET, POST"),
            ("DELETE", "/timers", "GET, POST"),
            ("PATCH", f"/timers/{NOBODY}", "DELETE, GET, PUT"),
            ("POST", f"/timers/{NOBODY}", "DELETE, GET, PUT"),
            ("OPTIONS", "/timers", "GET, POST"),
            ("POST", "/health", "GET"),
            ("DELETE", "/metrics", "GET"),
            ("POST", "/readyz", "GET"),
            ("TRACE", "/livez", "GET"),
        ],
    )
    def test_not_with_this_method(self, service: Duetime, method: str, path: str, allowed: str) -> None:
        answer = service.request(method, path)
        refused(answer, 405, 2, f"takes {allowed}$")
        assert answer.headers["allow"] == allowed

    @pytest.mark.parametrize("path", ["/timers", "/health", "/livez", "/readyz", "/metrics", f"/timers/{NOBODY}"])
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
    def test_nothing_but_files_is_kept_by_caches(
        self, service: Duetime, method: str, path: str, headers: dict[str, str]
    ) -> None:
        assert service.request(method, path, headers=headers).headers["cache-control"] == "no-store"

    def test_a_connection_serves_many_requests(self, service: Duetime) -> None:
        one = f"GET /timers?limit=1 HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
            for _ in range(3):
                connection.sendall(one)
                data = b""
                while b'"offset":0}}' not in data:
                    data += connection.recv(65536)
                assert data.startswith(b"HTTP/1.1 200 ")

    def test_requests_sent_ahead_are_answered_in_order(self, service: Duetime) -> None:
        one = b"GET %b HTTP/1.1\r\nHost: a\r\nConnection: %b\r\n\r\n"
        asked = [(b"/livez", b"keep-alive"), (b"/nothing", b"keep-alive"), (b"/readyz", b"close")]
        answer = service.raw(b"".join(one % each for each in asked))
        places = [answer.find(text) for text in (b'"alive"', b"nothing at this path", b'"ready"')]
        assert -1 not in places and places == sorted(places)


class TestNotHttp:
    @pytest.mark.parametrize(
        "message",
        [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # somebody speaks TLS
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
    def test_what_is_not_even_http(self, service: Duetime, message: bytes) -> None:
        message = message.replace(b"Host: a\r\n", b"Host: a\r\nX-API-Key: " + KEY.encode() + b"\r\n")
        assert shaped(service.raw(message), 400)["code"] == 2

    def test_half_a_request_is_no_request(self, service: Duetime) -> None:
        before = service.total()
        body = b'{"execute_at": "2999-01-01T00:00:00Z", "callback_url": "http://127.0.0.1:9/"}'
        head = f"POST /timers HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nContent-Length: {len(body) + 1}\r\n\r\n"
        service.raw(head.encode() + body, leave=True)  # a byte is missing, and then the client is gone
        service.raw(head.encode() + body[:20], leave=True)
        service.raw(head.encode()[:40], leave=True)
        assert service.request("GET", "/livez").status == 200
        assert service.total() == before

    def test_the_wish_for_a_web_socket_is_answered_like_any_other_get(self, service: Duetime) -> None:
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        headers = {"X-API-Key": KEY, "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", **upgrade}
        success(service.request("GET", "/timers", headers=headers), 200, "success")


class TestOperations:
    def test_alive_and_ready(self, service: Duetime) -> None:
        assert service.request("GET", "/livez").body == {"status": "alive"}
        assert service.request("GET", "/readyz").body["status"] == "ready"

    def test_metrics(self, alone: Callable[..., Duetime], receiver: Receiver) -> None:
        service = alone(virtual_clock=True)  # timers that others left might fire meanwhile

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

    def test_metrics_without_a_key_by_choice(self, alone: Callable[..., Duetime]) -> None:
        service = alone(DUETIME_METRICS_AUTH="none")
        assert service.request("GET", "/metrics", headers={}).status == 200
        refused(service.request("GET", "/timers", headers={}), 401, 4, "unauthorized")

    def test_there_is_no_clock_to_move_unless_asked_for(self, alone: Callable[..., Duetime]) -> None:
        service = alone()
        refused(service.request("GET", "/clock"), 404, 3, "nothing at this path")
        refused(service.request("POST", "/clock", json={"advance": "3d"}), 404, 3, "nothing at this path")

    @pytest.mark.parametrize("body", [{}, {"advance": "x"}, {"advance": 3}, {"advance": "-3s"}, {"advance": "40000d"}])
    def test_a_clock_moves_by_durations_only(self, service: Duetime, body: object) -> None:
        refused(service.request("POST", "/clock", json=body), 400, 2, "^advance ")

    def test_health_without_its_database(self, tmp_path: Path) -> None:
        # The first write to a damaged file ends the service, so its engine must rest while it is looked at.
        resting = {"TIMER_POLLING_INTERVAL": "60000", "DUETIME_LEASE_TTL": "5m"}
        with Duetime(tmp_path / "run", **resting) as service:
            yet = b"duetime_begin_seconds_count 0.0"
            until("the engine has looked", lambda: yet not in service.request("GET", "/metrics").body)
            for name in ("duetime.db", "duetime.db-wal"):
                with open(tmp_path / "run" / name, "r+b") as file:
                    file.write(b"\xff" * os.fstat(file.fileno()).st_size)
            refused(service.request("GET", "/timers"), 503, 1, "^database error")
            answer = service.request("GET", "/health", headers={})
            assert answer.status == 500, answer
            assert (answer.body["code"], answer.body["message"]) == (1, "database connection failed")
            data = answer.body["data"]
            assert (data["status"], data["database"]) == ("degraded", "disconnected") and instant(data["timestamp"])
