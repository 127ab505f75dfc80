"""One SQLite file, owned by one process: one thread writes in group commits, and several threads read.

All writes requested during a commit go into the next transaction, and their callers get the results once it is on
disk. So one fsync serves many writes, and the event loop never waits for the disk.

How it fails: opening a file that another process uses is rejected. An I/O error on a write, a damaged file, a removed
or replaced file, and an unexpected error in one of the threads end the store (``StoreFailed``): no write is
acknowledged any more, and ``until_failed`` returns. After a failed fsync the contents of the disk are unknown, and a
retry would only hide that. A full disk is different: the transaction is rolled back and its callers get
``StoreUnavailable``.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeVar

import apsw

from duetime.errors import SettingsError, StoreError, StoreFailed, StoreUnavailable
from duetime.stores.sqlite.lock import LogLost, SqliteLock

A = TypeVar("A")
R = TypeVar("R")
Verb = Callable[[apsw.Connection, list[A]], list[R]]
"""A write operation for many callers: gets the arguments of all of them and returns a result for each."""
Job = tuple[Verb[Any, Any], Any, asyncio.Future[Any]]

JOBS_PER_COMMIT_MAX = 1_000
CHECKPOINT_PAGES = 2_000
READERS = 2
LIST_READERS = 2
"""Lists have their own threads, so that a slow page deep in a long list does not delay other reads."""
PROBE_SECONDS = 1.0
"""How long the result of a probe is cached, so that many health checks cause only one probe of the disk."""
REFUSED_SECONDS = 2.0
"""How long after a rejected write the file counts as not writable."""
LOG_HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24
SQLITE_VERSION_MIN = 3_051_003
"""Older versions could lose a page when one connection commits while another checkpoints (SQLite's WAL-reset bug)."""
WRITER_CACHE_KIB = 16 * 1024  # other pages are in the system's page cache; four times as much was no faster
READER_CACHE_KIB = 8 * 1024

_DAMAGE = (apsw.IOError, apsw.CorruptError, apsw.NotADBError, apsw.ReadOnlyError, apsw.CantOpenError)


def _connect(path: Path, flags: int, cache_kib: int = READER_CACHE_KIB) -> apsw.Connection:
    connection = apsw.Connection(str(path), flags=flags)
    connection.set_busy_timeout(10_000)
    connection.execute(f"PRAGMA cache_size = -{cache_kib}")
    connection.execute("PRAGMA synchronous = FULL")
    # With automatic indexes, the planner would scan all timers instead of looking up the 256 that a statement names.
    connection.execute("PRAGMA automatic_index = OFF")
    return connection


class SqliteFile:
    def __init__(self, path: Path) -> None:
        self._lock = SqliteLock(path)
        self.path = self._lock.path
        self._failed = asyncio.Event()
        self._failure: StoreError | None = None
        self._refusal: StoreError | None = None
        self._refused_at = 0.0
        self._probing = asyncio.Lock()
        self._probed: StoreError | None = None
        self._probed_at = -PROBE_SECONDS
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._closing = False
        self._wal_pages = 0
        self._bytes = self._log_bytes = 0
        self._moved = ctypes.c_int()
        self._moved_at = ctypes.addressof(self._moved)
        self._readers = ThreadPoolExecutor(READERS, "duetime-sqlite-read")
        self._list_readers = ThreadPoolExecutor(LIST_READERS, "duetime-sqlite-list")
        self._prober = ThreadPoolExecutor(1, "duetime-sqlite-probe")
        self._copier = ThreadPoolExecutor(1, "duetime-sqlite-copy")
        self._copying: Future[None] | None = None
        self._local = threading.local()

    # From the event loop.

    async def open(self, prepare: Callable[[apsw.Connection], None]) -> None:
        """Lock and open the file, and run ``prepare`` first, outside any transaction."""
        if apsw.SQLITE_VERSION_NUMBER < SQLITE_VERSION_MIN:
            raise SettingsError(
                "DATABASE_URL: SQLite 3.51.3 or newer is required: older versions can lose data in the write-ahead log"
            )
        self._loop = asyncio.get_running_loop()
        self._lock.take()
        opened: asyncio.Future[None] = self._loop.create_future()
        self._writer = threading.Thread(
            target=self._write_forever, args=(prepare, opened), name="duetime-sqlite-write", daemon=True
        )
        self._writer.start()
        try:
            await opened
        except BaseException:
            await self.close()
            raise

    async def write(self, verb: Verb[A, R], argument: A) -> R:
        """Run ``verb`` in the next transaction, and return its result once that is on disk."""
        self._check_open()
        done: asyncio.Future[R] = self._loop.create_future()
        self._jobs.put((verb, argument, done))
        return await done

    async def read(self, job: Callable[[apsw.Connection], R]) -> R:
        """Run a short ``job`` on a read-only connection, which sees all committed data."""
        return await self._read(self._readers, job)

    async def read_list(self, job: Callable[[apsw.Connection], R]) -> R:
        """``read`` for a job that may take longer."""
        return await self._read(self._list_readers, job)

    async def _read(self, threads: ThreadPoolExecutor, job: Callable[[apsw.Connection], R]) -> R:
        self._check_open()
        try:
            return await self._loop.run_in_executor(threads, lambda: job(self._reader()))
        except apsw.Error as error:
            raise StoreUnavailable(f"SQLite can't read {self.path}: {error}") from error

    async def probe(self) -> None:
        """Raise unless the file can be read and written. Calls within ``PROBE_SECONDS`` share one result."""
        async with self._probing:
            self._check_open()
            now = self._loop.time()
            if now >= self._probed_at + PROBE_SECONDS:
                self._probed = await self._probe()
                self._probed_at = now
        if problem := self._probed or (now < self._refused_at + REFUSED_SECONDS and self._refusal):
            raise self._failure or StoreUnavailable(str(problem))

    async def _probe(self) -> StoreError | None:
        def read(_: apsw.Connection) -> None:
            # On a new connection, whose cache is empty.
            with contextlib.closing(_connect(self.path, apsw.SQLITE_OPEN_READWRITE)) as connection:
                connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()

        def write(connection: apsw.Connection, arguments: list[None]) -> list[None]:
            connection.pragma("user_version", connection.pragma("user_version"))
            return arguments

        try:
            await self._read(self._prober, read)
            await self.write(write, None)
            return None
        except StoreError as error:
            return error

    def _check_open(self) -> None:
        if self._failure or self._closing:
            raise self._failure or StoreUnavailable("the store is closed")

    async def until_failed(self) -> StoreError:
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    async def close(self) -> None:
        self._closing = True
        for threads in (self._prober, self._list_readers, self._readers):
            await asyncio.to_thread(threads.shutdown)
        self._jobs.put(None)
        await asyncio.to_thread(self._writer.join)  # after the readers, because it closes the file last
        self._lock.release()

    def _resolve(self, waiting: list[asyncio.Future[Any]], results: list[Any]) -> None:
        for done, result in zip(waiting, results, strict=True):
            if done.done():
                continue  # The caller was cancelled; its write is committed anyway.
            if isinstance(result, BaseException):
                done.set_exception(result)
            else:
                done.set_result(result)

    def _note_refusal(self, refusal: StoreError) -> None:
        self._refusal, self._refused_at = refusal, self._loop.time()

    # In any thread.

    def _call_in_loop(self, call: Callable[..., object], *arguments: object) -> None:
        """Call something in the event loop. If the loop is closed, no caller is waiting any more."""
        try:  # noqa: SIM105  (once a commit: a tenth of what ``suppress`` costs)
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            pass

    def _fail(self, error: BaseException) -> StoreError:
        """Stop acknowledging writes, and return the reason."""
        if self._failure is None:
            if not isinstance(error, StoreFailed):
                why = str(error) if isinstance(error, apsw.Error) else repr(error)
                error = StoreFailed(f"SQLite failed on {self.path}, and what is on disk is uncertain: {why}")
            self._failure = error
        self._call_in_loop(self._failed.set)
        return self._failure

    # In a reader thread.

    def _reader(self) -> apsw.Connection:
        connection: apsw.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = _connect(self.path, apsw.SQLITE_OPEN_READWRITE)
            connection.execute("PRAGMA query_only = ON")
        return connection

    # In the writer thread.

    def _write_forever(self, prepare: Callable[[apsw.Connection], None], opened: asyncio.Future[None]) -> None:
        try:
            connection = self._opened(prepare)
        except BaseException as error:
            if isinstance(error, apsw.Error):
                error = SettingsError(f"DATABASE_URL: SQLite can't open {self.path}: {error}")
            self._call_in_loop(self._resolve, [opened], [error])
            return
        self._call_in_loop(self._resolve, [opened], [None])
        while batch := self._next_batch():
            waiting = [done for _, _, done in batch]
            try:
                results = self._commit(connection, [(verb, argument) for verb, argument, _ in batch])
                self._call_in_loop(self._resolve, waiting, results)
                if self._wal_pages >= CHECKPOINT_PAGES and not self._failure:
                    self._keep_log_short(connection)
            except BaseException as error:  # If this thread ended silently, all callers would wait forever.
                self._call_in_loop(self._resolve, waiting, [self._fail(error)] * len(batch))
        self._copier.shutdown()
        with contextlib.suppress(apsw.Error):
            if not self._failure:
                self._checkpoint(connection, apsw.SQLITE_CHECKPOINT_TRUNCATE)
            connection.close()
            for file in self._files:
                file.xClose()  # after SQLite has closed the files, because this drops SQLite's locks

    def _opened(self, prepare: Callable[[apsw.Connection], None]) -> apsw.Connection:
        connection = _connect(self.path, apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE, WRITER_CACHE_KIB)
        try:
            # Before anything else, because a file of another program must not be changed.
            prepare(connection)
            connection.execute("PRAGMA journal_mode = WAL")
            # A statement for many rows keeps the old content of the pages it changes, in case it fails half-way. In a
            # temporary file, SQLite's default, that cost up to a quarter of the time of a batch of inserts.
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.set_wal_hook(self._after_commit)
            self._frame_bytes = FRAME_HEADER_BYTES + connection.pragma("page_size")
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()  # creates the log and its index
            self._lock.watch()
            flags = [apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_MAIN_DB, 0]
            self._files = [apsw.VFSFile("", path, flags) for path in self._lock.paths]
        except BaseException:
            connection.close()
            raise
        return connection

    def _next_batch(self) -> list[Job]:
        """Wait for a job and return it with all others that are queued; nothing once the file is being closed."""
        batch: list[Job] = []
        job = self._jobs.get()
        while job is not None:
            batch.append(job)
            if len(batch) == JOBS_PER_COMMIT_MAX:
                return batch
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return batch
        if batch:
            self._jobs.put(None)
        return batch

    def _commit(self, connection: apsw.Connection, jobs: list[tuple[Verb[Any, Any], Any]]) -> list[Any]:
        """Run the jobs in one transaction, each verb once for all its callers. Return a result or an error for each
        job."""
        if self._failure:
            return [self._failure] * len(jobs)
        together: dict[Verb[Any, Any], list[int]] = {}
        for place, (verb, _) in enumerate(jobs):
            together.setdefault(verb, []).append(place)
        results: list[Any] = [None] * len(jobs)
        begun = False
        try:
            if not self._in_place():
                self._give_up(connection)
            connection.execute("BEGIN IMMEDIATE")
            begun = True
            for verb, places in together.items():
                of_verb = verb(connection, [jobs[place][1] for place in places])
                for place, result in zip(places, of_verb, strict=True):
                    results[place] = result
            connection.execute("COMMIT")
            return results
        except (*_DAMAGE, StoreFailed) as error:
            return [self._fail(error)] * len(jobs)
        except Exception as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if begun and len(jobs) > 1:
                # One failing job must not fail the others: run each in a transaction of its own.
                return [result for job in jobs for result in self._commit(connection, [job])]
            if isinstance(error, apsw.Error):
                error = StoreUnavailable(f"SQLite could not write to {self.path}: {error}")
                self._call_in_loop(self._note_refusal, error)
            return [error] * len(jobs)

    def _in_place(self) -> bool:
        """Whether each file is still the one that was opened and has not become shorter. Called before every commit, so
        it uses SQLite's file control, which takes a tenth of the instructions of Python's ``stat``."""
        for file in self._files:
            file.xFileControl(apsw.SQLITE_FCNTL_HAS_MOVED, self._moved_at)
            if self._moved.value:
                return False
        database, log, _ = self._files
        before, self._bytes = self._bytes, database.xFileSize()
        return self._bytes >= before and log.xFileSize() >= self._log_bytes

    def _give_up(self, connection: apsw.Connection) -> NoReturn:
        """Raise ``StoreFailed`` with the reason, after saving what can be saved."""
        try:
            self._lock.explain()
        except LogLost as error:
            # The log is still open here and the database is in place, so no acknowledged write need be lost.
            self._copier.shutdown()
            try:
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_FULL)
                saved = "all timers were saved into the database: start Duetime again"
            except apsw.Error as problem:
                saved = f"not all timers could be saved into the database ({problem}): restore a backup"
            raise StoreFailed(f"{error}; {saved}") from error

    def _keep_log_short(self, connection: apsw.Connection) -> None:
        """Checkpoint the log. Most of it is copied in a separate thread while commits continue. Then only the rest,
        written meanwhile, is copied here, where commits wait, so that the log can be reused from its start."""
        if self._copying is None:
            self._copying = self._copier.submit(self._copy_log)
        elif self._copying.done():
            self._copying = None
            self._checkpoint(connection, apsw.SQLITE_CHECKPOINT_PASSIVE)
            self._wal_pages = 0

    def _checkpoint(self, connection: apsw.Connection, mode: int) -> None:
        try:
            connection.wal_checkpoint(mode=mode)
        except _DAMAGE:
            raise
        except apsw.Error:
            pass  # A reader blocks the checkpoint; the next commit tries again.

    def _after_commit(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        self._wal_pages = pages
        self._log_bytes = LOG_HEADER_BYTES + pages * self._frame_bytes
        return apsw.SQLITE_OK

    # In the copier thread.

    def _copy_log(self) -> None:
        try:
            self._checkpoint(self._reader(), apsw.SQLITE_CHECKPOINT_PASSIVE)
        except apsw.CantOpenError:
            pass  # No file descriptor is free for a connection; the writer will copy all of the log.
        except BaseException as error:
            self._fail(error)
