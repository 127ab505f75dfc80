"""Every statement of the PostgreSQL store that changes timers or shards: each is one transaction.

The fence is the share lock. ``SELECT … FOR SHARE`` on the shards' rows, in a CTE of its own, waits for a claim that is
under way, judges owner and version by what it left, and keeps the next claim out until this statement is committed. A
condition without the lock, or with a weaker one, reads the owner of a moment ago and lets a stale one write.

Shards are locked in their order, then instances and timers, counts last; where two CTEs could run in either order, one
asks the other how many there are. Two statements that change several timers have no timer in common, since each is of
one owner's shards. So no two wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable

from duetime.lifecycle import ATTEMPT_GRACE_MS
from duetime.store import LANES_PAGE, PAGE_BYTES_MAX
from duetime.stores.postgres_rows import BYTES, END, FIRST, FIXED, NEW, STATE, TIMER
from duetime.stores.targets import HEAD_CHARS

BEGIN_MAX = 1_000
BEGIN_BYTES_MAX = 1 << 18
"""An answer that fits the buffers between server and client is sent whole even when the client has been stopped. A
larger one would keep its statement open, and the share lock with it, until the client goes on."""
SPREAD = 8
"""Over how many rows each count is spread, so that concurrent writers seldom wait for one another."""


def now(parameter: str) -> str:
    """The store's clock in milliseconds, unless the caller brings a clock of its own, which a virtual one is."""
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


# $1: new rows. Returns how many were written, and which if not all; raises DT001 when one of them was final already.
PUT = f"""
    WITH written AS (
        INSERT INTO timers (seq, {_columns(NEW, FIRST)})
        SELECT *, {", ".join(FIRST.values())}
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

# $1: keys. The timers that have these, as many bytes of them as a page has; of the others definition and attempts are
# missing.
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
    ) AS counted
"""


def swap(*, was_final: bool, becomes_final: bool | None) -> str:
    """$1: now, $2: uuid, $3: revision, $4: namespace, $5: status before, $6: the row that takes its place."""
    source, destination = ("history" if final else "timers" for final in (was_final, becomes_final))
    slice_before = SLICE.format(at="(SELECT ended_at FROM gone)") if was_final else "0"
    changes = f"SELECT $4::text AS namespace, $5::text AS status, {slice_before} AS slice, -1 AS change FROM gone"
    put = ""
    if becomes_final is not None:
        columns = ("seq", "ended_at", *FIXED, *STATE) if becomes_final else ("seq", *FIXED, *STATE, "lane")
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

REACH = BEGIN_MAX
"""How many due timers a look reads, whatever its limit: some may be held back."""
REACH_SHARD = 250
"""The same for each shard, when they are asked one by one."""
PASSED_NEXT_MAX = 64
"""How many later timers of a lane a look reads to find the next of its own."""

_CANDIDATE = f"ctid AS at, shard, revision, status, fire_at, seq, {BYTES} AS bytes"
_PASSED_MAX = "8 * asked.most + 256"
"""How many due timers of a lane, whoever owns them, a look reads before it asks its own shards. As long as up to eight
owners have as many each, it finds as many as it may take."""
_FOUND = "at, shard, revision, status, fire_at, seq, bytes"
_HELD = "(SELECT versions FROM held)[shard + 1]"
_NOW = "(SELECT now FROM clock)"
_LOST = f"version <> {_HELD} AND (deadline_at <= {_NOW} OR $5)"
_PAUSED = "namespace IN (SELECT name FROM paused)"
_ALONE = "(SELECT alone FROM held)"
_MAY_BE_LOST = f"deadline_at > {_NOW} AND status = 'executing' AND version <> {_HELD} AND NOT $5 AND NOT {_PAUSED}"

# What stands in the index by shard, word for word (``postgres_schema``).
_SHARD_AT = "fire_at - 0"

# $1: owner, $2: held version of each shard or -1, $3: limit, $4: now, $5: whether lost attempts wait for no deadline,
# $6: namespaces that are held back.
# An owner that is alone goes by the time; beside others it asks its shards one by one, and sees no timer of theirs.
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
# A live timer whose status nobody knows is begun, so that it gets into quarantine.
_OPEN = "status <> 'executing'"


def _begun(said: str) -> str:
    """Begins ``due`` and returns it, behind one row of what is true of the whole look."""
    return f"""
    fence AS MATERIALIZED (
        SELECT shard FROM shards
        WHERE shard = ANY (ARRAY(SELECT shard FROM due))
        AND owner_id = $1 AND version = ($2::bigint[])[shard + 1]
        ORDER BY shard FOR SHARE
    ),
    begun AS (
        UPDATE timers SET
            status = 'executing',
            attempt = timers.attempt + 1,
            lost = timers.lost + (timers.status = 'executing')::int,
            started_at = coalesce(timers.started_at, clock.now),
            deadline_at = clock.now + timers.timeout_ms + {ATTEMPT_GRACE_MS},
            version = ($2::bigint[])[due.shard + 1],
            updated_at = clock.now,
            revision = timers.revision + 1
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
    FULL JOIN ({said}) AS look ON false
    ORDER BY begun.fire_at NULLS FIRST, begun.seq  -- what is true of the whole look comes once, in a row of its own
"""


