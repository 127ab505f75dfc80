"""The address guard: which addresses a callback may be sent to.

A stranger writes a callback URL, and we follow it from inside our network. So every address that a name resolves to is
checked, and the caller connects to exactly that address.

Raises ``Refused`` for a URL that points to a blocked address, ``Unresolved`` for a name without an address, and
``NotSent`` if a local shortage prevented the lookup. Results are cached for a few seconds, shortages never.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Sequence
from functools import lru_cache

from msgspec import Struct

from duetime.clock import Clock
from duetime.deliverers.lookups import Found, Lookups
from duetime.errors import DuetimeError, SettingsError
from duetime.urls import Url

log = logging.getLogger(__name__)

ADDRESSES_MAX = 8  # tried for one name; all its addresses are checked
RESULT_SECONDS = 5.0  # cache time: shorter than any attempt's timeout, long enough for a burst
RESULTS_MAX = 4096

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Refused(DuetimeError):
    """The guard blocks requests to this address."""


class Unresolved(DuetimeError):
    """The name has no address, or the lookup timed out."""


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
# For IPv6 an allow list is shorter: one global range, minus the reserved parts of it.
_OPEN_V6 = ipaddress.IPv6Network("2000::/3")
_CLOSED_V6 = _networks(
    ("2001::/23", "a reserved address"),
    ("2001:db8::/32", "a documentation address"),
    ("2002::/16", "a 6to4 address, which contains an IPv4 one"),
    ("2620:4f:8000::/48", "a reserved address"),
    ("3fff::/20", "a documentation address"),
)
# Only for the wording of errors: all of these are outside the open range anyway.
_NAMED_V6 = _networks(
    ("::/128", "an address of this host"),
    ("::1/128", "a loopback address"),
    ("::ffff:0:0/96", "an IPv4 address written as IPv6"),
    ("::/96", "an IPv4 address written as IPv6"),
    ("64:ff9b::/96", "an IPv4 address written as IPv6"),
    ("fc00::/7", "a private address"),
    ("fe80::/10", "a link-local address"),
    ("fec0::/10", "a private address"),
    ("ff00::/8", "a multicast address"),
)
_LOOPBACK = ("127.0.0.0/8", "::1/128")
_SETTING = "DUETIME_ALLOW_PRIVATE_TARGETS"


def _closed(address: Address) -> str | None:
    """Why this address is not public; None if it is."""
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
    """Resolves names and checks addresses against one policy.

    Public addresses are always allowed. ``allow_all`` allows everything, ``allow_loopback`` loopback addresses, and
    ``allow`` the given CIDRs.
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
        self._lookups = Lookups(clock)
        # Cached: the policy never changes, and the same few addresses are checked over and over.
        self._objection = lru_cache(maxsize=RESULTS_MAX)(self._judged)

    def allowed(self, address: str) -> bool:
        return self._objection(address) is None

    def check(self, url: Url) -> None:
        """Refuse a literal address that is blocked, to report it at creation. Names are checked at each attempt."""
        if url.address is not None and (word := self._objection(url.address)):
            raise Refused(_refusal(url, word))

    def known(self, url: Url) -> list[str] | None:
        """The cached addresses of ``resolve``; None if there are none."""
        result = self._results.get(url.host)
        return None if result is None or result.until <= self._clock.monotonic() else result.addresses

    async def resolve(self, url: Url, until: float | None = None, *, optional: bool = False) -> list[str]:
        """The addresses to connect to, in order of preference: all checked, never an empty list.

        Raises ``TimeoutError`` if a lookup is still running at ``until`` (event loop time). An optional lookup starts
        at once or not at all.
        """
        result = self._results.get(url.host)
        if result is None or result.until <= self._clock.monotonic():
            result = await self._judge(url, until, optional)
        if result.addresses is None:
            assert result.error is not None
            # A new exception each time: one that is raised repeatedly would accumulate tracebacks.
            raise type(result.error)(*result.error.args)
        return result.addresses

    async def close(self) -> None:
        """Start no more lookups. Lookups that hang in the system are left to end by themselves."""
        self._lookups.close()
        self._results.clear()

    async def _judge(self, url: Url, until: float | None, optional: bool) -> _Result:
        found: Found
        if url.address is not None:
            found = [url.address]
        else:
            found = await self._lookups.find(url.host, until, optional=optional)
        error: DuetimeError | None = None
        if isinstance(found, str):
            error = Unresolved(found)
        else:
            # An attacker could mix one blocked address with public ones: all must be allowed.
            for address in found:
                if word := self._objection(address):
                    if url.address is None:
                        log.warning(
                            "%s resolves to %s, which is %s: callbacks to it are blocked", url.host, address, word
                        )
                    error = Refused(_refusal(url, word))
                    break
        until = self._clock.monotonic() + RESULT_SECONDS
        addresses = None if error is not None or isinstance(found, str) else found[:ADDRESSES_MAX]
        result = _Result(until, addresses, error)
        if len(self._results) >= RESULTS_MAX:
            del self._results[next(iter(self._results))]
        self._results.pop(url.host, None)
        self._results[url.host] = result
        return result

    def _judged(self, address: str) -> str | None:
        """Why this address is blocked, in words; None if it is allowed."""
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return "not an address"
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
        return word


def _refusal(url: Url, word: str) -> str:
    """The error text for clients. It does not reveal what a name resolves to inside our network; the log does."""
    if url.address is not None:
        where = f"{word} ({url.address})"
    else:
        where = f"{url.host}, which resolves to an address that is not public"
    return f"points to {where}; add its network to {_SETTING} to allow it"


def _network(cidr: str) -> Network:
    try:
        return ipaddress.ip_network(cidr.strip(), strict=False)
    except ValueError:
        raise SettingsError(f"{_SETTING}: '{cidr}' is not a CIDR such as 10.0.0.0/8") from None
