"""The embedded store: the store port as SQL on one SQLite file.

Each method is one job for the writer thread (or a reader thread) of ``SqliteFile``. A job changes many rows with few
statements, because SQLite releases the interpreter lock at every step and a busy event loop is slow to return it: one
statement per row made a batch of inserts 20 times slower than one statement per hundred rows (docs/decisions/0002).

The writer's transaction is the fence: it reads the owner and version of the shards and changes the timers, and no other
write can come in between.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from duetime.clock import Clock
from duetime.errors import SettingsError, StoreError, TooManyNamespaces
from duetime.instants import Instant
from duetime.model import (
    DEFAULT_NAMESPACE,
    Namespace,
    Status,
    Timer,
    timer_uuid,
)
from duetime.store import (
    ALL_ABILITIES,
    LANES_PAGE,
    NO_LANE_LIMITS,
    UNNAMED,
    About,
    Begun,
    Cursor,
    Filter,
    Hint,
    Instance,
    Lanes,
    Overdue,
    Page,
    Portion,
    Quarantine,
    Query,
    Renewal,
    Taken,
)
from duetime.stores.byte_budget import fitting
from duetime.stores.sql.columns import IDENTITY, LIVE, encode, live_row
from duetime.stores.sql.retention import drop_in_turns
from duetime.stores.sql.tallies import LIVE_SLICE, Tally, by_status, moved, recorded
from duetime.stores.sqlite import due, lists, sessions
from duetime.stores.sqlite.due import Found, Poll
from duetime.stores.sqlite.file import SqliteFile
from duetime.stores.sqlite.namespaces import Namespaces, put_namespaces, read_namespace, swap_namespaces
from duetime.stores.sqlite.purge import ROWS_AT_ONCE, Group, Step, drop_old, old_groups
from duetime.stores.sqlite.quarantine import open_quarantine, quarantine_rows, still_unreadable
from duetime.stores.sqlite.rows import (
    Connection,
    UnreadableRows,
    begin_rows,
    count_timers,
    insert_rows,
    namespaces_of,
    one_by_one,
    select_chosen,
    taken_by,
    update_rows,
)
from duetime.stores.sqlite.schema import migrate
from duetime.stores.unreadable import about_of, timer_quarantined

log = logging.getLogger(__name__)

Find = Callable[[Poll], tuple[Found, dict[int, Instant], Instant | None]]
"""Selects the timers to begin. Returns them, the earliest remaining ``fire_at`` of each requested lane, and when to
poll again."""


class Begin(NamedTuple):
    owner_id: bytes
    held: Mapping[int, int]
    limit: int
    find: Find


class SqliteStore:
    abilities = ALL_ABILITIES

    def __init__(self, path: Path, clock: Clock, *, shards: int = 64) -> None:
        self.shards = shards
        self._clock = clock
        self._file = SqliteFile(path)
        self._namespaces = Namespaces()
        self._seq = 0

    async def open(self) -> None:
        await self._file.open(self._prepare)

    async def close(self) -> None:
        await self._file.close()

    async def ping(self) -> None:
        await self._file.probe()

    async def failure(self) -> StoreError:
        return await self._file.until_failed()

    async def put(self, timer: Timer) -> Timer | None:
        existing = (await self.put_many([timer]))[0]
        while isinstance(existing, Taken):
            existing = await self.get(timer.namespace, timer.id) or (await self.put_many([timer]))[0]
        return existing

    async def put_many(self, timers: Sequence[Timer]) -> list[Timer | Taken | None]:
        return await self._file.write(self._put, timers)

    async def get(self, namespace: str, id: str) -> Timer | None:
        uuid = timer_uuid(namespace, id)
        for row, _ in await self._file.read(lambda c: one_by_one(c, "timers WHERE uuid = ?", (uuid,))):
            if isinstance(row, str):
                raise timer_quarantined(namespace, id)
            return row
        return None

    async def swap(self, before: Timer, after: Timer | None) -> bool:
        return await self._file.write(self._swap, (before, after))

    async def page_by_offset(self, query: Query) -> list[Timer]:
        return await self._file.read_list(lambda c: lists.page_by_offset(c, query))

    async def page(self, filter: Filter, limit: int, after: Cursor | None = None) -> Page:
        return await self._file.read_list(lambda c: lists.page(c, filter, limit, after))

    async def tally(self, namespace: str | None = None) -> dict[Status, int]:
        sql = "SELECT status, sum(timers) FROM tallies WHERE ?1 IS NULL OR namespace = ?1 GROUP BY status"
        rows: list[Any] = await self._file.read(lambda c: c.execute(sql, (namespace,)).fetchall())
        return by_status(rows)

    async def count(self, filter: Filter, most: int) -> int:
        return await self._file.read_list(lambda c: lists.count(c, filter, most))

    async def forecast(self, bounds: Sequence[Instant], most: int) -> list[int]:
        return await self._file.read_list(lambda c: lists.forecast(c, bounds, most))

    async def renew(self, owner_id: bytes, lease_ms: int, about: About = UNNAMED) -> Renewal:
        return await self._file.write(self._renew, (owner_id, lease_ms, about))

    async def claim(self, owner_id: bytes, shards: Collection[int], lease_ms: int) -> dict[int, int]:
        return await self._file.write(self._claim, (owner_id, shards, lease_ms))

    async def release(self, owner_id: bytes, shards: Collection[int]) -> None:
        await self._file.write(self._release, (owner_id, shards))

    async def leave(self, owner_id: bytes) -> None:
        await self._file.write(self._leave, owner_id)

    async def cluster(self) -> list[Instance]:
        return await self._file.read(lambda c: _instances(c, self._clock.now()))

    def hint(self, hint: Hint) -> None:
        pass  # No other process can use the file.

    def on_hint(self, heard: Callable[[Hint], None]) -> None:
        pass

    async def begin(
        self,
        owner_id: bytes,
        held: Mapping[int, int],
        limit: int,
        *,
        lane_max: int | None = None,
        lane_limits: Mapping[int, int] = NO_LANE_LIMITS,
    ) -> Begun:
        def find(poll: Poll) -> tuple[Found, dict[int, Instant], Instant | None]:
            return poll.due(lane_max, lane_limits), {}, poll.next_at()

        return await self._begin_readable(Begin(owner_id, held, limit, find))

    async def begin_lanes(
        self, owner_id: bytes, held: Mapping[int, int], limit: int, portions: Sequence[Portion]
    ) -> Begun:
        def find(poll: Poll) -> tuple[Found, dict[int, Instant], Instant | None]:
            found, left = poll.due_in(portions)
            return found, left, min(left.values(), default=None)

        return await self._begin_readable(Begin(owner_id, held, limit, find))

    async def _begin_readable(self, begin: Begin) -> Begun:
        while True:
            try:
                return await self._file.write(self._begin, begin)
            except UnreadableRows as unreadable:  # The begin was rolled back: quarantine the rows and try again.
                await self._file.write(self._quarantine, unreadable.rows)

    async def lanes(self, until: Instant, *, after: int = -1, limit: int = LANES_PAGE, due_max: int = 0) -> Lanes:
        held_back = self._namespaces.unreadable
        return await self._file.read(
            lambda c: due.lanes(
                c,
                now=self._clock.now(),
                until=until,
                after=after,
                limit=limit,
                due_max=due_max,
                held_back=held_back,
            )
        )

    async def overdue(self, shards: Collection[int], before: Instant, most: int) -> list[Overdue]:
        some = None if len(shards) == self.shards else shards
        return await self._file.read(lambda c: due.overdue(c, some, before, most, self._namespaces.unreadable))

    async def record(self, owner_id: bytes, changes: Sequence[tuple[Timer, Timer]]) -> list[bool]:
        return await self._file.write(self._record, (owner_id, changes))

    async def purge(self, *, retention_ms: int, limit: int) -> int:
        now = self._clock.now()

        async def drop(groups: Sequence[Group], each: int) -> tuple[int, list[Group]]:
            return await self._file.write(drop_old, Step(groups, each, now, retention_ms))

        groups = await self._file.read_list(lambda c: old_groups(c, now, retention_ms))
        return await drop_in_turns(groups, limit, ROWS_AT_ONCE, drop)

    async def namespaces(self) -> list[Namespace]:
        return await self._file.read(self._namespaces.read)

    async def namespace(self, name: str) -> Namespace | None:
        return await self._file.read(lambda c: read_namespace(c, name))

    async def put_namespace(self, namespace: Namespace, most: int | None = None) -> Namespace | None:
        existing = await self._file.write(put_namespaces, (namespace, most))
        if isinstance(existing, TooManyNamespaces):
            raise existing
        return existing

    async def swap_namespace(self, before: Namespace, after: Namespace) -> bool:
        return await self._file.write(swap_namespaces, (before, after))

    async def end_session(self, id: bytes, ends_at: Instant, *, forget_before: Instant) -> None:
        await self._file.write(sessions.end, (id, ends_at, forget_before))

    async def session_ended(self, id: bytes, ends_at: Instant) -> bool:
        return await self._file.read(lambda c: sessions.ended(c, id, ends_at))

    async def quarantine(self) -> Quarantine:
        timers: int = await self._file.read(lambda c: c.execute("SELECT count(*) FROM quarantine").get)
        return Quarantine(timers, self._namespaces.unreadable)

    # Jobs of the writer thread: each serves all callers of its method since the last commit.

    def _prepare(self, connection: Connection) -> None:
        with connection:
            migrate(connection, self._file.path)
        with connection:
            found = connection.execute("SELECT value FROM meta WHERE name = 'shards'").get
            if found is None:
                connection.execute("INSERT INTO meta VALUES ('shards', ?)", (self.shards,))
                connection.executemany("INSERT INTO shards (shard) VALUES (?)", [(n,) for n in range(self.shards)])
                default = Namespace(name=DEFAULT_NAMESPACE, shards=self.shards, created_at=self._clock.now())
                put_namespaces(connection, [(default, None)])
            elif found != self.shards:
                raise SettingsError(
                    f"DUETIME_SHARDS is {self.shards}, but {self._file.path} was created with {found}: the number of "
                    f"shards is fixed, set it to {found}"
                )
            if restored := open_quarantine(connection, self._clock.now()):
                log.warning("restored %d quarantined timers, which this version can read", restored)
            # The file lock proves that the former owner of the shards is dead: wait neither for leases nor attempts.
            connection.execute("UPDATE shards SET owner_id = NULL, lease_until = 0; DELETE FROM instances")
            connection.execute("UPDATE timers SET deadline_at = 0 WHERE status = 'executing'")
            self._seq = connection.execute("SELECT max(seq) FROM timers").get or 0

    def _put(self, connection: Connection, arguments: list[Sequence[Timer]]) -> list[list[Timer | Taken | None]]:
        timers = [timer for several in arguments for timer in several]
        first_seq = max(self._seq + 1, self._clock.now() << 20)
        self._seq = first_seq + len(timers)
        taken: list[Timer | Taken | None] = [None] * len(timers)
        if insert_rows(connection, timers, first_seq) < len(timers):
            taken = _taken(connection, timers, first_seq)
        written = (timer for timer, other in zip(timers, taken, strict=True) if other is None)
        count_timers(connection, Counter((timer.namespace, timer.status, LIVE_SLICE) for timer in written))
        results = iter(taken)
        return [[next(results) for _ in several] for several in arguments]

    def _swap(self, connection: Connection, arguments: list[tuple[Timer, Timer | None]]) -> list[bool]:
        return [self._swap_one(connection, before, after) for before, after in arguments]

    def _swap_one(self, connection: Connection, before: Timer, after: Timer | None) -> bool:
        where = "WHERE uuid = ? AND revision = ?"
        if after is None:
            connection.execute(f"DELETE FROM timers {where}", (before.uuid, before.revision))
        else:
            changes = dict(zip(LIVE, live_row(after), strict=True))
            for name in IDENTITY:
                del changes[name]
            connection.execute(
                f"UPDATE timers SET {', '.join(f'{c} = ?' for c in changes)} {where}",
                (*changes.values(), before.uuid, before.revision),
            )
        swapped: bool = connection.changes() == 1
        if swapped:
            removed: Tally = Counter({(before.namespace, before.status, LIVE_SLICE): -1})
            count_timers(connection, removed if after is None else recorded([(before, after)]))
        return swapped

    def _renew(self, connection: Connection, arguments: list[tuple[bytes, int, About]]) -> list[Renewal]:
        return [self._renew_one(connection, *each) for each in arguments]

    def _renew_one(self, connection: Connection, owner_id: bytes, lease_ms: int, about: About) -> Renewal:
        now = self._clock.now()
        connection.execute("DELETE FROM instances WHERE alive_until <= ?", (now,))
        row = owner_id, now + lease_ms, about.serving, encode(about)
        connection.execute("INSERT OR REPLACE INTO instances VALUES (?, ?, ?, ?)", row)
        connection.execute("UPDATE shards SET lease_until = ? WHERE owner_id = ?", (now + lease_ms, owner_id))
        serving = connection.execute("SELECT owner_id FROM instances WHERE serving").fetchall()
        free = connection.execute("SELECT shard FROM shards WHERE lease_until <= ?", (now,)).fetchall()
        free_at = connection.execute(
            "SELECT min(lease_until) FROM shards WHERE lease_until > ? AND owner_id <> ?", (now, owner_id)
        ).get
        return Renewal(
            now=now,
            held=_held(connection, owner_id),
            instances=frozenset(o for (o,) in serving),
            free=frozenset(s for (s,) in free),
            free_at=free_at,
        )

    def _claim(
        self, connection: Connection, arguments: list[tuple[bytes, Collection[int], int]]
    ) -> list[dict[int, int]]:
        claimed = []
        for owner_id, shards, lease_ms in arguments:
            now = self._clock.now()
            rows = connection.execute(
                "UPDATE shards SET owner_id = ?1, version = version + 1, lease_until = ?2 WHERE shard IN "
                "(SELECT value FROM json_each(?3)) AND (lease_until <= ?4 OR owner_id = ?1) RETURNING shard, version",
                (owner_id, now + lease_ms, encode(list(shards)).decode(), now),
            )
            claimed.append(dict(rows.fetchall()))
        return claimed

    def _release(self, connection: Connection, arguments: list[tuple[bytes, Collection[int]]]) -> list[None]:
        connection.executemany(
            "UPDATE shards SET owner_id = NULL, lease_until = 0 WHERE owner_id = ? AND shard = ?",
            [(owner_id, shard) for owner_id, shards in arguments for shard in shards],
        )
        return [None] * len(arguments)

    def _leave(self, connection: Connection, arguments: list[bytes]) -> list[None]:
        for owner_id in arguments:
            connection.execute("UPDATE shards SET owner_id = NULL, lease_until = 0 WHERE owner_id = ?", (owner_id,))
            connection.execute("DELETE FROM instances WHERE owner_id = ?", (owner_id,))
        return [None] * len(arguments)

    def _begin(self, connection: Connection, arguments: list[Begin]) -> list[Begun]:
        return [self._begin_one(connection, *each) for each in arguments]

    def _begin_one(
        self, connection: Connection, owner_id: bytes, held: Mapping[int, int], limit: int, find: Find
    ) -> Begun:
        now = self._clock.now()
        ours = dict(held.items() & _held(connection, owner_id).items())
        refused = frozenset(held.keys() - ours.keys())
        some = None if len(ours) == self.shards else ours
        poll = Poll(connection, now, some, limit, self._namespaces.unreadable)
        found, lanes, next_at = find(poll)
        seqs = [seq for _, seq in found]
        tally: Tally = Counter()
        if lost := poll.lost.intersection(seqs):
            for namespace in namespaces_of(connection, list(lost)):
                moved(tally, namespace, Status.EXECUTING, Status.PENDING)
        begun = begin_rows(connection, seqs, now)
        for namespace, count in Counter(timer.namespace for timer in begun).items():
            moved(tally, namespace, Status.PENDING, Status.EXECUTING, count)
        count_timers(connection, tally)
        return Begun(begun, next_at, refused, poll.more, lanes)

    def _quarantine(self, connection: Connection, arguments: list[dict[int, str]]) -> list[None]:
        for rows in arguments:
            quarantine_rows(connection, still_unreadable(connection, rows), self._clock.now())
        return [None] * len(arguments)

    def _record(
        self, connection: Connection, arguments: list[tuple[bytes, Sequence[tuple[Timer, Timer]]]]
    ) -> list[list[bool]]:
        return [self._record_one(connection, owner_id, changes) for owner_id, changes in arguments]

    def _record_one(
        self, connection: Connection, owner_id: bytes, changes: Sequence[tuple[Timer, Timer]]
    ) -> list[bool]:
        held = _held(connection, owner_id)
        ours = [held.get(before.shard) == before.version for before, _ in changes]
        written = iter(update_rows(connection, list(compress(changes, ours))))
        done = [our and next(written) for our in ours]
        count_timers(connection, recorded(compress(changes, done)))
        return done


def _taken(connection: Connection, timers: Sequence[Timer], first_seq: int) -> list[Timer | Taken | None]:
    """Return for each timer the existing one with its identity, or None if it was inserted (has its own rowid)."""
    existing = taken_by(connection, [timer.uuid for timer in timers])
    found = [existing[timer.uuid] for timer in timers]
    ours = [seq == first_seq + place for place, (seq, _, _) in enumerate(found)]
    others = {seq: size for (seq, _, size), our in zip(found, ours, strict=True) if not our}
    read = list(others)[: fitting(list(others.values()))]
    whole = {timer.uuid: timer for timer in select_chosen(connection, read)}
    return [
        None if our else whole.get(timer.uuid) or Taken(fingerprint)
        for timer, (_, fingerprint, _), our in zip(timers, found, ours, strict=True)
    ]


def _held(connection: Connection, owner_id: bytes) -> dict[int, int]:
    held = connection.execute(
        "SELECT json_group_object(shard, version) FROM shards WHERE owner_id = ?", (owner_id,)
    ).get
    return {int(shard): version for shard, version in msgspec.json.decode(held).items()}


def _instances(connection: Connection, now: int) -> list[Instance]:
    rows = connection.execute(
        "SELECT owner_id, about, alive_until, (SELECT json_group_array(shard ORDER BY shard) FROM shards "
        "WHERE shards.owner_id = instances.owner_id) FROM instances WHERE alive_until > ? ORDER BY owner_id",
        (now,),
    ).fetchall()
    return [
        Instance(
            owner_id=owner_id,
            about=about_of(about),
            alive_until=until,
            shards=tuple(msgspec.json.decode(shards)),
        )
        for owner_id, about, until, shards in rows
    ]
