"""purge and the namespaces: what is dropped when, and what a namespace is."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from duetime.errors import TooManyNamespaces
from duetime.model import DAY_MS, FOREVER_MS, Namespace, Secret, Status
from duetime.stores.memory import MemoryStore
from tests.clocks import START, ManualClock
from tests.contract.timers import (
    changed_to,
    ended,
    everything,
    spread,
    switch,
    timer,
    with_namespace,
    with_timers,
)

FINAL = [Status.COMPLETED, Status.FAILED, Status.CANCELED]


async def test_a_final_timer_is_dropped_once_it_is_older_than_the_retention(store, clock: ManualClock) -> None:
    await with_timers(store, *(ended(status.value, status, at=START) for status in FINAL))
    clock.advance(1000)
    assert await store.purge(retention_ms=1000, limit=100) == 0
    assert len(await everything(store)) == 3
    clock.advance(1)
    assert await store.purge(retention_ms=1000, limit=100) == 3
    assert await everything(store) == {}
    assert await store.tally() == dict.fromkeys(Status, 0)
    assert await store.purge(retention_ms=1000, limit=100) == 0


async def test_age_counts_from_the_last_change_and_not_from_creation(store, clock: ManualClock) -> None:
    clock.advance(DAY_MS)
    old = ended("old", Status.COMPLETED, at=START, created_at=clock.now(), execute_at=clock.now())
    young = ended("young", Status.COMPLETED, at=clock.now(), created_at=START, execute_at=START)
    await with_timers(store, old, young)
    assert await store.purge(retention_ms=1000, limit=100) == 1
    assert list((await everything(store)).values()) == [young]


@pytest.mark.parametrize("retention_ms", [0, 1])
async def test_pending_and_executing_timers_are_never_dropped(store, clock: ManualClock, retention_ms: int) -> None:
    kept = [timer("pending"), timer("executing", status=Status.EXECUTING, deadline_at=START, version=1)]
    await with_timers(store, *kept, ended("final", Status.FAILED))
    clock.advance(1000 * DAY_MS)
    assert await store.purge(retention_ms=retention_ms, limit=100) == 1
    assert await everything(store) == {("default", t.id): t for t in kept}
    assert await store.tally() == dict.fromkeys(Status, 0) | {Status.PENDING: 1, Status.EXECUTING: 1}


async def test_no_more_than_the_limit_is_dropped_at_once(store, clock: ManualClock) -> None:
    await with_namespace(store, "elsewhere")
    for namespace in ("default", "elsewhere"):
        for status in FINAL:
            await with_timers(store, *(ended(f"{status}{n}", status, namespace=namespace) for n in range(5)))
    clock.advance(10)
    assert [await store.purge(retention_ms=1, limit=12) for _ in range(4)] == [12, 12, 6, 0]
    assert await everything(store) == {}
    assert await store.tally() == dict.fromkeys(Status, 0)


async def test_what_is_left_after_a_limited_purge_is_counted_right(store, clock: ManualClock) -> None:
    for status in FINAL:
        await with_timers(store, *(ended(f"{status}{n}", status, at=START + n) for n in range(5)))
    clock.advance(100)
    for left in (11, 7, 3):
        assert await store.purge(retention_ms=1, limit=4) == 4
        there = await everything(store)
        assert len(there) == left
        assert await store.tally() == {s: sum(t.status is s for t in there.values()) for s in Status}


async def test_a_namespaces_own_retention_goes_before_the_given_one(store, clock: ManualClock) -> None:
    await with_namespace(store, "short", retention_ms=10)
    await with_namespace(store, "long", retention_ms=DAY_MS)
    await with_namespace(store, "none", retention_ms=0)
    await with_namespace(store, "forever", retention_ms=FOREVER_MS)
    names = ["default", "short", "long", "none", "forever"]
    await with_timers(store, *(ended("a", Status.COMPLETED, namespace=name) for name in names))

    async def left_after(ms: int) -> list[str]:
        clock.advance(ms)
        await store.purge(retention_ms=1000, limit=100)
        return [name for name in names if await store.get(name, "a")]

    assert await left_after(0) == names
    assert await left_after(1) == ["default", "short", "long", "forever"]
    assert await left_after(9) == ["default", "short", "long", "forever"]
    assert await left_after(1) == ["default", "long", "forever"]
    assert await left_after(989) == ["default", "long", "forever"]
    assert await left_after(1) == ["long", "forever"]
    assert await left_after(DAY_MS) == ["forever"]
    assert await left_after(100_000 * DAY_MS) == ["forever"]
    for name in names:
        assert (await store.tally(name))[Status.COMPLETED] == (name == "forever")


async def test_forever_may_be_the_given_one(store, clock: ManualClock) -> None:
    await with_namespace(store, "short", retention_ms=10)
    await with_timers(store, ended("a", Status.FAILED), ended("a", Status.FAILED, namespace="short"))
    clock.advance(100_000 * DAY_MS)
    assert await store.purge(retention_ms=FOREVER_MS, limit=100) == 1
    assert list(await everything(store)) == [("default", "a")]


async def test_a_retention_that_changes_counts_at_the_next_purge(store, clock: ManualClock) -> None:
    [default] = await store.namespaces()
    await with_timers(store, ended("a", Status.COMPLETED))
    clock.advance(100)
    keeping = await switch(store, default, retention_ms=FOREVER_MS)
    assert await store.purge(retention_ms=1, limit=10) == 0
    await switch(store, keeping, retention_ms=None)
    assert await store.purge(retention_ms=1, limit=10) == 1


async def test_a_purged_identity_is_free_again(store, clock: ManualClock) -> None:
    await with_timers(store, ended("a", Status.COMPLETED))
    clock.advance(100)
    await store.purge(retention_ms=1, limit=10)
    assert await store.put(again := timer("a")) is None
    assert await store.get("default", "a") == again


async def test_purges_at_once_drop_each_timer_once(store, clock: ManualClock) -> None:
    await with_timers(store, *(ended(t.id, Status.COMPLETED) for t in spread(50)))
    clock.advance(100)
    assert sum(await asyncio.gather(*(store.purge(retention_ms=1, limit=20) for _ in range(4)))) == 50
    assert await store.tally() == dict.fromkeys(Status, 0)


async def test_a_namespace_with_few_old_timers_does_not_wait_for_one_with_many(store, clock: ManualClock) -> None:
    await with_namespace(store, "few")
    await with_timers(store, *(ended(f"t{n}", Status.COMPLETED) for n in range(300)))
    await with_timers(store, ended("a", Status.COMPLETED, namespace="few"), ended("b", Status.FAILED, namespace="few"))
    clock.advance(100)
    assert await store.purge(retention_ms=1, limit=50) == 50
    if not isinstance(store, MemoryStore):  # which does not ask namespace by namespace
        assert await store.tally("few") == dict.fromkeys(Status, 0)
    assert await store.purge(retention_ms=1, limit=1_000) == 302 - 50
    assert await everything(store) == {}


async def test_old_timers_of_many_namespaces_go_in_one_purge(store, clock: ManualClock) -> None:
    names = [f"n{n}" for n in range(150)]
    for name in names:
        await with_namespace(store, name)
    for status in FINAL:
        await with_timers(store, *(ended(status.value, status, namespace=name) for name in names))
    await with_timers(store, *(ended(f"t{n}", Status.COMPLETED) for n in range(50)))
    clock.advance(100)
    assert await store.purge(retention_ms=1, limit=450) == 450
    assert await store.purge(retention_ms=1, limit=10**6) == 50
    assert await store.tally() == dict.fromkeys(Status, 0)


# Namespaces.

TEAM = Namespace(
    name="team é/1",
    shards=3,
    created_at=START - 9,
    retention_ms=DAY_MS,
    paused=True,
    weight=7,
    revision=4,
    secrets=(
        Secret(id="old", key=bytes(range(256)), created_at=1, expires_at=START),
        Secret(id="new", key=b"\0\xff", created_at=2),
    ),
)


async def by_name(store) -> dict[str, Namespace]:
    return {namespace.name: namespace for namespace in await store.namespaces()}


async def test_the_default_namespace_is_there_from_the_start(store) -> None:
    assert await store.namespaces() == [Namespace(name="default", shards=store.shards, created_at=START)]


async def test_a_namespace_comes_back_whole(store) -> None:
    assert await store.put_namespace(TEAM) is None
    assert (await by_name(store))[TEAM.name] == TEAM
    assert set(await by_name(store)) == {"default", TEAM.name}


async def test_a_taken_name_returns_the_namespace_that_has_it_and_leaves_it_alone(store) -> None:
    await store.put_namespace(TEAM)
    before = await by_name(store)
    assert await store.put_namespace(Namespace(name=TEAM.name, shards=1, created_at=START)) == TEAM
    assert await store.put_namespace(Namespace(name="default", shards=1, created_at=0)) == before["default"]
    assert await by_name(store) == before


async def test_of_many_new_namespaces_of_one_name_one_wins(store) -> None:
    rivals = [Namespace(name="new", shards=n, created_at=START) for n in range(1, 9)]
    answers = await asyncio.gather(*(store.put_namespace(rival) for rival in rivals))
    winner = (await by_name(store))["new"]
    assert answers == [None if rival == winner else winner for rival in rivals]


async def test_a_namespace_is_found_by_its_name(store) -> None:
    assert await store.namespace(TEAM.name) is None
    await store.put_namespace(TEAM)
    assert await store.namespace(TEAM.name) == TEAM
    after = await switch(store, TEAM, paused=False)
    assert await store.namespace(TEAM.name) == after


async def test_no_more_namespaces_are_made_than_there_may_be(store) -> None:
    assert await store.put_namespace(TEAM, 2) is None
    another = Namespace(name="another", shards=1, created_at=START)
    for most in (2, 1):
        with pytest.raises(TooManyNamespaces, match=f"{most} namespaces"):
            await store.put_namespace(another, most)
        assert await store.put_namespace(changed_to(TEAM), most) == TEAM  # what is there already stays as it is
    assert set(await by_name(store)) == {"default", TEAM.name}
    assert await store.put_namespace(another, 3) is None
    assert await store.put_namespace(Namespace(name="one more", shards=1, created_at=START)) is None


async def test_who_asks_for_the_namespaces_again_sees_every_change(store) -> None:
    for n in range(5):
        await store.put_namespace(Namespace(name=f"n{n}", shards=1, created_at=START))
        there = await by_name(store)
        assert len(there) == 2 + n
        there[f"n{n}"] = await switch(store, there[f"n{n}"], weight=2 + n)
        assert await by_name(store) == there
        assert await by_name(store) == there


async def test_a_namespace_is_swapped_only_at_its_revision(store) -> None:
    await store.put_namespace(TEAM)
    after = changed_to(TEAM, paused=False, retention_ms=None, secrets=TEAM.secrets[1:], weight=2)
    assert await store.swap_namespace(after, changed_to(after)) is False
    assert (await by_name(store))[TEAM.name] == TEAM
    assert await store.swap_namespace(TEAM, after) is True
    assert (await by_name(store))[TEAM.name] == after
    assert await store.swap_namespace(TEAM, after) is False
    assert set(await by_name(store)) == {"default", TEAM.name}


async def test_a_namespace_that_looks_as_before_is_at_another_revision(store) -> None:
    """Of two who read a namespace before it was paused and resumed, neither may write over that."""
    await store.put_namespace(TEAM)
    again = await switch(store, await switch(store, TEAM, paused=False), paused=True)
    assert await store.swap_namespace(TEAM, changed_to(TEAM, retention_ms=1)) is False
    assert (await by_name(store))[TEAM.name] == again
    assert msgspec.structs.replace(again, revision=TEAM.revision) == TEAM


async def test_a_namespace_that_is_not_there_is_not_swapped(store) -> None:
    assert await store.swap_namespace(TEAM, changed_to(TEAM)) is False
    assert set(await by_name(store)) == {"default"}


async def test_of_many_swaps_of_a_namespace_one_wins(store) -> None:
    [default] = await store.namespaces()
    rivals = [changed_to(default, retention_ms=n) for n in range(1, 9)]
    won = await asyncio.gather(*(store.swap_namespace(default, rival) for rival in rivals))
    assert won.count(True) == 1
    assert await store.namespaces() == [rivals[won.index(True)]]


async def test_namespaces_survive_reopening(store, reopened) -> None:
    await store.put_namespace(TEAM)
    before = await by_name(store)
    again = await reopened(store)
    try:
        assert await by_name(again) == before
    finally:
        await again.close()


# The rest of the port.


async def test_a_store_that_works_can_be_read_and_has_not_failed(store) -> None:
    await store.ping()
    failure = asyncio.ensure_future(store.failure())
    await store.put(timer())
    assert not failure.done()
    failure.cancel()
