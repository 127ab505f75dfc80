"""Wrong API keys by address: counts them, logs them, and makes an address wait after a few.

The right key is always accepted at once, so an attacker can't lock out clients that share its address, as behind a
proxy or a NAT. A limited number of addresses is remembered, the latest ones. Each process counts for itself.
"""

from __future__ import annotations

import ipaddress
import logging

from msgspec import Struct

from duetime.clock import Clock
from duetime.telemetry import Telemetry

log = logging.getLogger(__name__)

FREE = 10
"""How many wrong keys an address may send before it has to wait."""
WAIT_SECONDS_MAX = 60
FORGOTTEN_SECONDS = 600.0
LOG_SECONDS = 5.0
LOGGED_MAX = 20
"""The most log messages in that time, for all addresses together."""
ADDRESSES_MAX = 4096
V6_PREFIX = 64
"""IPv6 addresses with the same prefix of this length usually belong to one customer, so they count as one."""


class _Address(Struct):
    wrong: int = 0
    last_at: float = 0.0
    wait_until: float = 0.0
    logged_at: float | None = None
    unlogged: int = 0


class WrongKeys:
    def __init__(self, clock: Clock, telemetry: Telemetry) -> None:
        self._clock = clock
        self._telemetry = telemetry
        self._addresses: dict[str, _Address] = {}  # least recent first
        self._logged, self._logging_since = 0, clock.monotonic()

    def note(self, address: str) -> int:
        """Count a wrong key of this address; returns for how many seconds it has to wait, or 0."""
        self._telemetry.wrong_key()
        now = self._clock.monotonic()
        name = group_of(address)
        known = self._addresses.pop(name, None)
        if known is None or now - known.last_at > FORGOTTEN_SECONDS:
            known = _Address()
        if len(self._addresses) >= ADDRESSES_MAX:
            del self._addresses[next(iter(self._addresses))]
        self._addresses[name] = known
        waits = now < known.wait_until
        known.wrong += 1
        known.last_at = now
        if known.wrong >= FREE:
            known.wait_until = now + min(2 ** min(known.wrong - FREE, 16), WAIT_SECONDS_MAX)
        self._log(name, known, now)
        return max(1, round(known.wait_until - now)) if waits else 0

    def _log(self, name: str, known: _Address, now: float) -> None:
        known.unlogged += 1
        if now - self._logging_since >= LOG_SECONDS:
            self._logged, self._logging_since = 0, now
        often = known.logged_at is not None and now - known.logged_at < LOG_SECONDS
        if not often and self._logged < LOGGED_MAX:
            self._logged += 1
            log.warning(
                "wrong API key from %s: %d since the last message, %d in all", name, known.unlogged, known.wrong
            )
            known.logged_at, known.unlogged = now, 0


def group_of(address: str) -> str:
    """The name under which an address is counted: an IPv4 address, or the network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, V6_PREFIX), strict=False))
