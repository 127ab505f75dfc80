"""How PostgreSQL runs the store's own statements: each along its index, with statistics of the tables and without.

The plans are those of the store's sessions: with their settings, and generic, as its prepared statements have them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest

from duetime import lifecycle
from duetime.model import Status
from duetime.store import Filter, Portion, Query, Sort
from duetime.stores.postgres import PostgresStore
from duetime.stores.postgres_statements import GET
from tests.clocks import START, ManualClock
from tests.contract.stores import postgres
from tests.contract.timers import ALICE, completed, ended, holding, spread, timer, with_namespace, with_timers
from tests.postgres import Postgres
from tests.servers import until

LIVE, FINAL = 20_000, 4_000
Plan = dict[str, Any]

FINDS = {
    f"find {status} by {sort} {way}": Query(namespace="default", status=status, sort=sort, descending=way == "down")
    for status in (None, Status.PENDING, Status.COMPLETED)
    for sort in Sort
    for way in ("up", "down")
}
PAGES = {
    "page " + " ".join(f"{field}={value}" for field, value in msgspec.structs.asdict(filter).items() if value): (
        filter,
        index,
    )
    for filter, index in (
        (Filter(), "namespace"),
        (Filter(namespace="default"), "namespace"),
        (Filter(status=Status.PENDING), "due"),
        (Filter(status=Status.PENDING, namespace="default"), "due"),
        (Filter(status=Status.EXECUTING), "due"),
        (Filter(status=Status.FAILED), "ended"),
        (Filter(status=Status.CANCELED), "ended"),
        (Filter(status=Status.COMPLETED), "final"),
        (Filter(status=Status.FAILED, namespace="default"), "final"),
        (Filter(correlation_id="a"), "correlation_id"),
        (Filter(correlation_id="a", namespace="default"), "correlation_id"),
        (Filter(execute_after=1, execute_before=9), "execute_at"),
        (Filter(execute_after=1, execute_before=9, namespace="default"), "execute_at"),
        (Filter(execute_after=1, status=Status.PENDING), "execute_at"),
        (Filter(id="t7"), "uuid"),
        (Filter(id="t7", namespace="default", status=Status.PENDING, correlation_id="a", execute_after=1), "uuid"),
    )
}
COUNTS = {name.replace("page", "count"): entry for name, entry in PAGES.items()}


async def verbs(store: PostgresStore) -> dict[str, Callable[[], Awaitable[object]]]:
    """Every verb that asks for timers, ready to be called."""
    await with_timers(store, one := timer("one"), two := timer("two"), three := timer("three"))
    held = await holding(store)
    begun = (await store.begin(ALICE, held, 5)).timers
    await store.swap(two, canceled := lifecycle.cancel(two, now=START))
    return {
        "begin": lambda: store.begin(ALICE, held, 5, lane_max=3),
        "begin_lanes": lambda: store.begin_lanes(ALICE, held, 5, [Portion(one.lane, 3)]),
        "lanes": lambda: store.lanes(START, due_max=10),
        "overdue": lambda: store.overdue(held, START, 10),
        "record": lambda: store.record(ALICE, [(t, completed(t)) for t in begun]),
        "put": lambda: store.put(timer("new")),
        "get": lambda: store.get("default", "t7"),
        "amend": lambda: store.swap(one, lifecycle.amend(one, now=START)),
        "cancel": lambda: store.swap(three, lifecycle.cancel(three, now=START)),
        "replay": lambda: store.swap(canceled, lifecycle.replay(canceled, now=START)),
        "remove": lambda: store.swap(canceled, None),
        "purge": lambda: store.purge(retention_ms=20, limit=10),
        **{name: lambda query=query: store.find(query) for name, query in FINDS.items()},
        **{name: lambda filter=filter: store.page(filter, 10) for name, (filter, _) in PAGES.items()},
        **{name: lambda filter=filter: store.count(filter, 10) for name, (filter, _) in COUNTS.items()},
        "forecast": lambda: store.forecast([START, START + 10, START + 20], 10),
    }


async def plans_of(url: str) -> dict[tuple[str, bool], list[Plan]]:
    """The plans of each verb's statements, before and after the tables were analyzed."""
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
    said: list[str] = []
    write = store._pool.write

    async def listen(sql: str, *arguments: object) -> list[Any]:
        said.append(sql)
        return await write(sql, *arguments)

    store._pool.write = listen
    calls = await verbs(store)
    statements = {}
    for name, call in calls.items():
        said.clear()
        await call()
        statements[name] = {sql for sql in said if re.search(r"\b(timers|history)\b", sql)}
        if name in FINDS:
            statements[name].discard(GET)  # what was found is read by its keys
        assert statements[name], f"{name} asks for no timers"
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
    # A generic plan is the same whatever the values are.
    values = f"({', '.join(['NULL'] * parameters)})" if parameters else ""
    await connection.execute(f"PREPARE it AS {sql}")
    [(text,)] = await connection.fetch(f"EXPLAIN (FORMAT JSON) EXECUTE it{values}")
    await connection.execute("DEALLOCATE it")
    [plan] = json.loads(text)
    return plan["Plan"]


