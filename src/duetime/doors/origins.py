"""Protects against requests that web pages of other sites make through a user's browser.

Any page that a user opens can send requests to this machine. Two things reveal that: headers that no page can set or
omit (``Sec-Fetch-Site``, ``Origin``), and the name in ``Host``. The name matters because a page can make its own name
resolve to this machine (DNS rebinding); the browser then treats both as one site. Clients other than browsers send
neither of these headers.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from duetime.doors.http import Forbidden, Request

SAFE_METHODS = ("GET", "HEAD")
ANY_HOST = "*"
HOST_CHARS_SHOWN = 80
OTHER_SITE = (
    "a page of another site sent this request; with DUETIME_AUTH=none, only this server's own pages may. Set "
    "DUETIME_AUTH=key and send the API key"
)

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::[0-9]*)?").fullmatch


def is_own_page(request: Request) -> bool:
    """Whether a browser states that a page of this host sends the request."""
    site = request.header(b"sec-fetch-site")
    if site is not None:
        return site == b"same-origin"
    origin = request.header(b"origin")
    return origin is not None and _is_origin(origin, request.header(b"host"))


def is_other_page(request: Request) -> bool:
    """Whether a browser states that a page of another origin sends the request; opening a link does not count."""
    site = request.header(b"sec-fetch-site")
    if site is None:
        return request.header(b"origin") is not None and not is_own_page(request)
    if site == b"same-origin":
        return False
    return request.method not in SAFE_METHODS or not (site == b"none" or _opens_page(request))


def _opens_page(request: Request) -> bool:
    """Whether the browser navigates to the response; then the page that it leaves can't read it."""
    return request.header(b"sec-fetch-mode") == b"navigate" and request.header(b"sec-fetch-dest") == b"document"


def _is_origin(origin: bytes, host: bytes | None) -> bool:
    """Whether the origin has this host and port. The scheme may differ, because TLS may end at a proxy."""
    try:
        parts = urlsplit(origin.decode("ascii"))
        own = (host or b"").decode("ascii").lower()
    except ValueError:
        return False
    return bool(parts.netloc) and own in (parts.netloc, parts.netloc + _DEFAULT_PORTS.get(parts.scheme, ""))


class OriginGuard:
    """Rejects requests of other sites' pages to a server without an API key."""

    def __init__(self, host: str, allowed: Collection[str]) -> None:
        """``host`` is the address that the server listens on. If it listens on all, any address is allowed in Host:
        DNS rebinding needs a name."""
        self._names = {"localhost", host, *allowed}
        self._any_address = host in ("0.0.0.0", "::")

    def check(self, request: Request) -> None:
        host = request.header(b"host")
        # Every browser sends Host.
        if host is not None and not self._is_allowed(host.decode("latin-1")):
            shown = host[:HOST_CHARS_SHOWN].decode("ascii", "backslashreplace")
            raise Forbidden(
                f"with DUETIME_AUTH=none, the host name '{shown}' is not allowed; "
                "add it to DUETIME_ALLOWED_HOSTS, or set DUETIME_AUTH=key"
            )
        if is_other_page(request):
            raise Forbidden(OTHER_SITE)

    def _is_allowed(self, host: str) -> bool:
        if ANY_HOST in self._names:
            return True
        parts = _HOST(host.lower())
        if parts is None:
            return False
        name = parts[1].removesuffix(".")
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in self._names
        return address.is_loopback or self._any_address or str(address) in self._names
