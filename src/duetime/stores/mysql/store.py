"""The MySQL store: each method of the port is one packet, or a plain read and a packet that checks what was read.

Puts are batched by group commit; begins and records arrive in batches from the engine. ``statements`` explains why the
packets are safe; this module passes the arguments, converts the results, and retries when a packet wrote nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from duetime.clock import Clock, SystemClock
from duetime.errors import Contended, StoreError, StoreIndeterminate, StoreUnavailable
from duetime.instants import Instant
from duetime.model import DAY_MS, HttpTarget, Status, Timer, timer_uuid
from duetime.store import (
    LANES_PAGE,
    NO_LANE_LIMITS,
    UNNAMED,
    About,
    Begun,
    Cursor,
    Filter,
    Instance,
    Lanes,
    Overdue,
    Page,
    Portion,
    Query,
    Renewal,
    Taken,
)
from duetime.stores.byte_budget import brief, fitting, in_parts
from duetime.stores.connecting import wait_for_server
from duetime.stores.datagram_hints import DatagramHints
from duetime.stores.due_selection import Candidate, choose_in_lanes
from duetime.stores.mysql import due, lists, quarantine, sessions
from duetime.stores.mysql import statements as sql
from duetime.stores.mysql.literals import listed, literal
from duetime.stores.mysql.migration import migrate
from duetime.stores.mysql.namespaces import Namespaces
from duetime.stores.mysql.pool import BUSY, LOCK_SECONDS_MAX, NO_PARTITION, READ_ONLY, MysqlPool, Refused, Result
from duetime.stores.mysql.rows import timers_of
from duetime.stores.mysql.slices import drop_rows, drop_slices, make_slices
from duetime.stores.sql.columns import TIMER, encode
from duetime.stores.sql.server import ServerStore, partly_written
from duetime.stores.sql.tallies import by_status
from duetime.stores.unreadable import about_of, timer_quarantined

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 8
BEGIN_MAX = 1_000
PACKET_BYTES_MAX = 4 << 20
"""The maximum size of the timers in one packet, plus one timer."""
TRIES_MAX = 4
BUSY_SECONDS_MAX = 0.05
"""The longest pause before the first retry of a write that met a lock; it doubles with each one, and is random."""
INSTANCES_MAX, TURNS_PER_MS = 1 << 12, 1 << 8
"""The mark of a timer is its place in the order of creation: time, turn within the millisecond, number of the instance.
So no two instances create the same mark, unless one runs while ``INSTANCES_MAX`` others start."""
CLAIM_SECONDS_MAX = 1
"""How long a claim waits for a lock. A begin or a record holds it for much less."""
UPKEEP_SECONDS_MAX = 60
LIVE = ("pending", "executing")
NO_SLICE = frozenset({NO_PARTITION, 1048})
"""The error codes of a write that has no partition for a final timer, or no slice for its count (NULL)."""
_REVISION = Timer.__struct_fields__.index("revision")


def put_bytes(timer: Timer) -> int:
    """An upper bound of a timer's part of a put: a literal doubles quotes and backslashes, and a character of an id has
    up to four bytes."""
    definition, target = timer.definition, timer.definition.target
    where = len(target.url) if isinstance(target, HttpTarget) else 4 * len(target.subject)
    headers = sum(len(name) + 2 * len(value) for name, value in target.headers.items()) if target.headers else 0
    texts = len(timer.id) + len(timer.correlation_id or "")
    return 1_024 + 2 * (len(definition.payload) + len(definition.metadata) + where + 2 * headers) + 8 * texts


class MysqlStore(ServerStore):
    put_bytes = staticmethod(put_bytes)
    put_bytes_max = PACKET_BYTES_MAX
    _hints: DatagramHints

    def __init__(
        self,
        url: str,
        *,
        shards: int = 64,
        retention_ms: int = 30 * DAY_MS,
        takeover_now: bool = False,
        virtual_clock: Clock | None = None,
    ) -> None:
        self._pool = MysqlPool(url, size=CONNECTIONS_MAX)
        super().__init__(Namespaces(self._pool), DatagramHints(), shards=shards, retention_ms=retention_ms)
        self._clock = virtual_clock or SystemClock()
        self._takeover_now = takeover_now
        self._virtual = virtual_clock is not None
        self._instance = self._turn = 0
        self._pending_quarantine = quarantine.PendingQuarantine(self._pool)

    async def open(self) -> None:
        await wait_for_server(self._pool)
        now = await self._time()
        async with self._pool.connection() as connection:
            await migrate(connection, shards=self.shards, now=now)
        await self._make_slices()
        *_, opened, marks = await self._write(
            "INSERT INTO meta VALUES ('opened', 1) ON DUPLICATE KEY UPDATE value = meta.value + 1",
            "SELECT value FROM meta WHERE name = 'opened'",
            "SELECT value FROM meta WHERE name = 'mark'",
        )
        self._instance = opened.rows[0][0] % INSTANCES_MAX
        self._turn = max((mark for (mark,) in marks.rows), default=0) // INSTANCES_MAX
        if restored := await quarantine.restore(self._pool):
            log.warning("restored %d quarantined timers, which this version can read", restored)
        [[(key,)]] = await self._pool.read("SELECT secret FROM hint_key")
        await self._hints.start(key, self._pool.server)

    async def close(self) -> None:
        await self._puts.finish()
        self._hints.close()
        if self._turn:
            # The next process continues from this number, whatever its clock shows. After a crash it relies on its
            # clock.
            mark = self._turn * INSTANCES_MAX
            with contextlib.suppress(StoreError):
                await self._pool.write(
                    f"INSERT INTO meta VALUES ('mark', {mark}) "
                    f"ON DUPLICATE KEY UPDATE value = GREATEST(meta.value, {mark})"
                )
        await self._pool.close()

    async def ping(self) -> None:
        [[(read_only,)], _] = await self._pool.read(
            f"SELECT {self._pool.dialect.read_only}", "SELECT 1 FROM namespaces LIMIT 1"
        )
        if read_only:
            raise StoreUnavailable(READ_ONLY)

    async def _version_and_time(self) -> tuple[str, int]:
        async with self._pool.connection():
            pass  # detects the dialect
        [[(version, now)]] = await self._pool.read(f"SELECT VERSION(), {self._pool.dialect.now}")
        return version, now

    async def _disconnect(self) -> None:
        await self._pool.close()

    @property
    def _now(self) -> str:
        """The store's time as SQL, or that of the virtual clock if there is one."""
        return str(self._clock.now()) if self._virtual else self._pool.dialect.now

    async def _time(self) -> Instant:
        [[(now,)]] = await self._pool.read(f"SELECT {self._now}")
        return Instant(int(now))

    # Timers.

    async def put_many(self, timers: Sequence[Timer]) -> list[Timer | Taken | None]:
        results: list[Timer | Taken | None] = []
        for part in in_parts(timers, [put_bytes(timer) for timer in timers], PACKET_BYTES_MAX):
            try:
                results += await self._put(part)
            except StoreUnavailable as error:
                if any(result is None for result in results):
                    raise partly_written(error) from error
                raise
        return results

    async def _put(self, timers: Sequence[Timer]) -> list[Timer | Taken | None]:
        """Insert the timers whose identity is free, and find the existing timer for each of the others. If that one
        has disappeared meanwhile, try again."""
        results: dict[int, Timer | Taken | None] = {}
        sent: dict[int, int] = {}  # mark → place
        lost: StoreIndeterminate | None = None
        wrote = False
        for _ in range(TRIES_MAX):
            # A batch may contain an identity twice; then the second timer finds the first.
            left = [place for place in range(len(timers)) if place not in results]
            marks = self._marks(len(left))
            sent |= zip(marks, left, strict=True)
            try:
                try:
                    inserted, _, finished, *_ = await self._write(*sql.put([timers[place] for place in left], marks))
                    number = inserted.affected - finished.affected
                    if number == len(left):
                        return [results.get(place) for place in range(len(timers))]  # the usual case
                    wrote = wrote or number > 0
                except StoreIndeterminate as error:
                    lost = error
                rows = await self._taken([timers[place].uuid for place in left])
                if rows:
                    await self._flush()
            except StoreUnavailable as error:
                raise lost or (partly_written(error) if wrote else error) from error
            for place in left:
                if row := rows.get(timers[place].uuid):
                    mark, fingerprint, existing = row
                    results[place] = None if sent.get(mark) == place else existing or Taken(fingerprint)
            if len(results) == len(timers):
                return [results[place] for place in range(len(timers))]
        raise lost or (partly_written(Contended()) if wrote else Contended())

    async def _flush(self) -> None:
        """Return when everything read so far is on disk. Without a binary log, the server shows the changes of a commit
        before it has flushed them; the flush of a later commit includes them."""
        await self._pool.write(
            "INSERT INTO meta SELECT CONCAT('flush ', CONNECTION_ID() % 8), 1 FROM DUAL "
            "ON DUPLICATE KEY UPDATE value = meta.value + 1"
        )

    def _marks(self, number: int) -> range:
        """Reserve the next marks for timers that are created in this order."""
        turn = max(self._turn + 1, self._clock.now() * TURNS_PER_MS)
        self._turn = turn + number - 1
        first = turn * INSTANCES_MAX + self._instance
        return range(first, first + number * INSTANCES_MAX, INSTANCES_MAX)

    async def _taken(self, uuids: Sequence[bytes]) -> dict[bytes, tuple[int, str, Timer | None]]:
        """Return mark, fingerprint and timer of the existing timers with these keys; beyond the byte limit of a page,
        None instead of the timer."""
        where = f"WHERE uuid IN {listed(uuids)}"
        heads = "SELECT uuid, seq, fingerprint, size FROM"
        [live, ended] = await self._pool.read(f"{heads} timers {where}", f"{heads} history {where}")
        found = {row[0]: row for row in (*ended, *live)}
        some = list(found)[: fitting([row[3] for row in found.values()])]
        whole = {timer.uuid: timer for timer in await self._whole(some)}
        return {uuid: (row[1], row[2].decode(), whole.get(uuid)) for uuid, row in found.items()}

    async def _whole(self, uuids: Sequence[bytes]) -> list[Timer]:
        if not uuids:
            return []
        return timers_of(await self._rows(uuids))[0]

    async def _rows(self, uuids: Sequence[bytes]) -> Sequence[Any]:
        """Return the rows of these timers, live or final. One statement reads both tables, so no timer moves between
        them meanwhile."""
        tables = (f"SELECT {TIMER} FROM {table} WHERE uuid IN {listed(uuids)}" for table in ("timers", "history"))
        [rows] = await self._pool.read(" UNION ALL ".join(tables))
        return rows

    async def get(self, namespace: str, id: str) -> Timer | None:
        found, unreadable = timers_of(await self._rows([timer_uuid(namespace, id)]))
        if unreadable:
            raise timer_quarantined(namespace, id)
        return found[0] if found else None

    async def swap(self, before: Timer, after: Timer | None) -> bool:
        results = await self._write(*sql.swap(self._pool.dialect, before, after, self._now), then=["SELECT @go"])
        return bool(results[-1].rows[0][0])

    async def page_by_offset(self, query: Query) -> list[Timer]:
        [found] = await self._pool.read(lists.page_by_offset(query))
        uuids, sizes = [row[0] for row in found], [row[1] for row in found]
        timers: dict[bytes, Timer] = {}
        for part in in_parts(uuids, sizes):
            timers |= {t.uuid: brief(t) if query.brief else t for t in await self._whole(part)}
        return [timers[uuid] for uuid in uuids if uuid in timers]

    async def page(self, filter: Filter, limit: int, after: Cursor | None = None) -> Page:
        [found] = await self._pool.read(lists.page(filter, limit, self._now, after, await self._names(filter)))
        count = fitting([row[3] for row in found[:limit]])
        read = {timer.uuid: timer for timer in await self._whole([row[0] for row in found[:count]])}
        timers = [read[row[0]] for row in found[:count] if row[0] in read and filter.matches(read[row[0]])]
        if count == len(found):
            return Page(timers, None)
        _, value, seq, _ = found[count - 1]
        return Page(timers, Cursor(filter.order, value, seq))

    async def tally(self, namespace: str | None = None) -> dict[Status, int]:
        where = "" if namespace is None else f"WHERE namespace = {literal(namespace)}"
        [rows] = await self._pool.read(f"SELECT status, SUM(timers) FROM tallies {where} GROUP BY status")
        return by_status(rows)

    async def count(self, filter: Filter, most: int) -> int:
        [[(number,)]] = await self._pool.read(lists.count(filter, most, self._now, await self._names(filter)))
        return int(number)

    async def forecast(self, bounds: Sequence[Instant], most: int) -> list[int]:
        return [rows[0][0] for rows in await self._pool.read(*lists.forecast(bounds, most))]

    # Shards and attempts.

    async def renew(self, owner_id: bytes, lease_ms: int, about: About = UNNAMED) -> Renewal:
        owner, row = literal(owner_id), listed((owner_id, 0, about.serving, encode(about), self._hints.address))
        *_, [_, (now,)], held, others, free, free_at = (
            (result.affected, result.rows)
            for result in await self._write(
                f"SET @now = {self._now}",
                f"UPDATE shards SET lease_until = @now + {lease_ms} WHERE owner_id = {owner}",
                f"REPLACE INTO instances VALUES {row}",
                f"UPDATE instances SET alive_until = @now + {lease_ms} WHERE owner_id = {owner}",
                "DELETE FROM instances WHERE alive_until <= @now",
                then=[
                    "SELECT @now",
                    f"SELECT shard, version FROM shards WHERE owner_id = {owner}",
                    "SELECT owner_id, serving, hint_address FROM instances WHERE alive_until > @now",
                    f"SELECT shard FROM shards WHERE lease_until <= @now AND NOT owner_id <=> {owner}",
                    f"SELECT MIN(lease_until) FROM shards WHERE lease_until > @now AND owner_id <> {owner}",
                ],
            )
        )
        self._hints.set_peers(address for *_, address in others[1])
        return Renewal(
            now=Instant(int(now[0])),
            held=dict(held[1]),
            instances=frozenset(owner_id for owner_id, serving, _ in others[1] if serving),
            free=frozenset(shard for (shard,) in free[1]),
            free_at=free_at[1][0][0],
            failovers=self._pool.failovers,
        )

    async def claim(self, owner_id: bytes, shards: Collection[int], lease_ms: int) -> dict[int, int]:
        try:
            return await self._claim(owner_id, shards, lease_ms)
        except Refused as refused:
            if refused.code not in BUSY:
                raise
        # A suspended client may keep a shard locked until the server ends its transaction. Renewals must not wait for
        # that: claim the other shards.
        return await self._claim(owner_id, shards, lease_ms, lock=self._pool.dialect.skip)

    async def _claim(self, owner_id: bytes, shards: Collection[int], lease_ms: int, lock: str = "") -> dict[int, int]:
        owner, some = literal(owner_id), listed(sorted(shards))
        mine = f"shard IN {some} AND (lease_until <= @now OR owner_id <=> {owner})"
        results = await self._pool.write(
            f"SET SESSION innodb_lock_wait_timeout = {CLAIM_SECONDS_MAX}",
            f"SET @now = {self._now}",
            # Recorded under the lock: after the commit, claimed shards can't be told from those held before.
            self._pool.dialect.select_into_variable(
                "claimed", "COALESCE(GROUP_CONCAT(shard), '')", f"FROM shards WHERE {mine}", lock=lock
            ),
            # By key, it would wait for the locks that the statement above has omitted.
            f"UPDATE shards SET owner_id = {owner}, version = version + 1, lease_until = @now + {lease_ms} "
            "WHERE FIND_IN_SET(shard, @claimed)",
            then=[
                f"SET SESSION innodb_lock_wait_timeout = {LOCK_SECONDS_MAX}",
                f"SELECT shard, version FROM shards WHERE owner_id = {owner} AND FIND_IN_SET(shard, @claimed)",
            ],
        )
        return dict(results[-1].rows)

    async def release(self, owner_id: bytes, shards: Collection[int]) -> None:
        await self._write(_FREE + f"owner_id = {literal(owner_id)} AND shard IN {listed(sorted(shards))}")

    async def leave(self, owner_id: bytes) -> None:
        owner = literal(owner_id)
        await self._write(_FREE + f"owner_id = {owner}", f"DELETE FROM instances WHERE owner_id = {owner}")

    async def cluster(self) -> list[Instance]:
        instances, shards = await self._pool.read(
            f"SELECT owner_id, about, alive_until FROM instances WHERE alive_until > {self._now} ORDER BY owner_id",
            "SELECT owner_id, shard FROM shards WHERE owner_id IS NOT NULL ORDER BY shard",
        )
        owned: dict[bytes, list[int]] = {}
        for owner_id, shard in shards:
            owned.setdefault(owner_id, []).append(shard)
        return [
            Instance(owner_id=owner_id, about=about_of(about), alive_until=until, shards=tuple(owned.get(owner_id, ())))
            for owner_id, about, until in instances
        ]

    async def begin(
        self,
        owner_id: bytes,
        held: Mapping[int, int],
        limit: int,
        *,
        lane_max: int | None = None,
        lane_limits: Mapping[int, int] = NO_LANE_LIMITS,
    ) -> Begun:
        for _ in range(TRIES_MAX):
            poll = await self._poll(owner_id, held)
            chosen, more = await poll.oldest(min(limit, BEGIN_MAX), lane_max, lane_limits)
            begun, unknown = await self._begin(owner_id, poll, chosen)
            if begun is not None:
                break
        more = more or begun is None
        next_at: Instant | None = poll.now
        if not more and not unknown:
            try:
                next_at = await poll.next_at()
            except StoreUnavailable:
                if not begun:
                    raise
                # Timers were begun and must be returned. ``next_at`` is the store's time, so that the engine polls
                # again at once.
        return Begun(begun or [], next_at, frozenset(held.keys() - poll.ours.keys()), more, unknown=unknown)

    async def begin_lanes(
        self, owner_id: bytes, held: Mapping[int, int], limit: int, portions: Sequence[Portion]
    ) -> Begun:
        for _ in range(TRIES_MAX):
            poll = await self._poll(owner_id, held)
            in_lanes, left = await poll.due_in(portions)
            chosen, counts = choose_in_lanes(in_lanes, min(limit, BEGIN_MAX), portions)
            begun, unknown = await self._begin(owner_id, poll, chosen)
            if begun is not None:
                break
        for portion, found, count in zip(portions, in_lanes, counts, strict=True):
            count = 0 if begun is None or unknown else count
            if len(found) > count:
                left[portion.lane] = found[count].fire_at
        refused = frozenset(held.keys() - poll.ours.keys())
        return Begun(begun or [], min(left.values(), default=None), refused, False, left, unknown)

    async def _poll(self, owner_id: bytes, held: Mapping[int, int]) -> due.Poll:
        poll = due.Poll(self._pool, self.shards, self._takeover_now, self._namespaces.unreadable)
        await poll.start(owner_id, held, self._clock.now() if self._virtual else None)
        return poll

    async def _begin(
        self, owner_id: bytes, poll: due.Poll, chosen: Sequence[Candidate]
    ) -> tuple[list[Timer] | None, frozenset[int]]:
        """Begin these timers. Return them, or None if one of them has changed since it was read or a shard has a new
        owner; and the shards in which it is unknown whether timers were begun."""
        if self._pending_quarantine.rows:
            await self._pending_quarantine.put(owner_id, self._now)
        if not chosen:
            return [], frozenset()
        try:
            *_, go, rows = await self._write(
                *sql.begin(self._pool.dialect, owner_id, poll.ours, chosen, poll.now),
                then=[
                    "SELECT @go",
                    f"SELECT {TIMER}, uuid FROM timers WHERE uuid IN {listed(each.uuid for each in chosen)}",
                ],
            )
        except StoreIndeterminate as error:
            log.warning("unknown whether %d timers were begun: %s", len(chosen), error)
            return [], frozenset(each.shard for each in chosen)
        if not go.rows[0][0]:
            return None, frozenset()
        before = {each.uuid: each for each in chosen}
        rows_begun = [row for row in rows.rows if row[_REVISION] == before[row[-1]].revision + 1]
        begun, unreadable = timers_of([row for row in rows_begun if before[row[-1]].status in LIVE])
        odd = [row for row in rows_begun if before[row[-1]].status not in LIVE]
        unreadable += [(row, f"its status is '{before[row[-1]].status}'") for row in odd]
        if unreadable:
            for row, reason in unreadable:
                each = before[row[-1]]
                self._pending_quarantine.rows.append(
                    quarantine.UnreadableTimer(
                        *(each.uuid, each.revision + 1, each.shard, poll.ours[each.shard], each.namespace),
                        *(row[1].decode(), each.fire_at, each.status, reason),
                    )
                )
            await self._pending_quarantine.put(owner_id, self._now)
        place = {each.uuid: number for number, each in enumerate(chosen)}
        return sorted(begun, key=lambda timer: place[timer.uuid]), frozenset()

    async def lanes(self, until: Instant, *, after: int = -1, limit: int = LANES_PAGE, due_max: int = 0) -> Lanes:
        at = self._clock.now() if self._virtual else None
        found = await due.lanes(
            self._pool, now=at, until=until, after=after, limit=limit, due_max=due_max, takeover_now=self._takeover_now
        )
        readable = [lane for lane in found.lanes if lane.namespace not in self._namespaces.unreadable]
        return Lanes(readable, found.due, found.next)

    async def overdue(self, shards: Collection[int], before: Instant, most: int) -> list[Overdue]:
        some = None if len(shards) == self.shards else shards
        return await due.overdue(self._pool, some, before, most, self._namespaces.unreadable)

    async def record(self, owner_id: bytes, changes: Sequence[tuple[Timer, Timer]]) -> list[bool | None]:
        recorded: list[bool | None] = [False] * len(changes)
        left = {before.uuid: place for place, (before, _) in reversed(list(enumerate(changes)))}
        for _ in range(TRIES_MAX):
            some = [changes[place] for place in left.values()]
            if not some:
                break
            result: bool | None
            try:
                *_, go = await self._write(
                    *sql.record(self._pool.dialect, owner_id, some, self._now), then=["SELECT @go"]
                )
                result = bool(go.rows[0][0])
            except StoreIndeterminate as error:
                log.warning("unknown whether %d outcomes were recorded: %s", len(some), error)
                result = None
            if result is not False:
                for place in left.values():
                    recorded[place] = result
                break
            shards, revisions = await self._pool.read(
                f"SELECT shard, version FROM shards WHERE owner_id = {literal(owner_id)}",
                f"SELECT uuid, revision FROM timers WHERE uuid IN {listed(left)}",
            )
            held, stored = dict(shards), dict(revisions)
            left = {
                uuid: place
                for uuid, place in left.items()
                if held.get(changes[place][0].shard) == changes[place][0].version
                and stored.get(uuid) == changes[place][0].revision
            }
        else:
            raise StoreUnavailable("shards or timers kept changing; nothing was recorded")
        return recorded

    # Upkeep.

    async def _make_slices(self) -> int:
        longest_ms = max((await self._kept_ms()).values())
        now = await self._time()
        async with self._pool.connection() as connection, asyncio.timeout(UPKEEP_SECONDS_MAX):
            await make_slices(connection, now, longest_ms)
        return now

    async def _drop_slices(self, until: int) -> int:
        async with self._pool.connection() as connection, asyncio.timeout(UPKEEP_SECONDS_MAX):
            return await drop_slices(connection, until)

    async def _drop_rows(self, before: Mapping[str, int], limit: int) -> int:
        return await drop_rows(self._pool, before, limit)

    async def _quarantined(self) -> int:
        [[(timers,)]] = await self._pool.read("SELECT COUNT(*) FROM quarantine")
        return int(timers)

    async def end_session(self, id: bytes, ends_at: Instant, *, forget_before: Instant) -> None:
        await self._write(*sessions.end(id, ends_at, forget_before=forget_before))

    async def session_ended(self, id: bytes, ends_at: Instant) -> bool:
        [rows] = await self._pool.read(sessions.ended(id, ends_at))
        return bool(rows)

    async def _write(self, *statements: str, then: Sequence[str] = ()) -> list[Result]:
        """Run a transaction. Retry it if another transaction holds a lock, or after creating the current slice if that
        is missing; usually upkeep creates slices a day ahead."""
        for tries in range(TRIES_MAX):
            try:
                return await self._pool.write(*statements, then=then)
            except Refused as refused:
                if refused.code in NO_SLICE:
                    await self._make_slices()
                elif refused.code not in BUSY or tries == TRIES_MAX - 1:
                    raise
                else:
                    await asyncio.sleep(random.uniform(0, BUSY_SECONDS_MAX * 2**tries))
        raise StoreUnavailable("another transaction keeps the tables of MySQL locked; try again")


_FREE = "UPDATE shards SET owner_id = NULL, lease_until = 0 WHERE "
