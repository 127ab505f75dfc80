"""renew, claim, release, leave: who lives and owns which shard, at which version, until when; by the store's clock."""

from __future__ import annotations

import asyncio

from duetime.store import About, Instance
from tests.clocks import START, ManualClock
from tests.contract.timers import ALICE, BOB, CAROL, LEASE_MS, holding


async def test_at_first_every_shard_is_free(store) -> None:
    standing = await store.renew(ALICE, LEASE_MS)
    assert standing.now == START
    assert standing.held == {}
    assert standing.instances == {ALICE}
    assert standing.free == frozenset(range(store.shards))
    assert store.shards == 8


async def test_a_claim_takes_what_is_asked_for_and_nothing_else(store) -> None:
    assert await store.claim(ALICE, [2, 5], LEASE_MS) == {2: 1, 5: 1}
    standing = await store.renew(ALICE, LEASE_MS)
    assert standing.held == {2: 1, 5: 1}
    assert standing.free == frozenset({0, 1, 3, 4, 6, 7})
    assert (await store.renew(BOB, LEASE_MS)).held == {}


async def test_any_collection_of_shards_will_do(store) -> None:
    assert await store.claim(ALICE, [], LEASE_MS) == {}
    assert await store.claim(ALICE, {1}, LEASE_MS) == {1: 1}
    assert await store.claim(ALICE, range(2, 4), LEASE_MS) == {2: 1, 3: 1}
    assert await store.claim(ALICE, {4: "x"}.keys(), LEASE_MS) == {4: 1}
    await store.release(ALICE, [])
    await store.release(ALICE, {1: 1, 2: 1}.keys())
    assert (await store.renew(ALICE, LEASE_MS)).held == {3: 1, 4: 1}


async def test_a_leased_shard_is_not_taken_from_its_owner(store, clock: ManualClock) -> None:
    await holding(store, ALICE, 0, 1)
    clock.advance(LEASE_MS - 1)
    assert await store.claim(BOB, range(3), LEASE_MS) == {2: 1}
    assert (await store.renew(ALICE, LEASE_MS)).held == {0: 1, 1: 1}


async def test_a_lease_has_run_out_at_its_last_instant(store, clock: ManualClock) -> None:
    await holding(store, ALICE, 0)
    clock.advance(LEASE_MS - 1)
    assert 0 not in (await store.renew(BOB, LEASE_MS)).free
    assert await store.claim(BOB, [0], LEASE_MS) == {}
    clock.advance(1)
    assert 0 in (await store.renew(BOB, LEASE_MS)).free
    assert await store.claim(BOB, [0], LEASE_MS) == {0: 2}
    assert (await store.renew(ALICE, LEASE_MS)).held == {}
    assert await store.claim(ALICE, [0], LEASE_MS) == {}


async def test_every_claim_raises_the_version_by_one(store, clock: ManualClock) -> None:
    assert await store.claim(ALICE, [0], LEASE_MS) == {0: 1}
    assert await store.claim(ALICE, [0], LEASE_MS) == {0: 2}
    await store.release(ALICE, [0])
    assert await store.claim(BOB, [0], LEASE_MS) == {0: 3}
    clock.advance(LEASE_MS)
    assert await store.claim(CAROL, [0, 1], LEASE_MS) == {0: 4, 1: 1}
    clock.advance(10 * LEASE_MS)
    assert await store.claim(CAROL, [0, 1], LEASE_MS) == {0: 5, 1: 2}


async def test_a_claim_in_vain_leaves_version_and_lease_alone(store, clock: ManualClock) -> None:
    await holding(store, ALICE, 0)
    for _ in range(3):
        assert await store.claim(BOB, [0], 100 * LEASE_MS) == {}
    assert (await store.renew(ALICE, LEASE_MS)).held == {0: 1}
    clock.advance(LEASE_MS)
    assert await store.claim(BOB, [0], LEASE_MS) == {0: 2}


async def test_ones_own_claim_starts_a_new_lease(store, clock: ManualClock) -> None:
    await holding(store, ALICE, 0)
    clock.advance(LEASE_MS - 1)
    await holding(store, ALICE, 0)
    clock.advance(LEASE_MS - 1)
    assert await store.claim(BOB, [0], LEASE_MS) == {}
    clock.advance(1)
    assert await store.claim(BOB, [0], LEASE_MS) == {0: 3}


