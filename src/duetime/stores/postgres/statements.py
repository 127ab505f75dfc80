"""The statements of the PostgreSQL store that read or change timers and shards. Each is one transaction.

The fence is a share lock. ``SELECT … FOR SHARE`` on the shards' rows, in a CTE of its own, waits for a concurrent
claim, checks owner and version as that claim left them, and blocks the next claim until this statement is committed.
Without the lock, or with a weaker one, a statement would read an outdated owner and let a former owner write.

Deadlocks can't occur. Shards are locked in the order of their numbers, then instances and timers, and counts last;
where two CTEs could run in either order, one selects the row count of the other. Two statements that change several
timers have no timer in common, because each changes only timers of its owner's shards.
"""

from __future__ import annotations

from collections.abc import Iterable

from duetime.store import LANES_PAGE, PAGE_BYTES_MAX
from duetime.stores.postgres.rows import BYTES
from duetime.stores.sql.columns import FINAL, FIXED, INITIAL, LIVE, MOVE, NEW, TIMER
from duetime.stores.sql.rules import END, assigned, begun, ended
from duetime.stores.sql.tallies import SPREAD
from duetime.stores.stored_destination import HEAD_CHARS

BEGIN_MAX = 1_000
BEGIN_BYTES_MAX = 1 << 18
"""A result that fits the network buffers is sent completely even if the client is suspended. A larger one would keep
the statement open, with its share lock, until the client resumes."""


def now(parameter: str) -> str:
    """The store's clock in milliseconds as SQL, or the parameter if it is not NULL (the time of a virtual clock)."""
    return f"coalesce({parameter}::bigint, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint)"


def _columns(*columns: Iterable[str], of: str = "") -> str:
    return ", ".join(f"{of}{name}" for group in columns for name in group)


SLICE = "(SELECT starts_at FROM slices WHERE starts_at <= {at} AND {at} < ends_at)"
_SLICE_NOW = SLICE.format(at="(SELECT now FROM clock)")


def counted(changes: str) -> str:
    """A CTE that adds ``changes`` (namespace, status, slice, change) to the counts."""
    return f"""
        counted AS (
            INSERT INTO tallies
            SELECT namespace, status, slice, pg_backend_pid() % {SPREAD}, sum(change) FROM ({changes}) AS changes
            GROUP BY namespace, status, slice HAVING sum(change) <> 0 ORDER BY namespace, status, slice
            ON CONFLICT (namespace, status, slice, spread) DO UPDATE SET timers = tallies.timers + excluded.timers
        )"""


# $1: new rows. Returns how many were inserted, and which if not all; raises DT001 if one of them exists in history.
PUT = f"""
    WITH written AS (
        INSERT INTO timers (seq, {_columns(NEW, INITIAL)})
        SELECT *, {", ".join(INITIAL.values())}
        FROM (SELECT nextval('timer_seq') AS seq, batch.* FROM unnest($1::new_timer[]) AS batch) AS numbered
        ORDER BY uuid, seq
        ON CONFLICT (uuid) DO NOTHING
        RETURNING uuid, revision, namespace
    ), {counted("SELECT namespace, 'pending' AS status, 0 AS slice, 1 AS change FROM written")}
    SELECT count(*) AS number, refuse_finished(array_agg(uuid)),
        CASE WHEN count(*) < cardinality($1) THEN array_agg(uuid) END AS uuids,
        CASE WHEN count(*) < cardinality($1) THEN array_agg(revision) END AS revisions
    FROM written
"""

GET = f"SELECT {TIMER} FROM timers WHERE uuid = ANY ($1) UNION ALL SELECT {TIMER} FROM history WHERE uuid = ANY ($1)"

# A visible row may exist only on this server, if its commit was interrupted while waiting for a synchronous standby.
# Before a client learns of the row, this statement makes a commit that does wait: a standby that has this commit has
# all earlier ones.
_CONFIRMED = """
    SELECT CASE WHEN current_setting('synchronous_standby_names') <> ''
    THEN pg_logical_emit_message(true, 'duetime', 'confirmed') END AS confirmed OFFSET 0
"""

