"""put, put_many, get: a timer is written once, durably, and comes back whole."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import msgspec
import pytest
from msgspec import Raw

from duetime import lifecycle
from duetime.model import ABSENT, Status, Timer
from tests.clocks import START, ManualClock
from tests.contract.timers import (
    ALICE,
    FULL,
    PLAIN,
    another,
    changed,
    completed,
    definition,
    ended,
    everything,
    holding,
    ids,
    spread,
    timer,
    touched,
    with_timers,
)

PAYLOADS = {
    "absent": ABSENT,
    "null": Raw(b"null"),
    "empty string": Raw(b'""'),
    "odd whitespace": Raw(b'{ "a"\t:\n[ 1 ,2,\r\n  3 ] , "a2" : { } }'),
    "keys in their order": Raw(b'{"z":1,"a":2,"m":3}'),
    "unicode": Raw('{"naïve":"日本語 😀 \u2028\u2029 \x7f ﬁ e\u0301"}'.encode()),
    "escapes": Raw(rb'"\u0041\u00e9\ud83d\ude00\/\b\f\n\r\t\"\\ \u0000"'),
    "big integers": Raw(b"[9007199254740993, 18446744073709551616, -170141183460469231731687303715884105728]"),
    "odd numbers": Raw(b"[-0, -0.0, 1E+2, 1e400, 0.1000000000000000055511151231257827, 1.0]"),
    "quotes": Raw(rb"""{"a'b":"c''d","e\"f":"?1 :now $x %s"}"""),
    "large": Raw(b'"' + b"x" * 200_000 + b'"'),
}


@pytest.mark.parametrize("whole", [FULL, PLAIN], ids=["every field", "no optional field"])
async def test_a_timer_comes_back_whole(store, whole: Timer) -> None:
    await with_timers(store, whole)
    assert await store.get(whole.namespace, whole.id) == whole


def test_the_full_timer_leaves_no_field_to_chance() -> None:
    # Guards the test above against fields that the model gains later.
    for whole, default in [(FULL, PLAIN), (FULL.definition, definition()), (FULL.definition.retry, definition().retry)]:
        for field in msgspec.structs.fields(whole):
            if field.name not in ("namespace", "tag"):
                assert getattr(whole, field.name) != getattr(default, field.name), field.name


@pytest.mark.parametrize("payload", list(PAYLOADS.values()), ids=list(PAYLOADS))
async def test_payload_and_metadata_come_back_byte_for_byte(store, payload: Raw) -> None:
    sent = timer(definition=definition(payload, metadata=payload))
    await store.put(sent)
    [begun] = (await store.begin(ALICE, await holding(store), 10)).timers
    # Also after the row was rewritten from what was read.
    assert await store.swap(begun, touched(begun))
    for came in [begun, await store.get("default", "a"), *(await everything(store)).values()]:
        assert bytes(came.definition.payload) == bytes(payload)
        assert bytes(came.definition.metadata) == bytes(payload)
        assert came.definition == sent.definition


async def test_headers_keep_their_order(store) -> None:
    await with_timers(store, FULL)
    found = await store.get("default", FULL.id)
    assert list(found.definition.target.headers) == ["X-B", "X-A"]


async def test_what_was_never_put_is_not_there(store) -> None:
    await store.put(timer("a"))
    assert await store.get("default", "b") is None
    assert await store.get("elsewhere", "a") is None


@pytest.mark.parametrize("id", ["A", "a ", " a", "á", "a\u0301", "a'--", "a%", "a\\", '"a"', "日本", "a/b", "1", "01"])
async def test_ids_are_told_apart_exactly(store, id: str) -> None:
    await with_timers(store, timer("a"), mine := timer(id))
    assert await store.get("default", id) == mine
    assert (await store.get("default", "a")).id == "a"


async def test_the_same_id_in_another_namespace_is_another_timer(store) -> None:
    here, there = timer("a"), timer("a", namespace="elsewhere")
    await with_timers(store, here, there)
    assert await store.get("default", "a") == here
    assert await store.get("elsewhere", "a") == there


@pytest.mark.parametrize("status", list(Status))
async def test_a_taken_identity_returns_the_timer_that_has_it_and_leaves_it_alone(store, status: Status) -> None:
    first = timer(status=status)
    await with_timers(store, first)
    assert await store.put(another(first)) == first
    assert await store.get("default", "a") == first
    assert (await store.tally())[status] == 1
    assert sum((await store.tally()).values()) == 1


async def test_a_taken_identity_returns_the_timer_as_it_is_now(store, clock: ManualClock) -> None:
    await store.put(first := timer())
    await store.swap(first, canceled := lifecycle.cancel(first, now=clock.now()))
    assert await store.put(another(first)) == canceled


async def test_the_very_same_timer_put_again_finds_its_identity_taken(store) -> None:
    assert await store.put(first := timer()) is None
    assert await store.put(first) == first
    assert await store.put_many([first, changed(first)]) == [first, first]
    assert (await store.tally())[Status.PENDING] == 1


async def test_of_many_concurrent_puts_each_identity_has_one_winner_and_the_others_get_it(store) -> None:
    rng = random.Random(4711)
    asked = [timer(f"t{rng.randrange(150)}", shard=rng.randrange(8)) for _ in range(500)]
    answers = await asyncio.gather(*(store.put(t) for t in asked))
    winners, losers = defaultdict(list), []
    for sent, answer in zip(asked, answers, strict=True):
        if answer is None:
            winners[sent.id].append(sent)
        else:
            losers.append((sent, answer))
    assert winners.keys() == set(ids(asked))
    assert all(len(sent) == 1 for sent in winners.values())
    assert all(answer == winners[sent.id][0] for sent, answer in losers)
    assert await everything(store) == {("default", id): sent for id, [sent] in winners.items()}
    assert (await store.tally())[Status.PENDING] == len(winners)


async def test_put_many_answers_each_in_order(store) -> None:
    there, final = timer("there"), ended("final", Status.FAILED)
    await with_timers(store, there, final)
    new, other = timer("new"), timer("other")
    asked = [another(there), new, another(new), another(final), other, another(other)]
    assert await store.put_many(asked) == [there, None, new, final, None, other]
    assert await everything(store) == {("default", t.id): t for t in [there, final, new, other]}
    assert (await store.tally()) == dict.fromkeys(Status, 0) | {Status.PENDING: 3, Status.FAILED: 1}


@pytest.mark.parametrize("number", [0, 1, 2, 7, 8, 33, 100, 127, 128, 129, 357])
async def test_put_many_of_any_size(store, number: int) -> None:
    sent = spread(number)
    assert await store.put_many(sent) == [None] * number
    assert await everything(store) == {("default", t.id): t for t in sent}
    assert (await store.tally())[Status.PENDING] == number


async def test_concurrent_put_manys_are_each_answered_for_their_own(store) -> None:
    batches = [[timer(f"t{(start + n) % 60}") for n in range(7)] for start in range(0, 180, 3)]
    answers = await asyncio.gather(*(store.put_many(batch) for batch in batches))
    there = await everything(store)
    assert len(there) == 60
    won = 0
    for batch, answer in zip(batches, answers, strict=True):
        for sent, found in zip(batch, answer, strict=True):
            won += found is None
            assert there["default", sent.id] == (found or sent)
    assert won == 60


async def test_a_put_is_seen_by_every_read_that_starts_after_it(store) -> None:
    for sent in spread(15):
        await store.put(sent)
        found = await asyncio.gather(*(store.get("default", sent.id) for _ in range(3)))
        assert found == [sent] * 3


async def test_everything_is_there_after_reopening(store, reopened, clock: ManualClock) -> None:
    await with_timers(store, *spread(20, at=START - 30), PLAIN, final := ended("final", Status.CANCELED))
    held = await holding(store)
    begun = (await store.begin(ALICE, held, 5)).timers
    await store.record(ALICE, [(t, completed(t)) for t in begun])
    before, tally = await everything(store), await store.tally()
    again = await reopened(store)
    try:
        assert await everything(again) == before
        assert await again.get("default", "final") == final
        assert await again.tally() == tally
        # New timers come after the old ones.
        await again.put(timer("late"))
        assert next(iter(await everything(again))) == ("default", "late")
    finally:
        await again.close()