async def test_a_renewal_extends_every_lease_and_no_version(store, clock: ManualClock) -> None:
    await holding(store, ALICE, 0, 1, 2)
    await holding(store, BOB, 3)
    for _ in range(5):
        clock.advance(LEASE_MS - 1)
        standing = await store.renew(ALICE, LEASE_MS)
        assert standing.held == {0: 1, 1: 1, 2: 1}
        assert standing.now == clock.now()
    assert standing.free == frozenset({3, 4, 5, 6, 7})
    assert await store.claim(CAROL, range(4), LEASE_MS) == {3: 2}


async def test_a_renewal_counts_from_now_even_if_it_is_shorter(store, clock: ManualClock) -> None:
    await holding(store, ALICE, 0)
    await store.renew(ALICE, 10)
    clock.advance(10)
    assert await store.claim(BOB, [0], LEASE_MS) == {0: 2}


async def test_a_lease_that_ran_out_may_be_renewed_while_nobody_took_the_shard(store, clock: ManualClock) -> None:
    await holding(store, ALICE, 0, 1)
    clock.advance(LEASE_MS)
    assert await store.claim(BOB, [1], LEASE_MS) == {1: 2}
    standing = await store.renew(ALICE, LEASE_MS)
    assert standing.held == {0: 1}
    assert standing.free == frozenset(range(2, 8))
    assert await store.claim(BOB, [0], LEASE_MS) == {}


async def test_a_released_shard_is_free_at_once(store) -> None:
    await holding(store, ALICE, 0, 1)
    await store.release(ALICE, [0])
    standing = await store.renew(ALICE, LEASE_MS)
    assert standing.held == {1: 1}
    assert 0 in standing.free
    assert await store.claim(BOB, [0, 1], LEASE_MS) == {0: 2}


async def test_nobody_releases_the_shards_of_another(store) -> None:
    await holding(store, ALICE, 0)
    await store.release(BOB, [0, 1])
    assert await store.claim(BOB, [0], LEASE_MS) == {}
    assert (await store.renew(ALICE, LEASE_MS)).held == {0: 1}


