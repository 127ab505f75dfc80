"""The writer of the SQLite store: group commit, and the effect of disk errors and failing jobs on callers."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest
from msgspec import Raw

from duetime.errors import StoreFailed, StoreUnavailable
from duetime.model import Status, Timer
from duetime.store import Filter, Query
from duetime.stores.sqlite import file as sqlite_file
from duetime.stores.sqlite.store import SqliteStore
from tests.clocks import START, ManualClock
from tests.contract.stores import sqlite
from tests.contract.timers import (
    ALICE,
    EVERYTHING,
    changed,
    completed,
    definition,
    ended,
    everything,
    existing,
    holding,
    ids,
    spread,
    timer,
    with_timers,
)

UNWRITABLE = 1 << 70
"""A value that is too large for a column of SQLite: a job with it always fails."""


Trace = list[tuple[str, object]]


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    """Every statement that the store's connections run, with its bindings."""
    trace: Trace = []
    connect = sqlite_file._connect

    def listen(_cursor: apsw.Cursor, sql: str, bindings: object) -> bool:
        trace.append((sql, bindings))
        return True

    def traced(*arguments: Any) -> apsw.Connection:
        connection = connect(*arguments)
        connection.exec_trace = listen
        return connection

    monkeypatch.setattr(sqlite_file, "_connect", traced)
    return trace


@pytest.fixture
def store(trace: object, runner: asyncio.Runner, tmp_path: Path, clock: ManualClock) -> Iterator[SqliteStore]:
    store = runner.run(sqlite(tmp_path, clock))
    yield store
    runner.run(store.close())


async def together(store: SqliteStore, *jobs: Awaitable[object]) -> list[object]:
    """Start all of these calls while the writer is busy with another commit, so that they share the next one."""
    entered, leave = threading.Event(), threading.Event()

    def dawdle(_connection: apsw.Connection, asked: list[None]) -> list[None]:
        entered.set()
        leave.wait(60)
        return asked

    first = asyncio.ensure_future(store._file.write(dawdle, None))
    await asyncio.to_thread(entered.wait)
    under_way = [asyncio.ensure_future(job) for job in jobs]
    await asyncio.sleep(0)
    leave.set()
    await first
    return await asyncio.gather(*under_way, return_exceptions=True)


async def on_the_writer(store: SqliteStore, do: Callable[[apsw.Connection], Any]) -> Any:
    return await store._file.write(lambda connection, asked: [do(connection) for _ in asked], None)


# Group commit.


async def test_writes_during_a_commit_share_the_next_one(store: SqliteStore, trace: Trace) -> None:
    held = await holding(store)
    trace.clear()
    jobs = [*(store.put(t) for t in spread(500)), store.begin(ALICE, held, 10), store.claim(ALICE, [0], 1)]
    answers = await together(store, *jobs)
    assert answers[:500] == [None] * 500
    assert len([sql for sql, _ in trace if sql == "COMMIT"]) == 2  # The commit that kept the writer busy, and theirs.
    assert len([sql for sql, _ in trace if sql.startswith("INSERT INTO timers")]) < 20


async def test_jobs_per_commit_are_limited(store: SqliteStore, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "JOBS_PER_COMMIT_MAX", 100)
    trace.clear()
    assert await together(store, *(store.put(t) for t in spread(450))) == [None] * 450
    assert len([sql for sql, _ in trace if sql == "COMMIT"]) == 6
    assert len(await everything(store)) == 450


async def test_cancelled_caller_does_not_disturb_others(store: SqliteStore) -> None:
    async def impatient() -> None:
        async with asyncio.timeout(0):
            await store.put(timer("impatient"))

    answers = await together(store, store.put(timer("a")), impatient(), store.put(timer("b")))
    assert [answers[0], answers[2]] == [None, None]
    assert isinstance(answers[1], TimeoutError)
    assert {id for _, id in await everything(store)} == {"a", "b", "impatient"}


async def test_failing_job_does_not_fail_the_others_of_its_commit(store: SqliteStore) -> None:
    timers = spread(40)
    timers[13] = changed(timers[13], execute_at=UNWRITABLE)
    batch = [timer("many1"), timer("many2", execute_at=UNWRITABLE), timer("many3")]
    answers = await together(store, *(store.put(t) for t in timers), store.put_many(batch), store.ping())
    assert [n for n, answer in enumerate(answers) if answer is not None] == [13, 40]
    assert isinstance(answers[13], OverflowError)
    assert isinstance(answers[40], OverflowError)
    assert await everything(store) == {("default", t.id): t for t in timers if t is not timers[13]}
    assert (await store.tally())[Status.PENDING] == 39


