"""A witness inside the database: triggers that note every begin and record by an instance that did not own the shard.

Each instance connects as a role of its own, so a trigger knows who is writing. A claim notes its role as the shard's
owner, in the claim's own transaction. A begin or a record of anybody else is then a write of a stale owner: it is let
through, noted, and counted in the end. Changes by clients go through any instance and are not looked at: they find the
timer pending and leave it pending or canceled, while a begin or a record has ``executing`` on one side or the other.

The trigger reads what is committed at the moment of the write, so a write long after the takeover is always seen. One
that overlaps with the claim may not be: the interleavings of ``test_fence_bugs`` are about that.
"""

from __future__ import annotations

INSTALL = """
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

STALE = "SELECT at, what, role, owner, shard, id FROM chaos.stale ORDER BY at LIMIT 20"
STALE_COUNT = "SELECT count(*) FROM chaos.stale"
