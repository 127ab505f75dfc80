"""The cost of lanes: timers of other lanes and of paused namespaces cost nothing, however many they are.

SQLite counts the steps of its virtual machine, PostgreSQL the rows and pages that each plan node reads. The plans are
the generic plans of the store's sessions, with and without table statistics.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duetime.model import Definition, HttpTarget, Status, Timer
from duetime.store import Filter, Portion, Store
from duetime.stores.postgres import statements as sql
from duetime.stores.postgres.store import PostgresStore
from duetime.stores.sqlite import file as sqlite_file
from tests.clocks import START, ManualClock
from tests.contract.stores import Opened, sqlite
from tests.contract.timers import ALICE, BOB, ended, holding, ids, timer, with_namespace, with_timers

pytestmark = pytest.mark.alone

BACKLOG = 20_000
PORTIONS = 64
"""How many lanes an engine requests at once."""


def of_lane(number: int, id: str, **changes: Any) -> Timer:
    target = HttpTarget(url=f"https://lane-{number}.example/due")
    return timer(id, **{"definition": Definition(target=target)} | changes)


def lane(number: int) -> int:
    return of_lane(number, "").lane


BUSY, MINE = 0, 1


async def put_backlog(store: Store) -> None:
    """Insert many due timers in a lane that is not requested and in a paused namespace, and as many later ones."""
    await with_namespace(store, "paused", paused=True)
    for first in range(0, BACKLOG, 1000):
        numbers = range(first, first + 1000)
        for namespace in ("default", "paused"):
            await with_timers(
                store,
                *(of_lane(BUSY, f"due {n}", at=START - BACKLOG + n, shard=n % 8, namespace=namespace) for n in numbers),
                *(of_lane(BUSY, f"later {n}", at=START + 5 + n, shard=n % 8, namespace=namespace) for n in numbers),
            )


async def put_lanes(store: Store, lanes: range, timers: int) -> None:
    """Insert this many due timers in each of these lanes."""
    for number in lanes:
        await with_timers(store, *(of_lane(number, f"{number}/{n}", at=START - n, shard=n % 8) for n in range(timers)))


MINE_ONLY = [Portion(lane(MINE), 16)]
EACH_LANE = [Portion(lane(number), 16) for number in range(1, PORTIONS + 1)]


async def test_backlog_does_not_hide_other_lanes(store: Store) -> None:
    await put_backlog(store)
    await with_timers(store, of_lane(MINE, "mine", at=START - 1), of_lane(MINE, "next", at=START + 1))
    held = await holding(store)
    begun = await store.begin_lanes(ALICE, held, 500, MINE_ONLY)
    assert (ids(begun.timers), begun.next_at) == (["mine"], START + 1)
    found = await store.lanes(START, due_max=500)
    assert ({each.lane for each in found.lanes}, found.due) == ({lane(BUSY)}, 500)


# SQLite.


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """The number of steps of SQLite since the last call, in tens."""
    count = 0
    connect = sqlite_file._connect

    def step() -> bool:
        nonlocal count
        count += 1
        return False

    def counted(*arguments: Any) -> Any:
        connection = connect(*arguments)
        connection.set_progress_handler(step, 10)
        return connection

    def since() -> int:
        nonlocal count
        taken, count = count, 0
        return taken

    monkeypatch.setattr(sqlite_file, "_connect", counted)
    yield since


async def test_sqlite_skips_a_backlog_at_no_cost(tmp_path: Path, clock: ManualClock, steps: Callable[[], int]) -> None:
    store = await sqlite(tmp_path, clock)
    held = await holding(store)

    async def costs() -> list[int]:
        taken = []
        for ask in (
            lambda: store.begin_lanes(ALICE, held, 500, MINE_ONLY),
            lambda: store.begin_lanes(ALICE, held, 500, EACH_LANE),
            lambda: store.lanes(START, due_max=9),
        ):
            steps()
            await ask()
            taken.append(steps())
        return taken

    await with_namespace(store, "also paused", paused=True)  # so that the pauses are checked, before and after
    await with_timers(store, of_lane(BUSY, "busy", at=START + 10**6), of_lane(MINE, "mine", at=START + 10**6))
    await costs()
    idle = await costs()
    await put_backlog(store)
    met = await costs()
    assert max(after - before for before, after in zip(idle, met, strict=True)) < 30, (idle, met)
    await store.close()


async def test_sqlite_cost_is_proportional_to_the_number_of_lanes(
    tmp_path: Path, clock: ManualClock, steps: Callable[[], int]
) -> None:
    store = await sqlite(tmp_path, clock)

    async def cost(listed: int) -> int:
        steps()
        assert len((await store.lanes(START, due_max=9)).lanes) == listed
        return steps()

    await put_lanes(store, range(1, 51), 2)
    few = await cost(50)
    await put_lanes(store, range(51, 101), 2)
    more_lanes = await cost(100)
    assert 1.5 * few < more_lanes < 2.5 * few
    for first in range(0, 100, 10):
        await with_timers(store, *(of_lane(n % 100 + 1, f"more {n}") for n in range(first * 100, first * 100 + 1000)))
    more_timers = await cost(100)
    assert more_timers < 1.1 * more_lanes
    steps()
    assert sum(each.timers for each in await store.overdue(range(8), START + 1, 3)) == 300
    assert steps() < 3 * more_timers
    await store.close()


# PostgreSQL.

Plan = dict[str, Any]


@asynccontextmanager
async def session(store: PostgresStore) -> AsyncIterator[Any]:
    """One of the store's connections, closed if the test fails."""
    async with store._pool.connection() as connection:
        try:
            yield connection
        except BaseException:
            connection.terminate()
            raise


