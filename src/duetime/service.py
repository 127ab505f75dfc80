"""What clients can do with timers: the only way in, whichever door they came through.

A door hands over checked values; this makes the timer, writes it and nudges the engine. Changes are read, decided by
``lifecycle`` and written conditionally, so one that loses a race against a firing is told so and changes nothing.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from hashlib import blake2b
from random import getrandbits

import msgspec

from duetime import lifecycle
from duetime.clock import Clock
from duetime.deliverer import Deliverers
from duetime.errors import StoreUnavailable, TimerConflict, TimerNotFound, UnknownNamespace
from duetime.model import Definition, Namespace, Status, Target, Timer
from duetime.sharding import shard_of
from duetime.store import Query, Store

CHANGE_TRIES_MAX = 10
REVISION_BITS = 48
IDS_AT_ONCE = 256


class Service:
    def __init__(
        self,
        store: Store,
        deliverers: Deliverers,
        clock: Clock,
        nudge: Callable[[int], None],
    ) -> None:
        self._store = store
        self._deliverers = deliverers
        self._nudge = nudge
        self._namespaces: dict[str, Namespace] = {}
        self._entropy = memoryview(b"")
        self.clock = clock

    async def start(self) -> None:
        """Learn the namespaces."""
        self._namespaces = {namespace.name: namespace for namespace in await self._store.namespaces()}

    def namespace(self, name: str) -> Namespace:
        try:
            return self._namespaces[name]
        except KeyError:
            raise UnknownNamespace(name) from None

    def signing_keys(self, namespace: str) -> list[bytes]:
        """The keys that sign the namespace's callbacks now; none for one that has no secret."""
        known = self._namespaces.get(namespace)
        return known.signing_keys(self.clock.now()) if known and known.secrets else []

    async def change_namespace(self, name: str, change: Callable[[Namespace], Namespace]) -> Namespace:
        """Replace a namespace by what ``change`` makes of it."""
        for _ in range(CHANGE_TRIES_MAX):
            await self.start()
            before = self.namespace(name)
            after = change(before)
            if await self._store.swap_namespace(before, after):
                self._namespaces[name] = after
                return after
        raise StoreUnavailable(f"namespace '{name}' keeps changing; try again")

    async def create(
        self,
        *,
        namespace: str,
        id: str | None,
        execute_at: int,
        definition: Definition,
        correlation_id: str | None = None,
        fingerprint: str = "",
    ) -> tuple[Timer, bool]:
        """Write a new timer and return it with True; a repeat of the same request returns the first one with False."""
        await self._deliverers[type(definition.target)].check(definition.target)
        now = self.clock.now()
        id = id or self._new_id()
        shard = shard_of(namespace, id, namespace_shards=self.namespace(namespace).shards, shards=self._store.shards)
        revision = getrandbits(REVISION_BITS)
        timer = Timer(
            namespace=namespace,
            id=id,
            shard=shard,
            definition=definition,
            execute_at=execute_at,
            fire_at=execute_at,
            created_at=now,
            updated_at=now,
            revision=revision,
            firing=revision,
            fingerprint=fingerprint,
            correlation_id=correlation_id,
        )
        there = await self._store.put(timer)
        if there is not None:
            return self._repeat(there, fingerprint), False
        self._nudge(execute_at)
        return timer, True

    def _new_id(self) -> str:
        # Asking the system for 16 bytes costs more than all the rest of an id: ask for many at once.
        if not self._entropy:
            self._entropy = memoryview(os.urandom(16 * IDS_AT_ONCE))
        drawn, self._entropy = self._entropy[:16], self._entropy[16:]
        return str(uuid.UUID(bytes=bytes(drawn), version=4))

    async def repeated(self, namespace: str, id: str, fingerprint: str) -> Timer | None:
        """The timer that an earlier, equal request made, if there is one."""
        there = await self._store.get(namespace, id)
        return None if there is None else self._repeat(there, fingerprint)

    def _repeat(self, there: Timer, fingerprint: str) -> Timer:
        if there.fingerprint != fingerprint:
            raise TimerConflict("a timer was made with this key or id and other parameters")
        return there

    async def get(self, namespace: str, id: str) -> Timer:
        timer = await self._store.get(namespace, id)
        if timer is None:
            raise TimerNotFound
        return timer

    async def list(self, query: Query) -> tuple[list[Timer], int]:
        """One page and the exact number of timers that the query matches."""
        timers = await self._store.find(query)
        counts = await self._store.tally(query.namespace)
        return timers, sum(counts.values()) if query.status is None else counts[query.status]

    async def update(
        self, namespace: str, id: str, *, execute_at: int | None, change: Callable[[Definition], Definition]
    ) -> Timer:
        """Change a pending timer; ``change`` says what becomes of its definition."""

        def amended(timer: Timer) -> Timer:
            definition = change(timer.definition)
            return lifecycle.amend(timer, now=self.clock.now(), execute_at=execute_at, definition=definition)

        timer = await self._change(namespace, id, amended)
        self._nudge(timer.fire_at)
        return timer

    async def check_target(self, target: Target) -> None:
        await self._deliverers[type(target)].check(target)

    async def cancel(self, namespace: str, id: str) -> Timer:
        """Cancel a pending timer; one that is canceled already stays so."""

        def canceled(timer: Timer) -> Timer:
            if timer.status is Status.CANCELED:
                return timer
            return lifecycle.cancel(timer, now=self.clock.now())

        return await self._change(namespace, id, canceled)

    async def _change(self, namespace: str, id: str, change: Callable[[Timer], Timer]) -> Timer:
        for _ in range(CHANGE_TRIES_MAX):
            before = await self.get(namespace, id)
            after = change(before)
            if after is before or await self._store.swap(before, after):
                return after
        raise StoreUnavailable("the timer keeps changing; try again")

    async def tally(self) -> dict[Status, int]:
        return await self._store.tally()

    async def ping(self) -> None:
        await self._store.ping()


_encode = msgspec.json.Encoder().encode


def fingerprint_of(definition: Definition, *parts: object) -> str:
    """A short digest of a create request: equal for a repeat, different for anything else."""
    return blake2b(_encode((definition, parts)), digest_size=8).hexdigest()


def id_of_key(key: str) -> str:
    """The id that an idempotency key stands for: a UUID of the shape of any other, the same for the same key."""
    digest = blake2b(key.encode(), digest_size=16, person=b"duetime-idem").digest()
    return str(uuid.UUID(bytes=digest, version=4))
