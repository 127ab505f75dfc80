"""Namespaces in a database server. They are requested every few seconds and there may be thousands, so they are read
again only after one has changed. Each dialect implements reading and writing the rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import msgspec

from duetime.errors import TooManyNamespaces
from duetime.model import FOREVER_MS, Namespace
from duetime.stores.unreadable import RowReader, read_row

decode = msgspec.json.Decoder(Namespace).decode

Row = tuple[str, Callable[[], Namespace]]
"""The name of a namespace, and what decodes the rest of its row."""


class Namespaces(ABC):
    CHANGES = "SELECT count(*), sum(revision) FROM namespaces"
    """Changes with every change of a namespace: namespaces are never deleted, and each change increments a revision."""

    def __init__(self) -> None:
        self._known: tuple[object, list[Namespace]] = None, []
        self._reader = RowReader()

    @abstractmethod
    async def _changes(self) -> object:
        """Return the result of ``CHANGES``."""

    @abstractmethod
    async def _rows(self, name: str | None = None) -> Iterable[Row]:
        """Return the row with this name, or all rows ordered by name."""

    @abstractmethod
    async def _insert(self, namespace: Namespace, most: int | None) -> bool:
        """Insert a row if the name is unused and fewer than ``most`` exist. Return whether it was inserted."""

    @abstractmethod
    async def swap(self, before: Namespace, after: Namespace) -> bool:
        """Replace ``before`` if it still has its revision. Return whether it had."""

    @property
    def unreadable(self) -> dict[str, str]:
        """The unreadable namespaces: name → reason."""
        return self._reader.unreadable

    async def all(self) -> list[Namespace]:
        changes = await self._changes()
        if self._known[0] != changes:
            self._known = changes, self._reader.read(await self._rows())
        return list(self._known[1])

    async def one(self, name: str) -> Namespace | None:
        for row in await self._rows(name):
            return read_row(*row)
        return None

    async def put(self, namespace: Namespace, most: int | None) -> Namespace | None:
        if await self._insert(namespace, most):
            return None
        existing = await self.one(namespace.name)
        if existing is None:
            raise TooManyNamespaces(most or 0)
        return existing

    def kept_ms(self, namespaces: Sequence[Namespace], retention_ms: int) -> dict[str, int]:
        """The retention of each namespace; unlimited for namespaces that can't be read."""
        kept = {n.name: retention_ms if n.retention_ms is None else n.retention_ms for n in namespaces}
        return kept | dict.fromkeys(self.unreadable, FOREVER_MS)
