"""Namespaces and their secrets on the memory store: hints after changes, and the effects of a stale copy.

Several instances share a store, which can be slow in one operation at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from duetime.errors import SecretNotFound, UnknownNamespace
from duetime.model import DAY_MS, HOUR_MS, Namespace
from duetime.namespaces import Namespaces
from duetime.secret_rotation import ROTATION_MS, SECRETS_MAX, to_text
from duetime.store import Hint
from duetime.stores.memory import MemoryStore
from tests.clocks import START, ManualClock


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock, shards=8)
        self.nudges = 0
        self.namespaces = self.new_instance()

    def new_instance(self) -> Namespaces:
        """Another instance on the same store."""
        return Namespaces(self.store, self.clock, self._nudge)

    def _nudge(self) -> None:
        self.nudges += 1

    def keys(self, namespace: str = "default") -> list[bytes] | None:
        return self.namespaces.signing_keys(namespace)

    def secrets(self, namespace: str = "default") -> list[tuple[bytes, int | None]]:
        """The secrets, each with its expiry."""
        known = self.store._namespaces[namespace].secrets
        return [(s.key, None if s.expires_at is None else s.expires_at - self.clock.now()) for s in known]


def scene(test: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        async def main() -> None:
            world = World()
            await world.namespaces.start()
            await test(world)

        asyncio.run(main())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@scene
async def test_a_change_of_a_namespace_nudges_the_engine(world: World) -> None:
    await world.namespaces.change("default", lambda before: msgspec.structs.replace(before, paused=False))
    assert world.nudges == 1


@scene
async def test_a_new_or_changed_namespace_sends_a_hint(world: World) -> None:
    hints: list[Hint] = []
    world.store.hint = hints.append  # type: ignore[method-assign, assignment]
    await world.namespaces.create("a")
    assert hints == [Hint(namespaces=True)]
    await world.namespaces.create("a")
    assert hints == [Hint(namespaces=True)]
    await world.namespaces.add_secret("a", b"key")
    assert hints == 2 * [Hint(namespaces=True)]


@scene
async def test_namespaces_are_not_read_without_a_reason(world: World) -> None:
    reads = 0
    namespaces = world.store.namespaces

    async def counted() -> list[Namespace]:
        nonlocal reads
        reads += 1
        assert reads < 10
        return await namespaces()

    world.store.namespaces = counted  # type: ignore[method-assign]
    running = asyncio.create_task(world.namespaces.run())
    world.namespaces.heard(Hint(namespaces=True))
    await settled()
    assert reads == 1
    world.namespaces.heard(Hint(shards=True, due_at=START))
    await settled()
    assert reads == 1
    running.cancel()


# Namespaces.


class Slow:
    """Holds back responses of one of the store's verbs until released."""

    def __init__(self, store: MemoryStore, verb: str) -> None:
        self._answers: list[asyncio.Event] = []
        ask = getattr(store, verb)

        async def slow(*arguments: Any) -> Any:
            answer, go = await ask(*arguments), asyncio.Event()
            self._answers.append(go)
            await go.wait()
            return answer

        setattr(store, verb, slow)
        self._end: Callable[[], None] = lambda: setattr(store, verb, ask)

    async def asked(self) -> None:
        """Let later responses pass; the ones already held back stay so."""
        for _ in range(5):
            await asyncio.sleep(0)
        self._end()

    def let_go(self) -> None:
        for go in self._answers:
            go.set()


@scene
async def test_a_concurrent_refresh_does_not_undo_a_change(world: World) -> None:
    slow = Slow(world.store, "namespaces")
    refresh = asyncio.create_task(world.namespaces.start())
    await slow.asked()
    await world.namespaces.add_secret("default", b"key")
    await world.namespaces.create("made")
    slow.let_go()
    await refresh
    assert world.keys() == [b"key"]
    assert world.keys("made") == []
    assert [namespace.name for namespace in world.namespaces.all()] == ["default", "made"]


