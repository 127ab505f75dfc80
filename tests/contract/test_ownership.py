"""renew, claim, release, leave: live instances, owners, versions and leases, by the store's clock."""

from __future__ import annotations

import asyncio

from duetime.store import About, Instance, Store
from tests.clocks import START, ManualClock
from tests.contract.stores import Reopen
from tests.contract.timers import ALICE, BOB, CAROL, LEASE_MS, holding


async def test_every_shard_is_free_at_first(store: Store) -> None:
    renewal = await store.renew(ALICE, LEASE_MS)
    assert renewal.now == START
    assert renewal.held == {}
    assert renewal.instances == {ALICE}
    assert renewal.free == frozenset(range(store.shards))
    assert store.shards == 8


async def test_claim_takes_exactly_the_requested_shards(store: Store) -> None:
    assert await store.claim(ALICE, [2, 5], LEASE_MS) == {2: 1, 5: 1}
    renewal = await store.renew(ALICE, LEASE_MS)
    assert renewal.held == {2: 1, 5: 1}
    assert renewal.free == frozenset({0, 1, 3, 4, 6, 7})
    assert (await store.renew(BOB, LEASE_MS)).held == {}


async def test_claim_accepts_any_collection(store: Store) -> None:
    assert await store.claim(ALICE, [], LEASE_MS) == {}
    assert await store.claim(ALICE, {1}, LEASE_MS) == {1: 1}
    assert await store.claim(ALICE, range(2, 4), LEASE_MS) == {2: 1, 3: 1}
    assert await store.claim(ALICE, {4: "x"}.keys(), LEASE_MS) == {4: 1}
    await store.release(ALICE, [])
    await store.release(ALICE, {1: 1, 2: 1}.keys())
    assert (await store.renew(ALICE, LEASE_MS)).held == {3: 1, 4: 1}


async def test_leased_shard_can_not_be_claimed(store: Store, clock: ManualClock) -> None:
    await holding(store, ALICE, 0, 1)
    clock.advance(LEASE_MS - 1)
    assert await store.claim(BOB, range(3), LEASE_MS) == {2: 1}
    assert (await store.renew(ALICE, LEASE_MS)).held == {0: 1, 1: 1}


async def test_lease_has_expired_at_its_last_instant(store: Store, clock: ManualClock) -> None:
    await holding(store, ALICE, 0)
    clock.advance(LEASE_MS - 1)
    assert 0 not in (await store.renew(BOB, LEASE_MS)).free
    assert await store.claim(BOB, [0], LEASE_MS) == {}
    clock.advance(1)
    assert 0 in (await store.renew(BOB, LEASE_MS)).free
    assert await store.claim(BOB, [0], LEASE_MS) == {0: 2}
    assert (await store.renew(ALICE, LEASE_MS)).held == {}
    assert await store.claim(ALICE, [0], LEASE_MS) == {}


async def test_every_claim_increments_the_version(store: Store, clock: ManualClock) -> None:
    assert await store.claim(ALICE, [0], LEASE_MS) == {0: 1}
    assert await store.claim(ALICE, [0], LEASE_MS) == {0: 2}
    await store.release(ALICE, [0])
    assert await store.claim(BOB, [0], LEASE_MS) == {0: 3}
    clock.advance(LEASE_MS)
    assert await store.claim(CAROL, [0, 1], LEASE_MS) == {0: 4, 1: 1}
    clock.advance(10 * LEASE_MS)
    assert await store.claim(CAROL, [0, 1], LEASE_MS) == {0: 5, 1: 2}


async def test_failed_claim_changes_neither_version_nor_lease(store: Store, clock: ManualClock) -> None:
    await holding(store, ALICE, 0)
    for _ in range(3):
        assert await store.claim(BOB, [0], 100 * LEASE_MS) == {}
    assert (await store.renew(ALICE, LEASE_MS)).held == {0: 1}
    clock.advance(LEASE_MS)
    assert await store.claim(BOB, [0], LEASE_MS) == {0: 2}


