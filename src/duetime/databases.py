"""The server databases, which instances can share: one entry each, selected by the scheme of ``DATABASE_URL``.

A store's module, and with it the driver, is imported only if its database is selected.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from msgspec import Struct

from duetime.errors import SettingsError


class Database(Struct, frozen=True, kw_only=True):
    name: str  # for messages
    schemes: tuple[str, ...]
    store: str  # module:class
    example: str
    extra: str | None = None  # the package extra that installs the driver, if it is optional
    local: bool = False  # whether the URL may name a socket instead of a host

    def load(self) -> Any:
        """Import the store class. Its constructor takes the URL, ``shards``, ``retention_ms``, ``takeover_now`` and
        ``virtual_clock``. Its instances implement ``Store`` and ``examine``, which inspects a server; ``abilities`` is
        an attribute of the class."""
        module, _, name = self.store.partition(":")
        try:
            return getattr(import_module(module), name)
        except ImportError as error:
            raise SettingsError(
                f"DATABASE_URL: the driver for {self.name} is missing ({error}): "
                f'pip install ./sdks/python ".[{self.extra}]" in its source folder'
            ) from error


DATABASES: tuple[Database, ...] = (
    Database(
        name="PostgreSQL",
        schemes=("postgresql", "postgres"),
        store="duetime.stores.postgres.store:PostgresStore",
        example="postgresql://user:password@host:5432/database",
        local=True,
    ),
    Database(
        name="MySQL",
        schemes=("mysql", "mariadb"),
        store="duetime.stores.mysql.store:MysqlStore",
        example="mysql://user:password@host:3306/database",
        extra="mysql",
    ),
    Database(
        name="Cassandra",
        schemes=("cassandra",),
        store="duetime.stores.cassandra.store:CassandraStore",
        example="cassandra://host1,host2,host3/keyspace?dc=datacenter",
        extra="cassandra",
    ),
)


def database_of(url: str) -> Database | None:
    """The server database that a URL names; None for a file or memory."""
    scheme = url.partition("://")[0].lower()
    return next((database for database in DATABASES if scheme in database.schemes), None)


def address_of(url: str) -> str:
    """The host and port as the URL writes them, without the password."""
    authority = url.partition("://")[2].partition("/")[0].partition("?")[0]
    return authority.rpartition("@")[2] or "the address in DATABASE_URL"


def each_host(url: str) -> list[str]:
    """Split ``scheme://user@one:1,two:2/database`` into one URL per host."""
    scheme, _, rest = url.partition("://")
    authority = rest.partition("/")[0].partition("?")[0]
    user, at, hosts = authority.rpartition("@")
    return [f"{scheme}://{user}{at}{host}{rest.removeprefix(authority)}" for host in hosts.split(",")]