# $1: keys. Returns the timers with these keys; beyond the byte limit of a page, without definition and attempts.
TAKEN = f"""
    SELECT {
    TIMER.replace("definition", "CASE WHEN bytes_before < {0} THEN definition END AS definition")
    .replace("attempts", "CASE WHEN bytes_before < {0} THEN attempts END AS attempts")
    .format(PAGE_BYTES_MAX)
}
    FROM (
        SELECT *, sum({BYTES}) OVER (ORDER BY uuid ROWS UNBOUNDED PRECEDING) - ({BYTES}) AS bytes_before
        FROM (
            SELECT {TIMER}, uuid FROM timers WHERE uuid = ANY ($1)
            UNION ALL SELECT {TIMER}, uuid FROM history WHERE uuid = ANY ($1)
        ) AS found
    ) AS counted CROSS JOIN ({_CONFIRMED}) AS confirmed
"""


def swap(*, was_final: bool, becomes_final: bool | None) -> str:
    """$1: now, $2: uuid, $3: revision, $4: namespace, $5: status before, $6: the new row."""
    source, destination = ("history" if final else "timers" for final in (was_final, becomes_final))
    slice_before = SLICE.format(at="(SELECT ended_at FROM gone)") if was_final else "0"
    changes = f"SELECT $4::text AS namespace, $5::text AS status, {slice_before} AS slice, -1 AS change FROM gone"
    put = ""
    if becomes_final is not None:
        columns = ("seq", "ended_at", *FINAL) if becomes_final else ("seq", *LIVE)
        row = "(SELECT now FROM clock), ($6::whole_row).*" if becomes_final else "($6::live_timer).*"
        put = f"""
            put AS (
                INSERT INTO {destination} ({_columns(columns)}) SELECT seq, {row} FROM gone RETURNING namespace, status
            ),"""
        changes += f" UNION ALL SELECT namespace, status, {_SLICE_NOW if becomes_final else '0'}, 1 FROM put"
    return f"""
        WITH clock AS MATERIALIZED (SELECT {now("$1")} AS now),
        gone AS (DELETE FROM {source} WHERE uuid = $2 AND revision = $3 RETURNING *),
        {put} {counted(changes)}
        SELECT count(*) = 1 AS swapped FROM gone
    """


SWAPS = {
    (was, becomes): swap(was_final=was, becomes_final=becomes)
    for was in (False, True)
    for becomes in (False, True, None)
}

SCAN_MAX = BEGIN_MAX
"""How many due timers a poll reads, whatever its limit, because some may be held back."""
SCAN_PER_SHARD_MAX = 250
"""How many it reads per shard when it queries each shard separately."""
PASSED_NEXT_MAX = 64
"""How many later timers of a lane a poll reads to find the next one in its own shards."""

_CANDIDATE = f"ctid AS at, shard, revision, status, fire_at, seq, {BYTES} AS bytes"
_PASSED_MAX = "8 * asked.most + 256"
"""How many due timers of a lane, in any shard, a poll reads before it queries its own shards. This finds enough as long
as the timers are spread evenly over at most eight owners."""
_FOUND = "at, shard, revision, status, fire_at, seq, bytes"
_HELD = "(SELECT versions FROM held)[shard + 1]"
_NOW = "(SELECT now FROM clock)"
_LOST = f"version <> {_HELD} AND (deadline_at <= {_NOW} OR $5)"
_PAUSED = "namespace IN (SELECT name FROM paused)"
_ALONE = "(SELECT alone FROM held)"
_MAY_BE_LOST = f"deadline_at > {_NOW} AND status = 'executing' AND version <> {_HELD} AND NOT $5 AND NOT {_PAUSED}"

# Exactly the expression in the index by shard (``schema``).
_SHARD_AT = "fire_at - 0"

