"""Signing in for browsers: a cookie that stands for the API key for half a day, and the paths that give and take it.

A session is the time of its end, an id, and a proof of both that only a process with the key can make. So every worker
and every instance accepts it, the key itself is not in it, and another key ends them all. The store notes the sessions
that were signed out. It is asked at each request with a cookie whose proof is good, so a session that was signed out is
refused everywhere at once.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from msgspec import Struct

from duetime.clock import Clock
from duetime.doors import wire
from duetime.doors.heads import Header
from duetime.doors.http import Forbidden, Handler, Keys, Request, Response, TooManyWrongKeys, Unauthorized
from duetime.doors.origins import SAFE_METHODS, is_other_page, is_own_page

COOKIE = b"duetime_session"
SECURE_COOKIE = b"__Host-duetime_session"
"""Browsers take a cookie of this name over HTTPS alone, and from no other host."""
SESSION_SECONDS = 12 * 60 * 60
SKEW_MS_MAX = 60 * 60 * 1000
"""How far another instance's clock may be behind, so that it still refuses a session that it takes for current."""
ID_BYTES = 16
BODY_BYTES_MAX = 4096


class SignIn(Struct, rename="camel"):
    api_key: str


_sign_in_decoder = msgspec.json.Decoder(SignIn)


class SignedOut(Protocol):
    """Who notes the sessions that were signed out, for all instances."""

    async def end_session(self, id: bytes, ends_at: int, *, forget_before: int) -> None: ...

    async def session_ended(self, id: bytes, ends_at: int) -> bool: ...


class Session(Struct, frozen=True):
    id: bytes
    ends_at: int


class CookieSessions:
    def __init__(self, api_key: str, clock: Clock, signed_out: SignedOut) -> None:
        """The clock is the machine's own: it is the browser that counts how old a cookie is."""
        self._secret = hmac.digest(api_key.encode(), b"duetime session with an id", "sha256")
        self._clock = clock
        self._signed_out = signed_out

    def begin(self) -> bytes:
        """What a cookie holds from now on."""
        ends_at = self._clock.now() // 1000 + SESSION_SECONDS
        said = b"%d.%s" % (ends_at, os.urandom(ID_BYTES).hex().encode())
        return said + b"." + self._proof(said)

    async def holds(self, request: Request) -> bool:
        """Whether the request carries a session, and comes from our own page if it can change anything."""
        if request.method not in SAFE_METHODS and not is_own_page(request):
            return False
        return await self.goes_on(request)

    async def goes_on(self, request: Request) -> bool:
        """Whether a session of the request has neither run out nor been signed out."""
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
        """The sessions of the request that the key was used for and that have not run out."""
        found = []
        for name, value in cookies(request):
            said, _, proof = value.rpartition(b".")
            if name in (COOKIE, SECURE_COOKIE) and hmac.compare_digest(proof, self._proof(said)):
                ends, _, id = said.partition(b".")
                if (ends_at := int(ends) * 1000) > self._clock.now():
                    found.append(Session(bytes.fromhex(id.decode()), ends_at))
        return found

    def _proof(self, said: bytes) -> bytes:
        return hmac.digest(self._secret, said, "sha256").hex().encode()


def cookies(request: Request) -> list[tuple[bytes, bytes]]:
    """The cookies of a request, each once: a browser has one of each name here."""
    found: dict[bytes, bytes] = {}
    for pair in (request.header(b"cookie") or b"").split(b";"):
        name, _, value = pair.strip().partition(b"=")
        found.setdefault(name, value)
    return list(found.items())


def over_https(request: Request) -> bool:
    """Whether the browser says, or a proxy in front of us, that it uses HTTPS. Anyone can say so: all they get by it is
    a cookie that is sent over HTTPS alone."""
    forwarded = request.header(b"forwarded") or b""
    first = forwarded.split(b",")[0].lower()
    said = [pair.strip().partition(b"=")[2].strip(b'"') for pair in first.split(b";") if pair.strip()[:6] == b"proto="]
    said.append((request.header(b"x-forwarded-proto") or b"").split(b",")[0].strip().lower())
    return b"https" in said or (request.header(b"origin") or b"").startswith(b"https://")


class SessionDoor:
    def __init__(
        self,
        keys: Keys,
        sessions: CookieSessions | None,
        *,
        secure: bool | None = None,
        refusal: Callable[[Exception], Response],
    ) -> None:
        """``secure``: whether cookies are for HTTPS alone; None: whenever the browser uses it."""
        self._keys = keys
        self._sessions = sessions
        self._secure = secure
        self.refusal = refusal

    def routes(self) -> dict[str, dict[str, Handler]]:
        return {"/session": {"GET": self.look, "POST": self.sign_in, "DELETE": self.sign_out}}

    async def look(self, request: Request) -> Response:
        try:
            await self._keys.check(request)
            signed_in = True
        except (Unauthorized, TooManyWrongKeys):
            signed_in = False
        return Response(200, msgspec.json.encode({"signedIn": signed_in, "needed": self._keys.needed}))

    async def sign_in(self, request: Request) -> Response:
        asked = wire.decode(await request.body(BODY_BYTES_MAX), SignIn, _sign_in_decoder)
        if self._sessions is None:
            return Response(204, headers=())
        key = asked.api_key.strip().encode()
        self._keys.check_key(key, request, "this is not the API key of this service")
        return Response(204, headers=self._set_cookies(request, self._sessions.begin(), SESSION_SECONDS))

    async def sign_out(self, request: Request) -> Response:
        if is_other_page(request):
            raise Forbidden("a browser sent this for a page of another site: sign out on the page of this service")
        if self._sessions is not None:
            await self._sessions.end(request)
        return Response(204, headers=self._set_cookies(request, b"", 0))

    def _set_cookies(self, request: Request, value: bytes, seconds: int) -> Sequence[Header]:
        """The cookie. One of the other name, from when HTTPS was used or was not, goes."""
        secure = over_https(request) if self._secure is None else self._secure
        ours, other = (SECURE_COOKIE, COOKIE) if secure else (COOKIE, SECURE_COOKIE)
        headers = [_set_cookie(ours, value, seconds)]
        if any(name == other for name, _ in cookies(request)):
            headers.append(_set_cookie(other, b"", 0))
        return headers


def _set_cookie(name: bytes, value: bytes, seconds: int) -> Header:
    secure = b"; Secure" if name == SECURE_COOKIE else b""
    said = b"%s=%s; Path=/; HttpOnly; SameSite=Strict; Max-Age=%d%s" % (name, value, seconds, secure)
    return b"set-cookie", said