async def test_claiming_an_own_shard_starts_a_new_lease(store: Store, clock: ManualClock) -> None:
    await holding(store, ALICE, 0)
    clock.advance(LEASE_MS - 1)
    await holding(store, ALICE, 0)
    clock.advance(LEASE_MS - 1)
    assert await store.claim(BOB, [0], LEASE_MS) == {}
    clock.advance(1)
    assert await store.claim(BOB, [0], LEASE_MS) == {0: 3}


async def test_renewal_extends_all_leases_and_keeps_versions(store: Store, clock: ManualClock) -> None:
    await holding(store, ALICE, 0, 1, 2)
    await holding(store, BOB, 3)
    for _ in range(5):
        clock.advance(LEASE_MS - 1)
        renewal = await store.renew(ALICE, LEASE_MS)
        assert renewal.held == {0: 1, 1: 1, 2: 1}
        assert renewal.now == clock.now()
    assert renewal.free == frozenset({3, 4, 5, 6, 7})
    assert await store.claim(CAROL, range(4), LEASE_MS) == {3: 2}


async def test_renewal_counts_from_now_even_if_that_shortens_the_lease(store: Store, clock: ManualClock) -> None:
    await holding(store, ALICE, 0)
    await store.renew(ALICE, 10)
    clock.advance(10)
    assert await store.claim(BOB, [0], LEASE_MS) == {0: 2}


async def test_expired_lease_can_be_renewed_if_the_shard_is_unclaimed(store: Store, clock: ManualClock) -> None:
    await holding(store, ALICE, 0, 1)
    clock.advance(LEASE_MS)
    assert await store.claim(BOB, [1], LEASE_MS) == {1: 2}
    renewal = await store.renew(ALICE, LEASE_MS)
    assert renewal.held == {0: 1}
    assert renewal.free == frozenset(range(2, 8))
    assert await store.claim(BOB, [0], LEASE_MS) == {}


async def test_released_shard_is_free_at_once(store: Store) -> None:
    await holding(store, ALICE, 0, 1)
    await store.release(ALICE, [0])
    renewal = await store.renew(ALICE, LEASE_MS)
    assert renewal.held == {1: 1}
    assert 0 in renewal.free
    assert await store.claim(BOB, [0, 1], LEASE_MS) == {0: 2}


async def test_release_ignores_shards_of_other_owners(store: Store) -> None:
    await holding(store, ALICE, 0)
    await store.release(BOB, [0, 1])
    assert await store.claim(BOB, [0], LEASE_MS) == {}
    assert (await store.renew(ALICE, LEASE_MS)).held == {0: 1}


async def test_instance_is_live_until_its_heartbeat_expires(store: Store, clock: ManualClock) -> None:
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


async def test_instance_without_shards_is_live(store: Store) -> None:
    await holding(store, ALICE)
    await store.renew(ALICE, LEASE_MS)
    renewal = await store.renew(BOB, LEASE_MS)
    assert (renewal.held, renewal.free, renewal.instances) == ({}, frozenset(), frozenset({ALICE, BOB}))


async def test_concurrent_claims_have_one_winner_per_shard(store: Store) -> None:
    owners = [bytes([n]) * 16 for n in range(20)]
    claims = await asyncio.gather(*(store.claim(owner, range(store.shards), LEASE_MS) for owner in owners))
    won = [shard for claim in claims for shard in claim]
    assert sorted(won) == list(range(store.shards))
    assert all(version == 1 for claim in claims for version in claim.values())
    for owner, claim in zip(owners, claims, strict=True):
        assert (await store.renew(owner, LEASE_MS)).held == claim


async def test_versions_are_never_reused_even_after_reopening(
    store: Store, reopened: Reopen, clock: ManualClock
) -> None:
    before = await holding(store, ALICE) | await holding(store, ALICE, 3)
    again = await reopened(store)
    try:
        clock.advance(LEASE_MS)
        claimed = await again.claim(BOB, range(8), LEASE_MS)
        assert claimed.keys() == before.keys()
        assert all(claimed[shard] > version for shard, version in before.items())
    finally:
        await again.close()


