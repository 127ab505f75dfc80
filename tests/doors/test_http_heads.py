"""Invalid heads of requests: both HTTP APIs reject them in their own format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers import KEY, Duetime

PATHS = ("/timers", "/api/v1/timers", "/api/v1/timers/batch")
HOST = b"Host: a\r\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duetime]:
    with Duetime(tmp_path_factory.mktemp("heads")) as running:
        yield running


def send(service: Duetime, path: str, headers: bytes, body: bytes = b"{}") -> tuple[int, Any]:
    request = b"POST %b HTTP/1.1\r\nX-API-Key: %b\r\nConnection: close\r\n%b" % (path.encode(), KEY.encode(), headers)
    if b"Content-Length" not in headers:
        request += b"Content-Length: %d\r\n" % len(body)
    head, _, answer = service.raw(request + b"\r\n" + body).partition(b"\r\n\r\n")
    return int(head[9:12]), json.loads(answer)


def refused(path: str, answer: Any, code: str, words: str) -> None:
    """Assert that the error contains the words, in the format of the API that has the path."""
    assert words in answer["message"], answer
    if path.startswith("/api/"):
        assert answer["error"] == code and answer.keys() == {"error", "message", "details", "timestamp"}
    else:
        assert answer["code"] == 2 and answer.keys() == {"code", "message", "data"}


@pytest.mark.parametrize("path", PATHS)
class TestHeads:
    @pytest.mark.parametrize("host", [b"", HOST * 2, b"Host: a b\r\n", b"Host: a/b\r\n", b"Host:\r\n"])
    def test_missing_duplicate_or_invalid_host_is_rejected(self, service: Duetime, path: str, host: bytes) -> None:
        status, answer = send(service, path, host)
        assert status == 400
        refused(path, answer, "INVALID_INPUT", "Host")

    @pytest.mark.parametrize("digits", [19, 4_300, 20_000])
    def test_content_length_of_many_digits_is_rejected(self, service: Duetime, path: str, digits: int) -> None:
        status, answer = send(service, path, HOST + b"Content-Length: %b2\r\n" % (b"0" * (digits - 1)))
        assert status == 400
        refused(path, answer, "INVALID_INPUT", "Content-Length")

    @pytest.mark.parametrize("coding", [b"gzip", b"GZIP", b"br", b"deflate, gzip", b"zstd", b"x"])
    def test_compressed_body_is_rejected(self, service: Duetime, path: str, coding: bytes) -> None:
        status, answer = send(service, path, HOST + b"Content-Encoding: %b\r\n" % coding)
        assert status == 415
        refused(path, answer, "UNSUPPORTED_ENCODING", f"Content-Encoding: {coding.decode()}")

    @pytest.mark.parametrize("coding", [b"identity", b"Identity", b""])
    def test_content_encoding_identity_is_accepted(self, service: Duetime, path: str, coding: bytes) -> None:
        status, answer = send(service, path, HOST + b"Content-Encoding: %b\r\n" % coding)
        assert status == 400 and "Encoding" not in answer["message"]

    def test_missing_key_is_rejected_before_the_encoding(self, service: Duetime, path: str) -> None:
        request = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Encoding: gzip\r\n"
        assert service.raw(f"{request}Content-Length: 2\r\n\r\n{{}}".encode()).startswith(b"HTTP/1.1 401 ")
