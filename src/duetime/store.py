"""The store port: what the engine and the service ask of a database, and what every store must promise.

The contract, which ``tests/contract`` holds every store to:

- **Durable.** A verb that writes returns after its write is on disk. It raises ``StoreUnavailable`` when nothing was
  written, ``StoreIndeterminate`` when nobody knows, and ``StoreFailed`` when the store must not be used again.
- **Conditional.** Every change names the revision it starts from; a row at another revision is left alone.
- **Fenced.** Begins and ``record`` act on a shard only while ``(owner_id, version)`` is what the shard's row says
  at the moment of the write: an owner that was replaced changes nothing, however late its statement arrives.
- **One clock.** Whether a timer is due and whether a lease has run out is judged by the store's clock alone.
- **Whole.** A timer comes back exactly as it was put, its payload byte for byte.
- **Row by row.** A row that can't be read, because it is damaged or a newer program wrote it, hides no other one. Lists
  leave it out. A begin puts it into quarantine: it stays where it is and is not begun again, until a program that can
  read it opens the store. The timers of a namespace that can't be read are held back.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from duetime.errors import StoreError
from duetime.model import Namespace, Status, Timer


class About(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an instance says of itself, for people to look at."""

    name: str = ""  # its machine and process
    version: str = ""  # of the program
    started_at: int = 0
    clock_offset_ms: int = 0  # how far its clock is surely off the store's
    serving: bool = True  # whether it takes shards
    fires: tuple[int, ...] = ()  # how many attempts it has sent, by how late they were: telemetry's buckets
    overdue: dict[str, int] = {}  # how many of its timers are overdue, by reason


UNNAMED = About()

EVERYWHERE: Mapping[int, int] = {}
"""No lane has a limit of its own."""
ENDED_SESSIONS_MAX = 10_000
"""How many sessions that were signed out a store notes one by one."""
LANES_PAGE = 20_000
"""How many lanes one page of ``Store.lanes`` reads at most."""
PAGE_BYTES_MAX = 4 << 20
"""About how many bytes of timers one answer has at most; the last one may reach beyond it."""
BEGIN_BYTES_MAX = 4 << 20
"""The same for what one begin brings."""


class Standing(Struct, frozen=True):
    """What a renewal brought: the store's time, what this owner holds, who else lives, what nobody holds."""

    now: int
    held: dict[int, int]  # shard → version
    instances: frozenset[bytes]  # that are serving
    free: frozenset[int]
    free_at: int | None = None  # when the next of the others' leases runs out, unless it is renewed


class Instance(Struct, frozen=True, kw_only=True):
    """An instance as the others see it."""

    owner_id: bytes
    about: About
    alive_until: int
    shards: tuple[int, ...]


