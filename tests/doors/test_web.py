"""The files of the web page: all are served unchanged and without a key, and no other files are."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from duetime.doors.web import FOLDER, HELLO, TYPES, WebDoor
from tests.doors.http_v1 import failure
from tests.servers import KEY, Duetime

FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())
PLAIN = "default-src 'none'; frame-ancestors 'none'"
PAGE = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)


def get(service: Duetime, path: str, **headers: str) -> tuple[int, dict[str, str], object]:
    answer = service.request("GET", path, headers={n.replace("_", "-"): value for n, value in headers.items()})
    return answer.status, answer.headers, answer.body


@pytest.mark.parametrize("name", FILES)
def test_file_is_served_unchanged_with_its_type(service: Duetime, name: str) -> None:
    content = (FOLDER / name).read_bytes()
    answer = service.request("GET", f"/ui/{name}", headers={})
    assert answer.status == 200 and int(answer.headers["content-length"]) == len(content)
    assert answer.headers["content-type"] == TYPES.get(Path(name).suffix, "text/plain; charset=utf-8")
    assert answer.headers["content-security-policy"] == (PAGE if name.endswith(".html") else PLAIN)
    assert answer.headers["cache-control"] == "no-cache"


def test_page_is_served_at_the_root(service: Duetime) -> None:
    status, headers, body = get(service, "/")
    assert status == 200 and body == (FOLDER / "index.html").read_bytes()
    assert headers["content-type"] == "text/html; charset=utf-8" and headers["content-security-policy"] == PAGE
    assert service.request("HEAD", "/", headers={}).headers["content-length"] == headers["content-length"]
    answer = service.request("POST", "/", headers={})
    failure(answer, 405, "METHOD_NOT_ALLOWED")


def test_service_has_a_receiver_for_first_timers(service: Duetime) -> None:
    assert service.request("POST", HELLO, json={"payload": 1}, headers={}).status == 200
    failure(service.request("POST", HELLO, json={"payload": "x" * 5000}, headers={}), 413, "PAYLOAD_TOO_LARGE")


def test_unchanged_file_is_not_sent_again(service: Duetime) -> None:
    etag = get(service, "/")[1]["etag"]
    for known in (etag, f'"other", W/{etag}'):
        status, headers, body = get(service, "/", If_None_Match=known)
        assert (status, body, headers["etag"]) == (304, b"", etag)
        assert "content-length" not in headers and headers["content-security-policy"] == PAGE
    assert get(service, "/", If_None_Match='"other"')[0] == 200


@pytest.mark.parametrize(
    "path", ["/ui", "/ui/", "/ui/nothing.js", "/ui/../web.py", "/ui/%2e%2e/web.py", "/ui//index.html"]
)
def test_other_paths_are_not_found(service: Duetime, path: str) -> None:
    assert get(service, path)[0] == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(
            ("GET", path)
            for path in ("/", "/docs", "/api/v1/openapi.json", "/session", "/health", "/livez", "/metrics")
        ),
        *(("GET", path) for path in ("/timers", "/timers/x", "/nothing", "/api/nothing", "/api/v1/timers", "/clock")),
        *(("GET", path) for path in ("/api/v1/overview", "/api/v1/timers/count", "/api/v1/timers?limit=x")),
        *(("POST", path) for path in ("/timers", "/api/v1/timers", "/session", "/", "/api/v1/timers/replay")),
        *(("DELETE", path) for path in ("/session", "/timers", "/api/v1/timers/default/x")),
    ],
)
@pytest.mark.parametrize("headers", [{}, {"X-API-Key": KEY}], ids=["without the key", "with the key"])
def test_every_response_has_restrictive_security_headers(
    service: Duetime, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = service.request(method, path, body=b"{}", headers=headers)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "*" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_response_to_malformed_http_has_security_headers(service: Duetime) -> None:
    head = service.raw(b"nonsense\r\n\r\n").lower()
    assert b"nosniff" in head and b"content-security-policy: default-src 'none'" in head


def test_files_are_read_once_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html>")
    (tmp_path / "below").mkdir()
    (tmp_path / "below/a.js").write_text("1")
    (tmp_path / ".hidden").write_text("2")
    door = WebDoor(refusal=lambda error: pytest.fail(str(error)), folder=tmp_path)
    (tmp_path / "later.js").write_text("3")
    assert set(door.routes()) == {"/", HELLO, "/ui/index.html", "/ui/below/a.js"}
    assert set(WebDoor(refusal=door.refusal, folder=tmp_path / "below").routes()) == {HELLO, "/ui/a.js"}


def test_package_data_contains_all_files() -> None:
    root = FOLDER.parents[1]
    settings = tomllib.loads((root.parents[1] / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["duetime"]
    packed = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    assert FILES and {FOLDER / name for name in FILES} <= packed
