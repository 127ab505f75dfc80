"""put, put_many, get: a timer is written once, durably, and read as written."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import msgspec
import pytest
from msgspec import Raw

from duetime import lifecycle
from duetime.model import ABSENT, HttpTarget, Status, Timer
from duetime.store import Order, Store
from tests.clocks import START, ManualClock
from tests.contract.stores import Reopen
from tests.contract.timers import (
    ALICE,
    EVERYTHING,
    FULL,
    PLAIN,
    another,
    changed,
    completed,
    definition,
    ended,
    everything,
    existing,
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
async def test_timer_is_read_as_written(store: Store, whole: Timer) -> None:
    await with_timers(store, whole)
    assert await store.get(whole.namespace, whole.id) == whole


def test_full_timer_sets_every_field() -> None:
    # Makes the test above cover fields that the model gains later.
    for whole, default in [(FULL, PLAIN), (FULL.definition, definition()), (FULL.definition.retry, definition().retry)]:
        for field in msgspec.structs.fields(whole):
            if field.name not in ("namespace", "tag"):
                assert getattr(whole, field.name) != getattr(default, field.name), field.name


async def test_payload_and_metadata_are_preserved_byte_for_byte(store: Store) -> None:
    for name, payload in PAYLOADS.items():
        await store.put(timer(name, definition=definition(payload, metadata=payload)))
    begun = {t.id: t for t in (await store.begin(ALICE, await holding(store), EVERYTHING)).timers}
    # Also after the row was rewritten from the timer that was read.
    assert all([await store.swap(t, touched(t)) for t in begun.values()])
    whole = {t.id: t for t in (await everything(store)).values()}
    for name, payload in PAYLOADS.items():
        for came in (begun[name], await existing(store, name), whole[name]):
            assert bytes(came.definition.payload) == bytes(payload), name
            assert bytes(came.definition.metadata) == bytes(payload), name
            assert came.definition == definition(payload, metadata=payload)


async def test_headers_keep_their_order(store: Store) -> None:
    await with_timers(store, FULL)
    found = await existing(store, FULL.id)
    assert isinstance(found.definition.target, HttpTarget)
    assert list(found.definition.target.headers) == ["X-B", "X-A"]


async def test_get_of_an_unknown_timer_returns_none(store: Store) -> None:
    await store.put(timer("a"))
    assert await store.get("default", "b") is None
    assert await store.get("elsewhere", "a") is None


async def test_similar_ids_are_different_timers(store: Store) -> None:
    odd = ("a", "A", "a ", " a", "á", "a\u0301", "a'--", "a%", "a\\", '"a"', "日本", "a/b", "1", "01")
    await with_timers(store, *(timers := [timer(id) for id in odd]))
    assert [await store.get("default", id) for id in odd] == timers


async def test_same_id_in_another_namespace_is_another_timer(store: Store) -> None:
    here, there = timer("a"), timer("a", namespace="elsewhere")
    await with_timers(store, here, there)
    assert await store.get("default", "a") == here
    assert await store.get("elsewhere", "a") == there


@pytest.mark.parametrize("status", list(Status))
async def test_put_of_an_existing_identity_returns_that_timer_unchanged(store: Store, status: Status) -> None:
    first = timer(status=status)
    await with_timers(store, first)
    assert await store.put(another(first)) == first
    assert await store.get("default", "a") == first
    assert (await store.tally())[status] == 1
    assert sum((await store.tally()).values()) == 1


async def test_put_of_an_existing_identity_returns_its_current_state(store: Store, clock: ManualClock) -> None:
    await store.put(first := timer())
    await store.swap(first, canceled := lifecycle.cancel(first, now=clock.now()))
    assert await store.put(another(first)) == canceled


async def test_repeated_put_of_the_same_timer_returns_it(store: Store) -> None:
    assert await store.put(first := timer()) is None
    assert await store.put(first) == first
    assert await store.put_many([first, changed(first)]) == [first, first]
    assert (await store.tally())[Status.PENDING] == 1


async def test_concurrent_puts_of_one_identity_have_one_winner(store: Store) -> None:
    rng = random.Random(4711)
    asked = [timer(f"t{n}", shard=n % 8) for n in (rng.randrange(150) for _ in range(500))]
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


async def test_put_many_returns_results_in_order(store: Store) -> None:
    there, final = timer("there"), ended("final", Status.FAILED)
    await with_timers(store, there, final)
    new, other = timer("new"), timer("other")
    asked = [another(there), new, another(new), another(final), other, another(other)]
    assert await store.put_many(asked) == [there, None, new, final, None, other]
    assert await everything(store) == {("default", t.id): t for t in [there, final, new, other]}
    assert (await store.tally()) == dict.fromkeys(Status, 0) | {Status.PENDING: 3, Status.FAILED: 1}


async def test_put_many_works_with_any_number_of_timers(store: Store) -> None:
    there: dict[tuple[str, str], Timer] = {}
    for number in (0, 1, 2, 7, 8, 33, 100, 127, 128, 129, 357):
        sent = spread(number, prefix=f"{number}-")
        assert await store.put_many(sent) == [None] * number
        there |= {("default", t.id): t for t in sent}
        assert await everything(store) == there
        assert (await store.tally())[Status.PENDING] == len(there)


async def test_concurrent_put_many_calls_get_their_own_results(store: Store) -> None:
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


async def test_reads_after_a_put_see_it(store: Store) -> None:
    for sent in spread(15):
        await store.put(sent)
        found = await asyncio.gather(*(store.get("default", sent.id) for _ in range(3)))
        assert found == [sent] * 3


async def test_timers_survive_reopening(store: Store, reopened: Reopen, clock: ManualClock) -> None:
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
        if Order.NEWEST in again.abilities.orders:
            # New timers are after the old ones in creation order.
            await again.put(timer("late"))
            assert next(iter(await everything(again))) == ("default", "late")
    finally:
        await again.close()
