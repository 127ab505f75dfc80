"""The shards of timers, and the instances that should own them."""

from __future__ import annotations

from collections import Counter

from duetime.sharding import assigned, shard_of

# Databases contain these shards: with other results, timers would not be found.
KNOWN = [("default", "a", 64, 64), ("default", "b", 64, 64), ("billing", "order-1", 4, 64)]


def test_shards_of_timers_are_stable() -> None:
    found = [shard_of(ns, id, namespace_shards=of, shards=n) for ns, id, of, n in KNOWN]
    assert found == [48, 61, 42]


def test_a_namespace_stays_within_its_shards_and_uses_them_all() -> None:
    for spread in (1, 3, 64):
        used = {shard_of("billing", f"timer-{n}", namespace_shards=spread, shards=64) for n in range(2_000)}
        assert len(used) == spread


def test_timers_are_spread_evenly() -> None:
    counts = Counter(shard_of("default", f"timer-{n}", namespace_shards=64, shards=64) for n in range(64_000))
    assert min(counts.values()) > 850 and max(counts.values()) < 1_150


def test_every_shard_has_exactly_one_owner() -> None:
    instances = [bytes([n]) * 16 for n in range(5)]
    owned = [assigned(owner, instances, range(64)) for owner in instances]
    assert sorted(shard for shards in owned for shard in shards) == list(range(64))
    assert all(owned)


def test_a_leaving_instance_moves_only_its_own_shards() -> None:
    instances = [bytes([n]) * 16 for n in range(5)]
    before = {owner: assigned(owner, instances, range(64)) for owner in instances}
    after = {owner: assigned(owner, instances[:-1], range(64)) for owner in instances[:-1]}
    for owner, shards in after.items():
        assert before[owner] <= shards