# Plans are read.


def nodes(plan: Plan) -> Iterator[Plan]:
    yield plan
    for below in plan.get("Plans", ()):
        yield from nodes(below)


def scans(plan: Plan) -> list[Plan]:
    """The nodes that read timers or history."""
    return [n for n in nodes(plan) if "Scan" in n["Node Type"] and re.match("timers|history", table(n))]


def part(plan: Plan, name: str) -> Plan:
    """What makes the CTE of this name."""
    [found] = [n for n in nodes(plan) if n.get("Subplan Name") == f"CTE {name}"]
    return found


def table(node: Plan) -> str:
    return str(node.get("Relation Name", ""))


def indexes(plan: Plan) -> set[str]:
    """Which indexes are gone by; those of a slice of history by the columns that they are on."""
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
    """The tables of timers that are read to their end by what is below a node."""
    if plan["Node Type"] == "Limit":
        return []
    found = [table(plan)] if plan["Node Type"].endswith("Scan") and re.match("timers|history", table(plan)) else []
    return found + [name for below in plan.get("Plans", ()) for name in read_whole_below(below)]


def assert_sorts_only_pages(plan: Plan) -> None:
    for node in nodes(plan):
        if node["Node Type"] == "Sort":
            assert read_whole_below(node) == [], f"sorts all of it: {node['Sort Key']}"


@pytest.fixture(scope="module", params=["postgres15", "postgres18"])
def plans(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, bool], list[Plan]]]:
    server: Postgres = request.getfixturevalue(request.param)
    url = server.fresh()
    server.sql("ALTER SYSTEM SET autovacuum = off")  # else it may analyze the tables before we do
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
def test_a_write_goes_by_its_indexes(plans, verb: str, wanted: set[str], analyzed: bool) -> None:
    assert set().union(*map(indexes, plans[verb, analyzed])) == wanted


def walks(plan: Plan) -> list[tuple[str, str]]:
    """Which indexes are gone by, and under which conditions."""
    return sorted((scan["Index Name"], scan["Index Cond"]) for scan in scans(plan))


@in_both_ages
def test_begin_finds_what_is_due_in_order_and_sorts_no_table(plans, analyzed: bool) -> None:
    [plan] = plans["begin", analyzed]
    due, in_shard = walks(met := part(plan, "met"))
    assert due[0] == "timers_due" and "fire_at <= " in due[1]
    assert in_shard[0] == "timers_shard" and "shard = " in in_shard[1] and "(fire_at - 0) <= " in in_shard[1]
    assert not any("Sort" in n["Node Type"] for n in nodes(met))


@in_both_ages
def test_begin_finds_when_to_look_again_without_the_timers_of_others(plans, analyzed: bool) -> None:
    [plan] = plans["begin", analyzed]
    due, next_due, in_shard, next_in_shard = walks(following := part(plan, "next"))
    assert due[0] == next_due[0] == "timers_due" and "fire_at <= " in due[1] and "fire_at > " in next_due[1]
    assert in_shard[0] == next_in_shard[0] == "timers_shard"
    assert all("shard = " in walk[1] for walk in (in_shard, next_in_shard))
    assert not any("Sort" in n["Node Type"] for n in nodes(following))


@in_both_ages
def test_begin_by_lane_finds_what_is_due_in_order_and_sorts_no_table(plans, analyzed: bool) -> None:
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
    [in_shard] = walks(met := part(plan, "met"))
    assert in_shard[0] == "timers_shard"
    assert all(condition in in_shard[1] for condition in ("shard = ", "(fire_at - 0) <= ", "(lane + 0) = "))
    assert_sorts_only_pages(met)


