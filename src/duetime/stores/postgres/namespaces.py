"""Namespaces in PostgreSQL."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from duetime.model import Namespace
from duetime.stores import cached_namespaces as namespaces
from duetime.stores.cached_namespaces import Row, decode
from duetime.stores.postgres.pool import PostgresPool
from duetime.stores.sql.columns import encode

# The first release stores a namespace as one JSON document. It compares the document byte by byte and rewrites it
# without fields that it does not know, so every later field has a column of its own.
_COLUMNS = ("weight", "revision")
_FIRST_FIELDS = tuple(name for name in Namespace.__struct_fields__ if name not in _COLUMNS)

_ALL = "SELECT name, definition, weight, revision FROM namespaces"
# $1…$5: ``namespace_row``, $6: the maximum number of namespaces.
_PUT = """
    INSERT INTO namespaces (name, paused, definition, weight, revision) SELECT $1, $2, $3, $4, $5
    WHERE $6::bigint IS NULL OR (SELECT count(*) FROM namespaces) < $6 ON CONFLICT DO NOTHING RETURNING name
"""
# $1: revision before, $2…: ``namespace_row``.
_SWAP = """
    UPDATE namespaces SET paused = $3, definition = $4, weight = $5, revision = $6
    WHERE name = $2 AND revision = $1 RETURNING 1
"""


def namespace_row(namespace: Namespace) -> tuple[Any, ...]:
    """The name, whether it is paused, the definition, and the fields with a column of their own."""
    definition = {name: getattr(namespace, name) for name in _FIRST_FIELDS}
    return namespace.name, namespace.paused, encode(definition), *(getattr(namespace, name) for name in _COLUMNS)


def namespace_of(definition: bytes, *columns: int) -> Namespace:
    return msgspec.structs.replace(decode(definition), **dict(zip(_COLUMNS, columns, strict=True)))


class Namespaces(namespaces.Namespaces):
    def __init__(self, pool: PostgresPool) -> None:
        super().__init__()
        self._pool = pool

    async def _changes(self) -> object:
        [changes] = await self._pool.read(self.CHANGES)
        return tuple(changes)

    async def _rows(self, name: str | None = None) -> list[Row]:
        one = () if name is None else (name,)
        rows = await self._pool.read(f"{_ALL} {'WHERE name = $1' if one else 'ORDER BY name'}", *one)
        return [(name, partial(namespace_of, *row)) for name, *row in rows]

    async def _insert(self, namespace: Namespace, most: int | None) -> bool:
        return bool(await self._pool.write(_PUT, *namespace_row(namespace), most))

    async def swap(self, before: Namespace, after: Namespace) -> bool:
        return bool(await self._pool.write(_SWAP, before.revision, *namespace_row(after)))