# $1: owner, $2: held version of each shard or -1, $3: limit, $4: now, $5: whether attempts count as lost before their
# deadline, $6: namespaces that are held back.
# An owner of all shards uses the index by time; otherwise it queries each of its shards and reads no other's timers.
_LOOK = f"""
    clock AS MATERIALIZED (SELECT {now("$4")} AS now),
    held AS MATERIALIZED (
        SELECT array_agg(version ORDER BY shard) AS versions, min(version) >= 0 AS alone FROM (
            SELECT shard, CASE WHEN owner_id = $1 AND version = ($2::bigint[])[shard + 1] THEN version ELSE -1 END
                AS version
            FROM shards
        ) AS each
    ),
    ours AS MATERIALIZED (SELECT shard FROM shards WHERE NOT {_ALONE} AND {_HELD} >= 0),
    paused AS MATERIALIZED (SELECT name FROM namespaces WHERE paused UNION ALL SELECT unnest($6::text[]))
"""
# A live timer with an unknown status is begun, too, so that it gets into quarantine.
_NOT_EXECUTING = "status <> 'executing'"


def _begun(summary: str) -> str:
    """CTEs that begin the timers in ``due`` and return them, after one row with ``summary``, the results about the
    whole poll."""
    return f"""
    fence AS MATERIALIZED (
        SELECT shard FROM shards
        WHERE shard = ANY (ARRAY(SELECT shard FROM due))
        AND owner_id = $1 AND version = ($2::bigint[])[shard + 1]
        ORDER BY shard FOR SHARE
    ),
    begun AS (
        UPDATE timers SET {assigned(begun(now="clock.now", version="($2::bigint[])[due.shard + 1]", of="timers."))}
        FROM clock, due
        WHERE timers.ctid = due.at AND timers.revision = due.revision
        AND due.shard = ANY (ARRAY(SELECT shard FROM fence))  -- a join would be planned as if one timer were due
        RETURNING {", ".join(f"timers.{name}" for name in TIMER.split(", "))}, timers.seq, due.status AS status_before
    ), {
        counted('''
        SELECT namespace, status_before AS status, 0 AS slice, -1 AS change FROM begun
        UNION ALL SELECT namespace, 'executing', 0, 1 FROM begun
    ''')
    }
    SELECT * FROM begun
    FULL JOIN ({summary}) AS summary ON false
    ORDER BY begun.fire_at NULLS FIRST, begun.seq  -- the summary is a row of its own, the first one
"""


