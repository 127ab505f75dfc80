"""record: the outcomes of attempts, each accepted or rejected separately, with results in order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from duetime import lifecycle
from duetime.model import Outcome, OutcomeKind, Status, Timer, replace
from duetime.store import Store
from tests.clocks import START, ManualClock
from tests.contract.timers import (
    ALICE,
    BROKEN,
    EVERYTHING,
    another,
    changed,
    completed,
    definition,
    everything,
    holding,
    ids,
    spread,
    timer,
    touched,
    with_timers,
)

RESCHEDULING = Outcome(
    kind=OutcomeKind.ANSWERED, status=200, body=b'{"ok": false, "nextExecuteAt": "2031-01-01T00:00:00Z"}'
)


async def begun(store: Store, number: int = 1, **changes: Any) -> list[Timer]:
    held = await holding(store)
    await with_timers(store, *(changed(t, **changes) for t in spread(number, at=START - number)))
    return (await store.begin(ALICE, held, EVERYTHING)).timers


def settled(timer: Timer, outcome: Outcome) -> Timer:
    return lifecycle.settle(timer, outcome, sent_at=START, now=START + 9, uniform=lambda low, high: high)


WAYS: dict[str, tuple[Callable[[Timer], Timer], Status]] = {
    "completed": (completed, Status.COMPLETED),
    "to be retried": (lambda t: settled(t, BROKEN), Status.PENDING),
    "failed": (lambda t: settled(changed(t, failures=99), BROKEN), Status.FAILED),
    "rescheduled": (lambda t: settled(t, RESCHEDULING), Status.PENDING),
    "deferred": (lambda t: lifecycle.defer(t, fire_at=START + 5, now=START + 9), Status.PENDING),
    "given up": (lambda t: lifecycle.give_up(t, now=START + 9), Status.FAILED),
}


@pytest.mark.parametrize("way", WAYS)
async def test_recorded_timer_is_stored(store: Store, way: str) -> None:
    changes: dict[str, Any] = {
        "correlation_id": "kept",
        "fingerprint": "kept",
        "definition": definition(timeout_ms=7),
        "lost": 2,
    }
    [first] = await begun(store, **changes)
    become, status = WAYS[way]
    after = become(first)
    assert after.status is status
    assert await store.record(ALICE, [(first, after)]) == [True]
    assert await store.get("default", first.id) == after
    assert await store.tally() == dict.fromkeys(Status, 0) | {status: 1}
    assert await store.tally("default") == await store.tally()


@pytest.mark.parametrize("way", ["to be retried", "rescheduled", "deferred"])
async def test_recorded_retry_begins_again(store: Store, clock: ManualClock, way: str) -> None:
    [first] = await begun(store)
    after = WAYS[way][0](first)
    await store.record(ALICE, [(first, after)])
    held = (await store.renew(ALICE, 1)).held
    answer = await store.begin(ALICE, held, 10)
    assert (answer.timers, answer.next_at) == ([], after.fire_at)
    clock.advance(after.fire_at - START)
    [again] = (await store.begin(ALICE, held, 10)).timers
    assert again == lifecycle.begin(after, now=after.fire_at, version=held[first.shard])
    assert (again.delivery_id == first.delivery_id) is (way != "rescheduled")
    assert again.attempt == {"to be retried": 2, "rescheduled": 1, "deferred": 1}[way]


async def test_mixed_outcomes_are_recorded_in_order(store: Store) -> None:
    timers = await begun(store, 60)
    random.Random(2).shuffle(timers)
    ways = [become for become, _ in WAYS.values()]
    changes = [(t, ways[n % len(ways)](t)) for n, t in enumerate(timers)]
    assert await store.record(ALICE, changes) == [True] * 60
    assert await everything(store) == {("default", after.id): after for _, after in changes}
    tally = dict.fromkeys(Status, 0)
    for _, after in changes:
        tally[after.status] += 1
    assert await store.tally() == tally


async def test_record_accepts_an_empty_batch(store: Store) -> None:
    assert await store.record(ALICE, []) == []


@pytest.mark.parametrize("steps", [pytest.param(1, id="by one"), pytest.param(2, id="by two")])
async def test_changed_timer_is_rejected_and_others_are_recorded(store: Store, steps: int) -> None:
    timers = await begun(store, 20)
    moved = {}
    for t in timers[::3]:
        current = t
        for _ in range(steps):
            before, current = current, touched(current)
            assert await store.swap(before, current)
        moved[t.id] = current
    changes = [(t, completed(t)) for t in timers]
    assert await store.record(ALICE, changes) == [t.id not in moved for t in timers]
    assert await everything(store) == {("default", b.id): moved.get(b.id, a) for b, a in changes}
    tally = {Status.COMPLETED: 20 - len(moved), Status.EXECUTING: len(moved)}
    assert await store.tally() == dict.fromkeys(Status, 0) | tally


async def test_attempt_is_recorded_only_once(store: Store) -> None:
    timers = await begun(store, 3)
    first = [(t, completed(t)) for t in timers]
    assert await store.record(ALICE, first) == [True] * 3
    there = await everything(store)
    for again in (first, [(t, settled(t, BROKEN)) for t in timers]):
        assert await store.record(ALICE, again) == [False] * 3
        assert await everything(store) == there
        assert await store.tally() == dict.fromkeys(Status, 0) | {Status.COMPLETED: 3}


async def test_concurrent_records_of_one_attempt_have_one_winner(store: Store) -> None:
    [first] = await begun(store)
    rivals = [completed(first), settled(first, BROKEN)]
    won = [one for [one] in await asyncio.gather(*(store.record(ALICE, [(first, after)]) for after in rivals))]
    assert sorted(map(str, won)) == ["False", "True"]
    assert await store.get("default", first.id) == rivals[won.index(True)]
    assert sum((await store.tally()).values()) == 1


async def test_first_of_two_changes_in_one_batch_wins(store: Store) -> None:
    [first, other] = await begun(store, 2)
    changes = [(first, completed(first)), (other, completed(other)), (first, settled(first, BROKEN))]
    assert await store.record(ALICE, changes) == [True, True, False]
    assert await store.get("default", first.id) == completed(first)
    assert await store.tally() == dict.fromkeys(Status, 0) | {Status.COMPLETED: 2}


async def test_deleted_timer_is_rejected(store: Store) -> None:
    timers = await begun(store, 5)
    await store.swap(timers[2], None)
    await store.swap(timers[4], None)
    await store.put(again := another(timers[4]))
    assert await store.record(ALICE, [(t, completed(t)) for t in timers]) == [True, True, False, True, False]
    assert await store.get("default", timers[2].id) is None
    assert await store.get("default", again.id) == again
    assert await store.tally() == dict.fromkeys(Status, 0) | {Status.COMPLETED: 3, Status.PENDING: 1}


async def test_concurrent_records_get_their_own_results(store: Store) -> None:
    timers = await begun(store, 200)
    batches = [timers[n : n + 7] for n in range(0, 200, 7)]
    stale = {t.id for t in timers[::5]}
    for t in timers[::5]:
        assert await store.swap(t, None)
    answers = await asyncio.gather(*(store.record(ALICE, [(t, completed(t)) for t in batch]) for batch in batches))
    for batch, answer in zip(batches, answers, strict=True):
        assert answer == [t.id not in stale for t in batch]
    assert sorted(ids(list((await everything(store)).values()))) == sorted({t.id for t in timers} - stale)
    assert (await store.tally())[Status.COMPLETED] == 160


async def test_recorded_timer_keeps_its_position_in_creation_order(store: Store, clock: ManualClock) -> None:
    timers = await begun(store, 3)
    await store.put(timer("last", at=START + 10**6, created_at=START + 1))
    await store.record(ALICE, [(t, replace(completed(t), updated_at=START + 10**7)) for t in reversed(timers)])
    assert [id for _, id in await everything(store)] == ["last", "t2", "t1", "t0"]
