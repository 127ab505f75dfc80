"""Namespaces as rows of SQLite.

There may be many, and somebody asks for them every few seconds: they are read only when one of them has changed, which
a number in ``meta`` tells.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from duetime.errors import TooManyNamespaces
from duetime.model import Namespace
from duetime.stores.sqlite_rows import Connection, encode
from duetime.stores.unreadable import RowReader, read_row

_decoder = msgspec.json.Decoder(Namespace)
_names_decoder = msgspec.json.Decoder(list[str])

_CHANGED = "INSERT INTO meta VALUES ('namespaces', 1) ON CONFLICT DO UPDATE SET value = value + 1"


class Namespaces:
    """What was read last, for all who ask."""

    def __init__(self) -> None:
        self._known: tuple[int, list[Namespace]] = -1, []
        self._reader = RowReader()

    @property
    def unreadable(self) -> dict[str, str]:
        """The names of those that can't be read, with the reasons."""
        return self._reader.unreadable

    def read(self, connection: Connection) -> list[Namespace]:
        with connection:  # one moment for both
            changes = connection.execute("SELECT value FROM meta WHERE name = 'namespaces'").get or 0
            if self._known[0] != changes:
                rows = connection.execute("SELECT name, definition FROM namespaces ORDER BY name").fetchall()
                decodes = ((name, partial(_decoder.decode, definition)) for name, definition in rows)
                self._known = changes, self._reader.read(decodes)
        return list(self._known[1])


def namespace_names(connection: Connection) -> list[str]:
    return _names_decoder.decode(connection.execute("SELECT json_group_array(name) FROM namespaces").get)


def read_namespace(connection: Connection, name: str) -> Namespace | None:
    found = connection.execute("SELECT definition FROM namespaces WHERE name = ?", (name,)).get
    return None if found is None else read_row(name, partial(_decoder.decode, found))


def put_namespaces(
    connection: Connection, asked: list[tuple[Namespace, int | None]]
) -> list[Namespace | TooManyNamespaces | None]:
    """Write each that is new, if there are not as many already as may be."""
    answers: list[Namespace | TooManyNamespaces | None] = []
    for namespace, most in asked:
        there: Namespace | TooManyNamespaces | None = read_namespace(connection, namespace.name)
        if there is None and most is not None and connection.execute("SELECT count(*) FROM namespaces").get >= most:
            there = TooManyNamespaces(most)
        if there is None:
            connection.execute("INSERT INTO namespaces VALUES (?, ?, ?, ?)", _row(namespace))
            connection.execute(_CHANGED)
        answers.append(there)
    return answers


def swap_namespaces(connection: Connection, asked: list[tuple[Namespace, Namespace]]) -> list[bool]:
    swapped = []
    for before, after in asked:
        there = read_namespace(connection, before.name)
        swapped.append(there is not None and there.revision == before.revision)
        if swapped[-1]:
            connection.execute("REPLACE INTO namespaces VALUES (?, ?, ?, ?)", _row(after))
            connection.execute(_CHANGED)
    return swapped


def _row(namespace: Namespace) -> tuple[Any, ...]:
    return namespace.name, namespace.paused, namespace.retention_ms, encode(namespace)