# $7: limit per lane, $8: JSON object of the lanes with a limit of their own.
BEGIN = f"""
    WITH {_LOOK},
    candidates AS MATERIALIZED (
        (
            SELECT {_CANDIDATE}, lane, {_PAUSED} AS paused, false AS last FROM timers
            WHERE {_ALONE} AND fire_at <= {_NOW} AND ({_NOT_EXECUTING} OR {_LOST} AND NOT {_PAUSED})
            ORDER BY fire_at, seq LIMIT {SCAN_MAX}
        )
        UNION ALL
        SELECT each.* FROM ours CROSS JOIN LATERAL (
            SELECT {_CANDIDATE}, lane, {_PAUSED} AS paused,
                row_number() OVER (ORDER BY {_SHARD_AT}) = greatest($3, {SCAN_PER_SHARD_MAX}) AS last
            FROM timers
            WHERE shard = ours.shard AND {_SHARD_AT} <= {_NOW} AND ({_NOT_EXECUTING} OR {_LOST} AND NOT {_PAUSED})
            ORDER BY {_SHARD_AT} LIMIT greatest($3, {SCAN_PER_SHARD_MAX})
        ) AS each
    ),
    eligible AS MATERIALIZED (
        SELECT * FROM (
            SELECT *, row_number() OVER (PARTITION BY lane ORDER BY fire_at, seq) AS in_lane
            FROM candidates WHERE NOT paused
        ) AS numbered
        WHERE $7::int IS NULL OR in_lane <= coalesce(($8::jsonb ->> lane::text)::int, $7)
    ),
    due AS MATERIALIZED (
        SELECT * FROM (
            SELECT *, row_number() OVER oldest_first AS place, sum(bytes) OVER oldest_first - bytes AS bytes_before
            FROM eligible WINDOW oldest_first AS (ORDER BY fire_at, seq ROWS UNBOUNDED PRECEDING)
        ) AS counted WHERE bytes_before < {BEGIN_BYTES_MAX} AND place <= least($3, {BEGIN_MAX})
    ),
    next AS MATERIALIZED (  -- computed only if all due timers were begun, so it never scans a backlog
        SELECT number, CASE WHEN number IS NOT NULL THEN least(
            (SELECT fire_at FROM timers WHERE {_ALONE} AND fire_at > {_NOW} ORDER BY fire_at LIMIT 1),
            (SELECT min(deadline_at) FROM timers WHERE {_ALONE} AND fire_at <= {_NOW} AND {_MAY_BE_LOST}),
            (SELECT min(least(
                (SELECT fire_at FROM timers WHERE shard = ours.shard AND {_SHARD_AT} > {_NOW}
                 ORDER BY {_SHARD_AT} LIMIT 1),
                (SELECT min(deadline_at) FROM timers
                 WHERE shard = ours.shard AND {_SHARD_AT} <= {_NOW} AND {_MAY_BE_LOST})
            )) FROM ours)
        ) END AS at
        FROM (
            SELECT CASE WHEN (SELECT count(*) FROM due) = (SELECT count(*) FROM eligible)
                AND (NOT {_ALONE} OR (SELECT count(*) FROM candidates) < {SCAN_MAX})
                AND NOT EXISTS (SELECT FROM candidates WHERE last) THEN (SELECT count(*) FROM due) END AS number
        ) AS everything
    ),
    {_begun("SELECT clock.now, held.versions, next.number, next.at AS next_at FROM clock, held, next")}
"""

# Exactly the expressions in the index by lane (``schema``).
_LANE_AT, _LANE_ORDER = "fire_at + 0", "fire_at + 0, seq + 0"
_ELIGIBLE = f"({_NOT_EXECUTING} OR {_LOST}) AND NOT {_PAUSED}"

