"""One SQLite file, owned by one process: a thread that writes in group commits, and threads that read.

Everything that is asked while a commit is under way goes into the next transaction, whoever asked it, and is answered
after that transaction is on disk. So the price of an fsync is shared, and the event loop never waits for a disk.

How it fails: a file that another process holds is refused at opening. A write that the disk refuses or a damaged file
ends the store (``StoreFailed``): nothing is acknowledged any more and ``until_failed`` returns, because after a failed
fsync nobody knows what is on disk and trying again would only hide it. A full disk is told apart: the transaction is
rolled back whole and the callers get ``StoreUnavailable``.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import apsw

from duetime.errors import SettingsError, StoreError, StoreFailed, StoreUnavailable

A = TypeVar("A")
R = TypeVar("R")
Verb = Callable[[apsw.Connection, list[A]], list[R]]
"""Does one thing for many callers: gets the arguments of all of them and returns a result for each."""
Job = tuple[Verb[Any, Any], Any, asyncio.Future[Any]]

JOBS_PER_COMMIT_MAX = 1_000
CHECKPOINT_PAGES = 2_000
READERS = 2
SQLITE_VERSION_MIN = 3_051_003
"""Before it, a commit and a checkpoint on two connections could lose a page (its WAL-reset bug)."""
WRITER_CACHE_KIB = 16 * 1024  # what is not in it is in the system's cache, and four times as much was no faster
READER_CACHE_KIB = 8 * 1024

_DAMAGE = (apsw.IOError, apsw.CorruptError, apsw.NotADBError, apsw.ReadOnlyError, apsw.CantOpenError)


def _connect(path: Path, flags: int, cache_kib: int = READER_CACHE_KIB) -> apsw.Connection:
    connection = apsw.Connection(str(path), flags=flags)
    connection.set_busy_timeout(10_000)
    connection.execute(f"PRAGMA cache_size = -{cache_kib}")
    # With one, the planner would sooner read through all timers than look up the 256 that a statement names.
    connection.execute("PRAGMA automatic_index = OFF")
    return connection


def holder(path: Path) -> str | None:
    """The number of the process that has this file open as its store, if there is one."""
    try:
        with open(f"{path}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
    except BlockingIOError:
        return Path(f"{path}.lock").read_text().strip() or "unknown"
    except OSError:
        return None


class SqliteFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._failed = asyncio.Event()
        self._failure: StoreError | None = None
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._closing = False
        self._wal_pages = 0
        self._copier = ThreadPoolExecutor(1, "duetime-sqlite-copy")
        self._copying: Future[None] | None = None
        self._local = threading.local()

    # From the event loop.

    async def open(self, prepare: Callable[[apsw.Connection], None]) -> None:
        """Lock and open the file and run ``prepare`` on it, outside any transaction, before anything else."""
        if apsw.SQLITE_VERSION_NUMBER < SQLITE_VERSION_MIN:
            raise SettingsError("DATABASE_URL: needs SQLite 3.51.3 or newer, which has a write-ahead log without holes")
        self._loop = asyncio.get_running_loop()
        self._lock_file = self._lock()
        self._readers = ThreadPoolExecutor(READERS, "duetime-sqlite-read")
        opened: asyncio.Future[None] = self._loop.create_future()
        self._writer = threading.Thread(
            target=self._write_forever, args=(prepare, opened), name="duetime-sqlite-write", daemon=True
        )
        self._writer.start()
        try:
            await opened
        except BaseException:
            self._lock_file.close()
            raise

    async def write(self, verb: Verb[A, R], argument: A) -> R:
        """Have ``verb`` done inside the next transaction and return its result once that is on disk."""
        if self._failure or self._closing:
            raise self._failure or StoreUnavailable("the store is closed")
        done: asyncio.Future[R] = self._loop.create_future()
        self._jobs.put((verb, argument, done))
        return await done

    async def read(self, job: Callable[[apsw.Connection], R]) -> R:
        """Run ``job`` on a connection that can't write and sees what has been committed."""
        if self._failure or self._closing:
            raise self._failure or StoreUnavailable("the store is closed")
        try:
            return await self._loop.run_in_executor(self._readers, lambda: job(self._reader()))
        except apsw.Error as error:
            raise StoreUnavailable(f"SQLite can't read {self.path}: {error}") from error

    async def probe(self, sql: str) -> None:
        """Read the file itself: on a connection of its own, which has nothing in its cache yet."""

        def fresh(_: apsw.Connection) -> None:
            with contextlib.closing(_connect(self.path, apsw.SQLITE_OPEN_READWRITE)) as connection:
                connection.execute(sql).fetchall()

        await self.read(fresh)

    async def until_failed(self) -> StoreError:
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    async def close(self) -> None:
        self._closing = True
        self._jobs.put(None)
        await asyncio.to_thread(self._writer.join)
        await asyncio.to_thread(self._readers.shutdown)
        self._lock_file.close()

    def _lock(self) -> Any:
        # The lock has a file of its own: closing any handle of the database file would drop SQLite's own locks on it.
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = open(f"{self.path}.lock", "a+")  # noqa: SIM115  (held open until close)
        except OSError as error:
            raise SettingsError(f"DATABASE_URL: can't write beside {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise SettingsError(
                f"DATABASE_URL: {self.path} is in use by another Duetime process (pid {holder}): stop it, or give this "
                "one a file of its own; several processes share a server database, not a file"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        return lock

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
            flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
            connection = _connect(self.path, flags, WRITER_CACHE_KIB)
            # First of all: a file that turns out not to be ours must stay as it is.
            prepare(connection)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            # A statement for many rows notes what each page was like before it, in case it fails half-way. In a
            # temporary file, where SQLite puts that, it cost up to a quarter of a batch of inserts.
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.set_wal_hook(self._after_commit)
        except apsw.Error as error:
            problem = SettingsError(f"DATABASE_URL: SQLite can't open {self.path}: {error}")
            self._loop.call_soon_threadsafe(opened.set_exception, problem)
            return
        except Exception as error:
            self._loop.call_soon_threadsafe(opened.set_exception, error)
            return
        self._loop.call_soon_threadsafe(opened.set_result, None)
        while batch := self._next_batch():
            answers = self._commit(connection, [(verb, argument) for verb, argument, _ in batch])
            self._loop.call_soon_threadsafe(_answer, [done for _, _, done in batch], answers)
            if self._failure:
                self._loop.call_soon_threadsafe(self._failed.set)
            elif self._wal_pages >= CHECKPOINT_PAGES:
                self._keep_log_short(connection)
        self._copier.shutdown()
        if not self._failure:
            self._checkpoint(connection, apsw.SQLITE_CHECKPOINT_TRUNCATE)
        with contextlib.suppress(apsw.Error):
            connection.close()

    def _next_batch(self) -> list[Job]:
        """Wait for a job and take what else is there; nothing once the file is being closed."""
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
        """Do the jobs in one transaction, each verb once for all who asked it; a result or an error for each job."""
        if self._failure:
            return [self._failure] * len(jobs)
        together: dict[Verb[Any, Any], list[int]] = {}
        for place, (verb, _) in enumerate(jobs):
            together.setdefault(verb, []).append(place)
        answers: list[Any] = [None] * len(jobs)
        begun = False
        try:
            connection.execute("BEGIN IMMEDIATE")
            begun = True
            for verb, places in together.items():
                results = verb(connection, [jobs[place][1] for place in places])
                for place, result in zip(places, results, strict=True):
                    answers[place] = result
            connection.execute("COMMIT")
            return answers
        except _DAMAGE as error:
            self._failure = StoreFailed(f"SQLite can't be trusted with {self.path} any more: {error}")
            return [self._failure] * len(jobs)
        except Exception as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if begun and len(jobs) > 1:
                # One job must not take the others down with it.
                return [answer for job in jobs for answer in self._commit(connection, [job])]
            if isinstance(error, apsw.Error):
                error = StoreUnavailable(f"SQLite could not write to {self.path}: {error}")
            return [error] * len(jobs)

    def _keep_log_short(self, connection: apsw.Connection) -> None:
        """Copy the log into the file: the bulk of it in a thread of its own, while commits go on; here, where commits
        wait, only what came meanwhile, so that the log can start over."""
        if self._copying is None:
            self._copying = self._copier.submit(self._copy_log)
        elif self._copying.done():
            self._copying = None
            self._checkpoint(connection, apsw.SQLITE_CHECKPOINT_PASSIVE)
            self._wal_pages = 0

    def _copy_log(self) -> None:
        with contextlib.closing(_connect(self.path, apsw.SQLITE_OPEN_READWRITE)) as connection:
            connection.execute("PRAGMA synchronous = FULL")
            self._checkpoint(connection, apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _checkpoint(self, connection: apsw.Connection, mode: int) -> None:
        try:
            connection.wal_checkpoint(mode=mode)
        except _DAMAGE as error:
            self._failure = StoreFailed(f"SQLite can't be trusted with {self.path} any more: {error}")
            self._loop.call_soon_threadsafe(self._failed.set)
        except apsw.Error:
            pass  # A reader is in the way; the next commit brings us here again.

    def _after_commit(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        self._wal_pages = pages
        return apsw.SQLITE_OK


def _answer(waiting: list[asyncio.Future[Any]], answers: list[Any]) -> None:
    for done, answer in zip(waiting, answers, strict=True):
        if done.done():
            continue  # The caller went away; what it asked for is written all the same.
        if isinstance(answer, BaseException):
            done.set_exception(answer)
        else:
            done.set_result(answer)
