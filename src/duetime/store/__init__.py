"""The store port: the interface of a database to the engine and the service, and what every store guarantees.

``tests/contract`` tests these guarantees for every store:

- **Durable.** A method that writes returns once the write is on disk. It raises ``StoreUnavailable`` if nothing was
  written, ``StoreIndeterminate`` if the result of the write is unknown, and ``StoreFailed`` if the store must not be
  used again. ``begin``, ``begin_lanes`` and ``record`` can report an unknown result per shard or per timer instead, so
  that it does not affect the others.
- **Conditional.** Every change names the revision that it is based on. A row with another revision stays unchanged.
- **Fenced.** ``begin``, ``begin_lanes`` and ``record`` change timers of a shard only if the shard's row holds the given
  ``(owner_id, version)`` at the time of the write. A former owner changes nothing, however late its statement arrives.
- **One clock.** Only the store's clock decides whether a timer is due and whether a lease has expired.
- **Lossless.** A timer is read exactly as it was written, its payload byte for byte.
- **Isolated failures.** A row that this program can't read, because it is damaged or a newer version wrote it, does not
  affect other rows. Lists omit it. A begin quarantines it: the row is kept but not begun again until a version that can
  read it opens the store. If a namespace can't be read, its timers are held back.

The port consists of small protocols, so that code can depend on only what it uses: ``Timers``, ``Lists``, ``Shards``,
``Attempts``, ``Namespaces``, ``Sessions`` and ``Upkeep``. Where databases differ, a store declares its ``Abilities``.
"""

from __future__ import annotations

from typing import Protocol

from duetime.store.abilities import ALL_ABILITIES, Abilities, TimeSource
from duetime.store.attempts import (
    BEGIN_BYTES_MAX,
    LANES_PAGE,
    NO_LANE_LIMITS,
    Attempts,
    Begun,
    Lane,
    Lanes,
    Overdue,
    Portion,
)
from duetime.store.lists import PAGE_BYTES_MAX, Cursor, Filter, Lists, Order, Page, Query, Sort
from duetime.store.namespaces import Namespaces
from duetime.store.shards import UNNAMED, About, Hint, Instance, Renewal, Shards
from duetime.store.timers import Taken, Timers
from duetime.store.upkeep import ENDED_SESSIONS_MAX, Quarantine, Sessions, Upkeep

__all__ = [
    "ALL_ABILITIES",
    "BEGIN_BYTES_MAX",
    "ENDED_SESSIONS_MAX",
    "LANES_PAGE",
    "NO_LANE_LIMITS",
    "PAGE_BYTES_MAX",
    "UNNAMED",
    "Abilities",
    "About",
    "Attempts",
    "Begun",
    "Cursor",
    "Filter",
    "Hint",
    "Instance",
    "Lane",
    "Lanes",
    "Lists",
    "Namespaces",
    "Order",
    "Overdue",
    "Page",
    "Portion",
    "Quarantine",
    "Query",
    "Renewal",
    "Sessions",
    "Shards",
    "Sort",
    "Store",
    "Taken",
    "TimeSource",
    "Timers",
    "Upkeep",
]


class Store(Timers, Lists, Shards, Attempts, Namespaces, Sessions, Upkeep, Protocol):
    """The whole port, implemented by one database."""

    abilities: Abilities
