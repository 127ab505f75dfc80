"""Connections to a MySQL primary: sends packets of several statements, and classifies failures.

A transaction is one packet, from START TRANSACTION to COMMIT. The server runs all of it once it has received it, so a
client that is suspended holds no lock. The results of a transaction are selected after its COMMIT, so that a client
that does not read them holds no lock either. There is one exception: an error in the middle of a packet leaves the
transaction open until the client closes the connection, which it does at once. If the client is suspended at that
moment, its locks are held for ``SERVER_IDLE_SECONDS_MAX``.

How it fails: a packet that the server rejected before its COMMIT was rolled back (``StoreUnavailable``). If the
connection broke before the response, or an error came after the COMMIT, the packet may or may not have been committed
(``StoreIndeterminate``). In both cases the connection is closed, which ends its transaction. All idle connections are
closed, too, if the connection broke or the server has become read-only. If the server is down, the next caller tries to
connect again. The server ends a slow read itself, before the client stops waiting for it.

Failover: of the hosts in the URL, the last one that worked is tried first, and a read-only server counts as a host that
is down.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import asyncmy
import asyncmy.errors
from asyncmy.constants.CLIENT import MULTI_STATEMENTS

from duetime.databases import address_of
from duetime.errors import SettingsError, StoreIndeterminate, StoreUnavailable
from duetime.stores.connecting import Hosts, Misconfigured
from duetime.stores.mysql.dialects import DETECT, MYSQL, dialect_of

ANSWER_SECONDS_MAX = 6.0
READ_SECONDS_LESS = 1.0
"""How long before ``ANSWER_SECONDS_MAX`` the server ends a read."""
LOCK_SECONDS_MAX = 4
CONNECT_SECONDS_MAX = 5.0
RETRY_SECONDS = 0.1
IDLE_SECONDS_MAX, SERVER_IDLE_SECONDS_MAX = 10.0, 20
"""The server closes a connection that is idle for ``SERVER_IDLE_SECONDS_MAX``, and so ends a transaction that was left
open. The pool stops using it well before that."""

_SESSION = (
    "SET SESSION time_zone = '+00:00'",  # local time is ambiguous in the hour at the end of summer time
    "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'",
    "SET SESSION sql_notes = 0",
    "SET SESSION group_concat_max_len = 1000000",  # a claim lists its shards
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    f"SET SESSION innodb_lock_wait_timeout = {LOCK_SECONDS_MAX}",
    f"SET SESSION lock_wait_timeout = {LOCK_SECONDS_MAX}",
    f"SET SESSION wait_timeout = {SERVER_IDLE_SECONDS_MAX}",
)

ACCESS_DENIED = 1045
_MISCONFIGURED = {
    1044: "MySQL: {}; grant this user all privileges on the database",
    ACCESS_DENIED: "MySQL: {}; check the user and the password",
    1049: "MySQL: {}; create it first",
    1130: "MySQL: {}",
    1142: "MySQL: {}; grant this user all privileges on the database",
    1173: "this MariaDB requires primary keys, and the table history has none: set innodb_force_primary_key to OFF",
    1227: "MySQL: {}",
    1251: "MySQL: {}",
    1665: "this MySQL can't log changes of InnoDB tables by statement: set binlog_format to ROW",
    2059: "MySQL: {}",
    3159: "this MySQL accepts only TLS: add ?ssl-mode=required to the URL",
    3750: "this MySQL requires primary keys, and the table history has none: set sql_require_primary_key to OFF",
}
"""The messages for errors that wrong settings cause, by error number."""
_DEMOTED = frozenset({1290, 1792, 1836})
"""The server has become read-only."""
SERVER_PACKET_BYTES_MIN = 16 << 20
"""The default of MariaDB, which is the lowest of all supported servers."""
READ_ONLY = "MySQL does not accept writes: it is a replica or read-only"
NO_PARTITION = 1526
ServerError = asyncmy.errors.MySQLError
BUSY = frozenset({1105, 1205, 1213, 3572, 8002, 8022, 8027, 8028, 9004, 9007})
"""Retry: another transaction holds a lock or, on TiDB, has changed rows that this one writes, or the tables. 1105 is
TiDB's error for a lock that it gave up waiting for."""

_BROKEN = (OSError, EOFError, asyncmy.errors.MySQLError, RuntimeError, TimeoutError)


class Result(NamedTuple):
    affected: int
    rows: Sequence[Any]


class Refused(StoreUnavailable):
    """The server rejected a statement and wrote nothing; ``code`` is the error number."""

    def __init__(self, code: int, text: object) -> None:
        super().__init__(f"MySQL rejected a statement: {text}")
        self.code = code


