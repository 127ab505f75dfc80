"""Unreadable rows: they do not affect others, are quarantined unchanged, and restored once a program can read them."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from duetime.errors import Quarantined
from duetime.model import DAY_MS, Namespace, Status
from duetime.store import Filter, Portion, Query, Store, Taken
from duetime.stores.mysql.literals import literal
from duetime.stores.mysql.store import MysqlStore
from duetime.stores.sqlite.store import SqliteStore
from duetime.stores.unreadable import QUARANTINED
from tests.clocks import START, ManualClock
from tests.contract.stores import Reopen
from tests.contract.timers import (
    ALICE,
    EVERYTHING,
    LEASE_MS,
    changed,
    completed,
    ended,
    existing,
    holding,
    spread,
    switch,
    timer,
    with_namespace,
    with_timers,
)

GOOD = '{"target":{"type":"http","url":"https://example.org/due"}'
DAMAGE = {
    "broken definition": ("definition", '{"target":{"type":"http","url":"https://exa'),
    "empty definition": ("definition", ""),
    "definition of a wrong type": ("definition", "[1, 2]"),
    "target type": ("definition", '{"target":{"type":"grpc","url":"https://example.org/due"}}'),
    "target without an address": ("definition", '{"target":{"type":"http","url":7}}'),
    "body format": ("definition", GOOD + ',"body":"xml"}'),
    "response protocol": ("definition", GOOD + ',"protocol":"later"}'),
    "definition that looks like two": ("definition", GOOD + '},1],["x"'),
    "broken attempts": ("attempts", "[[1,"),
    "attempts of a wrong type": ("attempts", '{"a":1}'),
    "outcome kind": ("attempts", '[[1,2,3,"eaten"]]'),
    "status": ("status", "snoozed"),
}


@pytest.fixture(autouse=True)
def has_rows() -> None:
    """Selects persistent stores: the memory store decodes nothing."""


async def run(store: Any, statement: str, *arguments: object) -> list[Any]:
    """Run an SQL statement, with parameters in PostgreSQL's syntax."""
    if isinstance(store, SqliteStore):
        spelled = statement.replace("$", "?")
        rows: list[Any] = await store._file.write(lambda c, asked: [c.execute(spelled, arguments).fetchall()], None)
        return rows
    if isinstance(store, MysqlStore):
        for number, argument in reversed(list(enumerate(arguments, 1))):
            statement = statement.replace(f"${number}", literal(argument))
        [done] = await store._pool.write(statement)
        return [tuple(text.decode() if isinstance(text, bytes) else text for text in row) for row in done.rows]
    return [tuple(row) for row in await store._pool.write(statement, *arguments)]


async def damage(store: Store, column: str, value: str, id: str = "bad", table: str = "timers") -> None:
    await run(store, f"UPDATE {table} SET {column} = $1 WHERE id = $2", value, id)


@pytest.mark.parametrize("by_lane", [False, True], ids=["by age", "by lane"])
async def test_unreadable_timer_is_quarantined_and_others_begin(
    store: Any, caplog: pytest.LogCaptureFixture, by_lane: bool
) -> None:
    others = spread(10, at=START - 20)
    await with_timers(store, *(timer(kind, at=START - 50) for kind in DAMAGE), *others)
    for kind, change in DAMAGE.items():
        await damage(store, *change, id=kind)
    held = await holding(store)
    with caplog.at_level(logging.WARNING):
        if by_lane:
            begun = await store.begin_lanes(ALICE, held, EVERYTHING, [Portion(others[0].lane, 50)])
        else:
            begun = await store.begin(ALICE, held, EVERYTHING)
        assert [t.id for t in begun.timers] == [t.id for t in others]
        assert not (await store.begin(ALICE, held, EVERYTHING)).timers
    assert all(await store.record(ALICE, [(t, completed(t)) for t in begun.timers]))
    rows = await run(store, "SELECT id, reason FROM quarantine WHERE namespace = 'default'")
    # SQLite finds unknown statuses when the file is opened.
    aside = DAMAGE.keys() - ({"status"} if isinstance(store, SqliteStore) else set())
    assert (await store.quarantine()).timers == len(rows) and {id for id, _ in rows} == aside
    messages = [record.getMessage() for record in caplog.records]
    for id, reason in rows:
        assert reason and messages.count(f"timer default/{id} can't be read and is quarantined: {reason}") == 1
    for id in DAMAGE:
        with pytest.raises(Quarantined, match=f"default/{id} is quarantined"):
            await store.get("default", id)
        with pytest.raises(Quarantined):
            await store.put(timer(id))
    assert all(isinstance(taken, Taken) for taken in await store.put_many([timer(kind) for kind in DAMAGE]))
    assert (await store.tally())[Status.COMPLETED] == len(others) and (await store.tally())[Status.EXECUTING] == 0
    assert not await store.overdue(list(range(8)), START + 1, 10)
    assert not (await store.lanes(START)).lanes


