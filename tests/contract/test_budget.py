"""How many bytes a store reads at a time: pages, begins and what is in the way of a put end at a limit, whatever the
number of timers, and whoever goes on from there gets all of them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from msgspec import Raw

from duetime.model import Definition, HttpTarget, Status, Timer
from duetime.store import BEGIN_BYTES_MAX, PAGE_BYTES_MAX, Filter, Place, Portion, Query, Taken
from duetime.stores import sqlite_rows
from tests.clocks import START
from tests.contract.stores import sqlite
from tests.contract.timers import (
    ALICE,
    EVERYTHING,
    ended,
    holding,
    ids,
    timer,
    touched,
    with_namespace,
    with_timers,
)

SIZE = 500_000
NUMBER = 20
PER_PAGE = PAGE_BYTES_MAX // SIZE + 1


def large(id: str, size: int = SIZE, *, host: str = "example.org", make: Any = timer, **changes: Any) -> Timer:
    target = HttpTarget(url=f"https://{host}/due")
    return make(id, definition=Definition(target=target, payload=Raw(b'"%s"' % (b"x" * size))), **changes)


async def pages(store, filter: Filter, limit: int = 1_000) -> list[list[Timer]]:
    found, after = [], None
    while True:
        page = await store.page(filter, limit, after)
        assert page.timers and len(page.timers) <= limit
        found.append(page.timers)
        after: Place | None = page.next
        if after is None:
            return found


@pytest.mark.parametrize(
    "filter",
    [
        Filter(),
        Filter(status=Status.PENDING),
        Filter(status=Status.FAILED),
        Filter(status=Status.COMPLETED),
        Filter(correlation_id="all", namespace="default"),
    ],
    ids=str,
)
async def test_a_page_ends_at_a_number_of_bytes_and_the_next_one_goes_on(store, filter: Filter) -> None:
    await with_namespace(store, "other")
    status = filter.status or Status.PENDING
    timers = []
    for n in range(NUMBER):
        namespace = "default" if filter.namespace or n % 3 else "other"
        fields = {"at": START + n, "namespace": namespace, "correlation_id": "all", "shard": n % 8}
        timers.append(large(f"t{n}", make=partial(ended, status=status) if status.final else timer, **fields))
    await with_timers(store, *timers)
    found = await pages(store, filter)
    sizes = [len(page) for page in found]
    assert max(sizes) <= PER_PAGE and sizes[0] > PER_PAGE // 2
    seen = [timer for page in found for timer in page]
    assert len(seen) == NUMBER and {t.id: t for t in seen} == {t.id: t for t in timers}
    assert seen == (await store.page(filter, 1)).timers + seen[1:]
    assert [len(page) for page in await pages(store, filter, 7)] == [7, 7, 6]


async def test_a_timer_that_is_larger_than_a_page_is_a_page(store) -> None:
    size = PAGE_BYTES_MAX + 1
    await with_timers(store, large("a", size, at=START), large("b", size, at=START + 1), timer("c", at=START + 2))
    found = await pages(store, Filter(status=Status.PENDING))
    assert [ids(page) for page in found] == [["a"], ["b"], ["c"]]


async def test_attempts_and_metadata_count_as_well_as_payloads(store) -> None:
    metadata = Raw(b'"%s"' % (b"m" * SIZE))
    definition = Definition(target=HttpTarget(url="https://example.org/due"), metadata=metadata)
    await with_timers(store, *(timer(f"t{n}", definition=definition) for n in range(NUMBER)))
    assert len((await store.page(Filter(), 1_000)).timers) <= PER_PAGE


async def test_a_brief_list_is_complete_and_leaves_out_what_is_large(store) -> None:
    await with_timers(store, *(large(f"t{n}") for n in range(NUMBER)))
    query = Query(namespace="default", limit=NUMBER - 5, offset=3)
    whole = await store.find(query)
    assert len(whole) == NUMBER - 5 and all(t.definition.payload for t in whole)
    brief = await store.find(Query(namespace="default", limit=NUMBER - 5, offset=3, brief=True))
    assert ids(brief) == ids(whole)
    for one, other in zip(brief, whole, strict=True):
        assert not one.definition.payload and not one.definition.metadata
        assert (one.definition.target, one.status, one.revision) == (
            other.definition.target,
            other.status,
            other.revision,
        )


async def test_a_put_reads_so_much_of_what_is_in_its_way(store) -> None:
    there = [large(f"t{n}", fingerprint=f"f{n}") for n in range(NUMBER)]
    await with_timers(store, *there)
    asked = [timer(f"t{n}") for n in range(NUMBER)]
    asked.insert(7, new := timer("new"))
    answers = await store.put_many(asked)
    assert answers.pop(7) is None and await store.get("default", "new") == new
    whole = [answer for answer in answers if isinstance(answer, Timer)]
    assert 0 < len(whole) <= PER_PAGE
    for before, answer in zip(there, answers, strict=True):
        assert answer in (before, Taken(before.fingerprint))


async def test_a_put_of_one_always_gets_it_whole(store) -> None:
    there = [large(f"t{n}") for n in range(NUMBER)]
    await with_timers(store, *there)
    assert await asyncio.gather(*(store.put(timer(f"t{n}")) for n in range(NUMBER))) == there


# Begins.

PER_BEGIN = BEGIN_BYTES_MAX // SIZE + 1


async def test_a_begin_ends_at_a_number_of_bytes_and_says_that_there_is_more(store) -> None:
    timers = [large(f"t{n}", at=START - NUMBER + n, shard=n % 8) for n in range(NUMBER)]
    await with_timers(store, *timers)
    held = await holding(store)
    begun: list[str] = []
    while len(begun) < NUMBER:
        answer = await store.begin(ALICE, held, EVERYTHING)
        assert 0 < len(answer.timers) <= PER_BEGIN
        begun += ids(answer.timers)
        assert answer.more == (len(begun) < NUMBER)
        assert answer.next_at == (START if answer.more else None)
    assert begun == ids(timers)
    assert (await store.tally())[Status.EXECUTING] == NUMBER


async def test_a_begin_by_lane_gives_each_lane_its_share_of_the_bytes(store) -> None:
    """One lane has the older timers, and may not have all of the bytes for that."""
    old = [large(f"old{n}", host="old.example", at=START - 1_000 + n, shard=n % 8) for n in range(NUMBER)]
    young = [large(f"young{n}", host="young.example", at=START - 100 + n, shard=n % 8) for n in range(NUMBER)]
    await with_timers(store, *old, *young)
    held = await holding(store)
    portions = [Portion(old[0].lane, 40), Portion(young[0].lane, 40)]
    begun: set[str] = set()
    for _ in range(3):
        answer = await store.begin_lanes(ALICE, held, EVERYTHING, portions)
        assert 0 < len(answer.timers) <= PER_BEGIN
        assert min(sum(t.lane == p.lane for t in answer.timers) for p in portions) >= len(answer.timers) // 2
        begun |= set(ids(answer.timers))
        for timers in (old, young):
            left = [t for t in timers if t.id not in begun]
            assert answer.lanes[left[0].lane] == left[0].fire_at  # the oldest of each first
        assert answer.next_at == min(answer.lanes.values())


async def test_one_timer_that_is_too_large_is_begun_alone(store) -> None:
    size = BEGIN_BYTES_MAX + 1
    await with_timers(store, large("a", size, at=START - 9), large("b", size, at=START - 8), timer("c", at=START - 7))
    held = await holding(store)
    answers = [await store.begin(ALICE, held, EVERYTHING) for _ in range(3)]
    assert [ids(answer.timers) for answer in answers] == [["a"], ["b"], ["c"]]
    assert [answer.more for answer in answers] == [True, True, False]


async def test_a_record_that_is_partly_refused_reads_no_timer(tmp_path, clock, monkeypatch) -> None:
    """Of what is there, SQLite needs the revisions alone."""
    store = await sqlite(tmp_path, clock)
    await with_timers(store, *(large(f"t{n}", at=START - 1) for n in range(10)))
    begun = (await store.begin(ALICE, await holding(store), 10)).timers
    assert await store.swap(begun[3], None)
    monkeypatch.setattr(sqlite_rows, "_TIMERS", "must not be read")
    assert await store.record(ALICE, [(t, touched(t)) for t in begun]) == [t is not begun[3] for t in begun]
    await store.close()
