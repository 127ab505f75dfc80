"""Changes that owners make to the timers of their shards, all fenced: begin due attempts and record their outcomes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from duetime.instants import Instant
from duetime.model import Timer

NO_LANE_LIMITS: Mapping[int, int] = {}
"""For ``lane_limits``: no lane has a limit of its own."""
LANES_PAGE = 20_000
"""Maximum number of lanes that one page of ``lanes`` reads."""
BEGIN_BYTES_MAX = 4 << 20
"""Approximate byte limit of the timers that one begin returns; the last timer may exceed it."""


class Begun(Struct, frozen=True):
    """The result of a begin."""

    timers: list[Timer]  # to deliver now
    next_at: Instant | None  # when the next timer falls due, in a paused namespace too: poll again then
    refused: frozenset[int] = frozenset()  # shards that this instance no longer owns
    more: bool = False  # more timers are due: a limit other than a lane's, or that of reading, was reached
    lanes: dict[int, Instant] = {}  # for the requested lanes: the earliest remaining ``fire_at`` of each
    unknown: frozenset[int] = frozenset()  # shards in which timers may or may not have been begun


class Lane(Struct, frozen=True):
    """The pending timers of one namespace for one destination."""

    lane: int  # ``model.lane_of``
    namespace: str
    destination: str
    fire_at: Instant  # of its earliest timer


class Lanes(Struct, frozen=True):
    lanes: list[Lane]
    due: int  # due timers in all lanes, paused ones too; counting stops at ``due_max``
    next: int | None  # ``after`` for the next page; None on the last page


class Portion(Struct, frozen=True):
    """How many timers of one lane to begin."""

    lane: int
    most: int
    share: float = 1.0  # the lane's weight when ``limit`` is not enough for all lanes


class Overdue(Struct, frozen=True):
    """The overdue timers of one lane."""

    namespace: str
    destination: str
    paused: bool
    oldest_at: Instant
    timers: int  # counting stops at a limit


class Attempts(Protocol):
    async def begin(
        self,
        owner_id: bytes,
        held: Mapping[int, int],
        limit: int,
        *,
        lane_max: int | None = None,
        lane_limits: Mapping[int, int] = NO_LANE_LIMITS,
    ) -> Begun:
        """Begin an attempt of up to ``limit`` due timers in the ``held`` shards (shard → version), oldest first, and of
        at most ``lane_max`` timers per lane, or as many as ``lane_limits`` allows for that lane.

        A timer is due if it is pending and its ``fire_at`` has passed, or if it is executing, an older version of its
        shard began it, and its deadline has passed (a lost attempt). Each due timer goes through ``lifecycle.begin``.
        Paused namespaces are skipped.

        The number of due timers read is bounded. If more are due, ``Begun.more`` is set, and ``begin_lanes`` reaches
        the rest. Timers beyond a lane's own limit do not set it, because the caller knows that limit. The result holds
        at most ``BEGIN_BYTES_MAX`` but at least one timer; timers that do not fit set ``Begun.more``.
        """

    async def begin_lanes(
        self, owner_id: bytes, held: Mapping[int, int], limit: int, portions: Sequence[Portion]
    ) -> Begun:
        """``begin`` for the given lanes only (at least one), oldest first in each. Due timers in other lanes cost
        nothing. If more than ``limit`` timers are due, each lane gets its share, rounded up or down; what a lane does
        not need goes to the others. ``BEGIN_BYTES_MAX`` is shared in the same way. Lost attempts of these lanes count
        as due.

        ``Begun.lanes`` maps each lane to the earliest remaining ``fire_at``, of a due timer if one is left, otherwise
        of a later one. It omits lanes with no timers left, lanes of paused namespaces, and attempts that may yet be
        lost. ``Begun.next_at`` is the earliest of its values."""

    async def lanes(self, until: Instant, *, after: int = -1, limit: int = LANES_PAGE, due_max: int = 0) -> Lanes:
        """Return the lanes after lane ``after`` that have a timer due by ``until`` or an attempt that may be lost,
        except those of paused namespaces. Reads one index entry per lane, and at most ``limit`` lanes.

        An attempt may be lost if its deadline has passed, whichever owner began it. Lanes that are read but not
        returned count towards ``limit``, so a page before the last may be short or empty."""

    async def overdue(self, shards: Collection[int], before: Instant, most: int) -> list[Overdue]:
        """Return the lanes, paused or not, that have pending timers in these shards with a ``fire_at`` before
        ``before``; counting in each stops at ``most``. Reads at most ``LANES_PAGE`` lanes, so the cost does not grow
        with the number of destinations."""

    async def record(self, owner_id: bytes, changes: Sequence[tuple[Timer, Timer]]) -> Sequence[bool | None]:
        """Replace each begun timer by its state after the attempt, if this instance still owns the shard and the timer
        still has the revision of the begin. Return for each whether it was replaced, or None if that is unknown."""
