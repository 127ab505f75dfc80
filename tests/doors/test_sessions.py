"""Sessions: a cookie replaces the API key in a browser, for the pages of this host, until it expires."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

import pytest

from duetime.doors.event_stream import PulsesDoor
from duetime.doors.http import Keys, Request, Response, Stream, Unauthorized
from duetime.doors.sessions import SESSION_SECONDS, CookieSessions
from duetime.stores.memory import MemoryStore
from tests.clocks import ManualClock
from tests.doors.http_v1 import failure, success
from tests.doors.test_overview import Listening
from tests.servers import KEY, Answer, Duetime, unused_address

EVERYTHING = {
    "abilities": {
        "orders": ["newest", "soonest", "due", "deadline", "finished"],
        "offsetMax": None,
        "countsExactly": True,
        "expiresHistory": False,
        "timeSource": "store",
    }
}
"""The abilities of the store, which the response about a session contains."""
LIST, REPLAY = ("GET", "/api/v1/timers"), ("POST", "/api/v1/timers/replay")


def sign_in(service: Duetime, key: str = KEY, **headers: str) -> Answer:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    source = None if key.strip() == KEY else unused_address()
    return service.request("POST", "/session", json={"apiKey": key}, headers=given, source=source)


@pytest.fixture(scope="module")
def cookie(service: Duetime) -> str:
    return sign_in(service).headers["set-cookie"].split(";")[0]


@pytest.fixture(scope="module")
def here(service: Duetime) -> str:
    """The origin of the service's own pages."""
    return f"http://127.0.0.1:{service.port}"


def ask(service: Duetime, what: tuple[str, str], *, source: str | None = None, **headers: str) -> Answer:
    method, path = what
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return service.request(method, path, body=b"{}" if method != "GET" else None, headers=given, source=source)


class TestSignIn:
    def test_sign_in_with_the_key_sets_a_cookie(self, service: Duetime) -> None:
        answer = sign_in(service)
        success(answer, 204)
        assert re.fullmatch(
            r"duetime_session=[0-9]+\.[0-9a-f]{32}\.[0-9a-f]{64}; Path=/; HttpOnly; SameSite=Strict; Max-Age=43200",
            answer.headers["set-cookie"],
        )
        assert KEY not in answer.headers["set-cookie"]
        assert sign_in(service, f" {KEY}\n").status == 204  # whitespace from pasting

    @pytest.mark.parametrize("key", ["", "wrong", KEY[:-1], KEY + "0", "schlüssel"])
    def test_sign_in_with_a_wrong_key_is_rejected(self, service: Duetime, key: str) -> None:
        answer = sign_in(service, key)
        assert "API key" in failure(answer, 401, "UNAUTHORIZED")["message"]
        assert "set-cookie" not in answer.headers

    @pytest.mark.parametrize(
        "body", [b"", b"{}", b"[]", b'{"apiKey": 5}', b'{"apiKey": "a", "b": 1}', b'{"apiKey": "a", "apiKey": "b"}']
    )
    def test_malformed_sign_in_is_rejected(self, service: Duetime, body: bytes) -> None:
        failure(service.request("POST", "/session", body=body, headers={}), 400, "INVALID_INPUT")

    def test_too_large_sign_in_is_rejected(self, service: Duetime) -> None:
        failure(sign_in(service, "x" * 5000), 413, "PAYLOAD_TOO_LARGE")

    def test_session_shows_whether_the_client_is_signed_in(self, service: Duetime, cookie: str) -> None:
        sessions = [ask(service, ("GET", "/session"), **given).body for given in ({}, {"Cookie": cookie})]
        assert sessions == [{"signedIn": False, "needed": True}, {"signedIn": True, "needed": True, **EVERYTHING}]
        assert ask(service, ("GET", "/session"), X_API_Key=KEY).body["signedIn"] is True

    def test_sign_out_deletes_the_cookie(self, service: Duetime) -> None:
        answer = ask(service, ("DELETE", "/session"))
        success(answer, 204)
        assert answer.headers["set-cookie"] == "duetime_session=; Path=/; HttpOnly; SameSite=Strict; Max-Age=0"

    def test_service_without_keys_needs_no_session(self, start_service: Callable[..., Duetime]) -> None:
        service = start_service(bare=True, DUETIME_AUTH="none")
        assert ask(service, ("GET", "/session")).body == {"signedIn": True, "needed": False, **EVERYTHING}
        answer = sign_in(service, "whatever")
        assert answer.status == 204 and "set-cookie" not in answer.headers