async def test_failing_job_writes_nothing(store: SqliteStore) -> None:
    await with_timers(store, *spread(3))

    def half(connection: apsw.Connection) -> None:
        connection.execute("DELETE FROM timers")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await on_the_writer(store, half)
    assert len(await everything(store)) == 3
    await store.put(timer("after"))
    assert (await store.tally())[Status.PENDING] == 4


async def test_reader_does_not_block_the_writer(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "CHECKPOINT_PAGES", 1)
    await with_timers(store, *spread(10))
    reading, leave = threading.Event(), threading.Event()

    def read_slowly(connection: apsw.Connection) -> int:
        rows = connection.execute("SELECT seq FROM timers")
        next(rows)
        reading.set()
        assert leave.wait(60)
        return 1 + len(list(rows))

    slow = asyncio.ensure_future(store._file.read(read_slowly))
    await asyncio.to_thread(reading.wait)
    held = await holding(store)
    begun = (await store.begin(ALICE, held, EVERYTHING)).timers
    assert await store.record(ALICE, [(t, completed(t)) for t in begun]) == [True] * len(begun)
    await with_timers(store, *spread(200, prefix="more"))
    assert (await existing(store, "more7")).id == "more7"
    assert not slow.done()
    leave.set()
    assert await slow == 10  # The reader saw the same rows throughout.


async def test_log_is_checkpointed_and_stays_small(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "CHECKPOINT_PAGES", 50)
    for round in range(30):
        await with_timers(store, *spread(50, prefix=f"{round}/"))
        # Commits do not wait for the checkpoint, so on a slow disk the log may grow far ahead of it.
        await on_the_writer(store, lambda _: None)
        if (copying := store._file._copying) is not None:
            await asyncio.wrap_future(copying)
    wal = tmp_path / "duetime.db-wal"
    assert wal.stat().st_size < 3 * 50 * 4096
    assert (tmp_path / "duetime.db").stat().st_size > 300_000


# Disk errors.


async def assert_failed(store: SqliteStore) -> None:
    async with asyncio.timeout(30):
        await store.failure()
    for verb in (
        store.put(timer("late")),
        store.get("default", "t0"),
        store.tally(),
        store.ping(),
        store.renew(ALICE, 1),
    ):
        with pytest.raises(StoreFailed, match="what is on disk is uncertain"):
            await verb


async def assert_reopens_with(tmp_path: Path, clock: ManualClock, *there: Timer) -> None:
    again = await sqlite(tmp_path, clock)
    assert await everything(again) == {("default", t.id): t for t in there}
    assert (await again.tally())[Status.PENDING] == len(there)
    await again.close()


@pytest.mark.parametrize("error", [apsw.IOError, apsw.CorruptError, apsw.ReadOnlyError])
async def test_damage_fails_the_store_for_all_callers(
    store: SqliteStore, tmp_path: Path, clock: ManualClock, error: type[Exception]
) -> None:
    await with_timers(store, first := timer("first"))

    def break_down(connection: apsw.Connection) -> None:
        raise error("the disk is on fire")

    jobs = [store.put(timer("a")), on_the_writer(store, break_down), store.put(timer("b")), store.renew(ALICE, 1)]
    answers = await together(store, *jobs)
    assert [type(answer) for answer in answers] == [StoreFailed] * 4
    await assert_failed(store)
    await store.close()
    await assert_reopens_with(tmp_path, clock, first)


async def test_failed_commit_is_not_retried(
    store: SqliteStore, trace: Trace, tmp_path: Path, clock: ManualClock
) -> None:
    def fail_at_commit(_cursor: apsw.Cursor, sql: str, bindings: object) -> bool:
        trace.append((sql, bindings))
        if sql == "COMMIT":
            raise apsw.IOError("fsync failed")
        return True

    def arm(connection: apsw.Connection) -> None:
        connection.exec_trace = fail_at_commit

    await with_timers(store, first := timer("first"))
    with pytest.raises(StoreFailed):
        await on_the_writer(store, arm)
    trace.clear()
    await assert_failed(store)
    assert trace == []
    await store.close()
    await assert_reopens_with(tmp_path, clock, first)


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Make every write beyond this size fail, like a broken disk. Python ignores the accompanying signal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_real_write_error_of_the_disk_fails_the_store(
    store: SqliteStore, tmp_path: Path, clock: ManualClock
) -> None:
    await with_timers(store, *(first := spread(20)))
    acknowledged = list(first)
    with files_up_to((tmp_path / "duetime.db-wal").stat().st_size + 200_000):
        with pytest.raises(StoreFailed, match="disk I/O"):
            for n in range(100):
                acknowledged.append(new := timer(f"n{n}", definition=definition(Raw(b'"' + b"x" * 20_000 + b'"'))))
                await store.put(new)
        assert n > 1
        await assert_failed(store)
        await store.close()
    await assert_reopens_with(tmp_path, clock, *acknowledged[:-1])


# Unexpected errors in a thread.


