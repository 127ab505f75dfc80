"""Timers for tests, and common first steps of tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import blake2b
from itertools import count
from typing import Any

import msgspec
from msgspec import Raw

from duetime import lifecycle
from duetime.instants import FireAt, Instant
from duetime.model import (
    ABSENT,
    Attempt,
    BodyFormat,
    Definition,
    HttpTarget,
    Namespace,
    NatsTarget,
    Outcome,
    OutcomeKind,
    ResponseProtocol,
    RetryPolicy,
    Status,
    Target,
    Timer,
    destination_of,
    lane_of,
    replace,
)
from duetime.store import Order, Portion, Query, Store
from tests.clocks import START

ALICE, BOB, CAROL = b"alice".ljust(16, b"."), b"bob".ljust(16, b"."), b"carol".ljust(16, b".")
LEASE_MS = 10_000
EVERYTHING = 10_000
"""A limit that no test reaches."""

DELIVERED = Outcome(kind=OutcomeKind.ANSWERED, status=200, body=b'{"ok": true}')
BROKEN = Outcome(kind=OutcomeKind.ANSWERED, status=500, error='HTTP 500: odd «text» with "quotes", \\ and \n')

_revisions = count(1 << 40, 1000)


def definition(payload: Raw = ABSENT, **changes: Any) -> Definition:
    return Definition(target=HttpTarget(url="https://example.org/due"), payload=payload, **changes)


def timer(id: str = "a", *, at: int = START, namespace: str = "default", shard: int = 0, **changes: Any) -> Timer:
    """A pending timer due at ``at``, with a unique revision."""
    revision = next(_revisions)
    fields: dict[str, Any] = {
        "definition": definition(),
        "execute_at": at,
        "fire_at": at,
        "created_at": START,
        "updated_at": START,
        "revision": revision,
        "firing": revision,
    }
    return Timer(namespace=namespace, id=id, shard=shard, **(fields | changes))


FULL = timer(
    "every field — has a value",
    shard=5,
    at=START + 7,
    definition=Definition(
        target=HttpTarget(url="https://example.org/é?a=1&b='\"", method="PUT", headers={"X-B": "2", "X-A": "ü\t\\"}),
        payload=Raw(b'{"b":1,  "a" :[ 1e3,\t-0.0 ]}'),
        metadata=Raw('{"who":"Zoë 😀"}'.encode()),
        retry=RetryPolicy(
            max_retries=17,
            max_duration_ms=3,
            initial_interval_ms=1,
            backoff_multiplier=1.1,
            max_interval_ms=9,
            jitter=False,
            give_up_on=(404, 410),
        ),
        timeout_ms=1234,
        body=BodyFormat.EVENT,
        protocol=ResponseProtocol.STATUS,
    ),
    execute_at=START - 5,
    created_at=START - 100,
    updated_at=START - 1,
    revision=(1 << 62) + 1,
    firing=(1 << 48) - 1,
    fingerprint="0123456789abcdef",
    correlation_id="order/4711 'x'",
    status=Status.EXECUTING,
    attempt=4,
    failures=2,
    lost=1,
    last_error='it said "no" \\ and then 😀\n\x01',
    started_at=START - 50,
    executed_at=START - 2,
    deadline_at=START + 90,
    version=3,
    attempts=(Attempt(1, START - 5, 4, OutcomeKind.ANSWERED, 500, "HTTP 500", "«oops»\n", 7),),
)
"""An artificial timer that sets every field."""

PLAIN = timer("no optional field has a value", definition=Definition(target=NatsTarget(subject="a.b")))


def changed(timer: Timer, **changes: Any) -> Timer:
    """The same timer with some fields changed and the same revision."""
    return msgspec.structs.replace(timer, **changes)


def another(timer: Timer) -> Timer:
    """A different, new timer with the same identity."""
    other = changed(timer, revision=next(_revisions), definition=definition(Raw(b'"another"')), fingerprint="another")
    return as_new(other)


def touched(timer: Timer) -> Timer:
    return replace(timer, updated_at=timer.updated_at + 1)


def completed(timer: Timer, now: Instant = START) -> Timer:
    return lifecycle.settle(timer, DELIVERED, sent_at=now, now=now, uniform=lambda low, high: high)


def ended(id: str, status: Status, *, at: int = START, **changes: Any) -> Timer:
    """A timer that became final at ``at``."""
    return timer(id, status=status, updated_at=at, executed_at=at, **changes)


def spread(number: int, *, at: int = START, step_ms: int = 1, shards: int = 8, prefix: str = "t") -> list[Timer]:
    """Timers one after another in time, round robin over the shards."""
    return [timer(f"{prefix}{n}", at=at + n * step_ms, shard=n % shards) for n in range(number)]


OLD_IDS = (
    "a",
    "01a1e332-1e2e-4b02-a550-950f2b9fe475",
    "01A1E332-1E2E-4B02-A550-950F2B9FE475",
    "01a1e332-1e2e-4b02-a550-950f2b9fe47",
)
"""Ids of timers in a database from before keys started like ids: plain, UUIDs in either case, and almost a UUID."""


def old_key(timer: Timer) -> bytes:
    """The key that such a timer had: only the hash."""
    return blake2b(f"{timer.namespace}\0{timer.id}".encode(), digest_size=16, person=b"duetime-timer").digest()


OLD_TARGETS: tuple[Target, ...] = (
    *(
        HttpTarget(url=url, headers={"X-Url": "https://elsewhere.example"})
        for url in (
            "https://example.org",
            "https://example.org/due",
            "https://example.org:443?a=1",
            "https://example.org:8443/due",
            "HTTPS://Example.ORG/Due",
            "http://example.org#here",
            "http://example.org:80",
            "http://example.org:8080/?to=https://elsewhere.example:1/",
            "http://example.org.:8080/",
            'http://10.1.2.3/"quoted"',
            "http://[::1]:9000/",
            "http://[2001:db8::1]",
        )
    ),
    NatsTarget(subject="due.now", headers={"url": "http://example.org"}),
)
"""Targets of timers in a database from before lanes existed; some share a lane."""


def in_old_lanes(at: int = START - 1) -> list[Timer]:
    """A timer for each of these targets, with a payload that databases can't parse as JSON."""
    definitions = (Definition(target=target, payload=Raw(rb'{"nul": "\u0000"}')) for target in OLD_TARGETS)
    return [timer(f"t{n}", at=at, shard=n % 8, definition=each) for n, each in enumerate(definitions)]