async def test_timer_with_an_unknown_status_is_quarantined(store: Any, reopened: Reopen) -> None:
    await with_timers(store, timer("bad", at=START - 50), *spread(3, at=START - 20))
    await damage(store, "status", "snoozed")
    again = await reopened(store)
    try:
        assert [t.id for t in (await again.begin(ALICE, await holding(again), 50)).timers] == ["t0", "t1", "t2"]
        assert (await again.quarantine()).timers == 1
        assert await run(again, "SELECT id, status FROM quarantine") == [("bad", "snoozed")]
        third = await reopened(again)
        assert (await third.quarantine()).timers == 1
        await run(third, "UPDATE quarantine SET status = 'pending'")  # as seen by a program that knows the status
        last = await reopened(third)
        try:
            assert (await last.quarantine()).timers == 0
            assert (await existing(last, "bad")).status is Status.PENDING
        finally:
            await last.close()
    finally:
        await again.close()


async def test_lists_omit_unreadable_timers(store: Any) -> None:
    kinds = [kind for kind in DAMAGE if kind != "status"]
    final = [ended(f"final {kind}", Status.FAILED) for kind in kinds]
    await with_timers(store, *(timer(kind, at=START + 9) for kind in kinds), *spread(5, at=START + 5))
    await with_timers(store, *final, ended("ok", Status.FAILED))
    table = "timers" if isinstance(store, SqliteStore) else "history"
    for kind in kinds:
        await damage(store, *DAMAGE[kind], id=kind)
        await damage(store, *DAMAGE[kind], id=f"final {kind}", table=table)
    ids = {f"t{n}" for n in range(5)}
    assert {t.id for t in await store.page_by_offset(Query(namespace="default", limit=50))} == ids | {"ok"}
    for filter, shown in (
        (Filter(), ids | {"ok"}),
        (Filter(namespace="default"), ids | {"ok"}),
        (Filter(status=Status.PENDING), ids),
        (Filter(status=Status.FAILED), {"ok"}),
        (Filter(execute_after=START), ids | {"ok"}),
        (Filter(id=kinds[0]), set()),
    ):
        assert sorted(await paged(store, filter, 2)) == sorted(shown), filter
    news = [timer(kinds[0]), timer(f"final {kinds[1]}"), timer("new"), timer("t0")]
    first, second, third, fourth = await store.put_many(news)
    assert isinstance(first, Taken) and isinstance(second, Taken)
    assert third is None and fourth.id == "t0"
    assert (await existing(store, "new")).id == "new"


async def paged(store: Store, filter: Filter, size: int) -> list[str]:
    """The ids on all pages."""
    found, after = [], None
    for _ in range(100):
        page = await store.page(filter, size, after)
        found += [t.id for t in page.timers]
        if (after := page.next) is None:
            return found
    raise AssertionError("paging does not end")


async def test_page_of_unreadable_timers_has_a_next_page(store: Any) -> None:
    await with_timers(store, *spread(9, at=START + 9))
    await run(store, "UPDATE timers SET attempts = 'x' WHERE id <> 't0' AND id <> 't8'")
    for filter in (Filter(), Filter(status=Status.PENDING), Filter(execute_after=START)):
        assert sorted(await paged(store, filter, 3)) == ["t0", "t8"]