def fail_at(statement: str, error: BaseException) -> Callable[[apsw.Connection], None]:
    """A job that fails and makes every later statement with this text fail on its connection."""

    def trip(_cursor: apsw.Cursor, sql: str, _bindings: object) -> bool:
        if sql == statement:
            raise error
        return True

    def arm(connection: apsw.Connection) -> None:
        connection.exec_trace = trip
        raise ZeroDivisionError

    return arm


@pytest.mark.parametrize("error", [apsw.BusyError("locked"), MemoryError(), RuntimeError("out of luck")])
async def test_failed_rollback_fails_the_store(
    store: SqliteStore, tmp_path: Path, clock: ManualClock, error: Exception
) -> None:
    await with_timers(store, first := timer("first"))
    jobs = [store.put(timer("a")), on_the_writer(store, fail_at("ROLLBACK", error)), store.put(timer("b"))]
    async with asyncio.timeout(30):
        answers = await together(store, *jobs)
    assert [type(answer) for answer in answers] == [StoreFailed] * 3
    await assert_failed(store)
    await store.close()
    await assert_reopens_with(tmp_path, clock, first)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_base_exception_fails_the_store(
    store: SqliteStore, tmp_path: Path, clock: ManualClock, error: type[BaseException]
) -> None:
    await with_timers(store, first := timer("first"))

    def leave(_connection: apsw.Connection) -> None:
        raise error

    async with asyncio.timeout(30):
        answers = await together(store, store.put(timer("a")), on_the_writer(store, leave), store.put(timer("b")))
    assert [type(answer) for answer in answers] == [StoreFailed] * 3
    await assert_failed(store)
    await store.close()
    await assert_reopens_with(tmp_path, clock, first)


async def test_job_without_memory_fails_alone(store: SqliteStore) -> None:
    def hungry(_connection: apsw.Connection) -> None:
        raise MemoryError

    answers = await together(store, store.put(timer("a")), on_the_writer(store, hungry), store.put(timer("b")))
    assert [type(answer) for answer in answers] == [type(None), MemoryError, type(None)]


@pytest.mark.parametrize("where", ["copier", "writer"])
@pytest.mark.parametrize("error", [MemoryError(), apsw.IOError("disk"), SystemExit()], ids=lambda error: repr(error))
async def test_failed_checkpoint_fails_the_store(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    checkpoint = store._file._checkpoint

    def trip(connection: apsw.Connection, mode: int) -> None:
        if (threading.current_thread() is store._file._writer) == (where == "writer"):
            raise error
        checkpoint(connection, mode)

    monkeypatch.setattr(sqlite_file, "CHECKPOINT_PAGES", 1)
    monkeypatch.setattr(store._file, "_checkpoint", trip)
    async with asyncio.timeout(30):
        with pytest.raises(StoreFailed):
            for n in range(1000):
                await store.put(timer(f"n{n}"))
                if (copying := store._file._copying) is not None:
                    await asyncio.wrap_future(copying)
        await assert_failed(store)


def test_event_loop_closed_before_the_result_is_tolerated(tmp_path: Path, clock: ManualClock) -> None:
    first, entered, leave = timer("first"), threading.Event(), threading.Event()

    def dawdle(_connection: apsw.Connection, asked: list[None]) -> list[None]:
        entered.set()
        assert leave.wait(60)
        return asked

    async def go_away() -> SqliteStore:
        store = await sqlite(tmp_path, clock)
        await store.put(first)
        asking = asyncio.ensure_future(store._file.write(dawdle, None))
        await asyncio.to_thread(entered.wait)
        asking.cancel()
        return store

    store = asyncio.run(go_away())
    leave.set()
    asyncio.run(store.close())  # The thread still runs; closing ends it and releases the file.
    asyncio.run(assert_reopens_with(tmp_path, clock, first))


# Health checks.


async def test_many_health_checks_cost_one_write(store: SqliteStore, trace: Trace) -> None:
    trace.clear()
    for _ in range(50):
        await asyncio.gather(*(store.ping() for _ in range(20)))
    commits = len([sql for sql, _ in trace if sql == "COMMIT"])
    assert 1 <= commits < 50  # one per second


async def test_health_check_reports_a_recent_failed_write(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "PROBE_SECONDS", 1000)
    monkeypatch.setattr(sqlite_file, "REFUSED_SECONDS", 1000)
    await store.ping()
    await with_no_room(store)
    with pytest.raises(StoreUnavailable, match="full"):
        await store.put(big())
    with pytest.raises(StoreUnavailable, match="full"):
        await store.ping()
    await on_the_writer(store, lambda c: c.pragma("max_page_count", 1_000_000))
    monkeypatch.setattr(sqlite_file, "PROBE_SECONDS", 0)
    monkeypatch.setattr(sqlite_file, "REFUSED_SECONDS", 0)
    await store.ping()


async def test_health_check_reports_an_unwritable_file(store: SqliteStore, tmp_path: Path) -> None:
    await on_the_writer(store, lambda c: c.set_busy_timeout(10))
    other = apsw.Connection(str(tmp_path / "duetime.db"))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked"):
        await store.ping()
    other.close()


async def test_slow_lists_delay_no_other_call(store: SqliteStore) -> None:
    leave = threading.Event()
    lists = [asyncio.ensure_future(store._file.read_list(lambda _: leave.wait(60))) for _ in range(40)]
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await store.put(timer("a"))
        assert (await existing(store, "a")).id == "a"
        await asyncio.gather(
            *(store.ping(), store.tally(), store.namespaces(), store.cluster()),
            *(store.lanes(START), store.overdue(range(8), START, 10)),
        )
    assert not any(each.done() for each in lists)
    leave.set()
    await asyncio.gather(*lists)


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.page_by_offset(Query(namespace="default")),
        lambda store: store.page(Filter(), 10),
        lambda store: store.count(Filter(), 10),
        lambda store: store.forecast([START, START + 1], 10),
    ],
)
async def test_every_list_runs_in_the_list_threads(store: SqliteStore, ask: Callable[..., Awaitable[object]]) -> None:
    leave = threading.Event()
    others = [asyncio.ensure_future(store._file.read(lambda _: leave.wait(60))) for _ in range(sqlite_file.READERS)]
    async with asyncio.timeout(30):
        await ask(store)
    leave.set()
    await asyncio.gather(*others)


