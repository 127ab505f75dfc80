"""How PostgreSQL runs the store's statements: each uses its index, with and without table statistics.

The plans are those of the store's sessions: with their settings, and generic like those of its prepared statements.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from duetime.model import Status
from duetime.store import Sort
from duetime.stores.postgres.statements import GET
from duetime.stores.postgres.store import PostgresStore
from tests.clocks import START, ManualClock
from tests.contract.questions import COUNTS, OFFSET_PAGES, PAGES, verbs
from tests.contract.stores import Opened, postgres
from tests.contract.timers import ALICE, ended, holding, spread, with_namespace, with_timers
from tests.postgres import Postgres
from tests.servers import until

LIVE, FINAL = 20_000, 4_000
Plan = dict[str, Any]


async def plans_of(url: str) -> dict[tuple[str, bool], list[Plan]]:
    """The plans of the statements of each method, before and after ANALYZE."""
    store = await postgres(url, ManualClock())
    try:
        return await _plans_of(store)
    finally:
        await store.close()


async def _plans_of(store: PostgresStore) -> dict[tuple[str, bool], list[Plan]]:
    await with_namespace(store, "paused", paused=True)
    live = spread(LIVE, at=START - 50)
    for first in range(0, LIVE, 1000):
        await with_timers(store, *live[first : first + 1000])
    await with_timers(store, *(ended(f"e{n}", Status.COMPLETED, at=START - n) for n in range(FINAL)))
    executed: list[str] = []
    write = store._pool.write

    async def listen(sql: str, *arguments: object) -> list[Any]:
        executed.append(sql)
        return await write(sql, *arguments)

    store._pool.write = listen  # type: ignore[method-assign]
    calls = await verbs(store)
    statements = {}
    for name, call in calls.items():
        executed.clear()
        await call()
        statements[name] = {sql for sql in executed if re.search(r"\b(timers|history)\b", sql)}
        if name in OFFSET_PAGES:
            statements[name].discard(GET)  # the found rows are read by their keys
        assert statements[name], f"{name} reads no timers"
    plans = {}
    async with store._pool.connection() as connection:
        for analyzed in (False, True):
            if analyzed:
                await connection.execute("ANALYZE")
            for name, several in statements.items():
                plans[name, analyzed] = [await _plan(connection, sql) for sql in several]
    return plans


async def _plan(connection: Any, sql: str) -> Plan:
    parameters = max((int(n) for n in re.findall(r"\$(\d+)", sql)), default=0)
    # A generic plan does not depend on the values.
    values = f"({', '.join(['NULL'] * parameters)})" if parameters else ""
    await connection.execute(f"PREPARE it AS {sql}")
    [(text,)] = await connection.fetch(f"EXPLAIN (FORMAT JSON) EXECUTE it{values}")
    await connection.execute("DEALLOCATE it")
    [explained] = json.loads(text)
    plan: Plan = explained["Plan"]
    return plan


# Reading plans.


def nodes(plan: Plan) -> Iterator[Plan]:
    yield plan
    for below in plan.get("Plans", ()):
        yield from nodes(below)


def scans(plan: Plan) -> list[Plan]:
    """The plan nodes that read timers or history."""
    return [n for n in nodes(plan) if "Scan" in n["Node Type"] and re.match("timers|history", table(n))]


def part(plan: Plan, name: str) -> Plan:
    """The plan node of the CTE with this name."""
    [found] = [n for n in nodes(plan) if n.get("Subplan Name") == f"CTE {name}"]
    return found


def table(node: Plan) -> str:
    return str(node.get("Relation Name", ""))


def indexes(plan: Plan) -> set[str]:
    """The indexes used; those of a slice of history by their columns."""
    for scan in scans(plan):
        assert scan["Node Type"] in ("Index Scan", "Index Only Scan", "Tid Scan"), (
            f"{scan['Node Type']} of {table(scan)}"
        )
    return {
        scan["Index Name"].replace(f"{table(scan)}_", f"{table(scan).partition('_')[0]}_").removesuffix("_idx")
        for scan in scans(plan)
        if scan["Node Type"] != "Tid Scan"
    }


def read_whole_below(plan: Plan) -> list[str]:
    """The tables of timers that are fully scanned below a node."""
    if plan["Node Type"] == "Limit":
        return []
    found = [table(plan)] if plan["Node Type"].endswith("Scan") and re.match("timers|history", table(plan)) else []
    return found + [name for below in plan.get("Plans", ()) for name in read_whole_below(below)]


def assert_sorts_only_pages(plan: Plan) -> None:
    for node in nodes(plan):
        if node["Node Type"] == "Sort":
            assert read_whole_below(node) == [], f"sorts all of it: {node['Sort Key']}"


Plans = dict[tuple[str, bool], list[Plan]]


@pytest.fixture(scope="module", params=["postgres15", "postgres18"])
def plans(request: pytest.FixtureRequest) -> Iterator[Plans]:
    server: Postgres = request.getfixturevalue(request.param)
    url = server.fresh()
    server.sql("ALTER SYSTEM SET autovacuum = off")  # otherwise autovacuum may analyze the tables before we do
    server.sql("SELECT pg_reload_conf()")
    try:
        found = asyncio.run(plans_of(url))
    finally:
        server.sql("ALTER SYSTEM RESET autovacuum")
        server.sql("SELECT pg_reload_conf()")
    yield found
    server.give_back(url)


in_both_ages = pytest.mark.parametrize("analyzed", [False, True], ids=["before ANALYZE", "after ANALYZE"])
UUID, HISTORY_UUID = {"timers_uuid"}, {"history_uuid"}
HISTORY_FINAL = {"history_namespace_status_updated_at_seq"}


@in_both_ages
@pytest.mark.parametrize(
    ("verb", "wanted"),
    [
        ("begin", {"timers_due", "timers_shard"}),
        ("begin_lanes", {"timers_lane", "timers_shard"}),
        ("record", UUID),
        ("put", set()),
        ("get", UUID | HISTORY_UUID),
        ("amend", UUID),
        ("cancel", UUID),
        ("replay", HISTORY_UUID),
        ("remove", HISTORY_UUID),
        ("purge", HISTORY_FINAL | HISTORY_UUID),
    ],
)
def test_writes_use_their_indexes(plans: Plans, verb: str, wanted: set[str], analyzed: bool) -> None:
    assert set().union(*map(indexes, plans[verb, analyzed])) == wanted


def walks(plan: Plan) -> list[tuple[str, str]]:
    """The indexes used, with their conditions."""
    return sorted((scan["Index Name"], scan["Index Cond"]) for scan in scans(plan))


@in_both_ages
def test_begin_reads_due_timers_in_index_order_without_sorting(plans: Plans, analyzed: bool) -> None:
    [plan] = plans["begin", analyzed]
    due, in_shard = walks(candidates := part(plan, "candidates"))
    assert due[0] == "timers_due" and "fire_at <= " in due[1]
    assert in_shard[0] == "timers_shard" and "shard = " in in_shard[1] and "(fire_at - 0) <= " in in_shard[1]
    assert not any("Sort" in n["Node Type"] for n in nodes(candidates))


@in_both_ages
def test_begin_computes_next_at_without_reading_others_timers(plans: Plans, analyzed: bool) -> None:
    [plan] = plans["begin", analyzed]
    due, next_due, in_shard, next_in_shard = walks(following := part(plan, "next"))
    assert due[0] == next_due[0] == "timers_due" and "fire_at <= " in due[1] and "fire_at > " in next_due[1]
    assert in_shard[0] == next_in_shard[0] == "timers_shard"
    assert all("shard = " in walk[1] for walk in (in_shard, next_in_shard))
    assert not any("Sort" in n["Node Type"] for n in nodes(following))


@in_both_ages
def test_begin_lanes_reads_due_timers_in_index_order_without_sorting(plans: Plans, analyzed: bool) -> None:
    [plan] = plans["begin_lanes", analyzed]
    for name, conditions in {
        "asked": ["lane = "],
        "near": ["lane = ", "(fire_at + 0) <= "],
        "crowded": ["lane = ", "(fire_at + 0) <= "],
        "left_over": ["lane = ", "(fire_at + 0) > "],
    }.items():
        [walk] = walks(found := part(plan, name))
        assert walk[0] == "timers_lane" and all(condition in walk[1] for condition in conditions)
        assert read_whole_below(found) == [] and not any("Sort" in n["Node Type"] for n in nodes(found))
    [in_shard] = walks(candidates := part(plan, "candidates"))
    assert in_shard[0] == "timers_shard"
    assert all(condition in in_shard[1] for condition in ("shard = ", "(fire_at - 0) <= ", "(lane + 0) = "))
    assert_sorts_only_pages(candidates)


@in_both_ages
@pytest.mark.parametrize("verb", ["begin", "begin_lanes"])
def test_paused_namespaces_are_read_from_their_index(plans: Plans, verb: str, analyzed: bool) -> None:
    [plan] = plans[verb, analyzed]
    paused, held_back = part(plan, "paused")["Plans"]
    assert paused["Index Name"] == "namespaces_paused" and held_back["Node Type"] == "ProjectSet"


@in_both_ages
@pytest.mark.parametrize("verb", ["lanes", "overdue"])
def test_lanes_are_found_by_index_seeks(plans: Plans, verb: str, analyzed: bool) -> None:
    [plan] = plans[verb, analyzed]
    seeks = [n for n in scans(plan) if n["Index Name"] == "timers_lane"]
    assert seeks and all("lane " in seek["Index Cond"] for seek in seeks)
    # Each reads one index entry, or counts up to a limit.
    assert all(read_whole_below(n) == [] for n in nodes(plan) if n["Node Type"] in ("Nested Loop", "Recursive Union"))
    assert indexes(plan) == ({"timers_lane", "timers_due"} if verb == "lanes" else {"timers_lane"})


@in_both_ages
@pytest.mark.parametrize("verb", ["begin", "begin_lanes", "record", "put"])
def test_batch_is_not_joined_with_all_shards(plans: Plans, verb: str, analyzed: bool) -> None:
    filters = [n["Join Filter"] for plan in plans[verb, analyzed] for n in nodes(plan) if "Join Filter" in n]
    assert set(filters) <= {"false"}


@pytest.mark.parametrize(
    ("name", "analyzed"),
    [(name, analyzed) for name, query in OFFSET_PAGES.items() for analyzed in (False, True)],
)
def test_page_by_number_does_not_sort(plans: Plans, name: str, analyzed: bool) -> None:
    [plan] = plans[name, analyzed]
    assert indexes(plan)
    assert_sorts_only_pages(plan)


@pytest.mark.parametrize(
    ("name", "analyzed"),
    [
        (name, analyzed)
        for name, query in OFFSET_PAGES.items()
        if query.sort is Sort.CREATED_AT and query.status is not Status.COMPLETED
        for analyzed in (False, True)
    ],
)
def test_list_of_a_namespace_reads_no_other_namespace(plans: Plans, name: str, analyzed: bool) -> None:
    [plan] = plans[name, analyzed]
    assert indexes(plan) <= {"timers_namespace", "history_namespace_seq"}


@pytest.mark.parametrize(
    ("name", "index", "analyzed"),
    [(name, index, analyzed) for name, (_, index) in (PAGES | COUNTS).items() for analyzed in (False, True)],
)
def test_pages_and_counts_are_index_scans(plans: Plans, name: str, index: str, analyzed: bool) -> None:
    [plan] = plans[name, analyzed]
    special = {"final": "namespace_status_updated_at_seq", "ended": "status_expr_expr1", "uuid": "uuid"}
    slices = special.get(index, f"{index}_seq")
    assert indexes(plan) <= {f"timers_{index}", f"history_{slices}"}
    if index in ("final", "namespace"):
        assert all("namespace = " in scan["Index Cond"] for scan in scans(plan))
    if index != "uuid" and not name.endswith("status=executing"):  # they are few
        assert_sorts_only_pages(plan)


@in_both_ages
def test_forecast_is_an_index_only_scan(plans: Plans, analyzed: bool) -> None:
    [plan] = plans["forecast", analyzed]
    assert indexes(plan) == {"timers_due"}
    assert {scan["Node Type"] for scan in scans(plan)} == {"Index Scan", "Index Only Scan"}
    walks = [scan["Index Cond"] for scan in scans(plan)]
    assert all("fire_at >= " in walk and "fire_at < " in walk for walk in walks)


async def test_begin_updates_no_index(opened: Opened, server: Postgres, database: str) -> None:
    store = await opened(database)
    await with_timers(store, *spread(1000, at=START - 1000))
    # All timers of a page at once: their old row versions can't be pruned before the commit.
    assert len((await store.begin(ALICE, await holding(store), 500)).timers) == 500
    await store.close()  # A session flushes its statistics when it ends.
    counts = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'timers'"
    until("the begins are counted", lambda: server.sql(counts, database).startswith("500|"))
    output = server.sql(counts, database)
    # A page may lack space for one, because its rows are wider than most.
    assert int(output.partition("|")[2]) >= 490
    assert "status" not in server.sql("SELECT indexdef FROM pg_indexes WHERE tablename = 'timers'", database)
