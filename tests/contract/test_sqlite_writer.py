"""The SQLite store at work: one commit for many, and what becomes of the callers when the disk or a job is bad."""

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
from duetime.stores import sqlite_file
from duetime.stores.sqlite import SqliteStore
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
    holding,
    ids,
    spread,
    timer,
    with_timers,
)

UNWRITABLE = 1 << 70
"""More than a column of SQLite can hold: a job that fails whoever runs it."""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """Every statement that the store's connections run, with its bindings."""
    said: list[tuple[str, object]] = []
    connect = sqlite_file._connect

    def listen(_cursor: apsw.Cursor, sql: str, bindings: object) -> bool:
        said.append((sql, bindings))
        return True

    def traced(*arguments: Any) -> apsw.Connection:
        connection = connect(*arguments)
        connection.exec_trace = listen
        return connection

    monkeypatch.setattr(sqlite_file, "_connect", traced)
    return said


@pytest.fixture
def store(said: object, runner: asyncio.Runner, tmp_path: Path, clock: ManualClock) -> Iterator[SqliteStore]:
    store = runner.run(sqlite(tmp_path, clock))
    yield store
    runner.run(store.close())


async def asked_at_once(store: SqliteStore, *jobs: Awaitable[object]) -> list[object]:
    """Ask for all of these while the writer is busy with another commit, so that the next one has them all."""
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


async def on_the_writer(store: SqliteStore, do: Callable[[apsw.Connection], object]) -> object:
    return await store._file.write(lambda connection, asked: [do(connection) for _ in asked], None)


# One commit for many.


async def test_what_is_asked_during_a_commit_shares_the_next_one(store: SqliteStore, said: list) -> None:
    held = await holding(store)
    said.clear()
    jobs = [*(store.put(t) for t in spread(500)), store.begin(ALICE, held, 10), store.claim(ALICE, [0], 1)]
    answers = await asked_at_once(store, *jobs)
    assert answers[:500] == [None] * 500
    assert len([sql for sql, _ in said if sql == "COMMIT"]) == 2  # The one that kept the writer busy, and theirs.
    assert len([sql for sql, _ in said if sql.startswith("INSERT INTO timers")]) < 20


async def test_a_commit_has_a_limit(store: SqliteStore, said: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "JOBS_PER_COMMIT_MAX", 100)
    said.clear()
    assert await asked_at_once(store, *(store.put(t) for t in spread(450))) == [None] * 450
    assert len([sql for sql, _ in said if sql == "COMMIT"]) == 6
    assert len(await everything(store)) == 450


async def test_a_caller_that_goes_away_does_not_disturb_the_others(store: SqliteStore) -> None:
    async def impatient() -> None:
        async with asyncio.timeout(0):
            await store.put(timer("impatient"))

    answers = await asked_at_once(store, store.put(timer("a")), impatient(), store.put(timer("b")))
    assert [answers[0], answers[2]] == [None, None]
    assert isinstance(answers[1], TimeoutError)
    assert {id for _, id in await everything(store)} == {"a", "b", "impatient"}


async def test_one_bad_job_does_not_fail_the_others_of_its_commit(store: SqliteStore) -> None:
    timers = spread(40)
    timers[13] = changed(timers[13], execute_at=UNWRITABLE)
    batch = [timer("many1"), timer("many2", execute_at=UNWRITABLE), timer("many3")]
    answers = await asked_at_once(store, *(store.put(t) for t in timers), store.put_many(batch), store.ping())
    assert [n for n, answer in enumerate(answers) if answer is not None] == [13, 40]
    assert isinstance(answers[13], OverflowError)
    assert isinstance(answers[40], OverflowError)
    assert await everything(store) == {("default", t.id): t for t in timers if t is not timers[13]}
    assert (await store.tally())[Status.PENDING] == 39


async def test_a_bad_job_leaves_nothing_half_written(store: SqliteStore) -> None:
    await with_timers(store, *spread(3))

    def half(connection: apsw.Connection) -> None:
        connection.execute("DELETE FROM timers")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await on_the_writer(store, half)
    assert len(await everything(store)) == 3
    await store.put(timer("after"))
    assert (await store.tally())[Status.PENDING] == 4