class MysqlPool:
    def __init__(self, url: str, *, size: int) -> None:
        self._arguments = functools.cache(connect_arguments)  # reading certificates blocks the event loop for a while
        self._hosts = Hosts(url, self._arguments)
        self.server = ("", 0)
        """Host and port of the last connection."""
        self.dialect = MYSQL
        """The server's dialect, detected by the first connection."""
        self.failovers = 0
        """The number of failovers to another server, which may lack recent commits of the one before it."""
        self._server_id: int | None = None
        self._idle: list[tuple[Any, float, int]] = []
        self._room = asyncio.Semaphore(size)
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        self._drop_idle()

    def _drop_idle(self) -> None:
        """Close all idle connections: after one has broken, the others are probably broken, too, and some would only
        time out."""
        while self._idle:
            self._idle.pop()[0].close()

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        """Borrow a connection exclusively; it is closed if anything is raised. Server and network errors become
        ``StoreUnavailable``; ``write`` distinguishes them further."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                await self._room.acquire()
        except TimeoutError:
            raise StoreUnavailable("MySQL is too slow: every connection is busy") from None
        try:
            connection, failovers = await self._ready()
            try:
                yield connection
            except BaseException as error:
                connection.close()
                if isinstance(error, _BROKEN):
                    reason = f"MySQL did not finish: {_text(error) or 'no response'}"
                    raise _misconfigured(error) or StoreUnavailable(reason) from error
                raise
            if failovers != self.failovers:
                connection.close()
            else:
                self._idle.append((connection, asyncio.get_running_loop().time(), failovers))
        finally:
            self._room.release()

    async def _ready(self) -> tuple[Any, int]:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection, since, failovers = self._idle.pop()
            if connection.connected and now - since < IDLE_SECONDS_MAX:
                return connection, failovers
            connection.close()
        return await self._hosts.first(self._connect), self.failovers

    async def _connect(self, url: str) -> Any:
        arguments = self._arguments(url)
        connection = None
        try:
            async with asyncio.timeout(CONNECT_SECONDS_MAX / len(self._hosts)):
                with _cancellation_kept():
                    connection = await asyncmy.connect(**arguments)
                detected, *_ = await run(connection, [DETECT, *_SESSION])
                dialect = dialect_of([name for name, _ in detected.rows])
                checks = (dialect.read_only, "@@global.max_allowed_packet", "@@server_id")
                query = f"SELECT {', '.join((*checks, *(check for _, check in dialect.durable)))}"
                *_, state = await run(connection, [*dialect.session, query])
            [(read_only, packet_bytes_max, server_id, *durable)] = state.rows
            if read_only:
                raise StoreUnavailable(READ_ONLY)
            for (setting, _), right in zip(dialect.durable, durable, strict=True):
                if not right:
                    raise Misconfigured(
                        f"this MySQL acknowledges a commit before it is on disk: set {setting} to 1, also on replicas"
                    )
            if packet_bytes_max < SERVER_PACKET_BYTES_MIN:
                raise Misconfigured(
                    f"max_allowed_packet of this MySQL is {packet_bytes_max}: set it to {SERVER_PACKET_BYTES_MIN} (16M)"
                )
            if self._server_id not in (None, server_id):
                self.failovers += 1
                self._drop_idle()
            self._server_id, self.dialect = server_id, dialect
            self.server = arguments["host"], arguments["port"]
            return connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            if not isinstance(error, _BROKEN):
                raise
            reason = f"can't connect to MySQL at {address_of(url)}: {_text(error) or 'no response'}"
            wrong = _misconfigured(error, encrypted=arguments["ssl"] is not None) or _wrong_tls(error, address_of(url))
            raise wrong or StoreUnavailable(reason) from error

    async def read(self, *statements: str) -> list[Sequence[Any]]:
        """Run statements that change nothing, and return the rows of each."""
        if not statements:
            return []
        seconds_max = ANSWER_SECONDS_MAX - READ_SECONDS_LESS
        limited = (self.dialect.limited(statement, seconds_max) for statement in statements)
        packet = (*self.dialect.reads_begin, *limited, *self.dialect.reads_end)
        first = len(self.dialect.reads_begin)
        try:
            results = await self._send(packet, commit=len(packet))
            return [result.rows for result in results[first : first + len(statements)]]
        except StoreIndeterminate as error:
            raise StoreUnavailable(str(error)) from error

    async def write(self, *statements: str, then: Sequence[str] = ()) -> list[Result]:
        """Run the statements in one transaction. Return the result of each, and of the ``then`` statements, which run
        after the commit."""
        packet = ("START TRANSACTION", *statements, "COMMIT", *then)
        results = await self._send(packet, commit=len(statements) + 1)
        return [*results[1 : len(statements) + 1], *results[len(statements) + 2 :]]

    async def execute(self, *statements: str) -> list[Result]:
        """Run statements that commit implicitly, such as DDL."""
        return await self._send(statements, commit=0)

    async def _send(self, statements: Sequence[str], *, commit: int) -> list[Result]:
        """Send a packet. ``commit`` is the position of the first statement that may have committed when it fails."""
        results: list[Result] = []
        async with self.connection() as connection:
            try:
                async with asyncio.timeout(ANSWER_SECONDS_MAX):
                    return await run(connection, statements, results)
            except _BROKEN as error:
                code = _code(error)
                # The numbers from 2000 to 2999 are errors of the client, without a response from the server.
                from_server = isinstance(error, asyncmy.errors.MySQLError) and code and not 2000 <= code < 3000
                if code in _DEMOTED or not from_server:
                    self._drop_idle()
                if from_server and len(results) < max(commit, 1):
                    raise _misconfigured(error) or Refused(code, _text(error)) from error
                raise StoreIndeterminate(f"the connection to MySQL broke: {_text(error) or 'no response'}") from error


async def run(connection: Any, statements: Sequence[str], results: list[Result] | None = None) -> list[Result]:
    """Send the statements as one packet and read their results, appending each to ``results`` as it arrives."""
    results = [] if results is None else results
    async with connection.cursor() as cursor:
        await cursor.execute(";\n".join(statements))
        while True:
            results.append(Result(cursor.rowcount, await cursor.fetchall() if cursor.description else ()))
            if not await cursor.nextset():
                return results


async def lock(connection: Any, name: str, seconds_max: float) -> bool:
    """Acquire a named lock of this database for the connection. Return whether it was acquired in time. TiDB rejects
    requests for a lock with many waiters, so they are retried."""
    until = asyncio.get_running_loop().time() + seconds_max
    while True:
        try:
            [got] = await run(connection, [f"SELECT GET_LOCK({_lock_name(name)}, {seconds_max:g})"])
            return bool(got.rows[0][0])
        except asyncmy.errors.MySQLError as error:
            if error.args[0] not in BUSY:
                raise
        if asyncio.get_running_loop().time() > until:
            return False
        await asyncio.sleep(RETRY_SECONDS)


async def unlock(connection: Any, name: str) -> None:
    """Release a named lock. Not needed after an error or a cancellation, which closes the connection and so releases
    the lock."""
    await run(connection, [f"SELECT RELEASE_LOCK({_lock_name(name)})"])


def _lock_name(name: str) -> str:
    """A lock's name has at most 64 characters, and so has the database's: the lock contains a hash of it."""
    return f"CONCAT('{name} ', LEFT(SHA2(DATABASE(), 256), 32))"


@contextlib.contextmanager
def _cancellation_kept() -> Iterator[None]:
    """Raise the cancellation of the task if the driver loses it: before Python 3.12, ``asyncio.wait_for`` returns a
    result that comes at the same moment instead."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError


