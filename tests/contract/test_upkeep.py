"""purge and namespaces: retention, and reading and writing namespaces."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from duetime.errors import TooManyNamespaces
from duetime.instants import EPOCH, Instant
from duetime.model import DAY_MS, FOREVER_MS, Namespace, Secret, Status
from duetime.store import Store
from duetime.stores.memory import MemoryStore
from tests.clocks import START, ManualClock
from tests.contract.needs import purge
from tests.contract.stores import Reopen
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


@purge
async def test_final_timer_older_than_the_retention_is_deleted(store: Store, clock: ManualClock) -> None:
    await with_timers(store, *(ended(status.value, status, at=START) for status in FINAL))
    clock.advance(1000)
    assert await store.purge(retention_ms=1000, limit=100) == 0
    assert len(await everything(store)) == 3
    clock.advance(1)
    assert await store.purge(retention_ms=1000, limit=100) == 3
    assert await everything(store) == {}
    assert await store.tally() == dict.fromkeys(Status, 0)
    assert await store.purge(retention_ms=1000, limit=100) == 0


@purge
async def test_age_counts_from_the_last_change(store: Store, clock: ManualClock) -> None:
    clock.advance(DAY_MS)
    old = ended("old", Status.COMPLETED, at=START, created_at=clock.now(), execute_at=clock.now())
    young = ended("young", Status.COMPLETED, at=clock.now(), created_at=START, execute_at=START)
    await with_timers(store, old, young)
    assert await store.purge(retention_ms=1000, limit=100) == 1
    assert list((await everything(store)).values()) == [young]


@purge
@pytest.mark.parametrize("retention_ms", [0, 1])
async def test_pending_and_executing_timers_are_never_deleted(
    store: Store, clock: ManualClock, retention_ms: int
) -> None:
    kept = [timer("pending"), timer("executing", status=Status.EXECUTING, deadline_at=START, version=1)]
    await with_timers(store, *kept, ended("final", Status.FAILED))
    clock.advance(1000 * DAY_MS)
    assert await store.purge(retention_ms=retention_ms, limit=100) == 1
    assert await everything(store) == {("default", t.id): t for t in kept}
    assert await store.tally() == dict.fromkeys(Status, 0) | {Status.PENDING: 1, Status.EXECUTING: 1}


@purge
async def test_purge_deletes_at_most_the_limit(store: Store, clock: ManualClock) -> None:
    await with_namespace(store, "elsewhere")
    for namespace in ("default", "elsewhere"):
        for status in FINAL:
            await with_timers(store, *(ended(f"{status}{n}", status, namespace=namespace) for n in range(5)))
    clock.advance(10)
    assert [await store.purge(retention_ms=1, limit=12) for _ in range(4)] == [12, 12, 6, 0]
    assert await everything(store) == {}
    assert await store.tally() == dict.fromkeys(Status, 0)


@purge
async def test_counts_are_correct_after_a_limited_purge(store: Store, clock: ManualClock) -> None:
    for status in FINAL:
        await with_timers(store, *(ended(f"{status}{n}", status, at=START + n) for n in range(5)))
    clock.advance(100)
    for left in (11, 7, 3):
        assert await store.purge(retention_ms=1, limit=4) == 4
        there = await everything(store)
        assert len(there) == left
        assert await store.tally() == {s: sum(t.status is s for t in there.values()) for s in Status}


@purge
async def test_retention_of_a_namespace_overrides_the_given_one(store: Store, clock: ManualClock) -> None:
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


@purge
async def test_given_retention_can_be_unlimited(store: Store, clock: ManualClock) -> None:
    await with_namespace(store, "short", retention_ms=10)
    await with_timers(store, ended("a", Status.FAILED), ended("a", Status.FAILED, namespace="short"))
    clock.advance(100_000 * DAY_MS)
    assert await store.purge(retention_ms=FOREVER_MS, limit=100) == 1
    assert list(await everything(store)) == [("default", "a")]


@purge
async def test_changed_retention_applies_to_the_next_purge(store: Store, clock: ManualClock) -> None:
    [default] = await store.namespaces()
    await with_timers(store, ended("a", Status.COMPLETED))
    clock.advance(100)
    keeping = await switch(store, default, retention_ms=FOREVER_MS)
    assert await store.purge(retention_ms=1, limit=10) == 0
    await switch(store, keeping, retention_ms=None)
    assert await store.purge(retention_ms=1, limit=10) == 1


@purge
async def test_identity_of_a_purged_timer_can_be_reused(store: Store, clock: ManualClock) -> None:
    await with_timers(store, ended("a", Status.COMPLETED))
    clock.advance(100)
    await store.purge(retention_ms=1, limit=10)
    assert await store.put(again := timer("a")) is None
    assert await store.get("default", "a") == again


@purge
async def test_concurrent_purges_delete_each_timer_once(store: Store, clock: ManualClock) -> None:
    await with_timers(store, *(ended(t.id, Status.COMPLETED) for t in spread(50)))
    clock.advance(100)
    assert sum(await asyncio.gather(*(store.purge(retention_ms=1, limit=20) for _ in range(4)))) == 50
    assert await store.tally() == dict.fromkeys(Status, 0)


@purge
async def test_namespace_with_few_old_timers_does_not_wait_for_one_with_many(store: Store, clock: ManualClock) -> None:
    await with_namespace(store, "few")
    await with_timers(store, *(ended(f"t{n}", Status.COMPLETED) for n in range(300)))
    await with_timers(store, ended("a", Status.COMPLETED, namespace="few"), ended("b", Status.FAILED, namespace="few"))
    clock.advance(100)
    assert await store.purge(retention_ms=1, limit=50) == 50
    if not isinstance(store, MemoryStore):  # which does not query each namespace
        assert await store.tally("few") == dict.fromkeys(Status, 0)
    assert await store.purge(retention_ms=1, limit=1_000) == 302 - 50
    assert await everything(store) == {}


@purge
async def test_purge_covers_many_namespaces(store: Store, clock: ManualClock) -> None:
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
        Secret(id="old", key=bytes(range(256)), created_at=Instant(1), expires_at=START),
        Secret(id="new", key=b"\0\xff", created_at=Instant(2)),
    ),
)


async def by_name(store: Store) -> dict[str, Namespace]:
    return {namespace.name: namespace for namespace in await store.namespaces()}


async def test_default_namespace_exists_from_the_start(store: Store) -> None:
    assert await store.namespaces() == [Namespace(name="default", shards=store.shards, created_at=START)]


async def test_namespace_is_read_as_written(store: Store) -> None:
    assert await store.put_namespace(TEAM) is None
    assert (await by_name(store))[TEAM.name] == TEAM
    assert set(await by_name(store)) == {"default", TEAM.name}


async def test_put_of_an_existing_name_returns_that_namespace_unchanged(store: Store) -> None:
    await store.put_namespace(TEAM)
    before = await by_name(store)
    assert await store.put_namespace(Namespace(name=TEAM.name, shards=1, created_at=START)) == TEAM
    assert await store.put_namespace(Namespace(name="default", shards=1, created_at=EPOCH)) == before["default"]
    assert await by_name(store) == before


async def test_concurrent_namespaces_of_one_name_have_one_winner(store: Store) -> None:
    rivals = [Namespace(name="new", shards=n, created_at=START) for n in range(1, 9)]
    answers = await asyncio.gather(*(store.put_namespace(rival) for rival in rivals))
    winner = (await by_name(store))["new"]
    assert answers == [None if rival == winner else winner for rival in rivals]


async def test_namespace_is_found_by_name(store: Store) -> None:
    assert await store.namespace(TEAM.name) is None
    await store.put_namespace(TEAM)
    assert await store.namespace(TEAM.name) == TEAM
    after = await switch(store, TEAM, paused=False)
    assert await store.namespace(TEAM.name) == after


async def test_maximum_of_namespaces_is_enforced(store: Store) -> None:
    assert await store.put_namespace(TEAM, 2) is None
    another = Namespace(name="another", shards=1, created_at=START)
    for most in (2, 1):
        with pytest.raises(TooManyNamespaces, match=f"{most} namespaces"):
            await store.put_namespace(another, most)
        assert await store.put_namespace(changed_to(TEAM), most) == TEAM  # an existing one is unchanged
    assert set(await by_name(store)) == {"default", TEAM.name}
    assert await store.put_namespace(another, 3) is None
    assert await store.put_namespace(Namespace(name="one more", shards=1, created_at=START)) is None


async def test_namespaces_returns_every_change(store: Store) -> None:
    for n in range(5):
        await store.put_namespace(Namespace(name=f"n{n}", shards=1, created_at=START))
        there = await by_name(store)
        assert len(there) == 2 + n
        there[f"n{n}"] = await switch(store, there[f"n{n}"], weight=2 + n)
        assert await by_name(store) == there
        assert await by_name(store) == there


async def test_namespace_is_swapped_only_at_its_revision(store: Store) -> None:
    await store.put_namespace(TEAM)
    after = changed_to(TEAM, paused=False, retention_ms=None, secrets=TEAM.secrets[1:], weight=2)
    assert await store.swap_namespace(after, changed_to(after)) is False
    assert (await by_name(store))[TEAM.name] == TEAM
    assert await store.swap_namespace(TEAM, after) is True
    assert (await by_name(store))[TEAM.name] == after
    assert await store.swap_namespace(TEAM, after) is False
    assert set(await by_name(store)) == {"default", TEAM.name}


async def test_namespace_with_equal_settings_but_another_revision_is_not_swapped(store: Store) -> None:
    """A writer that read the namespace before it was paused and resumed must not overwrite it."""
    await store.put_namespace(TEAM)
    again = await switch(store, await switch(store, TEAM, paused=False), paused=True)
    assert await store.swap_namespace(TEAM, changed_to(TEAM, retention_ms=1)) is False
    assert (await by_name(store))[TEAM.name] == again
    assert msgspec.structs.replace(again, revision=TEAM.revision) == TEAM


async def test_unknown_namespace_is_not_swapped(store: Store) -> None:
    assert await store.swap_namespace(TEAM, changed_to(TEAM)) is False
    assert set(await by_name(store)) == {"default"}


async def test_concurrent_namespace_swaps_have_one_winner(store: Store) -> None:
    [default] = await store.namespaces()
    rivals = [changed_to(default, retention_ms=n) for n in range(1, 9)]
    won = await asyncio.gather(*(store.swap_namespace(default, rival) for rival in rivals))
    assert won.count(True) == 1
    assert await store.namespaces() == [rivals[won.index(True)]]


async def test_namespaces_survive_reopening(store: Store, reopened: Reopen) -> None:
    await store.put_namespace(TEAM)
    before = await by_name(store)
    again = await reopened(store)
    try:
        assert await by_name(again) == before
    finally:
        await again.close()


# Other methods of the port.


async def test_working_store_pings_and_has_not_failed(store: Store) -> None:
    await store.ping()
    failure = asyncio.ensure_future(store.failure())
    await store.put(timer())
    assert not failure.done()
    failure.cancel()
