"""Signing in: a cookie stands for the key, for pages of this host alone, until it ends or the key is another."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

import pytest

from duetime.doors.http import Keys, Request, Response, Stream, Unauthorized
from duetime.doors.pulses import PulsesDoor
from duetime.doors.sessions import SESSION_SECONDS, CookieSessions
from duetime.stores.memory import MemoryStore
from tests.clocks import ManualClock
from tests.doors.durable import failure, success
from tests.doors.test_overview import Listening
from tests.servers import KEY, Answer, Duetime, stranger

LIST, REPLAY = ("GET", "/api/v1/timers"), ("POST", "/api/v1/timers/replay")


def sign_in(service: Duetime, key: str = KEY, **headers: str) -> Answer:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    source = None if key.strip() == KEY else stranger()
    return service.request("POST", "/session", json={"apiKey": key}, headers=given, source=source)


@pytest.fixture(scope="module")
def cookie(service: Duetime) -> str:
    return sign_in(service).headers["set-cookie"].split(";")[0]


@pytest.fixture(scope="module")
def here(service: Duetime) -> str:
    """The origin of our own page."""
    return f"http://127.0.0.1:{service.port}"


def ask(service: Duetime, what: tuple[str, str], *, source: str | None = None, **headers: str) -> Answer:
    method, path = what
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return service.request(method, path, body=b"{}" if method != "GET" else None, headers=given, source=source)


class TestSigningIn:
    def test_with_the_key(self, service: Duetime) -> None:
        answer = sign_in(service)
        success(answer, 204)
        assert re.fullmatch(
            r"duetime_session=[0-9]+\.[0-9a-f]{32}\.[0-9a-f]{64}; Path=/; HttpOnly; SameSite=Strict; Max-Age=43200",
            answer.headers["set-cookie"],
        )
        assert KEY not in answer.headers["set-cookie"]
        assert sign_in(service, f" {KEY}\n").status == 204  # as it is pasted

    @pytest.mark.parametrize("key", ["", "wrong", KEY[:-1], KEY + "0", "schlüssel"])
    def test_with_another_key(self, service: Duetime, key: str) -> None:
        answer = sign_in(service, key)
        assert "API key" in failure(answer, 401, "UNAUTHORIZED")["message"]
        assert "set-cookie" not in answer.headers

    @pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"apiKey": 5}', b'{"apiKey": "a", "apiKey": "b"}'])
    def test_with_nonsense(self, service: Duetime, body: bytes) -> None:
        failure(service.request("POST", "/session", body=body, headers={}), 400, "INVALID_INPUT")

    def test_with_too_much(self, service: Duetime) -> None:
        failure(sign_in(service, "x" * 5000), 413, "PAYLOAD_TOO_LARGE")

    def test_whether_one_is_signed_in(self, service: Duetime, cookie: str) -> None:
        said = [ask(service, ("GET", "/session"), **given).body for given in ({}, {"Cookie": cookie})]
        assert said == [{"signedIn": False, "needed": True}, {"signedIn": True, "needed": True}]
        assert ask(service, ("GET", "/session"), X_API_Key=KEY).body["signedIn"] is True

    def test_signing_out(self, service: Duetime) -> None:
        answer = ask(service, ("DELETE", "/session"))
        success(answer, 204)
        assert answer.headers["set-cookie"] == "duetime_session=; Path=/; HttpOnly; SameSite=Strict; Max-Age=0"

    def test_where_no_key_is_needed(self, alone: Callable[..., Duetime]) -> None:
        service = alone(bare=True, DUETIME_AUTH="none")
        assert ask(service, ("GET", "/session")).body == {"signedIn": True, "needed": False}
        answer = sign_in(service, "whatever")
        assert answer.status == 204 and "set-cookie" not in answer.headers


class TestSigningOut:
    @pytest.mark.parametrize(
        "headers", [{}, {"Sec-Fetch-Site": "same-origin"}, {"Origin": "HERE"}], ids=["a program", "our page", "older"]
    )
    def test_a_copy_of_the_cookie_is_refused(self, service: Duetime, here: str, headers: dict[str, str]) -> None:
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
    def test_another_page_can_not(self, service: Duetime, cookie: str, headers: dict[str, str]) -> None:
        failure(ask(service, ("DELETE", "/session"), Cookie=cookie, **headers), 403, "FORBIDDEN")
        assert ask(service, LIST, Cookie=cookie).status == 200

    def test_a_forged_cookie_ends_nothing(self, service: Duetime, cookie: str) -> None:
        success(ask(service, ("DELETE", "/session"), Cookie=cookie[:-1] + ("0" if cookie[-1] != "0" else "1")), 204)
        assert ask(service, LIST, Cookie=cookie).status == 200

    def test_it_outlasts_a_restart(self, alone: Callable[..., Duetime]) -> None:
        service = alone()
        mine, other = (sign_in(service).headers["set-cookie"].split(";")[0] for _ in range(2))
        ask(service, ("DELETE", "/session"), Cookie=mine)
        assert service.terminate() == 0
        service.start()
        assert [ask(service, LIST, Cookie=one).status for one in (mine, other)] == [401, 200]

    def test_an_open_stream_ends(self, service: Duetime) -> None:
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
    """A cookie from HTTPS is for HTTPS alone."""

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
    def test_who_says_so_gets_one(self, service: Duetime, headers: dict[str, str]) -> None:
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
    def test_others_do_not(self, service: Duetime, headers: dict[str, str]) -> None:
        cookie = sign_in(service, **headers).headers["set-cookie"]
        assert cookie.startswith("duetime_session=") and "Secure" not in cookie

    @pytest.mark.parametrize(("setting", "secure"), [("on", True), ("off", False)])
    def test_a_setting_decides(self, alone: Callable[..., Duetime], setting: str, secure: bool) -> None:
        service = alone(DUETIME_COOKIE_SECURE=setting)
        for headers in ({}, {"X-Forwarded-Proto": "https"}, {"X-Forwarded-Proto": "http"}):
            assert bool(self.SECURE(sign_in(service, **headers).headers["set-cookie"])) is secure

    def test_both_cookies_of_a_browser_are_signed_out(self, service: Duetime) -> None:
        plain = sign_in(service).headers["set-cookie"].split(";")[0]
        secure = sign_in(service, X_Forwarded_Proto="https").headers["set-cookie"].split(";")[0]
        ask(service, ("DELETE", "/session"), Cookie=f"{plain}; {secure}")
        assert [ask(service, LIST, Cookie=one).status for one in (plain, secure)] == [401, 401]


class TestTheCookie:
    @pytest.mark.parametrize("path", ["/timers", "/metrics", "/api/v1/timers", "/api/v1/overview", "/api/v1/cluster"])
    def test_stands_for_the_key_wherever_one_is_taken(self, service: Duetime, cookie: str, path: str) -> None:
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
    def test_is_good_as_it_was_given_and_not_otherwise(
        self, service: Duetime, cookie: str, change: Callable[[str], str]
    ) -> None:
        failure(ask(service, LIST, Cookie=change(cookie)), 401, "UNAUTHORIZED")

    def test_a_key_that_is_given_counts_before_it(self, service: Duetime, cookie: str) -> None:
        assert ask(service, LIST, Cookie=cookie, X_API_Key="wrong", source=stranger()).status == 401
        assert ask(service, LIST, Cookie=cookie, Authorization="Bearer wrong", source=stranger()).status == 401
        assert ask(service, LIST, Cookie="duetime_session=wrong", X_API_Key=KEY).status == 200

    def test_is_not_logged(self, service: Duetime, cookie: str) -> None:
        ask(service, REPLAY, Cookie=cookie)
        ask(service, ("GET", "/nothing"), Cookie=cookie)
        assert cookie not in service.stderr and cookie.partition(".")[2] not in service.stderr


def carrying(cookie: bytes) -> Request:
    return Request("GET", "/", headers=[(b"cookie", b"duetime_session=" + cookie)])


class TestOtherPages:
    """What a page of another host has a browser send is refused, with the cookie as without it."""

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
    def test_can_change_nothing(self, service: Duetime, cookie: str, here: str, headers: dict[str, str]) -> None:
        given = {name: value.replace("HERE", here) for name, value in headers.items()}
        for what in (REPLAY, ("DELETE", "/timers/x"), ("PUT", "/timers/x"), ("POST", "/timers"), ("POST", "/clock")):
            assert ask(service, what, Cookie=cookie, **given).status == 401, what

    @pytest.mark.parametrize(
        "headers",
        [{"Origin": "HERE"}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "same-origin", "Origin": "HERE"}],
        ids=str,
    )
    def test_our_own_can(self, service: Duetime, cookie: str, here: str, headers: dict[str, str]) -> None:
        given = {name: value.replace("HERE", here) for name, value in headers.items()}
        success(ask(service, REPLAY, Cookie=cookie, **given))

    def test_behind_something_that_speaks_tls(self, service: Duetime, cookie: str) -> None:
        given = {"Host": "timers.example", "Origin": "https://timers.example"}
        success(ask(service, REPLAY, Cookie=cookie, **given))

    def test_a_key_is_not_asked_where_it_comes_from(self, service: Duetime) -> None:
        for key in ({"X-API-Key": KEY}, {"Authorization": f"Bearer {KEY}"}):
            success(ask(service, REPLAY, Origin="http://elsewhere.example", Sec_Fetch_Site="cross-site", **key))


class TestSessions:
    """What holds whoever asks: a session's end, and the key it is made from."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def store(self, clock: ManualClock) -> MemoryStore:
        return MemoryStore(clock)

    def taken(self, keys: Keys, cookie: bytes) -> bool:
        try:
            asyncio.run(keys.check(carrying(cookie)))
            return True
        except Unauthorized:
            return False

    def test_one_ends(self, clock: ManualClock, store: MemoryStore) -> None:
        sessions = CookieSessions(KEY, clock, store)
        keys, cookie = Keys(KEY, sessions), sessions.begin()
        clock.advance(SESSION_SECONDS * 1000 - 1000)
        assert self.taken(keys, cookie)
        clock.advance(1000)
        assert not self.taken(keys, cookie)

    def test_every_process_with_the_key_takes_it(self, clock: ManualClock, store: MemoryStore) -> None:
        cookie = CookieSessions(KEY, clock, store).begin()
        assert self.taken(Keys(KEY, CookieSessions(KEY, clock, store)), cookie)

    def test_another_key_ends_them_all(self, clock: ManualClock, store: MemoryStore) -> None:
        cookie = CookieSessions(KEY, clock, store).begin()
        other = KEY[::-1]
        assert not self.taken(Keys(other, CookieSessions(other, clock, store)), cookie)

    def test_a_stream_ends_with_its_session(self, clock: ManualClock, store: MemoryStore) -> None:
        sessions = CookieSessions(KEY, clock, store)

        class Endless:
            async def listen(self) -> AsyncGenerator[bytes, None]:
                while True:
                    yield b"pulse"

        async def main() -> None:
            door = PulsesDoor(Endless(), Keys(KEY, sessions), refusal=lambda _: Response(500))  # type: ignore[arg-type]
            stream = await door.events(carrying(sessions.begin()))
            assert isinstance(stream, Stream)
            assert await anext(stream.pieces) == await anext(stream.pieces) == b"pulse"
            clock.advance(SESSION_SECONDS * 1000)
            assert await anext(stream.pieces, None) is None

        asyncio.run(main())

    def test_the_store_is_not_asked_about_cookies_without_a_proof(self, clock: ManualClock) -> None:
        class Untouched:
            async def session_ended(self, *_: object) -> bool:
                raise AssertionError

            end_session = session_ended

        sessions = CookieSessions(KEY, clock, Untouched())  # type: ignore[arg-type]
        good = sessions.begin()
        said, _, proof = good.rpartition(b".")
        for cookie in (b"", said, said + b".", said + b"." + b"0" * 64, b"9" + good, b"." + proof, proof):
            assert not self.taken(Keys(KEY, sessions), cookie)
            asyncio.run(sessions.end(carrying(cookie)))
        clock.advance(SESSION_SECONDS * 1000)
        asyncio.run(sessions.end(carrying(good)))


@pytest.fixture
def restarted(tmp_path: Path) -> Iterator[Callable[[], Duetime]]:
    service = Duetime(tmp_path, bare=True, start=False)

    def start() -> Duetime:
        service.start()
        return service

    yield start
    service.kill()


def test_a_new_key_file_ends_them_too(restarted: Callable[[], Duetime], tmp_path: Path) -> None:
    service = restarted()
    cookie = sign_in(service, service.key or "").headers["set-cookie"].split(";")[0]
    assert service.terminate() == 0
    service = restarted()
    assert ask(service, LIST, Cookie=cookie).status == 200  # a restart does not
    assert service.terminate() == 0
    (tmp_path / "duetime.key").unlink()
    assert ask(restarted(), LIST, Cookie=cookie).status == 401
