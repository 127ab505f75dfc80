"""Paused namespaces: their due timers wait, cost others nothing, and differ from pending timers only in not firing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from duetime import lifecycle
from duetime.instants import EPOCH
from duetime.model import Namespace, Status, Timer
from duetime.store import Filter, Store
from tests.clocks import START, ManualClock
from tests.contract.needs import lists
from tests.contract.timers import ALICE, BOB, holding, ids, spread, switch, timer, with_namespace, with_timers

PAUSED = ("east", "west")


def of(namespace: str, timers: Sequence[Timer]) -> list[Timer]:
    return [msgspec.structs.replace(t, namespace=namespace) for t in timers]


async def paused_namespaces(store: Store) -> dict[str, Namespace]:
    return {name: await with_namespace(store, name, paused=True) for name in PAUSED}


async def resume(store: Store, namespace: Namespace) -> Namespace:
    return await switch(store, namespace, paused=False)


async def seen(store: Store) -> list[Any]:
    """All lists and counts of pending timers."""
    found: list[Any] = [
        await store.forecast([EPOCH, START - 40, START - 20, START + 1, START + 1000], most) for most in (3, 99)
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


@lists
async def test_paused_timers_are_listed_and_counted_as_pending(store: Store) -> None:
    await paused_namespaces(store)
    await with_timers(store, *spread(10, at=START + 1, step_ms=30))
    for name in PAUSED:
        await with_timers(store, *of(name, spread(12, at=START - 50, step_ms=5, prefix=name)))
    before = await seen(store)
    held = await holding(store)
    for _ in range(3):
        assert (await store.begin(ALICE, held, 5)).timers == []
        assert await seen(store) == before


async def test_resumed_timers_begin_oldest_first_among_the_others(store: Store, clock: ManualClock) -> None:
    namespaces = await paused_namespaces(store)
    for name in PAUSED:
        await with_timers(store, *of(name, spread(6, at=START - 60, step_ms=9, prefix=name)))
    await with_timers(store, *spread(6, at=START - 60, step_ms=10), timer("later", at=START + 70))
    held = await holding(store)
    assert ids((await store.begin(ALICE, held, 4)).timers) == ["t0", "t1", "t2", "t3"]
    await resume(store, namespaces["west"])
    begun: list[Timer] = []
    while (look := await store.begin(ALICE, held, 3)).more:
        assert len(look.timers) == 3 and look.next_at == START
        begun += look.timers
    begun += look.timers
    assert begun == sorted(begun, key=lambda t: t.fire_at) and look.next_at == START + 70
    assert set(ids(begun)) == {"t4", "t5", *(f"west{n}" for n in range(6))}
    await resume(store, namespaces["east"])
    assert ids((await store.begin(ALICE, held, 9)).timers) == [f"east{n}" for n in range(6)]


async def test_paused_timers_can_be_canceled_and_moved(store: Store, clock: ManualClock) -> None:
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


async def test_paused_timers_pass_to_the_next_owner_of_their_shard(store: Store) -> None:
    namespaces = await paused_namespaces(store)
    await with_timers(store, *of("east", spread(16, at=START - 50)))
    held = await holding(store, ALICE)
    assert (await store.begin(ALICE, held, 99)).timers == []
    await store.release(ALICE, [2, 5])
    theirs = await holding(store, BOB, 2, 5)
    await resume(store, namespaces["east"])
    assert {t.shard for t in (await store.begin(BOB, theirs, 99)).timers} == {2, 5}
    begun = await store.begin(ALICE, held, 99)
    assert ({t.shard for t in begun.timers}, begun.refused) == (set(range(8)) - {2, 5}, frozenset({2, 5}))
    assert len(begun.timers) == 12


async def test_second_pause_holds_back_the_remaining_timers(store: Store) -> None:
    east = (await paused_namespaces(store))["east"]
    await with_timers(store, *of("east", spread(9, at=START - 50)))
    held = await holding(store)
    assert (await store.begin(ALICE, held, 99)).timers == []
    east = await resume(store, east)
    first, *_ = (await store.begin(ALICE, held, 4)).timers
    east = await switch(store, east, paused=True)
    # One of the begun timers returns as a retry at a past time.
    assert await store.record(ALICE, [(first, lifecycle.defer(first, fire_at=START - 1, now=START))]) == [True]
    assert (await store.begin(ALICE, held, 99)).timers == []
    await resume(store, east)
    assert ids((await store.begin(ALICE, held, 99)).timers) == ["t4", "t5", "t6", "t7", "t8", "t0"]


async def test_attempts_lost_in_a_pause_do_not_hide_others(store: Store, clock: ManualClock) -> None:
    east = await with_namespace(store, "east")
    lost = of("east", spread(20, at=START - 50))
    await with_timers(store, *lost)
    held = await holding(store)
    assert len((await store.begin(ALICE, held, 99)).timers) == 20
    paused = await switch(store, east, paused=True)
    held = await holding(store)
    clock.advance(10**6)
    await with_timers(store, *spread(3, at=START), timer("later", at=clock.now() + 7))
    begun = await store.begin(ALICE, held, 5)
    assert (ids(begun.timers), begun.next_at) == (["t0", "t1", "t2"], clock.now() + 7)
    await resume(store, paused)
    assert len((await store.begin(ALICE, held, 99)).timers) == 20
