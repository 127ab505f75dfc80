"""Sessions for browsers: a cookie that replaces the API key for half a day, and the operations to sign in and out.

A cookie holds the end of the session, an id, and a MAC of both that needs the API key. So every worker and instance
accepts it, it does not reveal the key, and a change of the key ends all sessions. The store remembers the sessions that
were signed out, and is asked for each request with a valid cookie. So signing out takes effect everywhere at once.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, Struct, UnsetType

from duetime.clock import Clock
from duetime.doors import http_v1_schema as schema
from duetime.doors import wire
from duetime.doors.http import Forbidden, Handler, Keys, Request, Response, TooManyWrongKeys, Unauthorized
from duetime.doors.http_heads import Header
from duetime.doors.http_v1_values import shown_abilities
from duetime.doors.origins import SAFE_METHODS, is_other_page, is_own_page
from duetime.instants import Instant
from duetime.store import Abilities, Sessions

COOKIE = b"duetime_session"
SECURE_COOKIE = b"__Host-duetime_session"
"""Browsers accept a cookie with this prefix only over HTTPS, and only from the host itself."""
SESSION_SECONDS = 12 * 60 * 60
SKEW_MS_MAX = 60 * 60 * 1000
"""How far another instance's clock may be behind: for that long after its end, a signed-out session is remembered."""
ID_BYTES = 16
BODY_BYTES_MAX = 4096


class SignIn(Struct, rename="camel", forbid_unknown_fields=True):
    api_key: str


class SessionState(Struct, rename="camel"):
    """Whether the browser is signed in, and if so, the abilities of the store for the page."""

    signed_in: bool
    needed: bool
    abilities: schema.Abilities | UnsetType = UNSET


_sign_in_decoder = msgspec.json.Decoder(SignIn)


class Session(Struct, frozen=True):
    id: bytes
    ends_at: Instant


class CookieSessions:
    def __init__(self, api_key: str, clock: Clock, signed_out: Sessions) -> None:
        """``clock`` is the machine's clock, never a virtual one, because browsers expire cookies by real time."""
        self._secret = hmac.digest(api_key.encode(), b"duetime session with an id", "sha256")
        self._clock = clock
        self._signed_out = signed_out

    def begin(self) -> bytes:
        """The value of a new cookie."""
        ends_at = self._clock.now() // 1000 + SESSION_SECONDS
        signed = b"%d.%s" % (ends_at, os.urandom(ID_BYTES).hex().encode())
        return signed + b"." + self._mac(signed)

    async def holds(self, request: Request) -> bool:
        """Whether the request carries a valid session and, unless it only reads, comes from this server's own page."""
        if request.method not in SAFE_METHODS and not is_own_page(request):
            return False
        return await self.is_valid(request)

    async def is_valid(self, request: Request) -> bool:
        """Whether a session of the request has neither expired nor been signed out."""
        for session in self._proven(request):
            if not await self._signed_out.session_ended(session.id, session.ends_at):
                return True
        return False

    async def end(self, request: Request) -> None:
        """Sign out the sessions that the request carries."""
        forget_before = self._clock.now() - SKEW_MS_MAX
        for session in self._proven(request):
            await self._signed_out.end_session(session.id, session.ends_at, forget_before=forget_before)

    def _proven(self, request: Request) -> list[Session]:
        """The sessions of the request that have a valid MAC and have not expired."""
        found = []
        for name, value in cookies(request):
            signed, _, mac = value.rpartition(b".")
            if name in (COOKIE, SECURE_COOKIE) and hmac.compare_digest(mac, self._mac(signed)):
                ends, _, id = signed.partition(b".")
                if (ends_at := Instant(int(ends) * 1000)) > self._clock.now():
                    found.append(Session(bytes.fromhex(id.decode()), ends_at))
        return found

    def _mac(self, signed: bytes) -> bytes:
        return hmac.digest(self._secret, signed, "sha256").hex().encode()


def cookies(request: Request) -> list[tuple[bytes, bytes]]:
    """The cookies of a request; the first of each name."""
    found: dict[bytes, bytes] = {}
    for pair in (request.header(b"cookie") or b"").split(b";"):
        name, _, value = pair.strip().partition(b"=")
        found.setdefault(name, value)
    return list(found.items())


def over_https(request: Request) -> bool:
    """Whether the browser or a proxy states that the browser uses HTTPS. A client that lies only gets a cookie that is
    sent over HTTPS alone."""
    forwarded = request.header(b"forwarded") or b""
    first = forwarded.split(b",")[0].lower()
    schemes = [
        pair.strip().partition(b"=")[2].strip(b'"') for pair in first.split(b";") if pair.strip()[:6] == b"proto="
    ]
    schemes.append((request.header(b"x-forwarded-proto") or b"").split(b",")[0].strip().lower())
    return b"https" in schemes or (request.header(b"origin") or b"").startswith(b"https://")


class SessionDoor:
    def __init__(
        self,
        keys: Keys,
        sessions: CookieSessions | None,
        abilities: Abilities,
        *,
        secure: bool | None = None,
        refusal: Callable[[Exception], Response],
    ) -> None:
        """``secure``: whether cookies are for HTTPS only; None: if the browser uses HTTPS."""
        self._keys = keys
        self._sessions = sessions
        self._abilities = abilities
        self._secure = secure
        self.refusal = refusal

    def routes(self) -> dict[str, dict[str, Handler]]:
        return {"/session": {"GET": self.state, "POST": self.sign_in, "DELETE": self.sign_out}}

    async def state(self, request: Request) -> Response:
        request.check_query()
        try:
            await self._keys.check(request)
            state = SessionState(True, self._keys.needed, shown_abilities(self._abilities))
        except (Unauthorized, TooManyWrongKeys):
            state = SessionState(False, self._keys.needed)
        return Response(200, msgspec.json.encode(state))

    async def sign_in(self, request: Request) -> Response:
        request.check_query()
        given = wire.decode(await request.body(BODY_BYTES_MAX), SignIn, _sign_in_decoder)
        if self._sessions is None:
            return Response(204, headers=())
        key = given.api_key.strip().encode()
        self._keys.check_key(key, request)
        return Response(204, headers=self._set_cookies(request, self._sessions.begin(), SESSION_SECONDS))

    async def sign_out(self, request: Request) -> Response:
        request.check_query()
        if is_other_page(request):
            raise Forbidden("a page of another site sent this request: sign out on this server's own page")
        if self._sessions is not None:
            await self._sessions.end(request)
        return Response(204, headers=self._set_cookies(request, b"", 0))

    def _set_cookies(self, request: Request, value: bytes, seconds: int) -> Sequence[Header]:
        """The headers that set the cookie, and delete one of the other name from before a change of HTTPS."""
        secure = over_https(request) if self._secure is None else self._secure
        ours, other = (SECURE_COOKIE, COOKIE) if secure else (COOKIE, SECURE_COOKIE)
        headers = [_set_cookie(ours, value, seconds)]
        if any(name == other for name, _ in cookies(request)):
            headers.append(_set_cookie(other, b"", 0))
        return headers


def _set_cookie(name: bytes, value: bytes, seconds: int) -> Header:
    secure = b"; Secure" if name == SECURE_COOKIE else b""
    cookie = b"%s=%s; Path=/; HttpOnly; SameSite=Strict; Max-Age=%d%s" % (name, value, seconds, secure)
    return b"set-cookie", cookie
