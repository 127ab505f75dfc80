"""Namespaces in Cassandra: one partition, which counts its rows and its changes."""

from __future__ import annotations

from functools import partial

import msgspec

from duetime.errors import StoreUnavailable
from duetime.model import Namespace
from duetime.stores import cached_namespaces as namespaces
from duetime.stores.cached_namespaces import Row, decode
from duetime.stores.cassandra.driver import Call, Session

TRIES_MAX = 8
_encode = msgspec.json.Encoder().encode
_COUNTED = "UPDATE namespaces SET changes = ?, number = ? WHERE part = 0 IF changes = ?"
_INSERT = "UPDATE namespaces SET definition = ?, revision = ? WHERE part = 0 AND name = ? IF revision = null"
_SWAP = "UPDATE namespaces SET definition = ?, revision = ? WHERE part = 0 AND name = ? IF revision = ?"


def _of(definition: bytes, revision: int) -> Namespace:
    return msgspec.structs.replace(decode(definition), revision=revision)


class Namespaces(namespaces.Namespaces):
    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    async def _changes(self) -> object:
        return (await self._counts())[0]

    async def _counts(self) -> tuple[int, int]:
        """How often a namespace has changed, and how many there are."""
        [(changes, number)] = await self._session.read("SELECT changes, number FROM namespaces WHERE part = 0 LIMIT 1")
        return changes, number

    async def _rows(self, name: str | None = None) -> list[Row]:
        every = "SELECT name, definition, revision FROM namespaces WHERE part = 0"
        rows = await (self._session.read(every) if name is None else self._session.read(f"{every} AND name = ?", name))
        return [(name, partial(_of, *row)) for name, *row in rows]

    async def _insert(self, namespace: Namespace, most: int | None) -> bool:
        for _ in range(TRIES_MAX):
            changes, number = await self._counts()
            if await self._rows(namespace.name) or (most is not None and number >= most):
                return False
            row = _encode(namespace), namespace.revision, namespace.name
            count = Call(_COUNTED, (changes + 1, number + 1, changes))
            if await self._session.apply([count, Call(_INSERT, row)]):
                return True
        raise StoreUnavailable("other instances keep changing the namespaces; try again")

    async def swap(self, before: Namespace, after: Namespace) -> bool:
        for _ in range(TRIES_MAX):
            changes, number = await self._counts()
            stored = "SELECT revision FROM namespaces WHERE part = 0 AND name = ?"
            if await self._session.read(stored, before.name) != [(before.revision,)]:
                return False
            row = _encode(after), after.revision, after.name, before.revision
            count = Call(_COUNTED, (changes + 1, number, changes))
            if await self._session.apply([count, Call(_SWAP, row)]):
                return True
        raise StoreUnavailable("other instances keep changing the namespaces; try again")
