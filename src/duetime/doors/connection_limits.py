"""Limits the number of client connections, and chooses which one is closed to make room for a new one.

A connection is anonymous until a request on it carries a valid key or session. Anonymous connections may use half of
the total, and those from one address a quarter. Signed-in connections are limited only by the total, because a reverse
proxy has one address and many clients. At a limit, a new connection replaces the one of the same group that has been
idle longest. So a flood of idle connections closes its own connections, and a client with the key still gets in. If no
connection of the group is idle, the new one is closed.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Protocol

from duetime.telemetry import Telemetry

SCAN_MAX = 256
"""How many connections a search examines. Reached only if most were busy since the last search."""
GONE_MAX = 64
"""How many more entries of closed connections than of open ones a heap may have."""


class Connection(Protocol):
    """A connection, as the limits see it."""

    address: str

    def idle_since(self) -> float | None:
        """Since when the server waits for the client; None while the server handles a request."""

    def drop(self) -> None:
        """Close the connection now."""


class Group:
    """A set of connections that finds the one that has been idle longest.

    A heap orders them by the time since which each was last known to be idle. Requests do not update it, because that
    would slow down each of them. A search updates the entries that it examines and drops those of closed connections.
    """

    def __init__(self) -> None:
        self._members: set[Connection] = set()
        self._heap: list[tuple[float, int, Connection]] = []
        self._numbers = count()  # so that no two entries compare equal

    def __len__(self) -> int:
        return len(self._members)

    def add(self, connection: Connection, now: float) -> None:
        self._members.add(connection)
        heappush(self._heap, (now, next(self._numbers), connection))

    def remove(self, connection: Connection) -> bool:
        """Remove a connection; returns whether it was in the group."""
        if connection not in self._members:
            return False
        self._members.remove(connection)
        if len(self._heap) > 2 * len(self._members) + GONE_MAX:
            self._heap = [entry for entry in self._heap if entry[2] in self._members]
            heapify(self._heap)
        return True

    def longest_idle(self, now: float) -> Connection | None:
        found, found_since = None, now
        for _ in range(min(2 * len(self._members), SCAN_MAX)):
            while self._heap[0][2] not in self._members:
                heappop(self._heap)
            known_since, number, connection = self._heap[0]
            since = connection.idle_since()
            if since is not None:
                if since <= known_since:
                    return connection
                if since <= found_since:
                    found, found_since = connection, since
            heapreplace(self._heap, (now if since is None else since, number, connection))
        return found


class ConnectionLimits:
    def __init__(self, connections_max: int, telemetry: Telemetry, *, key_needed: bool = True) -> None:
        """Without a key, every connection counts as signed in."""
        self._connections_max = connections_max
        self._anonymous_max = max(connections_max // 2, 1)
        self._per_address_max = max(connections_max // 4, 1)
        # Up to this number, signed-in ones make room for anonymous ones: a new client needs time to send its key.
        self._anonymous_kept = connections_max // 8
        self._telemetry = telemetry
        self.key_needed = key_needed
        self._signed_in = Group()
        self._anonymous = Group()
        self._anonymous_at: dict[str, Group] = {}

    def admit(self, connection: Connection, now: float) -> None:
        """Add a new connection; closes another one, or the new one, if a limit is reached."""
        reason, groups = self._exceeded(connection.address)
        if reason:
            closed = next((found for group in groups if (found := group.longest_idle(now))), connection)
            self._telemetry.connection_closed(reason)
            self._remove(closed)
            closed.drop()
            if closed is connection:
                return
        if self.key_needed:
            self._anonymous.add(connection, now)
            self._anonymous_at.setdefault(connection.address, Group()).add(connection, now)
        else:
            self._signed_in.add(connection, now)
        self._count()

    def sign_in(self, connection: Connection, now: float) -> None:
        """A request on this connection carried a valid key or session."""
        if self._remove_anonymous(connection):
            self._signed_in.add(connection, now)
            self._count()

    def leave(self, connection: Connection) -> None:
        """The connection is closed."""
        self._remove(connection)
        self._count()

    def _exceeded(self, address: str) -> tuple[str, tuple[Group, ...]]:
        """The limit that one more connection from this address would exceed, and the groups to close one of."""
        anonymous, signed_in = self._anonymous, self._signed_in
        same_address = self._anonymous_at.get(address)
        if same_address is not None and len(same_address) >= self._per_address_max:
            return "address", (same_address,)
        if len(anonymous) >= self._anonymous_max:
            return "limit", (anonymous,)
        if len(anonymous) + len(signed_in) < self._connections_max:
            return "", ()
        if len(anonymous) > self._anonymous_kept:
            return "limit", (anonymous, signed_in)
        return "limit", (signed_in, anonymous)

    def _remove(self, connection: Connection) -> None:
        if not self._remove_anonymous(connection):
            self._signed_in.remove(connection)

    def _remove_anonymous(self, connection: Connection) -> bool:
        if not self._anonymous.remove(connection):
            return False
        same_address = self._anonymous_at[connection.address]
        same_address.remove(connection)
        if not same_address:
            del self._anonymous_at[connection.address]
        return True

    def _count(self) -> None:
        self._telemetry.connections(signed_in=len(self._signed_in), anonymous=len(self._anonymous))
