"""Quarantine in SQLite: puts timers aside because nobody could read them, and brings them back once somebody can.

A quarantined timer stays in ``timers``, which keeps its identity taken, with a status that no partial index of looks
has. ``quarantine`` has the status of before; nothing else of the row is changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from duetime.stores.sqlite_rows import Connection, encode, one_by_one
from duetime.stores.unreadable import QUARANTINED, STATUSES, say_quarantined

_NOT_LIVE = "status NOT IN ('pending', 'executing')"  # spelled as the index of final timers has it
_KNOWN = ", ".join(f"'{status}'" for status in (*STATUSES, QUARANTINED))

# One seek in the index for each status of each namespace.
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


def put_aside(connection: Connection, reasons: Mapping[int, str], now: int) -> None:
    """Put the timers with these rowids into quarantine."""
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
            say_quarantined(namespace, id, reason)


def still_unreadable(connection: Connection, seqs: Mapping[int, str]) -> dict[int, str]:
    """Those of the timers that can't be read, with the reasons."""
    source = "timers WHERE seq IN (SELECT value FROM json_each(?))"
    rows = one_by_one(connection, source, (encode(list(seqs)).decode(),))
    return {seq: row for row, seq in rows if isinstance(row, str)}


def open_quarantine(connection: Connection, now: int) -> int:
    """Bring back the timers that this program can read, and put those aside whose status it does not know; how many
    came back."""
    there = connection.execute(
        "SELECT timers.seq, quarantine.uuid, quarantine.namespace, quarantine.status FROM quarantine "
        f"CROSS JOIN timers USING (uuid) WHERE timers.status = '{QUARANTINED}'"
    ).fetchall()
    connection.executemany("UPDATE timers SET status = ? WHERE seq = ?", [(status, seq) for seq, _, _, status in there])
    unreadable = still_unreadable(connection, {seq: "" for seq, *_ in there})
    for seq, uuid, namespace, status in there:
        if seq in unreadable:
            connection.execute(f"UPDATE timers SET status = '{QUARANTINED}' WHERE seq = ?", (seq,))
        else:
            connection.execute("UPDATE timers SET revision = revision + 1 WHERE seq = ?", (seq,))
            connection.execute("DELETE FROM quarantine WHERE uuid = ?", (uuid,))
            connection.executemany(_COUNT, [(namespace, QUARANTINED, -1), (namespace, status, 1)])
    unknown = connection.execute(_UNKNOWN_STATUSES).fetchall()
    put_aside(connection, {seq: f"its status is '{status}'" for seq, status in unknown}, now)
    return len(there) - len(unreadable)
