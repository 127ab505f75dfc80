"""Ownership of shards on the memory store in virtual time, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

import msgspec
import pytest

from duetime.engine.engine import Engine, EngineOptions
from duetime.engine.ownership import MOVE_WAIT_MS, MOVES_PER_ROUND_MAX, Ownership
from duetime.errors import StoreError, StoreIndeterminate, StoreUnavailable
from duetime.model import Definition, HttpTarget, Outcome, OutcomeKind, Status, Target, Timer
from duetime.namespaces import Namespaces
from duetime.service import NewTimer, Service
from duetime.store import UNNAMED, About, Begun, Renewal
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry
from tests.clocks import all_at
from tests.engine.test_isolation import on_virtual_time
from tests.simulation.world import EPOCH_MS, Machine

T = TypeVar("T")

LEASE_MS = 10_000
TRUST_SECONDS = 8.0
"""How long a lease is trusted, from before its renewal was sent."""
SHARDS = 8
FIRST, SECOND = b"1" * 16, b"2" * 16


class SlowStore(MemoryStore):
    """Each verb can be slow, before or after the write, or fail."""

    def __init__(self, clock: Machine, shards: int = SHARDS) -> None:
        super().__init__(clock, shards=shards)
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.fails: dict[str, StoreError] = {}
        self.claims: list[set[int]] = []
        self.failovers = 0

    async def _take(self, verb: str, ask: Callable[[], Awaitable[T]]) -> T:
        await asyncio.sleep(self.before.get(verb, 0))
        if verb in self.fails:
            raise self.fails[verb]
        answer = await ask()
        await asyncio.sleep(self.after.get(verb, 0))
        return answer

    async def renew(self, owner_id: bytes, lease_ms: int, about: About = UNNAMED) -> Renewal:
        renew = super().renew
        renewal = await self._take("renew", lambda: renew(owner_id, lease_ms, about))
        return msgspec.structs.replace(renewal, failovers=self.failovers)

    async def claim(self, owner_id: bytes, shards: Collection[int], lease_ms: int) -> dict[int, int]:
        claim = super().claim
        self.claims.append(set(shards))
        return await self._take("claim", lambda: claim(owner_id, shards, lease_ms))


class World:
    def __init__(self, shards: int = SHARDS) -> None:
        self.clock = Machine()
        self.store = SlowStore(self.clock, shards)
        self.busy: set[int] = set()
        self.ours = self.new(FIRST)

    def new(self, owner_id: bytes, clock: Machine | None = None) -> Ownership:
        return Ownership(
            self.store,
            clock or self.clock,
            Telemetry(),
            lease_ms=LEASE_MS,
            owner_id=owner_id,
            busy=lambda shard: shard in self.busy,
        )

    async def start(self) -> None:
        """Two rounds: the first one finds that the clock is right."""
        await self.ours.run_once()
        assert set(self.ours.held()) == set(range(self.store.shards))

    def begun(self, shard: int, version: int) -> Timer:
        definition = Definition(target=HttpTarget(url="http://a/"))
        timer = Timer("default", "a", shard, definition, *all_at(EPOCH_MS), 1, 1)
        return msgspec.structs.replace(timer, status=Status.EXECUTING, version=version)


# Trust.


@on_virtual_time
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (0.0, 1.5), (1.5, 0.0), (0.5, 1.0)])
async def test_a_lease_is_trusted_from_before_the_renewal_was_sent_minus_a_margin(before: float, after: float) -> None:
    world = World()
    await world.start()
    await asyncio.sleep(1)
    sent = world.clock.monotonic()
    world.store.before["renew"], world.store.after["renew"] = before, after
    await world.ours.run_once()
    timer = world.begun(3, world.ours.held()[3])
    await asyncio.sleep(sent + TRUST_SECONDS - 0.001 - world.clock.monotonic())
    assert len(world.ours.held()) == SHARDS and world.ours.trusts(timer)
    await asyncio.sleep(0.001)
    assert world.ours.held() == {} and not world.ours.trusts(timer)
    # It is still in the last copy from the store.
    assert world.ours.shards() == frozenset(range(SHARDS))


@on_virtual_time
async def test_an_instance_that_has_left_owns_nothing() -> None:
    world = World()
    await world.start()
    owned = [f"duetime_owned_shards {count}" for count in (float(SHARDS), 0.0)]
    telemetry = world.ours._telemetry
    assert owned[0] in telemetry.own_page().decode()
    await world.ours.leave()
    assert owned[1] in telemetry.own_page().decode() and not world.ours.held()


@on_virtual_time
async def test_trust_ends_before_the_lease_in_the_store() -> None:
    world = World()
    world.store.before["renew"] = 1.0  # In the store, the lease starts with the write.
    await world.start()
    await asyncio.sleep(TRUST_SECONDS)
    assert not world.ours.held()
    ends = {shard.lease_until for shard in world.store._shards}
    assert max(ends) - world.clock.now() >= LEASE_MS / 5


@on_virtual_time
async def test_a_failed_renewal_does_not_prolong_trust() -> None:
    world = World()
    await world.start()
    await asyncio.sleep(5)
    for error in (StoreUnavailable("away"), StoreIndeterminate("lost")):
        world.store.fails["renew"] = error
        with pytest.raises(StoreError):
            await world.ours.run_once()
    await asyncio.sleep(TRUST_SECONDS - 5)
    assert world.ours.held() == {}
    world.store.fails.clear()
    await world.ours.run_once()
    assert len(world.ours.held()) == SHARDS


@on_virtual_time
async def test_an_attempt_is_sent_only_under_the_version_that_began_it() -> None:
    world = World()
    await world.start()
    version = world.ours.held()[3]
    assert world.ours.trusts(world.begun(3, version))
    assert not world.ours.trusts(world.begun(3, version - 1))
    assert not world.ours.trusts(world.begun(3, version + 1))
    world.ours.lose([3])
    assert not world.ours.trusts(world.begun(3, version))
    assert 3 not in world.ours.held() and len(world.ours.held()) == SHARDS - 1


# Writes with unknown results.


@on_virtual_time
async def test_after_an_indeterminate_write_a_shard_needs_a_new_version() -> None:
    world = World()
    await world.start()
    before = world.ours.held()
    world.ours.distrust([2, 5])
    assert set(world.ours.held()) == set(range(SHARDS)) - {2, 5}
    assert not world.ours.trusts(world.begun(2, before[2]))
    # In the store they are still ours, under the old version.
    world.store.after["renew"] = 1.0
    world.store.before["claim"] = 1.0
    round_ = asyncio.create_task(world.ours.run_once())
    while not round_.done():
        assert not {2, 5} & world.ours.held().keys()
        await asyncio.sleep(0.1)
    after = world.ours.held()
    assert {shard for shard in after if after[shard] != before[shard]} == {2, 5}
    assert world.store.claims[-1] == {2, 5}
    assert world.ours.trusts(world.begun(2, after[2])) and not world.ours.trusts(world.begun(2, before[2]))


@on_virtual_time
async def test_a_shard_stays_suspect_until_it_is_claimed() -> None:
    world = World()
    await world.start()
    before = world.ours.held()
    world.ours.distrust([2])
    world.store.fails["claim"] = StoreUnavailable("away")
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            await world.ours.run_once()
        assert 2 not in world.ours.held() and len(world.ours.held()) == SHARDS - 1
    world.store.fails.clear()
    await world.ours.run_once()
    assert world.ours.held()[2] > before[2]
    claims = len(world.store.claims)
    await world.ours.run_once()
    assert len(world.store.claims) == claims  # Once is enough.


@on_virtual_time
async def test_shard_that_another_instance_claimed_is_no_longer_suspect() -> None:
    world = World()
    await world.start()
    world.ours.distrust([2])
    world.store.fails["claim"] = StoreUnavailable("away")
    with pytest.raises(StoreUnavailable):
        await world.ours.run_once()
    world.store.fails.clear()
    await world.store.release(world.ours.owner_id, [2])
    await world.store.claim(b"another instance", [2], 60_000)
    claims = len(world.store.claims)
    for _ in range(3):
        await world.ours.run_once()
        assert 2 not in world.ours.held()
    assert len(world.store.claims) == claims
    assert world.ours._next_wait_ms > MOVE_WAIT_MS


@on_virtual_time
async def test_suspect_shards_pass_to_others_while_the_clock_is_wrong() -> None:
    world, clock = World(), Machine()
    ours, theirs = world.new(b"3" * 16, clock), world.new(SECOND)
    await ours.run_once()
    assert len(ours.held()) == SHARDS
    ours.distrust([1, 2])  # as after a begin that a suspended machine broke off
    clock.skew_ms = 3_600_000
    for _ in range(30):
        for each in (ours, theirs):
            await each.run_once()
        await asyncio.sleep(LEASE_MS / 3000)
    assert set(theirs.held()) == set(range(SHARDS))


@on_virtual_time
async def test_an_indeterminate_write_during_a_renewal_is_not_forgotten() -> None:
    world = World()
    await world.start()
    before = world.ours.held()
    world.store.after["renew"] = 1.0
    round_ = asyncio.create_task(world.ours.run_once())
    await asyncio.sleep(0.5)
    world.ours.distrust([4])
    await round_
    assert world.ours.held()[4] > before[4]


@on_virtual_time
async def test_an_indeterminate_write_during_a_claim_is_not_forgotten() -> None:
    world = World()
    await world.start()
    before = world.ours.held()
    world.ours.distrust([1])
    world.store.after["claim"] = 1.0
    round_ = asyncio.create_task(world.ours.run_once())
    await asyncio.sleep(0.5)
    world.ours.distrust([6])
    await round_
    assert 6 not in world.ours.held() and world.ours.held()[1] > before[1]
    await world.ours.run_once()
    assert world.ours.held()[6] > before[6]


@on_virtual_time
async def test_after_a_failover_every_shard_is_claimed_again() -> None:
    world = World()
    await world.start()
    before = world.ours.held()
    world.store.failovers = 1
    world.store.fails["claim"] = StoreUnavailable("not yet")
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await world.ours.run_once()
        assert not world.ours.held()
    world.store.fails.clear()
    await world.ours.run_once()
    after = world.ours.held()
    assert after.keys() == before.keys() and all(after[shard] > before[shard] for shard in before)
    claims = len(world.store.claims)
    await world.ours.run_once()
    assert world.ours.held() == after and len(world.store.claims) == claims  # Once is enough.


@on_virtual_time
async def test_an_indeterminate_write_brings_the_next_renewal_forward() -> None:
    world = World()
    running = asyncio.create_task(world.ours.run())
    await asyncio.sleep(1)
    before = world.ours.held()
    world.ours.distrust([1])
    await asyncio.sleep(0.001)
    assert world.ours.held()[1] > before[1]
    running.cancel()


# Moves.


@on_virtual_time
async def test_a_leaving_shard_begins_nothing_and_is_released_when_its_attempts_are_done() -> None:
    world = World()
    await world.start()
    versions = world.ours.held()
    world.busy = set(range(SHARDS))
    theirs = world.new(SECOND)
    await theirs.run_once()
    await world.ours.run_once()
    staying = set(world.ours.held())
    leaving = set(range(SHARDS)) - staying
    assert 0 < len(leaving) < SHARDS
    for shard in leaving:  # What is in flight may still leave and be recorded.
        assert world.ours.trusts(world.begun(shard, versions[shard]))
        assert world.store._shards[shard].owner_id == FIRST
    await world.ours.run_once()
    assert set(world.ours.held()) == staying
    one = min(leaving)
    world.busy.discard(one)
    await world.ours.run_once()
    assert world.store._shards[one].owner_id is None and not world.ours.trusts(world.begun(one, versions[one]))
    assert all(world.store._shards[shard].owner_id == FIRST for shard in leaving - {one})
    await theirs.run_once()
    assert set(theirs.held()) == {one}


@on_virtual_time
async def test_a_shard_that_no_longer_has_to_move_begins_timers_again() -> None:
    world = World()
    await world.start()
    world.busy = set(range(SHARDS))
    theirs = world.new(SECOND)
    await theirs.run_once()
    await world.ours.run_once()
    assert len(world.ours.held()) < SHARDS
    await theirs.leave()
    await world.ours.run_once()
    assert len(world.ours.held()) == SHARDS


@on_virtual_time
async def test_few_shards_move_at_a_time() -> None:
    world = World(shards=8 * MOVES_PER_ROUND_MAX)
    await world.start()
    world.busy = set(range(8 * MOVES_PER_ROUND_MAX))
    await world.new(SECOND).run_once()
    for _ in range(3):
        await world.ours.run_once()
        assert len(world.ours.held()) == 7 * MOVES_PER_ROUND_MAX
    world.busy.clear()
    await world.ours.run_once()
    assert sum(shard.owner_id is None for shard in world.store._shards) == MOVES_PER_ROUND_MAX


@on_virtual_time
async def test_a_dead_owner_is_replaced_only_after_its_lease() -> None:
    world = World()
    theirs = world.new(SECOND)
    await theirs.run_once()
    died_at = world.clock.now()
    running = asyncio.create_task(world.ours.run())
    while len(world.ours.held()) < SHARDS:
        assert world.clock.now() - died_at <= LEASE_MS + 2 * MOVE_WAIT_MS
        await asyncio.sleep(0.01)
    assert world.clock.now() - died_at >= LEASE_MS
    running.cancel()


@on_virtual_time
async def test_a_shard_is_unowned_after_two_renewals_and_one_instance_reports_it() -> None:
    world = World()
    await world.store.renew(SECOND, 1_000_000, About(serving=True))  # It is alive but claims nothing.
    await world.ours.run_once()
    missing = set(range(SHARDS)) - world.ours.held().keys()
    assert missing and world.ours.unowned() == frozenset()
    await world.ours.run_once()
    assert world.ours.unowned() == missing
    await world.store.claim(SECOND, missing, 1_000_000)
    await world.ours.run_once()
    assert world.ours.unowned() == frozenset()


@on_virtual_time
@pytest.mark.parametrize(("skew_ms", "serves"), [(LEASE_MS // 4, True), (LEASE_MS // 4 + 1, False)])
@pytest.mark.parametrize("sign", [1, -1])
async def test_an_instance_serves_with_a_clock_offset_up_to_a_quarter_of_the_lease(
    skew_ms: int, serves: bool, sign: int
) -> None:
    world = World()
    ours = world.new(FIRST, Machine(sign * skew_ms))
    await ours.run_once()
    assert bool(ours.held()) is serves
    assert ours.clock_offset_ms == sign * skew_ms


@on_virtual_time
@pytest.mark.parametrize(("before", "after"), [(2.9, 0.0), (0.0, 2.9), (1.5, 1.4)])
async def test_a_slow_response_does_not_count_as_a_clock_offset(before: float, after: float) -> None:
    world = World()
    await world.start()
    world.store.before["renew"], world.store.after["renew"] = before, after
    await world.ours.run_once()
    assert world.ours.clock_offset_ms == 0 and len(world.ours.held()) == SHARDS


# Leaving.


class Rows:
    """A store that completes each request even if its caller is gone."""

    def __init__(self, store: MemoryStore, seconds: float) -> None:
        self.renewals: set[asyncio.Task[Renewal]] = set()
        renew = store.renew

        async def late(*arguments: Any) -> Renewal:
            await asyncio.sleep(seconds)
            return await renew(*arguments)

        async def asked(*arguments: Any) -> Renewal:
            task = asyncio.create_task(late(*arguments))
            self.renewals.add(task)
            return await asyncio.shield(task)

        store.renew = asked  # type: ignore[method-assign, assignment]

    async def done(self) -> None:
        await asyncio.gather(*self.renewals)


class Nobody:
    async def deliver(self, timer: Timer, timeout_ms: int) -> Outcome:
        return Outcome(kind=OutcomeKind.ANSWERED, status=200, body=b'{"ok": true}')

    async def check(self, target: Target) -> None:
        pass

    async def close(self) -> None:
        pass


@on_virtual_time
@pytest.mark.parametrize("drained_after", [1.0, 1.2, 1.4, 1.6, 1.8, 2.0])
async def test_a_concurrent_renewal_does_not_bring_back_an_instance_that_has_left(drained_after: float) -> None:
    clock = Machine()
    store = MemoryStore(clock, shards=SHARDS)
    rows = Rows(store, 0.3)
    options = EngineOptions(lease_ms=3_000)
    engine = Engine(store, {HttpTarget: Nobody()}, clock, Telemetry(), options, owner_id=FIRST)
    running = asyncio.create_task(engine.run())
    await asyncio.sleep(drained_after)
    assert engine.ownership.held()
    engine.drain()
    await running
    await rows.done()
    assert await store.cluster() == []
    assert {shard.owner_id for shard in store._shards} == {None}
    renewals = len(rows.renewals)
    await asyncio.sleep(30)
    assert len(rows.renewals) == renewals


@on_virtual_time
async def test_a_hanging_store_does_not_prevent_an_instance_from_stopping() -> None:
    clock = Machine()
    store = MemoryStore(clock, shards=SHARDS)
    engine = Engine(store, {HttpTarget: Nobody()}, clock, Telemetry(), EngineOptions(lease_ms=3_000))
    running = asyncio.create_task(engine.run())
    await asyncio.sleep(0.5)

    async def hang(*arguments: Any) -> Renewal:
        await asyncio.Event().wait()
        raise AssertionError

    store.renew = hang  # type: ignore[method-assign, assignment]
    await asyncio.sleep(2)
    engine.drain()
    async with asyncio.timeout(3.5):
        await running


# A begin with an unknown result.


@on_virtual_time
async def test_after_an_indeterminate_begin_shards_are_not_begun_until_claimed_again() -> None:
    clock = Machine()
    store = SlowStore(clock)
    engine = Engine(store, {HttpTarget: Nobody()}, clock, Telemetry(), EngineOptions(lease_ms=LEASE_MS))
    namespaces = Namespaces(store, clock, engine.nudge)
    service = Service(store, namespaces, {HttpTarget: Nobody()}, clock, engine.nudge)
    await namespaces.start()
    begin, asked, lose = store.begin, [], True

    async def watched(owner_id: bytes, held: dict[int, int], *arguments: Any, **limits: Any) -> Begun:
        nonlocal lose
        begun = await begin(owner_id, held, *arguments, **limits)
        asked.append((clock.now(), dict(held)))
        if lose and begun.timers:
            lose = False
            raise StoreIndeterminate("the answer was lost")
        return begun

    store.begin = watched  # type: ignore[method-assign, assignment]
    running = asyncio.create_task(engine.run())
    await asyncio.sleep(1)
    store.before["claim"] = store.after["claim"] = 0.4
    definition = Definition(target=HttpTarget(url="http://a/"), timeout_ms=2_000)
    await service.create(NewTimer(namespace="default", id="a", execute_at=clock.now(), definition=definition))
    await asyncio.sleep(0.1)
    _, held = asked[-1]
    looks = len(asked)
    await asyncio.sleep(0.6)
    assert not lose and len(asked) == looks  # All shards are suspect, so there is nothing to poll.
    await asyncio.sleep(2)
    assert len(asked) > looks
    for _, later in asked[looks:]:
        assert all(later[shard] > held[shard] for shard in later)
    await asyncio.sleep(10)
    timer = await service.get("default", "a")
    assert (timer.status, timer.attempt, timer.lost) == (Status.COMPLETED, 2, 1)
    engine.drain()
    await running
