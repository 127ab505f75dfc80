"""The PostgreSQL store: every verb of the port as one statement on a server that any number of instances share.

Puts are gathered into batches; begins and records come in batches from the engine. The statements are in
``postgres_statements``, which says what makes them safe; here is what goes in and what comes out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from duetime.clock import Clock
from duetime.errors import SettingsError, StoreError, StoreIndeterminate, StoreUnavailable
from duetime.model import DAY_MS, Namespace, Status, Timer, timer_uuid
from duetime.store import (
    EVERYWHERE,
    LANES_PAGE,
    UNNAMED,
    About,
    Begun,
    Filter,
    Hint,
    Instance,
    Lane,
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
from duetime.stores import postgres_quarantine as quarantine
from duetime.stores import postgres_sessions as sessions
from duetime.stores import postgres_statements as sql
from duetime.stores.budget import brief, in_parts
from duetime.stores.gathering import Gathering
from duetime.stores.orders import ORDERS
from duetime.stores.postgres_hints import PostgresHints
from duetime.stores.postgres_lists import FORECAST, count, find, page
from duetime.stores.postgres_namespaces import Namespaces
from duetime.stores.postgres_opening import bring_up
from duetime.stores.postgres_pool import Connection, PostgresPool, Refused
from duetime.stores.postgres_purge import LOCK_MS_MAX, drop_rows, drop_slices
from duetime.stores.postgres_rows import encode, end, final, live, new, state, timers_of
from duetime.stores.postgres_schema import SLICE_LOCK, slice_statements, slice_width_ms
from duetime.stores.targets import destination_in
from duetime.stores.unreadable import about_of, timer_quarantined

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 8
PUT_MAX = 500
PUT_TRIES_MAX = 3
MIGRATION_SECONDS_MAX = 3600.0
FINISHED_ALREADY = "DT001"
NO_SLICE = ("23514", "23502")  # there is no partition, or no name of one to count by: whichever is missed first
NOT_HELD = -1


class PostgresStore:
    def __init__(
        self,
        url: str,
        *,
        shards: int = 64,
        retention_ms: int = 30 * DAY_MS,
        takeover_now: bool = False,
        virtual_clock: Clock | None = None,
    ) -> None:
        self.shards = shards
        self._retention_ms = retention_ms
        self._takeover_now = takeover_now
        self._virtual_clock = virtual_clock
        self._pool = PostgresPool(url, size=CONNECTIONS_MAX)
        self._hints = PostgresHints(self._pool)
        self._namespaces = Namespaces(self._pool)
        self._aside = quarantine.Aside(self._pool)
        self._puts: Gathering[Timer, Timer | Taken | None] = Gathering(self._put, batch_max=PUT_MAX)

    async def open(self) -> None:
        await self._pool.open()
        try:
            await self._pool.work(self._prepare, seconds_max=MIGRATION_SECONDS_MAX)
        except Refused as refused:
            if not refused.hopeless:
                raise
            raise SettingsError(f"DATABASE_URL: {refused}") from refused
        self._hints.start()

    async def close(self) -> None:
        await self._puts.finish()
        await self._hints.close()
        await self._pool.close()

    async def ping(self) -> None:
        [(read_only,)] = await self._pool.read(
            "SELECT current_setting('transaction_read_only')::boolean FROM namespaces LIMIT 1"
        )
        if read_only:
            raise StoreUnavailable("PostgreSQL accepts no writes: it is a standby or set to read-only")

    async def failure(self) -> StoreError:
        await asyncio.Event().wait()
        raise AssertionError("a server that is gone may come back")

    async def examine(self, clock: Clock) -> tuple[str, int]:
        """The version of a server that can be reached, and how far this clock is surely off its own."""
        asked_at = clock.now()
        [(version, now)] = await self._pool.read(f"SELECT current_setting('server_version'), {sql.now('$1')}", None)
        answered_at = clock.now()
        await self._pool.close()
        return version, max(0, asked_at - now) + min(0, answered_at - now)

    def _now(self) -> int | None:
        return None if self._virtual_clock is None else self._virtual_clock.now()

    # Timers.

    async def put(self, timer: Timer) -> Timer | None:
        there = await self._puts(timer)
        while isinstance(there, Taken):
            there = await self.get(timer.namespace, timer.id) or await self._puts(timer)
        return there

    async def put_many(self, timers: Sequence[Timer]) -> list[Timer | Taken | None]:
        return await self._put(timers)

    async def _put(self, timers: Sequence[Timer]) -> list[Timer | Taken | None]:
        """Write what can be written and find what is in the way of the rest; what has gone meanwhile is tried again."""
        answers: dict[int, Timer | Taken | None] = {}
        lost: StoreIndeterminate | None = None
        for _ in range(PUT_TRIES_MAX):
            left = [(place, timer) for place, timer in enumerate(timers) if place not in answers]
            if not left:
                break
            written: set[tuple[bytes, int]] = set()
            try:
                try:
                    [found] = await self._pool.write(sql.PUT, [new(timer) for _, timer in left])
                    if found["number"] == len(left):
                        return [answers.get(place) for place in range(len(timers))]  # as it nearly always is
                    written.update(zip(found["uuids"] or (), found["revisions"] or (), strict=True))
                except Refused as refused:
                    if refused.code != FINISHED_ALREADY:
                        raise
                except StoreIndeterminate as error:
                    lost = error
                others = [timer.uuid for _, timer in left if (timer.uuid, timer.revision) not in written]
                rows = await self._pool.read(sql.TAKEN, others)
            except StoreUnavailable as error:
                raise lost or error from error
            there = {timer_uuid(row["namespace"], row["id"]): row for row in rows}
            for place, timer in left:
                if (timer.uuid, timer.revision) in written:
                    answers[place] = None
                elif row := there.get(timer.uuid):
                    # A firing begins with a random number: the same one means that our own write was not lost.
                    ours = lost and row["firing"] == timer.firing
                    whole, _ = timers_of([row] if row["definition"] is not None else [])
                    answers[place] = None if ours else whole[0] if whole else Taken(row["fingerprint"])
        if len(answers) < len(timers):
            raise lost or StoreUnavailable("the timer keeps changing; try again")
        return [answers[place] for place in range(len(timers))]

    async def get(self, namespace: str, id: str) -> Timer | None:
        found, unreadable = timers_of(await self._pool.read(sql.GET, [timer_uuid(namespace, id)]))
        if unreadable:
            raise timer_quarantined(namespace, id)
        return found[0] if found else None

    async def swap(self, before: Timer, after: Timer | None) -> bool:
        which = before.status.final, None if after is None else after.status.final
        [row] = await self._into_history(
            sql.SWAPS[which],
            *(self._now(), before.uuid, before.revision, before.namespace, before.status.value),
            *(() if after is None else (final(after) if after.status.final else live(after),)),
        )
        return bool(row["swapped"])

    async def find(self, query: Query) -> list[Timer]:
        statement, arguments = find(query)
        found = await self._pool.read(statement, *arguments)
        uuids, sizes = [row["uuid"] for row in found], [row["bytes"] for row in found]
        there: dict[bytes, Timer] = {}
        for part in in_parts(uuids, sizes):
            timers, _ = timers_of(await self._pool.read(sql.GET, part))
            there |= {timer.uuid: brief(timer) if query.brief else timer for timer in timers}
        return [there[uuid] for uuid in uuids if uuid in there]

    async def page(self, filter: Filter, limit: int, after: Place | None = None) -> Page:
        statement, arguments = page(filter, limit, self._now(), after, await self._names(filter))
        rows = await self._pool.read(statement, *arguments)
        timers, _ = timers_of(rows)
        if not rows or rows[-1]["found"] == len(rows):
            return Page(timers, None)
        last = rows[-1]
        return Page(timers, Place(filter.order, last[ORDERS[filter.order][0]], last["seq"]))

    async def tally(self, namespace: str | None = None) -> dict[Status, int]:
        rows = await self._pool.read(
            "SELECT status, sum(timers)::bigint FROM tallies WHERE $1::text IS NULL OR namespace = $1 GROUP BY status",
            namespace,
        )
        counts = {status: number for status, number in rows}
        return {status: counts.get(status.value, 0) for status in Status}

    async def count(self, filter: Filter, most: int) -> int:
        statement, arguments = count(filter, most, self._now(), await self._names(filter))
        [(number,)] = await self._pool.read(statement, *arguments)
        return int(number)

    async def forecast(self, bounds: Sequence[int], most: int) -> list[int]:
        rows = await self._pool.read(FORECAST, bounds[:-1], bounds[1:], most, self._now())
        return [number for (number,) in rows]

    async def _names(self, filter: Filter) -> list[str]:
        """The namespaces in which the filter's id may be, if that is to be asked."""
        if filter.id is None or filter.namespace is not None:
            return []
        return [*(namespace.name for namespace in await self.namespaces()), *self._namespaces.unreadable]

    # What owners do.

    async def renew(self, owner_id: bytes, lease_ms: int, about: About = UNNAMED) -> Standing:
        [row] = await self._pool.write(sql.RENEW, owner_id, lease_ms, self._now(), about.serving, encode(about))
        return Standing(
            row["now"],
            dict(zip(row["shards"] or (), row["versions"] or (), strict=True)),
            frozenset(row["others"] or ()) | ({owner_id} if about.serving else set()),
            frozenset(row["free"] or ()),
            row["free_at"],
        )

    async def claim(self, owner_id: bytes, shards: Collection[int], lease_ms: int) -> dict[int, int]:
        rows = await self._pool.write(sql.CLAIM, owner_id, list(shards), lease_ms, self._now())
        return {shard: version for shard, version in rows}

    async def release(self, owner_id: bytes, shards: Collection[int]) -> None:
        await self._pool.write(sql.RELEASE, owner_id, list(shards))

    async def leave(self, owner_id: bytes) -> None:
        await self._pool.write(sql.LEAVE, owner_id)

    async def cluster(self) -> list[Instance]:
        return [
            Instance(owner_id=owner_id, about=about_of(about), alive_until=until, shards=tuple(shards))
            for owner_id, about, until, shards in await self._pool.read(sql.CLUSTER, self._now())
        ]

    def hint(self, hint: Hint) -> None:
        self._hints.say(hint)

    def on_hint(self, heard: Callable[[Hint], None]) -> None:
        self._hints.heard = heard

    async def begin(
        self,
        owner_id: bytes,
        held: Mapping[int, int],
        limit: int,
        *,
        lane_max: int | None = None,
        wide: Mapping[int, int] = EVERYWHERE,
    ) -> Begun:
        named = encode(wide).decode()
        look, count, begun, refused = await self._begin(sql.BEGIN, owner_id, held, limit, lane_max, named)
        now, number, next_at = (look[name] for name in ("now", "number", "next_at"))
        more = count != number
        return Begun(begun, now if more else next_at, refused, more)

    async def begin_lanes(
        self, owner_id: bytes, held: Mapping[int, int], limit: int, portions: Sequence[Portion]
    ) -> Begun:
        lanes, mosts, shares = zip(*((p.lane, p.most, p.share) for p in portions), strict=True)
        look, _, begun, refused = await self._begin(sql.BEGIN_LANES, owner_id, held, limit, lanes, mosts, shares)
        left = dict(zip(look["lanes"], look["lanes_at"], strict=True))
        return Begun(begun, min(left.values(), default=None), refused, False, left)

    async def _begin(
        self, statement: str, owner_id: bytes, held: Mapping[int, int], limit: int, *rest: object
    ) -> tuple[Any, int, list[Timer], frozenset[int]]:
        versions = [held.get(shard, NOT_HELD) for shard in range(self.shards)]
        held_back = list(self._namespaces.unreadable)
        look, *rows = await self._pool.write(
            statement, *(owner_id, versions, limit, self._now(), self._takeover_now, held_back), *rest
        )
        refused = frozenset(shard for shard in held if look["versions"][shard] == NOT_HELD)
        begun = quarantine.begun_of(rows, self._aside)
        if self._aside.rows:
            await self._aside.put(owner_id, self._now())
        return look, len(rows), begun, refused

    async def lanes(self, until: int, *, after: int = -1, limit: int = LANES_PAGE, due_max: int = 0) -> Lanes:
        *rows, last = await self._pool.read(sql.LANES, *(self._now(), until, after, limit, due_max, self._takeover_now))
        found = [
            Lane(lane, namespace, destination_in(head), at)
            for lane, namespace, head, at in rows
            if namespace not in self._namespaces.unreadable
        ]
        return Lanes(found, last["fire_at"], last["lane"])

    async def overdue(self, shards: Collection[int], before: int, most: int) -> list[Overdue]:
        return [
            Overdue(
                *(namespace, destination_in(head), paused or namespace in self._namespaces.unreadable),
                *(oldest_at, timers),
            )
            for namespace, head, paused, oldest_at, timers in await self._pool.read(
                sql.OVERDUE, list(shards), before, most
            )
        ]

    async def record(self, owner_id: bytes, changes: Sequence[tuple[Timer, Timer]]) -> list[bool]:
        uuids = [before.uuid for before, _ in changes]
        first = dict(zip(reversed(uuids), reversed(changes), strict=True))
        ending, moving = [], []
        for uuid, (before, after) in first.items():
            if after.status.final:
                ending.append((uuid, before.revision, before.shard, *end(after)))
            else:
                moving.append((uuid, before.revision, before.shard, *state(after)))
        [row] = await self._into_history(
            sql.RECORD,
            *(owner_id, self._now(), {before.shard for before, _ in changes}, ending, moving),
        )
        written = set(first if row["number"] == len(first) else row["uuids"] or ())
        recorded = []
        for uuid in uuids:
            recorded.append(uuid in written)
            written.discard(uuid)
        return recorded

    # Upkeep.

    async def purge(self, *, retention_ms: int, limit: int) -> int:
        """Slices that are old as a whole are dropped; row by row goes what is kept for less time than the rest.

        The timers that are kept longest wait for their slice, so they stay up to a quarter longer: that is what makes
        dropping them free. A retention of less than a day is kept to the letter.
        """
        self._retention_ms = retention_ms
        now: int = await self._pool.work(self._make_slices)
        kept = self._namespaces.kept_ms(await self.namespaces(), retention_ms)
        longest = max(kept.values())
        purged: int = await self._pool.work(lambda connection: drop_slices(connection, now - longest))
        short = {name: now - kept_ms for name, kept_ms in kept.items() if kept_ms < max(longest, DAY_MS)}
        return purged + await drop_rows(self._pool, short, limit - purged)

    async def namespaces(self) -> list[Namespace]:
        return await self._namespaces.all()

    async def namespace(self, name: str) -> Namespace | None:
        return await self._namespaces.one(name)

    async def put_namespace(self, namespace: Namespace, most: int | None = None) -> Namespace | None:
        return await self._namespaces.put(namespace, most)

    async def swap_namespace(self, before: Namespace, after: Namespace) -> bool:
        return await self._namespaces.swap(before, after)

    async def quarantine(self) -> Quarantine:
        [(timers,)] = await self._pool.read(quarantine.COUNT)
        return Quarantine(timers, self._namespaces.unreadable)

    async def end_session(self, id: bytes, ends_at: int, *, forget_before: int) -> None:
        await self._pool.work(lambda connection: sessions.end(connection, id, ends_at, forget_before))

    async def session_ended(self, id: bytes, ends_at: int) -> bool:
        return bool(await self._pool.read(sessions.ENDED, id, ends_at))

    # The schema, and the slices of history.

    async def _prepare(self, connection: Connection) -> None:
        await bring_up(connection, shards=self.shards, now=sql.now("$1"), at=self._now())
        await self._make_slices(connection)
        if restored := await quarantine.restore(connection):
            log.warning("%d timers were quarantined, can be read now and are back", restored)

    async def _store_now(self, connection: Connection) -> int:
        now: int = await connection.fetchval(f"SELECT {sql.now('$1')}", self._now())
        return now

    async def _make_slices(self, connection: Connection) -> int:
        """Make the slices that today and tomorrow need, if they are not there; the store's time."""
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock($1)", SLICE_LOCK)
            await connection.execute(f"SET LOCAL lock_timeout = {LOCK_MS_MAX}")
            now = await self._store_now(connection)
            slices = {starts: ends for starts, ends in await connection.fetch("SELECT starts_at, ends_at FROM slices")}
            for at in (now, now + DAY_MS):
                if not any(starts <= at < ends for starts, ends in slices.items()):
                    width_ms = slice_width_ms(await self._namespaces.longest_ms(connection, self._retention_ms))
                    starts_at = max([at // DAY_MS * DAY_MS, *(ends for ends in slices.values() if ends <= at)])
                    ends_at = min([starts_at + width_ms, *(s for s in slices if s > at)])
                    for statement in slice_statements(starts_at, ends_at):
                        await connection.execute(statement)
                    slices[starts_at] = ends_at
        return now

    async def _into_history(self, statement: str, *arguments: object) -> list[Any]:
        """A write that may need the slice of now. Upkeep makes slices a day ahead; this is for when it could not."""
        try:
            return await self._pool.write(statement, *arguments)
        except Refused as refused:
            if refused.code not in NO_SLICE:
                raise
        await self._pool.work(self._make_slices)
        return await self._pool.write(statement, *arguments)
