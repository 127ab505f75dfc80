"""The fence: only the owner in the shard's row, with the version in the row, can begin or record."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from duetime import lifecycle
from duetime.model import Status, Timer
from duetime.store import Begun, Portion, Store
from tests.clocks import START, ManualClock
from tests.contract.timers import (
    ALICE,
    BOB,
    CAROL,
    EVERYTHING,
    LEASE_MS,
    completed,
    everything,
    holding,
    ids,
    spread,
    timer,
    with_timers,
)


async def by_age(store: Store, owner_id: bytes, held: dict[int, int], limit: int) -> Begun:
    return await store.begin(owner_id, held, limit)


async def by_lane(store: Store, owner_id: bytes, held: dict[int, int], limit: int) -> Begun:
    return await store.begin_lanes(owner_id, held, limit, [Portion(LANE, limit)])


Begin = Callable[[Store, bytes, dict[int, int], int], Awaitable[Begun]]
BEGINS: list[Begin] = [by_age, by_lane]
LANE = timer().lane
"""The lane of all timers in these tests."""


async def begun_by_alice(store: Store) -> tuple[dict[int, int], list[Timer]]:
    """Alice holds all shards, has begun eight timers, and eight more are due."""
    held = await holding(store, ALICE)
    await with_timers(store, *spread(8, at=START - 20), *spread(8, at=START - 10, prefix="due"))
    return held, (await store.begin(ALICE, held, 8)).timers


async def assert_powerless(store: Store, owner_id: bytes, held: dict[int, int], begun: list[Timer]) -> None:
    """Calls of this owner with these versions change nothing and report that."""
    before, tally = await everything(store), await store.tally()
    for answer in (
        await store.begin(owner_id, held, EVERYTHING),
        await store.begin_lanes(owner_id, held, EVERYTHING, [Portion(LANE, EVERYTHING)]),
    ):
        assert answer.timers == []
        assert answer.refused == frozenset(held)
        assert answer.next_at is None
        assert answer.lanes == {}
    for settled in (completed, deferred):  # one makes the timer final, the other keeps it live
        assert await store.record(owner_id, [(t, settled(t)) for t in begun]) == [False] * len(begun)
    assert await everything(store) == before
    assert await store.tally() == tally


def deferred(timer: Timer) -> Timer:
    return lifecycle.defer(timer, fire_at=START, now=START)


async def test_replaced_owner_with_an_expired_lease_changes_nothing(store: Store, clock: ManualClock) -> None:
    held, begun = await begun_by_alice(store)
    clock.advance(LEASE_MS)
    assert await store.claim(BOB, range(store.shards), LEASE_MS) == {shard: 2 for shard in held}
    await assert_powerless(store, ALICE, held, begun)


async def test_current_version_without_ownership_changes_nothing(store: Store, clock: ManualClock) -> None:
    _, begun = await begun_by_alice(store)
    clock.advance(LEASE_MS)
    theirs = await holding(store, BOB)
    await assert_powerless(store, ALICE, theirs, begun)


async def test_other_owner_with_the_same_version_changes_nothing(store: Store) -> None:
    held, begun = await begun_by_alice(store)
    await assert_powerless(store, BOB, held, begun)


async def test_former_version_after_losing_and_reclaiming_changes_nothing(store: Store, clock: ManualClock) -> None:
    held, begun = await begun_by_alice(store)
    await store.release(ALICE, held)
    await holding(store, BOB)
    clock.advance(LEASE_MS)
    assert set((await holding(store, ALICE)).values()) == {3}
    await assert_powerless(store, ALICE, held, begun)


async def test_owner_with_an_older_version_changes_nothing(store: Store) -> None:
    held, begun = await begun_by_alice(store)
    again = await holding(store, ALICE)
    await assert_powerless(store, ALICE, held, begun)
    assert len((await store.begin(ALICE, again, EVERYTHING)).timers) == 8


async def test_owner_with_a_future_version_changes_nothing(store: Store) -> None:
    held, _ = await begun_by_alice(store)
    await assert_powerless(store, ALICE, {shard: version + 1 for shard, version in held.items()}, [])


async def test_owner_that_released_its_shards_changes_nothing(store: Store) -> None:
    held, begun = await begun_by_alice(store)
    await store.release(ALICE, held)
    await assert_powerless(store, ALICE, held, begun)


async def test_instance_that_never_claimed_changes_nothing(store: Store) -> None:
    await with_timers(store, *spread(8))
    for version in (0, 1):
        await assert_powerless(store, CAROL, dict.fromkeys(range(store.shards), version), [])


async def test_owner_with_an_expired_but_unclaimed_lease_can_still_write(store: Store, clock: ManualClock) -> None:
    # The fence is the row, not the time: no other instance can have begun anything in between.
    held, begun = await begun_by_alice(store)
    clock.advance(LEASE_MS + 1)
    assert await store.record(ALICE, [(t, completed(t)) for t in begun]) == [True] * 8
    assert len((await store.begin(ALICE, held, EVERYTHING)).timers) == 8


@pytest.mark.parametrize("begin", BEGINS, ids=["by age", "by lane"])
async def test_each_shard_is_fenced_separately(store: Store, clock: ManualClock, begin: Begin) -> None:
    held, begun = await begun_by_alice(store)
    clock.advance(LEASE_MS)
    assert await store.claim(BOB, [1, 3, 5], LEASE_MS) == {1: 2, 3: 2, 5: 2}
    lost = {"t1", "t3", "t5"}
    answer = await begin(store, ALICE, held, EVERYTHING)
    assert answer.refused == frozenset({1, 3, 5})
    assert ids(answer.timers) == [f"due{n}" for n in (0, 2, 4, 6, 7)]
    random.Random(5).shuffle(begun)
    changes = [(t, completed(t, clock.now())) for t in begun]
    assert await store.record(ALICE, changes) == [t.id not in lost for t in begun]
    there = await everything(store)
    for before, after in changes:
        assert there["default", before.id] == (before if before.id in lost else after)
    assert (await store.tally())[Status.COMPLETED] == 5


@pytest.mark.parametrize("begin", BEGINS, ids=["by age", "by lane"])
async def test_due_timers_of_refused_shards_do_not_hide_others(store: Store, clock: ManualClock, begin: Begin) -> None:
    held = await holding(store, ALICE)
    await with_timers(store, *(timer(f"r{n}", at=START - 100 + n, shard=0) for n in range(50)), timer("mine", shard=1))
    clock.advance(LEASE_MS)
    await holding(store, BOB, 0)
    answer = await begin(store, ALICE, held, 3)
    assert ids(answer.timers) == ["mine"]
    assert answer.refused == frozenset({0})


async def test_only_the_new_owner_can_record_an_attempt_it_took_over(store: Store, clock: ManualClock) -> None:
    _, begun = await begun_by_alice(store)
    clock.advance(10**6)
    theirs = await holding(store, BOB)
    again = {t.id: t for t in (await store.begin(BOB, theirs, EVERYTHING)).timers}
    late = [(t, completed(t)) for t in begun]
    assert await store.record(ALICE, late) == [False] * 8
    # Not even with the version that the store would accept from the owner.
    assert await store.record(ALICE, [(t, completed(t)) for t in again.values()]) == [False] * 16
    # Nor can the new owner record an outcome of the old owner's attempt.
    assert await store.record(BOB, late) == [False] * 8
    assert await store.record(BOB, [(t, completed(t)) for t in again.values()]) == [True] * 16
    assert (await store.tally())[Status.COMPLETED] == 16


@pytest.mark.parametrize("seed", range(5))
async def test_concurrent_owners_begin_and_record_only_their_own_timers(
    store: Store, clock: ManualClock, seed: int
) -> None:
    """Three owners claim, begin and record concurrently: one owner begins each timer, and only that one records it."""
    rng = random.Random(seed)
    owners = [ALICE, BOB, CAROL]
    await with_timers(store, *spread(80, at=START - 100))
    begun: list[tuple[bytes, Timer]] = []
    recorded: dict[str, Timer] = {}

    async def live(owner_id: bytes) -> None:
        for _ in range(6):
            held = await store.claim(owner_id, rng.sample(range(8), 4), 1)
            clock.advance(1)
            answer = await rng.choice(BEGINS)(store, owner_id, held, rng.randrange(1, 9))
            begun.extend((owner_id, t) for t in answer.timers)
            changes = [(t, completed(t, clock.now())) for t in answer.timers]
            for (_, after), done in zip(changes, await store.record(owner_id, changes), strict=True):
                if done:
                    assert after.id not in recorded, "recorded twice"
                    recorded[after.id] = after

    await asyncio.gather(*(live(owner_id) for owner_id in owners))
    there = await everything(store)
    assert len({t.revision for _, t in begun}) == len(begun)
    assert {id: t for (_, id), t in there.items() if t.status is Status.COMPLETED} == recorded
    in_flight = {t.id for _, t in begun} - recorded.keys()
    assert {id for (_, id), t in there.items() if t.status is Status.EXECUTING} == in_flight
    # No deadline has passed, so no timer was begun twice.
    assert len({t.id for _, t in begun}) == len(begun)