# $7: lanes, $8: limit of each, $9: share of each.
BEGIN_LANES = f"""
    WITH {_LOOK},
    asked AS MATERIALIZED (
        SELECT asked.* FROM unnest($7::bigint[], $8::int[], $9::float8[]) AS asked (lane, most, share)
        CROSS JOIN LATERAL (
            SELECT {_PAUSED} AS paused FROM timers WHERE timers.lane = asked.lane ORDER BY {_LANE_ORDER} LIMIT 1
        ) AS first
        WHERE NOT paused
    ),
    near AS MATERIALIZED (
        SELECT asked.lane, asked.most, asked.share, each.* FROM asked CROSS JOIN LATERAL (
            SELECT {_FOUND}, row_number() OVER (ORDER BY first_by, then_by) AS in_lane FROM (
                SELECT {_CANDIDATE}, {_HELD} >= 0 AND {_ELIGIBLE} AS ours, {_LANE_AT} AS first_by, seq + 0 AS then_by
                FROM timers WHERE lane = asked.lane AND {_LANE_AT} <= {_NOW}
                ORDER BY {_LANE_ORDER} LIMIT CASE WHEN NOT {_ALONE} THEN {_PASSED_MAX} END
            ) AS passed WHERE ours ORDER BY first_by, then_by LIMIT asked.most + 1
        ) AS each
    ),
    crowded AS MATERIALIZED (  -- lanes with too few of our timers in ``near``, because others' or attempts come first
        SELECT asked.* FROM asked CROSS JOIN LATERAL (
            SELECT FROM timers WHERE lane = asked.lane AND {_LANE_AT} <= {_NOW}
            ORDER BY {_LANE_ORDER} OFFSET {_PASSED_MAX} LIMIT 1
        ) AS behind
        WHERE NOT {_ALONE} AND lane <> ALL (ARRAY(SELECT lane FROM near WHERE in_lane > most))
    ),
    candidates AS MATERIALIZED (
        SELECT * FROM near WHERE lane <> ALL (ARRAY(SELECT lane FROM crowded))
        UNION ALL
        SELECT crowded.lane, crowded.most, crowded.share, each.* FROM crowded CROSS JOIN LATERAL (
            SELECT in_shards.*, row_number() OVER (ORDER BY fire_at, seq) AS in_lane
            FROM ours CROSS JOIN LATERAL (
                SELECT {_CANDIDATE} FROM timers
                WHERE shard = ours.shard AND {_SHARD_AT} <= {_NOW} AND lane + 0 = crowded.lane AND {_ELIGIBLE}
                ORDER BY {_SHARD_AT} LIMIT crowded.most + 1
            ) AS in_shards
            ORDER BY fire_at, seq LIMIT crowded.most + 1
        ) AS each
    ),
    ranked AS MATERIALIZED (
        SELECT *, in_lane <= most AND bytes_before < {BEGIN_BYTES_MAX} AND place <= least($3, {BEGIN_MAX}) AS chosen
        FROM (
            SELECT *, row_number() OVER by_share AS place, sum(bytes) OVER by_share - bytes AS bytes_before
            FROM candidates
            WINDOW by_share AS (ORDER BY in_lane > most, in_lane / share, fire_at, seq ROWS UNBOUNDED PRECEDING)
        ) AS counted
    ),
    due AS MATERIALIZED (SELECT * FROM ranked WHERE chosen),
    behind AS MATERIALIZED (SELECT lane, min(fire_at) AS fire_at FROM ranked WHERE NOT chosen GROUP BY lane),
    left_over AS MATERIALIZED (
        SELECT asked.lane, coalesce(behind.fire_at, later.at) AS fire_at
        FROM asked LEFT JOIN behind ON behind.lane = asked.lane
        CROSS JOIN LATERAL (  -- if all of these are in others' shards, the lane is queried again at the last of them
            SELECT coalesce(
                min(fire_at) FILTER (WHERE {_HELD} >= 0), max(fire_at) FILTER (WHERE place = {PASSED_NEXT_MAX})
            ) AS at
            FROM (
                SELECT fire_at, shard, row_number() OVER (ORDER BY {_LANE_ORDER}) AS place
                FROM timers WHERE lane = asked.lane AND {_LANE_AT} > {_NOW}
                ORDER BY {_LANE_ORDER} LIMIT CASE WHEN {_ALONE} THEN 1 ELSE {PASSED_NEXT_MAX} END
            ) AS next
        ) AS later
    ),
    {
    _begun(
        "SELECT clock.now, held.versions, ARRAY(SELECT lane FROM left_over WHERE fire_at IS NOT NULL) AS lanes, "
        "ARRAY(SELECT fire_at FROM left_over WHERE fire_at IS NOT NULL) AS lanes_at FROM clock, held"
    )
}
"""

_ALL_LANES = """
    each_lane AS (
        (SELECT lane FROM timers WHERE lane > {after} ORDER BY lane LIMIT 1)
        UNION ALL
        SELECT (SELECT lane FROM timers WHERE lane > each_lane.lane ORDER BY lane LIMIT 1)
        FROM each_lane WHERE lane IS NOT NULL
    )
"""
_HEAD = f"left(definition, {HEAD_CHARS}) AS head"
_OLDER = "version <> (SELECT version FROM shards WHERE shards.shard = timers.shard)"

