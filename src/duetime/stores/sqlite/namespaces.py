"""Namespaces in SQLite.

They are requested every few seconds and there may be thousands, so they are read again only after one has changed,
which increments a number in ``meta``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from duetime.errors import TooManyNamespaces
from duetime.model import Namespace
from duetime.stores.sql.columns import encode
from duetime.stores.sqlite.rows import Connection
from duetime.stores.unreadable import RowReader, read_row

_decoder = msgspec.json.Decoder(Namespace)
_names_decoder = msgspec.json.Decoder(list[str])

_CHANGED = "INSERT INTO meta VALUES ('namespaces', 1) ON CONFLICT DO UPDATE SET value = value + 1"


class Namespaces:
    """A cache of all namespaces."""

    def __init__(self) -> None:
        self._known: tuple[int, list[Namespace]] = -1, []
        self._reader = RowReader()

    @property
    def unreadable(self) -> dict[str, str]:
        """The unreadable namespaces: name → reason."""
        return self._reader.unreadable

    def read(self, connection: Connection) -> list[Namespace]:
        with connection:  # both from one snapshot
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
    connection: Connection, arguments: list[tuple[Namespace, int | None]]
) -> list[Namespace | TooManyNamespaces | None]:
    """Insert each namespace that is new, unless its limit is reached."""
    results: list[Namespace | TooManyNamespaces | None] = []
    for namespace, most in arguments:
        found: Namespace | TooManyNamespaces | None = read_namespace(connection, namespace.name)
        if found is None and most is not None and connection.execute("SELECT count(*) FROM namespaces").get >= most:
            found = TooManyNamespaces(most)
        if found is None:
            connection.execute("INSERT INTO namespaces VALUES (?, ?, ?, ?)", _row(namespace))
            connection.execute(_CHANGED)
        results.append(found)
    return results


def swap_namespaces(connection: Connection, arguments: list[tuple[Namespace, Namespace]]) -> list[bool]:
    swapped = []
    for before, after in arguments:
        stored = read_namespace(connection, before.name)
        swapped.append(stored is not None and stored.revision == before.revision)
        if swapped[-1]:
            connection.execute("REPLACE INTO namespaces VALUES (?, ?, ?, ?)", _row(after))
            connection.execute(_CHANGED)
    return swapped


def _row(namespace: Namespace) -> tuple[Any, ...]:
    return namespace.name, namespace.paused, namespace.retention_ms, encode(namespace)
