"""Parses callback URLs strictly. Pure: no I/O.

A stranger writes a callback URL, and we follow it from inside our network. So the text is parsed once into a ``Url``,
and later code uses only its parts: two parsers can't disagree about where the host ends. Some resolvers accept
``127.1``, ``0x7f.1`` or digits with a trailing dot as an address; here none of these is a valid host.

``parse_url`` raises ``InvalidInput``. ``origin_of`` does not raise.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

from msgspec import Struct

from duetime.errors import InvalidInput

URL_CHARS_MAX = 2048
URLS_CACHED_MAX = 4096
HOST_CHARS_MAX = 253
LABEL_CHARS_MAX = 63


class Url(Struct, frozen=True, kw_only=True):
    """The parts of a callback URL, each safe to send as it is."""

    tls: bool
    host: str  # lower case, no brackets
    port: int
    authority: str  # for the Host header: brackets around IPv6, without the default port
    target: str  # path and query, never empty
    address: str | None  # the host if it is an address and not a name
    origin: str  # identifies the destination

    @property
    def server_name(self) -> str:
        """The name to verify the certificate against: names in certificates have no trailing dot."""
        return self.host.rstrip(".")


_VISIBLE = re.compile(r"[!-~]+")
_PARTS = re.compile(r"(https?)://([^/?#]*)([^#]*)", re.IGNORECASE)
_PREFIX = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
_AUTHORITY = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::(.*))?")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_LABEL = re.compile(rf"[a-z0-9_-]{{1,{LABEL_CHARS_MAX}}}")


def parse_url(url: str, field: str = "callback_url") -> Url:
    """Parse an absolute http(s) URL; raises ``InvalidInput`` with the ``field`` and the reason."""
    try:
        return _cached_parse(url)
    except ValueError as exc:
        raise InvalidInput(field, str(exc)) from None


def _parse(url: str) -> Url:
    if len(url) > URL_CHARS_MAX:
        raise ValueError(f"is longer than {URL_CHARS_MAX} characters")
    if not url.isascii():
        raise ValueError("has characters outside ASCII: percent-encode the path and write the host in its xn-- form")
    if not _VISIBLE.fullmatch(url):
        raise ValueError("is empty or has white space or control characters")
    if "\\" in url:
        raise ValueError("has a backslash, which clients interpret in different ways")
    parts = _PARTS.match(url)
    if parts is None:
        raise ValueError("must be an absolute http:// or https:// URL")
    scheme, authority, target = parts.groups()
    if "@" in authority:
        raise ValueError("has a user name or password; send credentials in a header")
    split = _AUTHORITY.fullmatch(authority)
    if split is None:
        raise ValueError("has no valid host")
    host, port_text = split.group(1).lower(), split.group(2)
    tls = scheme.lower() == "https"
    default_port = 443 if tls else 80
    port = default_port
    if port_text is not None:
        port = int(port_text) if _PORT.fullmatch(port_text) else 0
        if not 1 <= port <= 65535:
            raise ValueError("has a port that is not a plain number from 1 to 65535")
    name, address = _host(host)
    shown = f"[{name}]" if ":" in name else name
    return Url(
        tls=tls,
        host=name,
        port=port,
        authority=shown if port == default_port else f"{shown}:{port}",
        # Fragments are never sent.
        target=target if target.startswith("/") else f"/{target}",
        address=address,
        origin=f"{scheme.lower()}://{shown}:{port}",
    )


_cached_parse = lru_cache(maxsize=URLS_CACHED_MAX)(_parse)


def _host(host: str) -> tuple[str, str | None]:
    """The host in its canonical form, and again as an address if it is one."""
    if host.startswith("["):
        try:
            address = str(ipaddress.IPv6Address(_without_zone(host[1:-1])))
        except ValueError:
            raise ValueError("has a host in brackets that is not a plain IPv6 address") from None
        return address, address
    name = host.removesuffix(".")
    if not name:
        raise ValueError("has no host")
    if len(name) > HOST_CHARS_MAX:
        raise ValueError(f"has a host longer than {HOST_CHARS_MAX} characters")
    labels = name.split(".")
    if labels[-1].isdigit() or labels[-1].startswith("0x"):
        # A resolver may read such a name as an IPv4 address by its own rules: accept only the plain notation.
        try:
            address = str(ipaddress.IPv4Address(host))
        except ValueError:
            address = ""
        if address != host:
            raise ValueError("has a host that looks like an IPv4 address but is not four decimal numbers")
        return address, address
    if not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("has a host that is not a DNS name")
    return host, None


def _without_zone(text: str) -> str:
    if "%" in text:
        raise ValueError("zone")
    return text


@lru_cache(maxsize=URLS_CACHED_MAX)
def origin_of(url: str) -> str:
    """The origin of a URL, or ``invalid: <reason>``; never raises.

    Parses only the part before the path, so the result is cached for all URLs of a host, and a URL with an invalid path
    still has an origin.
    """
    prefix = _PREFIX.match(url)
    return _origin(prefix.group() if prefix is not None else url[: URL_CHARS_MAX + 1])


@lru_cache(maxsize=URLS_CACHED_MAX)
def _origin(prefix: str) -> str:
    try:
        return _parse(prefix).origin
    except ValueError as exc:
        return f"invalid: {exc}"