def _code(error: BaseException) -> int:
    return error.args[0] if error.args and isinstance(error.args[0], int) else 0


def _text(error: BaseException) -> str:
    return str(error.args[-1]) if error.args else str(error)


def _misconfigured(error: BaseException, *, encrypted: bool = True) -> Misconfigured | None:
    """The error with advice, if wrong settings caused it."""
    message = _MISCONFIGURED.get(_code(error))
    if message is None or not isinstance(error, ServerError):
        return None
    advice = "" if encrypted or _code(error) != ACCESS_DENIED else ", or add ?ssl-mode=required if it must use TLS"
    return Misconfigured(message.format(_text(error)) + advice)


def _wrong_tls(error: BaseException, address: str) -> Misconfigured | None:
    """The error of a TLS handshake with advice, if wrong settings caused it."""
    cause = error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return Misconfigured(
            f"MySQL at {address} has a certificate that is not accepted ({cause.verify_message.rstrip('.')}): check "
            "ssl-ca, ssl-mode and the name of the host"
        )
    if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
        return Misconfigured(f"MySQL at {address} does not support TLS: configure it there, or remove ssl-mode")
    return None


def connect_arguments(url: str) -> dict[str, Any]:
    """The driver's arguments for ``mysql://user:password@host:port/database?ssl-mode=…&ssl-ca=…``."""
    parts = urlsplit(url)
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    authority = options.pop("ssl-ca", None)
    mode = options.pop("ssl-mode", "disabled" if authority is None else "verify_ca").lower().replace("-", "_")
    if options:
        raise SettingsError(
            f"DATABASE_URL: unknown parameters in mysql:// URL: {', '.join(sorted(options))}; use ssl-mode and ssl-ca"
        )
    database = unquote(parts.path.removeprefix("/"))
    if not parts.hostname or not database:
        raise SettingsError("DATABASE_URL: must be like mysql://user:password@host:3306/database")
    return {
        "host": parts.hostname,
        "port": parts.port or 3306,
        "user": unquote(parts.username or "root"),
        "password": unquote(parts.password or "").encode(),  # asyncmy would encode a str as Latin-1
        "db": database,
        "charset": "utf8mb4",
        "autocommit": True,
        "client_flag": MULTI_STATEMENTS,
        "connect_timeout": CONNECT_SECONDS_MAX,
        "ssl": _context(mode, authority),
    }


def _context(mode: str, authority: str | None) -> ssl.SSLContext | None:
    if mode not in ("disabled", "required", "verify_ca", "verify_identity"):
        raise SettingsError("DATABASE_URL: ssl-mode must be disabled, required, verify_ca or verify_identity")
    if mode == "disabled":
        if authority is not None:
            raise SettingsError("DATABASE_URL: ssl-ca has no effect with ssl-mode=disabled: remove one of them")
        return None
    if mode == "required" and authority is None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    try:
        context = ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise SettingsError(f"DATABASE_URL: can't read the certificates in {authority}: {error}") from error
    context.check_hostname = mode == "verify_identity"
    return context