async def test_a_reader_never_blocks_the_writer(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (await store.get("default", "more7")).id == "more7"
    assert not slow.done()
    leave.set()
    assert await slow == 10  # And it saw the same rows all along.


async def test_the_log_is_written_back_and_does_not_grow_for_ever(
    store: SqliteStore, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(sqlite_file, "CHECKPOINT_PAGES", 50)
    for round in range(30):
        await with_timers(store, *spread(50, prefix=f"{round}/"))
        # Commits do not wait for the copying, so on a slow disk the log may get far ahead of it.
        await on_the_writer(store, lambda _: None)
        if (copying := store._file._copying) is not None:
            await asyncio.wrap_future(copying)
    wal = tmp_path / "duetime.db-wal"
    assert wal.stat().st_size < 3 * 50 * 4096
    assert (tmp_path / "duetime.db").stat().st_size > 300_000


# A disk that fails.


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
        with pytest.raises(StoreFailed, match="can't be trusted"):
            await verb


async def assert_reopens_with(tmp_path: Path, clock: ManualClock, *there: Timer) -> None:
    again = await sqlite(tmp_path, clock)
    assert await everything(again) == {("default", t.id): t for t in there}
    assert (await again.tally())[Status.PENDING] == len(there)
    await again.close()


@pytest.mark.parametrize("error", [apsw.IOError, apsw.CorruptError, apsw.ReadOnlyError])
async def test_damage_ends_the_store_for_everyone(store: SqliteStore, tmp_path, clock, error: type[Exception]) -> None:
    await with_timers(store, first := timer("first"))

    def break_down(connection: apsw.Connection) -> None:
        raise error("the disk is on fire")

    jobs = [store.put(timer("a")), on_the_writer(store, break_down), store.put(timer("b")), store.renew(ALICE, 1)]
    answers = await asked_at_once(store, *jobs)
    assert [type(answer) for answer in answers] == [StoreFailed] * 4
    await assert_failed(store)
    await store.close()
    await assert_reopens_with(tmp_path, clock, first)


async def test_a_commit_that_fails_is_not_tried_again(store: SqliteStore, said: list, tmp_path, clock) -> None:
    def fail_at_commit(_cursor: apsw.Cursor, sql: str, bindings: object) -> bool:
        said.append((sql, bindings))
        if sql == "COMMIT":
            raise apsw.IOError("fsync said no")
        return True

    def arm(connection: apsw.Connection) -> None:
        connection.exec_trace = fail_at_commit

    await with_timers(store, first := timer("first"))
    with pytest.raises(StoreFailed):
        await on_the_writer(store, arm)
    said.clear()
    await assert_failed(store)
    assert said == []
    await store.close()
    await assert_reopens_with(tmp_path, clock, first)


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let every write beyond this size fail, as a broken disk would. Python ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_write_that_the_disk_really_refuses_ends_the_store(store: SqliteStore, tmp_path: Path, clock) -> None:
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


# A thread that trips.


def fail_at(statement: str, error: BaseException) -> Callable[[apsw.Connection], None]:
    """A job that has every later statement of this text fail on its connection, and itself."""

    def trip(_cursor: apsw.Cursor, sql: str, _bindings: object) -> bool:
        if sql == statement:
            raise error
        return True

    def arm(connection: apsw.Connection) -> None:
        connection.exec_trace = trip
        raise ZeroDivisionError

    return arm


@pytest.mark.parametrize("error", [apsw.BusyError("locked"), MemoryError(), RuntimeError("out of luck")])
async def test_a_rollback_that_fails_ends_the_store(store: SqliteStore, tmp_path, clock, error: Exception) -> None:
    await with_timers(store, first := timer("first"))
    jobs = [store.put(timer("a")), on_the_writer(store, fail_at("ROLLBACK", error)), store.put(timer("b"))]
    async with asyncio.timeout(30):
        answers = await asked_at_once(store, *jobs)
    assert [type(answer) for answer in answers] == [StoreFailed] * 3
    await assert_failed(store)
    await store.close()
    await assert_reopens_with(tmp_path, clock, first)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_what_is_no_ordinary_exception_ends_the_store(
    store: SqliteStore, tmp_path, clock, error: type[BaseException]
) -> None:
    await with_timers(store, first := timer("first"))

    def leave(_connection: apsw.Connection) -> None:
        raise error

    async with asyncio.timeout(30):
        answers = await asked_at_once(store, store.put(timer("a")), on_the_writer(store, leave), store.put(timer("b")))
    assert [type(answer) for answer in answers] == [StoreFailed] * 3
    await assert_failed(store)
    await store.close()
    await assert_reopens_with(tmp_path, clock, first)


async def test_a_job_that_has_no_memory_fails_alone(store: SqliteStore) -> None:
    def hungry(_connection: apsw.Connection) -> None:
        raise MemoryError

    answers = await asked_at_once(store, store.put(timer("a")), on_the_writer(store, hungry), store.put(timer("b")))
    assert [type(answer) for answer in answers] == [type(None), MemoryError, type(None)]


@pytest.mark.parametrize("where", ["copier", "writer"])
@pytest.mark.parametrize("error", [MemoryError(), apsw.IOError("disk"), SystemExit()], ids=lambda error: repr(error))
async def test_a_log_that_can_not_be_copied_ends_the_store(
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


def test_a_loop_that_is_closed_before_the_answer_comes(tmp_path: Path, clock: ManualClock) -> None:
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
    asyncio.run(store.close())  # The thread is still there to be closed, and lets go of the file.
    asyncio.run(assert_reopens_with(tmp_path, clock, first))


# Whether it works.


async def test_many_who_ask_whether_it_works_cost_one_write(store: SqliteStore, said: list) -> None:
    said.clear()
    for _ in range(50):
        await asyncio.gather(*(store.ping() for _ in range(20)))
    commits = len([sql for sql, _ in said if sql == "COMMIT"])
    assert 1 <= commits < 50  # one a second


async def test_a_write_that_was_refused_is_known_to_who_asks(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
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


async def test_who_asks_is_told_of_a_file_that_can_not_be_written(store: SqliteStore, tmp_path: Path) -> None:
    await on_the_writer(store, lambda c: c.set_busy_timeout(10))
    other = apsw.Connection(str(tmp_path / "duetime.db"))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked"):
        await store.ping()
    other.close()


async def test_lists_delay_nothing_else(store: SqliteStore) -> None:
    leave = threading.Event()
    lists = [asyncio.ensure_future(store._file.read_list(lambda _: leave.wait(60))) for _ in range(40)]
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await store.put(timer("a"))
        assert (await store.get("default", "a")).id == "a"
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
        lambda store: store.find(Query(namespace="default")),
        lambda store: store.page(Filter(), 10),
        lambda store: store.count(Filter(), 10),
        lambda store: store.forecast([START, START + 1], 10),
    ],
)
async def test_every_list_has_the_threads_for_lists(store: SqliteStore, ask: Callable[..., Awaitable[object]]) -> None:
    leave = threading.Event()
    others = [asyncio.ensure_future(store._file.read(lambda _: leave.wait(60))) for _ in range(sqlite_file.READERS)]
    async with asyncio.timeout(30):
        await ask(store)
    leave.set()
    await asyncio.gather(*others)


# A disk that is full.


def big(id: str = "big") -> Timer:
    return timer(id, definition=definition(Raw(b'"' + b"x" * 30_000 + b'"')))


async def with_no_room(store: SqliteStore) -> None:
    pages = await on_the_writer(store, lambda c: c.pragma("page_count"))
    await on_the_writer(store, lambda c: c.pragma("max_page_count", pages + 2))


async def test_a_full_disk_is_no_damage(store: SqliteStore) -> None:
    await with_timers(store, *(first := spread(20)), old := ended("old", Status.FAILED, at=START - 10))
    await with_no_room(store)
    before, tally = await everything(store), await store.tally()
    many = [big(f"b{n}") for n in range(5)]
    answers = await asked_at_once(store, *(store.put(t) for t in many), store.put_many(many))
    assert [type(answer) for answer in answers] == [StoreUnavailable] * 6
    assert "could not write" in str(answers[0])
    assert (await everything(store), await store.tally()) == (before, tally)
    # What needs no room goes on: firing, recording, forgetting, reading.
    held = await holding(store)
    begun = (await store.begin(ALICE, held, 3)).timers
    assert ids(begun) == ["t0"]
    assert await store.record(ALICE, [(t, completed(t)) for t in begun]) == [True]
    assert await store.purge(retention_ms=1, limit=10) == 1
    assert await store.get("default", old.id) is None
    # And so does the rest, once there is room.
    await on_the_writer(store, lambda c: c.pragma("max_page_count", 1_000_000))
    assert await store.put_many(many) == [None] * 5
    assert len(await everything(store)) == len(first) + 5


async def test_a_put_that_fits_is_not_refused_for_one_that_does_not(store: SqliteStore) -> None:
    await with_no_room(store)
    answers = await asked_at_once(store, store.put(timer("a")), store.put(big()), store.put(timer("b")))
    assert [type(answer) for answer in answers] == [type(None), StoreUnavailable, type(None)]
    assert {id for _, id in await everything(store)} == {"a", "b"}


async def test_a_file_that_is_locked_is_waited_for_once(store: SqliteStore, said: list, tmp_path: Path) -> None:
    await on_the_writer(store, lambda c: c.set_busy_timeout(10))
    said.clear()
    other = apsw.Connection(str(tmp_path / "duetime.db"))
    other.execute("BEGIN IMMEDIATE")
    answers = await asyncio.gather(*(store.put(t) for t in spread(20)), return_exceptions=True)
    other.close()
    assert [type(answer) for answer in answers] == [StoreUnavailable] * 20
    assert await everything(store) == {}
    assert len([sql for sql, _ in said if sql == "BEGIN IMMEDIATE"]) <= 3


async def test_the_log_starts_over_while_timers_keep_coming(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "CHECKPOINT_PAGES", 50)
    largest = 0
    for n in range(300):
        await store.put_many([timer(f"w{n}-{m}") for m in range(20)])
        largest = max(largest, (tmp_path / "duetime.db-wal").stat().st_size)
    written = (tmp_path / "duetime.db").stat().st_size
    assert written > 1_000_000, "the log was never copied into the file"
    assert largest < 300 * 20 * 2_500, "the log grew with all that was written"  # which is twice that
    assert sum((await store.tally()).values()) == 300 * 20
