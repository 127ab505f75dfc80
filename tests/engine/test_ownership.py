"""Which shards an instance acts for, and until when: ownership on the memory store and virtual time, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import pytest

from duetime.engine.engine import Engine, EngineOptions
from duetime.engine.ownership import MOVE_WAIT_MS, MOVES_PER_ROUND_MAX, Ownership
from duetime.errors import StoreError, StoreIndeterminate, StoreUnavailable
from duetime.model import Definition, HttpTarget, Outcome, OutcomeKind, Status, Target, Timer
from duetime.service import NewTimer, Service
from duetime.store import UNNAMED, About, Begun, Standing
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry
from tests.engine.test_isolation import on_virtual_time
from tests.simulation.world import EPOCH_MS, Machine

LEASE_MS = 10_000
TRUST_SECONDS = 8.0
"""For how long a lease is trusted, counted from before its renewal was sent."""
SHARDS = 8
FIRST, SECOND = b"1" * 16, b"2" * 16


class SlowStore(MemoryStore):
    """Each verb takes its time, before and after the store does its work, or fails."""

    def __init__(self, clock: Machine, shards: int = SHARDS) -> None:
        super().__init__(clock, shards=shards)
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}
        self.fails: dict[str, StoreError] = {}
        self.claims: list[set[int]] = []

    async def _take(self, verb: str, ask: Callable[[], Any]) -> Any:
        await asyncio.sleep(self.before.get(verb, 0))
        if verb in self.fails:
            raise self.fails[verb]
        answer = await ask()
        await asyncio.sleep(self.after.get(verb, 0))
        return answer

    async def renew(self, owner_id: bytes, lease_ms: int, about: About = UNNAMED) -> Standing:
        renew = super().renew
        return await self._take("renew", lambda: renew(owner_id, lease_ms, about))

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
        """Two rounds: the first one sees that the clock is right."""
        await self.ours.run_once()
        assert set(self.ours.held()) == set(range(self.store.shards))

    def begun(self, shard: int, version: int) -> Timer:
        definition = Definition(target=HttpTarget(url="http://a/"))
        timer = Timer("default", "a", shard, definition, EPOCH_MS, EPOCH_MS, EPOCH_MS, EPOCH_MS, 1, 1)
        return msgspec.structs.replace(timer, status=Status.EXECUTING, version=version)


# Trust.


@on_virtual_time
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (0.0, 1.5), (1.5, 0.0), (0.5, 1.0)])
async def test_a_lease_is_trusted_from_before_its_renewal_was_sent_and_less_a_margin(
    before: float, after: float
) -> None:
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
    # It is still what the store said last.
    assert world.ours.shards() == frozenset(range(SHARDS))


@on_virtual_time
async def test_who_has_left_owns_nothing_any_more() -> None:
    world = World()
    await world.start()
    owned = [f"duetime_owned_shards {count}" for count in (float(SHARDS), 0.0)]
    telemetry = world.ours._telemetry
    assert owned[0] in telemetry.own_page().decode()
    await world.ours.leave()
    assert owned[1] in telemetry.own_page().decode() and not world.ours.held()


@on_virtual_time
async def test_trust_ends_before_the_lease_of_the_store_does() -> None:
    world = World()
    world.store.before["renew"] = 1.0  # The lease starts when the store does its work.
    await world.start()
    await asyncio.sleep(TRUST_SECONDS)
    assert not world.ours.held()
    ends = {shard.lease_until for shard in world.store._shards}
    assert max(ends) - world.clock.now() >= LEASE_MS / 5


@on_virtual_time
async def test_a_renewal_that_fails_does_not_prolong_trust() -> None:
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
async def test_an_attempt_may_leave_only_under_the_version_that_began_it() -> None:
    world = World()
    await world.start()
    version = world.ours.held()[3]
    assert world.ours.trusts(world.begun(3, version))
    assert not world.ours.trusts(world.begun(3, version - 1))
    assert not world.ours.trusts(world.begun(3, version + 1))
    world.ours.lose([3])
    assert not world.ours.trusts(world.begun(3, version))
    assert 3 not in world.ours.held() and len(world.ours.held()) == SHARDS - 1


# Writes that went missing.


@on_virtual_time
async def test_a_shard_whose_write_went_missing_is_acted_for_only_under_a_new_version() -> None:
    world = World()
    await world.start()
    before = world.ours.held()
    world.ours.distrust([2, 5])
    assert set(world.ours.held()) == set(range(SHARDS)) - {2, 5}
    assert not world.ours.trusts(world.begun(2, before[2]))
    # The store still says that they are ours, under the old version.
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
async def test_a_shard_stays_suspect_until_it_was_claimed() -> None:
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
async def test_a_write_that_goes_missing_during_a_renewal_is_not_forgotten_with_it() -> None:
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
async def test_a_write_that_goes_missing_during_a_claim_is_not_forgotten_with_it() -> None:
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
async def test_a_missing_write_brings_the_next_renewal_forward() -> None:
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
async def test_a_shard_that_is_to_move_is_begun_no_more_and_released_when_its_attempts_are_done() -> None:
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
async def test_a_shard_that_is_to_stay_after_all_is_begun_again() -> None:
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
async def test_a_dead_owner_is_replaced_when_its_lease_is_over_and_not_before() -> None:
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
async def test_a_shard_counts_as_unowned_after_two_renewals_and_one_instance_tells() -> None:
    world = World()
    await world.store.renew(SECOND, 1_000_000, About(serving=True))  # It lives, and claims nothing.
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
async def test_an_instance_serves_up_to_a_quarter_of_the_lease_off_the_store(
    skew_ms: int, serves: bool, sign: int
) -> None:
    world = World()
    ours = world.new(FIRST, Machine(sign * skew_ms))
    await ours.run_once()
    assert bool(ours.held()) is serves
    assert ours.clock_offset_ms == sign * skew_ms


@on_virtual_time
@pytest.mark.parametrize(("before", "after"), [(2.9, 0.0), (0.0, 2.9), (1.5, 1.4)])
async def test_a_slow_answer_says_nothing_about_the_clock(before: float, after: float) -> None:
    world = World()
    await world.start()
    world.store.before["renew"], world.store.after["renew"] = before, after
    await world.ours.run_once()
    assert world.ours.clock_offset_ms == 0 and len(world.ours.held()) == SHARDS


# Leaving.


class Rows:
    """A store that goes on with what it was asked for, whether or not somebody waits for the answer."""

    def __init__(self, store: MemoryStore, seconds: float) -> None:
        self.renewals: set[asyncio.Task[Standing]] = set()
        renew = store.renew

        async def late(*arguments: Any) -> Standing:
            await asyncio.sleep(seconds)
            return await renew(*arguments)

        async def asked(*arguments: Any) -> Standing:
            task = asyncio.create_task(late(*arguments))
            self.renewals.add(task)
            return await asyncio.shield(task)

        store.renew = asked  # type: ignore[method-assign]

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
async def test_a_renewal_under_way_does_not_bring_back_an_instance_that_has_left(drained_after: float) -> None:
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
async def test_a_store_that_hangs_does_not_keep_an_instance_from_stopping() -> None:
    clock = Machine()
    store = MemoryStore(clock, shards=SHARDS)
    engine = Engine(store, {HttpTarget: Nobody()}, clock, Telemetry(), EngineOptions(lease_ms=3_000))
    running = asyncio.create_task(engine.run())
    await asyncio.sleep(0.5)

    async def hang(*arguments: Any) -> Standing:
        await asyncio.Event().wait()
        raise AssertionError

    store.renew = hang  # type: ignore[method-assign]
    await asyncio.sleep(2)
    engine.drain()
    async with asyncio.timeout(3.5):
        await running


# A begin of unknown fate.


@on_virtual_time
async def test_after_a_begin_of_unknown_fate_its_shards_are_not_begun_until_they_were_claimed_anew() -> None:
    clock = Machine()
    store = SlowStore(clock)
    engine = Engine(store, {HttpTarget: Nobody()}, clock, Telemetry(), EngineOptions(lease_ms=LEASE_MS))
    service = Service(store, {HttpTarget: Nobody()}, clock, engine.nudge)
    await service.start()
    begin, asked, lose = store.begin, [], True

    async def watched(owner_id: bytes, held: dict[int, int], *arguments: Any, **limits: Any) -> Begun:
        nonlocal lose
        begun = await begin(owner_id, held, *arguments, **limits)
        asked.append((clock.now(), dict(held)))
        if lose and begun.timers:
            lose = False
            raise StoreIndeterminate("the answer was lost")
        return begun

    store.begin = watched  # type: ignore[method-assign]
    running = asyncio.create_task(engine.run())
    await asyncio.sleep(1)
    store.before["claim"] = store.after["claim"] = 0.4
    definition = Definition(target=HttpTarget(url="http://a/"), timeout_ms=2_000)
    await service.create(NewTimer(namespace="default", id="a", execute_at=clock.now(), definition=definition))
    await asyncio.sleep(0.1)
    _, held = asked[-1]
    looks = len(asked)
    await asyncio.sleep(0.6)
    assert not lose and len(asked) == looks  # All its shards are suspect, so there is nothing to look at.
    await asyncio.sleep(2)
    assert len(asked) > looks
    for _, later in asked[looks:]:
        assert all(later[shard] > held[shard] for shard in later)
    await asyncio.sleep(10)
    timer = await service.get("default", "a")
    assert (timer.status, timer.attempt, timer.lost) == (Status.COMPLETED, 2, 1)
    engine.drain()
    await running