async def test_quarantined_timer_is_kept_unchanged_and_restored(
    store: Any, reopened: Reopen, clock: ManualClock
) -> None:
    bad = timer("bad", at=START - 50, correlation_id="c", attempt=2, failures=1, started_at=START - 90)
    await with_timers(store, bad, *spread(3, at=START - 20))
    await damage(store, "attempts", "oops")
    await store.begin(ALICE, await holding(store), EVERYTHING)
    again = await reopened(store)
    try:
        assert (await again.quarantine()).timers == 1
        clock.advance(LEASE_MS)
        assert "bad" not in {t.id for t in (await again.begin(ALICE, await holding(again), EVERYTHING)).timers}
        await damage(again, "attempts", "[]")  # as seen by a program that can read it
        third = await reopened(again)
        try:
            assert (await third.quarantine()).timers == 0
            back = await existing(third, "bad")
            assert changed(back, revision=0, updated_at=0) == changed(bad, revision=0, updated_at=0)
            assert back.revision > bad.revision
            assert (await third.tally())[Status.PENDING] == 1
            clock.advance(LEASE_MS)
            begun = (await third.begin(ALICE, await holding(third), EVERYTHING)).timers
            assert ("bad", 3) in {(t.id, t.attempt) for t in begun}
            assert {t.delivery_id for t in begun if t.id == "bad"} == {bad.delivery_id}
        finally:
            await third.close()
    finally:
        await again.close()


async def test_unreadable_lost_attempt_is_quarantined(store: Any, reopened: Reopen, clock: ManualClock) -> None:
    await with_timers(store, timer("bad", at=START - 50), *spread(3, at=START - 20))
    begun = (await store.begin(ALICE, await holding(store), EVERYTHING)).timers
    assert len(begun) == 4
    await damage(store, "definition", "{")
    clock.advance(DAY_MS)
    held = await holding(store)
    assert {t.id for t in (await store.begin(ALICE, held, EVERYTHING)).timers} == {"t0", "t1", "t2"}
    assert (await store.quarantine()).timers == 1
    await damage(store, "definition", GOOD + "}")
    again = await reopened(store)
    try:
        clock.advance(DAY_MS)
        assert "bad" in {t.id for t in (await again.begin(ALICE, await holding(again), EVERYTHING)).timers}
    finally:
        await again.close()


async def test_unreadable_row_does_not_affect_recording_others(store: Any) -> None:
    await with_timers(store, timer("bad", at=START - 50), *spread(3, at=START - 20))
    begun = (await store.begin(ALICE, await holding(store), EVERYTHING)).timers
    await damage(store, "definition", "{")
    stale = changed(begun[-1], revision=1)
    assert await store.record(ALICE, [(t, completed(t)) for t in [*begun[:-1], stale]]) == [True, True, True, False]


async def define(store: Store, name: str, definition: bytes) -> None:
    """Write the row of a namespace as another program version would."""
    await run(store, "UPDATE namespaces SET definition = $1 WHERE name = $2", definition, name)
    if isinstance(store, SqliteStore):
        await run(store, "UPDATE meta SET value = value + 1 WHERE name = 'namespaces'")
    if isinstance(store, MysqlStore):
        await run(store, "UPDATE namespaces SET revision = revision + 1 WHERE name = $1", name)


BAD_NAMESPACES = (b"{", b'{"name":"odd"}', b'{"name":"odd","shards":8,"created_at":1,"secrets":[{"id":1}]}', b"[]")


