"""Connections to a PostgreSQL primary: runs statements, each in a transaction of its own, and classifies failures.

No transaction is left open between statements, so that a process that is suspended can't block others from taking over
its shards. Every wait has a timeout: for a free connection, for a new connection, and for a response.

How it fails: a statement that the server rejected was rolled back (``StoreUnavailable``). If the connection broke
before the response, the statement may or may not have been committed (``StoreIndeterminate``); then all idle
connections are closed as well. If the server is down, the next caller tries to connect again.

Failover: of the hosts in the URL, the last one that worked is tried first, and a standby counts as a host that is down.
A promotion starts a new timeline. Once the pool has seen a timeline, it rejects servers on an older one: such a server
is the old primary, which has come back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import asyncpg
from asyncpg.connect_utils import SessionAttribute

from duetime.databases import address_of
from duetime.errors import StoreIndeterminate, StoreUnavailable
from duetime.stores.connecting import Hosts, Misconfigured
from duetime.stores.postgres.schema import SCHEMA

ANSWER_SECONDS_MAX = 5.0
OVERDUE_SECONDS = ANSWER_SECONDS_MAX + 1
CONNECT_SECONDS_MAX = 5.0
STATEMENT_MS_MAX = round(ANSWER_SECONDS_MAX * 1000)

_APPLICATION = {"application_name": "duetime"}
_SESSION = {
    "search_path": SCHEMA,
    "synchronous_commit": "on",
    "statement_timeout": str(STATEMENT_MS_MAX),
    # Every query has an index made for it. Stale statistics, taken before the last million rows, must not make the
    # planner choose another plan; and planning each execution anew would cost more than it gains.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}

# A pooler passes on few settings at connection start, so they are set on the open connection.
_SET_SESSION = (
    "SELECT count(set_config(name, value, false)) FROM unnest($1::text[], $2::text[]) AS setting (name, value)"
)
_TIMELINE = """
    SELECT system_identifier::text, ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int
    FROM pg_control_system()
