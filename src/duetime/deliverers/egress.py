"""The address guard: which URLs are well formed, and which addresses a callback may be sent to.

A callback URL is written by a stranger and followed from inside our network. So the text is parsed once, strictly,
into a ``Url``, and everything after that sees the parts and never the string: two parsers cannot disagree about where
the host ends. A name is resolved, every address that comes back is judged, and the caller connects to a judged
address. A spelling that some resolver would read as another address (``127.1``, ``0x7f.1``, a trailing dot behind
digits) is not a host here.

Fails with ``InvalidInput`` for a bad URL, ``Refused`` for a good URL that leads somewhere closed, ``Unresolved`` for
a name that has no address now. Lookups are blocking calls of the system, so they run in threads of their own: few,
with a queue that is bounded and a time limit, and a slow name server delays nobody who does not need it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from msgspec import Struct

from duetime.clock import Clock
from duetime.errors import DuetimeError, InvalidInput, SettingsError

URL_CHARS_MAX = 2048
URLS_CACHED_MAX = 4096
HOST_CHARS_MAX = 253
LABEL_CHARS_MAX = 63
ADDRESSES_MAX = 8  # tried for one name; all that came back are judged
LOOKUP_THREADS_MAX = 16
LOOKUPS_PENDING_MAX = 1024
LOOKUP_SECONDS_MAX = 10.0
RESULT_SECONDS = 5.0  # a result is trusted this long: less than any attempt's patience, enough for a burst
RESULTS_MAX = 4096

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Refused(DuetimeError):
    """The guard does not let a request out to this address."""


class Unresolved(DuetimeError):
    """The name has no address, or the lookup did not end in time."""


class Url(Struct, frozen=True, kw_only=True):
    """A callback URL in parts, each safe to put on the wire as it is."""

    tls: bool
    host: str  # lower case, no brackets
    port: int
    authority: str  # for the Host header: brackets around IPv6, the default port left out
    target: str  # path and query, never empty
    address: str | None  # the host when it is an address and not a name
    origin: str  # what tells one destination from another

    @property
    def server_name(self) -> str:
        """What a certificate is checked against: names in certificates have no trailing dot."""
        return self.host.rstrip(".")


_VISIBLE = re.compile(r"[!-~]+")
_PARTS = re.compile(r"(https?)://([^/?#]*)([^#]*)", re.IGNORECASE)
_AUTHORITY = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(?::(.*))?")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_LABEL = re.compile(rf"[a-z0-9_-]{{1,{LABEL_CHARS_MAX}}}")


def parse_url(url: str, field: str = "callback_url") -> Url:
    """The parts of an absolute http(s) URL; ``InvalidInput`` names ``field`` and what is wrong."""
    try:
        return _parse(url)
    except ValueError as exc:
        raise InvalidInput(field, str(exc)) from None


@lru_cache(maxsize=URLS_CACHED_MAX)
def _parse(url: str) -> Url:
    if len(url) > URL_CHARS_MAX:
        raise ValueError(f"is longer than {URL_CHARS_MAX} characters")
    if not url.isascii():
        raise ValueError("has characters outside ASCII: percent-encode the path and write the host in its xn-- form")
    if not _VISIBLE.fullmatch(url):
        raise ValueError("is empty or has white space or control characters")
    if "\\" in url:
        raise ValueError("has a backslash, which clients read in different ways")
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
        # The fragment belongs to the reader of a page and is never sent.
        target=target if target.startswith("/") else f"/{target}",
        address=address,
        origin=f"{scheme.lower()}://{shown}:{port}",
    )


def _host(host: str) -> tuple[str, str | None]:
    """The host in its one spelling, and the same as an address when it is one."""
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
        # A resolver would read any such name as an IPv4 address, by rules of its own: only the plain spelling is one.
        try:
            address = str(ipaddress.IPv4Address(host))
        except ValueError:
            address = ""
        if address != host:
            raise ValueError("has a host that looks like an IPv4 address and is not written as four decimal numbers")
        return address, address
    if not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("has a host that is not a DNS name")
    return host, None


def _without_zone(text: str) -> str:
    if "%" in text:
        raise ValueError("zone")
    return text


def _networks(*entries: tuple[str, str]) -> tuple[tuple[Network, str], ...]:
    return tuple((ipaddress.ip_network(cidr), word) for cidr, word in entries)


_CLOSED_V4 = _networks(
    ("0.0.0.0/8", "an address of this host"),
    ("10.0.0.0/8", "a private address"),
    ("100.64.0.0/10", "a carrier's shared address"),
    ("127.0.0.0/8", "a loopback address"),
    ("168.63.129.16/32", "a cloud's internal address"),
    ("169.254.0.0/16", "a link-local address"),
    ("172.16.0.0/12", "a private address"),
    ("192.0.0.0/24", "a reserved address"),
    ("192.0.2.0/24", "a documentation address"),
    ("192.31.196.0/24", "a reserved address"),
    ("192.52.193.0/24", "a reserved address"),
    ("192.88.99.0/24", "a relay address"),
    ("192.168.0.0/16", "a private address"),
    ("192.175.48.0/24", "a reserved address"),
    ("198.18.0.0/15", "a benchmarking address"),
    ("198.51.100.0/24", "a documentation address"),
    ("203.0.113.0/24", "a documentation address"),
    ("224.0.0.0/4", "a multicast address"),
    ("240.0.0.0/4", "a reserved address"),
)
# For IPv6 the open part is the smaller list: one range is handed out, minus what is carved from it.
_OPEN_V6 = ipaddress.IPv6Network("2000::/3")
_CLOSED_V6 = _networks(
    ("2001::/23", "a reserved address"),
    ("2001:db8::/32", "a documentation address"),
    ("2002::/16", "a 6to4 address, which hides an IPv4 one"),
    ("2620:4f:8000::/48", "a reserved address"),
    ("3fff::/20", "a documentation address"),
)
# Only for the words of a refusal: all of it is outside the open range anyway.
_NAMED_V6 = _networks(
    ("::/128", "an address of this host"),
    ("::1/128", "a loopback address"),
    ("::ffff:0:0/96", "an IPv4 address in disguise"),
    ("::/96", "an IPv4 address in disguise"),
    ("64:ff9b::/96", "an IPv4 address in disguise"),
    ("fc00::/7", "a private address"),
    ("fe80::/10", "a link-local address"),
    ("fec0::/10", "a private address"),
    ("ff00::/8", "a multicast address"),
)
_LOOPBACK = ("127.0.0.0/8", "::1/128")
_SETTING = "DUETIME_ALLOW_PRIVATE_TARGETS"


def _closed(address: Address) -> str | None:
    """Why the public internet does not have this address; None when it does."""
    if isinstance(address, ipaddress.IPv4Address):
        for network, word in _CLOSED_V4:
            if address in network:
                return word
        return None if address.is_global else "a reserved address"
    table = _CLOSED_V6 if address in _OPEN_V6 else _NAMED_V6
    for network, word in table:
        if address in network:
            return word
    return None if address in _OPEN_V6 else "a reserved address"


class _Result(Struct, frozen=True):
    until: float
    addresses: list[str] | None
    error: DuetimeError | None


class Egress:
    """Judges addresses by one policy and resolves names under it.

    Public addresses are always open. ``allow_all`` opens everything, ``allow_loopback`` this machine, ``allow`` the
    given CIDRs.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        allow_all: bool = False,
        allow_loopback: bool = False,
        allow: Sequence[str] = (),
    ) -> None:
        self._clock = clock
        self._allow_all = allow_all
        self._open = [_network(cidr) for cidr in ((*_LOOPBACK, *allow) if allow_loopback else allow)]
        self._results: dict[str, _Result] = {}
        self._pending: dict[str, asyncio.Future[list[str] | str]] = {}
        self._threads: ThreadPoolExecutor | None = None
        # The policy never changes, and the same few addresses are judged over and over.
        self._objection = lru_cache(maxsize=RESULTS_MAX)(self._judged)

    def allowed(self, address: str) -> bool:
        return self._objection(address) is None

    def check(self, url: Url) -> None:
        """Refuse a literal address that is closed. For a user's sake at creation: a name is judged at each attempt."""
        if url.address is not None and (objection := self._objection(url.address)):
            raise Refused(objection)

    def known(self, url: Url) -> list[str] | None:
        """What ``resolve`` would say, if it was asked a moment ago and all was well."""
        result = self._results.get(url.host)
        return None if result is None or result.until <= self._clock.monotonic() else result.addresses

    async def resolve(self, url: Url) -> list[str]:
        """The addresses to connect to, in order of preference: every one of them judged, never an empty list."""
        result = self._results.get(url.host)
        if result is None or result.until <= self._clock.monotonic():
            result = await self._judge(url)
        if result.addresses is None:
            assert result.error is not None
            # A new exception each time: one that is raised again and again would gather tracebacks.
            raise type(result.error)(*result.error.args)
        return result.addresses

    async def close(self) -> None:
        """Start no more lookups. One that hangs in the system is left to end by itself."""
        for lookup in self._pending.values():
            lookup.cancel()
        self._pending.clear()
        self._results.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    async def _judge(self, url: Url) -> _Result:
        found = [url.address] if url.address is not None else await self._lookup(url.host)
        error: DuetimeError | None = None
        if isinstance(found, str):
            error = Unresolved(found)
        else:
            # One closed address among open ones is how a name is made to slip through: all or nothing.
            for address in found:
                if objection := self._objection(address):
                    shown = objection if url.address is not None else f"{url.host} resolves to {objection}"
                    error = Refused(shown)
                    break
        until = self._clock.monotonic() + RESULT_SECONDS
        addresses = None if error is not None or isinstance(found, str) else found[:ADDRESSES_MAX]
        result = _Result(until, addresses, error)
        if len(self._results) >= RESULTS_MAX:
            del self._results[next(iter(self._results))]
        self._results.pop(url.host, None)
        self._results[url.host] = result
        return result

    async def _lookup(self, host: str) -> list[str] | str:
        """What the system says about a name: its addresses, or a sentence that says why there are none."""
        lookup = self._pending.get(host)
        if lookup is None:
            if len(self._pending) >= LOOKUPS_PENDING_MAX:
                # Raised and not returned: it says nothing about the name, so it must not be remembered for it.
                raise Unresolved(f"{host} was not looked up: {LOOKUPS_PENDING_MAX} lookups are waiting already")
            if self._threads is None:
                self._threads = ThreadPoolExecutor(LOOKUP_THREADS_MAX, thread_name_prefix="duetime-dns")
            lookup = asyncio.get_running_loop().run_in_executor(self._threads, _system_lookup, host)
            self._pending[host] = lookup
            lookup.add_done_callback(lambda _: self._pending.pop(host, None))
        # wait() leaves the lookup alone when this caller gives up: others may be waiting for it too.
        await asyncio.wait((lookup,), timeout=LOOKUP_SECONDS_MAX)
        if not lookup.done():
            return f"{host} was not resolved within {LOOKUP_SECONDS_MAX:g}s"
        if lookup.cancelled():
            raise Unresolved(f"{host} was not resolved: shutting down")
        return lookup.result()

    def _judged(self, address: str) -> str | None:
        """Why this address is closed, in words; None when it is open."""
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return f"{address!r} is not an address"
        if self._allow_all:
            return None
        word = _closed(parsed)
        if word is None:
            return None
        forms: list[Address] = [parsed]
        if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
            forms.append(parsed.ipv4_mapped)
        if any(form in network for network in self._open for form in forms):
            return None
        return f"{address} is {word}; {_SETTING} opens it"


def _network(cidr: str) -> Network:
    try:
        return ipaddress.ip_network(cidr.strip(), strict=False)
    except ValueError:
        raise SettingsError(f"{_SETTING}: '{cidr}' is not a CIDR such as 10.0.0.0/8") from None


def _system_lookup(host: str) -> list[str] | str:
    """Runs in a thread. Errors are values here, so that a lookup nobody waits for any more has nothing to report."""
    try:
        # Bytes keep Python's IDNA codec out of it: the parser has let nothing but ASCII through.
        found = socket.getaddrinfo(host.encode("ascii"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        return f"{host} was not resolved: {getattr(exc, 'strerror', None) or exc}"
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return addresses or f"{host} has no address"
