"""Signing in for browsers: a cookie that stands for the API key for half a day, and the paths that give and take it.

Nothing is kept: a session is its end and a proof of it that only who has the key can make. So every worker and every
instance takes it, the key itself is not in it, and another key ends them all.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from duetime.clock import Clock
from duetime.doors import wire
from duetime.doors.http import Handler, Keys, Request, Response, Unauthorized

COOKIE = b"duetime_session"
SESSION_SECONDS = 12 * 60 * 60
BODY_BYTES_MAX = 4096
_SAFE_METHODS = ("GET", "HEAD")


class SignIn(Struct, rename="camel"):
    api_key: str


_sign_in_decoder = msgspec.json.Decoder(SignIn)


class CookieSessions:
    def __init__(self, api_key: str, clock: Clock) -> None:
        """The clock is the machine's own: it is the browser that counts how old a cookie is."""
        self._secret = hmac.digest(api_key.encode(), b"duetime session", "sha256")
        self._clock = clock

    def begin(self) -> bytes:
        """What a cookie holds from now on."""
        ends_at = b"%d" % (self._clock.now() // 1000 + SESSION_SECONDS)
        return ends_at + b"." + self._proof(ends_at)

    def holds(self, request: Request) -> bool:
        """Whether the request carries a session, and comes from our own page if it can change anything."""
        given = _cookie(request.header(b"cookie"))
        if given is None:
            return False
        ends_at, _, proof = given.partition(b".")
        if not hmac.compare_digest(proof, self._proof(ends_at)):
            return False
        return int(ends_at) > self._clock.now() // 1000 and (request.method in _SAFE_METHODS or _from_here(request))

    def _proof(self, ends_at: bytes) -> bytes:
        return hmac.digest(self._secret, ends_at, "sha256").hex().encode()


def _cookie(header: bytes | None) -> bytes | None:
    for pair in (header or b"").split(b";"):
        name, _, value = pair.strip().partition(b"=")
        if name == COOKIE:
            return value
    return None


def _from_here(request: Request) -> bool:
    """Whether a browser says that a page of this host asks; others' pages can neither leave that out nor change it."""
    site = request.header(b"sec-fetch-site")
    if site is not None:
        return site == b"same-origin"
    origin, host = request.header(b"origin"), request.header(b"host")
    if origin is None or not host:
        return False
    try:
        return urlsplit(origin.decode("ascii")).netloc == host.decode("ascii").lower()
    except ValueError:
        return False


class SessionDoor:
    def __init__(
        self, keys: Keys, sessions: CookieSessions | None, *, refusal: Callable[[Exception], Response]
    ) -> None:
        self._keys = keys
        self._sessions = sessions
        self.refusal = refusal

    def routes(self) -> dict[str, dict[str, Handler]]:
        return {"/session": {"GET": self.look, "POST": self.sign_in, "DELETE": self.sign_out}}

    async def look(self, request: Request) -> Response:
        try:
            self._keys.check(request)
            signed_in = True
        except Unauthorized:
            signed_in = False
        return Response(200, msgspec.json.encode({"signedIn": signed_in, "needed": self._keys.needed}))

    async def sign_in(self, request: Request) -> Response:
        asked = wire.decode(await request.body(BODY_BYTES_MAX), SignIn, _sign_in_decoder)
        if self._sessions is None:
            return Response(204, headers=())
        if not self._keys.fits(asked.api_key.strip().encode()):
            raise Unauthorized("this is not the API key of this service")
        request.sign_in()
        return Response(204, headers=(_set_cookie(self._sessions.begin(), SESSION_SECONDS),))

    async def sign_out(self, request: Request) -> Response:
        return Response(204, headers=(_set_cookie(b"", 0),))


def _set_cookie(value: bytes, seconds: int) -> tuple[bytes, bytes]:
    return b"set-cookie", b"%s=%s; Path=/; HttpOnly; SameSite=Strict; Max-Age=%d" % (COOKIE, value, seconds)