# $7: how many of a lane at most, $8: the lanes with a limit of their own, as a JSON object.
BEGIN = f"""
    WITH {_LOOK},
    met AS MATERIALIZED (
        (
            SELECT {_CANDIDATE}, lane, {_PAUSED} AS paused, false AS last FROM timers
            WHERE {_ALONE} AND fire_at <= {_NOW} AND ({_OPEN} OR {_LOST} AND NOT {_PAUSED})
            ORDER BY fire_at, seq LIMIT {REACH}
        )
        UNION ALL
        SELECT each.* FROM ours CROSS JOIN LATERAL (
            SELECT {_CANDIDATE}, lane, {_PAUSED} AS paused,
                row_number() OVER (ORDER BY {_SHARD_AT}) = greatest($3, {REACH_SHARD}) AS last
            FROM timers
            WHERE shard = ours.shard AND {_SHARD_AT} <= {_NOW} AND ({_OPEN} OR {_LOST} AND NOT {_PAUSED})
            ORDER BY {_SHARD_AT} LIMIT greatest($3, {REACH_SHARD})
        ) AS each
    ),
    open AS MATERIALIZED (
        SELECT * FROM (
            SELECT *, row_number() OVER (PARTITION BY lane ORDER BY fire_at, seq) AS in_lane FROM met WHERE NOT paused
        ) AS ranked
        WHERE $7::int IS NULL OR in_lane <= coalesce(($8::jsonb ->> lane::text)::int, $7)
    ),
    due AS MATERIALIZED (
        SELECT * FROM (
            SELECT *, row_number() OVER oldest_first AS place, sum(bytes) OVER oldest_first - bytes AS bytes_before
            FROM open WINDOW oldest_first AS (ORDER BY fire_at, seq ROWS UNBOUNDED PRECEDING)
        ) AS counted WHERE bytes_before < {BEGIN_BYTES_MAX} AND place <= least($3, {BEGIN_MAX})
    ),
    next AS MATERIALIZED (  -- of interest only when that is everything, so it never walks through a backlog
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
            SELECT CASE WHEN (SELECT count(*) FROM due) = (SELECT count(*) FROM open)
                AND (NOT {_ALONE} OR (SELECT count(*) FROM met) < {REACH})
                AND NOT EXISTS (SELECT FROM met WHERE last) THEN (SELECT count(*) FROM due) END AS number
        ) AS everything
    ),
    {_begun("SELECT clock.now, held.versions, next.number, next.at AS next_at FROM clock, held, next")}
"""

# What stands in the index by lane, word for word (``postgres_schema``).
_LANE_AT, _LANE_ORDER = "fire_at + 0", "fire_at + 0, seq + 0"
_ELIGIBLE = f"({_OPEN} OR {_LOST}) AND NOT {_PAUSED}"

# $7: lanes, $8: how many of each at most, $9: their shares.
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
    crowded AS MATERIALIZED (  -- lanes in which too few of ours are near, and others' timers, or attempts, before them
        SELECT asked.* FROM asked CROSS JOIN LATERAL (
            SELECT FROM timers WHERE lane = asked.lane AND {_LANE_AT} <= {_NOW}
            ORDER BY {_LANE_ORDER} OFFSET {_PASSED_MAX} LIMIT 1
        ) AS behind
        WHERE NOT {_ALONE} AND lane <> ALL (ARRAY(SELECT lane FROM near WHERE in_lane > most))
    ),
    met AS MATERIALIZED (
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
    dealt AS MATERIALIZED (
        SELECT *, in_lane <= most AND bytes_before < {BEGIN_BYTES_MAX} AND place <= least($3, {BEGIN_MAX}) AS chosen
        FROM (
            SELECT *, row_number() OVER by_share AS place, sum(bytes) OVER by_share - bytes AS bytes_before FROM met
            WINDOW by_share AS (ORDER BY in_lane > most, in_lane / share, fire_at, seq ROWS UNBOUNDED PRECEDING)
        ) AS counted
    ),
    due AS MATERIALIZED (SELECT * FROM dealt WHERE chosen),
    behind AS MATERIALIZED (SELECT lane, min(fire_at) AS fire_at FROM dealt WHERE NOT chosen GROUP BY lane),
    left_over AS MATERIALIZED (
        SELECT asked.lane, coalesce(behind.fire_at, later.at) AS fire_at
        FROM asked LEFT JOIN behind ON behind.lane = asked.lane
        CROSS JOIN LATERAL (  -- when there are only others' timers, it is to be asked again at the last of them
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

# $1: now, $2: until, $3: after which lane, $4: how many lanes, $5: how many due to count, $6: whether lost attempts
# wait for no deadline. The last row is about all.
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

# $1: shards, $2: before, $3: how many of a lane to count.
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
    {name: f"timers.{name}" for name in STATE}
    | {name: f"ending.{name}" for name in END}
    | {"revision": "timers.revision + 1", "deadline_at": "NULL::bigint", "version": "0"}
)


def _of_begun(ours: str) -> str:
    """Which timer a change is of: one that this owner began, and nobody changed since."""
    return f"timers.uuid = {ours}.key AND timers.revision = {ours}.was AND timers.version = {ours}.fenced_by"


# $1: owner, $2: now, $3: shards, $4: end rows, $5: move rows. Returns how many were written, and which if not all.
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
        UPDATE timers SET {", ".join(f"{name} = moving.{name}" for name in STATE)} FROM moving
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
    dead AS MATERIALIZED (  -- own row first, and nobody waits for another's: two that come back are not in a circle
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