async def explained(connection: Any, statement: str, *arguments: object) -> Plan:
    """Run the statement with its generic plan and roll back."""
    await connection.execute(f"PREPARE it AS {statement}")
    try:
        async with connection.transaction():
            [(text,)] = await connection.fetch(
                f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE it ({', '.join(map(literal, arguments))})"
            )
            raise _TakeBack
    except _TakeBack:
        [found] = msgspec.json.decode(text)
        plan: Plan = found["Plan"]
        return plan
    finally:
        await connection.execute("DEALLOCATE it")


class _TakeBack(Exception):
    pass


def literal(value: object) -> str:
    match value:
        case bytes():
            return f"'\\x{value.hex()}'"
        case list():
            return f"ARRAY[{', '.join(map(literal, value))}]"
        case str():
            return f"'{value}'"
        case None:
            return "NULL"
    return str(value)


def nodes(plan: Plan) -> Iterator[Plan]:
    yield plan
    for below in plan.get("Plans", ()):
        yield from nodes(below)


def rows_met(node: Plan) -> float:
    """The number of rows that a plan node processed, in all its loops."""
    removed: float = sum(number for name, number in node.items() if name.startswith("Rows Removed"))
    rows: float = (node["Actual Rows"] + removed) * node["Actual Loops"]
    return rows


def timers_read(plan: Plan) -> float:
    return sum(rows_met(node) for node in nodes(plan) if node.get("Relation Name") == "timers")


def pages_read(plan: Plan) -> int:
    """The number of pages read, of tables, indexes and written data."""
    pages: int = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    return pages


def assert_no_part_runs_over_and_over(plan: Plan) -> None:
    """A plan node that runs for each row of another processes many times the number of rows in the table."""
    assert sum(map(rows_met, nodes(plan))) < 20 * timers_read(plan) + 2_000
    worst = max(nodes(plan), key=rows_met)
    assert rows_met(worst) <= 2 * timers_read(plan) + 500, worst["Node Type"]


class Statements:
    """The store's statements about lanes, with realistic arguments."""

    def __init__(self, store: PostgresStore, held: dict[int, int], clock: ManualClock) -> None:
        self._look = ALICE, [held[shard] for shard in range(store.shards)], 500, clock.now(), False, ["nobody"]
        self._now = clock.now()

    def begin(self, lane_max: int | None = None) -> tuple[Any, ...]:
        return sql.BEGIN, *self._look, lane_max, "{}"

    def begin_lanes(self, portions: list[Portion]) -> tuple[Any, ...]:
        columns = ([getattr(portion, name) for portion in portions] for name in ("lane", "most", "share"))
        return sql.BEGIN_LANES, *self._look, *columns

    def lanes(self, due_max: int) -> tuple[Any, ...]:
        return sql.LANES, self._now, self._now, -1, 20_000, due_max, False

    def overdue(self, most: int) -> tuple[Any, ...]:
        return sql.OVERDUE, list(range(8)), self._now, most