class TestSignOut:
    @pytest.mark.parametrize(
        "headers",
        [{}, {"Sec-Fetch-Site": "same-origin"}, {"Origin": "HERE"}],
        ids=["program", "own page", "own page in an older browser"],
    )
    def test_copy_of_a_signed_out_cookie_is_rejected(
        self, service: Duetime, here: str, headers: dict[str, str]
    ) -> None:
        mine, other = (sign_in(service).headers["set-cookie"].split(";")[0] for _ in range(2))
        assert mine != other
        given = {name: value.replace("HERE", here) for name, value in headers.items()}
        success(ask(service, ("DELETE", "/session"), Cookie=mine, **given), 204)
        for _ in range(2):
            failure(ask(service, LIST, Cookie=mine), 401, "UNAUTHORIZED")
            assert ask(service, ("GET", "/session"), Cookie=mine).body["signedIn"] is False
            assert ask(service, REPLAY, Cookie=mine, Sec_Fetch_Site="same-origin").status == 401
        success(ask(service, ("DELETE", "/session"), Cookie=mine, **given), 204)
        assert ask(service, LIST, Cookie=other).status == 200

    @pytest.mark.parametrize(
        "headers",
        [{"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://elsewhere.example"}],
        ids=str,
    )
    def test_other_pages_can_not_sign_out(self, service: Duetime, cookie: str, headers: dict[str, str]) -> None:
        failure(ask(service, ("DELETE", "/session"), Cookie=cookie, **headers), 403, "FORBIDDEN")
        assert ask(service, LIST, Cookie=cookie).status == 200

    def test_forged_cookie_ends_no_session(self, service: Duetime, cookie: str) -> None:
        success(ask(service, ("DELETE", "/session"), Cookie=cookie[:-1] + ("0" if cookie[-1] != "0" else "1")), 204)
        assert ask(service, LIST, Cookie=cookie).status == 200

    def test_sign_out_survives_a_restart(self, start_service: Callable[..., Duetime]) -> None:
        service = start_service()
        mine, other = (sign_in(service).headers["set-cookie"].split(";")[0] for _ in range(2))
        ask(service, ("DELETE", "/session"), Cookie=mine)
        assert service.terminate() == 0
        service.start()
        assert [ask(service, LIST, Cookie=one).status for one in (mine, other)] == [401, 200]

    def test_sign_out_ends_open_streams_of_the_session(self, service: Duetime) -> None:
        mine = sign_in(service).headers["set-cookie"].split(";")[0]
        with Listening(service, Cookie=mine) as listening, Listening(service) as another:
            listening.pulse()
            another.pulse()
            ask(service, ("DELETE", "/session"), Cookie=mine)
            while line := listening.response.readline():
                assert line
            for _ in range(3):
                assert another.response.readline()


class TestHttps:
    """A cookie set over HTTPS is sent over HTTPS only."""

    SECURE = re.compile(
        r"__Host-duetime_session=[0-9]+\.[0-9a-f]{32}\.[0-9a-f]{64}; Path=/; HttpOnly; SameSite=Strict; "
        r"Max-Age=43200; Secure"
    ).fullmatch

    @pytest.mark.parametrize(
        "headers",
        [
            {"X-Forwarded-Proto": "https"},
            {"X-Forwarded-Proto": "HTTPS, http"},
            {"Forwarded": "for=192.0.2.60;proto=https;by=203.0.113.43"},
            {"Forwarded": 'for=192.0.2.43; Proto="https", for=198.51.100.17'},
            {"Origin": "https://timers.example"},
        ],
        ids=str,
    )
    def test_sign_in_over_https_sets_a_secure_cookie(self, service: Duetime, headers: dict[str, str]) -> None:
        cookie = sign_in(service, **headers).headers["set-cookie"]
        assert self.SECURE(cookie), cookie
        pair = cookie.split(";")[0]
        assert ask(service, LIST, Cookie=pair).status == 200
        answer = ask(service, ("DELETE", "/session"), Cookie=pair, **headers)
        expected = "__Host-duetime_session=; Path=/; HttpOnly; SameSite=Strict; Max-Age=0; Secure"
        assert answer.status == 403 if "Origin" in headers else answer.headers["set-cookie"] == expected

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"X-Forwarded-Proto": "http"},
            {"X-Forwarded-Proto": "http, https"},
            {"Forwarded": "for=192.0.2.60;proto=http"},
            {"Forwarded": "for=https"},
            {"Origin": "http://timers.example"},
            {"Origin": "http://["},
        ],
        ids=str,
    )
    def test_sign_in_over_http_sets_a_plain_cookie(self, service: Duetime, headers: dict[str, str]) -> None:
        cookie = sign_in(service, **headers).headers["set-cookie"]
        assert cookie.startswith("duetime_session=") and "Secure" not in cookie

    @pytest.mark.parametrize(("setting", "secure"), [("on", True), ("off", False)])
    def test_cookie_secure_setting_overrides_the_headers(
        self, start_service: Callable[..., Duetime], setting: str, secure: bool
    ) -> None:
        service = start_service(DUETIME_COOKIE_SECURE=setting)
        for headers in ({}, {"X-Forwarded-Proto": "https"}, {"X-Forwarded-Proto": "http"}):
            assert bool(self.SECURE(sign_in(service, **headers).headers["set-cookie"])) is secure

    def test_sign_out_ends_both_sessions_of_a_browser(self, service: Duetime) -> None:
        plain = sign_in(service).headers["set-cookie"].split(";")[0]
        secure = sign_in(service, X_Forwarded_Proto="https").headers["set-cookie"].split(";")[0]
        ask(service, ("DELETE", "/session"), Cookie=f"{plain}; {secure}")
        assert [ask(service, LIST, Cookie=one).status for one in (plain, secure)] == [401, 401]


