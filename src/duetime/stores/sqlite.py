"""The embedded store: every verb of the port as SQL on one SQLite file.

Each verb is one job for the writer (or a reader) of ``SqliteFile``. A job touches many rows in few statements, because
SQLite gives the interpreter lock back at every step and a busy event loop is slow to return it: a statement per row
made a batch of inserts 20 times slower than one statement for a hundred rows (docs/decisions/0002).

The writer's transaction is the fence: it reads the owner and version of the shards and changes timers with nothing in
between.
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
from duetime.model import (
    DEFAULT_NAMESPACE,
    Namespace,
    Status,
    Timer,
    timer_uuid,
)
from duetime.store import (
    EVERYWHERE,
    LANES_PAGE,
    UNNAMED,
    About,
    Begun,
    Filter,
    Hint,
    Instance,
    Lanes,
    Overdue,
    Page,
    Place,
    Portion,
    Quarantine,
    Query,
    Standing,
    Taken,
)
from duetime.stores import sqlite_due as due
from duetime.stores import sqlite_lists as lists
from duetime.stores import sqlite_sessions as sessions
from duetime.stores.budget import fitting
from duetime.stores.sqlite_due import Found, Look
from duetime.stores.sqlite_file import SqliteFile
from duetime.stores.sqlite_namespaces import Namespaces, put_namespaces, read_namespace, swap_namespaces
from duetime.stores.sqlite_purge import GROUPS_AT_ONCE, ROWS_AT_ONCE, Step, drop_old, old_groups
from duetime.stores.sqlite_quarantine import open_quarantine, put_aside, still_unreadable
from duetime.stores.sqlite_rows import (
    STATE,
    Connection,
    Tally,
    UnreadableRows,
    begin_rows,
    count_timers,
    encode,
    insert_rows,
    namespaces_of,
    one_by_one,
    select_chosen,
    state,
    taken_by,
    update_rows,
)
from duetime.stores.sqlite_schema import migrate
from duetime.stores.unreadable import about_of, timer_quarantined

log = logging.getLogger(__name__)

Find = Callable[[Look], tuple[Found, dict[int, int], int | None]]
"""Which timers a look begins, what it leaves in the lanes that it was asked about, and when to look again."""


class Begin(NamedTuple):
    owner_id: bytes
    held: Mapping[int, int]
    limit: int
    find: Find


class SqliteStore:
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
        there = (await self.put_many([timer]))[0]
        while isinstance(there, Taken):
            there = await self.get(timer.namespace, timer.id) or (await self.put_many([timer]))[0]
        return there

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

    async def find(self, query: Query) -> list[Timer]:
        return await self._file.read_list(lambda c: lists.find(c, query))

    async def page(self, filter: Filter, limit: int, after: Place | None = None) -> Page:
        return await self._file.read_list(lambda c: lists.page(c, filter, limit, after))

    async def tally(self, namespace: str | None = None) -> dict[Status, int]:
        sql = "SELECT status, sum(timers) FROM tallies WHERE ?1 IS NULL OR namespace = ?1 GROUP BY status"
        rows: list[Any] = await self._file.read(lambda c: c.execute(sql, (namespace,)).fetchall())
        counts = dict(rows)
        return {status: counts.get(status.value, 0) for status in Status}

    async def count(self, filter: Filter, most: int) -> int:
        return await self._file.read_list(lambda c: lists.count(c, filter, most))

    async def forecast(self, bounds: Sequence[int], most: int) -> list[int]:
        return await self._file.read_list(lambda c: lists.forecast(c, bounds, most))

    async def renew(self, owner_id: bytes, lease_ms: int, about: About = UNNAMED) -> Standing:
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
        pass  # The file belongs to this process: there is nobody to tell.

    def on_hint(self, heard: Callable[[Hint], None]) -> None:
        pass

    async def begin(
        self,
        owner_id: bytes,
        held: Mapping[int, int],
        limit: int,
        *,
        lane_max: int | None = None,
        wide: Mapping[int, int] = EVERYWHERE,
    ) -> Begun:
        def find(look: Look) -> tuple[Found, dict[int, int], int | None]:
            return look.due(lane_max, wide), {}, look.next_at()

        return await self._begin_readable(Begin(owner_id, held, limit, find))

    async def begin_lanes(
        self, owner_id: bytes, held: Mapping[int, int], limit: int, portions: Sequence[Portion]
    ) -> Begun:
        def find(look: Look) -> tuple[Found, dict[int, int], int | None]:
            found, left = look.due_in(portions)
            return found, left, min(left.values(), default=None)

        return await self._begin_readable(Begin(owner_id, held, limit, find))

    async def _begin_readable(self, begin: Begin) -> Begun:
        while True:
            try:
                return await self._file.write(self._begin, begin)
            except UnreadableRows as unreadable:  # Nothing was begun: put them aside as they are, and look again.
                await self._file.write(self._quarantine, unreadable.rows)

    async def lanes(self, until: int, *, after: int = -1, limit: int = LANES_PAGE, due_max: int = 0) -> Lanes:
        held_back = self._namespaces.unreadable
        return await self._file.read(lambda c: due.lanes(c, self._clock.now(), until, after, limit, due_max, held_back))

    async def overdue(self, shards: Collection[int], before: int, most: int) -> list[Overdue]:
        some = None if len(shards) == self.shards else shards
        return await self._file.read(lambda c: due.overdue(c, some, before, most, self._namespaces.unreadable))

    async def record(self, owner_id: bytes, changes: Sequence[tuple[Timer, Timer]]) -> list[bool]:
        return await self._file.write(self._record, (owner_id, changes))

    async def purge(self, *, retention_ms: int, limit: int) -> int:
        now, purged = self._clock.now(), 0
        groups = await self._file.read_list(lambda c: old_groups(c, now, retention_ms))
        while groups and purged < limit:
            number = min(GROUPS_AT_ONCE, limit - purged)
            step = Step(groups[:number], min(ROWS_AT_ONCE, limit - purged), now, retention_ms)
            dropped, left = await self._file.write(drop_old, step)
            purged += dropped
            groups = groups[number:] + left
        return purged

    async def namespaces(self) -> list[Namespace]:
        return await self._file.read(self._namespaces.read)

    async def namespace(self, name: str) -> Namespace | None:
        return await self._file.read(lambda c: read_namespace(c, name))

    async def put_namespace(self, namespace: Namespace, most: int | None = None) -> Namespace | None:
        there = await self._file.write(put_namespaces, (namespace, most))
        if isinstance(there, TooManyNamespaces):
            raise there
        return there

    async def swap_namespace(self, before: Namespace, after: Namespace) -> bool:
        return await self._file.write(swap_namespaces, (before, after))

    async def end_session(self, id: bytes, ends_at: int, *, forget_before: int) -> None:
        await self._file.write(sessions.end, (id, ends_at, forget_before))

    async def session_ended(self, id: bytes, ends_at: int) -> bool:
        return await self._file.read(lambda c: sessions.ended(c, id, ends_at))

    async def quarantine(self) -> Quarantine:
        timers: int = await self._file.read(lambda c: c.execute("SELECT count(*) FROM quarantine").get)
        return Quarantine(timers, self._namespaces.unreadable)

    # The jobs, run by the writer: each does its verb for everyone who asked for it since the last commit.

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
                    f"DUETIME_SHARDS is {self.shards}, but {self._file.path} was made with {found}: the number of "
                    f"shards is fixed, set it to {found}"
                )
            if restored := open_quarantine(connection, self._clock.now()):
                log.warning("%d timers were quarantined, can be read now and are back", restored)
            # The file lock proves that whoever owned the shards is dead: neither leases nor attempts are waited for.
            connection.execute("UPDATE shards SET owner_id = NULL, lease_until = 0; DELETE FROM instances")
            connection.execute("UPDATE timers SET deadline_at = 0 WHERE status = 'executing'")
            self._seq = connection.execute("SELECT max(seq) FROM timers").get or 0

    def _put(self, connection: Connection, asked: list[Sequence[Timer]]) -> list[list[Timer | Taken | None]]:
        timers = [timer for several in asked for timer in several]
        first_seq = max(self._seq + 1, self._clock.now() << 20)
        self._seq = first_seq + len(timers)
        taken: list[Timer | Taken | None] = [None] * len(timers)
        if insert_rows(connection, timers, first_seq) < len(timers):
            taken = _taken(connection, timers, first_seq)
        written = (timer for timer, other in zip(timers, taken, strict=True) if other is None)
        count_timers(connection, Counter((timer.namespace, timer.status) for timer in written))
        answers = iter(taken)
        return [[next(answers) for _ in several] for several in asked]

    def _swap(self, connection: Connection, asked: list[tuple[Timer, Timer | None]]) -> list[bool]:
        return [self._swap_one(connection, before, after) for before, after in asked]

    def _swap_one(self, connection: Connection, before: Timer, after: Timer | None) -> bool:
        where = "WHERE uuid = ? AND revision = ?"
        if after is None:
            connection.execute(f"DELETE FROM timers {where}", (before.uuid, before.revision))
        else:
            changes = ("lane", "definition", "timeout_ms", "fingerprint", "correlation_id", "created_at", *STATE)
            values = (after.lane, encode(after.definition).decode(), after.definition.timeout_ms, after.fingerprint)
            connection.execute(
                f"UPDATE timers SET {', '.join(f'{c} = ?' for c in changes)} {where}",
                (*values, after.correlation_id, after.created_at, *state(after), before.uuid, before.revision),
            )
        swapped: bool = connection.changes() == 1
        if swapped:
            tally: Tally = Counter({(before.namespace, before.status): -1})
            if after is not None:
                tally[after.namespace, after.status] += 1
            count_timers(connection, tally)
        return swapped

    def _renew(self, connection: Connection, asked: list[tuple[bytes, int, About]]) -> list[Standing]:
        return [self._renew_one(connection, *each) for each in asked]

    def _renew_one(self, connection: Connection, owner_id: bytes, lease_ms: int, about: About) -> Standing:
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
        return Standing(
            *(now, _held(connection, owner_id), frozenset(o for (o,) in serving), frozenset(s for (s,) in free)),
            free_at=free_at,
        )

    def _claim(self, connection: Connection, asked: list[tuple[bytes, Collection[int], int]]) -> list[dict[int, int]]:
        claimed = []
        for owner_id, shards, lease_ms in asked:
            now = self._clock.now()
            rows = connection.execute(
                "UPDATE shards SET owner_id = ?1, version = version + 1, lease_until = ?2 WHERE shard IN "
                "(SELECT value FROM json_each(?3)) AND (lease_until <= ?4 OR owner_id = ?1) RETURNING shard, version",
                (owner_id, now + lease_ms, encode(list(shards)).decode(), now),
            )
            claimed.append(dict(rows.fetchall()))
        return claimed

    def _release(self, connection: Connection, asked: list[tuple[bytes, Collection[int]]]) -> list[None]:
        connection.executemany(
            "UPDATE shards SET owner_id = NULL, lease_until = 0 WHERE owner_id = ? AND shard = ?",
            [(owner_id, shard) for owner_id, shards in asked for shard in shards],
        )
        return [None] * len(asked)

    def _leave(self, connection: Connection, asked: list[bytes]) -> list[None]:
        for owner_id in asked:
            connection.execute("UPDATE shards SET owner_id = NULL, lease_until = 0 WHERE owner_id = ?", (owner_id,))
            connection.execute("DELETE FROM instances WHERE owner_id = ?", (owner_id,))
        return [None] * len(asked)

    def _begin(self, connection: Connection, asked: list[Begin]) -> list[Begun]:
        return [self._begin_one(connection, *each) for each in asked]

    def _begin_one(
        self, connection: Connection, owner_id: bytes, held: Mapping[int, int], limit: int, find: Find
    ) -> Begun:
        now = self._clock.now()
        ours = dict(held.items() & _held(connection, owner_id).items())
        refused = frozenset(held.keys() - ours.keys())
        some = None if len(ours) == self.shards else ours
        look = Look(connection, now, some, limit, self._namespaces.unreadable)
        found, lanes, next_at = find(look)
        seqs = [seq for _, seq in found]
        tally: Tally = Counter()
        if lost := look.lost.intersection(seqs):
            for namespace in namespaces_of(connection, list(lost)):
                tally[namespace, Status.EXECUTING] -= 1
                tally[namespace, Status.PENDING] += 1
        begun = begin_rows(connection, seqs, now)
        for namespace, count in Counter(timer.namespace for timer in begun).items():
            tally[namespace, Status.PENDING] -= count
            tally[namespace, Status.EXECUTING] += count
        count_timers(connection, tally)
        return Begun(begun, next_at, refused, look.more, lanes)

    def _quarantine(self, connection: Connection, asked: list[dict[int, str]]) -> list[None]:
        for rows in asked:
            put_aside(connection, still_unreadable(connection, rows), self._clock.now())
        return [None] * len(asked)

    def _record(
        self, connection: Connection, asked: list[tuple[bytes, Sequence[tuple[Timer, Timer]]]]
    ) -> list[list[bool]]:
        return [self._record_one(connection, owner_id, changes) for owner_id, changes in asked]

    def _record_one(
        self, connection: Connection, owner_id: bytes, changes: Sequence[tuple[Timer, Timer]]
    ) -> list[bool]:
        held = _held(connection, owner_id)
        ours = [held.get(before.shard) == before.version for before, _ in changes]
        written = iter(update_rows(connection, list(compress(changes, ours))))
        recorded = [our and next(written) for our in ours]
        done = Counter(
            [(before.namespace, before.status, after.status) for before, after in compress(changes, recorded)]
        )
        tally: Tally = Counter()
        for (namespace, was, becomes), count in done.items():
            tally[namespace, was] -= count
            tally[namespace, becomes] += count
        count_timers(connection, tally)
        return recorded


def _taken(connection: Connection, timers: Sequence[Timer], first_seq: int) -> list[Timer | Taken | None]:
    """What was in the place of each timer, where it could not be written at its own rowid."""
    there = taken_by(connection, [timer.uuid for timer in timers])
    found = [there[timer.uuid] for timer in timers]
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