@pytest.mark.parametrize("definition", BAD_NAMESPACES, ids=["broken", "missing", "wrong type", "list"])
async def test_timers_of_an_unreadable_namespace_are_held_back(
    store: Any, caplog: pytest.LogCaptureFixture, definition: bytes
) -> None:
    odd = await with_namespace(store, "odd")
    await with_timers(store, *(changed(t, namespace="odd") for t in spread(3, at=START - 9)), *spread(2, at=START - 5))
    [(whole,)] = await run(store, "SELECT definition FROM namespaces WHERE name = 'odd'")
    await define(store, "odd", definition)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [n.name for n in await store.namespaces()] == ["default"]
    assert len([r for r in caplog.records if "namespace odd can't be read" in r.getMessage()]) == 1
    assert list((await store.quarantine()).namespaces) == ["odd"]
    held = await holding(store)
    assert {lane.namespace for lane in (await store.lanes(START)).lanes} == {"default"}
    assert {o.namespace for o in await store.overdue(list(range(8)), START, 10) if o.paused} == {"odd"}
    lanes = [Portion(t.lane, 9) for t in (timer(), timer(namespace="odd"))]
    begun = (await store.begin_lanes(ALICE, held, 1, lanes)).timers + (await store.begin(ALICE, held, 50)).timers
    assert {(t.namespace, t.id) for t in begun} == {("default", "t0"), ("default", "t1")}
    assert {t.id for t in (await store.page(Filter(namespace="odd"), 50)).timers} == {"t0", "t1", "t2"}
    assert {t.namespace for t in (await store.page(Filter(id="t0"), 50)).timers} == {"default", "odd"}
    with pytest.raises(Quarantined, match="namespace odd"):
        await store.namespace("odd")
    with pytest.raises(Quarantined, match="namespace odd"):
        await store.put_namespace(Namespace(name="odd", shards=8, created_at=START))
    await store.purge(retention_ms=1, limit=50)
    await define(store, "odd", whole)
    assert msgspec.structs.replace(odd, revision=0) in [
        msgspec.structs.replace(n, revision=0) for n in await store.namespaces()
    ]
    assert len((await store.begin(ALICE, held, 50)).timers) == 3


async def test_history_of_an_unreadable_namespace_is_kept(store: Any, clock: ManualClock) -> None:
    kept = await with_namespace(store, "kept", retention_ms=9 * DAY_MS)
    await switch(store, kept, paused=True)
    await with_timers(store, ended("old", Status.FAILED), ended("old", Status.FAILED, namespace="kept"))
    await define(store, "kept", b"{")
    clock.advance(5 * DAY_MS)
    await store.purge(retention_ms=DAY_MS, limit=50)
    assert await store.get("default", "old") is None
    assert (await store.get("kept", "old")).id == "old"


async def test_instance_with_an_unreadable_report_has_no_name(store: Any) -> None:
    await store.renew(ALICE, LEASE_MS)
    await run(store, "UPDATE instances SET about = $1", b'{"name": 7}')
    [instance] = await store.cluster()
    assert (instance.owner_id, instance.about.name) == (ALICE, "")


async def test_former_owner_quarantines_nothing(store: Any, clock: ManualClock) -> None:
    if isinstance(store, SqliteStore):
        pytest.skip("a SQLite file has one owner, and quarantines rows as they were before the begin")
    await with_timers(store, timer("bad", at=START - 50))
    await damage(store, "definition", "{")
    write = store._pool.write
    claimed: list[dict[int, int]] = []

    async def overtaken(*arguments: Any, **named: Any) -> list[Any]:
        if any("INTO quarantine" in str(each) for each in arguments) and not claimed:
            clock.advance(LEASE_MS + 1)
            claimed.append(await store.claim(b"bob".ljust(16, b"."), range(8), LEASE_MS))
        answer: list[Any] = await write(*arguments, **named)
        return answer

    store._pool.write = overtaken
    held = await holding(store)
    assert not (await store.begin(ALICE, held, 50)).timers
    assert (await store.quarantine()).timers == 0
    [(status,)] = await run(store, "SELECT status FROM timers")
    assert status == "executing" != QUARANTINED
    clock.advance(DAY_MS)
    bob = await holding(store, b"carol".ljust(16, b"."))
    assert not (await store.begin(b"carol".ljust(16, b"."), bob, 50)).timers
    assert (await store.quarantine()).timers == 1