class TestCookie:
    @pytest.mark.parametrize("path", ["/timers", "/metrics", "/api/v1/timers", "/api/v1/overview", "/api/v1/cluster"])
    def test_cookie_replaces_the_key(self, service: Duetime, cookie: str, path: str) -> None:
        assert ask(service, ("GET", path)).status == 401
        assert ask(service, ("GET", path), Cookie=cookie).status == 200
        assert ask(service, ("HEAD", path), Cookie=f"a=b; {cookie}; c").status == 200

    @pytest.mark.parametrize(
        "change",
        [
            lambda cookie: "",
            lambda cookie: cookie[:-1],
            lambda cookie: cookie + "0",
            lambda cookie: cookie.replace("=", "=9"),
            lambda cookie: cookie.partition(".")[0],
            lambda cookie: cookie.partition(".")[0] + ".",
            lambda cookie: "duetime_session=." + cookie.partition(".")[2],
            lambda cookie: "duetime_session=" + KEY,
            lambda cookie: cookie.replace("duetime_session", "Duetime_session"),
            lambda cookie: "other=" + cookie,
            lambda cookie: "duetime_session=ü",
        ],
    )
    def test_changed_cookie_is_rejected(self, service: Duetime, cookie: str, change: Callable[[str], str]) -> None:
        failure(ask(service, LIST, Cookie=change(cookie)), 401, "UNAUTHORIZED")

    def test_key_takes_precedence_over_the_cookie(self, service: Duetime, cookie: str) -> None:
        assert ask(service, LIST, Cookie=cookie, X_API_Key="wrong", source=unused_address()).status == 401
        assert ask(service, LIST, Cookie=cookie, Authorization="Bearer wrong", source=unused_address()).status == 401
        assert ask(service, LIST, Cookie="duetime_session=wrong", X_API_Key=KEY).status == 200

    def test_cookie_is_not_logged(self, service: Duetime, cookie: str) -> None:
        ask(service, REPLAY, Cookie=cookie)
        ask(service, ("GET", "/nothing"), Cookie=cookie)
        assert cookie not in service.stderr and cookie.partition(".")[2] not in service.stderr


def request_with(cookie: bytes) -> Request:
    return Request("GET", "/", headers=[(b"cookie", b"duetime_session=" + cookie)])


class TestOtherPages:
    """Browsers add the cookie to requests of other hosts' pages, so changes from there are rejected."""

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"Origin": "http://elsewhere.example"},
            {"Origin": "http://127.0.0.1"},
            {"Origin": "http://127.0.0.1:1"},
            {"Origin": "null"},
            {"Origin": ""},
            {"Origin": "http://["},
            {"Origin": "http://ü"},
            {"Origin": "HERE.elsewhere.example"},
            {"Origin": "http://elsewhere.example/?HERE"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
            {"Sec-Fetch-Site": "none"},
            {"Sec-Fetch-Site": "cross-site", "Origin": "HERE"},
            {"Referer": "HERE/"},
        ],
        ids=str,
    )
    def test_other_pages_can_change_nothing(
        self, service: Duetime, cookie: str, here: str, headers: dict[str, str]
    ) -> None:
        given = {name: value.replace("HERE", here) for name, value in headers.items()}
        for what in (REPLAY, ("DELETE", "/timers/x"), ("PUT", "/timers/x"), ("POST", "/timers"), ("POST", "/clock")):
            assert ask(service, what, Cookie=cookie, **given).status == 401, what

    @pytest.mark.parametrize(
        "headers",
        [{"Origin": "HERE"}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "same-origin", "Origin": "HERE"}],
        ids=str,
    )
    def test_own_page_can_make_changes(self, service: Duetime, cookie: str, here: str, headers: dict[str, str]) -> None:
        given = {name: value.replace("HERE", here) for name, value in headers.items()}
        success(ask(service, REPLAY, Cookie=cookie, **given))

    def test_own_page_behind_a_tls_proxy_can_make_changes(self, service: Duetime, cookie: str) -> None:
        given = {"Host": "timers.example", "Origin": "https://timers.example"}
        success(ask(service, REPLAY, Cookie=cookie, **given))

    def test_origin_is_not_checked_for_requests_with_the_key(self, service: Duetime) -> None:
        for key in ({"X-API-Key": KEY}, {"Authorization": f"Bearer {KEY}"}):
            success(ask(service, REPLAY, Origin="http://elsewhere.example", Sec_Fetch_Site="cross-site", **key))


