"""The base class of stores that instances share: cached namespaces, hints, and a server that may be down."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from duetime.clock import Clock
from duetime.errors import StoreError
from duetime.model import Namespace
from duetime.store import ALL_ABILITIES, Abilities, Hint, Quarantine
from duetime.stores.cached_namespaces import Namespaces


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
