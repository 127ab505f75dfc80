"""The reads of a poll in MySQL: which timers are due, which attempts were lost, and when to poll again.

An owner of all shards uses the index ``timers_due``. Otherwise it queries each of its shards and reads no timers of
others. These reads take no locks: ``statements.begin`` checks everything again under its locks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from duetime.instants import EPOCH, Instant
from duetime.store import LANES_PAGE, Lane, Lanes, Overdue, Portion
from duetime.stores.due_selection import Candidate, choose
from duetime.stores.mysql.literals import listed, literal
from duetime.stores.mysql.pool import MysqlPool
from duetime.stores.stored_destination import HEAD_CHARS, destination_in

SCAN_MAX = 1_000
"""How many due timers a poll reads if some of the first ones are held back."""
SCAN_PER_SHARD_MIN, SCAN_PER_SHARD_MAX = 16, 250
"""When it queries each shard separately: how many due timers of each it reads first (at least), and how many if those
are not enough, whatever its limit."""
LANES_AT_ONCE = 64

_CANDIDATE = "fire_at, seq, uuid, revision, shard, lane, size, namespace, status"
_OLDER = "version <> (SELECT version FROM shards WHERE shards.shard = timers.shard)"
_NOT_PAUSED = "namespace NOT IN (SELECT name FROM namespaces WHERE paused = 1)"
_HEAD = f"LEFT(definition, {HEAD_CHARS})"


class Poll:
    """One poll of an owner: the store's time, and which of the shards it believes to hold it still owns."""

    def __init__(self, pool: MysqlPool, shards: int, takeover_now: bool, held_back: Collection[str]) -> None:
        self._pool = pool
        self._shards = shards
        self._held_back = held_back
        self._takeover_now = takeover_now
        self.now = EPOCH
        self.ours: dict[int, int] = {}
        self.paused: set[str] = set()

    async def start(self, owner_id: bytes, held: Mapping[int, int], now: Instant | None) -> None:
        [[at]], shards, paused = await self._pool.read(
            f"SELECT {self._pool.dialect.now if now is None else now}",
            f"SELECT shard, version FROM shards WHERE owner_id = {literal(owner_id)}",
            "SELECT name FROM namespaces WHERE paused = 1",
        )
        self.now = at
        self.ours = dict(held.items() & set(shards))
        self.paused = {name.decode() for (name,) in paused} | set(self._held_back)

    @property
    def _alone(self) -> bool:
        return len(self.ours) == self._shards

    @property
    def _lost(self) -> str:
        passed = "TRUE" if self._takeover_now else f"deadline_at <= {self.now}"
        return f"(status = 'executing' AND {passed} AND {_OLDER} AND {_NOT_PAUSED})"

    @property
    def _eligible(self) -> str:
        """The condition for due timers and lost attempts. It includes live timers with an unknown status, so that they
        get into quarantine."""
        return f"(status <> 'executing' OR {self._lost})"

    def _source(self, index: str, where: str, order: str = "fire_at, seq", what: str = _CANDIDATE) -> str:
        return f"SELECT {what} FROM timers FORCE INDEX ({index}) WHERE {where} ORDER BY {order}"

    async def oldest(
        self, limit: int, lane_max: int | None, lane_limits: Mapping[int, int]
    ) -> tuple[list[Candidate], bool]:
        """Select up to ``limit`` of the oldest due timers within the limit of each lane. Return them, and whether there
        may be more.

        Of each shard, twice its share of the limit is read first. The others are read of a shard whose timers are all
        older than the last selected one, or of every shard if fewer than ``limit`` could be selected.
        """
        if self._alone:
            index, queues = "timers_due", [""]
            number, number_max = limit + 1, max(limit + 1, SCAN_MAX)
        else:
            index, queues = "timers_shard", [f"shard = {shard} AND " for shard in self.ours]
            number_max = max(limit + 1, SCAN_PER_SHARD_MAX)
            number = min(number_max, max(SCAN_PER_SHARD_MIN, 2 * limit // max(1, len(queues))))
        read: list[list[Any]] = [[] for _ in queues]
        ended = set[int]()
        to_read = list(range(len(queues)))
        chosen, more = list[Candidate](), False
        while to_read:
            wheres = [f"{queues[n]}fire_at <= {self.now}{_behind(read[n])} AND {self._eligible}" for n in to_read]
            asked = [number - len(read[n]) for n in to_read]
            for n, most, rows in zip(to_read, asked, await self._of_each(wheres, index, asked), strict=True):
                read[n] += rows
                if len(rows) < most:
                    ended.add(n)
            chosen, more = choose(sorted(c for rows in read for c in self._open(rows)), limit, lane_max, lane_limits)
            last = chosen[-1][:2] if chosen else ()
            number = number_max
            to_read = [
                n
                for n, rows in enumerate(read)
                if n not in ended and len(rows) < number and (not more or rows[-1][:2] < last)
            ]
        return chosen, more or len(ended) < len(queues)

    async def due_in(self, portions: Sequence[Portion]) -> tuple[list[list[Candidate]], dict[int, Instant]]:
        """Return the due timers of each lane, one more than its limit, and when the next timer of each falls due."""
        ours = "" if self._alone else f" AND shard IN {listed(self.ours)}"
        found = await self._of_each(
            [f"lane = {p.lane} AND fire_at <= {self.now} AND {self._eligible}{ours}" for p in portions],
            "timers_lane",
            [portion.most + 1 for portion in portions],
        )
        later = await self._of_each(
            [f"lane = {p.lane} AND fire_at > {self.now}{ours}" for p in portions], "timers_lane", [1] * len(portions)
        )
        next_at = {row[5]: row[0] for rows in later for row in rows if row[7].decode() not in self.paused}
        return [self._open(rows) for rows in found], next_at

    async def _of_each(self, wheres: Sequence[str], index: str, limits: Sequence[int]) -> list[Sequence[Any]]:
        """Return the first rows that match each condition, by the given index."""
        found: list[Sequence[Any]] = []
        for start in range(0, len(wheres), LANES_AT_ONCE):
            some = zip(wheres[start : start + LANES_AT_ONCE], limits[start : start + LANES_AT_ONCE], strict=True)
            found += await self._pool.read(*(f"{self._source(index, where)} LIMIT {most}" for where, most in some))
        return found

    def _open(self, rows: Sequence[Any]) -> list[Candidate]:
        """The rows as candidates, without those of namespaces that are paused or held back."""
        return [
            Candidate._make((*row[:7], name, row[8])) for row in rows if (name := row[7].decode()) not in self.paused
        ]

    async def next_at(self) -> Instant | None:
        """Return when the next timer falls due or the next attempt will be lost. Called only if all due timers were
        begun, so it never scans a backlog."""
        ahead = f"fire_at <= {self.now} AND status = 'executing' AND deadline_at > {self.now}"
        may_be_lost = f"{ahead} AND {_OLDER} AND {_NOT_PAUSED}"
        lost = "" if self._takeover_now else "deadline_at"
        if self._alone:
            selects = [f"{self._source('timers_due', f'fire_at > {self.now}', what='fire_at')} LIMIT 1"]
            if lost:
                selects.append(f"SELECT MIN(deadline_at) FROM timers FORCE INDEX (timers_due) WHERE {may_be_lost}")
        else:
            selects = []
            for shard in self.ours:
                ahead = f"shard = {shard} AND fire_at > {self.now}"
                selects.append(f"{self._source('timers_shard', ahead, what='fire_at')} LIMIT 1")
                if lost:
                    selects.append(
                        "SELECT MIN(deadline_at) FROM timers FORCE INDEX (timers_shard) "
                        f"WHERE shard = {shard} AND {may_be_lost}"
                    )
        found = [row[0] for rows in (await self._pool.read(*selects) if selects else ()) for row in rows]
        return min((at for at in found if at is not None), default=None)


def _behind(rows: Sequence[Any]) -> str:
    """The condition for the rows after the last of these. Written so that the first part is a range of the index."""
    if not rows:
        return ""
    fire_at, seq, *_ = rows[-1]
    return f" AND fire_at >= {fire_at} AND (fire_at > {fire_at} OR seq > {seq})"


def _heads(after: int, limit: int) -> str:
    """The lanes after one, with one index seek per lane."""
    return (
        f"(SELECT lane FROM timers FORCE INDEX (timers_lane) WHERE lane > {after} GROUP BY lane "
        f"ORDER BY lane LIMIT {limit}) AS heads"
    )


def _firsts(heads: str, where: str) -> str:
    first = (
        "SELECT uuid FROM timers FORCE INDEX (timers_lane) "
        f"WHERE timers.lane = heads.lane AND {where} ORDER BY fire_at, seq LIMIT 1"
    )
    return f"(SELECT heads.lane, ({first}) AS first FROM {heads}) AS firsts STRAIGHT_JOIN timers ON uuid = first"


async def lanes(
    pool: MysqlPool, *, now: Instant | None, until: Instant, after: int, limit: int, due_max: int, takeover_now: bool
) -> Lanes:
    at = pool.dialect.now if now is None else str(now)
    lost = f"status = 'pending' OR deadline_at <= {at}" + (f" OR {_OLDER}" if takeover_now else "")
    found, [(read, last)], [(due,)] = await pool.read(
        f"SELECT timers.lane, namespace, {_HEAD}, fire_at FROM "
        f"{_firsts(_heads(after, limit), f'fire_at <= {until} AND ({lost})')} "
        f"WHERE {_NOT_PAUSED}",
        f"SELECT COUNT(*), MAX(lane) FROM {_heads(after, limit)}",
        "SELECT COUNT(*) FROM (SELECT 1 FROM timers FORCE INDEX (timers_due) "
        f"WHERE fire_at <= {at} AND status = 'pending' LIMIT {due_max}) AS due",
    )
    listed_lanes = [Lane(lane, name.decode(), _destination(head), fire_at) for lane, name, head, fire_at in found]
    return Lanes(listed_lanes, due, last if read == limit else None)


async def overdue(
    pool: MysqlPool, shards: Collection[int] | None, before: Instant, most: int, held_back: Collection[str]
) -> list[Overdue]:
    ours = "" if shards is None else f" AND shard IN {listed(shards)}"
    where = f"fire_at < {before} AND status = 'pending'{ours}"
    [rows] = await pool.read(
        f"SELECT timers.lane, namespace, {_HEAD}, NOT {_NOT_PAUSED}, fire_at "
        f"FROM {_firsts(_heads(-1, LANES_PAGE), where)}"
    )
    counts: list[int] = []
    for start in range(0, len(rows), LANES_AT_ONCE):
        selects = (
            "SELECT COUNT(*) FROM (SELECT 1 FROM timers FORCE INDEX (timers_lane) "
            f"WHERE lane = {row[0]} AND {where} LIMIT {most}) AS counted"
            for row in rows[start : start + LANES_AT_ONCE]
        )
        counts += [found[0][0] for found in await pool.read(*selects)]
    return [
        Overdue(name.decode(), _destination(head), bool(paused) or name.decode() in held_back, oldest_at, timers)
        for (_, name, head, paused, oldest_at), timers in zip(rows, counts, strict=True)
    ]


def _destination(head: bytes) -> str:
    return destination_in(head.decode(errors="replace"))