class TestSessions:
    """The end of a session, and its dependence on the key."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def store(self, clock: ManualClock) -> MemoryStore:
        return MemoryStore(clock)

    def accepted(self, keys: Keys, cookie: bytes) -> bool:
        try:
            asyncio.run(keys.check(request_with(cookie)))
            return True
        except Unauthorized:
            return False

    def test_session_expires_after_half_a_day(self, clock: ManualClock, store: MemoryStore) -> None:
        sessions = CookieSessions(KEY, clock, store)
        keys, cookie = Keys(KEY, sessions), sessions.begin()
        clock.advance(SESSION_SECONDS * 1000 - 1000)
        assert self.accepted(keys, cookie)
        clock.advance(1000)
        assert not self.accepted(keys, cookie)

    def test_other_processes_with_the_same_key_accept_the_cookie(self, clock: ManualClock, store: MemoryStore) -> None:
        cookie = CookieSessions(KEY, clock, store).begin()
        assert self.accepted(Keys(KEY, CookieSessions(KEY, clock, store)), cookie)

    def test_another_key_ends_all_sessions(self, clock: ManualClock, store: MemoryStore) -> None:
        cookie = CookieSessions(KEY, clock, store).begin()
        other = KEY[::-1]
        assert not self.accepted(Keys(other, CookieSessions(other, clock, store)), cookie)

    def test_stream_ends_when_its_session_expires(self, clock: ManualClock, store: MemoryStore) -> None:
        sessions = CookieSessions(KEY, clock, store)

        class Endless:
            async def listen(self) -> AsyncGenerator[bytes, None]:
                while True:
                    yield b"pulse"

        async def main() -> None:
            door = PulsesDoor(Endless(), Keys(KEY, sessions), refusal=lambda _: Response(500))  # type: ignore[arg-type]
            stream = await door.events(request_with(sessions.begin()))
            assert isinstance(stream, Stream)
            assert await anext(stream.pieces) == await anext(stream.pieces) == b"pulse"
            clock.advance(SESSION_SECONDS * 1000)
            assert await anext(stream.pieces, None) is None

        asyncio.run(main())

    def test_cookie_with_an_invalid_signature_does_not_reach_the_store(self, clock: ManualClock) -> None:
        class Untouched:
            async def session_ended(self, *_: object) -> bool:
                raise AssertionError

            end_session = session_ended

        sessions = CookieSessions(KEY, clock, Untouched())  # type: ignore[arg-type]
        good = sessions.begin()
        text, _, signature = good.rpartition(b".")
        for cookie in (b"", text, text + b".", text + b"." + b"0" * 64, b"9" + good, b"." + signature, signature):
            assert not self.accepted(Keys(KEY, sessions), cookie)
            asyncio.run(sessions.end(request_with(cookie)))
        clock.advance(SESSION_SECONDS * 1000)
        asyncio.run(sessions.end(request_with(good)))


@pytest.fixture
def restarted(tmp_path: Path) -> Iterator[Callable[[], Duetime]]:
    service = Duetime(tmp_path, bare=True, start=False)

    def start() -> Duetime:
        service.start()
        return service

    yield start
    service.kill()


def test_new_key_file_ends_all_sessions(restarted: Callable[[], Duetime], tmp_path: Path) -> None:
    service = restarted()
    cookie = sign_in(service, service.key or "").headers["set-cookie"].split(";")[0]
    assert service.terminate() == 0
    service = restarted()
    assert ask(service, LIST, Cookie=cookie).status == 200  # sessions survive a restart
    assert service.terminate() == 0
    (tmp_path / "duetime.key").unlink()
    assert ask(restarted(), LIST, Cookie=cookie).status == 401
