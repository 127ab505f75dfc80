"""The tables of the MySQL store, and their migrations: forward only, one entry per step.

A live timer is a row of ``timers``, a final one a row of ``history``, which is dropped by partitions.

- The indexes of ``timers`` contain no column that begins change, so a begin writes no index entry.
- ``timers_due`` serves a single instance, ``timers_shard`` one of several, and ``timers_lane`` a poll that skips lanes
  that are held back.
- Names and ids are VARBINARY, because MySQL's collations ignore trailing spaces or case.
- ``size`` is the size of a timer for byte limits, available without reading its definition.
- ``slices`` lists the partitions of ``history``; ``tallies`` holds exact counts, each spread over a few rows.
- ``hint_key`` holds the key that signs hints; ``instances.hint_address`` is where an instance receives them.

A step is a list of single statements. MySQL commits after each DDL statement, so an interrupted step is repeated from
its start: tables are created IF NOT EXISTS, and a column or an index that already exists is skipped.
"""

from __future__ import annotations

_TEXT = "VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin"

_COLUMNS = f"""
    uuid           BINARY(16) NOT NULL,
    namespace      VARBINARY(255) NOT NULL,
    id             VARBINARY(1020) NOT NULL,
    shard          INT NOT NULL,
    definition     LONGBLOB NOT NULL,
    timeout_ms     BIGINT NOT NULL,
    fingerprint    VARBINARY(255) NOT NULL,
    correlation_id VARBINARY(1020),
    created_at     BIGINT NOT NULL,
    updated_at     BIGINT NOT NULL,
    revision       BIGINT NOT NULL,
    firing         BIGINT NOT NULL,
    execute_at     BIGINT NOT NULL,
    fire_at        BIGINT NOT NULL,
    status         {_TEXT} NOT NULL,
    attempt        INT NOT NULL,
    failures       INT NOT NULL,
    lost           INT NOT NULL,
    last_error     BLOB,
    started_at     BIGINT,
    executed_at    BIGINT,
    deadline_at    BIGINT,
    version        BIGINT NOT NULL,
    attempts       MEDIUMBLOB NOT NULL,
    size           BIGINT AS (LENGTH(definition) + LENGTH(attempts)) STORED
"""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE IF NOT EXISTS shards (
            shard INT PRIMARY KEY, owner_id BINARY(16), version BIGINT NOT NULL DEFAULT 0,
            lease_until BIGINT NOT NULL DEFAULT 0
        ) ENGINE = InnoDB""",
        """CREATE TABLE IF NOT EXISTS instances (
            owner_id BINARY(16) PRIMARY KEY, alive_until BIGINT NOT NULL, serving BOOLEAN NOT NULL, about BLOB NOT NULL,
            hint_address VARCHAR(64) CHARACTER SET ascii
        ) ENGINE = InnoDB""",
        """CREATE TABLE IF NOT EXISTS namespaces (
            name VARBINARY(255) PRIMARY KEY, paused BOOLEAN NOT NULL, definition BLOB NOT NULL,
            revision BIGINT NOT NULL, KEY namespaces_paused (paused, name)
        ) ENGINE = InnoDB""",
        f"""CREATE TABLE IF NOT EXISTS timers (
            seq BIGINT NOT NULL, {_COLUMNS}, lane BIGINT NOT NULL,
            PRIMARY KEY (uuid),
            KEY timers_due (fire_at, seq),
            KEY timers_shard (shard, fire_at, seq),
            KEY timers_lane (lane, fire_at, seq, shard),
            KEY timers_seq (seq),
            KEY timers_namespace (namespace, seq),
            KEY timers_execute_at (execute_at, seq),
            KEY timers_correlation_id (correlation_id, seq)
        ) ENGINE = InnoDB ROW_FORMAT = DYNAMIC""",
        f"""CREATE TABLE IF NOT EXISTS history (
            seq BIGINT NOT NULL, ended_at BIGINT NOT NULL, {_COLUMNS},
            KEY history_uuid (uuid),
            KEY history_final (namespace, status, updated_at, seq),
            KEY history_ended (status, updated_at, seq),
            KEY history_seq (seq),
            KEY history_namespace (namespace, seq),
            KEY history_execute_at (execute_at, seq),
            KEY history_correlation_id (correlation_id, seq)
        ) ENGINE = InnoDB ROW_FORMAT = DYNAMIC
        PARTITION BY RANGE (ended_at) (PARTITION p0 VALUES LESS THAN (1))""",
        """CREATE TABLE IF NOT EXISTS slices (
            starts_at BIGINT PRIMARY KEY, ends_at BIGINT NOT NULL
        ) ENGINE = InnoDB""",
        f"""CREATE TABLE IF NOT EXISTS tallies (
            namespace VARBINARY(255) NOT NULL, status {_TEXT} NOT NULL, slice BIGINT NOT NULL, spread INT NOT NULL,
            timers BIGINT NOT NULL, PRIMARY KEY (namespace, status, slice, spread)
        ) ENGINE = InnoDB""",
        f"""CREATE TABLE IF NOT EXISTS quarantine (
            uuid BINARY(16) PRIMARY KEY, namespace VARBINARY(255) NOT NULL, id VARBINARY(1020) NOT NULL,
            status {_TEXT} NOT NULL, fire_at BIGINT NOT NULL, reason BLOB NOT NULL, quarantined_at BIGINT NOT NULL
        ) ENGINE = InnoDB""",
        """CREATE TABLE IF NOT EXISTS hint_key (only_one INT PRIMARY KEY, secret BINARY(32) NOT NULL)
        ENGINE = InnoDB""",
        """CREATE TABLE IF NOT EXISTS ended_sessions (
            id VARBINARY(255) PRIMARY KEY, ends_at BIGINT NOT NULL
        ) ENGINE = InnoDB""",
    ),
)
