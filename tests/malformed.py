"""Malformed input of every kind, for both HTTP APIs.

``tests/unit/test_malformed.py`` sends all of it to every operation without a server; the tests in ``tests/doors`` send
some of each kind over HTTP.
"""

from __future__ import annotations

from typing import Any

URL = "http://127.0.0.1:9/hook"
AT = b'"execute_at": "2999-01-01T00:00:00Z"'
TO = b'"callback_url": "http://127.0.0.1:9/"'


def with_payload(payload: bytes) -> bytes:
    """A valid request of the platform API but for this payload."""
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
    "duplicate key, one of them escaped": with_payload(b'{"a": 1, "\\u0061": 2}'),
    "duplicate key deep inside": with_payload(b'[[{"x": {"b": 1, "c": "\\":", "b": 2}}]]'),
    "invalid utf-8": with_payload(b'"\xff"'),
    "overlong utf-8": with_payload(b'"\xc0\xaf"'),
    "utf-8 surrogate": with_payload(b'"\xed\xa0\x80"'),
    "truncated character": with_payload(b'"\xf0\x9f\x98"'),
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
METHODS = ["", "GET", "DELETE", "HEAD", "post", "POST ", "POST\r\n", "PÖST", "TRACE"]

KINDS = [
    *("empty", "array", "truncated", "byte order mark", "NaN", "huge exponent", "duplicate key", "invalid utf-8"),
    *("lone surrogate", "escaped nul", "depth 65", "depth 100,000 and open"),
]
"""One case of ``NOT_JSON`` for each kind of error."""

# The HTTP v1 API.

WITH_BODY = [
    *(("POST", f"/timers{rest}") for rest in ("", "/create", "/batch", "/get", "/update", "/delete", "/replay")),
    *(("PUT", "/timers/default/there"), ("POST", "/namespaces"), ("PATCH", "/namespaces/default")),
]
CREATE_PATHS = ["/timers", "/timers/create"]
PATH_FIELDS = ("namespace", "groupId", "id", "timerId")
"""Fields that an update takes from its path."""
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


def in_camel_case(body: bytes) -> bytes:
    """The body with the field names of the HTTP v1 API."""
    for snake, camel in ((b"execute_at", b"executeAt"), (b"callback_url", b"callbackUrl"), (b"callback_", b"")):
        body = body.replace(snake, camel)
    return body