@scene
async def test_the_newer_of_two_concurrent_refreshes_wins(world: World) -> None:
    slow = Slow(world.store, "namespaces")
    first = asyncio.create_task(world.namespaces.start())
    await slow.asked()
    other = world.new_instance()
    await other.add_secret("default", b"key")
    await world.namespaces.start()
    assert world.keys() == [b"key"]
    slow.let_go()
    await first
    assert world.keys() == [b"key"]


@scene
async def test_a_slow_create_of_a_namespace_does_not_undo_a_change(world: World) -> None:
    slow = Slow(world.store, "put_namespace")
    late = asyncio.create_task(world.namespaces.create("a"))
    await slow.asked()
    await world.namespaces.add_secret("a", b"key")
    slow.let_go()
    assert (await late)[1]
    assert world.keys("a") == [b"key"]


@scene
async def test_the_later_of_two_concurrent_changes_wins(world: World) -> None:
    slow = Slow(world.store, "swap_namespace")
    first = asyncio.create_task(world.namespaces.add_secret("default", b"first"))
    await slow.asked()
    await world.namespaces.add_secret("default", b"second")
    slow.let_go()
    await first
    assert world.keys() == [b"second", b"first"]


@scene
async def test_a_change_starts_from_the_stored_namespace(world: World) -> None:
    other = world.new_instance()
    await other.start()
    await world.namespaces.add_secret("default", b"one")
    await other.add_secret("default", b"two")
    await world.namespaces.add_secret("default", b"three")
    assert [key for key, _ in world.secrets()] == [b"three", b"two", b"one"]
    assert world.keys() == [b"three", b"two", b"one"]
    with pytest.raises(UnknownNamespace):
        await world.namespaces.add_secret("unknown", b"key")


@scene
async def test_changes_by_other_instances_are_read_with_or_without_a_hint(world: World) -> None:
    running = asyncio.create_task(world.namespaces.run())
    other = world.new_instance()
    await other.add_secret("default", b"one")
    await settled()
    assert world.keys() == []
    world.clock.advance(5_000)
    await settled()
    assert world.keys() == [b"one"]
    await other.add_secret("default", b"two")
    world.namespaces.heard(Hint(namespaces=True))
    await settled()
    assert world.keys() == [b"two", b"one"]
    running.cancel()


@scene
async def test_an_unknown_namespace_has_no_keys_and_is_read_at_once(world: World) -> None:
    running = asyncio.create_task(world.namespaces.run())
    await settled()
    other = world.new_instance()
    await other.create("new")
    await other.add_secret("new", b"key")
    assert world.keys("new") is None
    await settled()
    assert world.keys("new") == [b"key"]
    running.cancel()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


# Secrets.


@scene
async def test_a_namespace_is_cached_after_a_get(world: World) -> None:
    other = world.new_instance()
    await other.create("theirs", weight=7)
    assert world.namespaces.weight("theirs") == 1 and world.keys("theirs") is None
    await world.namespaces.get("theirs")
    assert world.namespaces.weight("theirs") == 7 and world.keys("theirs") == []


@scene
async def test_each_change_of_a_namespace_increments_the_revision(world: World) -> None:
    before = await world.namespaces.get("default")
    for paused in (True, False):
        await world.namespaces.change("default", lambda n, p=paused: msgspec.structs.replace(n, paused=p))  # type: ignore[misc]
    assert world.store._namespaces["default"].revision == before.revision + 2


@scene
async def test_a_rotation_sets_the_expiry_of_the_previous_secret_once(world: World) -> None:
    await world.namespaces.add_secret("default", b"a")
    assert world.secrets() == [(b"a", None)]
    world.clock.advance(HOUR_MS)
    await world.namespaces.add_secret("default", b"b")
    assert world.secrets() == [(b"b", None), (b"a", ROTATION_MS)]
    world.clock.advance(HOUR_MS)
    await world.namespaces.add_secret("default", b"c")
    assert world.secrets() == [(b"c", None), (b"b", ROTATION_MS), (b"a", ROTATION_MS - HOUR_MS)]
    assert world.keys() == [b"c", b"b", b"a"]
    world.clock.advance(ROTATION_MS - HOUR_MS - 1)
    assert world.keys() == [b"c", b"b", b"a"]
    world.clock.advance(1)
    assert world.keys() == [b"c", b"b"]
    world.clock.advance(HOUR_MS)
    assert world.keys() == [b"c"]
    world.clock.advance(365 * DAY_MS)
    assert world.keys() == [b"c"]


