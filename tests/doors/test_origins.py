"""A service without keys rejects requests of other sites' pages and requests for unknown host names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from duetime.doors.http import Forbidden, Request
from duetime.doors.origins import OriginGuard
from tests.doors.http_v1 import failure
from tests.doors.platform import refused
from tests.servers import Answer, Duetime

BODY = b'{"delay": "1h", "callbackUrl": "http://127.0.0.1:9/"}'
CHANGES = [
    ("POST", "/api/v1/timers"),
    ("POST", "/api/v1/namespaces"),
    ("PATCH", "/api/v1/namespaces/default"),
    ("DELETE", "/api/v1/timers/default/x"),
    ("POST", "/timers"),
    ("PUT", "/timers/x"),
    ("POST", "/session"),
    ("POST", "/clock"),
    ("POST", "/ui/hello"),
]
READS = [
    *(("GET", path) for path in ("/", "/timers", "/api/v1/timers", "/api/v1/events", "/metrics", "/session")),
    *(("GET", path) for path in ("/health", "/readyz", "/clock", "/docs", "/ui/app.js", "/api/v1/openapi.json")),
    ("HEAD", "/api/v1/timers"),
]
NAVIGATION = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duetime]:
    with Duetime(tmp_path_factory.mktemp("open"), bare=True, virtual_clock=True, DUETIME_AUTH="none") as service:
        yield service
        assert "Traceback" not in service.stderr


def ask(service: Duetime, method: str, path: str, headers: dict[str, str]) -> Answer:
    given = {name: value.replace("PORT", str(service.port)) for name, value in headers.items()}
    return service.request(method, path, body=BODY if method not in ("GET", "HEAD") else None, headers=given)


def timers(service: Duetime) -> int:
    count: int = service.request("GET", "/api/v1/timers/count", headers={}).body["timers"]
    return count


class TestOtherPages:
    OTHERS = [
        {"Origin": "http://elsewhere.example"},
        {"Origin": "http://localhost.elsewhere.example:PORT"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://["},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://localhost:PORT"},
        {"Origin": "http://127.0.0.1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": ""},
        {"Sec-Fetch-Site": "anything"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://127.0.0.1:PORT"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Content-Type": "text/plain"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    ]

    @pytest.mark.parametrize("headers", OTHERS, ids=str)
    def test_other_pages_can_neither_change_nor_read_anything(self, keyless: Duetime, headers: dict[str, str]) -> None:
        before = timers(keyless)
        for method, path in (*CHANGES, *READS):
            answer = ask(keyless, method, path, headers)
            assert answer.status == 403, (method, path, answer)
            assert not [name for name in answer.headers if name.startswith("access-control")]
        assert timers(keyless) == before

    @pytest.mark.parametrize("site", ["cross-site", "same-site", "none"])
    def test_navigation_can_not_change_anything(self, keyless: Duetime, site: str) -> None:
        for method, path in CHANGES:
            assert ask(keyless, method, path, {"Sec-Fetch-Site": site, **NAVIGATION}).status == 403

    def test_error_names_the_setting_in_the_format_of_each_api(self, keyless: Duetime) -> None:
        headers = {"Origin": "http://elsewhere.example"}
        message = failure(ask(keyless, "POST", "/api/v1/timers", headers), 403, "FORBIDDEN")["message"]
        assert "another site" in message and "DUETIME_AUTH=key" in message
        refused(ask(keyless, "POST", "/timers", headers), 403, 4, "DUETIME_AUTH=key")
        headers = {"Host": "timers.example"}
        message = failure(ask(keyless, "GET", "/api/v1/timers", headers), 403, "FORBIDDEN")["message"]
        assert "'timers.example'" in message and "DUETIME_ALLOWED_HOSTS" in message
        refused(ask(keyless, "GET", "/timers", headers), 403, 4, "DUETIME_ALLOWED_HOSTS")

    def test_websocket_of_another_page_is_rejected(self, keyless: Duetime) -> None:
        headers = {"Origin": "http://elsewhere.example", "Upgrade": "websocket", "Connection": "Upgrade"}
        assert ask(keyless, "GET", "/api/v1/events", headers).status == 403


class TestAllowedRequests:
    OWN = [
        {},
        {"Origin": "http://127.0.0.1:PORT"},
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://127.0.0.1:PORT", "Sec-Fetch-Mode": "cors"},
        {"X-API-Key": "whatever", "User-Agent": "curl/8", "Content-Type": "text/plain"},
    ]

    @pytest.mark.parametrize("headers", OWN, ids=str)
    def test_own_page_and_programs_are_accepted(self, keyless: Duetime, headers: dict[str, str]) -> None:
        before = timers(keyless)
        assert ask(keyless, "POST", "/api/v1/timers", headers).status == 200
        assert timers(keyless) == before + 1
        for path in ("/", "/api/v1/timers", "/metrics", "/health"):
            assert ask(keyless, "GET", path, headers).status == 200

    @pytest.mark.parametrize("site", ["cross-site", "same-site", "none", "same-origin"])
    def test_links_and_typed_addresses_open_the_page(self, keyless: Duetime, site: str) -> None:
        for path in ("/", "/docs"):
            assert ask(keyless, "GET", path, {"Sec-Fetch-Site": site, **NAVIGATION}).status == 200

    def test_service_with_a_key_checks_neither_host_nor_origin(self, service: Duetime) -> None:
        for headers in ({"Host": "timers.example"}, {"Origin": "http://elsewhere.example"}):
            assert service.request("GET", "/health", headers=headers).status == 200


class TestHosts:
    ALLOWED = [
        *("localhost", "localhost:PORT", "LOCALHOST:1", "LocalHost.", "localhost.:PORT", "localhost:"),
        *("127.0.0.1", "127.0.0.1:PORT", "127.0.0.2:80", "127.255.255.254", "[::1]", "[::1]:PORT", "[0:0:0:0:0:0:0:1]"),
    ]
    FOREIGN = [
        *("", ":", ":80", "elsewhere.example", "elsewhere.example:PORT", "localhost.elsewhere.example", "xlocalhost"),
        *("127.0.0.1.elsewhere.example", "127.0.0.1.nip.io", "localhost@elsewhere.example", "localhost/../x"),
        *(
            "10.0.0.1",
            "192.168.1.2:PORT",
            "[2001:db8::1]",
            "[::1",
            "::1",
            "[localhost]",
            "localhost:x",
            "localhost..com",
        ),
        *("2130706433", "127.1", "0x7f.1", "loc\u00e4lhost", "localhost, elsewhere.example", "*"),
    ]

    @pytest.mark.parametrize("host", ALLOWED)
    def test_loopback_hosts_are_accepted(self, keyless: Duetime, host: str) -> None:
        assert ask(keyless, "GET", "/api/v1/timers", {"Host": host}).status == 200
        given = {"Host": host, "Origin": f"http://{host}".lower().replace("port", "PORT")}
        assert ask(keyless, "POST", "/api/v1/timers/replay", given).status in (200, 400)

    @pytest.mark.parametrize("host", FOREIGN)
    def test_foreign_hosts_are_rejected(self, keyless: Duetime, host: str) -> None:
        """For a browser, a page whose host name resolves to this machine has the same origin as the service."""
        for headers in ({}, {"Sec-Fetch-Site": "same-origin"}, {"Origin": f"http://{host}"}, NAVIGATION):
            for method, path in (("GET", "/api/v1/timers"), ("POST", "/api/v1/timers"), ("GET", "/")):
                # A malformed header is rejected with 400 before the host is checked.
                assert ask(keyless, method, path, {"Host": host, **headers}).status in (400, 403)

    def test_setting_allows_more_host_names(self, start_service: Callable[..., Duetime]) -> None:
        service = start_service(
            bare=True, DUETIME_AUTH="none", DUETIME_ALLOWED_HOSTS="Timers.example, my_service,10.1.2.3"
        )
        for host in ("timers.example", "TIMERS.example:8443", "my_service:PORT", "10.1.2.3", "localhost"):
            assert ask(service, "GET", "/timers", {"Host": host}).status == 200
        for host in ("other.example", "x.timers.example", "timers.example.org", "10.1.2.4"):
            assert ask(service, "GET", "/timers", {"Host": host}).status == 403
        behind_tls = {"Host": "timers.example", "Origin": "https://timers.example"}
        for headers in (behind_tls, {**behind_tls, "Host": "timers.example:443"}):
            assert ask(service, "POST", "/api/v1/timers", headers).status == 200
        assert ask(service, "POST", "/api/v1/timers", {**behind_tls, "Origin": "https://a.example"}).status == 403

    @pytest.mark.parametrize(
        ("listens_on", "allowed", "good", "bad"),
        [
            (
                "0.0.0.0",
                (),
                ["10.0.0.5:3000", "[2001:db8::1]", "0.0.0.0:3000", "localhost"],
                ["duetime:3000", "a.example"],
            ),
            ("::", (), ["10.0.0.5:3000", "[::]", "127.0.0.1"], ["duetime", "a.example"]),
            ("10.0.0.5", (), ["10.0.0.5:3000", "127.0.0.1"], ["10.0.0.6", "a.example"]),
            ("timers.lan", (), ["timers.lan", "Timers.LAN:3000"], ["10.0.0.5", "lan"]),
            ("0.0.0.0", ("*",), ["a.example", "duetime:3000", "10.0.0.5"], []),
            ("127.0.0.1", ("duetime",), ["duetime:3000"], ["duetime.example"]),
        ],
    )
    def test_allowed_hosts_depend_on_the_listening_address(
        self, listens_on: str, allowed: Any, good: list[str], bad: list[str]
    ) -> None:
        guard = OriginGuard(listens_on, allowed)
        for host in good:
            guard.check(Request("GET", "/", headers=[(b"host", host.encode())]))
        for host in bad:
            with pytest.raises(Forbidden):
                guard.check(Request("GET", "/", headers=[(b"host", host.encode())]))