"""
_BACKEND = "SELECT pg_backend_pid()"
PROBES = 10
"""How many times to check whether a pooler switches server connections between transactions. The first check shows it,
unless other clients use the pooler at the same moment."""

_MISCONFIGURED = ("28", "3D", "42501", "0A")
"""SQLSTATEs for invalid credentials, an unknown database, missing privileges, unsupported features: wrong settings."""
_UNDECIDED = ("08", "40003", "57P01", "57P02")
"""SQLSTATEs for a server that is shutting down or a lost connection, possibly after the commit."""

_BROKEN = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)

BUSY = (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError)
"""The exceptions of a statement that did not get a lock; it changed nothing."""

Connection = asyncpg.Connection
Row = asyncpg.Record
Notify = Callable[[str], Awaitable[None]]


class Refused(StoreUnavailable):
    """The server rejected a statement and wrote nothing; ``code`` is the SQLSTATE."""

    def __init__(self, error: asyncpg.PostgresError) -> None:
        super().__init__(f"PostgreSQL rejected a statement: {error}")
        self.code = str(error.sqlstate)
        self.misconfigured = self.code.startswith(_MISCONFIGURED)


class Timeline(NamedTuple):
    """Identifies the data of a primary: the cluster created by one ``initdb``, and the timeline since its promotion."""

    cluster: str
    number: int


class PostgresPool:
    def __init__(self, url: str, *, size: int) -> None:
        self._hosts = Hosts(url)
        self._unpooled: set[str] = set()
        self._timeline: Timeline | None = None
        self.failovers = 0
        """The number of failovers to a promoted server, which may lack recent commits of the one before it."""
        self._idle: list[tuple[Connection, int]] = []
        self._room = asyncio.Semaphore(size)
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(connection.close(timeout=1) for connection, _ in self._idle), return_exceptions=True)

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Borrow a connection exclusively."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                await self._room.acquire()
        except TimeoutError:
            raise StoreUnavailable("PostgreSQL is too slow: every connection is busy") from None
        try:
            connection, failovers = await self._ready()
            yield connection
            if failovers != self.failovers:
                connection.terminate()
            elif not connection.is_closed():
                self._idle.append((connection, failovers))
        finally:
            self._room.release()

    async def _ready(self) -> tuple[Connection, int]:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        while self._idle:
            connection, failovers = self._idle.pop()
            if not connection.is_closed():
                return connection, failovers
        return await self.connect(), self.failovers

    def _drop_idle(self) -> None:
        """Close all idle connections: after one has broken, the others are probably broken, too, and some would only
        time out."""
        while self._idle:
            self._idle.pop()[0].terminate()

    async def connect(self, **settings: str) -> Connection:
        """Open a connection to the primary, with these server settings for its session."""
        return await self._hosts.first(lambda url: self._connect(url, _SESSION | settings))

    async def _connect(self, url: str, settings: dict[str, str]) -> Connection:
        connection = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS_MAX / len(self._hosts)):
                if url not in self._unpooled:
                    await _reject_transaction_pooler(url)
                    self._unpooled.add(url)
                connection = await _primary(url)
                await connection.execute(_SET_SESSION, list(settings), list(settings.values()))
                timeline = await _timeline(connection)
            self._check_timeline(timeline)
            return connection
        except BaseException as error:
            if connection is not None:
                connection.terminate()
            if isinstance(error, asyncpg.PostgresError):
                kind = Misconfigured if str(error.sqlstate).startswith(_MISCONFIGURED) else StoreUnavailable
                raise kind(f"PostgreSQL: {error}") from error
            if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
                raise StoreUnavailable("this PostgreSQL is not a primary: it is a standby or read-only") from error
            if isinstance(error, _BROKEN):
                reason = str(error) or "no response"
                raise StoreUnavailable(f"can't connect to PostgreSQL at {address_of(url)}: {reason}") from error
            raise

    def _check_timeline(self, timeline: Timeline | None) -> None:
        known = self._timeline
        if timeline is None or timeline == known:
            return
        if known is not None:
            if known.cluster == timeline.cluster and timeline.number < known.number:
                raise StoreUnavailable(
                    f"this PostgreSQL is on timeline {timeline.number}, and another one was promoted to "
                    f"{known.number}: it is an old primary that has come back and must be stopped"
                )
            self.failovers += 1
            self._drop_idle()
        self._timeline = timeline

    async def read(self, sql: str, *arguments: object) -> list[Row]:
        """Run a statement that changes nothing, and return its rows."""
        try:
            return await self.write(sql, *arguments)
        except StoreIndeterminate as error:
            raise StoreUnavailable(str(error)) from error

    async def write(self, sql: str, *arguments: object) -> list[Row]:
        """Run a statement and return its rows once it is committed."""
        rows: list[Row] = await self.run(lambda connection: connection.fetch(sql, *arguments))
        return rows

    async def run(self, job: Callable[[Connection], Awaitable[Any]], *, seconds_max: float = OVERDUE_SECONDS) -> Any:
        """Run ``job`` on a connection, which is closed if the result is unknown."""
        async with self.connection() as connection:
            # The server cancels a slow statement itself. This handles a server that does not respond at all.
            overdue = asyncio.get_running_loop().call_later(seconds_max, connection.terminate)
            try:
                return await job(connection)
            except asyncpg.PostgresError as error:
                if str(error.sqlstate).startswith(_UNDECIDED):
                    connection.terminate()
                    self._drop_idle()
                    raise StoreIndeterminate(f"PostgreSQL closed the connection: {error}") from error
                refused = Refused(error)
            except (OSError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
                connection.terminate()
                self._drop_idle()
                raise StoreIndeterminate(f"the connection to PostgreSQL broke: {error}") from error
            except BaseException as error:
                ended = connection.is_closed()
                connection.terminate()
                if ended and isinstance(error, Exception):
                    # After this process was suspended, the timer above can fire between two steps of asyncpg, which
                    # then fails on the closed connection with various exceptions.
                    raise StoreIndeterminate("PostgreSQL did not answer in time") from error
                raise
            finally:
                overdue.cancel()
        raise refused  # After the block above, which keeps the connection only if nothing is raised inside it.

    @contextlib.asynccontextmanager
    async def channel(self, name: str, heard: Callable[[str], None], gone: Callable[[], None]) -> AsyncIterator[Notify]:
        """Listen on a channel with a separate connection: ``heard`` gets the messages of others, ``gone`` is called
        when the connection ends. Yields a function that sends a message."""
        connection = await self.connect(synchronous_commit="off")  # Hints need not survive a crash.
        mine = connection.get_server_pid()

        def on_notify(_connection: object, pid: int, _channel: str, message: object) -> None:
            if pid != mine:
                heard(str(message))

        async def notify(text: str) -> None:
            try:
                await connection.execute("SELECT pg_notify($1, $2)", name, text, timeout=ANSWER_SECONDS_MAX)
            except _BROKEN as error:
                raise StoreUnavailable(f"the connection to PostgreSQL broke: {error}") from error

        try:
            connection.add_termination_listener(lambda _: gone())
            try:
                await connection.add_listener(name, on_notify)
            except _BROKEN as error:
                raise StoreUnavailable(f"the connection to PostgreSQL broke: {error}") from error
            yield notify
        finally:
            connection.terminate()


async def _primary(url: str, *, statements_kept: int = 100) -> Connection:
    return await asyncpg.connect(
        url,
        server_settings=_APPLICATION,
        statement_cache_size=statements_kept,
        max_cached_statement_lifetime=0,
        target_session_attrs=None if "target_session_attrs=" in url else SessionAttribute.primary,
    )


async def _timeline(connection: Connection) -> Timeline | None:
    """Return None if the server does not support the query, as some PostgreSQL-compatible ones."""
    try:
        [row] = await connection.fetch(_TIMELINE)
    except asyncpg.PostgresError:
        return None
    return Timeline(*row)


async def _reject_transaction_pooler(url: str) -> None:
    """Raise ``Misconfigured`` if the URL leads to a connection pooler in transaction mode.

    Such a pooler runs each transaction on any free server connection, but session settings, prepared statements, LISTEN
    and the migration lock belong to one server connection and would be left behind on those of other clients. A pooler
    reports a process id to its client that differs from the server's.
    """
    one, other = await _primary(url, statements_kept=0), None
    try:
        backend = await _backend(one)
        if backend == one.get_server_pid():
            return
        other = await _primary(url, statements_kept=0)
        for _ in range(PROBES):
            async with other.transaction():
                # The open transaction occupies one server connection: does the first client still have its own?
                if await other.fetchval(_BACKEND) == backend or await _backend(one) != backend:
                    raise Misconfigured(
                        "this is a connection pooler in transaction mode, which can't carry sessions: "
                        "connect to PostgreSQL directly, or set pool_mode=session for this database"
                    )
    finally:
        for connection in (one, other):
            if connection is not None:
                connection.terminate()


async def _backend(connection: Connection) -> int:
    async with connection.transaction():
        pid: int = await connection.fetchval(_BACKEND)
        return pid
