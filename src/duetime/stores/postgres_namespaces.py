"""Namespaces as rows of PostgreSQL.

There may be many, and somebody asks for them every few seconds: they are read only when one of them has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from duetime.errors import TooManyNamespaces
from duetime.model import FOREVER_MS, Namespace
from duetime.stores.postgres_pool import Connection, PostgresPool
from duetime.stores.postgres_rows import encode
from duetime.stores.unreadable import RowReader, read_row

# What the first release wrote of a namespace is one JSON document. It compares that byte by byte and writes it as a
# whole, without what it does not know: so whatever is added has a column.
_COLUMNS = ("weight", "revision")
_FIRST_FIELDS = tuple(name for name in Namespace.__struct_fields__ if name not in _COLUMNS)

_ALL = "SELECT name, definition, weight, revision FROM namespaces ORDER BY name"
_ONE = "SELECT name, definition, weight, revision FROM namespaces WHERE name = $1"
# $1…$5: what ``namespace_row`` gives, $6: how many there may be.
_PUT = """
    INSERT INTO namespaces (name, paused, definition, weight, revision) SELECT $1, $2, $3, $4, $5
    WHERE $6::bigint IS NULL OR (SELECT count(*) FROM namespaces) < $6 ON CONFLICT DO NOTHING RETURNING name
"""
# $1: revision before, $2…: what ``namespace_row`` gives.
_SWAP = """
    UPDATE namespaces SET paused = $3, definition = $4, weight = $5, revision = $6
    WHERE name = $2 AND revision = $1 RETURNING 1
"""

_decode = msgspec.json.Decoder(Namespace).decode


def namespace_row(namespace: Namespace) -> tuple[Any, ...]:
    """Its name, whether it is paused, its definition and what has a column."""
    definition = {name: getattr(namespace, name) for name in _FIRST_FIELDS}
    return namespace.name, namespace.paused, encode(definition), *(getattr(namespace, name) for name in _COLUMNS)


def namespace_of(definition: bytes, *columns: int) -> Namespace:
    return msgspec.structs.replace(_decode(definition), **dict(zip(_COLUMNS, columns, strict=True)))


class Namespaces:
    def __init__(self, pool: PostgresPool) -> None:
        self._pool = pool
        self._known: tuple[object, list[Namespace]] = None, []
        self._reader = RowReader()

    @property
    def unreadable(self) -> dict[str, str]:
        """The names of those that can't be read, with the reasons."""
        return self._reader.unreadable

    async def all(self) -> list[Namespace]:
        # None is ever removed, and each change adds to a revision: while these two are the same, all are.
        [(number, changes)] = await self._pool.read("SELECT count(*), sum(revision) FROM namespaces")
        if self._known[0] != (number, changes):
            self._known = (number, changes), self._read(await self._pool.read(_ALL))
        return list(self._known[1])

    async def one(self, name: str) -> Namespace | None:
        for _, *row in await self._pool.read(_ONE, name):
            return read_row(name, partial(namespace_of, *row))
        return None

    async def put(self, namespace: Namespace, most: int | None) -> Namespace | None:
        if await self._pool.write(_PUT, *namespace_row(namespace), most):
            return None
        there = await self.one(namespace.name)
        if there is None:
            raise TooManyNamespaces(most or 0)
        return there

    async def swap(self, before: Namespace, after: Namespace) -> bool:
        return bool(await self._pool.write(_SWAP, before.revision, *namespace_row(after)))

    async def longest_ms(self, connection: Connection, retention_ms: int) -> int:
        """The longest time for which the final timers of a namespace are kept."""
        return max(self.kept_ms(self._read(await connection.fetch(_ALL)), retention_ms).values())

    def kept_ms(self, namespaces: Sequence[Namespace], retention_ms: int) -> dict[str, int]:
        """For how long the final timers of each namespace are kept: for ever where nobody can tell."""
        kept = {n.name: retention_ms if n.retention_ms is None else n.retention_ms for n in namespaces}
        return kept | dict.fromkeys(self.unreadable, FOREVER_MS)

    def _read(self, rows: Sequence[Any]) -> list[Namespace]:
        return self._reader.read((name, partial(namespace_of, *row)) for name, *row in rows)
