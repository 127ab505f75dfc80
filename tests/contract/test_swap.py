"""swap: a change is written only if the timer still has the revision that the change is based on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from msgspec import Raw

from duetime import lifecycle
from duetime.model import Status, Timer, replace
from duetime.store import Portion, Store
from tests.clocks import START, ManualClock
from tests.contract.timers import (
    ALICE,
    FULL,
    another,
    changed,
    definition,
    everything,
    holding,
    spread,
    timer,
    touched,
    with_timers,
)


async def test_swap_at_the_revision_replaces_the_whole_timer(store: Store) -> None:
    await store.put(first := timer())
    fixed = {name: getattr(first, name) for name in ("namespace", "id", "shard", "created_at")}
    after = changed(FULL, **fixed, revision=first.revision + 1)
    assert await store.swap(first, after) is True
    assert await store.get("default", "a") == after
    assert await store.tally() == dict.fromkeys(Status, 0) | {Status.EXECUTING: 1}


async def test_swap_can_reset_values_to_none(store: Store) -> None:
    await store.put(full := changed(FULL, shard=0, created_at=START))
    bare = changed(timer(full.id), revision=full.revision + 1)
    assert await store.swap(full, bare)
    assert await store.get("default", full.id) == bare


@pytest.mark.parametrize("off", [-1, 1, 2, -1000])
async def test_swap_at_another_revision_changes_nothing(store: Store, off: int) -> None:
    await store.put(first := timer())
    stale = changed(first, revision=first.revision + off)
    assert await store.swap(stale, touched(stale)) is False
    assert await store.swap(stale, None) is False
    assert await store.get("default", "a") == first
    assert (await store.tally())[Status.PENDING] == 1


async def test_swap_succeeds_only_once(store: Store) -> None:
    await store.put(first := timer())
    assert await store.swap(first, second := touched(first))
    assert await store.swap(first, changed(second, correlation_id="again")) is False
    assert await store.get("default", "a") == second
    assert await store.swap(second, touched(second))


async def test_swap_of_an_unknown_timer_changes_nothing(store: Store) -> None:
    await store.put(first := timer("b"))
    assert await store.swap(timer("a"), touched(timer("a"))) is False
    assert await store.swap(timer("a"), None) is False
    assert list((await everything(store)).values()) == [first]


async def test_swap_with_none_deletes_the_timer(store: Store) -> None:
    await with_timers(store, first := timer(), other := timer("b"))
    assert await store.swap(first, None) is True
    assert await store.get("default", "a") is None
    assert list((await everything(store)).values()) == [other]
    assert (await store.tally())[Status.PENDING] == 1
    assert await store.swap(first, None) is False


async def test_swap_of_a_replaced_timer_changes_nothing(store: Store) -> None:
    await store.put(first := timer())
    await store.swap(first, None)
    assert await store.put(second := another(first)) is None
    assert await store.swap(first, touched(first)) is False
    assert await store.swap(first, None) is False
    assert await store.get("default", "a") == second
    assert (await store.tally())[Status.PENDING] == 1


async def test_swap_does_not_affect_the_same_id_in_another_namespace(store: Store) -> None:
    here = timer()
    there = changed(here, namespace="elsewhere")
    await with_timers(store, here, there)
    assert await store.swap(here, None)
    assert await store.get("elsewhere", "a") == there
    assert (await store.tally("elsewhere"))[Status.PENDING] == 1


async def test_concurrent_swaps_have_one_winner(store: Store) -> None:
    rng = random.Random(7)
    current = timer()
    await store.put(current)
    for round in range(12):
        rivals = [replace(current, correlation_id=f"{round}/{n}") for n in range(rng.randrange(2, 12))]
        won = await asyncio.gather(*(store.swap(current, rival) for rival in rivals))
        assert won.count(True) == 1
        current = rivals[won.index(True)]
        assert await store.get("default", "a") == current


async def test_concurrent_delete_and_change_have_one_winner(store: Store) -> None:
    for round in range(12):
        await store.put(first := timer(f"t{round}"))
        ways: list[Timer | None] = [None, touched(first)]
        random.Random(round).shuffle(ways)
        won = await asyncio.gather(*(store.swap(first, after) for after in ways))
        assert won.count(True) == 1
        assert await store.get("default", first.id) == ways[won.index(True)]
    assert (await store.tally())[Status.PENDING] == len(await everything(store))


@pytest.mark.parametrize("seed", range(6))
async def test_concurrent_cancel_and_begin_have_one_winner(store: Store, clock: ManualClock, seed: int) -> None:
    rng = random.Random(seed)
    held = await holding(store)
    timers = spread(60, at=START - 100)
    await with_timers(store, *timers)

    async def cancel(first: Timer) -> bool:
        for _ in range(rng.randrange(4)):
            await store.ping()  # Distributes the cancels over the commits.
        return await store.swap(first, lifecycle.cancel(first, now=clock.now()))

    async def begin(limit: int) -> list[Timer]:
        for _ in range(rng.randrange(4)):
            await store.ping()
        if rng.random() < 0.5:
            return (await store.begin_lanes(ALICE, held, limit, [Portion(timers[0].lane, limit)])).timers
        return (await store.begin(ALICE, held, limit)).timers

    jobs = [cancel(first) for first in timers] + [begin(rng.randrange(1, 12)) for _ in range(8)]
    rng.shuffle(jobs)
    answers = await asyncio.gather(*jobs)
    begun = [t for answer in answers if isinstance(answer, list) for t in answer]
    assert len({t.id for t in begun}) == len(begun), "begun twice"
    there = await everything(store)
    canceled = {id for (_, id), t in there.items() if t.status is Status.CANCELED}
    assert answers.count(True) == len(canceled)
    assert canceled.isdisjoint(t.id for t in begun)
    for t in begun:
        assert there["default", t.id] == t
    left = [t for t in there.values() if t.status is Status.PENDING]
    assert len(canceled) + len(begun) + len(left) == len(timers)
    assert not left, "a cancel lost without a winner"


@pytest.mark.parametrize("seed", range(4))
async def test_concurrent_update_and_begin_have_one_winner(store: Store, clock: ManualClock, seed: int) -> None:
    rng = random.Random(seed)
    held = await holding(store)
    timers = spread(40, at=START - 100)
    await with_timers(store, *timers)
    later = {
        t.id: lifecycle.amend(t, now=START, execute_at=START + 1, definition=definition(Raw(b"2"))) for t in timers
    }
    jobs: list[Coroutine[Any, Any, Any]] = [store.swap(t, later[t.id]) for t in timers]
    jobs += [store.begin(ALICE, held, 10) for _ in range(4)]
    rng.shuffle(jobs)
    answers = await asyncio.gather(*jobs)
    begun = {t.id: t for answer in answers if not isinstance(answer, bool) for t in answer.timers}
    assert answers.count(True) == len(timers) - len(begun)
    assert await everything(store) == {("default", t.id): begun.get(t.id, later[t.id]) for t in timers}
    clock.advance(1)
    again = (await store.begin(ALICE, held, 100)).timers
    assert {t.id for t in again} == later.keys() - begun.keys()
    assert all(bytes(t.definition.payload) == b"2" for t in again)
