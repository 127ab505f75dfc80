"""The connection to a Cassandra cluster: the only module that imports the driver.

The driver has a thread of its own; ``Session`` hands its results to the event loop. Statements are prepared once, sent
to a replica of their partition, and never retried by the driver: a conditional write that is sent twice may find its
own change and report that it was refused.

How it fails: a read raises ``StoreUnavailable``. A write that got no answer, or a timeout of the server, raises
``StoreIndeterminate``; the caller settles it with a serial read where it can.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from cassandra import AuthenticationFailed, ConsistencyLevel, ReadFailure
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable
from cassandra.connection import ConnectionBusy
from cassandra.policies import (
    ConstantReconnectionPolicy,
    DCAwareRoundRobinPolicy,
    FallthroughRetryPolicy,
    RoundRobinPolicy,
    TokenAwarePolicy,
)
from cassandra.pool import NoConnectionsAvailable
from cassandra.query import BatchStatement, PreparedStatement, tuple_factory

from duetime.databases import each_host
from duetime.errors import SettingsError, StoreError, StoreIndeterminate, StoreUnavailable
from duetime.stores.connecting import Misconfigured

PORT = 9042
PROTOCOL = 5
"""The newest of Cassandra 4 and 5."""
ANSWER_SECONDS_MAX = 6.0
CONNECT_SECONDS_MAX = 5.0
RUN_SECONDS_MAX = 30.0
NOBODY_ASKED = "no node of Cassandra is up, or all are busy"
RECONNECT_SECONDS = 1.0
BUSY_SECONDS = 0.02

# Every failure is raised here, too; the driver's own messages repeat it once per try, with a traceback.
logging.getLogger("cassandra").setLevel(logging.CRITICAL)

_is_keyspace = re.compile(r"[a-z][a-z0-9_]{0,47}").fullmatch


_NOT_SENT = (ConnectionBusy, NoConnectionsAvailable)
"""The driver did not send a request, because too many others wait to be sent."""
_TOO_MANY_TOMBSTONES = 1
"""A reason in Cassandra's protocol for which a replica fails a read."""


class TooManyTombstones(StoreUnavailable):
    """A read would have passed more deletions than Cassandra allows."""


class _Failure(Exception):
    """The driver raised something: its exceptions have no common base class."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        each = list(error.errors.values()) if isinstance(error, NoHostAvailable) else [error]
        self.nobody_asked = all(isinstance(one, _NOT_SENT) for one in each)
        self.busy = self.nobody_asked and bool(each)
        reasons = (error.error_code_map or {}).values() if isinstance(error, ReadFailure) else ()
        self.tombstones = _TOO_MANY_TOMBSTONES in reasons


class Call(NamedTuple):
    """A statement with its arguments."""

    statement: str
    arguments: Sequence[Any] = ()


class Address(NamedTuple):
    """What the URL says."""

    hosts: list[tuple[str, int]]
    keyspace: str
    datacenter: str | None
    user: str | None
    password: str | None
    tls: ssl.SSLContext | None


def address_of(url: str) -> Address:
    """Parse ``cassandra://user:password@host1,host2:9042/keyspace?dc=name&tls=true&ca=file``."""
    try:
        each = [urlsplit(one) for one in each_host(url)]
        hosts = [(parts.hostname or "", parts.port or PORT) for parts in each]
    except ValueError as error:
        raise SettingsError(f"DATABASE_URL: wrong host or port: {error}") from None
    parts = each[0]
    keyspace = unquote(parts.path.removeprefix("/"))
    if not all(host for host, _ in hosts) or not _is_keyspace(keyspace):
        raise SettingsError("DATABASE_URL: expected cassandra://host1,host2/keyspace, the keyspace in lower case")
    options = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    if unknown := options.keys() - {"dc", "tls", "ca"}:
        raise SettingsError(f"DATABASE_URL: unknown option '{min(unknown)}': a Cassandra URL can have dc, tls and ca")
    if options.get("tls", "false") not in ("true", "false"):
        raise SettingsError("DATABASE_URL: tls must be true or false")
    tls = None
    if "ca" in options or options.get("tls") == "true":
        try:
            tls = ssl.create_default_context(cafile=options.get("ca"))
        except OSError as error:
            raise SettingsError(f"DATABASE_URL: can't read the certificates in {options.get('ca')}: {error}") from None
    user, password = (unquote(text) if text else None for text in (parts.username, parts.password))
    return Address(hosts, keyspace, options.get("dc"), user, password, tls)


