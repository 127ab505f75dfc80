"""Polls of the SQLite store: which timers are due, which attempts were lost, and when to poll again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from duetime.instants import Instant
from duetime.store import BEGIN_BYTES_MAX, LANES_PAGE, Lane, Lanes, Overdue, Portion
from duetime.stores.byte_budget import fitting
from duetime.stores.fair_shares import deal
from duetime.stores.sql.columns import encode
from duetime.stores.sqlite.rows import Connection, names, sizes_of
from duetime.stores.stored_destination import HEAD_CHARS, destination_in

Found = list[tuple[Instant, int]]
"""Timers by ``fire_at``, each with its rowid."""

SCAN_MAX = 1_000
"""Minimum number of due timers that a poll reads, whatever its limit, because some may be held back."""

_DUE = "status = 'pending' AND fire_at <= :now"
_OF_AN_OLDER_VERSION = "version <> (SELECT version FROM shards WHERE shards.shard = timers.shard)"
_PAUSED = "namespace IN (SELECT value FROM json_each(:paused))"
_NOT_PAUSED = "namespace NOT IN (SELECT name FROM namespaces WHERE paused)"
_IN_LANE = "status = 'pending' AND lane = asked.value"

# The lanes of all pending timers after :after, with one index seek per lane.
_ALL_LANES = """
    each_lane (lane) AS (
        SELECT min(lane) FROM timers WHERE status = 'pending' AND lane > :after
        UNION ALL SELECT (SELECT min(lane) FROM timers WHERE status = 'pending' AND lane > each_lane.lane)
        FROM each_lane WHERE lane IS NOT NULL LIMIT :limit
    )
