"""Byte limits of reads: pages, begins and the existing timers that a put returns end at a limit, whatever the number of
timers, and the following calls return the rest."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from duetime.model import ABSENT, Definition, HttpTarget, Status, Timer
from duetime.store import BEGIN_BYTES_MAX, PAGE_BYTES_MAX, Cursor, Filter, Portion, Query, Store, Taken
from duetime.stores.sqlite import rows as sqlite_rows
from tests.clocks import START, ManualClock
from tests.contract.needs import lists
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
    made: Timer = make(id, definition=Definition(target=target, payload=Raw(b'"%s"' % (b"x" * size))), **changes)
    return made


async def pages(store: Store, filter: Filter, limit: int = 1_000) -> list[list[Timer]]:
    found: list[list[Timer]] = []
    after: Cursor | None = None
    while True:
        page = await store.page(filter, limit, after)
        assert page.timers and len(page.timers) <= limit
        found.append(page.timers)
        after = page.next
        if after is None:
            return found


@lists
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
async def test_page_ends_at_the_byte_limit_and_the_next_one_continues(store: Store, filter: Filter) -> None:
    await with_namespace(store, "other")
    status = filter.status or Status.PENDING
    timers = []
    for n in range(NUMBER):
        namespace = "default" if filter.namespace or n % 3 else "other"
        fields: dict[str, Any] = {"at": START + n, "namespace": namespace, "correlation_id": "all", "shard": n % 8}
        timers.append(large(f"t{n}", make=partial(ended, status=status) if status.final else timer, **fields))
    await with_timers(store, *timers)
    found = await pages(store, filter)
    sizes = [len(page) for page in found]
    assert max(sizes) <= PER_PAGE and sizes[0] > PER_PAGE // 2
    seen = [timer for page in found for timer in page]
    assert len(seen) == NUMBER and {t.id: t for t in seen} == {t.id: t for t in timers}
    assert seen == (await store.page(filter, 1)).timers + seen[1:]
    assert [len(page) for page in await pages(store, filter, 7)] == [7, 7, 6]


@lists
async def test_timer_larger_than_the_byte_limit_is_a_page_of_its_own(store: Store) -> None:
    size = PAGE_BYTES_MAX + 1
    await with_timers(store, large("a", size, at=START), large("b", size, at=START + 1), timer("c", at=START + 2))
    found = await pages(store, Filter(status=Status.PENDING))
    assert [ids(page) for page in found] == [["a"], ["b"], ["c"]]


@lists
async def test_attempts_and_metadata_count_towards_the_byte_limit(store: Store) -> None:
    metadata = Raw(b'"%s"' % (b"m" * SIZE))
    definition = Definition(target=HttpTarget(url="https://example.org/due"), metadata=metadata)
    await with_timers(store, *(timer(f"t{n}", definition=definition) for n in range(NUMBER)))
    assert len((await store.page(Filter(), 1_000)).timers) <= PER_PAGE


@lists
async def test_brief_list_is_complete_without_payloads_and_metadata(store: Store) -> None:
    await with_timers(store, *(large(f"t{n}") for n in range(NUMBER)))
    query = Query(namespace="default", limit=NUMBER - 5, offset=3)
    whole = await store.page_by_offset(query)
    assert len(whole) == NUMBER - 5 and all(t.definition.payload for t in whole)
    brief = await store.page_by_offset(Query(namespace="default", limit=NUMBER - 5, offset=3, brief=True))
    assert ids(brief) == ids(whole)
    for one, other in zip(brief, whole, strict=True):
        assert not one.definition.payload and not one.definition.metadata
        assert (one.definition.target, one.status, one.revision) == (
            other.definition.target,
            other.status,
            other.revision,
        )


@pytest.mark.parametrize("batch", [False, True])
async def test_many_large_puts_at_the_same_time_are_accepted(store: Store, batch: bool) -> None:
    # SQL text doubles each quote and backslash of what these hold.
    text = Raw(b'"%s"' % (b'\\"' * 60_000))
    target = HttpTarget(url="https://example.org/due", headers={"X-Quotes": '"' * 8_000})
    definition = Definition(target=target, payload=ABSENT if batch else text, metadata=text if batch else ABSENT)
    timers = [timer(f"large-{n}", definition=definition) for n in range(130)]
    if batch:
        assert await store.put_many(timers) == [None] * len(timers)
    else:
        assert await asyncio.gather(*map(store.put, timers)) == [None] * len(timers)
    assert (await store.tally())[Status.PENDING] == len(timers)


async def test_put_many_returns_existing_timers_up_to_the_byte_limit(store: Store) -> None:
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


async def test_single_put_always_returns_the_whole_existing_timer(store: Store) -> None:
    there = [large(f"t{n}") for n in range(NUMBER)]
    await with_timers(store, *there)
    assert await asyncio.gather(*(store.put(timer(f"t{n}")) for n in range(NUMBER))) == there


# Begins.

PER_BEGIN = BEGIN_BYTES_MAX // SIZE + 1


async def test_begin_stops_at_the_byte_limit_and_reports_more(store: Store) -> None:
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


async def test_begin_lanes_shares_the_byte_limit_between_lanes(store: Store) -> None:
    """The lane with the older timers must not get all of the bytes."""
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


async def test_timer_larger_than_the_byte_limit_is_begun_alone(store: Store) -> None:
    size = BEGIN_BYTES_MAX + 1
    await with_timers(store, large("a", size, at=START - 9), large("b", size, at=START - 8), timer("c", at=START - 7))
    held = await holding(store)
    answers = [await store.begin(ALICE, held, EVERYTHING) for _ in range(3)]
    assert [ids(answer.timers) for answer in answers] == [["a"], ["b"], ["c"]]
    assert [answer.more for answer in answers] == [True, True, False]


async def test_partly_rejected_record_reads_no_timer(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite needs to read only the revisions."""
    store = await sqlite(tmp_path, clock)
    await with_timers(store, *(large(f"t{n}", at=START - 1) for n in range(10)))
    begun = (await store.begin(ALICE, await holding(store), 10)).timers
    assert await store.swap(begun[3], None)
    monkeypatch.setattr(sqlite_rows, "_TIMERS", "must not be read")
    assert await store.record(ALICE, [(t, touched(t)) for t in begun]) == [t is not begun[3] for t in begun]
    await store.close()
