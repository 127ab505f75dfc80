"""One SQLite file, owned by one process: a thread that writes in group commits, and threads that read.

Everything that is asked while a commit is under way goes into the next transaction, whoever asked it, and is answered
after that transaction is on disk. So the price of an fsync is shared, and the event loop never waits for a disk.

How it fails: a file that another process holds is refused at opening. A write that the disk refuses, a damaged file,
one that was removed or replaced, and an error that nobody expected in one of the threads end the store
(``StoreFailed``): nothing is acknowledged any more and ``until_failed`` returns, because after a failed fsync nobody
knows what is on disk and trying again would only hide it. A full disk is told apart: the transaction is rolled back
whole and the callers get ``StoreUnavailable``.
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
from duetime.stores.sqlite_lock import LogLost, SqliteLock

A = TypeVar("A")
R = TypeVar("R")
Verb = Callable[[apsw.Connection, list[A]], list[R]]
"""Does one thing for many callers: gets the arguments of all of them and returns a result for each."""
Job = tuple[Verb[Any, Any], Any, asyncio.Future[Any]]

JOBS_PER_COMMIT_MAX = 1_000
CHECKPOINT_PAGES = 2_000
READERS = 2
LIST_READERS = 2
"""Lists have threads of their own: a page far down a long list takes a while, and nothing else waits for it."""
PROBE_SECONDS = 1.0
"""For how long the answer of a probe holds: however many clients ask, the disk sees one."""
REFUSED_SECONDS = 2.0
"""For how long after a write was refused the file counts as one that can't be written."""
LOG_HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24
SQLITE_VERSION_MIN = 3_051_003
"""Before it, a commit and a checkpoint on two connections could lose a page (its WAL-reset bug)."""
WRITER_CACHE_KIB = 16 * 1024  # what is not in it is in the system's cache, and four times as much was no faster
READER_CACHE_KIB = 8 * 1024

_DAMAGE = (apsw.IOError, apsw.CorruptError, apsw.NotADBError, apsw.ReadOnlyError, apsw.CantOpenError)