@in_both_ages
@pytest.mark.parametrize("verb", ["begin", "begin_lanes"])
def test_paused_namespaces_are_found_without_the_others(plans, verb: str, analyzed: bool) -> None:
    [plan] = plans[verb, analyzed]
    paused, held_back = part(plan, "paused")["Plans"]
    assert paused["Index Name"] == "namespaces_paused" and held_back["Node Type"] == "ProjectSet"


@in_both_ages
@pytest.mark.parametrize("verb", ["lanes", "overdue"])
def test_lanes_are_found_by_seeks_in_their_index(plans, verb: str, analyzed: bool) -> None:
    [plan] = plans[verb, analyzed]
    seeks = [n for n in scans(plan) if n["Index Name"] == "timers_lane"]
    assert seeks and all("lane " in seek["Index Cond"] for seek in seeks)
    # Each reads one entry, or counts up to a limit.
    assert all(read_whole_below(n) == [] for n in nodes(plan) if n["Node Type"] in ("Nested Loop", "Recursive Union"))
    assert indexes(plan) == ({"timers_lane", "timers_due"} if verb == "lanes" else {"timers_lane"})


@in_both_ages
@pytest.mark.parametrize("verb", ["begin", "begin_lanes", "record", "put"])
def test_no_timer_of_a_batch_is_compared_with_every_shard(plans, verb: str, analyzed: bool) -> None:
    filters = [n["Join Filter"] for plan in plans[verb, analyzed] for n in nodes(plan) if "Join Filter" in n]
    assert set(filters) <= {"false"}


@pytest.mark.parametrize(
    ("name", "analyzed"),
    [(name, analyzed) for name, query in FINDS.items() for analyzed in (False, True)],
)
def test_a_list_by_number_sorts_nothing(plans, name: str, analyzed: bool) -> None:
    [plan] = plans[name, analyzed]
    assert indexes(plan)
    assert_sorts_only_pages(plan)


@pytest.mark.parametrize(
    ("name", "analyzed"),
    [
        (name, analyzed)
        for name, query in FINDS.items()
        if query.sort is Sort.CREATED_AT and query.status is not Status.COMPLETED
        for analyzed in (False, True)
    ],
)
def test_a_list_of_a_namespace_reads_no_other(plans, name: str, analyzed: bool) -> None:
    [plan] = plans[name, analyzed]
    assert indexes(plan) <= {"timers_namespace", "history_namespace_seq"}


@pytest.mark.parametrize(
    ("name", "index", "analyzed"),
    [(name, index, analyzed) for name, (_, index) in (PAGES | COUNTS).items() for analyzed in (False, True)],
)
def test_a_page_and_a_count_are_walks_along_an_index(plans, name: str, index: str, analyzed: bool) -> None:
    [plan] = plans[name, analyzed]
    special = {"final": "namespace_status_updated_at_seq", "ended": "status_expr_expr1", "uuid": "uuid"}
    slices = special.get(index, f"{index}_seq")
    assert indexes(plan) <= {f"timers_{index}", f"history_{slices}"}
    if index in ("final", "namespace"):
        assert all("namespace = " in scan["Index Cond"] for scan in scans(plan))
    if index != "uuid" and not name.endswith("status=executing"):  # these are few
        assert_sorts_only_pages(plan)


@in_both_ages
def test_a_forecast_reads_what_is_due_from_the_index_alone(plans, analyzed: bool) -> None:
    [plan] = plans["forecast", analyzed]
    assert indexes(plan) == {"timers_due"}
    assert {scan["Node Type"] for scan in scans(plan)} == {"Index Scan", "Index Only Scan"}
    walks = [scan["Index Cond"] for scan in scans(plan)]
    assert all("fire_at >= " in walk and "fire_at < " in walk for walk in walks)


async def test_a_begin_leaves_the_indexes_alone(opened, server: Postgres, database: str) -> None:
    store = await opened(database)
    await with_timers(store, *spread(1000, at=START - 1000))
    # All of a page at once: what they leave behind can't be cleared away before the commit.
    assert len((await store.begin(ALICE, await holding(store), 500)).timers) == 500
    await store.close()  # A session that ends has counted everything.
    counts = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'timers'"
    until("the begins are counted", lambda: server.sql(counts, database).startswith("500|"))
    said = server.sql(counts, database)
    # A page may lack the room for one, because its rows were wider than most.
    assert int(said.partition("|")[2]) >= 490
    assert "status" not in server.sql("SELECT indexdef FROM pg_indexes WHERE tablename = 'timers'", database)
