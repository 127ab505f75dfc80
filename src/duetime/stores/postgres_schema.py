"""The tables of the PostgreSQL store and how older ones are brought up to them: forward only, one step per entry.

A live timer is a row of ``timers``, a final one a row of ``history``: so the table that is looked at for every firing
stays as small as what is pending, and history is dropped a slice of time at a time instead of being vacuumed.

- No index of ``timers`` has a column that begins and retries change, other than ``fire_at``: a begin is a HOT update,
  which costs no index entry and is cleaned up without a vacuum. That is why ``status`` is in no index, not even as a
  condition of one.
- ``timers_lane`` has the timers by lane, so that a look can pass over lanes that are held back (docs/decisions/0023).
  It has ``fire_at + 0``, so that no statement about a lane can go by ``timers_due``, and no other by this one: where
  nearly all timers are in one lane, the planner would take one for as good as the other.
- ``timers_shard`` has them by shard, for an instance beside others. Its expressions keep statements apart, too.
- The order of creation is an index by namespace, and a page over all namespaces is merged from a page of each.
- ``slices`` names the partitions of ``history``; a row belongs to the slice in which the store wrote it.
- ``tallies`` holds exact counts, each spread over a few rows so that writers do not wait for one another.
- ``quarantine`` names the live timers that a program could not read, with what they were before (docs/decisions/0026).

Instances of two releases share these tables while one takes the place of the other. So a step only adds: what a program
of the release before reads, writes or names stays as it is. What is no longer needed goes a release later, in a step
that moves ``BREAKING`` (docs/operate/upgrades.md).
"""

from __future__ import annotations

from duetime.model import DAY_MS
from duetime.stores.targets import HTTP

SCHEMA = "duetime"
SLICE_LOCK = 4_711_002
"""The advisory lock of those who make and drop slices."""

_COLUMNS = """
        uuid           bytea NOT NULL,
        namespace      text COLLATE "C" NOT NULL,
        id             text COLLATE "C" NOT NULL,
        shard          int NOT NULL,
        definition     text NOT NULL,
        timeout_ms     bigint NOT NULL,
        fingerprint    text NOT NULL,
        correlation_id text COLLATE "C",
        created_at     bigint NOT NULL,
        updated_at     bigint NOT NULL,
        revision       bigint NOT NULL,
        firing         bigint NOT NULL,
        execute_at     bigint NOT NULL,
        fire_at        bigint NOT NULL,
        status         text COLLATE "C" NOT NULL,
        attempt        int NOT NULL,
        failures       int NOT NULL,
        lost           int NOT NULL,
        last_error     text,
        started_at     bigint,
        executed_at    bigint,
        deadline_at    bigint,
        version        bigint NOT NULL,
        attempts       text NOT NULL
"""

_ORIGIN = f"lower(substring(definition FROM '{HTTP}([A-Za-z]+://[^/?#\"]*)'))"
_DESTINATION = f"""
    CASE WHEN {_ORIGIN} IS NULL THEN 'nats'
    WHEN {_ORIGIN} ~ ':[0-9]+$' THEN {_ORIGIN}
    ELSE {_ORIGIN} || CASE WHEN {_ORIGIN} LIKE 'https:%' THEN ':443' ELSE ':80' END END
"""


class InBatches(str):
    """A step that is one statement and commits now and then; it can be done again from the start."""


