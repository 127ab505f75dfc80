"""Thousands of mutated requests to the platform API: every error has its format, and none is a 5xx.

A failure prints the seed, which ``DUETIME_FUZZ_SEED`` sets; ``DUETIME_FUZZ_ROUNDS`` sets the number of requests.
"""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Iterator

import pytest

from tests.doors.platform import UNKNOWN_ID
from tests.servers import KEY, Duetime

ROUNDS = int(os.environ.get("DUETIME_FUZZ_ROUNDS", "2000"))
SEED = int(os.environ.get("DUETIME_FUZZ_SEED") or random.SystemRandom().randrange(2**32))

VALUES = [
    *(b"null", b"true", b"0", b"-1", b"1e400", b"9" * 400, b"1.5", b'""', b'"x"', b"[]", b"{}", b"[[[]]]", b"NaN"),
    *(b'"2999-01-01T00:00:00Z"', b'"2999-01-01T00:00:00"', b'"http://127.0.0.1:9/"', b'"http://[::1"', b'"POST"'),
    *(b'{"X-A": "b"}', b'{"Host": "b"}', b'{"A\\n": "\\r"}', b'{"max_retries": 2}', b'{"max_retries": 1e99}'),
    *(b'"\\ud800"', b'"\\u0000"', b'"\xff"', b'"' + b"a" * 3000 + b'"', b"[" * 70 + b"]" * 70, b'{"a":1,"a":2}'),
    *(b'{"type": "nats", "topic": "a"}', b'"key"', b'"30s"'),
]
FIELDS = [
    *(b"execute_at", b"callback_url", b"callback_method", b"callback_headers", b"callback_payload", b"metadata"),
    *(b"retry_policy", b"callback", b"idempotency_key", b"id", b"status", b""),
]
QUERIES = ["status", "limit", "offset", "sort", "order", "x"]
TEXTS = ["", "pending", "1", "0", "201", "-1", "asc", "desc", "created_at", "execute_at", "%00", "%ff", "%", "&", "="]


def body_for(draw: random.Random) -> bytes:
    fields = {b"execute_at": b'"2999-01-01T00:00:00Z"', b"callback_url": b'"http://127.0.0.1:9/"'}
    for _ in range(draw.randrange(4)):
        fields[draw.choice(FIELDS)] = draw.choice(VALUES)
    body = b"{" + b", ".join(b'"%b": %b' % pair for pair in fields.items()) + b"}"
    return mangled(draw, body) if draw.random() < 0.4 else body


def mangled(draw: random.Random, data: bytes) -> bytes:
    """Cut, repeat or replace a few bytes, or insert some."""
    for _ in range(draw.randrange(1, 4)):
        at, to = sorted(draw.randrange(len(data) + 1) for _ in range(2))
        to = min(to, at + 20)
        what = draw.randrange(5)
        if what == 0:
            data = data[:at] + data[to:]
        elif what == 1:
            data = data[:at] + draw.randbytes(draw.randrange(4)) + data[at:]
        elif what == 2:
            data = data[:to] + data[at:]
        elif what == 3:
            data = data[:at] + draw.choice((b"\x00", b"\r\n", b'"', b"\\", b"{", b"\xc3", b":", b" ")) + data[to:]
        else:
            data = data[:at]
    return data


def request_for(draw: random.Random, ids: list[str]) -> bytes:
    method = draw.choice(["POST"] * 4 + ["GET", "GET", "PUT", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW"])
    id = draw.choice([*ids, UNKNOWN_ID, "x", "", "%00", "%ff", "a" * 300])
    path = draw.choice(["/timers"] * 3 + [f"/timers/{id}"] * 3 + ["/health", "/metrics", "/livez", "/nothing", "/%ff"])
    if draw.random() < 0.3:
        path += "?" + "&".join(
            f"{draw.choice(QUERIES)}={draw.choice(TEXTS)}" for _ in range(draw.choice((1, 1, 2, 3, 70)))
        )
    body = body_for(draw) if method in ("POST", "PUT", "PATCH") or draw.random() < 0.1 else b""
    key = draw.choice([KEY] * 9 + ["", "wrong"])
    lines = [f"{method} {path} HTTP/1.1", "Host: a", f"X-API-Key: {key}", "Connection: close"]
    if draw.random() < 0.1:
        lines.append(draw.choice(["X: \x00", "Expect: 100-continue", "Transfer-Encoding: chunked", "A" * 2000 + ": b"]))
    lines.append(f"Content-Length: {len(body) if draw.random() < 0.95 else draw.randrange(400)}")
    message = "\r\n".join([*lines, "", ""]).encode() + body
    return mangled(draw, message) if draw.random() < 0.1 else message


def answers_of(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """The status, head and body of each response in the received bytes."""
    while data:
        head, blank, rest = data.partition(b"\r\n\r\n")
        assert blank and head.startswith(b"HTTP/1.1 "), data[:300]
        status = int(head[9:12])
        lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        length = int(lengths[0]) if lengths and status != 100 else 0
        if rest.startswith(b"HTTP/1.1 "):
            length = 0  # a response to HEAD, followed by another response
        yield status, head, rest[:length]
        data = rest[length:]


def exchange(port: int, message: bytes) -> bytes:
    """Send the bytes and read until 0.1 s of silence: a mangled request may be incomplete and get no response."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        pieces = []
        try:
            connection.sendall(message)
            connection.settimeout(0.1)
            while piece := connection.recv(65536):
                pieces.append(piece)
        except (ConnectionError, TimeoutError):
            pass
        return b"".join(pieces)


def test_mutated_requests_get_well_formed_responses_and_no_5xx(tmp_path_factory: pytest.TempPathFactory) -> None:
    print(f"DUETIME_FUZZ_SEED={SEED}")
    draw = random.Random(SEED)
    seen: dict[int, int] = {}
    with Duetime(tmp_path_factory.mktemp("fuzz")) as service:
        ids = [service.create("http://127.0.0.1:9/", seconds=10**8) for _ in range(5)]
        made, silent = len(ids), 0
        for round in range(ROUNDS):
            message = request_for(draw, ids)
            where = f"seed {SEED}, round {round}: {message[:2000]!r}"
            received = exchange(service.port, message)
            silent += not received
            for status, head, body in answers_of(received):
                seen[status] = seen.get(status, 0) + 1
                assert status < 500, f"{where}\n{head!r}\n{body!r}"
                made += status == 201
                if status >= 400 and body:
                    parsed = json.loads(body)
                    assert set(parsed) == {"code", "message", "data"}, where
                    assert parsed["code"] in (2, 3, 4) and parsed["data"] is None and parsed["message"], where
                    assert KEY not in body.decode(), where
        assert service.request("GET", "/health").status == 200
        assert made <= service.total() <= made + silent
        assert "Traceback" not in service.stderr, service.stderr
        assert service.terminate() == 0
    # Proves that the mutations reach all these cases.
    assert {200, 201, 400, 401, 404, 405} <= set(seen), seen
