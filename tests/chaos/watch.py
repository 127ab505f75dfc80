"""A witness inside the database: triggers that record every begin and record by an instance that did not own the shard.

Each instance connects with its own role (a user, in MySQL), so a trigger knows the writer. A claim stores its role as
the shard's owner, in the same transaction. A begin or record by any other role is then a write of a stale owner: the
trigger lets it through and records it, and the test counts these in the end. Changes by clients go through any instance
and are ignored: they leave a pending timer pending or canceled, while a begin or a record has ``executing`` before or
after.

The trigger reads what is committed at the moment of the write, so it always sees a write long after the takeover. It
may miss one that overlaps with the claim: ``test_fence_bugs`` tests those interleavings.
"""

from __future__ import annotations

POSTGRES = """
CREATE SCHEMA chaos;
CREATE TABLE chaos.owners (shard int PRIMARY KEY, role name);
INSERT INTO chaos.owners SELECT shard FROM duetime.shards;
CREATE TABLE chaos.stale (
    at timestamptz DEFAULT clock_timestamp(), what text, role name, owner name, shard int, id text
);

CREATE FUNCTION chaos.note_owner() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.version < OLD.version THEN
        INSERT INTO chaos.stale (what, role, shard) VALUES ('version went back', session_user, NEW.shard);
    END IF;
    IF NEW.owner_id IS DISTINCT FROM OLD.owner_id THEN
        UPDATE chaos.owners SET role = CASE WHEN NEW.owner_id IS NOT NULL THEN session_user END
        WHERE shard = NEW.shard;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER note_owner AFTER UPDATE ON duetime.shards FOR EACH ROW EXECUTE FUNCTION chaos.note_owner();

CREATE FUNCTION chaos.note_stale() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE owner name;
BEGIN
    SELECT role INTO owner FROM chaos.owners WHERE shard = OLD.shard;
    IF owner IS DISTINCT FROM session_user THEN
        INSERT INTO chaos.stale (what, role, owner, shard, id)
        VALUES (TG_ARGV[0], session_user, owner, OLD.shard, OLD.id);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER note_stale_begin AFTER UPDATE ON duetime.timers FOR EACH ROW
    WHEN (NEW.status = 'executing') EXECUTE FUNCTION chaos.note_stale('begin');
CREATE TRIGGER note_stale_record AFTER UPDATE ON duetime.timers FOR EACH ROW
    WHEN (OLD.status = 'executing' AND NEW.status <> 'executing') EXECUTE FUNCTION chaos.note_stale('record');
CREATE TRIGGER note_stale_end AFTER DELETE ON duetime.timers FOR EACH ROW
    WHEN (OLD.status = 'executing') EXECUTE FUNCTION chaos.note_stale('record');
"""

_NOTE = "INSERT INTO chaos.stale (what, role, owner, shard, id) SELECT '{}', {}, role, shard, OLD.id FROM chaos.owners "
_NOTE += "WHERE shard = OLD.shard AND NOT role <=> {}"
_ROLE = "SUBSTRING_INDEX(USER(), '@', 1)"


def _noted(name: str, event: str, when: str, what: str) -> str:
    return (
        f"CREATE TRIGGER duetime.{name} AFTER {event} ON duetime.timers FOR EACH ROW "
        f"BEGIN IF {when} THEN {_NOTE.format(what, _ROLE, _ROLE)}; END IF; END"
    )


MYSQL = (
    "CREATE DATABASE chaos",
    "CREATE TABLE chaos.owners (shard INT PRIMARY KEY, role VARCHAR(64)) ENGINE = InnoDB",
    "INSERT INTO chaos.owners SELECT shard, NULL FROM duetime.shards",
    "CREATE TABLE chaos.stale (at TIMESTAMP(3) DEFAULT CURRENT_TIMESTAMP(3), what VARCHAR(64), role VARCHAR(64), "
    "owner VARCHAR(64), shard INT, id VARBINARY(1020)) ENGINE = InnoDB",
    f"""CREATE TRIGGER duetime.note_owner AFTER UPDATE ON duetime.shards FOR EACH ROW BEGIN
        IF NEW.version < OLD.version THEN
            INSERT INTO chaos.stale (what, role, shard) VALUES ('version went back', {_ROLE}, NEW.shard);
        END IF;
        IF NOT NEW.owner_id <=> OLD.owner_id THEN
            UPDATE chaos.owners SET role = CASE WHEN NEW.owner_id IS NOT NULL THEN {_ROLE} END
            WHERE shard = NEW.shard;
        END IF;
    END""",
    _noted("note_stale_begin", "UPDATE", "NEW.status = 'executing' AND NEW.revision <> OLD.revision", "begin"),
    _noted("note_stale_record", "UPDATE", "OLD.status = 'executing' AND NEW.status <> 'executing'", "record"),
    _noted("note_stale_end", "DELETE", "OLD.status = 'executing'", "record"),
)

STALE = "SELECT at, what, role, owner, shard, id FROM chaos.stale ORDER BY at"
