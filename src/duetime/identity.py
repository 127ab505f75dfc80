"""Ids of new timers, and fingerprints that distinguish a repeated create request from a conflicting one."""

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
    """Random UUIDs with a time prefix, so that timers created together are close together in an index. Random bytes are
    read for many ids at once, because the system call costs more than everything else here."""
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
_digest = blake2b(digest_size=8)  # copying it costs half as much as creating one


def fingerprint_of(definition: Definition, *parts: object, delay_ms: int | None = None) -> str:
    """A short digest of a create request's meaning: equal for a repeat, even if its JSON is formatted differently. A
    request with a delay gives that in place of its time, because a repeat has another time."""
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
    return digest.hexdigest() if delay_ms is None else f"{digest.hexdigest()}+{delay_ms}"


def is_repeat(fingerprint: str, first: str) -> bool:
    """Whether a request with this fingerprint repeats the one with the fingerprint ``first``. Older versions stored no
    delay."""
    return fingerprint == first or fingerprint.partition("+")[0] == first


def _meant(value: Raw) -> tuple[object, ...]:
    """A JSON value without its formatting; an empty tuple if it is absent, which differs from null."""
    return (msgspec.json.decode(value),) if value else ()


def id_of_key(key: str) -> str:
    """The id for an idempotency key: a UUID that is always the same for the same key."""
    digest = blake2b(key.encode(), digest_size=16, person=b"duetime-idem").digest()
    return str(uuid.UUID(bytes=digest, version=4))
