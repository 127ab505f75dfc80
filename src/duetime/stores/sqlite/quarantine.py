"""Quarantine in SQLite of timers that can't be read, until a program can read them.

A quarantined timer stays in ``timers``, so that its identity remains in use, with a status that the partial indexes of
polls exclude. The table ``quarantine`` holds its previous status; the rest of the row is unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping

from duetime.stores.sql.columns import encode
from duetime.stores.sqlite.rows import Connection, one_by_one
from duetime.stores.unreadable import QUARANTINED, STATUSES, log_quarantined

_NOT_LIVE = "status NOT IN ('pending', 'executing')"  # exactly the condition of the index of final timers
_KNOWN = ", ".join(f"'{status}'" for status in (*STATUSES, QUARANTINED))

# One index seek per status of each namespace.
_UNKNOWN_STATUSES = f"""
    WITH RECURSIVE each_status (namespace, status) AS (
        SELECT * FROM (
            SELECT namespace, status FROM timers WHERE {_NOT_LIVE} AND namespace >= ''
            ORDER BY namespace, status LIMIT 1
        )
        UNION ALL
        SELECT timers.namespace, timers.status FROM each_status CROSS JOIN timers ON timers.seq = (
            SELECT seq FROM timers WHERE {_NOT_LIVE}
            AND (namespace, status) > (each_status.namespace, each_status.status) ORDER BY namespace, status LIMIT 1
        )
    )
    SELECT seq, status FROM each_status CROSS JOIN timers USING (namespace, status)
    WHERE status NOT IN ({_KNOWN}) AND timers.{_NOT_LIVE}
"""
_COUNT = "INSERT INTO tallies VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET timers = timers + excluded.timers"


def quarantine_rows(connection: Connection, reasons: Mapping[int, str], now: int) -> None:
    """Quarantine the timers with these rowids."""
    for seq, reason in reasons.items():
        found = connection.execute("SELECT namespace, id, status FROM timers WHERE seq = ?", (seq,)).fetchall()
        for namespace, id, status in found:
            connection.execute(
                "INSERT OR REPLACE INTO quarantine SELECT uuid, namespace, id, status, ?, ? FROM timers WHERE seq = ?",
                (reason, now, seq),
            )
            connection.execute(
                f"UPDATE timers SET status = '{QUARANTINED}', revision = revision + 1 WHERE seq = ?", (seq,)
            )
            connection.executemany(_COUNT, [(namespace, status, -1), (namespace, QUARANTINED, 1)])
            log_quarantined(namespace, id, reason)


def still_unreadable(connection: Connection, seqs: Mapping[int, str]) -> dict[int, str]:
    """Return those of the timers that can't be read, with the reasons."""
    source = "timers WHERE seq IN (SELECT value FROM json_each(?))"
    rows = one_by_one(connection, source, (encode(list(seqs)).decode(),))
    return {seq: row for row, seq in rows if isinstance(row, str)}


def open_quarantine(connection: Connection, now: int) -> int:
    """Restore the timers that this program can read, and quarantine those with an unknown status. Return how many were
    restored."""
    quarantined = connection.execute(
        "SELECT timers.seq, quarantine.uuid, quarantine.namespace, quarantine.status FROM quarantine "
        f"CROSS JOIN timers USING (uuid) WHERE timers.status = '{QUARANTINED}'"
    ).fetchall()
    connection.executemany(
        "UPDATE timers SET status = ? WHERE seq = ?", [(status, seq) for seq, _, _, status in quarantined]
    )
    unreadable = still_unreadable(connection, {seq: "" for seq, *_ in quarantined})
    for seq, uuid, namespace, status in quarantined:
        if seq in unreadable:
            connection.execute(f"UPDATE timers SET status = '{QUARANTINED}' WHERE seq = ?", (seq,))
        else:
            connection.execute("UPDATE timers SET revision = revision + 1 WHERE seq = ?", (seq,))
            connection.execute("DELETE FROM quarantine WHERE uuid = ?", (uuid,))
            connection.executemany(_COUNT, [(namespace, QUARANTINED, -1), (namespace, status, 1)])
    unknown = connection.execute(_UNKNOWN_STATUSES).fetchall()
    quarantine_rows(connection, {seq: f"its status is '{status}'" for seq, status in unknown}, now)
    return len(quarantined) - len(unreadable)
