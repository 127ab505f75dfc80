"""Some malformed input of each kind over HTTP: the platform API responds 4xx, names the field and writes nothing.

``tests/unit/test_malformed.py`` sends every malformed input to every operation.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.doors.platform import UNKNOWN_ID, URL, refused
from tests.malformed import KINDS, METHODS, NOT_JSON, TIMES, URLS, WRONG_TYPES, with_payload
from tests.servers import KEY, Duetime


@pytest.fixture
def unchanged(service: Duetime) -> Iterator[Duetime]:
    """The service; its number of timers must be the same after the test."""
    before = service.total()
    yield service
    assert service.total() == before


@pytest.fixture(scope="module")
def pending(service: Duetime) -> str:
    return service.create(URL, seconds=10**8)


class TestBodies:
    @pytest.mark.parametrize("name", KINDS)
    def test_create_rejects_malformed_json(self, unchanged: Duetime, name: str) -> None:
        refused(unchanged.request("POST", "/timers", body=NOT_JSON[name]), 400, 2, "^body ")

    @pytest.mark.parametrize("name", KINDS)
    def test_update_rejects_malformed_json(self, service: Duetime, pending: str, name: str) -> None:
        before = service.get(pending)
        refused(service.request("PUT", f"/timers/{pending}", body=NOT_JSON[name]), 400, 2, "^body ")
        assert service.get(pending) == before

    def test_payloads_at_the_limits_are_accepted(self, service: Duetime) -> None:
        for payload in (b"[" * 63 + b"]" * 63, b"1e308", b"9" * 308, b'"\\\\u0000"', b'{"a": {"a": 1}}'):
            answer = service.request("POST", "/timers", body=with_payload(payload))
            assert answer.status == 201, (payload, answer)


def shown(value: object) -> str:
    return repr(value)[:40]


class TestFields:
    @pytest.mark.parametrize(
        ("field", "value"), [(field, values[0]) for field, values in WRONG_TYPES.items()], ids=shown
    )
    def test_wrong_types_are_rejected(self, unchanged: Duetime, field: str, value: Any) -> None:
        body = {"execute_at": "2999-01-01T00:00:00Z", "callback_url": URL, field: value}
        refused(unchanged.request("POST", "/timers", json=body), 400, 2, f"^{field}")

    @pytest.mark.parametrize("text", [TIMES[0], TIMES[-1]], ids=shown)
    def test_malformed_times_are_rejected(self, unchanged: Duetime, text: str) -> None:
        body = {"execute_at": text, "callback_url": URL}
        refused(unchanged.request("POST", "/timers", json=body), 400, 2, "^execute_at ")

    @pytest.mark.parametrize("url", [URLS[0], URLS[-1]], ids=shown)
    def test_malformed_urls_are_rejected(self, unchanged: Duetime, url: str) -> None:
        body = {"execute_at": "2999-01-01T00:00:00Z", "callback_url": url}
        refused(unchanged.request("POST", "/timers", json=body), 400, 2, "^callback_url ")

    def test_longest_url_is_accepted(self, service: Duetime) -> None:
        url = "http://127.0.0.1:9/".ljust(2048, "a")
        assert service.get(service.create(url, seconds=10**8))["callback_url"] == url

    @pytest.mark.parametrize("method", METHODS[:2])
    def test_other_methods_are_rejected(self, unchanged: Duetime, method: str) -> None:
        body = {"execute_at": "2999-01-01T00:00:00Z", "callback_url": URL, "callback_method": method}
        refused(
            unchanged.request("POST", "/timers", json=body),
            400,
            2,
            "^callback_method must be one of PATCH, POST, PUT, not ",
        )

    @pytest.mark.parametrize("headers", [{"X-A": "a\r\nX-B: b"}, {"Host": "1"}], ids=shown)
    def test_malformed_headers_are_rejected(self, unchanged: Duetime, headers: dict[str, str]) -> None:
        body = {"execute_at": "2999-01-01T00:00:00Z", "callback_url": URL, "callback_headers": headers}
        answer = unchanged.request("POST", "/timers", json=body)
        refused(answer, 400, 2, "^callback_headers ")
        assert not set("\r\n\0") & set(answer.body["message"]) and len(answer.body["message"]) < 300


LIMIT = 256 * 1024


class TestSizes:
    @staticmethod
    def of_size(size: int) -> bytes:
        return with_payload(b'"' + b"x" * (size - len(with_payload(b'""'))) + b'"')

    def test_body_of_the_largest_size_is_accepted(self, service: Duetime) -> None:
        assert len(self.of_size(LIMIT)) == LIMIT
        assert service.request("POST", "/timers", body=self.of_size(LIMIT)).status == 201

    @pytest.mark.parametrize("method", ["POST", "PUT"])
    @pytest.mark.parametrize("size", [LIMIT + 1, 2 * LIMIT])
    def test_body_with_a_too_large_content_length_is_rejected(self, unchanged: Duetime, method: str, size: int) -> None:
        path = "/timers" if method == "POST" else f"/timers/{UNKNOWN_ID}"
        refused(unchanged.request(method, path, body=self.of_size(size)), 413, 2, f"^body is larger than {LIMIT}")

    def test_too_large_content_length_is_rejected_before_the_body_arrives(self, unchanged: Duetime) -> None:
        head = f"POST /timers HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nContent-Length: 999999999999\r\n\r\n"
        with socket.create_connection(("127.0.0.1", unchanged.port), timeout=30) as connection:
            connection.sendall(head.encode())
            assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")

    @pytest.mark.parametrize("size", [LIMIT + 1, 3 * LIMIT])
    def test_too_large_chunked_body_is_rejected(self, unchanged: Duetime, size: int) -> None:
        head = f"POST /timers HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nTransfer-Encoding: chunked\r\n"
        body = self.of_size(size)
        pieces = [body[at : at + 50_000] for at in range(0, size, 50_000)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        answer = unchanged.raw(f"{head}Connection: close\r\n\r\n".encode() + chunks)
        assert answer.startswith(b"HTTP/1.1 413 "), answer[:200]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == 2

    def test_chunked_body_is_accepted(self, service: Duetime) -> None:
        head = f"POST /timers HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nTransfer-Encoding: chunked\r\n"
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in with_payload(b'{"in": "chunks"}')) + b"0\r\n\r\n"
        answer = service.raw(f"{head}Connection: close\r\n\r\n".encode() + chunks)
        assert answer.startswith(b"HTTP/1.1 201 "), answer

    def test_missing_key_is_rejected_before_the_body_arrives(self, service: Duetime) -> None:
        head = b"POST /timers HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
            connection.sendall(head)
            assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")
