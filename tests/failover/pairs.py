"""A primary and its standby: the operations of a failover, the same for both kinds of server.

The link between the two can be held, so that commits of the primary do not reach the standby. In front of the primary
is an address that follows a promotion, like a floating IP. The two servers alternate between two fixed ports, so that a
URL can name both hosts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from tests.mysql import Mariadb
from tests.ports import free_port
from tests.postgres import Postgres
from tests.proxy import Proxy
from tests.servers import until

FALLBACK_MS = 300
"""When a semi-synchronous primary stops waiting for its replica, in scenarios that show this."""
FOREVER_MS = 3_600_000
DATABASE = "duetime"

S = TypeVar("S", Postgres, Mariadb)


class Pair(ABC, Generic[S]):
    """``waits``: whether a commit is acknowledged only once the standby has it."""

    def __init__(self, *, waits: bool) -> None:
        self.waits = waits
        self._ports = free_port(), free_port()
        self._servers: list[S] = []
        self.link: Proxy | None = None
        self.address: Proxy | None = None
        try:
            self._servers.append(self._make_primary(self._ports[0]))
            self.address = Proxy("127.0.0.1", self.primary.port)
        except BaseException:
            self.close()
            raise

    @property
    def primary(self) -> S:
        return self._servers[0]

    @property
    def standby(self) -> S:
        return self._servers[1]

    def attach(self) -> None:
        """Add a standby and wait until it has caught up."""
        assert len(self._servers) == 1
        self.link = Proxy("127.0.0.1", self.primary.port)
        [port] = set(self._ports) - {self.primary.port}
        self._servers.append(self._make_standby(port))
        self.wait_in_step()
        if self.waits:
            self._wait_for_standby()

    def wait_in_step(self) -> None:
        """Wait until the standby has everything that is committed now."""
        position = self._position()
        until("the standby is in step", lambda: self._has(position))

    def promote(self) -> None:
        """Promote the standby and point the address to it; connections to the old primary are cut."""
        assert self.link is not None and self.address is not None
        self.link.cut()
        self.link.refuse()
        self.standby.promote()
        self._servers.reverse()
        self.address.lead_to(self.primary.port)
        self.address.cut()

    def discard_old(self) -> None:
        """Stop the old primary for good."""
        assert self.link is not None
        self._servers.pop().close()
        self.link.close()
        self.link = None

    def close(self) -> None:
        for closed in (*self._servers, self.link, self.address):
            if closed is not None:
                closed.close()

    def __enter__(self) -> Pair[S]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _make_primary(self, port: int) -> S: ...

    @abstractmethod
    def _make_standby(self, port: int) -> S: ...

    @abstractmethod
    def _position(self) -> str: ...

    @abstractmethod
    def _has(self, position: str) -> bool:
        """Whether the standby has reached a position of the primary."""

    @abstractmethod
    def _wait_for_standby(self) -> None:
        """From now on, acknowledge a commit only once the standby has it."""

    @abstractmethod
    def url(self, user: str, place: str | None = None) -> str:
        """The URL of the database at a place, which is a port or several hosts; by default both hosts."""

    def address_url(self, user: str) -> str:
        assert self.address is not None
        return self.url(user, f"127.0.0.1:{self.address.port}")

    @property
    def _hosts(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._ports)


class PostgresPair(Pair[Postgres]):
    def __init__(self, version: int, *, waits: bool) -> None:
        self.version = version
        super().__init__(waits=waits)

    def _make_primary(self, port: int) -> Postgres:
        return Postgres(self.version, port=port)

    def _make_standby(self, port: int) -> Postgres:
        assert self.link is not None
        return Postgres(self.version, port=port, standby_of=self.link.url(self.primary.url()))

    def _position(self) -> str:
        return self.primary.sql("SELECT pg_current_wal_lsn()")

    def _has(self, position: str) -> bool:
        behind = f"SELECT bool_and(replay_lsn >= '{position}') FROM pg_stat_replication WHERE state = 'streaming'"
        return self.primary.sql(behind) == "t"

    def _wait_for_standby(self) -> None:
        # The base backup was made before, so the standby does not wait for one of its own when it is promoted.
        self.primary.sql("ALTER SYSTEM SET synchronous_standby_names = '*'")
        self.primary.sql("SELECT pg_reload_conf()")
        until("the standby is synchronous", lambda: self._standby_is("sync"))

    def _standby_is(self, state: str) -> bool:
        return self.primary.sql("SELECT sync_state FROM pg_stat_replication") == state

    def url(self, user: str, place: str | None = None) -> str:
        suffix = "" if place else "?target_session_attrs=read-write"
        return f"postgresql://{user}@{place or self._hosts}/postgres{suffix}"


class MariadbPair(Pair[Mariadb]):
    """Semi-synchronous: the primary waits for the replica before it commits, at most for ``timeout_ms``."""

    _numbers = iter(range(1, 1_000_000))

    def __init__(self, *, waits: bool = True, timeout_ms: int = FOREVER_MS) -> None:
        self._timeout_ms = timeout_ms
        super().__init__(waits=waits)

    def _make(self, port: int, **settings: str) -> Mariadb:
        ours = {"server-id": str(next(self._numbers)), "log-bin": "log", "binlog-format": "ROW", "sync-binlog": "1"}
        ours |= {
            "log-slave-updates": "1",
            "rpl-semi-sync-slave-enabled": "1",
            "skip-slave-start": "1",
            "slave-parallel-threads": "4",
        }
        return Mariadb(port=port, **ours, **settings)

    def _make_primary(self, port: int) -> Mariadb:
        return self._make(port)

    def _make_standby(self, port: int) -> Mariadb:
        assert self.link is not None
        standby = self._make(port, **{"read-only": "1"})
        standby.follow(self.link.port)
        return standby

    def _position(self) -> str:
        [[(position,)]] = self.primary.sql("SELECT CAST(@@gtid_current_pos AS BINARY)")
        return bytes(position).decode()

    def _has(self, position: str) -> bool:
        [[(late,)]] = self.standby.sql(f"SELECT MASTER_GTID_WAIT('{position}', 1)")
        return int(late) == 0

    def _wait_for_standby(self) -> None:
        self.primary.sql(
            "SET GLOBAL rpl_semi_sync_master_wait_point = 'AFTER_SYNC'",
            f"SET GLOBAL rpl_semi_sync_master_timeout = {self._timeout_ms}",
            "SET GLOBAL rpl_semi_sync_master_enabled = 1",
        )
        until("the replica is semi-synchronous", self._replica_answers)

    def _replica_answers(self) -> bool:
        [[(_, replicas)]] = self.primary.sql("SHOW STATUS LIKE 'Rpl_semi_sync_master_clients'")
        return str(replicas) == "1"

    def url(self, user: str, place: str | None = None) -> str:
        return f"mysql://{user}@{place or self._hosts}/{DATABASE}"
