"""The life cycle of a store, retention, quarantine, and the list of ended sessions."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from duetime.errors import StoreError
from duetime.instants import Instant

ENDED_SESSIONS_MAX = 10_000
"""How many ended sessions a store records individually."""


class Quarantine(Struct, frozen=True):
    """What this program can't read."""

    timers: int = 0  # found by a begin, or when the store was opened
    namespaces: dict[str, str] = {}  # name → reason


class Upkeep(Protocol):
    async def open(self) -> None:
        """Connect and migrate the schema. All other methods require this."""

    async def close(self) -> None:
        """Finish pending calls and disconnect. The store can't be used again."""

    async def ping(self) -> None:
        """Return if the store can be read and written; raise a ``StoreError`` otherwise."""

    async def failure(self) -> StoreError:
        """Wait until the store fails permanently, and return why. The process must stop then."""

    async def purge(self, *, retention_ms: int, limit: int) -> int:
        """Delete up to ``limit`` final timers that are older than the retention of their namespace (or
        ``retention_ms``), in small batches from each namespace, so that no write waits long. Return how many; fewer
        than ``limit`` mean that no old timers are left."""

    async def quarantine(self) -> Quarantine:
        """Return the unreadable rows found so far."""


class Sessions(Protocol):
    async def end_session(self, id: bytes, ends_at: Instant, *, forget_before: Instant) -> None:
        """Record that a session, which would have expired at ``ends_at``, has ended, and delete the records of sessions
        that expired before ``forget_before``. When ``ENDED_SESSIONS_MAX`` are recorded, they are replaced by one record
        that ends every session with an expiry no later than theirs. So the table stays small and an ended session never
        becomes valid again."""

    async def session_ended(self, id: bytes, ends_at: Instant) -> bool:
        """Whether this session is recorded as ended."""
