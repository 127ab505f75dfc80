"""How SQLite runs the store's statements: the hot ones use their indexes, and none scans the table of timers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from duetime import lifecycle
from duetime.instants import Instant
from duetime.model import Status, Timer
from duetime.store import Filter, Portion
from duetime.stores.sqlite import file as sqlite_file
from duetime.stores.sqlite.store import SqliteStore
from tests.clocks import START, ManualClock
from tests.contract.stores import sqlite
from tests.contract.timers import (
    ALICE,
    BOB,
    completed,
    ended,
    existing,
    holding,
    spread,
    timer,
    touched,
    with_namespace,
    with_timers,
)

_connect = sqlite_file._connect


class Plans:
    """The plans of the statements about timers since ``clear``."""

    def __init__(self) -> None:
        self._said: list[tuple[str, Any]] = []

    def listen(self, _cursor: apsw.Cursor, sql: str, bindings: Any) -> bool:
        self._said.append((sql, bindings))
        return True

    def clear(self) -> None:
        self._said.clear()

    def read(self, path: Path) -> list[tuple[str, list[str]]]:
        """Each statement and the steps of its plan."""
        connection = _connect(path, apsw.SQLITE_OPEN_READWRITE)
        plans = []
        for sql, bindings in self._said:
            text = " ".join(sql.split())
            if " timers " in text and "tallies" not in text:
                steps = connection.execute(f"EXPLAIN QUERY PLAN {sql}", bindings or ()).fetchall()
                plans.append((text, [str(step[3]) for step in steps]))
        connection.close()
        return plans


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    plans = Plans()

    def traced(*arguments: Any) -> apsw.Connection:
        connection = _connect(*arguments)
        connection.exec_trace = plans.listen
        return connection

    monkeypatch.setattr(sqlite_file, "_connect", traced)
    return plans


@pytest.fixture
def store(plans: Plans, runner: asyncio.Runner, tmp_path: Path, clock: ManualClock) -> Iterator[SqliteStore]:
    async def filled() -> SqliteStore:
        store = await sqlite(tmp_path, clock)
        await with_namespace(store, "paused", paused=True)
        await with_timers(store, *spread(100, at=START - 50), timer("p", namespace="paused"))
        await with_timers(store, *(ended(f"e{n}", Status.COMPLETED, at=START - n) for n in range(50)))
        plans.clear()
        return store

    store = runner.run(filled())
    yield store
    runner.run(store.close())


Used = Callable[..., set[str]]


@pytest.fixture
def used(plans: Plans, tmp_path: Path) -> Used:
    """Return the indexes that the statements used to search timers; fail if one scanned the table."""

    def used(*, grouped: bool = False) -> set[str]:
        """``grouped``: a statement may sort the few rows that it found in order to group them."""
        searched = set()
        found = plans.read(tmp_path / "duetime.db")
        assert found, "no statement was recorded"
        for sql, steps in found:
            for step in steps:
                assert not step.startswith("SCAN timers"), f"{step}: {sql}"
                assert "AUTOMATIC" not in step, f"{step}: {sql}"
                assert "TEMP B-TREE" not in step or (grouped and "GROUP BY" in step), f"{step}: {sql}"
                if step.startswith("SEARCH timers"):
                    searched.add(step.removeprefix("SEARCH timers USING ").removeprefix("COVERING "))
        plans.clear()
        return searched

    return used


DUE, LOST = "INDEX timers_due (fire_at<?)", "INDEX timers_executing (deadline_at<?)"
LANE_DUE, LANE_NEXT = (f"INDEX timers_lane (lane=? AND fire_at{way}?)" for way in "<>")
LANE_FIRST, LANES_BEHIND = "INDEX timers_lane (lane=?)", "INDEX timers_lane (lane>?)"
DUE_NEXT, LOST_NEXT = "INDEX timers_due (fire_at>?)", "INDEX timers_executing (deadline_at>?)"
BY_UUID = "INDEX timers_uuid (uuid=?)"
BY_AGE = "INDEX timers_final (namespace=? AND status=? AND updated_at<?)"
BY_SEQ = "INTEGER PRIMARY KEY (rowid=?)"


@pytest.mark.parametrize("shards", [range(8), [3]], ids=["every shard", "one shard"])
async def test_begin_uses_indexes(store: SqliteStore, plans: Plans, used: Used, shards: Collection[int]) -> None:
    held = await holding(store, ALICE, *shards)
    plans.clear()
    assert len((await store.begin(ALICE, held, 5)).timers) == 5
    assert used() == {DUE, LOST, BY_SEQ}
    await store.begin(ALICE, held, 1000)
    plans.clear()
    # Nothing is due any more: it reads one entry of each index to find when to poll again.
    assert (await store.begin(ALICE, held, 1000)).timers == []
    assert used() == {DUE, LOST, DUE_NEXT, LOST_NEXT}


@pytest.mark.parametrize("shards", [range(8), [3]], ids=["every shard", "one shard"])
async def test_begin_by_lane_uses_indexes(
    store: SqliteStore, plans: Plans, used: Used, shards: Collection[int]
) -> None:
    held = await holding(store, ALICE, *shards)
    plans.clear()
    portions = [Portion(timer().lane, 5), Portion(timer(namespace="paused").lane, 5)]
    assert len((await store.begin_lanes(ALICE, held, 5, portions)).timers) == 5
    assert used() == {LANE_DUE, LANE_NEXT, LANE_FIRST, LOST, BY_SEQ}


async def test_lanes_use_indexes(store: SqliteStore, plans: Plans, used: Used) -> None:
    assert len((await store.lanes(START, due_max=10)).lanes) == 1
    assert used(grouped=True) == {LANES_BEHIND, LANE_DUE, DUE, LOST, BY_SEQ}


@pytest.mark.parametrize("shards", [range(8), [3]], ids=["every shard", "one shard"])
async def test_overdue_uses_indexes(store: SqliteStore, plans: Plans, used: Used, shards: Collection[int]) -> None:
    assert {lane.paused for lane in await store.overdue(shards, START + 1, 10)} == {False} | {0 in shards}
    assert used() == {LANES_BEHIND, LANE_DUE, BY_SEQ}


async def test_takeover_uses_indexes(store: SqliteStore, plans: Plans, used: Used, clock: ManualClock) -> None:
    await store.begin(ALICE, await holding(store, ALICE), 8)
    clock.advance(10**6)
    held = await holding(store, BOB)
    plans.clear()
    assert len((await store.begin(BOB, held, 8)).timers) == 8
    assert used() == {DUE, LOST, BY_SEQ}


async def test_record_uses_one_index(store: SqliteStore, plans: Plans, used: Used) -> None:
    begun = (await store.begin(ALICE, await holding(store), 9)).timers
    await store.swap(begun[2], None)
    plans.clear()
    changes = [(t, completed(t)) for t in begun]
    assert await store.record(ALICE, changes) == [t is not begun[2] for t in begun]
    assert used() == {BY_UUID}


@pytest.mark.parametrize("number", [1, 4, 16, 64, 128, 256, 300])
@pytest.mark.parametrize("after", [completed, touched], ids=["final", "live"])
async def test_record_of_any_size_uses_indexes(
    store: SqliteStore, plans: Plans, used: Used, number: int, after: Callable[[Timer], Timer]
) -> None:
    await with_timers(store, *spread(number, at=START - 10**6, prefix="more"))
    begun = (await store.begin(ALICE, await holding(store), number)).timers
    plans.clear()
    assert await store.record(ALICE, [(t, after(t)) for t in begun]) == [True] * number
    assert used() == {BY_UUID}


async def test_get_uses_one_index(store: SqliteStore, used: Used) -> None:
    assert (await existing(store, "t7")).id == "t7"
    assert used() == {BY_UUID}


async def test_put_uses_indexes_only_for_existing_ids(store: SqliteStore, used: Used) -> None:
    assert await store.put(timer("new")) is None
    assert used() == set()
    assert await store.put(timer("t7")) is not None
    assert used() == {BY_UUID, BY_SEQ}


async def test_swap_uses_one_index(store: SqliteStore, plans: Plans, used: Used) -> None:
    before = await existing(store, "t7")
    plans.clear()
    assert await store.swap(before, after := lifecycle.cancel(before, now=START))
    assert await store.swap(after, None)
    assert used() == {BY_UUID}


async def test_purge_uses_indexes(store: SqliteStore, used: Used, clock: ManualClock) -> None:
    assert await store.purge(retention_ms=20, limit=10) == 10
    assert used() == {BY_AGE, BY_SEQ}


async def test_tally_does_not_read_the_timers(store: SqliteStore, plans: Plans, tmp_path: Path) -> None:
    assert (await store.tally())[Status.COMPLETED] == 50
    assert plans.read(tmp_path / "duetime.db") == []  # The table of timers is not read at all.


async def test_open_does_not_scan_the_timers(
    store: SqliteStore, plans: Plans, used: Used, tmp_path: Path, clock: ManualClock
) -> None:
    await store.begin(ALICE, await holding(store), 8)
    await store.close()
    plans.clear()
    again = await sqlite(tmp_path, clock)
    found = plans.read(tmp_path / "duetime.db")
    await again.close()
    for sql, steps in found:
        for step in steps:
            assert not step.startswith("SCAN timers") or "INDEX timers_executing" in step, f"{step}: {sql}"


async def test_forecast_reads_one_index_and_no_timer(store: SqliteStore, plans: Plans, tmp_path: Path) -> None:
    assert sum(await store.forecast([START + ahead_ms for ahead_ms in range(-60, 60, 10)], 5)) == 50
    [(_, steps)] = plans.read(tmp_path / "duetime.db")
    walks = [step for step in steps if "timers" in step]
    assert walks == ["SEARCH timers USING COVERING INDEX timers_due (fire_at>? AND fire_at<?)"]


PAGES = pytest.mark.parametrize(
    ("filter", "index"),
    [
        (Filter(), "INTEGER PRIMARY KEY (rowid<?)"),
        (Filter(namespace="default"), "INDEX timers_namespace (namespace=? AND rowid<?)"),
        (Filter(status=Status.PENDING), DUE_NEXT),
        (Filter(status=Status.PENDING, namespace="default"), DUE_NEXT),
        (Filter(status=Status.EXECUTING), LOST_NEXT),
        *((Filter(status=each), f"INDEX timers_{each} (updated_at<?)") for each in Status if each.final),
        (Filter(status=Status.FAILED, namespace="default"), BY_AGE),
        (Filter(correlation_id="a"), "INDEX timers_correlation_id (correlation_id=? AND rowid<?)"),
        (
            Filter(correlation_id="a", namespace="default"),
            "INDEX timers_correlation_id (correlation_id=? AND rowid<?)",
        ),
        (
            Filter(execute_after=Instant(1), execute_before=Instant(9)),
            "INDEX timers_execute_at (execute_at>? AND execute_at<?)",
        ),
    ],
    ids=str,
)


@PAGES
async def test_page_is_an_index_scan_without_sorting(
    store: SqliteStore, used: Used, filter: Filter, index: str
) -> None:
    await store.page(filter, 10)
    # The found timers, if any, are read by their rowid.
    assert {index} <= used() <= {index, BY_SEQ}


@PAGES
async def test_count_is_the_same_index_scan(
    store: SqliteStore, plans: Plans, tmp_path: Path, filter: Filter, index: str
) -> None:
    await store.count(filter, 10)
    for _, steps in plans.read(tmp_path / "duetime.db"):
        [walked] = [step for step in steps if "timers" in step]
        name = index.split(" (")[0].removeprefix("INTEGER PRIMARY KEY")
        # A page continues after a cursor but a count starts at the beginning, so its plan names the whole index.
        assert name in walked and "TEMP B-TREE" not in " ".join(steps), (walked, steps)


async def test_id_is_looked_up_in_each_namespace(store: SqliteStore, plans: Plans, tmp_path: Path) -> None:
    filter = Filter(id="t7", correlation_id="a", execute_after=Instant(1), status=Status.PENDING)
    await store.page(filter, 10)
    await store.count(filter, 10)
    found = plans.read(tmp_path / "duetime.db")
    assert len(found) == 2
    for _, steps in found:
        assert [step for step in steps if "timers" in step] == ["SEARCH timers USING INDEX timers_uuid (uuid=?)"]
