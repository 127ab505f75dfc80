"""The base class of SQL stores on a server: group commit of puts, and retention.

Each dialect implements the methods whose statements differ."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

from duetime.errors import StoreError, StoreIndeterminate
from duetime.model import Timer
from duetime.store import Filter, Taken
from duetime.stores.cached_namespaces import Namespaces
from duetime.stores.group_commit import GroupCommit
from duetime.stores.shared_store import Hints, SharedStore
from duetime.stores.sql.retention import cutoffs

PUT_MAX = 500


def partly_written(error: StoreError) -> StoreIndeterminate:
    """The error of a put that failed after it had written some of its timers."""
    return StoreIndeterminate(f"some timers were written before this error: {error}")


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
