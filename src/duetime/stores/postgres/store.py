"""The PostgreSQL store: each change of timers or shards by the engine or a client is one statement, on a server that
any number of instances share.

Puts are batched by group commit; begins and records arrive in batches from the engine. ``statements`` contains the
statements and explains why they are safe; this module passes the arguments and converts the results.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from duetime.clock import Clock
from duetime.errors import Contended, SettingsError, StoreIndeterminate, StoreUnavailable
from duetime.instants import Instant
from duetime.model import DAY_MS, Status, Timer, timer_uuid
from duetime.store import (
    LANES_PAGE,
    NO_LANE_LIMITS,
    UNNAMED,
    About,
    Begun,
    Cursor,
    Filter,
    Instance,
    Lane,
    Lanes,
    Overdue,
    Page,
    Portion,
    Query,
    Renewal,
    Taken,
)
from duetime.stores.byte_budget import brief, in_parts
from duetime.stores.connecting import wait_for_server
from duetime.stores.postgres import quarantine, sessions
from duetime.stores.postgres import statements as sql
from duetime.stores.postgres.hints import PostgresHints
from duetime.stores.postgres.lists import FORECAST, count, page, page_by_offset
from duetime.stores.postgres.migration import migrate
from duetime.stores.postgres.namespaces import Namespaces
from duetime.stores.postgres.pool import Connection, PostgresPool, Refused
from duetime.stores.postgres.rows import timers_of
from duetime.stores.postgres.slices import drop_rows, drop_slices, make_slices
from duetime.stores.sql.columns import encode, final_row, live_row, move_row, new_row
from duetime.stores.sql.page_orders import ORDERS
from duetime.stores.sql.rules import end_row
from duetime.stores.sql.server import ServerStore, partly_written
from duetime.stores.sql.tallies import by_status
from duetime.stores.stored_destination import destination_in
from duetime.stores.unreadable import about_of, timer_quarantined

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 8
PUT_TRIES_MAX = 3
MIGRATION_SECONDS_MAX = 3600.0
FINISHED_ALREADY = "DT001"
NO_SLICE = ("23514", "23502")  # no partition for a final timer, or no slice for its count, whichever fails first
NOT_HELD = -1


class PostgresStore(ServerStore):
    _hints: PostgresHints

    def __init__(
        self,
        url: str,
        *,
        shards: int = 64,
        retention_ms: int = 30 * DAY_MS,
        takeover_now: bool = False,
        virtual_clock: Clock | None = None,
    ) -> None:
        self._pool = PostgresPool(url, size=CONNECTIONS_MAX)
        super().__init__(Namespaces(self._pool), PostgresHints(self._pool), shards=shards, retention_ms=retention_ms)
        self._takeover_now = takeover_now
        self._virtual_clock = virtual_clock
        self._pending_quarantine = quarantine.PendingQuarantine(self._pool)

    async def open(self) -> None:
        await wait_for_server(self._pool)
        try:
            await self._pool.run(self._prepare, seconds_max=MIGRATION_SECONDS_MAX)
        except Refused as refused:
            if not refused.misconfigured:
                raise
            raise SettingsError(f"DATABASE_URL: {refused}") from refused
        await self._make_slices()
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
            raise StoreUnavailable("PostgreSQL does not accept writes: it is a standby or read-only")

    async def _version_and_time(self) -> tuple[str, int]:
        [(version, now)] = await self._pool.read(f"SELECT current_setting('server_version'), {sql.now('$1')}", None)
        return version, now

    async def _disconnect(self) -> None:
        await self._pool.close()

    def _now(self) -> int | None:
        return None if self._virtual_clock is None else self._virtual_clock.now()

    # Timers.

    async def put_many(self, timers: Sequence[Timer]) -> list[Timer | Taken | None]:
        return await self._put(timers)

    async def _put(self, timers: Sequence[Timer]) -> list[Timer | Taken | None]:
        """Insert the timers whose identity is free, and find the existing timer for each of the others. If that one
        has disappeared meanwhile, try again."""
        results: dict[int, Timer | Taken | None] = {}
        lost: StoreIndeterminate | None = None
        wrote = False
        for _ in range(PUT_TRIES_MAX):
            left = [(place, timer) for place, timer in enumerate(timers) if place not in results]
            if not left:
                break
            written: set[tuple[bytes, int]] = set()
            try:
                try:
                    [found] = await self._pool.write(sql.PUT, [new_row(timer) for _, timer in left])
                    if found["number"] == len(left):
                        return [results.get(place) for place in range(len(timers))]  # the usual case
                    written.update(zip(found["uuids"] or (), found["revisions"] or (), strict=True))
                    wrote = wrote or bool(written)
                except Refused as refused:
                    if refused.code != FINISHED_ALREADY:
                        raise
                except StoreIndeterminate as error:
                    lost = error
                others = [timer.uuid for _, timer in left if (timer.uuid, timer.revision) not in written]
                rows = await self._pool.read(sql.TAKEN, others)
            except StoreUnavailable as error:
                raise lost or (partly_written(error) if wrote else error) from error
            existing = {timer_uuid(row["namespace"], row["id"]): row for row in rows}
            for place, timer in left:
                if (timer.uuid, timer.revision) in written:
                    results[place] = None
                elif row := existing.get(timer.uuid):
                    # The firing number is random: if it is the same, our own write was committed after all.
                    ours = lost and row["firing"] == timer.firing
                    whole, _ = timers_of([row] if row["definition"] is not None else [])
                    results[place] = None if ours else whole[0] if whole else Taken(row["fingerprint"])
        if len(results) < len(timers):
            raise lost or (partly_written(Contended()) if wrote else Contended())
        return [results[place] for place in range(len(timers))]

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
            *(() if after is None else (final_row(after) if after.status.final else live_row(after),)),
        )
        return bool(row["swapped"])

    async def page_by_offset(self, query: Query) -> list[Timer]:
        statement, arguments = page_by_offset(query)
        found = await self._pool.read(statement, *arguments)
        uuids, sizes = [row["uuid"] for row in found], [row["bytes"] for row in found]
        found_timers: dict[bytes, Timer] = {}
        for part in in_parts(uuids, sizes):
            timers, _ = timers_of(await self._pool.read(sql.GET, part))
            found_timers |= {timer.uuid: brief(timer) if query.brief else timer for timer in timers}
        return [found_timers[uuid] for uuid in uuids if uuid in found_timers]

    async def page(self, filter: Filter, limit: int, after: Cursor | None = None) -> Page:
        statement, arguments = page(filter, limit, self._now(), after, await self._names(filter))
        rows = await self._pool.read(statement, *arguments)
        timers, _ = timers_of(rows)
        if not rows or rows[-1]["found"] == len(rows):
            return Page(timers, None)
        last = rows[-1]
        return Page(timers, Cursor(filter.order, last[ORDERS[filter.order][0]], last["seq"]))

    async def tally(self, namespace: str | None = None) -> dict[Status, int]:
        rows = await self._pool.read(
            "SELECT status, sum(timers)::bigint FROM tallies WHERE $1::text IS NULL OR namespace = $1 GROUP BY status",
            namespace,
        )
        return by_status(rows)

    async def count(self, filter: Filter, most: int) -> int:
        statement, arguments = count(filter, most, self._now(), await self._names(filter))
        [(number,)] = await self._pool.read(statement, *arguments)
        return int(number)

    async def forecast(self, bounds: Sequence[Instant], most: int) -> list[int]:
        rows = await self._pool.read(FORECAST, bounds[:-1], bounds[1:], most, self._now())
        return [number for (number,) in rows]

    # Shards and attempts.

    async def renew(self, owner_id: bytes, lease_ms: int, about: About = UNNAMED) -> Renewal:
        [row] = await self._pool.write(sql.RENEW, owner_id, lease_ms, self._now(), about.serving, encode(about))
        return Renewal(
            now=row["now"],
            held=dict(zip(row["shards"] or (), row["versions"] or (), strict=True)),
            instances=frozenset(row["others"] or ()) | ({owner_id} if about.serving else set()),
            free=frozenset(row["free"] or ()),
            free_at=row["free_at"],
            failovers=self._pool.failovers,
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

    async def begin(
        self,
        owner_id: bytes,
        held: Mapping[int, int],
        limit: int,
        *,
        lane_max: int | None = None,
        lane_limits: Mapping[int, int] = NO_LANE_LIMITS,
    ) -> Begun:
        """If the response is lost, the result is unknown for all held shards, so this raises ``StoreIndeterminate``:
        one statement selects and begins the timers, and only its response names their shards."""
        limits = encode(lane_limits).decode()
        summary, count, begun, refused = await self._begin(sql.BEGIN, owner_id, held, limit, lane_max, limits)
        now, number, next_at = (summary[name] for name in ("now", "number", "next_at"))
        more = count != number
        return Begun(begun, now if more else next_at, refused, more)

    async def begin_lanes(
        self, owner_id: bytes, held: Mapping[int, int], limit: int, portions: Sequence[Portion]
    ) -> Begun:
        lanes, mosts, shares = zip(*((p.lane, p.most, p.share) for p in portions), strict=True)
        summary, _, begun, refused = await self._begin(sql.BEGIN_LANES, owner_id, held, limit, lanes, mosts, shares)
        left = dict(zip(summary["lanes"], summary["lanes_at"], strict=True))
        return Begun(begun, min(left.values(), default=None), refused, False, left)

    async def _begin(
        self, statement: str, owner_id: bytes, held: Mapping[int, int], limit: int, *rest: object
    ) -> tuple[Any, int, list[Timer], frozenset[int]]:
        versions = [held.get(shard, NOT_HELD) for shard in range(self.shards)]
        held_back = list(self._namespaces.unreadable)
        summary, *rows = await self._pool.write(
            statement, *(owner_id, versions, limit, self._now(), self._takeover_now, held_back), *rest
        )
        refused = frozenset(shard for shard in held if summary["versions"][shard] == NOT_HELD)
        begun = quarantine.begun_of(rows, self._pending_quarantine)
        if self._pending_quarantine.rows:
            await self._pending_quarantine.put(owner_id, self._now())
        return summary, len(rows), begun, refused

    async def lanes(self, until: Instant, *, after: int = -1, limit: int = LANES_PAGE, due_max: int = 0) -> Lanes:
        *rows, last = await self._pool.read(sql.LANES, *(self._now(), until, after, limit, due_max, self._takeover_now))
        found = [
            Lane(lane, namespace, destination_in(head), at)
            for lane, namespace, head, at in rows
            if namespace not in self._namespaces.unreadable
        ]
        return Lanes(found, last["fire_at"], last["lane"])

    async def overdue(self, shards: Collection[int], before: Instant, most: int) -> list[Overdue]:
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
                ending.append((uuid, before.revision, before.shard, *end_row(after)))
            else:
                moving.append((uuid, before.revision, before.shard, *move_row(after)))
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

    async def _make_slices(self) -> int:
        longest_ms = max((await self._kept_ms()).values())
        now: int = await self._pool.run(lambda connection: make_slices(connection, self._now(), longest_ms))
        return now

    async def _drop_slices(self, until: int) -> int:
        dropped: int = await self._pool.run(lambda connection: drop_slices(connection, until))
        return dropped

    async def _drop_rows(self, before: Mapping[str, int], limit: int) -> int:
        return await drop_rows(self._pool, before, limit)

    async def _quarantined(self) -> int:
        [(timers,)] = await self._pool.read(quarantine.COUNT)
        return int(timers)

    async def end_session(self, id: bytes, ends_at: Instant, *, forget_before: Instant) -> None:
        await self._pool.run(lambda connection: sessions.end(connection, id, ends_at, forget_before=forget_before))

    async def session_ended(self, id: bytes, ends_at: Instant) -> bool:
        return bool(await self._pool.read(sessions.ENDED, id, ends_at))

    # The schema, and the slices of history.

    async def _prepare(self, connection: Connection) -> None:
        await migrate(connection, shards=self.shards, now=sql.now("$1"), at=self._now())
        if restored := await quarantine.restore(connection):
            log.warning("restored %d quarantined timers, which this version can read", restored)

    async def _into_history(self, statement: str, *arguments: object) -> list[Any]:
        """Run a write that may need the current slice; create the slice if it is missing. Usually upkeep creates slices
        a day ahead."""
        try:
            return await self._pool.write(statement, *arguments)
        except Refused as refused:
            if refused.code not in NO_SLICE:
                raise
        await self._make_slices()
        return await self._pool.write(statement, *arguments)