"""
_HEAD = f"substr(definition, 1, {HEAD_CHARS})"

_lost_decoder = msgspec.json.Decoder(list[tuple[Instant, int, int]])
_head_decoder = msgspec.json.Decoder(list[tuple[Instant, int, int, int]])
_lanes_decoder = msgspec.json.Decoder(list[tuple[Found, Instant | None, int]])


class Poll:
    """One poll of the given shards (None: all), for up to ``limit`` timers."""

    def __init__(
        self,
        connection: Connection,
        now: Instant,
        shards: Collection[int] | None,
        limit: int,
        held_back: Collection[str] = (),
    ) -> None:
        """``held_back`` names further namespaces to treat as paused."""
        self._connection = connection
        self._now = now
        self._limit = limit
        paused: str = connection.execute("SELECT json_group_array(name) FROM namespaces WHERE paused").get
        self._paused = names(paused)
        if held_back:
            self._paused |= set(held_back)
            paused = encode(sorted(self._paused)).decode()
        self._bindings = {"now": now, "paused": paused, "shards": encode(list(shards or ())).decode()}
        self._ours = "" if shards is None else " AND shard IN (SELECT value FROM json_each(:shards))"
        self.more = False
        """Whether more timers are due, other than those beyond the limit of their lane."""
        self.lost: set[int] = set()
        """The rowids of the timers whose attempt ``due`` or ``due_in`` found lost."""

    def due(self, lane_max: int | None, lane_limits: Mapping[int, int]) -> Found:
        """Return the due timers and lost attempts, oldest first, within the limit of each lane."""
        scan_max = max(self._limit, SCAN_MAX)
        lost = self._find_lost(scan_max)
        paused = f"{_PAUSED}" if self._paused else "0"
        head: list[tuple[Instant, int, int, int]] = _head_decoder.decode(
            self._connection.execute(
                f"SELECT json_group_array(json_array(fire_at, seq, lane, paused)) FROM (SELECT fire_at, seq, lane, "
                f"{paused} AS paused FROM timers WHERE {_DUE}{self._ours} ORDER BY fire_at LIMIT :limit)",
                {**self._bindings, "limit": scan_max},
            ).get
        )
        self.more = len(head) == scan_max or len(lost) == scan_max
        if lost:
            head = sorted([(*each, 0) for each in lost] + head)
        due: Found = []
        taken: Counter[int] = Counter()
        for fire_at, seq, lane, held_back in head:
            if held_back or (lane_max is not None and taken[lane] >= lane_limits.get(lane, lane_max)):
                continue
            if len(due) == self._limit:
                self.more = True
                break
            taken[lane] += 1
            due.append((fire_at, seq))
        sizes = self._sizes(seqs := [seq for _, seq in due])
        if sizes is not None:
            due = due[: fitting([sizes[seq] for seq in seqs], BEGIN_BYTES_MAX)]
            self.more |= len(due) < len(seqs)
        return due

    def due_in(self, portions: Sequence[Portion]) -> tuple[Found, dict[int, Instant]]:
        """Return the due timers and lost attempts of these lanes, by their shares, and the earliest remaining
        ``fire_at`` of each lane."""
        lanes = encode([portion.lane for portion in portions]).decode()
        lost: dict[int, Found] = {}
        for fire_at, seq, lane in self._find_lost(max(self._limit, SCAN_MAX), lanes):
            lost.setdefault(lane, []).append((fire_at, seq))
        paused = "0"
        if self._paused:
            paused = f"ifnull((SELECT {_PAUSED} FROM timers WHERE {_IN_LANE} ORDER BY fire_at LIMIT 1), 0)"
        in_lanes = _lanes_decoder.decode(
            self._connection.execute(
                f"""SELECT json_group_array(json_array(
                    json((SELECT json_group_array(json_array(fire_at, seq)) FROM (
                        SELECT fire_at, seq FROM timers WHERE {_IN_LANE} AND fire_at <= :now{self._ours}
                        ORDER BY fire_at LIMIT :most
                    ))),
                    (SELECT fire_at FROM timers WHERE {_IN_LANE} AND fire_at > :now{self._ours}
                     ORDER BY fire_at LIMIT 1),
                    {paused}
                )) FROM json_each(:lanes) AS asked""",
                {**self._bindings, "lanes": lanes, "most": max(portion.most for portion in portions) + 1},
            ).get
        )
        found = [
            [] if held_back else sorted(pending + lost.get(portion.lane, []))
            for portion, (pending, _, held_back) in zip(portions, in_lanes, strict=True)
        ]
        wishes = [(min(portion.most, len(each)), portion.share) for portion, each in zip(portions, found, strict=True)]
        due: Found = []
        left: dict[int, Instant] = {}
        counts = self._afford(deal(self._limit, wishes), found, [portion.share for portion in portions])
        for portion, each, count, (_, next_at, held_back) in zip(portions, found, counts, in_lanes, strict=True):
            due += each[:count]
            left_at = each[count][0] if len(each) > count else next_at
            if left_at is not None and not held_back:
                left[portion.lane] = left_at
        return sorted(due), left

    def _afford(self, counts: list[int], found: Sequence[Found], shares: Sequence[float]) -> list[int]:
        """Reduce the counts so that the timers fit the byte limit, by the share of each lane."""
        sizes = self._sizes([seq for count, each in zip(counts, found, strict=True) for _, seq in each[:count]])
        if sizes is None:
            return counts
        turns = [
            ((place + 1) / share, fire_at, seq, lane)
            for lane, (count, each, share) in enumerate(zip(counts, found, shares, strict=True))
            for place, (fire_at, seq) in enumerate(each[:count])
        ]
        turns.sort()
        within = fitting([sizes[seq] for _, _, seq, _ in turns], BEGIN_BYTES_MAX)
        taken = Counter(lane for *_, lane in turns[:within])
        return [taken[lane] for lane in range(len(counts))]

    def _sizes(self, seqs: Sequence[int]) -> dict[int, int] | None:
        return sizes_of(self._connection, seqs, unless_within=BEGIN_BYTES_MAX) if seqs else None

    def _find_lost(self, limit: int, lanes: str | None = None) -> list[tuple[Instant, int, int]]:
        """Return the lost attempts, with their lanes: those that an older version of their shard began and whose
        deadline has passed; in these lanes or in all."""
        condition = f"status = 'executing' AND deadline_at <= :now AND {_OF_AN_OLDER_VERSION} AND NOT {_PAUSED}"
        if lanes is not None:
            condition += " AND lane IN (SELECT value FROM json_each(:lanes))"
        lost = _lost_decoder.decode(
            self._connection.execute(
                "SELECT json_group_array(json_array(fire_at, seq, lane)) FROM "
                f"(SELECT * FROM timers WHERE {condition}{self._ours} ORDER BY deadline_at LIMIT :limit)",
                {**self._bindings, "limit": limit, "lanes": lanes},
            ).get
        )
        self.lost = {seq for _, seq, _ in lost}
        return lost

    def next_at(self) -> Instant | None:
        """Return when the next timer falls due or the next attempt will be lost; now, if more timers are due."""
        if self.more:
            return self._now
        at: Instant | None = self._connection.execute(
            f"""SELECT min(at) FROM (
                SELECT * FROM (
                    SELECT fire_at AS at FROM timers WHERE status = 'pending' AND fire_at > :now
                    {self._ours}
                    ORDER BY fire_at LIMIT 1
                ) UNION ALL SELECT * FROM (
                    SELECT deadline_at FROM timers WHERE status = 'executing' AND deadline_at > :now
                    AND {_OF_AN_OLDER_VERSION} AND NOT {_PAUSED} {self._ours}
                    ORDER BY deadline_at LIMIT 1
                )
            )""",
            self._bindings,
        ).get
        return at


def lanes(
    connection: Connection,
    *,
    now: Instant,
    until: Instant,
    after: int,
    limit: int,
    due_max: int,
    held_back: Collection[str] = (),
) -> Lanes:
    """Return the lanes that have a timer due by ``until`` or an attempt whose deadline has passed, in namespaces that
    are neither paused nor held back."""
    rows = connection.execute(
        f"""WITH RECURSIVE {_ALL_LANES}, first (lane, seq) AS MATERIALIZED (
            SELECT lane, (SELECT seq FROM timers WHERE status = 'pending' AND timers.lane = each_lane.lane
                AND fire_at <= :until ORDER BY fire_at LIMIT 1)
            FROM each_lane WHERE lane IS NOT NULL
        )
        SELECT first.lane, namespace, {_HEAD}, fire_at FROM first CROSS JOIN timers ON timers.seq = first.seq
        WHERE {_NOT_PAUSED}
        UNION ALL SELECT max(lane), NULL, NULL, count(lane) FROM first""",
        {"until": until, "after": after, "limit": limit},
    ).fetchall()
    last, _, _, read = rows.pop()
    end = last if read >= limit else None
    rows += connection.execute(
        f"""SELECT lane, namespace, {_HEAD}, min(fire_at) FROM timers
        WHERE status = 'executing' AND deadline_at <= :now AND fire_at <= :until AND {_NOT_PAUSED}
        AND lane > :after AND (:end IS NULL OR lane <= :end) GROUP BY lane""",
        {"now": now, "until": until, "after": after, "end": end},
    ).fetchall()
    due: int = connection.execute(
        f"SELECT count(*) FROM (SELECT 1 FROM timers WHERE {_DUE} LIMIT :most)", {"now": now, "most": due_max}
    ).get
    found: dict[int, Lane] = {}
    for lane, namespace, head, fire_at in rows:
        if namespace not in held_back and (lane not in found or fire_at < found[lane].fire_at):
            found[lane] = Lane(lane, namespace, destination_in(head), fire_at)
    return Lanes(list(found.values()), due, end)


def overdue(
    connection: Connection,
    shards: Collection[int] | None,
    before: Instant,
    most: int,
    held_back: Collection[str] = (),
) -> list[Overdue]:
    """Return the number of overdue timers in each lane."""
    ours = "" if shards is None else " AND shard IN (SELECT value FROM json_each(:shards))"
    rows = connection.execute(
        f"""WITH RECURSIVE {_ALL_LANES}, first (lane, seq) AS MATERIALIZED (
            SELECT lane, (SELECT seq FROM timers WHERE status = 'pending' AND timers.lane = each_lane.lane
                AND fire_at < :before{ours} ORDER BY fire_at LIMIT 1)
            FROM each_lane WHERE lane IS NOT NULL
        )
        SELECT namespace, {_HEAD}, NOT {_NOT_PAUSED}, fire_at, (
            SELECT count(*) FROM (SELECT 1 FROM timers WHERE status = 'pending' AND timers.lane = first.lane
                AND fire_at < :before{ours} LIMIT :most)
        ) FROM first CROSS JOIN timers ON timers.seq = first.seq""",
        {
            "before": before,
            "after": -1,
            "limit": LANES_PAGE,
            "most": most,
            "shards": encode(list(shards or ())).decode(),
        },
    ).fetchall()
    return [
        Overdue(namespace, destination_in(head), bool(paused) or namespace in held_back, fire_at, timers)
        for namespace, head, paused, fire_at, timers in rows
    ]
