"""The tables of the PostgreSQL store, and their migrations: forward only, one entry per step.

A live timer is a row of ``timers``, a final one a row of ``history``. So the table that every firing uses stays as
small as the number of live timers, and history is dropped by partitions instead of being vacuumed.

- The indexes of ``timers`` contain no column that begins and retries change, except ``fire_at``. So a begin is a HOT
  update, which writes no index entry and is cleaned up without a vacuum. Therefore no index uses ``status``, not even
  as the condition of a partial index.
- ``timers_lane`` contains the timers by lane, so that a poll can skip lanes that are held back (docs/decisions/0023).
  It uses ``fire_at + 0`` so that statements about one lane can't use ``timers_due`` and other statements can't use this
  index: if nearly all timers are in one lane, the planner considers both equally good.
- ``timers_shard`` contains the timers by shard, for an instance that shares the work with others. Its expressions keep
  other statements from using it, too.
- The order of creation has an index by namespace; a page over all namespaces is merged from one page of each.
- ``slices`` lists the partitions of ``history``; a row belongs to the slice of the time at which it was written.
- ``tallies`` holds exact counts, each spread over a few rows, so that writers do not wait for one another's row locks.
- ``quarantine`` lists the live timers that a program could not read, with their previous values (docs/decisions/0026).

During a rolling upgrade, instances of two releases use these tables. So a step only adds: everything that the previous
release reads, writes or names stays as it is. What is no longer needed is removed one release later, in a step that
moves ``BREAKING`` (docs/operate/upgrades.md).
"""

from __future__ import annotations

from duetime.stores.stored_destination import HTTP

SCHEMA = "duetime"
SLICE_LOCK = 4_711_002
"""The advisory lock for creating and dropping slices."""

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
    """A step of one statement that commits in batches and can be repeated from the start."""


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
        slice     bigint NOT NULL,  -- of history; 0 for live timers
        spread    int NOT NULL,
        timers    bigint NOT NULL,
        PRIMARY KEY (namespace, status, slice, spread)
    ) WITH (fillfactor = 50);

    -- A new timer can conflict with a live or a final one. The unique index detects the first. This function checks for
    -- the second after the insert, with a snapshot of its own: an older one could miss a timer that just became final.
    CREATE FUNCTION refuse_finished(uuids bytea[]) RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
        IF EXISTS (SELECT FROM history WHERE uuid = ANY (uuids)) THEN
            RAISE EXCEPTION 'finished' USING ERRCODE = 'DT001';
        END IF;
    END $$;
    """,
    # The key of a timer whose id is a UUID starts like the id (docs/decisions/0013); before, it was only the hash.
    "".join(
        f"""
        UPDATE {table} SET uuid = decode(substr(id, 1, 8) || substr(id, 10, 2) || left(encode(uuid, 'hex'), 22), 'hex')
        WHERE id ~ '^[0-9A-Fa-f]{{8}}(-[0-9A-Fa-f]{{4}}){{3}}-[0-9A-Fa-f]{{12}}$';
        """
        for table in ("timers", "history")
    ),
    # Pages are filled to less than half, so that all timers of a page can begin at once and stay on it (HOT). One index
    # fewer to write: queries over all namespaces query each one. And composite types for batches
    # (docs/decisions/0016).
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
    # Due timers of paused namespaces are kept apart (docs/decisions/0019).
    """
    ALTER TABLE timers ADD COLUMN parked text COLLATE "C" NOT NULL DEFAULT '';
    DROP INDEX timers_due;
    CREATE INDEX timers_due ON timers (fire_at, seq) WHERE parked = '';
    CREATE INDEX timers_parked ON timers (parked, fire_at, seq) WHERE parked > '';
    """,
    # Lanes replace parking: timers that are held back are skipped instead of written (docs/decisions/0023). The
    # previous release still parks timers, and inserts rows without a lane: a trigger computes the lane, like
    # ``model.lane_of`` except for hosts that are not in canonical form. Nor does that release increment the revisions
    # of namespaces.
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
    # Computes the lanes of old rows, in batches, while instances are working: it skips rows that they have locked.
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
    # The previous release can use the new index, too: it excludes parked timers by a condition.
    """
    DROP INDEX timers_due;
    ALTER INDEX timers_due_parked_too RENAME TO timers_due;
    """,
    """
    CREATE TABLE quarantine (
        uuid           bytea PRIMARY KEY,
        namespace      text COLLATE "C" NOT NULL,
        id             text COLLATE "C" NOT NULL,
        status         text COLLATE "C" NOT NULL,  -- to restore
        fire_at        bigint NOT NULL,
        reason         text NOT NULL,
        quarantined_at bigint NOT NULL
    );
    """,
    # With thousands of namespaces, a page of all failed timers must not query each namespace, and a poll must not read
    # all of them to find the paused ones. An instance among several must not read the timers of the others
    # (docs/decisions/0025). Each index is a step of its own, so that no step holds the lock of one table while it waits
    # for another.
    """
    CREATE INDEX IF NOT EXISTS history_ended ON history (status, (updated_at + 0), (seq + 0))
    WHERE status <> 'completed';
    """,
    "CREATE INDEX IF NOT EXISTS timers_shard ON timers (shard, (fire_at - 0), (lane + 0));",
    "CREATE INDEX IF NOT EXISTS namespaces_paused ON namespaces (name) WHERE paused;",
    # Sessions that ended before their expiry (docs/decisions/0028). The row with an empty id ends all sessions that
    # expire no later than its time.
    """
    CREATE TABLE IF NOT EXISTS ended_sessions (id bytea PRIMARY KEY, ends_at bigint NOT NULL);
    """,
)

BREAKING = 4
"""The last step that a program must know: an older program can't use the database."""


def slice_statements(starts_at: int, ends_at: int) -> tuple[str, ...]:
    """Create a partition of history. It is created as a table and then attached, which does not block reads and writes
    of history."""
    name = f"history_{starts_at}"
    return (
        f"CREATE TABLE {name} (LIKE history INCLUDING ALL)",
        f"ALTER TABLE {name} SET (autovacuum_vacuum_insert_scale_factor = 0.2)",
        f"ALTER TABLE history ATTACH PARTITION {name} FOR VALUES FROM ({starts_at}) TO ({ends_at})",
        f"INSERT INTO slices VALUES ({starts_at}, {ends_at})",
    )