class Session:
    """A connection pool to one cluster."""

    def __init__(self, hosts: Sequence[tuple[str, int]], address: Address | None = None) -> None:
        """Without ``address`` it is for no keyspace in particular."""
        self._address = address
        self.hosts = list(hosts)
        self._cluster: Cluster | None = None
        self._session: Any = None
        self._prepared: dict[str, PreparedStatement] = {}
        self._preparing = asyncio.Lock()

    def connect(self) -> None:
        """Connect; blocks."""
        address = self._address
        among: Any = DCAwareRoundRobinPolicy(address.datacenter) if address and address.datacenter else None
        profile = ExecutionProfile(
            load_balancing_policy=TokenAwarePolicy(among or RoundRobinPolicy()),
            retry_policy=FallthroughRetryPolicy(),
            consistency_level=ConsistencyLevel.LOCAL_QUORUM,
            serial_consistency_level=ConsistencyLevel.LOCAL_SERIAL,
            request_timeout=ANSWER_SECONDS_MAX,
            row_factory=tuple_factory,
        )
        serial = ExecutionProfile(
            load_balancing_policy=profile.load_balancing_policy,
            retry_policy=profile.retry_policy,
            consistency_level=ConsistencyLevel.LOCAL_SERIAL,
            request_timeout=ANSWER_SECONDS_MAX,
            row_factory=tuple_factory,
        )
        user = None if address is None or address.user is None else address
        cluster = Cluster(
            [host if port == PORT else (host, port) for host, port in self.hosts],
            port=self.hosts[0][1],
            protocol_version=PROTOCOL,
            reconnection_policy=ConstantReconnectionPolicy(RECONNECT_SECONDS, max_attempts=None),
            execution_profiles={EXEC_PROFILE_DEFAULT: profile, "serial": serial},
            auth_provider=None if user is None else PlainTextAuthProvider(user.user, user.password or ""),
            ssl_context=None if address is None else address.tls,
            connect_timeout=CONNECT_SECONDS_MAX,
            control_connection_timeout=CONNECT_SECONDS_MAX,
        )
        try:
            self._session = cluster.connect()
        except Exception as error:
            cluster.shutdown()
            if any(isinstance(each, AuthenticationFailed) for each in getattr(error, "errors", {}).values()):
                raise Misconfigured(f"Cassandra does not accept the user and password: {error}") from error
            raise StoreUnavailable(f"can't connect to Cassandra: {error}") from error
        self._cluster = cluster

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[None]:
        """Connect, unless that has been done."""
        if self._session is None:
            await asyncio.to_thread(self.connect)
        yield

    def close(self) -> None:
        """Disconnect; blocks."""
        if self._cluster is not None:
            self._cluster.shutdown()
            self._cluster = self._session = None

    def run(self, statement: str, arguments: Sequence[Any] = ()) -> list[Any]:
        """Run a statement that is needed once, and wait for it."""
        session = self._open
        try:
            return list(session.execute(statement, tuple(arguments) or None, timeout=RUN_SECONDS_MAX))
        except Exception as error:
            raise StoreUnavailable(f"Cassandra rejected a statement: {error}") from error

    def nodes(self) -> list[Any]:
        """Each node of the cluster that is up, with ``address`` and ``datacenter``."""
        if self._cluster is None:
            raise StoreUnavailable("the store is closed")
        return [host for host in self._cluster.metadata.all_hosts() if host.is_up is not False]

    def run_on(self, node: Any, statement: str) -> list[Any]:
        """Run a statement on this node and wait for it."""
        session = self._open
        try:
            return list(session.execute(statement, host=node, timeout=ANSWER_SECONDS_MAX))
        except Exception as error:
            raise StoreUnavailable(f"Cassandra node {node.address}: {error}") from error

    def replication(self, keyspace: str) -> str | None:
        """The replication options of a keyspace; None if it does not exist."""
        assert self._cluster is not None
        found = self._cluster.metadata.keyspaces.get(keyspace)
        return None if found is None else str(found.replication_strategy.export_for_schema())

    def use(self, keyspace: str) -> None:
        """Run later statements in this keyspace, which must exist; blocks."""
        try:
            self._open.set_keyspace(keyspace)
        except Exception as error:
            raise StoreUnavailable(f"Cassandra can't use keyspace {keyspace}: {error}") from error

    @property
    def _open(self) -> Any:
        if self._session is None:
            raise StoreUnavailable("the store is closed")
        return self._session

    async def prepare(self, *statements: str) -> None:
        """Prepare statements ahead of time."""
        for statement in statements:
            if statement in self._prepared:
                continue
            # Once at a time: the driver remembers only the object that it made last, weakly. It needs it to prepare the
            # statement again on a node that has forgotten it.
            async with self._preparing:
                if statement in self._prepared:
                    continue
                try:
                    self._prepared[statement] = await asyncio.to_thread(self._open.prepare, statement)
                except Exception as error:
                    raise StoreUnavailable(f"Cassandra can't prepare a statement: {error}") from error

    async def read(self, statement: str, *arguments: Any, serial: bool = False) -> list[Any]:
        """Return the rows of a query, of all its pages."""
        await self.prepare(statement)
        bound = self._prepared[statement].bind(arguments)
        try:
            return await self._run(bound, "serial" if serial else EXEC_PROFILE_DEFAULT)
        except _Failure as error:
            if error.tombstones:
                raise TooManyTombstones(f"Cassandra passed too many deletions: {error}") from error
            raise StoreUnavailable(
                NOBODY_ASKED if error.nobody_asked else f"Cassandra did not answer: {error}"
            ) from error

    async def read_on(self, node: Any, statement: str) -> list[Any]:
        """Return the rows of a query that only this node answers."""
        await self.prepare(statement)
        bound = self._prepared[statement].bind(())
        try:
            return await self._run(bound, EXEC_PROFILE_DEFAULT, node)
        except _Failure as error:
            raise StoreUnavailable(f"Cassandra node {node.address} did not answer: {error}") from error

    async def write(self, statement: str, *arguments: Any) -> None:
        """Write unconditionally: harmless if it is done twice."""
        await self.prepare(statement)
        try:
            await self._run(self._prepared[statement].bind(arguments), EXEC_PROFILE_DEFAULT)
        except _Failure as error:
            raise _unknown(error) from error

    async def apply(self, calls: Sequence[Call]) -> bool:
        """Write to one partition if all conditions in these statements hold; return whether they did."""
        await self.prepare(*(call.statement for call in calls))
        batch = BatchStatement(serial_consistency_level=ConsistencyLevel.LOCAL_SERIAL)
        for statement, arguments in calls:
            batch.add(self._prepared[statement], arguments)
        try:
            rows = await self._run(batch, EXEC_PROFILE_DEFAULT)
        except _Failure as error:
            raise _unknown(error) from error
        return bool(rows[0][0])

    async def _run(self, statement: Any, profile: Any, node: Any = None) -> list[Any]:
        """Return all rows. A request that the driver could not send yet waits."""
        loop = asyncio.get_running_loop()
        until = loop.time() + ANSWER_SECONDS_MAX
        while True:
            try:
                return await self._sent(statement, profile, node)
            except _Failure as error:
                if not error.busy or loop.time() > until:
                    raise
                await asyncio.sleep(BUSY_SECONDS)

    async def _sent(self, statement: Any, profile: Any, node: Any) -> list[Any]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[list[Any]] = loop.create_future()
        rows: list[Any] = []

        def settle(error: BaseException | None) -> None:
            if not done.done():
                if error is None:
                    done.set_result(rows)
                else:
                    done.set_exception(error)

        def came(page: Sequence[Any] | None) -> None:
            rows.extend(page or ())
            if response.has_more_pages:
                response.start_fetching_next_page()
            else:
                loop.call_soon_threadsafe(settle, None)

        def failed(error: BaseException) -> None:
            loop.call_soon_threadsafe(settle, error)

        session = self._open
        try:
            response = session.execute_async(statement, execution_profile=profile, host=node)
            response.add_callbacks(came, failed)
            return await done
        except Exception as error:
            raise _Failure(error) from error


def _unknown(error: _Failure) -> StoreError:
    if error.nobody_asked:
        return StoreUnavailable(NOBODY_ASKED)
    return StoreIndeterminate(f"Cassandra did not confirm a write: {error}")


def is_ready(host: str, port: int) -> bool:
    """Whether a node serves clients."""
    with socket.socket() as attempt:
        attempt.settimeout(1.0)
        return attempt.connect_ex((host, port)) == 0