# $1: now, $2: until, $3: after which lane, $4: limit of lanes, $5: limit of the due count, $6: whether attempts count
# as lost before their deadline. The last row is the summary.
LANES = f"""
    WITH RECURSIVE clock AS MATERIALIZED (SELECT {now("$1")} AS now), {_ALL_LANES.format(after="$3")},
    paged AS MATERIALIZED (SELECT lane FROM each_lane WHERE lane IS NOT NULL LIMIT $4)
    SELECT paged.lane, namespace, {_HEAD}, fire_at FROM paged CROSS JOIN LATERAL (
        SELECT namespace, definition, fire_at FROM timers
        WHERE lane = paged.lane AND {_LANE_AT} <= $2
        AND (status = 'pending' OR deadline_at <= (SELECT now FROM clock) OR $6 AND {_OLDER})  -- one that may be lost
        ORDER BY {_LANE_ORDER} LIMIT 1
    ) AS first
    WHERE namespace NOT IN (SELECT name FROM namespaces WHERE paused)
    UNION ALL
    SELECT CASE WHEN count(*) = $4 THEN max(lane) END, NULL, NULL, (SELECT count(*) FROM (
        SELECT FROM timers WHERE fire_at <= (SELECT now FROM clock) AND status = 'pending' LIMIT $5
    ) AS due) FROM paged
"""

# $1: shards, $2: before, $3: limit of the count per lane.
OVERDUE = f"""
    WITH RECURSIVE {_ALL_LANES.format(after="-1")}
    SELECT namespace, {_HEAD}, namespace IN (SELECT name FROM namespaces WHERE paused) AS paused, fire_at,
        (SELECT count(*) FROM (
            SELECT FROM timers
            WHERE lane = each_lane.lane AND {_LANE_AT} < $2 AND status = 'pending' AND shard = ANY ($1)
            ORDER BY {_LANE_ORDER} LIMIT $3
        ) AS all_of_it) AS timers
    FROM (SELECT lane FROM each_lane LIMIT {LANES_PAGE}) AS each_lane CROSS JOIN LATERAL (
        SELECT namespace, definition, fire_at FROM timers
        WHERE lane = each_lane.lane AND {_LANE_AT} < $2 AND status = 'pending' AND shard = ANY ($1)
        ORDER BY {_LANE_ORDER} LIMIT 1
    ) AS first
"""

_ENDED = (
    {name: f"timers.{name}" for name in MOVE}
    | {name: f"ending.{name}" for name in END}
    | ended("timers.revision")
    | {"deadline_at": "NULL::bigint"}
)


def _of_begun(ours: str) -> str:
    """The condition that a timer was begun by this owner and has not changed since."""
    return f"timers.uuid = {ours}.key AND timers.revision = {ours}.was AND timers.version = {ours}.fenced_by"


# $1: owner, $2: now, $3: shards, $4: rows to end, $5: rows to move. Returns how many were written; which, if not all.
RECORD = f"""
    WITH clock AS MATERIALIZED (SELECT {now("$2")} AS now),
    fence AS MATERIALIZED (
        SELECT shard, version AS fenced_by FROM shards WHERE shard = ANY ($3) AND owner_id = $1
        ORDER BY shard FOR SHARE
    ),
    ending AS MATERIALIZED (SELECT * FROM unnest($4::end_row[]) JOIN fence ON fence.shard = in_shard),
    moving AS MATERIALIZED (SELECT * FROM unnest($5::move_row[]) JOIN fence ON fence.shard = in_shard),
    ended AS (
        DELETE FROM timers USING ending WHERE {_of_begun("ending")}
        RETURNING timers.seq, {_columns(FIXED, of="timers.")}, {
    ", ".join(f"{value} AS {name}" for name, value in _ENDED.items())
}
    ),
    kept AS (
        INSERT INTO history (seq, ended_at, {_columns(FIXED, _ENDED)})
        SELECT seq, (SELECT now FROM clock), {_columns(FIXED, _ENDED)} FROM ended
    ),
    moved AS (
        UPDATE timers SET {assigned({name: f"moving.{name}" for name in MOVE})} FROM moving
        WHERE {_of_begun("moving")} RETURNING timers.uuid, timers.namespace, timers.status
    ), {
    counted(f'''
        SELECT namespace, 'executing' AS status, 0 AS slice, -1 AS change FROM ended
        UNION ALL SELECT namespace, status, {_SLICE_NOW}, 1 FROM ended
        UNION ALL SELECT namespace, 'executing', 0, -1 FROM moved
        UNION ALL SELECT namespace, status, 0, 1 FROM moved
    ''')
}
    SELECT count(*) AS number, CASE WHEN count(*) < cardinality($4) + cardinality($5) THEN array_agg(uuid) END AS uuids
    FROM (SELECT uuid FROM ended UNION ALL SELECT uuid FROM moved) AS written
"""