# Live instances.

SERVING = About(name="a:1", version="1.2", started_at=START, clock_offset_ms=-3)
WATCHING = About(name="«b»:2", serving=False)


async def test_standing_lists_only_serving_instances(store: Store) -> None:
    assert (await store.renew(ALICE, LEASE_MS, SERVING)).instances == {ALICE}
    assert (await store.renew(BOB, LEASE_MS, WATCHING)).instances == {ALICE}
    assert (await store.renew(CAROL, LEASE_MS)).instances == {ALICE, CAROL}
    assert (await store.renew(ALICE, LEASE_MS, WATCHING)).instances == {CAROL}
    assert (await store.renew(BOB, LEASE_MS, SERVING)).instances == {BOB, CAROL}


async def test_instance_that_stops_serving_keeps_its_shards(store: Store) -> None:
    held = await holding(store, ALICE, 1, 2)
    assert (await store.renew(ALICE, LEASE_MS, WATCHING)).held == held


async def test_cluster_lists_live_instances_with_their_report_and_shards(store: Store, clock: ManualClock) -> None:
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


async def test_renewal_replaces_the_report_of_an_instance(store: Store) -> None:
    await store.renew(ALICE, LEASE_MS, SERVING)
    await store.renew(ALICE, LEASE_MS, WATCHING)
    assert [instance.about for instance in await store.cluster()] == [WATCHING]


async def test_leaving_instance_releases_all_shards_and_is_removed(store: Store) -> None:
    for owner_id in (ALICE, BOB):
        await store.renew(owner_id, LEASE_MS)
    await holding(store, ALICE, 0, 1)
    await holding(store, BOB, 2)
    await store.leave(ALICE)
    assert [(i.owner_id, i.shards) for i in await store.cluster()] == [(BOB, (2,))]
    renewal = await store.renew(BOB, LEASE_MS)
    assert renewal.instances == {BOB}
    assert renewal.free == frozenset(range(store.shards)) - {2}
    # The version continues to grow, so that attempts of the instance that left are not mistaken for ours.
    assert await store.claim(BOB, [0, 1], LEASE_MS) == {0: 2, 1: 2}


async def test_unknown_instance_can_leave(store: Store) -> None:
    await holding(store, ALICE, 0)
    await store.leave(CAROL)
    assert (await store.renew(ALICE, LEASE_MS)).held == {0: 1}


async def test_instance_can_return_after_leaving(store: Store) -> None:
    await store.renew(ALICE, LEASE_MS)
    await holding(store, ALICE)
    await store.leave(ALICE)
    renewal = await store.renew(ALICE, LEASE_MS)
    assert (renewal.held, renewal.instances) == ({}, frozenset({ALICE}))
    assert set((await holding(store, ALICE)).values()) == {2}


async def test_standing_has_the_earliest_expiry_of_other_leases(store: Store, clock: ManualClock) -> None:
    assert (await store.renew(ALICE, LEASE_MS)).free_at is None
    await holding(store, ALICE, 0)
    assert (await store.renew(ALICE, LEASE_MS)).free_at is None  # Its own lease does not count.
    await store.claim(BOB, [1, 2], LEASE_MS + 5)
    await store.claim(CAROL, [3], LEASE_MS + 3)
    assert (await store.renew(ALICE, LEASE_MS)).free_at == START + LEASE_MS + 3
    assert (await store.renew(CAROL, 4 * LEASE_MS)).free_at == START + LEASE_MS
    assert (await store.renew(ALICE, 9 * LEASE_MS)).free_at == START + LEASE_MS + 5
    clock.advance(LEASE_MS + 5)
    renewal = await store.renew(ALICE, LEASE_MS)
    # A shard with an expired lease is free already.
    assert (renewal.free_at, {1, 2} <= renewal.free) == (START + 4 * LEASE_MS, True)
    await store.leave(CAROL)
    assert (await store.renew(ALICE, LEASE_MS)).free_at is None
