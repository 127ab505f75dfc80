"""Paused namespaces: what falls due in them waits, costs the others nothing, and shows nowhere but in not firing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import apsw
import msgspec
import pytest

from duetime import lifecycle
from duetime.model import Namespace, Status, Timer
from duetime.store import Begun, Filter, Store
from duetime.stores import postgres_statements as sql
from duetime.stores import sqlite_file
from duetime.stores.parking import PARK_MAX, RESUMED_MAX
from tests.clocks import START, ManualClock
from tests.contract.stores import postgres, sqlite
from tests.contract.timers import ALICE, BOB, holding, ids, spread, timer, with_namespace, with_timers

PAUSED = ("east", "west")


def of(namespace: str, timers: Sequence[Timer]) -> list[Timer]:
    return [msgspec.structs.replace(t, namespace=namespace) for t in timers]


async def paused_namespaces(store: Store) -> dict[str, Namespace]:
    return {name: await with_namespace(store, name, paused=True) for name in PAUSED}


async def resume(store: Store, namespace: Namespace) -> None:
    assert await store.swap_namespace(namespace, msgspec.structs.replace(namespace, paused=False))


async def seen(store: Store) -> list[Any]:
    """All that one can ask about pending timers."""
    found: list[Any] = [
        await store.forecast([0, START - 40, START - 20, START + 1, START + 1000], most) for most in (3, 99)
    ]
    for filter in (Filter(status=Status.PENDING, namespace=name) for name in (None, "default", *PAUSED)):
        after = None
        while True:
            page = await store.page(filter, 7, after)
            found += ids(page.timers)
            if (after := page.next) is None:
                break
        found += [await store.count(filter, most) for most in (3, 99)]
        found.append(await store.tally(filter.namespace))
    return found


async def test_what_is_held_back_is_listed_and_counted_like_all_that_is_pending(store) -> None:
    await paused_namespaces(store)
    await with_timers(store, *spread(10, at=START + 1, step_ms=30))
    for name in PAUSED:
        await with_timers(store, *of(name, spread(12, at=START - 50, step_ms=5, prefix=name)))
    before = await seen(store)
    held = await holding(store)
    for _ in range(3):
        assert (await store.begin(ALICE, held, 5)).timers == []
        assert await seen(store) == before


async def test_what_goes_on_is_begun_oldest_first_among_the_others(store, clock: ManualClock) -> None:
    namespaces = await paused_namespaces(store)
    for name in PAUSED:
        await with_timers(store, *of(name, spread(6, at=START - 60, step_ms=9, prefix=name)))
    await with_timers(store, *spread(6, at=START - 60, step_ms=10), timer("later", at=START + 70))
    held = await holding(store)
    assert ids((await store.begin(ALICE, held, 4)).timers) == ["t0", "t1", "t2", "t3"]
    await resume(store, namespaces["west"])
    begun: list[Timer] = []
    while (look := await store.begin(ALICE, held, 3)).next_at == START:
        assert len(look.timers) == 3
        begun += look.timers
    begun += look.timers
    assert begun == sorted(begun, key=lambda t: t.fire_at) and look.next_at == START + 70
    assert set(ids(begun)) == {"t4", "t5", *(f"west{n}" for n in range(6))}
    await resume(store, namespaces["east"])
    assert ids((await store.begin(ALICE, held, 9)).timers) == [f"east{n}" for n in range(6)]


async def test_what_is_held_back_can_be_canceled_and_moved(store, clock: ManualClock) -> None:
    namespaces = await paused_namespaces(store)
    timers = of("east", spread(6, at=START - 10))
    await with_timers(store, *timers)
    held = await holding(store)
    assert (await store.begin(ALICE, held, 9)).timers == []
    canceled, forward, back, twice, gone, kept = timers
    moved = lifecycle.amend(twice, now=START, execute_at=START + 5)
    for before, after in (
        (canceled, lifecycle.cancel(canceled, now=START)),
        (forward, lifecycle.amend(forward, now=START, execute_at=START + 20)),
        (back, lifecycle.amend(back, now=START, execute_at=START - 20)),
        (twice, moved),
        (moved, lifecycle.amend(moved, now=START, execute_at=START + 15)),
        (gone, None),
    ):
        assert await store.swap(before, after)
    assert (await store.begin(ALICE, held, 9)).next_at == START + 15
    await resume(store, namespaces["east"])
    look = await store.begin(ALICE, held, 9)
    assert (ids(look.timers), look.next_at) == ([back.id, kept.id], START + 15)
    clock.advance(15)
    assert ids((await store.begin(ALICE, held, 9)).timers) == [twice.id]
    clock.advance(5)
    assert ids((await store.begin(ALICE, held, 9)).timers) == [forward.id]


async def test_what_is_held_back_goes_to_the_next_owner_of_its_shard(store) -> None:
    namespaces = await paused_namespaces(store)
    await with_timers(store, *of("east", spread(16, at=START - 50)))
    held = await holding(store, ALICE)
    assert (await store.begin(ALICE, held, 99)).timers == []
    await store.release(ALICE, [2, 5])
    theirs = await holding(store, BOB, 2, 5)
    await resume(store, namespaces["east"])
    assert {t.shard for t in (await store.begin(BOB, theirs, 99)).timers} == {2, 5}
    begun = await store.begin(ALICE, held, 99)
    assert ({t.shard for t in begun.timers}, begun.refused) == (set(range(8)) - {2, 5}, {2, 5})
    assert len(begun.timers) == 12


async def test_a_second_pause_holds_back_what_is_left(store) -> None:
    east = (await paused_namespaces(store))["east"]
    await with_timers(store, *of("east", spread(9, at=START - 50)))
    held = await holding(store)
    assert (await store.begin(ALICE, held, 99)).timers == []
    await resume(store, east)
    first, *_ = (await store.begin(ALICE, held, 4)).timers
    assert await store.swap_namespace(msgspec.structs.replace(east, paused=False), east)
    # One of those that were begun comes back, put off to a time that has passed.
    assert await store.record(ALICE, [(first, lifecycle.defer(first, fire_at=START - 1, now=START))]) == [True]
    assert (await store.begin(ALICE, held, 99)).timers == []
    await resume(store, east)
    assert ids((await store.begin(ALICE, held, 99)).timers) == ["t4", "t5", "t6", "t7", "t8", "t0"]


@pytest.mark.parametrize("verb", ["page", "count"])
async def test_sqlite_shows_each_once_while_it_is_being_parked(
    tmp_path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """There it takes several statements, and a look may come between them."""
    store = await sqlite(tmp_path, clock)
    await paused_namespaces(store)
    await with_timers(store, *of("east", spread(6, at=START - 50)))
    held = await holding(store)
    loop, looks = asyncio.get_running_loop(), 0

    def traced(*arguments: Any) -> Any:
        def look(_cursor: apsw.Cursor, sql: str, _bindings: object) -> bool:
            nonlocal looks
            if "parked > '' AND parked = :parked" in sql:  # the second statement; the first has been run
                looks += 1
                asyncio.run_coroutine_threadsafe(store.begin(ALICE, held, 99), loop).result(30)
            return True

        connection = connect(*arguments)
        connection.exec_trace = look
        return connection

    connect = sqlite_file._connect
    monkeypatch.setattr(sqlite_file, "_connect", traced)  # of readers, which are made when they are needed
    filter = Filter(status=Status.PENDING, namespace="east")
    if verb == "count":
        assert await store.count(filter, 99) == 6
    else:
        assert ids((await store.page(filter, 99)).timers) == [f"t{n}" for n in range(6)]
    assert looks == 1
    await store.close()


async def test_attempts_that_were_lost_in_a_pause_stand_in_nobodys_way(store, clock: ManualClock) -> None:
    east = await with_namespace(store, "east")
    lost = of("east", spread(20, at=START - 50))
    await with_timers(store, *lost)
    held = await holding(store)
    assert len((await store.begin(ALICE, held, 99)).timers) == 20
    assert await store.swap_namespace(east, paused := msgspec.structs.replace(east, paused=True))
    held = await holding(store)
    clock.advance(10**6)
    await with_timers(store, *spread(3, at=START), timer("later", at=clock.now() + 7))
    begun = await store.begin(ALICE, held, 5)
    assert (ids(begun.timers), begun.next_at) == (["t0", "t1", "t2"], clock.now() + 7)
    assert await store.swap_namespace(paused, east)
    assert len((await store.begin(ALICE, held, 99)).timers) == 20


async def test_many_namespaces_that_go_on_are_taken_a_few_at_a_time(store) -> None:
    names = [f"n{n:02}" for n in range(2 * RESUMED_MAX + 3)]
    namespaces = [await with_namespace(store, name, paused=True) for name in names]
    for place, name in enumerate(names):
        await with_timers(store, *of(name, spread(3, at=START - 50 - place, prefix=name)))
    held = await holding(store)
    assert (await store.begin(ALICE, held, 500)).timers == []
    for namespace in namespaces[1:]:
        await resume(store, namespace)
    found = await looks(store, held)
    assert len(found) <= LOOKS_MAX
    begun = [t for look in found for t in look.timers]
    assert sorted(ids(begun)) == sorted(f"{name}{n}" for name in names[1:] for n in range(3))
    assert {t.namespace for t in found[0].timers} >= set(names[-RESUMED_MAX:])  # the oldest first
    assert found[-1].next_at is None


# What it costs.

MANY = 2 * PARK_MAX
LOOKS_MAX = 3


async def backlog(store: Store) -> dict[int, int]:
    """Have many timers due in a paused namespace, many that will be, and one of another behind them."""
    await paused_namespaces(store)
    for first in range(0, MANY, 1000):
        await with_timers(store, *of("west", spread(1000, at=START - 10 * MANY + first, prefix=f"due{first}-")))
        await with_timers(store, *of("west", spread(1000, at=START + 5 + first, prefix=f"later{first}-")))
    await with_timers(store, timer("mine", at=START - 1))
    return await holding(store)


async def looks(store: Store, held: dict[int, int]) -> list[Begun]:
    """Look until there is nothing left that should be looked at now."""
    found = [await store.begin(ALICE, held, 500)]
    while found[-1].next_at == START:
        assert len(found) < LOOKS_MAX, "it is never done"
        found.append(await store.begin(ALICE, held, 500))
    return found


async def test_nobody_waits_long_behind_a_backlog(store) -> None:
    found = await looks(store, await backlog(store))
    assert [t.id for look in found for t in look.timers] == ["mine"]
    assert found[-1].next_at == START + 5


async def test_sqlite_passes_over_a_backlog_once(tmp_path, clock: ManualClock, monkeypatch) -> None:
    steps = 0
    connect = sqlite_file._connect

    def counted(*arguments: Any) -> Any:
        def step() -> bool:
            nonlocal steps
            steps += 1
            return False

        connection = connect(*arguments)
        connection.set_progress_handler(step, 10)
        return connection

    monkeypatch.setattr(sqlite_file, "_connect", counted)
    store = await sqlite(tmp_path, clock)
    await paused_namespaces(store)
    held = await holding(store)

    async def cost() -> int:
        nonlocal steps
        steps = 0
        await store.begin(ALICE, held, 500)
        return steps

    await cost()
    idle = await cost()
    for name in PAUSED:
        await with_timers(
            store, *of(name, spread(1000, at=START - 1000)), *of(name, spread(1000, at=START + 1, prefix="l"))
        )
    met = await cost()
    assert met > 100 * idle
    assert await cost() < 2 * idle
    await store.close()


async def test_postgres_passes_over_a_backlog_once(database: str, clock: ManualClock) -> None:
    store = await postgres(database, clock)
    held = await backlog(store)
    await looks(store, held)
    versions = [held[shard] for shard in range(store.shards)]
    async with store._pool.connection() as connection:
        for analyzed in (False, True):
            if analyzed:
                await connection.execute("ANALYZE")
            [(text,)] = await connection.fetch(
                f"EXPLAIN (ANALYZE, FORMAT JSON) {sql.BEGIN}", *(ALICE, versions, 500, clock.now(), False)
            )
            [explained] = msgspec.json.decode(text)
            assert 0 < rows_read(explained["Plan"]) < 10
    await store.close()


def rows_read(plan: dict[str, Any]) -> int:
    """How many timers the nodes of a plan came by."""
    read = 0
    if plan.get("Relation Name") == "timers":
        read = (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]
    return read + sum(map(rows_read, plan.get("Plans", ())))
