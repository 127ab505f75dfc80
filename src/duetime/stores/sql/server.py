"""The base classes of stores that instances share: cached namespaces and hints; for SQL, group commit of puts and
retention.

Each dialect implements the methods whose statements differ."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from duetime.clock import Clock
from duetime.errors import StoreError, StoreIndeterminate
from duetime.model import Namespace, Timer
from duetime.store import ALL_ABILITIES, Abilities, Filter, Hint, Quarantine, Taken
from duetime.stores.group_commit import GroupCommit
from duetime.stores.sql.namespaces import Namespaces
from duetime.stores.sql.retention import cutoffs

PUT_MAX = 500


def partly_written(error: StoreError) -> StoreIndeterminate:
    """The error of a put that failed after it had written some of its timers."""
    return StoreIndeterminate(f"some timers were written before this error: {error}")


class Hints(Protocol):
    heard: Callable[[Hint], None]

    def send(self, hint: Hint) -> None: ...


class SharedStore(ABC):
    """What all stores have in common that several instances can share."""

    abilities: Abilities = ALL_ABILITIES

    def __init__(self, namespaces: Namespaces, hints: Hints, *, shards: int, retention_ms: int) -> None:
        self.shards = shards
        self._namespaces = namespaces
        self._hints = hints
        self._retention_ms = retention_ms

    async def failure(self) -> StoreError:
        await asyncio.Event().wait()
        raise AssertionError("unreachable: a server that is down may recover")

    async def examine(self, clock: Clock) -> tuple[str, int]:
        """Connect, and return the server's version and the proven minimum offset of ``clock`` from its clock."""
        sent_at = clock.now()
        version, now = await self._version_and_time()
        received_at = clock.now()
        await self._disconnect()
        return version, max(0, sent_at - now) + min(0, received_at - now)

    @abstractmethod
    async def _version_and_time(self) -> tuple[str, int]:
        """Query the server's version and time."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Close all connections."""

    # Hints.

    def hint(self, hint: Hint) -> None:
        self._hints.send(hint)

    def on_hint(self, heard: Callable[[Hint], None]) -> None:
        self._hints.heard = heard

    # Upkeep.

    async def quarantine(self) -> Quarantine:
        return Quarantine(await self._quarantined(), self._namespaces.unreadable)

    @abstractmethod
    async def _quarantined(self) -> int:
        """Return how many timers are in quarantine."""

    # Namespaces.

    async def namespaces(self) -> list[Namespace]:
        return await self._namespaces.all()

    async def namespace(self, name: str) -> Namespace | None:
        return await self._namespaces.one(name)

    async def put_namespace(self, namespace: Namespace, most: int | None = None) -> Namespace | None:
        return await self._namespaces.put(namespace, most)

    async def swap_namespace(self, before: Namespace, after: Namespace) -> bool:
        return await self._namespaces.swap(before, after)


class ServerStore(SharedStore):
    """The SQL stores."""

    put_bytes: Callable[[Timer], int] | None = None
    """An upper bound of what a timer adds to a put, for a server that limits its size to ``put_bytes_max``."""
    put_bytes_max = 0

    def __init__(self, namespaces: Namespaces, hints: Hints, *, shards: int, retention_ms: int) -> None:
        super().__init__(namespaces, hints, shards=shards, retention_ms=retention_ms)
        self._puts: GroupCommit[Timer, Timer | Taken | None] = GroupCommit(
            self._put, batch_max=PUT_MAX, size=self.put_bytes, size_max=self.put_bytes_max
        )

    # Timers.

    async def put(self, timer: Timer) -> Timer | None:
        existing = await self._puts(timer)
        while isinstance(existing, Taken):
            existing = await self.get(timer.namespace, timer.id) or await self._puts(timer)
        return existing

    @abstractmethod
    async def get(self, namespace: str, id: str) -> Timer | None: ...

    @abstractmethod
    async def _put(self, timers: Sequence[Timer]) -> list[Timer | Taken | None]:
        """Insert the timers whose identity is free, and return the existing timer for each of the others."""

    async def _names(self, filter: Filter) -> list[str]:
        """The namespaces to search for the filter's id; empty if the filter has no id or names its namespace."""
        if filter.id is None or filter.namespace is not None:
            return []
        return [*(namespace.name for namespace in await self.namespaces()), *self._namespaces.unreadable]

    # Upkeep.

    async def purge(self, *, retention_ms: int, limit: int) -> int:
        self._retention_ms = retention_ms
        old = cutoffs(await self._make_slices(), await self._kept_ms())
        purged = await self._drop_slices(old.slices)
        return purged + await self._drop_rows(old.rows, limit - purged)

    async def _kept_ms(self) -> dict[str, int]:
        """The retention of each namespace."""
        return self._namespaces.kept_ms(await self.namespaces(), self._retention_ms)

    @abstractmethod
    async def _make_slices(self) -> int:
        """Create the slices of history that cover today and tomorrow, if missing. Return the store's time."""

    @abstractmethod
    async def _drop_slices(self, until: int) -> int:
        """Drop the slices that ended by ``until``. Return how many timers they held."""

    @abstractmethod
    async def _drop_rows(self, before: Mapping[str, int], limit: int) -> int:
        """Delete up to ``limit`` final timers that last changed before the cutoff of their namespace. Return how
        many."""
