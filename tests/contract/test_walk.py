"""Random calls of the whole port on a store and on the memory store: all results and all timers are equal.

The other tests cover one subject each; this one finds unexpected cases. A failure shows its seed and step, and the
same seed repeats the same calls.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from duetime import lifecycle
from duetime.errors import TimerNotPending
from duetime.instants import EPOCH, CreatedAt, ExecuteAt, FireAt, Instant
from duetime.model import (
    Definition,
    HttpTarget,
    Namespace,
    NatsTarget,
    Outcome,
    OutcomeKind,
    RetryPolicy,
    Status,
    Target,
    Timer,
    destination_of,
    lane_of,
    replace,
)
from duetime.sharding import shard_of
from duetime.store import Begun, Cursor, Filter, Order, Portion, Query, Sort, Store
from duetime.stores.memory import MemoryStore
from tests.clocks import START, ManualClock
from tests.contract.stores import SHARDS
from tests.contract.timers import ALICE, BOB, CAROL, EVERYTHING, changed_to, everything

SEEDS = range(6)
STEPS = 480
NAMESPACES = {"default": SHARDS, "one": 1, "three": 3}
IDS = [f"timer {n}" for n in range(40)]
TARGETS: list[Target] = [
    HttpTarget(url="https://example.org/due"),
    HttpTarget(url="HTTP://Example.org:8080?x=1"),
    NatsTarget(subject="due"),
]
LANES = [lane_of(name, destination_of(target)) for name in (*NAMESPACES, "nowhere") for target in TARGETS]
OUTCOMES = [
    Outcome(kind=OutcomeKind.ANSWERED, status=200, body=b'{"ok": true}'),
    Outcome(kind=OutcomeKind.ANSWERED, status=503, error="HTTP 503"),
    Outcome(kind=OutcomeKind.TIMED_OUT),
    Outcome(kind=OutcomeKind.ANSWERED, status=200, body=b'{"ok": false, "nextExecuteAt": "2027-02-01T00:00:00Z"}'),
]


class Walk:
    """Makes the same calls on both stores. Each step picks a method and arguments, which are often stale."""

    def __init__(self, rng: random.Random, clock: ManualClock, store: Store, model: MemoryStore) -> None:
        self.rng, self.clock, self.stores = rng, clock, (store, model)
        self.model = model
        self.known: list[Timer] = []  # timers that were stored at some time
        self.begun: dict[tuple[str, str], tuple[bytes, Timer]] = {}  # attempts without an outcome so far
        self.held: dict[bytes, dict[int, int]] = {ALICE: {}, BOB: {}, CAROL: {}}  # what each owner believes
        self.begun_by_lane = 0
        self._instants: Iterator[int] = count()

    def instant(self) -> Instant:
        """An instant near now that no other timer has, because the order of ties is up to the store."""
        second = Instant(self.clock.now() // 1000 * 1000)
        return second + self.rng.randrange(-5, 20) * 1000 + next(self._instants)

    async def both(self, verb: str, *arguments: object, **named: object) -> Any:
        ours, theirs = [await getattr(store, verb)(*arguments, **named) for store in self.stores]
        assert ours == theirs, f"{verb}{arguments}{named}"
        return ours

    def fresh(self) -> Timer:
        rng = self.rng
        self.clock.advance(1)
        namespace, id = rng.choice(list(NAMESPACES)), rng.choice(IDS)
        at, revision = self.instant(), rng.getrandbits(48)
        return Timer(
            namespace=namespace,
            id=id,
            shard=shard_of(namespace, id, namespace_shards=NAMESPACES[namespace], shards=SHARDS),
            definition=self.definition(),
            execute_at=ExecuteAt(at),
            fire_at=FireAt(at),
            created_at=CreatedAt(self.clock.now()),
            updated_at=self.clock.now(),
            revision=revision,
            firing=revision,
        )

    def definition(self) -> Definition:
        rng = self.rng
        return Definition(
            target=rng.choice(TARGETS),
            payload=Raw(b'{"n": %d}' % rng.getrandbits(48)),
            timeout_ms=rng.choice([1, 5_000]),
            retry=RetryPolicy(max_retries=rng.randrange(2)),
        )

    def owner(self) -> bytes:
        return self.rng.choice(list(self.held))

    async def put(self) -> None:
        new = self.fresh()
        if await self.both("put", new) is None:
            self.known.append(new)

    async def put_many(self) -> None:
        new = [self.fresh() for _ in range(self.rng.randrange(12))]
        answers = await self.both("put_many", new)
        self.known += [timer for timer, there in zip(new, answers, strict=True) if there is None]

    async def change(self) -> None:
        """A change by a client, sometimes based on a stale value."""
        now, rng = self.clock.now(), self.rng
        there = list((await everything(self.model)).values())
        pool = self.known if rng.random() < 0.2 else [t for t in there if t.status is Status.PENDING] or there
        if not pool:
            return
        before = rng.choice(pool)
        after: Timer | None = None
        try:
            if rng.random() < 0.4:
                after = lifecycle.cancel(before, now=now)
            elif rng.random() < 0.7:
                definition = self.definition() if rng.random() < 0.5 else None
                after = lifecycle.amend(
                    before, now=now, execute_at=self.instant(), definition=definition, correlation_id="x"
                )
        except TimerNotPending:
            after = replace(replace(before, updated_at=now), last_error="touched")
        if await self.both("swap", before, after) and after:
            self.known.append(after)

    def believer(self) -> tuple[bytes, dict[int, int]]:
        """An owner and the shards that it believes to own."""
        owner = self.owner()
        held = dict(self.held[owner])
        return owner, held | self.held[self.owner()] if self.rng.random() < 0.2 else held

    async def begin(self) -> None:
        rng = self.rng
        owner, held = self.believer()
        lane_max = rng.choice([None, None, 1, 3])
        lane_limits = {lane: rng.randrange(4) for lane in rng.sample(LANES, 3)}
        answer = await self.both("begin", owner, held, rng.randrange(1, 15), lane_max=lane_max, lane_limits=lane_limits)
        self.heard(owner, answer)

    async def begin_lanes(self) -> None:
        """One lane with a limit, or several without one, because the rounding of a limit is up to the store."""
        rng = self.rng
        owner, held = self.believer()
        several = rng.random() < 0.6
        lanes = rng.sample(LANES, rng.randrange(2, len(LANES)) if several else 1)
        portions = [Portion(lane, rng.randrange(5), rng.choice([0.1, 1.0, 3.0])) for lane in lanes]
        limit = EVERYTHING if several else rng.randrange(1, 5)
        answer = await self.both("begin_lanes", owner, held, limit, portions)
        assert {timer.lane for timer in answer.timers} <= set(lanes)
        self.heard(owner, answer)
        self.begun_by_lane += len(answer.timers)

    def heard(self, owner: bytes, answer: Begun) -> None:
        for timer in answer.timers:
            self.begun[timer.namespace, timer.id] = owner, timer
        for shard in answer.refused:
            if self.rng.random() < 0.5:
                self.held[owner].pop(shard, None)

    async def lanes(self) -> None:
        """Every lane, in pages whose size is up to the store, and the overdue timers."""
        rng, now = self.rng, self.clock.now()
        until, size, due_max = now + rng.choice([-3_000, 0, 5_000]), rng.choice([2, 5, EVERYTHING]), rng.choice([0, 9])
        surveys = []
        for store in self.stores:
            page = await store.lanes(until, limit=size, due_max=due_max)
            found, due = page.lanes, page.due
            while page.next is not None:
                page = await store.lanes(until, after=page.next, limit=size)
                found += page.lanes
            assert len({lane.lane for lane in found}) == len(found), "a lane is listed twice"
            surveys.append((sorted(found, key=lambda lane: lane.lane), due))
        assert surveys[0] == surveys[1], f"lanes({until})"
        shards, before = rng.sample(range(SHARDS), rng.randrange(1, SHARDS + 1)), now - rng.choice([0, 2_000])
        for most in (2, EVERYTHING):
            ours, theirs = [await store.overdue(shards, before, most) for store in self.stores]
            order = lambda lane: (lane.namespace, lane.destination)  # noqa: E731
            assert sorted(ours, key=order) == sorted(theirs, key=order), f"overdue({shards}, {before}, {most})"

    async def record(self) -> None:
        rng, now = self.rng, self.clock.now()
        owner = self.owner()
        mine = [key for key, (by, _) in self.begun.items() if by == owner or rng.random() < 0.1]
        changes = []
        for key in rng.sample(mine, min(len(mine), rng.randrange(1, 10))):
            _, before = self.begun.pop(key)
            if rng.random() < 0.2:
                after = lifecycle.defer(before, fire_at=EPOCH, now=now)
            else:
                after = lifecycle.settle(before, rng.choice(OUTCOMES), sent_at=now, now=now, uniform=rng.uniform)
            if after.status is Status.PENDING:
                after = msgspec.structs.replace(after, fire_at=self.instant())
            changes.append((before, after))
        recorded = await self.both("record", owner, changes)
        self.known += [after for (_, after), done in zip(changes, recorded, strict=True) if done]

    async def claim(self) -> None:
        owner = self.owner()
        wanted = self.rng.sample(range(SHARDS), self.rng.randrange(SHARDS + 1))
        self.held[owner] |= await self.both("claim", owner, wanted, self.rng.choice([1, 3_000, 20_000]))

    async def renew(self) -> None:
        owner = self.owner()
        renewal = await self.both("renew", owner, self.rng.choice([1, 3_000, 20_000]))
        if self.rng.random() < 0.5:
            self.held[owner] = dict(renewal.held)

    async def release(self) -> None:
        await self.both("release", self.owner(), self.rng.sample(range(SHARDS), 3))

    async def wait(self) -> None:
        self.clock.advance(self.rng.choice([1, 700, 4_000, 11_000]))

    async def namespace(self) -> None:
        name = self.rng.choice(list(NAMESPACES))
        [before] = [n for n in await self.model.namespaces() if n.name == name]
        if self.rng.random() < 0.3:
            before = msgspec.structs.replace(before, revision=before.revision - 1)
        # A database that expires timers itself does so by its own clock.
        shortest = 10**9 if self.stores[0].abilities.expires_history else 2_000
        retentions = [None, shortest, 10**9]
        after = changed_to(before, paused=self.rng.random() < 0.3, retention_ms=self.rng.choice(retentions))
        await self.both("swap_namespace", before, after)

    async def purge(self) -> None:
        await self.both("purge", retention_ms=self.rng.choice([5_000, 20_000]), limit=EVERYTHING)

    async def page_by_offset(self) -> None:
        query = Query(
            namespace=self.rng.choice(list(NAMESPACES)),
            status=self.rng.choice([None, *Status]),
            sort=self.rng.choice(list(Sort)),
            descending=self.rng.random() < 0.5,
            limit=self.rng.randrange(1, 30),
            offset=self.rng.randrange(5),
        )
        await self.both("page_by_offset", query)

    async def ask(self) -> None:
        """The results of lists and counts, including paused timers."""
        rng = self.rng
        filter = Filter(
            namespace=rng.choice([None, *NAMESPACES]),
            status=rng.choice([None, *Status, Status.PENDING, Status.PENDING]),
            execute_before=rng.choice([None, None, self.instant()]),
        )
        await self.both("count", filter, rng.choice([3, EVERYTHING]))
        await self.both("forecast", sorted(self.instant() for _ in range(4)), rng.choice([3, EVERYTHING]))
        after: list[Cursor | None] = [None, None]
        for _ in range(3):
            ours, theirs = [await store.page(filter, 5, place) for store, place in zip(self.stores, after, strict=True)]
            assert ours.timers == theirs.timers, f"page{filter}"
            after = [ours.next, theirs.next]
            if ours.next is None or theirs.next is None:
                assert after == [None, None], f"page{filter}"
                break

    async def compare(self) -> None:
        ours, theirs = [await everything(store) for store in self.stores]
        assert ours == theirs
        for namespace in (None, *NAMESPACES):
            await self.both("tally", namespace)

    def possible(self) -> dict[Any, int]:
        """The steps that the store's abilities allow, with their weights."""
        abilities = self.stores[0].abilities
        lists = abilities.orders == frozenset(Order)
        without = [
            *([] if lists else [Walk.page_by_offset, Walk.ask]),
            *([Walk.purge] if abilities.expires_history else []),
        ]
        return {step: weight for step, weight in self.STEPS.items() if step not in without}

    STEPS = {
        **{put: 8, put_many: 5, change: 12, begin: 14, record: 12, claim: 7, renew: 4, release: 2},
        **{wait: 10, namespace: 4, purge: 2, page_by_offset: 3, ask: 6, begin_lanes: 10, lanes: 6},
    }


@pytest.mark.parametrize("seed", SEEDS)
async def test_every_store_behaves_like_the_memory_store(store: Store, clock: ManualClock, seed: int) -> None:
    rng = random.Random(seed)
    walk = Walk(rng, clock, store, MemoryStore(clock, shards=SHARDS))
    for name, shards in NAMESPACES.items():
        await walk.both("put_namespace", Namespace(name=name, shards=shards, created_at=START))
    possible = walk.possible()
    steps = rng.choices(list(possible), list(possible.values()), k=STEPS)
    seen = set()
    for number, step in enumerate(steps):
        try:
            await step(walk)
            if number % 4 == 0 or number == STEPS - 1:
                await walk.compare()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, step {number}, {step.__name__}: {error}") from error
        seen |= {(t.status, t.lost > 0, t.failures > 0) for t in (await everything(walk.model)).values()}
    # The calls covered enough cases.
    assert walk.begun_by_lane > 10
    assert {status for status, _, _ in seen} >= set(Status) - {Status.FAILED}
    assert any(lost for _, lost, _ in seen)
    assert any(failed for _, _, failed in seen)
