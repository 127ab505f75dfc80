"""Slices of MySQL's history: upkeep that can't drop one reports it and continues later, and counts match rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import asyncmy
import pytest

from duetime.errors import StoreUnavailable
from duetime.model import DAY_MS, Status
from duetime.stores.mysql import slices
from duetime.stores.mysql.pool import Result, connect_arguments, run
from duetime.stores.mysql.store import MysqlStore
from tests.clocks import ManualClock
from tests.contract.stores import mysql
from tests.contract.timers import ALICE, completed, ended, holding, timer, with_timers
from tests.mysql import MysqlServer

MONTH_MS = 30 * DAY_MS


@pytest.fixture(params=["mariadb", "mysql9"])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    server: MysqlServer = request.getfixturevalue(request.param)
    yield (url := server.fresh())
    server.give_back(url)


@pytest.fixture
def store(runner: asyncio.Runner, database: str, clock: ManualClock) -> Iterator[MysqlStore]:
    store = runner.run(mysql(database, clock))
    runner.run(with_timers(store, ended("old", Status.COMPLETED), timer("live")))
    clock.advance(100 * DAY_MS)
    yield store
    runner.run(store.close())


async def test_drop_waits_only_briefly_for_a_reader(store: MysqlStore, database: str) -> None:
    # Later statements in the lock queue wait as long as it does.
    backup = await asyncmy.connect(**connect_arguments(database))
    try:
        await run(backup, ["START TRANSACTION", "SELECT COUNT(*) FROM history"])
        with pytest.raises(StoreUnavailable, match="Lock wait timeout"):
            await store.purge(retention_ms=MONTH_MS, limit=100)
    finally:
        backup.close()
    assert await store.purge(retention_ms=MONTH_MS, limit=100) == 1


async def test_interrupted_drop_is_completed(store: MysqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def killed_behind_the_drop(connection: Any, statements: Sequence[str]) -> Any:
        drops = [place for place, text in enumerate(statements) if "DROP PARTITION" in text]
        done = await run(connection, statements[: drops[0] + 1] if drops else statements)
        if drops:
            raise ConnectionResetError("cut")
        return done

    with monkeypatch.context() as patch:
        patch.setattr(slices, "run", killed_behind_the_drop)
        with pytest.raises(StoreUnavailable):
            await store.purge(retention_ms=MONTH_MS, limit=100)
    assert (await store.tally())[Status.COMPLETED] == 1
    assert await store.purge(retention_ms=MONTH_MS, limit=100) == 1
    assert await store.tally() == dict.fromkeys(Status, 0) | {Status.PENDING: 1}


async def test_slice_that_could_not_be_created_is_not_listed(store: MysqlStore, database: str) -> None:
    # Otherwise a count could be in a slice that no row can be in.
    backup = await asyncmy.connect(**connect_arguments(database))
    try:
        await run(backup, ["START TRANSACTION", "SELECT COUNT(*) FROM history"])
        with pytest.raises(StoreUnavailable, match="Lock wait timeout"):
            await store._make_slices()
        [listed] = await store._pool.read("SELECT COUNT(*) FROM slices WHERE ends_at > 0")
    finally:
        backup.close()
    assert listed[0][0] == 1


async def test_created_slice_that_is_not_listed_yet_is_listed_when_needed(
    store: MysqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed_behind_the_alter(connection: Any, statements: Sequence[str]) -> Any:
        alters = [place for place, text in enumerate(statements) if "ADD PARTITION" in text]
        done = await run(connection, statements[: alters[0] + 1] if alters else statements)
        if alters:
            raise ConnectionResetError("cut")
        return done

    with monkeypatch.context() as patch:
        patch.setattr(slices, "run", killed_behind_the_alter)
        with pytest.raises(StoreUnavailable):
            await store._make_slices()
    [begun] = (await store.begin(ALICE, await holding(store), 10)).timers
    assert await store.record(ALICE, [(begun, completed(begun))]) == [True]
    [rows] = await store._pool.read(
        "SELECT SUM(timers) FROM tallies WHERE slice = (SELECT MIN(starts_at) FROM slices WHERE starts_at > 1)"
    )
    assert rows[0][0] == 1


async def test_upkeep_can_be_cancelled(store: MysqlStore, database: str) -> None:
    backup = await asyncmy.connect(**connect_arguments(database))
    waits = "SELECT COUNT(*) FROM information_schema.processlist WHERE state = 'Waiting for table metadata lock'"
    try:
        await run(backup, ["START TRANSACTION", "SELECT COUNT(*) FROM history"])
        purge = asyncio.create_task(store.purge(retention_ms=MONTH_MS, limit=100))
        while not (await run(backup, [waits]))[0].rows[0][0]:
            assert not purge.done()
        purge.cancel()
        with pytest.raises(asyncio.CancelledError):
            await purge
    finally:
        backup.close()


async def test_upkeep_times_out(store: MysqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: object) -> int:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    monkeypatch.setattr("duetime.stores.mysql.store.UPKEEP_SECONDS_MAX", 0.1)
    monkeypatch.setattr("duetime.stores.mysql.store.drop_slices", silent)
    with pytest.raises(StoreUnavailable, match="did not finish"):
        await store.purge(retention_ms=MONTH_MS, limit=100)


async def test_row_lies_in_the_slice_that_counts_it(store: MysqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await store.purge(retention_ms=1_000 * DAY_MS, limit=0)  # creates the slices of today and tomorrow
    [[(edge,)]] = await store._pool.read("SELECT MAX(starts_at) FROM slices")
    [begun] = (await store.begin(ALICE, await holding(store), 10)).timers
    # A clock that passes the end of a slice between two reads of it.
    monkeypatch.setattr(MysqlStore, "_now", f"(@tick := COALESCE(@tick, {edge - 2}) + 1)")
    assert await store.record(ALICE, [(begun, completed(begun))]) == [True]
    [rows] = await store._pool.read(
        "SELECT starts_at, (SELECT COUNT(*) FROM history WHERE starts_at <= ended_at AND ended_at < ends_at), "
        "(SELECT COALESCE(SUM(timers), 0) FROM tallies WHERE slice = starts_at) FROM slices"
    )
    assert sorted(lying for _, lying, _ in rows) == [0, 2]
    assert all(lying == counted for _, lying, counted in rows)


async def test_record_that_wrote_nothing_can_be_repeated(store: MysqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    [begun] = (await store.begin(ALICE, await holding(store), 10)).timers

    async def changed_meanwhile(*_: object, **__: object) -> list[Result]:
        return [Result(0, [(0,)])]

    with monkeypatch.context() as patch:
        patch.setattr(store, "_write", changed_meanwhile)
        with pytest.raises(StoreUnavailable, match="nothing was recorded"):
            await store.record(ALICE, [(begun, completed(begun))])
    assert await store.record(ALICE, [(begun, completed(begun))]) == [True]
