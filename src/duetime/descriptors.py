"""Raises the limit on open files and divides it between clients, deliveries and everything else.

Each connection takes a file descriptor. Without shares, client connections could use up all of them, and deliveries
would fail with "too many open files". If the system does not allow a higher limit, the process works with what it has.
"""

from __future__ import annotations

import logging
import resource

from msgspec import Struct

log = logging.getLogger("duetime")

LIMIT_MAX = 1_048_576
"""The highest value for the soft limit; the hard limit may be infinite."""
RESERVE_PARTS = 8
"""One in this many descriptors is for the store, the listener, the log, DNS lookups, the broker and other workers."""
RESERVE_MIN = 64


class Shares(Struct, frozen=True, kw_only=True):
    limit: int
    connections: int  # as configured
    deliveries: int  # as configured
    inbound_max: int  # connections from clients
    outbound_max: int  # connections for deliveries


def shares(limit: int, *, connections: int, deliveries: int) -> Shares:
    """Divide a limit. If it is too low for both, clients and deliveries each get what is configured, or half of what is
    left after the reserve."""
    reserve = min(max(limit // RESERVE_PARTS, RESERVE_MIN), limit // 2)
    rest = limit - reserve
    inbound_max = min(connections, max(rest // 2, rest - deliveries))
    return Shares(
        limit=limit,
        connections=connections,
        deliveries=deliveries,
        inbound_max=inbound_max,
        outbound_max=rest - inbound_max,
    )


def limit_for(connections: int, deliveries: int) -> int:
    """The limit that is enough for both."""
    wanted = connections + deliveries
    return wanted + max(RESERVE_MIN, (wanted - 1) // (RESERVE_PARTS - 1))


def raise_limit() -> int:
    """Raise the soft limit of this process to its hard limit, and return the soft limit. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return LIMIT_MAX
    wanted = LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, LIMIT_MAX)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            log.debug("the limit on open files stays at %d: %s", soft, error)
        else:
            return wanted
    return soft


def report(given: Shares) -> None:
    """Log the limit, and a warning when it is too low for the settings."""
    log.info("the limit on open files is %d", given.limit)
    if given.inbound_max < given.connections or given.outbound_max < given.deliveries:
        log.warning(
            "the limit on open files is too low: using at most %d client connections (DUETIME_MAX_CONNECTIONS is %d) "
            "and %d attempts in flight (DUETIME_MAX_IN_FLIGHT is %d); raise it (ulimit -n) to %d or lower the "
            "settings",
            given.inbound_max,
            given.connections,
            min(given.outbound_max, given.deliveries),
            given.deliveries,
            limit_for(given.connections, given.deliveries),
        )
