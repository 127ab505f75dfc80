"""Changes that clients make to timers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from duetime.model import Timer


class Taken(Struct, frozen=True):
    """An existing timer with the identity of a new one, returned without its content because of the byte limit."""

    fingerprint: str


class Timers(Protocol):
    async def put(self, timer: Timer) -> Timer | None:
        """Insert a new timer, as the client defined it. If a timer with this identity exists, leave it unchanged and
        return it; raise ``Quarantined`` if it can't be read."""

    async def put_many(self, timers: Sequence[Timer]) -> list[Timer | Taken | None]:
        """Insert many timers, each as by ``put``; all are durable when this returns. This is not atomic: after
        ``StoreIndeterminate`` some timers may be written and others not. Existing timers are returned up to
        ``PAGE_BYTES_MAX`` in total; the others, and those that can't be read, as ``Taken``."""

    async def get(self, namespace: str, id: str) -> Timer | None:
        """Return the timer as last written, in any status; raise ``Quarantined`` if it can't be read."""

    async def swap(self, before: Timer, after: Timer | None) -> bool:
        """Replace ``before`` by ``after``, or delete it if that is None, if the stored timer still has the revision of
        ``before``. Return whether it had."""