def ids(timers: Sequence[Timer]) -> list[str]:
    return [timer.id for timer in timers]


def as_new(timer: Timer) -> Timer:
    """The timer as it was created, but with its current revision."""
    return Timer(
        namespace=timer.namespace,
        id=timer.id,
        shard=timer.shard,
        definition=timer.definition,
        execute_at=timer.execute_at,
        fire_at=FireAt(timer.execute_at),
        created_at=timer.created_at,
        updated_at=timer.created_at,
        revision=timer.revision,
        firing=timer.revision,
        fingerprint=timer.fingerprint,
        correlation_id=timer.correlation_id,
    )


async def with_timers(store: Store, *timers: Timer) -> None:
    """Put these timers into the store, in whatever state."""
    new = [as_new(timer) for timer in timers]
    assert await store.put_many(new) == [None] * len(timers)
    changes = [(before, after) for before, after in zip(new, timers, strict=True) if before != after]
    assert all(await asyncio.gather(*(store.swap(before, after) for before, after in changes)))


async def existing(store: Store, id: str) -> Timer:
    """The timer with this id, which must exist."""
    timer = await store.get("default", id)
    assert timer is not None, f"{id} does not exist"
    return timer


async def with_namespace(store: Store, name: str, **fields: Any) -> Namespace:
    namespace = Namespace(name=name, shards=store.shards, created_at=START, **fields)
    assert await store.put_namespace(namespace) is None
    return namespace


def changed_to(namespace: Namespace, **changes: Any) -> Namespace:
    """The namespace after a change, with its next revision."""
    return msgspec.structs.replace(namespace, revision=namespace.revision + 1, **changes)


async def switch(store: Store, namespace: Namespace, **changes: Any) -> Namespace:
    """Change the namespace in the store and return it."""
    after = changed_to(namespace, **changes)
    assert await store.swap_namespace(namespace, after)
    return after


async def holding(store: Store, owner_id: bytes = ALICE, *shards: int) -> dict[int, int]:
    """Claim these shards, or all, for the owner."""
    wanted = shards or range(store.shards)
    held = await store.claim(owner_id, wanted, LEASE_MS)
    assert set(held) == set(wanted)
    return held


async def everything(store: Store) -> dict[tuple[str, str], Timer]:
    """Every timer in the store, newest first in each namespace."""
    if Order.NEWEST not in store.abilities.orders:
        return {(t.namespace, t.id): t for t in await store.all_timers()}  # type: ignore[attr-defined]
    pages = await asyncio.gather(
        *(store.page_by_offset(Query(namespace=n.name, limit=EVERYTHING)) for n in await store.namespaces())
    )
    return {(t.namespace, t.id): t for page in pages for t in page}


async def assert_old_lanes_fire(store: Store, paused: Namespace, final: Timer) -> None:
    """Assert that the timers of ``in_old_lanes`` begin by lane, as do five timers each of two namespaces, one of which
    is still paused, and a replayed final timer."""
    old = in_old_lanes()
    held = await holding(store)
    found = {lane.lane: lane for lane in (await store.lanes(START)).lanes}
    assert {(lane.namespace, lane.destination) for lane in found.values()} == {
        *((t.namespace, destination_of(t.definition.target)) for t in old),
        ("resumed", "https://example.org:443"),
    }
    begun = (await store.begin_lanes(ALICE, held, EVERYTHING, [Portion(lane, 50) for lane in found])).timers
    assert sorted((t.namespace, t.id) for t in begun) == sorted(
        [("default", t.id) for t in old] + [("resumed", f"t{n}") for n in range(5)]
    )
    await switch(store, paused, paused=False)
    again = lifecycle.replay(final, now=START)
    assert await store.swap(final, again)
    portions = [Portion(lane_of(paused.name, "https://example.org:443"), 50), Portion(again.lane, 50)]
    begun = (await store.begin_lanes(ALICE, held, EVERYTHING, portions)).timers
    assert sorted((t.namespace, t.id) for t in begun) == [
        *((final.namespace, final.id),),
        *((paused.name, f"t{n}") for n in range(5)),
    ]