# A full disk.


def big(id: str = "big") -> Timer:
    return timer(id, definition=definition(Raw(b'"' + b"x" * 30_000 + b'"')))


async def with_no_room(store: SqliteStore) -> None:
    pages = await on_the_writer(store, lambda c: c.pragma("page_count"))
    await on_the_writer(store, lambda c: c.pragma("max_page_count", pages + 2))


async def test_full_disk_does_not_fail_the_store(store: SqliteStore) -> None:
    await with_timers(store, *(first := spread(20)), old := ended("old", Status.FAILED, at=START - 10))
    await with_no_room(store)
    before, tally = await everything(store), await store.tally()
    many = [big(f"b{n}") for n in range(5)]
    answers = await together(store, *(store.put(t) for t in many), store.put_many(many))
    assert [type(answer) for answer in answers] == [StoreUnavailable] * 6
    assert "could not write" in str(answers[0])
    assert (await everything(store), await store.tally()) == (before, tally)
    # Operations that need no space continue: firing, recording, deleting, reading.
    held = await holding(store)
    begun = (await store.begin(ALICE, held, 3)).timers
    assert ids(begun) == ["t0"]
    assert await store.record(ALICE, [(t, completed(t)) for t in begun]) == [True]
    assert await store.purge(retention_ms=1, limit=10) == 1
    assert await store.get("default", old.id) is None
    # The others continue once there is space.
    await on_the_writer(store, lambda c: c.pragma("max_page_count", 1_000_000))
    assert await store.put_many(many) == [None] * 5
    assert len(await everything(store)) == len(first) + 5


async def test_put_that_fits_is_not_rejected_with_one_that_does_not(store: SqliteStore) -> None:
    await with_no_room(store)
    answers = await together(store, store.put(timer("a")), store.put(big()), store.put(timer("b")))
    assert [type(answer) for answer in answers] == [type(None), StoreUnavailable, type(None)]
    assert {id for _, id in await everything(store)} == {"a", "b"}


async def test_locked_file_is_waited_for_once(store: SqliteStore, trace: Trace, tmp_path: Path) -> None:
    await on_the_writer(store, lambda c: c.set_busy_timeout(10))
    trace.clear()
    other = apsw.Connection(str(tmp_path / "duetime.db"))
    other.execute("BEGIN IMMEDIATE")
    answers = await asyncio.gather(*(store.put(t) for t in spread(20)), return_exceptions=True)
    other.close()
    assert [type(answer) for answer in answers] == [StoreUnavailable] * 20
    assert await everything(store) == {}
    assert len([sql for sql, _ in trace if sql == "BEGIN IMMEDIATE"]) <= 3


async def test_log_is_reused_under_continuous_writes(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "CHECKPOINT_PAGES", 50)
    largest = 0
    for n in range(300):
        await store.put_many([timer(f"w{n}-{m}") for m in range(20)])
        largest = max(largest, (tmp_path / "duetime.db-wal").stat().st_size)
    written = (tmp_path / "duetime.db").stat().st_size
    assert written > 1_000_000, "no checkpoint was made"
    assert largest < 300 * 20 * 2_500, "the log grew with the number of writes"  # which is twice as much
    assert sum((await store.tally()).values()) == 300 * 20