@pytest.mark.parametrize("skewed", [True, False], ids=["nearly all in one lane", "in many lanes"])
async def test_postgres_skips_a_backlog_at_no_cost(
    opened: Opened, database: str, clock: ManualClock, skewed: bool
) -> None:
    store = await opened(database)
    await put_backlog(store)
    if not skewed:
        await put_lanes(store, range(2, 202), 20)
    await with_timers(store, of_lane(MINE, "mine", at=START - 1), of_lane(MINE, "next", at=START + 1))
    statements = Statements(store, await holding(store), clock)
    lanes = 3 if skewed else 203
    async with session(store) as connection:
        for _ in ("before ANALYZE", "after ANALYZE"):
            begun = await explained(connection, *statements.begin_lanes(MINE_ONLY))
            assert 0 < timers_read(begun) < 10
            assert pages_read(begun) < 100
            found = await explained(connection, *statements.lanes(due_max=0))
            assert lanes <= timers_read(found) < 4 * lanes + 10
            assert pages_read(found) < 15 * lanes + 100
            overdue = await explained(connection, *statements.overdue(most=5))
            assert timers_read(overdue) < 10 * lanes + 10
            assert pages_read(overdue) < 30 * lanes + 100
            await connection.execute("ANALYZE")


async def test_postgres_plan_does_not_join_each_lane_with_all_timers(
    opened: Opened, database: str, clock: ManualClock
) -> None:
    store = await opened(database)
    await put_lanes(store, range(PORTIONS + 1), 40)
    statements = Statements(store, await holding(store), clock)
    scarce = [Portion(portion.lane, 40, 1 + number % 3) for number, portion in enumerate(EACH_LANE)]
    async with session(store) as connection:
        for _ in ("before ANALYZE", "after ANALYZE"):
            for statement in (
                statements.begin(),
                statements.begin(lane_max=16),
                statements.begin_lanes(EACH_LANE),
                statements.begin_lanes(scarce),
                statements.begin_lanes(EACH_LANE[:8]),
                statements.lanes(due_max=1_000),
                statements.overdue(most=1_000),
            ):
                assert_no_part_runs_over_and_over(await explained(connection, *statement))
            await connection.execute("ANALYZE")


OTHERS = 3_000


@pytest.mark.parametrize("skewed", [True, False], ids=["in one shard", "in all of the others"])
async def test_postgres_does_not_read_timers_of_other_owners(
    opened: Opened, database: str, clock: ManualClock, skewed: bool
) -> None:
    """The due and the later ones of these timers in the requested lane."""
    store = await opened(database)
    mine = await holding(store, ALICE, 6, 7)
    await holding(store, BOB, *range(6))
    await with_timers(store, of_lane(MINE, "due", at=START - 1, shard=6), of_lane(MINE, "next", at=START + 9, shard=7))
    held = {shard: mine.get(shard, -1) for shard in range(8)}
    statements = Statements(store, held, clock)
    alone = []
    async with session(store) as connection:
        for statement in (statements.begin(lane_max=16), statements.begin_lanes(MINE_ONLY)):
            alone.append(await explained(connection, *statement))
    for first in range(0, OTHERS, 1000):
        numbers = range(first, first + 1000)
        shards = [0 if skewed else n % 6 for n in numbers]
        for word, at in (("due", START - OTHERS), ("later", START + 1)):
            timers = (
                of_lane(MINE, f"{word} {n}", at=at, shard=shard) for n, shard in zip(numbers, shards, strict=True)
            )
            await with_timers(store, *timers)
    async with session(store) as connection:
        for _ in ("before ANALYZE", "after ANALYZE"):
            by_age = await explained(connection, *statements.begin(lane_max=16))
            assert timers_read(by_age) == timers_read(alone[0]) and pages_read(by_age) < pages_read(alone[0]) + 50
            by_lane = await explained(connection, *statements.begin_lanes(MINE_ONLY))
            assert timers_read(by_lane) < timers_read(alone[1]) + OTHERS // 3
            await connection.execute("ANALYZE")
    begun = await store.begin_lanes(ALICE, mine, 500, MINE_ONLY)
    assert ids(begun.timers) == ["due"] and begun.next_at is not None and START < begun.next_at <= START + 9