MIGRATIONS: tuple[str, ...] = (
    f"""
    CREATE TABLE shards (
        shard       int PRIMARY KEY,
        owner_id    bytea,
        version     bigint NOT NULL DEFAULT 0,
        lease_until bigint NOT NULL DEFAULT 0
    ) WITH (fillfactor = 20);

    CREATE TABLE instances (
        owner_id    bytea PRIMARY KEY,
        alive_until bigint NOT NULL,
        serving     boolean NOT NULL,
        about       bytea NOT NULL
    );

    CREATE TABLE namespaces (name text COLLATE "C" PRIMARY KEY, paused boolean NOT NULL, definition bytea NOT NULL);

    CREATE SEQUENCE timer_seq;  -- the order of creation

    CREATE TABLE timers (seq bigint NOT NULL, {_COLUMNS}) WITH (
        fillfactor = 60,
        autovacuum_vacuum_scale_factor = 0.02,
        autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0
    );
    CREATE UNIQUE INDEX timers_uuid ON timers (uuid);
    CREATE INDEX timers_due ON timers (fire_at, seq);
    CREATE INDEX timers_seq ON timers ((seq + 0));
    CREATE INDEX timers_namespace ON timers (namespace, seq);
    CREATE INDEX timers_execute_at ON timers (execute_at, seq);
    CREATE INDEX timers_correlation_id ON timers (correlation_id, seq) WHERE correlation_id IS NOT NULL;

    CREATE TABLE history (seq bigint NOT NULL, ended_at bigint NOT NULL, {_COLUMNS}) PARTITION BY RANGE (ended_at);
    CREATE INDEX history_uuid ON history (uuid);
    CREATE INDEX history_final ON history (namespace, status, updated_at, seq);
    CREATE INDEX history_seq ON history ((seq + 0));
    CREATE INDEX history_namespace ON history (namespace, seq);
    CREATE INDEX history_execute_at ON history (execute_at, seq);
    CREATE INDEX history_correlation_id ON history (correlation_id, seq) WHERE correlation_id IS NOT NULL;

    CREATE TABLE slices (starts_at bigint PRIMARY KEY, ends_at bigint NOT NULL);

    CREATE TABLE tallies (
        namespace text COLLATE "C" NOT NULL,
        status    text COLLATE "C" NOT NULL,
        slice     bigint NOT NULL,  -- of history; 0 for what is live
        spread    int NOT NULL,
        timers    bigint NOT NULL,
        PRIMARY KEY (namespace, status, slice, spread)
    ) WITH (fillfactor = 50);

    -- An identity is taken by a live timer or by a final one. The unique index sees the first. This is asked about the
    -- second after the insert, with a snapshot of its own: one of before would miss a timer that has just become final.
    CREATE FUNCTION refuse_finished(uuids bytea[]) RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
        IF EXISTS (SELECT FROM history WHERE uuid = ANY (uuids)) THEN
            RAISE EXCEPTION 'finished' USING ERRCODE = 'DT001';
        END IF;
    END $$;
    """,
    # The key of a timer whose id is a UUID begins like that (docs/decisions/0013); it was the hash alone.
    "".join(
        f"""
        UPDATE {table} SET uuid = decode(substr(id, 1, 8) || substr(id, 10, 2) || left(encode(uuid, 'hex'), 22), 'hex')
        WHERE id ~ '^[0-9A-Fa-f]{{8}}(-[0-9A-Fa-f]{{4}}){{3}}-[0-9A-Fa-f]{{12}}$';
        """
        for table in ("timers", "history")
    ),
    # A page is filled to less than half, so that all timers on it can begin at once and stay on it. An index less to
    # write: what is asked of all namespaces is asked of each. And the rows that come in batches (docs/decisions/0016).
    """
    ALTER TABLE timers SET (fillfactor = 45);
    DROP INDEX timers_seq;
    DROP INDEX history_seq;
    CREATE TYPE new_row AS (
        uuid bytea, namespace text, id text, shard int, definition text, timeout_ms bigint, fingerprint text,
        correlation_id text, created_at bigint, revision bigint, execute_at bigint
    );
    CREATE TYPE end_row AS (
        key bytea, was bigint, in_shard int,
        updated_at bigint, status text, attempt int, failures int, lost int, last_error text, executed_at bigint,
        attempts text
    );
    CREATE TYPE move_row AS (
        key bytea, was bigint, in_shard int,
        updated_at bigint, revision bigint, firing bigint, execute_at bigint, fire_at bigint, status text, attempt int,
        failures int, lost int, last_error text, started_at bigint, executed_at bigint, deadline_at bigint,
        version bigint, attempts text
    );
    CREATE TYPE whole_row AS (
        uuid bytea, namespace text, id text, shard int, definition text, timeout_ms bigint, fingerprint text,
        correlation_id text, created_at bigint,
        updated_at bigint, revision bigint, firing bigint, execute_at bigint, fire_at bigint, status text, attempt int,
        failures int, lost int, last_error text, started_at bigint, executed_at bigint, deadline_at bigint,
        version bigint, attempts text
    );
    """,
    # What is due in a paused namespace is kept apart (docs/decisions/0019).
    """
    ALTER TABLE timers ADD COLUMN parked text COLLATE "C" NOT NULL DEFAULT '';
    DROP INDEX timers_due;
    CREATE INDEX timers_due ON timers (fire_at, seq) WHERE parked = '';
    CREATE INDEX timers_parked ON timers (parked, fire_at, seq) WHERE parked > '';
    """,
    # Lanes take the place of parking: what is held back is passed over, and never written (docs/decisions/0023). The
    # program of before goes on parking, and writes rows without a lane: a trigger fills it in, as ``model.lane_of``
    # would but for hosts in a spelling that is not canonical. Nor does that program count the revisions of namespaces.
    f"""
    ALTER TABLE timers ADD COLUMN lane bigint NOT NULL DEFAULT 0;
    ALTER TABLE namespaces ADD COLUMN weight int NOT NULL DEFAULT 1, ADD COLUMN revision bigint NOT NULL DEFAULT 0;
    CREATE TYPE new_timer AS (
        uuid bytea, namespace text, id text, shard int, definition text, timeout_ms bigint, fingerprint text,
        correlation_id text, created_at bigint, revision bigint, execute_at bigint, lane bigint
    );
    CREATE TYPE live_timer AS (
        uuid bytea, namespace text, id text, shard int, definition text, timeout_ms bigint, fingerprint text,
        correlation_id text, created_at bigint,
        updated_at bigint, revision bigint, firing bigint, execute_at bigint, fire_at bigint, status text, attempt int,
        failures int, lost int, last_error text, started_at bigint, executed_at bigint, deadline_at bigint,
        version bigint, attempts text, lane bigint
    );

    CREATE FUNCTION lane_of(namespace text, definition text) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
        SELECT ('x' || left(md5(namespace || ' ' || {_DESTINATION}), 15))::bit(60)::bigint
    $$;
    CREATE FUNCTION give_lane() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        NEW.lane := {SCHEMA}.lane_of(NEW.namespace, NEW.definition);
        RETURN NEW;
    END $$;
    CREATE TRIGGER timers_without_lane BEFORE INSERT ON timers
    FOR EACH ROW WHEN (NEW.lane = 0) EXECUTE FUNCTION give_lane();

    CREATE FUNCTION next_revision() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        NEW.revision := OLD.revision + 1;
        RETURN NEW;
    END $$;
    CREATE TRIGGER namespaces_revision BEFORE UPDATE ON namespaces
    FOR EACH ROW WHEN (NEW.revision = OLD.revision) EXECUTE FUNCTION next_revision();
    """,
    """
    CREATE INDEX timers_lane ON timers (lane, (fire_at + 0), (seq + 0));
    CREATE INDEX timers_due_parked_too ON timers (fire_at, seq);
    """,
    # The lanes of old rows, a few at a time, beside instances that work: it waits for none of their locks.
    InBatches("""
    DO $$
    DECLARE found bigint;
    BEGIN
        LOOP
            WITH few AS MATERIALIZED (SELECT ctid AS at FROM timers WHERE lane = 0 LIMIT 1000 FOR UPDATE SKIP LOCKED)
            UPDATE timers SET lane = lane_of(namespace, definition) FROM few WHERE timers.ctid = few.at;
            GET DIAGNOSTICS found = ROW_COUNT;
            COMMIT;
            EXIT WHEN NOT EXISTS (SELECT FROM timers WHERE lane = 0);
            IF found = 0 THEN PERFORM pg_sleep(0.05); END IF;
        END LOOP;
    END $$
    """),
    # Who parks finds what is due by the new index, too: what is parked is left out by a condition.
    """
    DROP INDEX timers_due;
    ALTER INDEX timers_due_parked_too RENAME TO timers_due;
    """,
    """
    CREATE TABLE quarantine (
        uuid           bytea PRIMARY KEY,
        namespace      text COLLATE "C" NOT NULL,
        id             text COLLATE "C" NOT NULL,
        status         text COLLATE "C" NOT NULL,  -- what it goes back to
        fire_at        bigint NOT NULL,
        reason         text NOT NULL,
        quarantined_at bigint NOT NULL
    );
    """,
    # With thousands of namespaces, a page of all timers that failed does not ask each of them, and a look does not read
    # them all to see which are paused. An instance beside others does not read their timers (docs/decisions/0025).
    # Each is a step, so that none waits for the lock of one table with that of another.
    """
    CREATE INDEX IF NOT EXISTS history_ended ON history (status, (updated_at + 0), (seq + 0))
    WHERE status <> 'completed';
    """,
    "CREATE INDEX IF NOT EXISTS timers_shard ON timers (shard, (fire_at - 0), (lane + 0));",
    "CREATE INDEX IF NOT EXISTS namespaces_paused ON namespaces (name) WHERE paused;",
    # Sessions that were signed out before their end (docs/decisions/0028). The row without an id is for all that would
    # have ended by its time.
    """
    CREATE TABLE IF NOT EXISTS ended_sessions (id bytea PRIMARY KEY, ends_at bigint NOT NULL);
    """,
)

BREAKING = 4
"""The last step that a program which does not know it can't live with: the database refuses such a program."""

SLICES_PER_RETENTION_MIN = 4
_WIDTHS_MS = (28 * DAY_MS, 7 * DAY_MS, DAY_MS)


def slice_width_ms(retention_ms: int) -> int:
    """How much time a new slice of history holds: few slices, because a new timer's identity is looked up in each, yet
    narrow beside the retention, because a slice goes only when all of it is old enough."""
    return next((width for width in _WIDTHS_MS if width * SLICES_PER_RETENTION_MIN <= retention_ms), DAY_MS)


def slice_statements(starts_at: int, ends_at: int) -> tuple[str, ...]:
    """Make the partition first and attach it then: that does not stop those who read and write history meanwhile."""
    name = f"history_{starts_at}"
    return (
        f"CREATE TABLE {name} (LIKE history INCLUDING ALL)",
        f"ALTER TABLE {name} SET (autovacuum_vacuum_insert_scale_factor = 0.2)",
        f"ALTER TABLE history ATTACH PARTITION {name} FOR VALUES FROM ({starts_at}) TO ({ends_at})",
        f"INSERT INTO slices VALUES ({starts_at}, {ends_at})",
    )
