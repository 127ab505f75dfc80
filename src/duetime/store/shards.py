"""Ownership of shards: leases, fencing tokens (versions), and hints between instances."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from msgspec import Struct

from duetime.instants import EPOCH, Instant


class About(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an instance reports about itself, for operators."""

    name: str = ""  # machine and process
    version: str = ""  # of the program
    started_at: Instant = EPOCH
    clock_offset_ms: int = 0  # proven minimum offset from the store's clock
    serving: bool = True  # whether it claims shards
    fires: tuple[int, ...] = ()  # attempts sent, by lateness, in the buckets of ``telemetry``
    overdue: dict[str, int] = {}  # overdue timers, by reason


UNNAMED = About()


class Renewal(Struct, frozen=True, kw_only=True):
    """The result of a renewal: the store's time, the shards of this owner, the live instances, and the free shards."""

    now: Instant
    held: dict[int, int]  # shard → version
    instances: frozenset[bytes]  # the live ones that claim shards
    free: frozenset[int]
    free_at: Instant | None = None  # the earliest expiry among the leases of other instances
    failovers: int = 0  # failovers so far to a server that may lack recent commits of the one before it


class Instance(Struct, frozen=True, kw_only=True):
    """A live instance and its shards."""

    owner_id: bytes
    about: About
    alive_until: Instant
    shards: tuple[int, ...]


class Hint(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message that wakes the other instances before their next poll. It may get lost."""

    due_at: Instant | None = None  # a timer falls due then
    shards: bool = False  # shards became free, or an instance joined
    namespaces: bool = False  # a namespace changed

    def __or__(self, other: Hint) -> Hint:
        due = [at for at in (self.due_at, other.due_at) if at is not None]
        return Hint(
            due_at=min(due, default=None),
            shards=self.shards or other.shards,
            namespaces=self.namespaces or other.namespaces,
        )


class Shards(Protocol):
    shards: int
    """The number of shards, fixed when the store is first opened."""

    async def renew(self, owner_id: bytes, lease_ms: int, about: About = UNNAMED) -> Renewal:
        """Send a heartbeat and extend the leases of all shards that this instance owns."""

    async def claim(self, owner_id: bytes, shards: Collection[int], lease_ms: int) -> dict[int, int]:
        """Claim each of ``shards`` that is free, has an expired lease or is already owned by this instance. Return the
        claimed shards, each with its new version, which is one higher than before."""

    async def release(self, owner_id: bytes, shards: Collection[int]) -> None:
        """Release each of ``shards`` that this instance owns."""

    async def leave(self, owner_id: bytes) -> None:
        """Release all shards of this instance and remove it from the live instances."""

    async def cluster(self) -> list[Instance]:
        """Return every live instance with the shards that it owns."""

    def hint(self, hint: Hint) -> None:
        """Send a hint to the other instances, best effort. A store that only one process can use does nothing."""

    def on_hint(self, heard: Callable[[Hint], None]) -> None:
        """Call ``heard`` with each hint from another instance."""