async def test_postgres_reads_an_evenly_shared_lane_once(opened: Opened, database: str, clock: ManualClock) -> None:
    """The begin reads its own timers from the lane's index, and does not query each of its shards."""
    store = await opened(database)
    mine = await holding(store, ALICE, 6, 7)
    await holding(store, BOB, *range(6))
    await with_timers(store, *(of_lane(MINE, f"t{n}", at=START - 2_000 + n, shard=n % 8) for n in range(2_000)))
    statements = Statements(store, {shard: mine.get(shard, -1) for shard in range(8)}, clock)
    async with session(store) as connection:
        for _ in ("before ANALYZE", "after ANALYZE"):
            begun = await explained(connection, *statements.begin_lanes([Portion(lane(MINE), 50)]))
            assert 50 * 4 < timers_read(begun) < 50 * 8
            await connection.execute("ANALYZE")


@pytest.mark.parametrize("by_lane", [False, True], ids=["by age", "by lane"])
async def test_own_timers_behind_those_of_other_owners_are_begun(store: Store, by_lane: bool) -> None:
    mine = await holding(store, ALICE, 6, 7)
    await holding(store, BOB, *range(6))
    await with_timers(store, *(of_lane(MINE, f"theirs {n}", at=START - 9, shard=n % 6) for n in range(1_200)))
    await with_timers(store, *(of_lane(MINE, f"mine {n}", at=START - 5 + n, shard=6 + n % 2) for n in range(8)))
    if by_lane:
        first, rest = [await store.begin_lanes(ALICE, mine, 3, MINE_ONLY) for _ in range(2)]
        assert first.lanes == {lane(MINE): START - 2}
        begun = first.timers + rest.timers
    else:
        first, rest = await store.begin(ALICE, mine, 3), await store.begin(ALICE, mine, 30)
        begun = first.timers + rest.timers
        assert first.more and not rest.more and rest.next_at == START + 1
    assert ids(begun) == [f"mine {n}" for n in range(6)]


# Namespaces.

NAMESPACES = 300


async def test_sqlite_cost_does_not_depend_on_unrelated_namespaces(
    tmp_path: Path, clock: ManualClock, steps: Callable[[], int]
) -> None:
    store = await sqlite(tmp_path, clock)
    held = await holding(store)
    await with_timers(store, *(ended(f"t{n}", Status.FAILED, at=START - n) for n in range(50)))

    async def costs() -> list[int]:
        taken = []
        for ask in (
            lambda: store.page(Filter(status=Status.FAILED), 10),
            lambda: store.page(Filter(), 10),
            lambda: store.page(Filter(status=Status.COMPLETED), 10),
            lambda: store.begin(ALICE, held, 10),
            lambda: store.begin_lanes(ALICE, held, 10, MINE_ONLY),
            lambda: store.purge(retention_ms=10**6, limit=10),
            lambda: store.namespaces(),
        ):
            steps()
            await ask()
            taken.append(steps())
        return taken

    await costs()
    few = await costs()
    for n in range(NAMESPACES):
        await with_namespace(store, f"n{n}")
    await store.namespaces()
    many = await costs()
    assert max(after - before for before, after in zip(few, many, strict=True)) < 30, (few, many)
    await store.close()


async def test_postgres_reads_namespaces_only_after_a_change(
    opened: Opened, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened(database)
    for n in range(50):
        await with_namespace(store, f"n{n}")
    assert len(await store.namespaces()) == 51
    read = store._pool.read
    answers = []

    async def listen(statement: str, *arguments: object) -> Any:
        answers.append(await read(statement, *arguments))
        return answers[-1]

    monkeypatch.setattr(store._pool, "read", listen)
    assert len(await store.namespaces()) == 51
    assert sum(map(len, answers)) == 1
    await with_namespace(store, "new")
    assert len(await store.namespaces()) == 52
