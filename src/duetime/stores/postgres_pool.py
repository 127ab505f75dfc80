"""Connections to one PostgreSQL server: runs statements, each a transaction of its own, and says how they failed.

No statement leaves a transaction open: a process that is stopped in the middle of one must not keep others from taking
over. Every wait has an end: for a free connection, for a new one, for an answer.

How it fails: what the server refused was rolled back (``StoreUnavailable``). What broke between question and answer may
or may not have been written (``StoreIndeterminate``), and that connection is thrown away. A server that is gone is
asked again by whoever comes next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg

from duetime.errors import SettingsError, StoreError, StoreIndeterminate, StoreUnavailable
from duetime.stores.postgres_schema import SCHEMA

log = logging.getLogger(__name__)

ANSWER_SECONDS_MAX = 5.0
OVERDUE_SECONDS = ANSWER_SECONDS_MAX + 1
CONNECT_SECONDS_MAX = 5.0
START_SECONDS_MAX = 60.0
AGAIN_SECONDS = 0.5

_SESSION = {
    "application_name": "duetime",
    "search_path": SCHEMA,
    "synchronous_commit": "on",
    "statement_timeout": str(round(ANSWER_SECONDS_MAX * 1000)),
    # There is an index for each of our questions. Statistics, which know nothing of the million rows that came since
    # they were taken, must not talk the planner out of it; and planning anew each time would cost more than it finds.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}

_HOPELESS = ("28", "3D", "42501", "0A")
"""SQLSTATEs of a wrong password, no such database, no right to do that, a server that can't: settings to mend."""
_UNDECIDED = ("08", "40003", "57P01", "57P02")
"""SQLSTATEs that say that the server went away, which it may have done after the commit."""

_BROKEN = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)

BUSY = (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError)
"""What a statement raises that did not get a lock: it changed nothing."""

Connection = asyncpg.Connection
Row = asyncpg.Record
Say = Callable[[str], Awaitable[None]]


class Hopeless(StoreUnavailable):
    """The server does not let us do it, and will not until somebody changes the settings, here or there."""


class Refused(StoreUnavailable):
    """The server refused a statement and wrote nothing; ``code`` is its SQLSTATE."""

    def __init__(self, error: asyncpg.PostgresError) -> None:
        super().__init__(f"PostgreSQL refused: {error}")
        self.code = str(error.sqlstate)
        self.hopeless = self.code.startswith(_HOPELESS)


class PostgresPool:
    def __init__(self, url: str, *, size: int) -> None:
        self._url = url
        self._idle: list[Connection] = []
        self._room = asyncio.Semaphore(size)
        self._closed = False

    async def open(self) -> None:
        """Connect once, so that what is wrong with the settings shows; wait for a server that is still starting."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            try:
                async with self.connection():
                    return
            except Hopeless as error:
                raise SettingsError(f"DATABASE_URL: {error}") from error
            except StoreError as error:
                if loop.time() - began > START_SECONDS_MAX:
                    raise SettingsError(f"DATABASE_URL: {error}") from error
                log.warning("waiting for the database: %s", error)
                await asyncio.sleep(AGAIN_SECONDS)

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(connection.close(timeout=1) for connection in self._idle), return_exceptions=True)

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection that nobody else uses meanwhile."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                await self._room.acquire()
        except TimeoutError:
            raise StoreUnavailable("PostgreSQL is too slow: every connection is busy") from None
        try:
            connection = await self._ready()
            yield connection
            if not connection.is_closed():
                self._idle.append(connection)
        finally:
            self._room.release()

    async def _ready(self) -> Connection:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        return await self.connect()

    async def connect(self, **settings: str) -> Connection:
        """A new connection, with ``settings`` of the server for this session."""
        try:
            return await asyncpg.connect(
                self._url,
                timeout=CONNECT_SECONDS_MAX,
                server_settings=_SESSION | settings,
                max_cached_statement_lifetime=0,
            )
        except asyncpg.PostgresError as error:
            if str(error.sqlstate).startswith(_HOPELESS):
                raise Hopeless(f"PostgreSQL says: {error}") from error
            raise StoreUnavailable(f"PostgreSQL says: {error}") from error
        except (OSError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
            raise StoreUnavailable(f"can't connect to PostgreSQL: {error or 'no answer'}") from error

    async def read(self, sql: str, *arguments: object) -> list[Row]:
        """The rows of a statement that changes nothing."""
        try:
            return await self.write(sql, *arguments)
        except StoreIndeterminate as error:
            raise StoreUnavailable(str(error)) from error

    async def write(self, sql: str, *arguments: object) -> list[Row]:
        """The rows of a statement that is committed when this returns."""
        rows: list[Row] = await self.work(lambda connection: connection.fetch(sql, *arguments))
        return rows

    async def work(self, job: Callable[[Connection], Awaitable[Any]], *, seconds_max: float = OVERDUE_SECONDS) -> Any:
        """Do something with a connection, which is thrown away if it is not known how that ended."""
        async with self.connection() as connection:
            # The server gives a statement up by itself. This is for one that does not answer at all.
            overdue = asyncio.get_running_loop().call_later(seconds_max, connection.terminate)
            try:
                return await job(connection)
            except asyncpg.PostgresError as error:
                if str(error.sqlstate).startswith(_UNDECIDED):
                    connection.terminate()
                    raise StoreIndeterminate(f"PostgreSQL went away: {error}") from error
                refused = Refused(error)
            except (OSError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
                connection.terminate()
                raise StoreIndeterminate(f"the connection to PostgreSQL broke: {error}") from error
            except BaseException as error:
                ended = connection.is_closed()
                connection.terminate()
                if ended and isinstance(error, Exception):
                    # A process that stood still finds its limit past, maybe between two steps of asyncpg, which trips
                    # over a connection that ended there, in ways of its own.
                    raise StoreIndeterminate("PostgreSQL did not answer in time") from error
                raise
            finally:
                overdue.cancel()
        raise refused  # Behind the block above, which keeps the connection only if nothing is raised in it.

    @contextlib.asynccontextmanager
    async def channel(self, name: str, heard: Callable[[str], None], gone: Callable[[], None]) -> AsyncIterator[Say]:
        """A connection of its own that hands on what others say on a channel; yields what says something to them."""
        connection = await self.connect(synchronous_commit="off")  # A hint that a crash loses is no loss.
        mine = connection.get_server_pid()

        def on_notify(_connection: object, pid: int, _channel: str, said: object) -> None:
            if pid != mine:
                heard(str(said))

        async def say(text: str) -> None:
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
            yield say
        finally:
            connection.terminate()