@scene
async def test_deleting_the_newest_secret_keeps_the_previous_one(world: World) -> None:
    await world.namespaces.add_secret("default", b"a")
    await world.namespaces.add_secret("default", b"b")
    world.clock.advance(HOUR_MS)
    newest = await world.namespaces.add_secret("default", b"c")
    await world.namespaces.delete_secret("default", newest.id)
    assert world.secrets() == [(b"b", None), (b"a", ROTATION_MS - HOUR_MS)]
    world.clock.advance(ROTATION_MS)
    assert world.keys() == [b"b"]
    world.clock.advance(365 * DAY_MS)
    assert world.keys() == [b"b"]


@scene
async def test_an_expired_secret_is_never_revived(world: World) -> None:
    await world.namespaces.add_secret("default", b"a")
    await world.namespaces.add_secret("default", b"b")
    world.clock.advance(ROTATION_MS // 2)
    newest = await world.namespaces.add_secret("default", b"c")
    world.clock.advance(ROTATION_MS // 2)
    await world.namespaces.delete_secret("default", newest.id)
    assert world.keys() == [b"b"]  # it has not expired; the other one has
    world.clock.advance(365 * DAY_MS)
    assert world.keys() == [b"b"]
    newest = await world.namespaces.add_secret("default", b"d")
    world.clock.advance(ROTATION_MS)
    await world.namespaces.delete_secret("default", newest.id)
    assert world.keys() == [] and world.secrets() == []


@scene
async def test_a_rotation_drops_expired_secrets(world: World) -> None:
    for key in (b"a", b"b"):
        await world.namespaces.add_secret("default", key)
    world.clock.advance(ROTATION_MS)
    await world.namespaces.add_secret("default", b"c")
    assert world.secrets() == [(b"c", None), (b"b", ROTATION_MS)]


@scene
async def test_deleting_an_older_secret_leaves_the_others_as_they_are(world: World) -> None:
    made = [await world.namespaces.add_secret("default", key) for key in (b"a", b"b", b"c")]
    await world.namespaces.delete_secret("default", made[1].id)
    assert world.secrets() == [(b"c", None), (b"a", ROTATION_MS)]
    world.clock.advance(ROTATION_MS)
    await world.namespaces.delete_secret("default", made[0].id)  # An expired secret can still be deleted.
    assert world.secrets() == [(b"c", None)]
    with pytest.raises(SecretNotFound, match=f"^secret '{made[0].id}' not found in namespace 'default'$"):
        await world.namespaces.delete_secret("default", made[0].id)
    with pytest.raises(SecretNotFound, match=r"^secret '…' not found in namespace 'default'$"):
        await world.namespaces.delete_secret("default", to_text(b"x" * 32))  # the key in place of the id
    assert world.secrets() == [(b"c", None)]


@scene
async def test_the_number_of_secrets_is_limited_and_the_newest_are_kept(world: World) -> None:
    keys = [b"%d" % n for n in range(SECRETS_MAX + 3)]
    for key in keys:
        await world.namespaces.add_secret("default", key)
    assert world.keys() == keys[: -SECRETS_MAX - 1 : -1] and len(world.secrets()) == SECRETS_MAX


@scene
async def test_concurrent_rotations_lose_no_secret(world: World) -> None:
    instances = [world.namespaces, *(world.new_instance() for _ in range(3))]
    await asyncio.gather(*(one.add_secret("default", b"%d" % n) for n, one in enumerate(instances)))
    assert sorted(key for key, _ in world.secrets()) == [b"0", b"1", b"2", b"3"]
    assert [left for _, left in world.secrets()] == [None] + 3 * [ROTATION_MS]
