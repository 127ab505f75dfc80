"""What a look finds in SQLite: what is due, what an older version of its shard has lost, and when to look again."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from duetime.stores.parking import PARK_MAX, PARKED, RESUMED_MAX
from duetime.stores.sqlite_rows import Connection, encode, names, parked_in

Found = list[tuple[int, int]]
"""Timers by ``fire_at``, each with its rowid."""

_DUE = "status = 'pending' AND fire_at <= :now"
_OF_AN_OLDER_VERSION = "version <> (SELECT version FROM shards WHERE shards.shard = timers.shard)"
_PAUSED = "namespace IN (SELECT value FROM json_each(:paused))"

_found_decoder = msgspec.json.Decoder(Found)


class Look:
    """One look at the timers of some shards (None: of all), for up to ``limit`` of them."""

    def __init__(self, connection: Connection, now: int, shards: Collection[int] | None, limit: int) -> None:
        self._connection = connection
        self._limit = limit
        paused: str = connection.execute("SELECT json_group_array(name) FROM namespaces WHERE paused").get
        self._paused = names(paused)
        self._bindings = {"now": now, "paused": paused, "shards": encode(list(shards or ())).decode()}
        self._ours = "" if shards is None else " AND shard IN (SELECT value FROM json_each(:shards))"
        self.full = False
        """Whether more may be due than ``due`` came to see."""

    def due(self) -> Found:
        """What is pending and due, oldest first. What is met of paused namespaces on the way is parked."""
        due = self._met(self._limit)
        if due and self._paused and self._park(due):
            due = self._met(self._limit + PARK_MAX)
            parked = self._park(due)
            due = [place for place in due if place[1] not in parked]
        oldest = sorted(
            (found, name) for name in parked_in(self._connection) - self._paused if (found := self._parked(name, 1))
        )
        self.full |= len(oldest) > RESUMED_MAX
        for _, name in oldest[:RESUMED_MAX]:
            due += self._parked(name, self._limit)
        return sorted(due)[: self._limit]

    def lost(self) -> Found:
        """Attempts that an older version of their shard began, and whose deadline has passed."""
        condition = f"status = 'executing' AND deadline_at <= :now AND {_OF_AN_OLDER_VERSION} AND NOT {_PAUSED}"
        return self._find(condition, "deadline_at", self._limit)

    def next_at(self) -> int | None:
        """When the next timer is due, or the next attempt is lost."""
        at: int | None = self._connection.execute(
            f"""SELECT min(at) FROM (
                SELECT * FROM (
                    SELECT fire_at AS at FROM timers WHERE status = 'pending' AND parked = '' AND fire_at > :now
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

    def _met(self, reach: int) -> Found:
        due = self._find(f"{_DUE} AND parked = ''", "fire_at", reach)
        self.full = len(due) == reach
        return due

    def _parked(self, name: str, limit: int) -> Found:
        return self._find(f"{_DUE} AND {PARKED} :name", "fire_at", limit, name)

    def _find(self, condition: str, order: str, limit: int, name: str = "") -> Found:
        return _found_decoder.decode(
            self._connection.execute(
                "SELECT json_group_array(json_array(fire_at, seq)) FROM "
                f"(SELECT * FROM timers WHERE {condition}{self._ours} ORDER BY {order} LIMIT :limit)",
                {**self._bindings, "limit": limit, "name": name},
            ).get
        )

    def _park(self, due: Found) -> set[int]:
        """Park those of these timers that are of paused namespaces; say which."""
        rows = self._connection.execute(
            "UPDATE timers SET parked = namespace "
            f"WHERE seq IN (SELECT value FROM json_each(:seqs)) AND {_PAUSED} RETURNING seq",
            {**self._bindings, "seqs": encode([seq for _, seq in due]).decode()},
        )
        return {seq for (seq,) in rows.fetchall()}