class Hint(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What instances tell one another so that nobody has to wait for the next regular look. It may get lost."""

    due_at: int | None = None  # a timer falls due then
    shards: bool = False  # shards have become free, or an instance has come
    namespaces: bool = False  # a namespace has changed

    def __or__(self, other: Hint) -> Hint:
        due = [at for at in (self.due_at, other.due_at) if at is not None]
        return Hint(
            due_at=min(due, default=None),
            shards=self.shards or other.shards,
            namespaces=self.namespaces or other.namespaces,
        )


class Begun(Struct, frozen=True):
    """What a begin brought: timers to deliver now, when to look again, and the shards that are ours no more."""

    timers: list[Timer]
    next_at: int | None  # the earliest instant at which something else falls due, in a paused namespace too
    refused: frozenset[int] = frozenset()
    more: bool = False  # whether a limit, not that of a lane, left due timers behind, or more are due than it reads
    lanes: dict[int, int] = {}  # of those that were asked for: the earliest ``fire_at`` that is left in each


class Lane(Struct, frozen=True):
    """The pending timers of one namespace for one destination."""

    lane: int  # ``model.lane_of``
    namespace: str
    destination: str
    fire_at: int  # the earliest


class Lanes(Struct, frozen=True):
    lanes: list[Lane]
    due: int  # how many timers are due in all lanes, paused ones too; counting stops at a limit
    next: int | None  # the lane at which the next page starts; None when this is the last one


class Portion(Struct, frozen=True):
    """How much to begin of one lane."""

    lane: int
    most: int
    share: float = 1.0  # beside the other lanes of a begin, when there is not enough for all


class Overdue(Struct, frozen=True):
    """The overdue timers of one lane."""

    namespace: str
    destination: str
    paused: bool
    oldest_at: int
    timers: int  # counting stops at a limit


class Quarantine(Struct, frozen=True):
    """What the program can't read."""

    timers: int = 0  # those that a begin, or opening the store, has met
    namespaces: dict[str, str] = {}  # name → reason


class Sort(enum.StrEnum):
    CREATED_AT = "created_at"
    EXECUTE_AT = "execute_at"


class Query(Struct, frozen=True, kw_only=True):
    """Which timers to list, in what order."""

    namespace: str
    status: Status | None = None
    sort: Sort = Sort.CREATED_AT
    descending: bool = True
    limit: int = 50
    offset: int = 0
    brief: bool = False  # leave out payloads and metadata, however many bytes they are


class Order(enum.StrEnum):
    """In what order a page comes: each is an index of its own, and each ends with the order of creation."""

    NEWEST = "newest"  # by creation, latest first
    SOONEST = "soonest"  # by execute_at
    DUE = "due"  # pending timers by fire_at
    DEADLINE = "deadline"  # executing timers by the deadline of their attempt
    FINISHED = "finished"  # final timers, latest first


class Filter(Struct, frozen=True, kw_only=True):
    """Which timers to page through; what is None does not matter."""

    namespace: str | None = None
    id: str | None = None
    status: Status | None = None
    correlation_id: str | None = None
    execute_after: int | None = None  # execute_at >= this
    execute_before: int | None = None  # execute_at < this

    @property
    def order(self) -> Order:
        """The order that fits what is asked for, so that a page never costs a scan."""
        if self.id is not None or self.correlation_id is not None:
            return Order.NEWEST
        if self.execute_after is not None or self.execute_before is not None:
            return Order.SOONEST
        match self.status:
            case None:
                return Order.NEWEST
            case Status.PENDING:
                return Order.DUE
            case Status.EXECUTING:
                return Order.DEADLINE
        return Order.FINISHED

    def matches(self, timer: Timer) -> bool:
        return (
            self.namespace in (None, timer.namespace)
            and self.id in (None, timer.id)
            and self.status in (None, timer.status)
            and self.correlation_id in (None, timer.correlation_id)
            and (self.execute_after is None or timer.execute_at >= self.execute_after)
            and (self.execute_before is None or timer.execute_at < self.execute_before)
        )


class Place(Struct, frozen=True, array_like=True):
    """Where a page ended: the order, the value it is by, and the store's own mark of creation."""

    order: Order
    value: int
    mark: int


class Page(Struct, frozen=True):
    timers: list[Timer]
    next: Place | None  # where the next page begins; None when there is none


class Taken(Struct, frozen=True):
    """A timer that has the identity of a new one, and that was not read along: too many bytes came before it."""

    fingerprint: str


class Store(Protocol):
    shards: int
    """How many shards there are, fixed when the store was first opened."""

    async def open(self) -> None:
        """Connect, bring the schema up to date, and be ready for everything below."""

    async def close(self) -> None:
        """Finish what was asked and let go; the store is not used again."""

    async def ping(self) -> None:
        """Return if the store can be read and written, raise a ``StoreError`` otherwise."""

    async def failure(self) -> StoreError:
        """Wait for the store to fail for good and say how: the process must stop then."""

    # What clients do.

    async def put(self, timer: Timer) -> Timer | None:
        """Write a new timer, which nothing has happened to yet; when its identity is taken, leave that one alone and
        return it, or raise ``Quarantined`` if it can't be read."""

    async def put_many(self, timers: Sequence[Timer]) -> list[Timer | Taken | None]:
        """``put`` for each, in one durable write. Of the timers that were there it reads ``PAGE_BYTES_MAX``,
        and those that can be read."""

    async def get(self, namespace: str, id: str) -> Timer | None:
        """The timer as last written, pending or final; raises ``Quarantined`` if it can't be read."""

    async def swap(self, before: Timer, after: Timer | None) -> bool:
        """Replace ``before`` by ``after`` (None: remove it) if it is still at its revision; say whether it was."""

    async def find(self, query: Query) -> list[Timer]:
        """One page of timers."""

    async def page(self, filter: Filter, limit: int, after: Place | None = None) -> Page:
        """Up to ``limit`` timers in the filter's order, behind ``after``, and about ``PAGE_BYTES_MAX`` of them. A page
        that is not the last may be short, but has at least one timer. What does not fit is not read.

        A timer that neither moves nor changes its status while somebody pages is shown exactly once, whatever comes and
        goes around it.
        """

    async def tally(self, namespace: str | None = None) -> dict[Status, int]:
        """How many timers there are, exactly, by status; of one namespace or of all."""

    async def count(self, filter: Filter, most: int) -> int:
        """How many timers the filter matches; counting stops at ``most``."""

    async def forecast(self, bounds: Sequence[int], most: int) -> list[int]:
        """How many pending timers are due (by ``fire_at``) from each bound up to the next one; each counting stops at
        ``most``, so that no number of timers makes it slow."""

    # What owners do.

    async def renew(self, owner_id: bytes, lease_ms: int, about: About = UNNAMED) -> Standing:
        """Say that this instance lives and extend the lease of every shard it owns."""

    async def claim(self, owner_id: bytes, shards: Collection[int], lease_ms: int) -> dict[int, int]:
        """Take those of ``shards`` that are free, expired or our own, each with the next version; say which."""

    async def release(self, owner_id: bytes, shards: Collection[int]) -> None:
        """Give up those of ``shards`` that this owner holds."""

    async def begin(
        self,
        owner_id: bytes,
        held: Mapping[int, int],
        limit: int,
        *,
        lane_max: int | None = None,
        wide: Mapping[int, int] = EVERYWHERE,
    ) -> Begun:
        """Begin an attempt of up to ``limit`` due timers of the ``held`` shards, oldest first, and of at most
        ``lane_max`` (or what ``wide`` says for it) of each lane.

        Due is a pending timer whose ``fire_at`` has come, and an executing one that an older version of its shard
        began and whose deadline has passed. Each goes through ``lifecycle.begin``. Paused namespaces are left out. It
        reads a bounded number of due timers: when more are due, it says so, and ``begin_lanes`` gets at the others.
        What a lane's own limit holds back is not counted as more: the caller knows the limit. What it brings ends at
        ``BEGIN_BYTES_MAX`` or before, but with at least one timer: what that leaves behind is more.
        """

    async def begin_lanes(
        self, owner_id: bytes, held: Mapping[int, int], limit: int, portions: Sequence[Portion]
    ) -> Begun:
        """``begin`` for these lanes alone, at least one, oldest first in each. What is due in other lanes costs
        nothing. When more than ``limit`` are due, each lane gets its share, rounded up or down; what one does not need
        goes to the others; and when they are more than ``BEGIN_BYTES_MAX``, each gets its share of that. Lost attempts
        of these lanes count like all that is due.

        ``Begun.lanes`` has the earliest of what is left: due timers first, then pending ones that will be. Attempts
        that may yet be lost are not in it, nor are lanes in which nothing is left or whose namespace is paused.
        ``Begun.next_at`` is the earliest of these."""

    async def lanes(self, until: int, *, after: int = -1, limit: int = LANES_PAGE, due_max: int = 0) -> Lanes:
        """The lanes that have a timer due by ``until`` or an attempt that may be lost, without those of paused
        namespaces, behind lane ``after``. It reads one entry of an index per lane, and at most ``limit`` of them.

        An attempt may be lost when its deadline has passed, whoever began it. Lanes that are not listed count for
        ``limit``, too: a page may be short, or empty, and not be the last."""

    async def overdue(self, shards: Collection[int], before: int, most: int) -> list[Overdue]:
        """The lanes with timers of these shards that should have been begun before ``before``, paused or not. It reads
        at most ``LANES_PAGE`` lanes, so no number of destinations makes it slow."""

    async def record(self, owner_id: bytes, changes: Sequence[tuple[Timer, Timer]]) -> list[bool]:
        """Replace each begun timer by what came of it, fenced; say which were still ours to change."""

    async def leave(self, owner_id: bytes) -> None:
        """Give up everything, and be counted among the instances no more."""

    async def cluster(self) -> list[Instance]:
        """Every instance that lives, and what each owns."""

    def hint(self, hint: Hint) -> None:
        """Pass a hint to the other instances, if there can be any, soon or never."""

    def on_hint(self, heard: Callable[[Hint], None]) -> None:
        """Have ``heard`` called with what other instances hint at."""

    # Upkeep.

    async def purge(self, *, retention_ms: int, limit: int) -> int:
        """Drop up to ``limit`` final timers that are older than their namespace's retention or the given one, a few of
        each namespace at a time, so that nobody waits long; less than ``limit`` only when no more are old."""

    async def namespaces(self) -> list[Namespace]:
        """Every namespace that can be read; ``default`` is among them, unless its row is damaged. From here on the
        timers of the others are neither begun nor listed as due. Cheap while none has changed."""

    async def namespace(self, name: str) -> Namespace | None:
        """The namespace of this name; raises ``Quarantined`` if it can't be read."""

    async def put_namespace(self, namespace: Namespace, most: int | None = None) -> Namespace | None:
        """Write a new namespace; when the name is taken, leave that one alone and return it, or raise ``Quarantined``
        if it can't be read. Raises ``TooManyNamespaces`` when there are ``most`` already."""

    async def swap_namespace(self, before: Namespace, after: Namespace) -> bool:
        """Replace ``before`` by ``after``, which has the next revision, if it is still at its own; say whether."""

    async def end_session(self, id: bytes, ends_at: int, *, forget_before: int) -> None:
        """Note that a session is over that would have ended at ``ends_at``, and forget those that ended before
        ``forget_before``. When ``ENDED_SESSIONS_MAX`` are noted already, every session is over that would have ended no
        later than these: the notes stay few, and no session that was ended is ever good again."""

    async def session_ended(self, id: bytes, ends_at: int) -> bool:
        """Whether this session is noted as over."""

    async def quarantine(self) -> Quarantine:
        """What can't be read, as far as it was met."""
