"""Maps timers to shards and shards to instances. Pure functions with the same result on every machine."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from hashlib import blake2b

_HASH = blake2b(digest_size=8, person=b"duetime-shard")


def _hash(*parts: bytes) -> int:
    hashed = _HASH.copy()
    hashed.update(b"\0".join(parts))
    return int.from_bytes(hashed.digest(), "big")


@lru_cache(maxsize=4096)
def _namespace_hash(namespace: str) -> int:
    return _hash(namespace.encode())


def shard_of(namespace: str, id: str, *, namespace_shards: int, shards: int) -> int:
    """The shard of a timer. A namespace uses ``namespace_shards`` consecutive shards from its own start."""
    hashed = _HASH.copy()
    hashed.update(id.encode())
    return (_namespace_hash(namespace) + int.from_bytes(hashed.digest(), "big") % namespace_shards) % shards


def assigned(owner_id: bytes, instances: Collection[bytes], shards: Iterable[int]) -> set[int]:
    """The shards that rendezvous hashing gives to ``owner_id`` among the live ``instances``.

    Each shard goes to the instance with the highest score for it. So when an instance joins or leaves, only the shards
    that it gains or loses move.
    """

    def score(instance: bytes, shard: int) -> tuple[int, bytes]:
        return _hash(instance, shard.to_bytes(4, "big")), instance

    return {s for s in shards if max(score(i, s) for i in {*instances, owner_id})[1] == owner_id}
