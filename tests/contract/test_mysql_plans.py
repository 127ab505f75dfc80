"""How MySQL runs the store's statements: each reads few rows, whatever else is in the tables.

The server counts the rows that a statement reads, in the session's ``Handler_read_%``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from duetime.model import HOUR_MS, Status
from duetime.store import Portion, Sort
from duetime.stores.mysql import pool as mysql_pool
from duetime.stores.mysql.pool import Result
from duetime.stores.mysql.store import MysqlStore
from duetime.stores.sql.columns import FINAL
from tests.clocks import START, ManualClock
from tests.contract.questions import OFFSET_PAGES, verbs
from tests.contract.stores import mysql
from tests.contract.timers import (
    ALICE,
    BOB,
    LEASE_MS,
    changed,
    ended,
    holding,
    spread,
    timer,
    with_namespace,
    with_timers,
)
from tests.mysql import MysqlServer

CROWD = 20_000
"""The number of unrelated live timers, and of final ones: all are later than the requested ones and of another
namespace, lane and destination."""
READ_MAX = CROWD // 10
"""More than a poll reads at once."""
DUE_PER_SHARD, BEGUN = 300, 100
BEGIN_OF_SEVEN = "begin of seven of eight shards"

_run = mysql_pool.run


class Reads:
    """Counts the rows that the store's packets read."""

    def __init__(self) -> None:
        self.rows = 0

    async def run(self, connection: Any, statements: Sequence[str], results: list[Result] | None = None) -> Any:
        await _run(connection, ["FLUSH STATUS"])
        answers = await _run(connection, statements, results)
        [counts] = await _run(connection, ["SHOW SESSION STATUS LIKE 'Handler_read_%'"])
        self.rows += sum(int(count) for _, count in counts.rows)
        return answers


async def with_a_crowd(store: MysqlStore) -> None:
    await with_namespace(store, "crowd")
    await with_namespace(store, "paused", paused=True)
    far = [changed(t, namespace="crowd", correlation_id="c") for t in spread(CROWD, at=START + HOUR_MS, prefix="crowd")]
    for first in range(0, CROWD, 1_000):
        await with_timers(store, *far[first : first + 1_000])
    columns = ", ".join(name for name in FINAL if name not in ("uuid", "status"))
    for part, status in enumerate(("completed", "failed", "canceled")):
        await store._pool.write(
            f"INSERT INTO history (seq, ended_at, uuid, status, {columns}) "
            f"SELECT seq, {START}, REVERSE(uuid), '{status}', {columns} FROM timers WHERE seq % 3 = {part}"
        )
    await store._pool.execute("ANALYZE TABLE timers, history")
    await with_timers(store, *spread(400, at=START - 400), timer("p", namespace="paused"))
    for status in (Status.COMPLETED, Status.FAILED, Status.CANCELED):
        await with_timers(store, *(ended(f"{status}{n}", status, at=START - 90 + n) for n in range(30)))


async def read(url: str) -> dict[str, int]:
    """The number of rows that each store method reads."""
    store = await mysql(url, ManualClock())
    reads, rows = Reads(), dict[str, int]()
    try:
        await with_a_crowd(store)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mysql_pool, "run", reads.run)

            async def counted(calls: dict[str, Callable[[], Awaitable[object]]]) -> None:
                for name, call in calls.items():
                    reads.rows = 0
                    await call()
                    rows[name] = reads.rows

            calls = await verbs(store)
            for name, query in OFFSET_PAGES.items():
                if query.sort is Sort.EXECUTE_AT:
                    # Its index orders all namespaces by time, so the rows before the page are read, too.
                    calls[name] = partial(store.page_by_offset, msgspec.structs.replace(query, namespace="crowd"))
            await counted(calls)
            await counted(
                {
                    "put of an existing id": lambda: store.put(timer("t7")),
                    "put of the id of a final timer": lambda: store.put(timer("failed7")),
                    "tally": store.tally,
                }
            )
            held = await holding(store, ALICE)
            while (await store.begin(ALICE, held, 1_000)).timers:
                pass
            await counted({"begin of nothing": lambda: store.begin(ALICE, held, 5)})
            await store.leave(ALICE)
            one = await store.claim(BOB, [3], LEASE_MS)
            await with_timers(store, *spread(CROWD // 20, at=START - 50, prefix="more"))
            portions = [Portion(timer().lane, 5)]
            await counted(
                {
                    "begin of a shard": lambda: store.begin(BOB, one, 5),
                    "begin by lane of a shard": lambda: store.begin_lanes(BOB, one, 5, portions),
                    "overdue of a shard": lambda: store.overdue([3], START, 10),
                }
            )
            await with_timers(store, *spread(7 * DUE_PER_SHARD, at=START - 90, step_ms=0, shards=7, prefix="due"))
            seven = await store.claim(ALICE, [0, 1, 2, 4, 5, 6, 7], LEASE_MS)
            await counted({BEGIN_OF_SEVEN: lambda: store.begin(ALICE, seven, BEGUN)})
        return rows
    finally:
        await store.close()


@pytest.fixture(scope="module", params=["mariadb", "mysql9"])
def rows(request: pytest.FixtureRequest) -> Iterator[dict[str, int]]:
    server: MysqlServer = request.getfixturevalue(request.param)
    url = server.fresh()
    yield asyncio.run(read(url))
    server.give_back(url)


def test_statements_read_no_unrelated_rows(rows: dict[str, int]) -> None:
    assert {name: number for name, number in rows.items() if number > READ_MAX} == {}
    assert min(rows.values()) > 0


def test_begin_of_several_shards_reads_about_as_many_timers_as_it_begins(rows: dict[str, int]) -> None:
    assert rows[BEGIN_OF_SEVEN] < 10 * BEGUN  # The begun timers are also locked, updated and returned.