# $1: owner, $2: lease, $3: now, $4: whether it is serving, $5: about. Returns one row.
RENEW = f"""
    WITH clock AS MATERIALIZED (SELECT {now("$3")} AS now),
    mine AS MATERIALIZED (SELECT shard FROM shards WHERE owner_id = $1 ORDER BY shard FOR NO KEY UPDATE),
    renewed AS (
        UPDATE shards SET lease_until = (SELECT now FROM clock) + $2 FROM mine WHERE shards.shard = mine.shard
        RETURNING shards.shard, version
    ),
    alive AS (
        INSERT INTO instances SELECT $1, now + $2, $4, $5 FROM clock WHERE (SELECT count(*) FROM renewed) >= 0
        ON CONFLICT (owner_id) DO UPDATE
        SET alive_until = excluded.alive_until, serving = excluded.serving, about = excluded.about
        RETURNING owner_id
    ),
    dead AS MATERIALIZED (  -- after the own row and without waiting for others': two returning instances can't deadlock
        SELECT owner_id FROM instances
        WHERE alive_until <= (SELECT now FROM clock) AND owner_id <> (SELECT owner_id FROM alive)
        FOR UPDATE SKIP LOCKED
    ),
    gone AS (DELETE FROM instances USING dead WHERE instances.owner_id = dead.owner_id)
    SELECT now,
        (SELECT array_agg(shard) FROM renewed) AS shards,
        (SELECT array_agg(version) FROM renewed) AS versions,
        (SELECT array_agg(owner_id) FROM instances WHERE alive_until > now AND serving AND owner_id <> $1) AS others,
        (SELECT array_agg(shard) FROM shards WHERE lease_until <= now AND owner_id IS DISTINCT FROM $1) AS free,
        (SELECT min(lease_until) FROM shards WHERE lease_until > now AND owner_id <> $1) AS free_at
    FROM clock
"""

# $1: owner, $2: shards, $3: lease, $4: now.
CLAIM = f"""
    WITH clock AS MATERIALIZED (SELECT {now("$4")} AS now),
    free AS MATERIALIZED (
        SELECT shard FROM shards
        WHERE shard = ANY ($2) AND (lease_until <= (SELECT now FROM clock) OR owner_id = $1)
        ORDER BY shard FOR NO KEY UPDATE
    )
    UPDATE shards SET owner_id = $1, version = version + 1, lease_until = (SELECT now FROM clock) + $3
    FROM free WHERE shards.shard = free.shard
    RETURNING shards.shard, version
"""

# $1: owner, $2: shards.
RELEASE = """
    WITH mine AS MATERIALIZED (
        SELECT shard FROM shards WHERE shard = ANY ($2) AND owner_id = $1 ORDER BY shard FOR NO KEY UPDATE
    )
    UPDATE shards SET owner_id = NULL, lease_until = 0 FROM mine WHERE shards.shard = mine.shard
"""

# $1: owner.
LEAVE = """
    WITH mine AS MATERIALIZED (SELECT shard FROM shards WHERE owner_id = $1 ORDER BY shard FOR NO KEY UPDATE),
    freed AS (
        UPDATE shards SET owner_id = NULL, lease_until = 0 FROM mine WHERE shards.shard = mine.shard RETURNING 1
    )
    DELETE FROM instances WHERE owner_id = $1 AND (SELECT count(*) FROM freed) >= 0
"""

# $1: now.
CLUSTER = f"""
    SELECT owner_id, about, alive_until,
        ARRAY(SELECT shard FROM shards WHERE shards.owner_id = instances.owner_id ORDER BY shard) AS shards
    FROM instances WHERE alive_until > {now("$1")} ORDER BY owner_id
"""