async def test_instances_are_known_by_their_heartbeat_until_it_is_too_old(store, clock: ManualClock) -> None:
    await store.renew(ALICE, LEASE_MS)
    clock.advance(LEASE_MS // 2)
    assert (await store.renew(BOB, LEASE_MS)).instances == {ALICE, BOB}
    clock.advance(LEASE_MS // 2 - 1)
    assert (await store.renew(CAROL, LEASE_MS)).instances == {ALICE, BOB, CAROL}
    clock.advance(1)
    assert (await store.renew(CAROL, LEASE_MS)).instances == {BOB, CAROL}
    assert (await store.renew(ALICE, LEASE_MS)).instances == {ALICE, BOB, CAROL}
    clock.advance(LEASE_MS)
    assert (await store.renew(BOB, LEASE_MS)).instances == {BOB}


async def test_an_instance_that_holds_nothing_lives_all_the_same(store) -> None:
    await holding(store, ALICE)
    await store.renew(ALICE, LEASE_MS)
    standing = await store.renew(BOB, LEASE_MS)
    assert (standing.held, standing.free, standing.instances) == ({}, frozenset(), {ALICE, BOB})


async def test_of_many_claims_at_once_each_shard_has_one_winner(store) -> None:
    owners = [bytes([n]) * 16 for n in range(20)]
    claims = await asyncio.gather(*(store.claim(owner, range(store.shards), LEASE_MS) for owner in owners))
    won = [shard for claim in claims for shard in claim]
    assert sorted(won) == list(range(store.shards))
    assert all(version == 1 for claim in claims for version in claim.values())
    for owner, claim in zip(owners, claims, strict=True):
        assert (await store.renew(owner, LEASE_MS)).held == claim


async def test_no_version_is_given_twice_even_after_reopening(store, reopened, clock: ManualClock) -> None:
    before = await holding(store, ALICE) | await holding(store, ALICE, 3)
    again = await reopened(store)
    try:
        clock.advance(LEASE_MS)
        claimed = await again.claim(BOB, range(8), LEASE_MS)
        assert claimed.keys() == before.keys()
        assert all(claimed[shard] > version for shard, version in before.items())
    finally:
        await again.close()


# Who takes part.

SERVING = About(name="a:1", version="1.2", started_at=START, clock_offset_ms=-3)
WATCHING = About(name="«b»:2", serving=False)


async def test_only_those_that_are_serving_are_counted_on(store) -> None:
    assert (await store.renew(ALICE, LEASE_MS, SERVING)).instances == {ALICE}
    assert (await store.renew(BOB, LEASE_MS, WATCHING)).instances == {ALICE}
    assert (await store.renew(CAROL, LEASE_MS)).instances == {ALICE, CAROL}
    assert (await store.renew(ALICE, LEASE_MS, WATCHING)).instances == {CAROL}
    assert (await store.renew(BOB, LEASE_MS, SERVING)).instances == {BOB, CAROL}


async def test_an_instance_that_stops_serving_keeps_what_it_holds(store) -> None:
    held = await holding(store, ALICE, 1, 2)
    assert (await store.renew(ALICE, LEASE_MS, WATCHING)).held == held


async def test_the_cluster_is_everyone_that_lives_with_what_each_said_and_owns(store, clock: ManualClock) -> None:
    assert await store.cluster() == []
    await store.renew(BOB, LEASE_MS, WATCHING)
    await store.renew(ALICE, 2 * LEASE_MS, SERVING)
    await holding(store, ALICE, 5, 0, 3)
    alice = Instance(owner_id=ALICE, about=SERVING, alive_until=START + 2 * LEASE_MS, shards=(0, 3, 5))
    bob = Instance(owner_id=BOB, about=WATCHING, alive_until=START + LEASE_MS, shards=())
    assert await store.cluster() == [alice, bob]
    clock.advance(LEASE_MS)
    assert await store.cluster() == [alice]
    clock.advance(LEASE_MS)
    assert await store.cluster() == []


async def test_a_renewal_replaces_what_an_instance_said(store) -> None:
    await store.renew(ALICE, LEASE_MS, SERVING)
    await store.renew(ALICE, LEASE_MS, WATCHING)
    assert [instance.about for instance in await store.cluster()] == [WATCHING]


async def test_who_leaves_gives_everything_up_and_is_gone_at_once(store) -> None:
    for owner_id in (ALICE, BOB):
        await store.renew(owner_id, LEASE_MS)
    await holding(store, ALICE, 0, 1)
    await holding(store, BOB, 2)
    await store.leave(ALICE)
    assert [(i.owner_id, i.shards) for i in await store.cluster()] == [(BOB, (2,))]
    standing = await store.renew(BOB, LEASE_MS)
    assert standing.instances == {BOB}
    assert standing.free == frozenset(range(store.shards)) - {2}
    # The version goes on from where it was, so that nothing that was begun by the one who left is mistaken for ours.
    assert await store.claim(BOB, [0, 1], LEASE_MS) == {0: 2, 1: 2}


async def test_who_never_came_may_leave(store) -> None:
    await holding(store, ALICE, 0)
    await store.leave(CAROL)
    assert (await store.renew(ALICE, LEASE_MS)).held == {0: 1}


async def test_who_left_may_come_back(store) -> None:
    await store.renew(ALICE, LEASE_MS)
    await holding(store, ALICE)
    await store.leave(ALICE)
    standing = await store.renew(ALICE, LEASE_MS)
    assert (standing.held, standing.instances) == ({}, {ALICE})
    assert set((await holding(store, ALICE)).values()) == {2}


async def test_a_standing_says_when_the_next_of_the_others_leases_runs_out(store, clock: ManualClock) -> None:
    assert (await store.renew(ALICE, LEASE_MS)).free_at is None
    await holding(store, ALICE, 0)
    assert (await store.renew(ALICE, LEASE_MS)).free_at is None  # Its own does not count.
    await store.claim(BOB, [1, 2], LEASE_MS + 5)
    await store.claim(CAROL, [3], LEASE_MS + 3)
    assert (await store.renew(ALICE, LEASE_MS)).free_at == START + LEASE_MS + 3
    assert (await store.renew(CAROL, 4 * LEASE_MS)).free_at == START + LEASE_MS
    assert (await store.renew(ALICE, 9 * LEASE_MS)).free_at == START + LEASE_MS + 5
    clock.advance(LEASE_MS + 5)
    standing = await store.renew(ALICE, LEASE_MS)
    # What has run out is free already.
    assert (standing.free_at, {1, 2} <= standing.free) == (START + 4 * LEASE_MS, True)
    await store.leave(CAROL)
    assert (await store.renew(ALICE, LEASE_MS)).free_at is None
