"""Which page a browser sends a request for, and under which host names a service without keys may be asked.

A browser sends requests to this machine for any page that its user opens. Two things give such a page away: headers
that no page can set or leave out (``Sec-Fetch-Site``, ``Origin``), and the name in ``Host``. The name matters because
a page can have its own name resolve to this machine (DNS rebinding); the browser then takes both for one site. A client
that is not a browser sends neither header.
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

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+)(?::[0-9]*)?").fullmatch


def is_own_page(request: Request) -> bool:
    """Whether a browser says that a page of this host sends the request."""
    site = request.header(b"sec-fetch-site")
    if site is not None:
        return site == b"same-origin"
    origin = request.header(b"origin")
    return origin is not None and _is_origin(origin, request.header(b"host"))


def is_other_page(request: Request) -> bool:
    """Whether a browser says that a page of another origin sends the request. Opening a link is not that."""
    site = request.header(b"sec-fetch-site")
    if site is None:
        return request.header(b"origin") is not None and not is_own_page(request)
    if site == b"same-origin":
        return False
    return request.method not in SAFE_METHODS or not (site == b"none" or _opens_page(request))


def _opens_page(request: Request) -> bool:
    """Whether the browser shows the response in place of the page that it is on, which then can't read it."""
    return request.header(b"sec-fetch-mode") == b"navigate" and request.header(b"sec-fetch-dest") == b"document"


def _is_origin(origin: bytes, host: bytes | None) -> bool:
    """Whether the origin has this host and port. Its scheme does not count: TLS may end at a proxy."""
    try:
        parts = urlsplit(origin.decode("ascii"))
        asked = (host or b"").decode("ascii").lower()
    except ValueError:
        return False
    return bool(parts.netloc) and asked in (parts.netloc, parts.netloc + _DEFAULT_PORTS.get(parts.scheme, ""))


class OriginGuard:
    """Refuses what pages of other sites send to a service that asks for no key."""

    def __init__(self, host: str, allowed: Collection[str]) -> None:
        """``host`` is the address that the service listens on. On all of them, each is a good name: a page can't be
        given an address for its name."""
        self._names = {"localhost", host, *allowed}
        self._any_address = host in ("0.0.0.0", "::")

    def check(self, request: Request) -> None:
        host = request.header(b"host")
        # Every browser sends it.
        if host is not None and not self._is_allowed(host.decode("latin-1")):
            shown = host[:HOST_CHARS_SHOWN].decode("ascii", "backslashreplace")
            raise Forbidden(
                f"this service does not answer to the host name '{shown}' while DUETIME_AUTH=none; "
                "add the name to DUETIME_ALLOWED_HOSTS, or set DUETIME_AUTH=key"
            )
        if is_other_page(request):
            raise Forbidden(
                "a browser sent this for a page of another site, and DUETIME_AUTH=none accepts only pages of this "
                "service; set DUETIME_AUTH=key and send the API key from there"
            )

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
