"""Namespaces in MySQL."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from duetime.model import Namespace
from duetime.stores import cached_namespaces as namespaces
from duetime.stores.cached_namespaces import Row, decode
from duetime.stores.mysql.literals import listed, literal
from duetime.stores.mysql.pool import MysqlPool
from duetime.stores.sql.columns import encode


def namespace_row(namespace: Namespace) -> tuple[Any, ...]:
    return namespace.name, namespace.paused, encode(namespace), namespace.revision


def _of(definition: bytes, revision: int) -> Namespace:
    return msgspec.structs.replace(decode(definition), revision=revision)


class Namespaces(namespaces.Namespaces):
    def __init__(self, pool: MysqlPool) -> None:
        super().__init__()
        self._pool = pool

    async def _changes(self) -> object:
        [[changes]] = await self._pool.read(self.CHANGES)
        return changes

    async def _rows(self, name: str | None = None) -> list[Row]:
        which = "ORDER BY name" if name is None else f"WHERE name = {literal(name)}"
        [rows] = await self._pool.read(f"SELECT name, definition, revision FROM namespaces {which}")
        return [(name.decode(), partial(_of, *row)) for name, *row in rows]

    async def _insert(self, namespace: Namespace, most: int | None) -> bool:
        room = "TRUE" if most is None else f"(SELECT COUNT(*) FROM namespaces AS others) < {most}"
        [done] = await self._pool.write(
            f"INSERT INTO namespaces SELECT {listed(namespace_row(namespace))[1:-1]} FROM DUAL WHERE {room} "
            "ON DUPLICATE KEY UPDATE name = namespaces.name"
        )
        return bool(done.affected)

    async def swap(self, before: Namespace, after: Namespace) -> bool:
        name, paused, definition, revision = map(literal, namespace_row(after))
        [done] = await self._pool.write(
            f"UPDATE namespaces SET paused = {paused}, definition = {definition}, revision = {revision} "
            f"WHERE name = {name} AND revision = {before.revision}"
        )
        return done.affected == 1
