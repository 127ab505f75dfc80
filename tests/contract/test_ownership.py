"""renew, claim, release: who owns a shard, at which version, until when; judged by the store's clock."""

from __future__ import annotations

import asyncio

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
