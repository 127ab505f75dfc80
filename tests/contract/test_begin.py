"""begin: which timers are due, in which order, and when to poll again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from duetime import lifecycle
from duetime.model import Definition, HttpTarget, Status, Timer
from duetime.store import Store
from tests.clocks import START, ManualClock
from tests.contract.timers import (
    ALICE,
    BOB,
    BROKEN,
    EVERYTHING,
    FULL,
    LEASE_MS,
    changed,
    completed,
    definition,
    ended,
    everything,
    holding,
    ids,
    spread,
    switch,
    timer,
    with_namespace,
    with_timers,
)

TIMEOUT_MS = 2_000
DEADLINE_MS = TIMEOUT_MS + lifecycle.ATTEMPT_GRACE_MS


async def test_timer_is_due_at_its_instant_and_not_a_millisecond_before(store: Store, clock: ManualClock) -> None:
    held = await holding(store)
    await with_timers(store, timer("now", at=START), timer("next", at=START + 1), timer("past", at=START - 1))
    assert ids((await store.begin(ALICE, held, 10)).timers) == ["past", "now"]
    assert ids((await store.begin(ALICE, held, 10)).timers) == []
    clock.advance(1)
    assert ids((await store.begin(ALICE, held, 10)).timers) == ["next"]


async def test_begin_goes_by_fire_at_not_execute_at(store: Store) -> None:
    held = await holding(store)
    retry = timer("retry", at=START - 50, fire_at=START + 1, attempt=1)
    await with_timers(store, retry, timer("early", at=START + 50, fire_at=START))
    assert ids((await store.begin(ALICE, held, 10)).timers) == ["early"]


async def test_begun_timer_equals_lifecycle_begin_and_is_stored(store: Store, clock: ManualClock) -> None:
    held = await holding(store)
    first = changed(FULL, status=Status.PENDING, fire_at=START, deadline_at=None, version=0, executed_at=None)
    fresh = timer("fresh", at=START, shard=3, definition=definition(timeout_ms=TIMEOUT_MS))
    await with_timers(store, first, fresh)
    clock.advance(40)
    begun = {t.id: t for t in (await store.begin(ALICE, held, 10)).timers}
    for pending in (first, fresh):
        expected = lifecycle.begin(pending, now=START + 40, version=held[pending.shard])
        assert begun[pending.id] == expected
        assert await store.get("default", pending.id) == expected
    assert begun["fresh"].deadline_at == START + 40 + DEADLINE_MS
    assert begun["fresh"].revision == fresh.revision + 1
    assert begun["fresh"].delivery_id == fresh.delivery_id


async def test_begun_timer_has_the_version_of_its_shard(store: Store) -> None:
    await store.claim(ALICE, [1, 2], LEASE_MS)
    await store.claim(ALICE, [2], LEASE_MS)
    held = await store.claim(ALICE, range(store.shards), LEASE_MS)
    assert (held[0], held[1], held[2]) == (1, 2, 3)
    await with_timers(store, *spread(8))
    begun = (await store.begin(ALICE, held, 1)).timers
    assert [(t.shard, t.version) for t in begun] == [(0, 1)]
    assert all(t.version == held[t.shard] for t in (await store.begin(ALICE, held, EVERYTHING)).timers)


async def test_begin_returns_oldest_timers_first_up_to_the_limit(store: Store, clock: ManualClock) -> None:
    held = await holding(store)
    timers = spread(50)
    random.Random(1).shuffle(timers)
    await with_timers(store, *timers)
    clock.advance(49)
    sizes, order = [], []
    while begun := (await store.begin(ALICE, held, 12)).timers:
        sizes.append(len(begun))
        order += ids(begun)
    assert sizes == [12, 12, 12, 12, 2]
    assert order == [f"t{n}" for n in range(50)]


async def test_older_timer_inserted_later_is_begun(store: Store, clock: ManualClock) -> None:
    held = await holding(store)
    clock.advance(100)
    await with_timers(store, *spread(5, at=START + 50))
    assert len((await store.begin(ALICE, held, 10)).timers) == 5
    await with_timers(store, timer("late", at=START + 10), timer("later", at=START + 70), timer("ancient", at=1))
    assert ids((await store.begin(ALICE, held, 10)).timers) == ["ancient", "late", "later"]


async def test_timer_moved_to_the_past_is_begun(store: Store) -> None:
    held = await holding(store)
    await with_timers(store, timer("a", at=START), far := timer("b", at=START + 10**6))
    assert ids((await store.begin(ALICE, held, 10)).timers) == ["a"]
    await store.swap(far, lifecycle.amend(far, now=START, execute_at=START - 10))
    assert ids((await store.begin(ALICE, held, 10)).timers) == ["b"]


async def test_attempt_is_begun_only_once(store: Store) -> None:
    held = await holding(store)
    await with_timers(store, *spread(100, at=START - 100))
    answers = await asyncio.gather(*(store.begin(ALICE, held, 9) for _ in range(20)))
    while answers[-1].next_at is not None:  # A begin that lost a race for the timers it found requests another poll.
        answers.append(await store.begin(ALICE, held, 9))
    begun = ids([t for answer in answers for t in answer.timers])
    assert sorted(begun) == sorted(f"t{n}" for n in range(100))


async def test_only_pending_timers_are_due(store: Store) -> None:
    held = await holding(store)
    for status in (Status.COMPLETED, Status.FAILED, Status.CANCELED):
        await with_timers(store, ended(status.value, status))
    assert await store.begin(ALICE, held, 10) == await store.begin(ALICE, held, 10)
    assert (await store.begin(ALICE, held, 10)).timers == []
    assert (await store.begin(ALICE, held, 10)).next_at is None


async def test_retry_begins_at_its_time_with_the_same_delivery_id(store: Store, clock: ManualClock) -> None:
    held = await holding(store)
    await with_timers(store, timer("a"))
    [first] = (await store.begin(ALICE, held, 10)).timers
    waiting = lifecycle.settle(first, BROKEN, sent_at=START, now=START, uniform=lambda low, high: 500)
    assert await store.record(ALICE, [(first, waiting)]) == [True]
    assert (await store.begin(ALICE, held, 10)).next_at == START + 500
    clock.advance(500)
    [second] = (await store.begin(ALICE, held, 10)).timers
    assert second == lifecycle.begin(waiting, now=START + 500, version=held[0])
    assert (second.attempt, second.failures, second.lost) == (2, 1, 0)
    assert second.delivery_id == first.delivery_id
    assert second.started_at == START


# When to poll again.


async def test_next_at_is_the_earliest_future_fire_at(store: Store, clock: ManualClock) -> None:
    held = await holding(store)
    assert (await store.begin(ALICE, held, 10)).next_at is None
    await with_timers(store, timer("b", at=START + 900, shard=1), timer("a", at=START + 777), timer("now"))
    assert (await store.begin(ALICE, held, 10)).next_at == START + 777
    clock.advance(776)
    begun = await store.begin(ALICE, held, 10)
    assert (begun.timers, begun.next_at) == ([], START + 777)
    clock.advance(1)
    assert (await store.begin(ALICE, held, 10)).next_at == START + 900


async def test_next_at_is_now_if_more_timers_are_due_than_the_limit(store: Store) -> None:
    held = await holding(store)
    await with_timers(store, *spread(5, at=START - 10), timer("later", at=START + 5))
    assert (await store.begin(ALICE, held, 4)).next_at == START
    assert (await store.begin(ALICE, held, 4)).next_at == START + 5


async def test_next_at_after_an_exactly_full_batch_is_never_too_late(store: Store) -> None:
    # A store need not know whether a full batch took the last due timer: it may request another poll at once.
    held = await holding(store)
    await with_timers(store, *spread(4, at=START - 10), timer("later", at=START + 5))
    assert (await store.begin(ALICE, held, 4)).next_at in (START, START + 5)


async def test_next_at_covers_only_held_shards(store: Store) -> None:
    held = await holding(store, ALICE, 1, 2)
    await with_timers(store, timer("a", at=START + 5, shard=0), timer("b", at=START + 9, shard=2))
    assert (await store.begin(ALICE, held, 10)).next_at == START + 9
    assert (await store.begin(ALICE, {1: held[1]}, 10)).next_at is None


async def test_next_at_is_the_deadline_of_an_attempt_of_an_older_version(store: Store, clock: ManualClock) -> None:
    held = await holding(store)
    await with_timers(store, timer("a", definition=definition(timeout_ms=TIMEOUT_MS)), timer("b", at=START + 10**6))
    await store.begin(ALICE, held, 10)
    assert (await store.begin(ALICE, held, 10)).next_at == START + 10**6
    held = await holding(store)
    assert (await store.begin(ALICE, held, 10)).next_at == START + DEADLINE_MS


# Shards and owners.


async def test_only_timers_of_held_shards_are_begun(store: Store) -> None:
    held = await holding(store, ALICE, 1, 4, 6)
    others = await holding(store, BOB, 0, 2)
    await with_timers(store, *spread(32, at=START - 40))
    begun = await store.begin(ALICE, held, EVERYTHING)
    assert {t.shard for t in begun.timers} == {1, 4, 6}
    assert len(begun.timers) == 12
    assert begun.refused == frozenset()
    # Only the requested shards, although more are held.
    begun = await store.begin(BOB, {2: others[2]}, EVERYTHING)
    assert {t.shard for t in begun.timers} == {2}
    assert (await store.tally())[Status.PENDING] == 16


@pytest.mark.parametrize("shards", [[0], [0, 1, 2], range(7), range(8)], ids=len)
async def test_begin_takes_the_oldest_of_all_held_shards(store: Store, shards: Sequence[int]) -> None:
    """Whatever the shards of the timers are: the result is that of one queue."""
    draw = random.Random(11)
    lanes = [Definition(target=HttpTarget(url=f"https://{host}.example")) for host in ("a", "b", "c")]
    ages = draw.sample(range(1, 10_000), 600)
    timers = [
        # The oldest are in few shards, and many are in one lane.
        timer(f"t{n}", at=START - age, shard=draw.randrange(2 if age > 8_000 else 8), definition=draw.choice(lanes))
        for n, age in enumerate(ages)
    ]
    for first in range(0, len(timers), 100):
        await with_timers(store, *timers[first : first + 100])
    held = await holding(store, ALICE, *shards)
    left = sorted((t for t in timers if t.shard in shards), key=lambda t: t.fire_at)
    for limit, lane_max in ((1, None), (40, None), (60, 25), (40, 10), (40, 40), (3, 1), (20, None)):
        begun = await store.begin(ALICE, held, limit, lane_max=lane_max)
        expected, more = list[Timer](), False
        taken: Counter[int] = Counter()
        for each in left:
            if lane_max is None or taken[each.lane] < lane_max:
                more = len(expected) == limit
                if more:
                    break
                taken[each.lane] += 1
                expected.append(each)
        assert ids(begun.timers) == ids(expected)
        assert begun.more or not more
        left = [each for each in left if each not in expected]


async def test_owner_without_shards_begins_nothing(store: Store) -> None:
    await with_timers(store, timer("a"))
    begun = await store.begin(ALICE, {}, 10)
    assert (begun.timers, begun.refused) == ([], frozenset())
    assert begun.next_at is None


async def test_paused_namespaces_are_skipped_and_begin_after_the_pause(store: Store, clock: ManualClock) -> None:
    held = await holding(store)
    running = await with_namespace(store, "elsewhere")
    mine, theirs = timer("mine", at=START + 50), timer("theirs", at=START - 10, namespace="elsewhere")
    await with_timers(store, mine, theirs, timer("later", at=START + 20, namespace="elsewhere"))
    paused = await switch(store, running, paused=True)
    begun = await store.begin(ALICE, held, 1)
    assert (begun.timers, begun.next_at) == ([], START + 20)
    assert await store.get("elsewhere", "theirs") == theirs
    clock.advance(50)
    assert ids((await store.begin(ALICE, held, 10)).timers) == ["mine"]
    await switch(store, paused, paused=False)
    assert ids((await store.begin(ALICE, held, 10)).timers) == ["theirs", "later"]


async def test_lost_attempt_of_a_paused_namespace_waits(store: Store, clock: ManualClock) -> None:
    running = await with_namespace(store, "elsewhere")
    await with_timers(store, timer("a", namespace="elsewhere"))
    [begun] = (await store.begin(ALICE, await holding(store), 10)).timers
    held = await holding(store)
    paused = await switch(store, running, paused=True)
    assert (await store.begin(ALICE, held, 10)).next_at is None
    assert begun.deadline_at is not None
    clock.advance(begun.deadline_at - START)
    assert (await store.begin(ALICE, held, 10)).timers == []
    await switch(store, paused, paused=False)
    assert ids((await store.begin(ALICE, held, 10)).timers) == ["a"]


# Takeover of attempts that an older version of the shard began.


async def lose(store: Store, *timers: Timer) -> list[Timer]:
    """Let Alice begin these timers and then disappear."""
    held = await holding(store, ALICE)
    await with_timers(store, *timers)
    begun = (await store.begin(ALICE, held, EVERYTHING)).timers
    assert len(begun) == len(timers)
    await store.release(ALICE, held)
    return begun


async def test_lost_attempt_begins_again_at_its_deadline_and_not_before(store: Store, clock: ManualClock) -> None:
    [lost] = await lose(store, timer("a", definition=definition(timeout_ms=TIMEOUT_MS)))
    held = await holding(store, BOB)
    for ms in (0, DEADLINE_MS - 1):
        clock.advance(ms)
        begun = await store.begin(BOB, held, 10)
        assert (begun.timers, begun.next_at) == ([], START + DEADLINE_MS)
        assert await store.get("default", "a") == lost
    clock.advance(1)
    [again] = (await store.begin(BOB, held, 10)).timers
    assert again == lifecycle.begin(lost, now=START + DEADLINE_MS, version=held[0])
    assert (again.attempt, again.lost) == (lost.attempt + 1, lost.lost + 1)
    assert again.delivery_id == lost.delivery_id
    assert again.deadline_at == START + 2 * DEADLINE_MS
    assert await store.get("default", "a") == again
    assert (await store.tally())[Status.EXECUTING] == 1
    # Not again: the attempt is Bob's now.
    clock.advance(10**9)
    assert (await store.begin(BOB, held, 10)).timers == []


async def test_own_attempt_is_not_begun_again_after_its_deadline(store: Store, clock: ManualClock) -> None:
    held = await holding(store)
    await with_timers(store, timer("a"))
    assert len((await store.begin(ALICE, held, 10)).timers) == 1
    clock.advance(10**9)
    await store.renew(ALICE, LEASE_MS)
    begun = await store.begin(ALICE, held, 10)
    assert (begun.timers, begun.next_at) == ([], None)


async def test_claiming_an_own_shard_makes_earlier_attempts_lost(store: Store, clock: ManualClock) -> None:
    await with_timers(store, timer("a"))
    [lost] = (await store.begin(ALICE, await holding(store), 10)).timers
    held = await holding(store)
    assert (await store.begin(ALICE, held, 10)).timers == []
    assert lost.deadline_at is not None
    clock.advance(lost.deadline_at - START)
    [again] = (await store.begin(ALICE, held, 10)).timers
    assert (again.attempt, again.lost, again.version) == (2, 1, lost.version + 1)


async def test_every_lost_attempt_is_counted(store: Store, clock: ManualClock) -> None:
    [lost] = await lose(store, timer("a"))
    for number in range(2, 5):
        held = await holding(store, BOB)
        assert lost.deadline_at is not None
        clock.advance(lost.deadline_at - clock.now())
        [again] = (await store.begin(BOB, held, 10)).timers
        assert (again.attempt, again.lost) == (number, number - 1)
        assert again.delivery_id == lost.delivery_id
        assert again.started_at == START
        lost = again


async def test_lost_and_pending_timers_begin_together_oldest_first(store: Store, clock: ManualClock) -> None:
    await lose(store, *(timer(f"lost{n}", at=START - 100 + n * 10, shard=n) for n in range(3)))
    held = await holding(store, BOB)
    await with_timers(store, *(timer(f"due{n}", at=START - 95 + n * 10, shard=n) for n in range(3)))
    clock.advance(60_000)
    expected = ["lost0", "due0", "lost1", "due1", "lost2", "due2"]
    rounds = [await store.begin(BOB, held, 2) for _ in range(4)]
    assert [t.id for r in rounds for t in r.timers] == expected
    assert [r.next_at for r in rounds[:2]] == [clock.now()] * 2
    assert rounds[3].next_at is None


async def test_lost_attempts_of_other_shards_are_not_begun(store: Store, clock: ManualClock) -> None:
    await lose(store, *spread(8, at=START - 10))
    held = await holding(store, BOB, 2, 3)
    clock.advance(60_000)
    assert {t.shard for t in (await store.begin(BOB, held, 10)).timers} == {2, 3}
    assert {t.version for (_, id), t in (await everything(store)).items() if id not in ("t2", "t3")} == {1}


async def test_recorded_attempt_is_not_lost(store: Store, clock: ManualClock) -> None:
    held = await holding(store)
    await with_timers(store, timer("a"))
    [begun] = (await store.begin(ALICE, held, 10)).timers
    assert await store.record(ALICE, [(begun, completed(begun))]) == [True]
    held = await holding(store)
    clock.advance(10**9)
    again = await store.begin(ALICE, held, 10)
    assert (again.timers, again.next_at) == ([], None)


async def test_begin_and_record_work_with_any_batch_size(store: Store) -> None:
    held = await holding(store)
    final: dict[tuple[str, str], Timer] = {}
    for number in (1, 7, 8, 9, 127, 129, 300):
        await with_timers(store, *spread(number, at=START - number, prefix=f"{number}-"))
        begun = (await store.begin(ALICE, held, EVERYTHING)).timers
        assert ids(begun) == [f"{number}-{n}" for n in range(number)]
        assert await everything(store) == final | {("default", t.id): t for t in begun}
        assert await store.record(ALICE, [(t, completed(t)) for t in begun]) == [True] * number
        final |= {("default", t.id): completed(t) for t in begun}
        assert await everything(store) == final
        assert await store.tally() == dict.fromkeys(Status, 0) | {Status.COMPLETED: len(final)}
