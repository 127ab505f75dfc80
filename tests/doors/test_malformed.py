"""Malformed input of every kind: a 4xx in the door's shape that names the field, and nothing written."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.doors.shape import NOBODY, URL, refused
from tests.servers import KEY, Duetime

AT = b'"execute_at": "2999-01-01T00:00:00Z"'
TO = b'"callback_url": "http://127.0.0.1:9/"'


def with_payload(payload: bytes) -> bytes:
    return b"{" + AT + b", " + TO + b', "callback_payload": ' + payload + b"}"


NOT_JSON = {
    "empty": b"",
    "blank": b" \n\t ",
    "array": b"[]",
    "array of timers": b"[" + with_payload(b"1") + b"]",
    "string": b'"execute_at"',
    "number": b"5",
    "null": b"null",
    "true": b"true",
    "truncated": with_payload(b"1")[:-1],
    "truncated string": b'{"execute_at": "2999',
    "truncated escape": b'{"execute_at": "\\u00',
    "trailing comma": b"{" + AT + b", " + TO + b",}",
    "trailing garbage": with_payload(b"1") + b"x",
    "two documents": with_payload(b"1") * 2,
    "single quotes": with_payload(b"'x'"),
    "no quotes": b'{execute_at: "2999-01-01T00:00:00Z"}',
    "comment": with_payload(b"1 /* one */"),
    "byte order mark": b"\xef\xbb\xbf" + with_payload(b"1"),
    "utf-16": with_payload(b"1").decode().encode("utf-16"),
    "form": b"execute_at=2999-01-01T00%3A00%3A00Z",
    "xml": b"<timer/>",
    "nul": with_payload(b"1\x00"),
    "only nul": b"\x00",
    "NaN": with_payload(b"NaN"),
    "Infinity": with_payload(b"[Infinity]"),
    "-Infinity": with_payload(b"-Infinity"),
    "hex": with_payload(b"0x10"),
    "leading zero": with_payload(b"010"),
    "plus": with_payload(b"+1"),
    "half a fraction": with_payload(b"1."),
    "no whole": with_payload(b".5"),
    "huge exponent": with_payload(b"1e309"),
    "huge negative exponent number": with_payload(b"-1e999999999"),
    "huge integer": with_payload(b"9" * 310),
    "huge integer inside": with_payload(b'[{"a": -' + b"9" * 400 + b"}]"),
    "duplicate key": b"{" + AT + b", " + TO + b", " + TO + b"}",
    "duplicate key inside": with_payload(b'{"a": 1, "a": 1}'),
    "duplicate key in disguise": with_payload(b'{"a": 1, "\\u0061": 2}'),
    "duplicate key deep inside": with_payload(b'[[{"x": {"b": 1, "c": "\\":", "b": 2}}]]'),
    "invalid utf-8": with_payload(b'"\xff"'),
    "overlong utf-8": with_payload(b'"\xc0\xaf"'),
    "utf-8 surrogate": with_payload(b'"\xed\xa0\x80"'),
    "half a character": with_payload(b'"\xf0\x9f\x98"'),
    "invalid utf-8 in a key": with_payload(b'{"\xfe": 1}'),
    "lone surrogate": with_payload(b'"\\ud800"'),
    "lone low surrogate": with_payload(b'"\\udc00"'),
    "surrogates the wrong way round": with_payload(b'"\\udc00\\ud800"'),
    "lone surrogate in a key": with_payload(b'{"\\ud83d": 1}'),
    "escaped nul": with_payload(b'"\\u0000"'),
    "escaped nul in a key": with_payload(b'{"\\u0000": 1}'),
    "escaped nul behind a backslash": with_payload(b'"\\\\\\u0000"'),
    "bad escape": with_payload(b'"\\x41"'),
    "raw newline in a string": with_payload(b'"a\nb"'),
    "raw control character": with_payload(b'"\x01"'),
    "depth 65": with_payload(b"[" * 64 + b"]" * 64),
    "depth 65 of objects": with_payload(b'{"a":' * 64 + b"1" + b"}" * 64),
    "depth 65 in an unknown field": b'{"x": ' + b"[" * 64 + b"]" * 64 + b", " + AT + b", " + TO + b"}",
    "depth 10,000": with_payload(b"[" * 10_000 + b"]" * 10_000),
    "depth 100,000 and open": b"[" * 100_000,
}


@pytest.fixture
def unchanged(service: Duetime) -> Iterator[Duetime]:
    """The service, which must not have one timer more or less at the end of the test."""
    before = service.total()
    yield service
    assert service.total() == before


@pytest.fixture(scope="module")
def pending(service: Duetime) -> str:
    return service.create(URL, seconds=10**8)


class TestBodies:
    @pytest.mark.parametrize("name", NOT_JSON)
    def test_what_is_not_the_json_of_a_timer(self, unchanged: Duetime, name: str) -> None:
        refused(unchanged.request("POST", "/timers", body=NOT_JSON[name]), 400, 2, "^body ")

    @pytest.mark.parametrize("name", NOT_JSON)
    def test_not_even_for_an_update(self, service: Duetime, pending: str, name: str) -> None:
        before = service.get(pending)
        refused(service.request("PUT", f"/timers/{pending}", body=NOT_JSON[name]), 400, 2, "^body ")
        assert service.get(pending) == before

    def test_what_is_just_inside(self, service: Duetime) -> None:
        for payload in (b"[" * 63 + b"]" * 63, b"1e308", b"9" * 308, b'"\\\\u0000"', b'{"a": {"a": 1}}'):
            answer = service.request("POST", "/timers", body=with_payload(payload))
            assert answer.status == 201, (payload, answer)


WRONG_TYPES: dict[str, list[Any]] = {
    "execute_at": [5, 5.5, True, [], {}, ["2999-01-01T00:00:00Z"], 4102444800],
    "callback_url": [5, True, [], {}, [URL]],
    "callback_method": [5, False, ["POST"], {}],
    "callback_headers": [5, "X-A: b", True, [], [["a", "b"]], {"X-A": 1}, {"X-A": None}, {"X-A": ["a"]}],
    "retry_policy": [5, "none", True, []],
    "callback": [5, "nats", True, [], {}, {"topic": "a"}, {"type": 5}],
    "idempotency_key": [5, True, [], {}],
}
TIMES = [
    "",
    " ",
    "now",
    "tomorrow",
    "5s",
    "4102444800",
    "2999-01-01",
    "2999-01-01T00:00:00",
    "2999-01-01 00:00:00Z",
    "2999-01-01T00:00Z",
    "2999-01-01T00Z",
    "2999-01-01T24:00:00Z",
    "2999-01-01T00:60:00Z",
    "2999-01-01T00:00:60Z",
    "2999-02-30T00:00:00Z",
    "2999-13-01T00:00:00Z",
    "2999-00-01T00:00:00Z",
    "2999-W01-1T00:00:00Z",
    "2999-001T00:00:00Z",
    "29990101T000000Z",
    "10000-01-01T00:00:00Z",
    "+12999-01-01T00:00:00Z",
    "-2999-01-01T00:00:00Z",
    "99999999-01-01T00:00:00Z",
    "9999-12-31T23:59:59-01:00",
    "0000-01-01T00:00:00Z",
    "1969-12-31T23:59:59Z",
    "2999-01-01T00:00:00+25:00",
    "2999-01-01T00:00:00+00:60",
    "2999-01-01T00:00:00 +00:00",
    "2999-01-01T00:00:00UTC",
    "2999-01-01T00:00:00.Z",
    "2999-01-01T00:00:00,5Z",
    "2999-01-01T00:00:00.0000000000Z",
    "2999-01-01T00:00:00Z\n",
    " 2999-01-01T00:00:00Z",
    "2999-01-01T00:00:00ZZ",
    "٢٩٩٩-01-01T00:00:00Z",
    "2999‐01‐01T00:00:00Z",
    "Thu, 01 Jan 2999 00:00:00 GMT",
    "9" * 10_000,
]
URLS = [
    "",
    " ",
    "hook",
    "/hook",
    "//127.0.0.1/hook",
    "127.0.0.1/hook",
    "localhost:9",
    "http:",
    "http:/127.0.0.1/",
    "http://",
    "http:///hook",
    "http://:80/",
    "http://?a",
    "http://#a",
    "ftp://127.0.0.1/",
    "file:///etc/passwd",
    "gopher://127.0.0.1/",
    "javascript:alert(1)",
    "unix:///run/docker.sock",
    "http+unix://%2Frun%2Fdocker.sock/",
    "nats://127.0.0.1/",
    " http://127.0.0.1/",
    "http://127.0.0.1/ ",
    "http://127.0.0.1/a b",
    "http://127.0.0.1/\r\nX: y",
    "http://127.0.0.1/\t",
    "http://127.0.0.1/\x7f",
    "ht\ntp://127.0.0.1/",
    "http://127.0.0.1\\@example.com/",
    "http:\\\\127.0.0.1\\",
    "http://user@127.0.0.1/",
    "http://user:password@127.0.0.1/",
    "http://@127.0.0.1/",
    "http://127.0.0.1:0/",
    "http://127.0.0.1:65536/",
    "http://127.0.0.1:-1/",
    "http://127.0.0.1:80x/",
    "http://127.0.0.1:/",
    "http://127.0.0.1:080/",
    "http://127.0.0.1:80:80/",
    "http://[::1/",
    "http://::1/",
    "http://[::1%25lo]/",
    "http://[::1]x/",
    "http://[127.0.0.1]/",
    "http://exa mple.com/",
    "http://exa%6dple.com/",
    "http://.example.com/",
    "http://example..com/",
    "http://" + "a" * 64 + ".com/",
    "http://" + "a." * 127 + "com/",
    "http://münchen.example/",
    "http://ｅxample.com/",
    "http://127。0。0。1/",
    "http://127.0.0.1/é",
    "http://127.0.0.1/" + "a" * 2032,
]
HEADERS: list[dict[str, str]] = [
    {"": "a"},
    {" ": "a"},
    {"X A": "a"},
    {"X-A ": "a"},
    {"X-A:": "a"},
    {"X-A\r\nX-B": "a"},
    {"X-A\n": "a"},
    {"X\x7f": "a"},
    {"Ä": "a"},
    {"X(A)": "a"},
    {"X-A": "a\r\nX-B: b"},
    {"X-A": "a\nb"},
    {"X-A": "a\rb"},
    {"X-A": "\x01"},
    {"X-A": "\x7f"},
    {"X-A": "€"},
    {"X-A": "a", "x-a": "b"},
    {f"X-{n}": "a" for n in range(65)},
    {"X-A": "a" * 17_000},
    *(
        {name: "1"}
        for name in (
            *("Host", "host", "HOST", "Content-Length", "content-length", "Transfer-Encoding", "Connection"),
            *("Keep-Alive", "TE", "Trailer", "Upgrade", "Expect", "Proxy-Connection"),
            *("webhook-id", "Webhook-Id", "webhook-timestamp", "webhook-signature", "WEBHOOK-SIGNATURE"),
            *("duetime-attempt", "Duetime-Timer", "duetime-anything", "traceparent"),
        )
    ),
]


def shown(value: object) -> str:
    return repr(value)[:40]


class TestFields:
    @pytest.mark.parametrize(
        ("field", "value"), [(field, value) for field, values in WRONG_TYPES.items() for value in values], ids=shown
    )
    def test_wrong_types(self, unchanged: Duetime, field: str, value: Any) -> None:
        body = {"execute_at": "2999-01-01T00:00:00Z", "callback_url": URL, field: value}
        refused(unchanged.request("POST", "/timers", json=body), 400, 2, f"^{field}")

    @pytest.mark.parametrize("text", TIMES, ids=shown)
    def test_times(self, unchanged: Duetime, text: str) -> None:
        body = {"execute_at": text, "callback_url": URL}
        refused(unchanged.request("POST", "/timers", json=body), 400, 2, "^execute_at ")

    @pytest.mark.parametrize("url", URLS, ids=shown)
    def test_urls(self, unchanged: Duetime, url: str) -> None:
        body = {"execute_at": "2999-01-01T00:00:00Z", "callback_url": url}
        refused(unchanged.request("POST", "/timers", json=body), 400, 2, "^callback_url ")

    def test_the_longest_url(self, service: Duetime) -> None:
        url = "http://127.0.0.1:9/".ljust(2048, "a")
        assert service.get(service.create(url, seconds=10**8))["callback_url"] == url

    @pytest.mark.parametrize("method", ["", "GET", "DELETE", "HEAD", "post", "POST ", "POST\r\n", "PÖST", "TRACE"])
    def test_methods(self, unchanged: Duetime, method: str) -> None:
        body = {"execute_at": "2999-01-01T00:00:00Z", "callback_url": URL, "callback_method": method}
        refused(unchanged.request("POST", "/timers", json=body), 400, 2, "^callback_method must be POST, PUT or PATCH")

    @pytest.mark.parametrize("headers", HEADERS, ids=shown)
    def test_headers(self, unchanged: Duetime, headers: dict[str, str]) -> None:
        body = {"execute_at": "2999-01-01T00:00:00Z", "callback_url": URL, "callback_headers": headers}
        answer = unchanged.request("POST", "/timers", json=body)
        refused(answer, 400, 2, "^callback_headers ")
        assert not set("\r\n\0") & set(answer.body["message"]) and len(answer.body["message"]) < 300


LIMIT = 256 * 1024


class TestSizes:
    @staticmethod
    def of_size(size: int) -> bytes:
        return with_payload(b'"' + b"x" * (size - len(with_payload(b'""'))) + b'"')

    def test_the_limit_is_inside(self, service: Duetime) -> None:
        assert len(self.of_size(LIMIT)) == LIMIT
        assert service.request("POST", "/timers", body=self.of_size(LIMIT)).status == 201

    @pytest.mark.parametrize("method", ["POST", "PUT"])
    @pytest.mark.parametrize("size", [LIMIT + 1, 2 * LIMIT])
    def test_announced(self, unchanged: Duetime, method: str, size: int) -> None:
        path = "/timers" if method == "POST" else f"/timers/{NOBODY}"
        refused(unchanged.request(method, path, body=self.of_size(size)), 413, 2, f"^body is larger than {LIMIT}")

    def test_announced_and_never_sent(self, unchanged: Duetime) -> None:
        """The answer comes before the body does."""
        head = f"POST /timers HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nContent-Length: 999999999999\r\n\r\n"
        with socket.create_connection(("127.0.0.1", unchanged.port), timeout=30) as connection:
            connection.sendall(head.encode())
            assert connection.recv(65536).startswith(b"HTTP/1.1 413 ")

    @pytest.mark.parametrize("size", [LIMIT + 1, 3 * LIMIT])
    def test_in_chunks(self, unchanged: Duetime, size: int) -> None:
        head = f"POST /timers HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nTransfer-Encoding: chunked\r\n"
        body = self.of_size(size)
        pieces = [body[at : at + 50_000] for at in range(0, size, 50_000)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        answer = unchanged.raw(f"{head}Connection: close\r\n\r\n".encode() + chunks)
        assert answer.startswith(b"HTTP/1.1 413 "), answer[:200]
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == 2

    def test_chunks_are_as_good_as_a_length(self, service: Duetime) -> None:
        head = f"POST /timers HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nTransfer-Encoding: chunked\r\n"
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in with_payload(b'{"in": "chunks"}')) + b"0\r\n\r\n"
        answer = service.raw(f"{head}Connection: close\r\n\r\n".encode() + chunks)
        assert answer.startswith(b"HTTP/1.1 201 "), answer

    def test_without_the_key_no_body_is_read(self, service: Duetime) -> None:
        head = b"POST /timers HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n"
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
            connection.sendall(head)
            assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")
