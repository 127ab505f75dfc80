"""Ids of new timers, and fingerprints that tell a repeat of a create request from a conflict."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from hashlib import blake2b

import msgspec
from msgspec import Raw

from duetime.clock import Clock
from duetime.model import Definition

IDS_AT_ONCE = 256

_VARIANTS = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}


def new_ids(clock: Clock) -> Iterator[str]:
    """UUIDs that begin with the time, so that those of timers that are made together lie together in an index; the rest
    is random. Asking the system for it costs more than all the rest: it is asked for many."""
    at, begins = -1, ""
    while True:
        drawn = os.urandom(10 * IDS_AT_ONCE).hex()
        for start in range(0, len(drawn), 20):
            if at != (now := clock.now()):
                at, t = now, f"{now:012x}"
                begins = f"{t[:8]}-{t[8:]}-4"
            h = drawn[start : start + 20]
            yield f"{begins}{h[1:4]}-{_VARIANTS[h[4]]}{h[5:8]}-{h[8:]}"


_encode = msgspec.json.Encoder(order="deterministic").encode
_digest = blake2b(digest_size=8)  # a copy costs half of a new one


def fingerprint_of(definition: Definition, *parts: object) -> str:
    """A short digest of what a create request means: equal for a repeat, however it is spelled."""
    meant = (
        definition.target,
        _meant(definition.payload),
        _meant(definition.metadata),
        msgspec.structs.astuple(definition.retry),
        (definition.timeout_ms, definition.body, definition.protocol),
        parts,
    )
    digest = _digest.copy()
    digest.update(_encode(meant))
    return digest.hexdigest()


def _meant(value: Raw) -> tuple[object, ...]:
    """A JSON value without its spelling; nothing at all for one that was not given, which is not the same as null."""
    return (msgspec.json.decode(value),) if value else ()


def id_of_key(key: str) -> str:
    """The id that an idempotency key stands for: a UUID of the shape of any other, the same for the same key."""
    digest = blake2b(key.encode(), digest_size=16, person=b"duetime-idem").digest()
    return str(uuid.UUID(bytes=digest, version=4))
