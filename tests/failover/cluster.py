"""The cluster of ``tests/chaos`` on a primary and its standby.

Every second instance connects to an address that follows a promotion, the others use a URL with both hosts. Their users
have ordinary rights in MariaDB, because administrators may write to a server that is read-only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.chaos.cluster import Cluster
from tests.chaos.databases import Database, MysqlDatabase, PostgresDatabase
from tests.failover.pairs import MariadbPair, Pair, PostgresPair
from tests.mysql import Mariadb
from tests.postgres import Postgres


class PostgresPairDatabase(PostgresDatabase):
    """The database on the current primary."""

    def __init__(self, pair: PostgresPair) -> None:
        self.pair = pair

    @property
    def server(self) -> Postgres:
        return self.pair.primary

    def close(self) -> None:
        self.pair.close()


class MariadbPairDatabase(MysqlDatabase):
    """The database on the current primary."""

    def __init__(self, pair: MariadbPair) -> None:
        self.pair = pair

    @property
    def server(self) -> Mariadb:
        return self.pair.primary

    def close(self) -> None:
        self.pair.close()


class PairCluster(Cluster):
    """``make_database`` starts the servers."""

    def __init__(
        self, *arguments: Any, make_database: Callable[[], PostgresPairDatabase | MariadbPairDatabase], **named: Any
    ) -> None:
        self._make_database = make_database
        self.undone: list[tuple[int, int]] = []
        """The times of responses that a failover may have undone."""
        super().__init__(*arguments, **named)

    def _database(self, server: str) -> Database:
        database = self._make_database()
        self.pair: Pair[Any] = database.pair
        return database

    def _url_of(self, role: str) -> str:
        return self.pair.url(role) if int(role[-1]) % 2 else self.pair.address_url(role)
