"""The statements of the MySQL store that change timers and shards, as SQL for one packet.

The fence is a share lock. ``SET @ok = (SELECT COUNT(*) … LOCK IN SHARE MODE)`` on the shards' rows (in MySQL's dialect)
waits for a concurrent claim, counts the shards that the caller still owns after that claim, and blocks the next claim
until the packet is committed. Then the timers that still have the expected revision are locked and counted. ``@go`` is
1 only if no shard and no timer is missing, and every write of the packet requires it. So a packet writes all or
nothing. A caller whose packet wrote nothing finds out which shards or timers have changed, and retries without them.

Shards are locked first, then timers, and counts last, in the order of their keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from duetime.model import Timer
from duetime.stores.due_selection import Candidate
from duetime.stores.mysql.dialects import Dialect
from duetime.stores.mysql.literals import listed, literal, rows
from duetime.stores.mysql.rows import derived
from duetime.stores.sql.columns import FINAL, INITIAL, LIVE, MOVE, NEW, final_row, live_row, move_row, new_row
from duetime.stores.sql.rules import END, assigned, begun, end_row, ended
from duetime.stores.sql.tallies import LIVE_SLICE, SPREAD, Tally, moved, recorded

_SPREAD = f"CONNECTION_ID() % {SPREAD}"

_PUT_COLUMNS = ("seq", *NEW, *INITIAL)
_UUID = NEW.index("uuid")
_INITIAL = ", ".join(
    value if value.startswith("'") or value.isdigit() else f"{{0.{value}}}" for value in INITIAL.values()
)
NO_SLICE = "@slice"
"""The current slice, in the variable that ``slice_now`` sets."""


def fence(dialect: Dialect, owner_id: bytes, held: Collection[tuple[int, int]]) -> str:
    """Set ``@ok`` to whether the owner holds all these shards with these versions, and lock them until the commit."""
    shards = listed(shard for shard, _ in held)
    ours = f"shard IN {shards} AND owner_id = {literal(owner_id)} AND (shard, version) IN ({rows(held)})"
    return dialect.select_into_variable(
        "ok", "COUNT(*)", f"FROM shards WHERE {ours}", lock=dialect.share, check=f" = {len(held)}"
    )


def go(dialect: Dialect, timers: Sequence[tuple[bytes, int]], *, fenced: bool = True, table: str = "timers") -> str:
    """Set ``@go`` to whether all these timers have these revisions (and ``@ok``), and lock them until the commit."""
    unchanged = f"uuid IN {listed(uuid for uuid, _ in timers)} AND (uuid, revision) IN ({rows(timers)})"
    of = f"FROM {table} WHERE {unchanged}"
    return dialect.select_into_variable("go", "COUNT(*)", of, check=f" = {len(timers)}", when="@ok" if fenced else "")


def slice_of(at: str) -> str:
    """The slice that contains this instant, by the rule of partitions in MySQL: the first one that ends later. So it
    also contains the time of the slices before it that were dropped. NULL if no slice ends later."""
    return f"(SELECT starts_at FROM slices WHERE ends_at > {at} ORDER BY starts_at LIMIT 1)"


def slice_at(at: str) -> str:
    return f"SET @slice = {slice_of(at)}"


def slice_now(now: str) -> list[str]:
    """Set ``@now`` and the slice that contains it. A clock that is read twice can cross a slice boundary in between:
    then the row would lie in one slice and be counted in another."""
    return [f"SET @now = {now}", slice_at("@now")]


def count(tally: Tally, when: str = "@go") -> list[str]:
    """Add the changes to the counts."""
    changes = sorted((key, change) for key, change in tally.items() if change)
    if not changes:
        return []
    values = " UNION ALL ".join(
        f"SELECT {literal(namespace)} AS namespace, {literal(status)} AS status, "
        f"{place if isinstance(place, str) else literal(place)} AS slice, {_SPREAD} AS spread, {change} AS timers"
        for (namespace, status, place), change in changes
    )
    return [
        f"INSERT INTO tallies SELECT * FROM ({values}) AS changes WHERE {when} "
        "ON DUPLICATE KEY UPDATE timers = tallies.timers + changes.timers"
    ]


def put(timers: Sequence[Timer], marks: range) -> tuple[str, ...]:
    """Insert the timers whose identity is free: not used by a live or a final timer. ``marks`` are their places in the
    order of creation."""
    new = sorted(zip(map(new_row, timers), marks, timers, strict=True), key=lambda each: each[0][_UUID])
    values = ", ".join(f"({seq}, {listed(row)[1:-1]}, {_INITIAL.format(timer)})" for row, seq, timer in new)
    uuids = listed(row[_UUID] for row, *_ in new)
    ours = (
        f"timers.seq >= {marks.start} AND timers.seq < {marks.stop} "
        f"AND timers.seq % {marks.step} = {marks.start % marks.step}"
    )
    tally: Tally = Counter((timer.namespace, "pending", LIVE_SLICE) for timer in timers)
    return (
        f"INSERT INTO timers ({', '.join(_PUT_COLUMNS)}) VALUES {values} ON DUPLICATE KEY UPDATE uuid = timers.uuid",
        "SET @written = ROW_COUNT()",
        # Final timers are checked after the insert, with a new snapshot: an older one could miss a timer that has just
        # become final. The join starts with history, which nearly always contains none of them.
        "DELETE timers FROM history FORCE INDEX (history_uuid) STRAIGHT_JOIN timers ON timers.uuid = history.uuid "
        f"WHERE history.uuid IN {uuids} AND {ours}",
        # If the client's connection breaks meanwhile, the server goes on, but ROW_COUNT() may be -1. Then @written does
        # not match, and the last statement counts the timers.
        "SET @written = @written - ABS(ROW_COUNT())",
        *count(tally, f"@written = {len(timers)}"),
        # Only if some identities were in use, the inserted timers are counted, by an index that covers the query.
        f"INSERT INTO tallies SELECT namespace, 'pending', {LIVE_SLICE}, {_SPREAD}, number FROM "
        "(SELECT namespace, COUNT(*) AS number FROM timers FORCE INDEX (timers_namespace) "
        f"WHERE @written < {len(timers)} AND namespace IN {listed(sorted({timer.namespace for timer in timers}))} "
        f"AND {ours} AND uuid IN {uuids} GROUP BY namespace ORDER BY namespace) AS changes "
        "ON DUPLICATE KEY UPDATE timers = tallies.timers + changes.number",
    )


def begin(
    dialect: Dialect, owner_id: bytes, held: Mapping[int, int], chosen: Sequence[Candidate], now: int
) -> list[str]:
    """Apply ``lifecycle.begin`` to the chosen timers."""
    shards = sorted({each.shard for each in chosen})
    versions = " ".join(f"WHEN {shard} THEN {held[shard]}" for shard in shards)
    tally: Tally = Counter()
    for each in chosen:
        moved(tally, each.namespace, each.status, "executing")
    return [
        fence(dialect, owner_id, [(shard, held[shard]) for shard in shards]),
        go(dialect, [(each.uuid, each.revision) for each in chosen]),
        f"UPDATE timers SET {assigned(begun(now=str(now), version=f'CASE shard {versions} END'))} "
        f"WHERE uuid IN {listed(each.uuid for each in chosen)} AND @go",
        *count(tally),
    ]


def record(dialect: Dialect, owner_id: bytes, changes: Sequence[tuple[Timer, Timer]], now: str) -> list[str]:
    """Replace each begun timer by its state after the attempt."""
    ending = [(before.uuid, *end_row(after)) for before, after in changes if after.status.final]
    moving = [(before.uuid, *move_row(after)) for before, after in changes if not after.status.final]
    return [
        fence(dialect, owner_id, {(before.shard, before.version) for before, _ in changes}),
        go(dialect, [(before.uuid, before.revision) for before, _ in changes]),
        *(into_history(ending, now) if ending else ()),
        *(_move(moving) if moving else ()),
        *count(recorded(changes, slice=NO_SLICE)),
    ]


def into_history(ending: Sequence[tuple[object, ...]], now: str) -> list[str]:
    """Move timers to history, each given by its key and the values of END."""
    values = (
        {name: f"timers.{name}" for name in FINAL} | {name: f"ended.{name}" for name in END} | ended("timers.revision")
    )
    return [
        *slice_now(now),
        f"INSERT INTO history (seq, ended_at, {', '.join(values)}) "
        f"SELECT timers.seq, @now, {', '.join(values.values())} "
        f"FROM {derived(('k', *END), ending)} AS ended STRAIGHT_JOIN timers ON timers.uuid = ended.k WHERE @go",
        f"DELETE FROM timers WHERE uuid IN {listed(row[0] for row in ending)} AND @go",
    ]


def _move(moving: Sequence[tuple[object, ...]]) -> list[str]:
    return [
        f"UPDATE {derived(('k', *MOVE), moving)} AS moved STRAIGHT_JOIN timers ON timers.uuid = moved.k "
        f"SET {', '.join(f'timers.{name} = moved.{name}' for name in MOVE)} WHERE @go"
    ]


def swap(dialect: Dialect, before: Timer, after: Timer | None, now: str) -> list[str]:
    """Replace one timer by another, without a fence: the caller need not own the shard."""
    key = f"uuid = {literal(before.uuid)}"
    table = "history" if before.status.final else "timers"
    statements = [go(dialect, [(before.uuid, before.revision)], fenced=False, table=table)]
    where_before: int | str = LIVE_SLICE
    tally: Tally = Counter()
    if before.status.final:
        statements.append(slice_at(f"(SELECT ended_at FROM history WHERE {key} LIMIT 1)"))
        statements.append("SET @slice_before = @slice")
        where_before = "@slice_before"
    tally[before.namespace, before.status.value, where_before] -= 1
    if after is not None:
        to = "history" if after.status.final else "timers"
        columns, row = (FINAL, final_row(after)) if after.status.final else (LIVE, live_row(after))
        values = dict(zip(columns, row, strict=True))
        if to == table:
            changes = ", ".join(f"{name} = {literal(value)}" for name, value in values.items() if name != "uuid")
            statements.append(f"UPDATE {table} SET {changes} WHERE {key} AND @go")
            tally[after.namespace, after.status.value, where_before] += 1
            return [*statements, *count(tally)]
        if to == "history":
            statements += slice_now(now)
        ended_at = ("ended_at, ", "@now, ") if to == "history" else ("", "")
        statements.append(
            f"INSERT INTO {to} (seq, {ended_at[0]}{', '.join(values)}) "
            f"SELECT seq, {ended_at[1]}{listed(values.values())[1:-1]} FROM {table} WHERE {key} AND @go LIMIT 1"
        )
        tally[after.namespace, after.status.value, NO_SLICE if to == "history" else LIVE_SLICE] += 1
    statements.append(f"DELETE FROM {table} WHERE {key} AND @go")
    return [*statements, *count(tally)]
