"""Operations on namespaces and their signing secrets, and this instance's copy of all namespaces.

With the copy, neither a create nor an attempt has to read the store. Hints from other instances keep it current. It is
also read again every ``REFRESH_SECONDS``, in case a hint is lost.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable

import msgspec

from duetime import secret_rotation
from duetime.clock import Clock
from duetime.errors import Contended, NamespaceConflict, StoreError, UnknownNamespace
from duetime.model import Namespace, Secret
from duetime.store import Hint, Store

log = logging.getLogger(__name__)

REFRESH_SECONDS = 5.0
"""How old the copy may be if a hint is lost."""
CHANGE_TRIES_MAX = 10


class Namespaces:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        nudge: Callable[[], None],
        *,
        auto: bool = False,
        number_max: int | None = None,
    ) -> None:
        """``auto``: creating a timer creates its namespace. ``number_max`` limits the number of namespaces."""
        self._store = store
        self._clock = clock
        self._nudge = nudge
        self._auto = auto
        self._number_max = number_max
        self._changed = asyncio.Event()
        self.known: dict[str, Namespace] = {}

    async def start(self) -> None:
        """Read all namespaces."""
        for namespace in await self._store.namespaces():
            self._learn(namespace)

    def _learn(self, namespace: Namespace) -> None:
        """Keep a copy of a namespace, unless a newer copy arrived first."""
        known = self.known.get(namespace.name)
        if known is None or namespace.revision >= known.revision:
            self.known[namespace.name] = namespace

    async def run(self) -> None:
        """Keep the copy up to date with changes by other instances."""
        while True:
            await self._clock.sleep(REFRESH_SECONDS, self._changed)
            self._changed.clear()
            try:
                await self.start()
            except StoreError as error:
                log.debug("could not read the namespaces: %s", error)

    def heard(self, hint: Hint) -> None:
        """Handle a hint from another instance."""
        if hint.namespaces:
            self._changed.set()

    def all(self) -> list[Namespace]:
        return sorted(self.known.values(), key=lambda namespace: namespace.name)

    async def get(self, name: str) -> Namespace:
        known = self.known.get(name)
        return await self._read(name) if known is None else known

    async def _read(self, name: str) -> Namespace:
        """Read the namespace from the store: another instance may have created or changed it."""
        there = await self._store.namespace(name)
        if there is None:
            raise UnknownNamespace(name)
        self._learn(there)
        return there

    async def of_new_timer(self, name: str) -> Namespace:
        """The namespace for a new timer; created if it is missing and the settings allow that."""
        if name not in self.known and self._auto:
            return (await self.create(name))[0]
        return await self.get(name)

    async def create(
        self,
        name: str,
        *,
        shards: int | None = None,
        retention_ms: int | None = None,
        weight: int | None = None,
    ) -> tuple[Namespace, bool]:
        """Create a namespace and return it with True; return an existing one with the same settings with False."""
        new = Namespace(
            name=name,
            shards=shards or self._store.shards,
            created_at=self._clock.now(),
            retention_ms=retention_ms,
            weight=1 if weight is None else weight,
        )
        there = await self._store.put_namespace(new, self._number_max)
        self._learn(there or new)
        if there is None:
            self._store.hint(Hint(namespaces=True))
            return new, True
        settings = (
            ("shards", shards, there.shards),
            ("retention", retention_ms, there.retention_ms),
            ("weight", weight, there.weight),
        )
        different = [setting for setting, given, existing in settings if given not in (None, existing)]
        if different:
            raise NamespaceConflict(f"namespace '{name}' already exists with a different {' and '.join(different)}")
        return there, False

    async def change(self, name: str, change: Callable[[Namespace], Namespace]) -> Namespace:
        """Replace a namespace with the result of ``change``."""
        for _ in range(CHANGE_TRIES_MAX):
            before = await self._read(name)
            after = msgspec.structs.replace(change(before), revision=before.revision + 1)
            if await self._store.swap_namespace(before, after):
                self._learn(after)
                self._store.hint(Hint(namespaces=True))
                self._nudge()
                return after
        raise Contended

    def weight(self, namespace: str) -> int:
        """The namespace's weight when namespaces compete for slots."""
        known = self.known.get(namespace)
        return 1 if known is None else known.weight

    def signing_keys(self, namespace: str) -> list[bytes] | None:
        """The keys that sign the namespace's callbacks now, newest first; empty if it has no secret. None if this
        instance has not read the namespace yet; ``run`` then reads it at once."""
        known = self.known.get(namespace)
        if known is None:
            self._changed.set()
            return None
        return [secret.key for secret in known.signing(self._clock.now())] if known.secrets else []

    async def add_secret(self, name: str, key: bytes) -> Secret:
        """Create a signing secret. The previous one signs as well until it expires or is deleted."""
        now = self._clock.now()
        secret = Secret(id=str(uuid.uuid4()), key=key, created_at=now)
        await self.change(name, lambda namespace: secret_rotation.add(namespace, secret, now))
        return secret

    async def delete_secret(self, name: str, id: str) -> None:
        await self.change(name, lambda namespace: secret_rotation.remove(namespace, id, self._clock.now()))