def _connect(path: Path, flags: int, cache_kib: int = READER_CACHE_KIB) -> apsw.Connection:
    connection = apsw.Connection(str(path), flags=flags)
    connection.set_busy_timeout(10_000)
    connection.execute(f"PRAGMA cache_size = -{cache_kib}")
    connection.execute("PRAGMA synchronous = FULL")
    # With one, the planner would sooner read through all timers than look up the 256 that a statement names.
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
        """Lock and open the file and run ``prepare`` on it, outside any transaction, before anything else."""
        if apsw.SQLITE_VERSION_NUMBER < SQLITE_VERSION_MIN:
            raise SettingsError("DATABASE_URL: needs SQLite 3.51.3 or newer, which has a write-ahead log without holes")
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
        """Have ``verb`` done inside the next transaction and return its result once that is on disk."""
        self._check_open()
        done: asyncio.Future[R] = self._loop.create_future()
        self._jobs.put((verb, argument, done))
        return await done

    async def read(self, job: Callable[[apsw.Connection], R]) -> R:
        """Run ``job``, which is quick, on a connection that can't write and sees what has been committed."""
        return await self._read(self._readers, job)

    async def read_list(self, job: Callable[[apsw.Connection], R]) -> R:
        """``read`` for a job that may take long."""
        return await self._read(self._list_readers, job)

    async def _read(self, threads: ThreadPoolExecutor, job: Callable[[apsw.Connection], R]) -> R:
        self._check_open()
        try:
            return await self._loop.run_in_executor(threads, lambda: job(self._reader()))
        except apsw.Error as error:
            raise StoreUnavailable(f"SQLite can't read {self.path}: {error}") from error

    async def probe(self) -> None:
        """Raise unless the file can be read and written. Callers who ask within a second get the same answer."""
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
            # On a connection of its own, which has nothing in its cache yet.
            with contextlib.closing(_connect(self.path, apsw.SQLITE_OPEN_READWRITE)) as connection:
                connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()

        def write(connection: apsw.Connection, asked: list[None]) -> list[None]:
            connection.pragma("user_version", connection.pragma("user_version"))
            return asked

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
        await asyncio.to_thread(self._writer.join)  # the last to close the file
        self._lock.release()

    def _answer(self, waiting: list[asyncio.Future[Any]], answers: list[Any]) -> None:
        for done, answer in zip(waiting, answers, strict=True):
            if done.done():
                continue  # The caller went away; what it asked for is written all the same.
            if isinstance(answer, BaseException):
                done.set_exception(answer)
            else:
                done.set_result(answer)

    def _note_refusal(self, refusal: StoreError) -> None:
        self._refusal, self._refused_at = refusal, self._loop.time()

    # In any thread.

    def _tell(self, call: Callable[..., object], *arguments: object) -> None:
        """Have something called in the event loop. When that is closed, nobody waits for an answer any more."""
        try:  # noqa: SIM105  (once a commit: a tenth of what ``suppress`` costs)
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            pass

    def _fail(self, error: BaseException) -> StoreError:
        """Acknowledge nothing any more; why."""
        if self._failure is None:
            if not isinstance(error, StoreFailed):
                why = str(error) if isinstance(error, apsw.Error) else repr(error)
                error = StoreFailed(f"SQLite can't be trusted with {self.path} any more: {why}")
            self._failure = error
        self._tell(self._failed.set)
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
            self._tell(self._answer, [opened], [error])
            return
        self._tell(self._answer, [opened], [None])
        while batch := self._next_batch():
            waiting = [done for _, _, done in batch]
            try:
                answers = self._commit(connection, [(verb, argument) for verb, argument, _ in batch])
                self._tell(self._answer, waiting, answers)
                if self._wal_pages >= CHECKPOINT_PAGES and not self._failure:
                    self._keep_log_short(connection)
            except BaseException as error:  # This thread must not end without a word: everybody would wait for ever.
                self._tell(self._answer, waiting, [self._fail(error)] * len(batch))
        self._copier.shutdown()
        with contextlib.suppress(apsw.Error):
            if not self._failure:
                self._checkpoint(connection, apsw.SQLITE_CHECKPOINT_TRUNCATE)
            connection.close()
            for file in self._files:
                file.xClose()  # not before SQLite has closed them, whose locks would go

    def _opened(self, prepare: Callable[[apsw.Connection], None]) -> apsw.Connection:
        connection = _connect(self.path, apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE, WRITER_CACHE_KIB)
        try:
            # First of all: a file that turns out not to be ours must stay as it is.
            prepare(connection)
            connection.execute("PRAGMA journal_mode = WAL")
            # A statement for many rows notes what each page was like before it, in case it fails half-way. In a
            # temporary file, where SQLite puts that, it cost up to a quarter of a batch of inserts.
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.set_wal_hook(self._after_commit)
            self._frame_bytes = FRAME_HEADER_BYTES + connection.pragma("page_size")
            connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()  # makes the log and its index
            self._lock.watch()
            flags = [apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_MAIN_DB, 0]
            self._files = [apsw.VFSFile("", path, flags) for path in self._lock.paths]
        except BaseException:
            connection.close()
            raise
        return connection

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
            if not self._in_place():
                self._give_up(connection)
            connection.execute("BEGIN IMMEDIATE")
            begun = True
            for verb, places in together.items():
                results = verb(connection, [jobs[place][1] for place in places])
                for place, result in zip(places, results, strict=True):
                    answers[place] = result
            connection.execute("COMMIT")
            return answers
        except (*_DAMAGE, StoreFailed) as error:
            return [self._fail(error)] * len(jobs)
        except Exception as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if begun and len(jobs) > 1:
                # One job must not take the others down with it.
                return [answer for job in jobs for answer in self._commit(connection, [job])]
            if isinstance(error, apsw.Error):
                error = StoreUnavailable(f"SQLite could not write to {self.path}: {error}")
                self._tell(self._note_refusal, error)
            return [error] * len(jobs)

    def _in_place(self) -> bool:
        """Whether every file is still the one that was opened, and as long as it was. Asked before every commit, so it
        asks SQLite, which takes a tenth of the instructions of Python's ``stat``."""
        for file in self._files:
            file.xFileControl(apsw.SQLITE_FCNTL_HAS_MOVED, self._moved_at)
            if self._moved.value:
                return False
        database, log, _ = self._files
        before, self._bytes = self._bytes, database.xFileSize()
        return self._bytes >= before and log.xFileSize() >= self._log_bytes

    def _give_up(self, connection: apsw.Connection) -> NoReturn:
        """Raise why, and save what can be saved."""
        try:
            self._lock.explain()
        except LogLost as error:
            # It is still open here, and the database is in its place: nothing that was acknowledged has to be lost.
            self._copier.shutdown()
            try:
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_FULL)
                kept = "all timers were saved into the database: start Duetime again"
            except apsw.Error as problem:
                kept = f"not all timers could be saved into the database ({problem}): restore a backup"
            raise StoreFailed(f"{error}; {kept}") from error

    def _keep_log_short(self, connection: apsw.Connection) -> None:
        """Copy the log into the file: the bulk of it in a thread of its own, while commits go on; here, where commits
        wait, only what came meanwhile, so that the log can start over."""
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
            pass  # A reader is in the way; the next commit brings us here again.

    def _after_commit(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        self._wal_pages = pages
        self._log_bytes = LOG_HEADER_BYTES + pages * self._frame_bytes
        return apsw.SQLITE_OK

    # In the copier thread.

    def _copy_log(self) -> None:
        try:
            self._checkpoint(self._reader(), apsw.SQLITE_CHECKPOINT_PASSIVE)
        except apsw.CantOpenError:
            pass  # No file descriptor is free for a connection; then the writer copies it all.
        except BaseException as error:
            self._fail(error)
