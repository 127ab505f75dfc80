"""Conversion between timers and SQLite rows: many rows per statement, decoded directly into the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from duetime.model import Status, Timer
from duetime.stores.sql.columns import INITIAL, MOVE, NEW, TEXTS, encode, move_row, new_row
from duetime.stores.sql.rules import COMPLETE, END, assigned, begun, complete_row, completed, end_row, ended
from duetime.stores.sql.tallies import Tally
from duetime.stores.unreadable import UNREADABLE

Connection = Any

# Rows per statement. A batch is padded with rows of nulls, which the statement skips: each statement releases the
# interpreter lock, and getting it back from a busy event loop takes longer than a hundred rows of nulls.
_SIZES = (1, 4, 16, 64, 128, 256)


# A timer as one JSON text, which msgspec decodes directly into the model. It is formatted by hand, because SQLite's
# JSON functions would remove the white space in a payload.
_COLUMNS = Timer.__struct_fields__
_VALUES = [f"json_quote({c})" if c in TEXTS else f"ifnull({c}, 'null')" for c in _COLUMNS]
_AS_JSON = f"format('[{','.join(['%s'] * len(_COLUMNS))}]', {', '.join(_VALUES)})"

_timers_decoder = msgspec.json.Decoder(list[Timer])
_timer_decoder = msgspec.json.Decoder(Timer)
names = msgspec.json.Decoder(set[str]).decode


def _placeholders(width: int, rows: int) -> str:
    return ", ".join(["(" + ", ".join("?" * width) + ")"] * rows)


_INSERTS = {
    n: f"WITH new (seq, {', '.join(NEW)}) AS (VALUES {_placeholders(1 + len(NEW), n)}) "
    f"INSERT INTO timers (seq, {', '.join((*NEW, *INITIAL))}) SELECT *, {', '.join(INITIAL.values())} FROM new "
    "WHERE uuid IS NOT NULL ON CONFLICT (uuid) DO NOTHING"
    for n in _SIZES
}


# Setting a column updates its indexes even if the value is unchanged. Nearly every record completes its timer, and most
# of the new values then follow from two others: the fewer values to bind, the sooner the event loop gets the
# interpreter lock back.
def _records(columns: Sequence[str], besides: dict[str, str]) -> dict[int, str]:
    changes = assigned({c: f"new.{c}" for c in columns} | besides)
    return {
        n: f"WITH new (uuid, was, {', '.join(columns)}) AS (VALUES {_placeholders(2 + len(columns), n)}) "
        f"UPDATE timers SET {changes} FROM new WHERE timers.uuid = new.uuid AND timers.revision = new.was"
        for n in _SIZES
    }


_COMPLETIONS = _records(COMPLETE, completed("was", "new.updated_at"))
_ENDS = _records(END, ended("was"))
_MOVES = _records(MOVE, {})
_VERSION = "(SELECT version FROM shards WHERE shards.shard = timers.shard)"
_BEGIN = f"""
    UPDATE timers SET {assigned(begun(now=":now", version=_VERSION))}
    WHERE seq IN (SELECT value FROM json_each(:seqs))
"""

_TIMERS = f"'[' || ifnull(group_concat({_AS_JSON}, ','), '') || ']'"
BYTES = "octet_length(definition) + octet_length(attempts)"
"""The size of a timer. SQLite computes it without reading the values."""
CHOSEN = "(SELECT value AS chosen FROM json_each(?)) CROSS JOIN timers ON timers.seq = chosen"
"""The timers with these rowids, in the order of the rowids given."""

_taken_decoder = msgspec.json.Decoder(list[tuple[str, int, str, int]])
_revisions_decoder = msgspec.json.Decoder(dict[str, int])
_sizes_decoder = msgspec.json.Decoder(dict[int, int])


class UnreadableRows(Exception):
    """A begin found rows that can't be read: rowid → reason."""

    def __init__(self, rows: dict[int, str]) -> None:
        super().__init__(f"{len(rows)} rows can't be read")
        self.rows = rows


def select(connection: Connection, source: str, bindings: object = ()) -> list[Timer]:
    """Return the timers of ``source`` (everything after ``FROM``), in its order, without unreadable ones."""
    try:
        return _timers_decoder.decode(connection.execute(f"SELECT {_TIMERS} FROM {source}", bindings).get)
    except UNREADABLE:
        return [row for row, _ in one_by_one(connection, source, bindings) if isinstance(row, Timer)]


def one_by_one(connection: Connection, source: str, bindings: object = ()) -> list[tuple[Timer | str, int]]:
    """Decode the timers of ``source`` one by one. Return each with its rowid; an unreadable one as the reason."""
    rows: list[tuple[Timer | str, int]] = []
    for text, seq in connection.execute(f"SELECT CAST({_AS_JSON} AS BLOB), seq FROM {source}", bindings).fetchall():
        try:
            rows.append((_timer_decoder.decode(text), seq))
        except UNREADABLE as error:
            rows.append((str(error), seq))
    return rows


def select_chosen(connection: Connection, seqs: Sequence[int]) -> list[Timer]:
    """Return the timers with these rowids, in the order given."""
    return select(connection, CHOSEN, (encode(seqs).decode(),)) if seqs else []


def sizes_of(connection: Connection, seqs: Sequence[int], *, unless_within: int) -> dict[int, int] | None:
    """Return the size of each of these timers; None if they have at most ``unless_within`` bytes in total."""
    chosen = (encode(seqs).decode(),)
    if (connection.execute(f"SELECT sum({BYTES}) FROM {CHOSEN}", chosen).get or 0) <= unless_within:
        return None
    return _sizes_decoder.decode(
        connection.execute(f"SELECT json_group_object(seq, {BYTES}) FROM {CHOSEN}", chosen).get
    )


def taken_by(connection: Connection, uuids: Sequence[bytes]) -> dict[bytes, tuple[int, str, int]]:
    """Return the rowid, fingerprint and size of the timers that exist."""
    row = f"json_array(hex(uuid), seq, fingerprint, {BYTES})"
    rows = _taken_decoder.decode(connection.execute(f"SELECT json_group_array({row}) FROM {_KEYS}", _keys(uuids)).get)
    return {bytes.fromhex(uuid): (seq, fingerprint, size) for uuid, seq, fingerprint, size in rows}


def _revisions(connection: Connection, uuids: Sequence[bytes]) -> dict[str, int]:
    """Return the revisions of the timers that exist."""
    sql = f"SELECT json_group_object(lower(hex(uuid)), revision) FROM {_KEYS}"
    return _revisions_decoder.decode(connection.execute(sql, _keys(uuids)).get)


_KEYS = "timers WHERE uuid IN (SELECT unhex(value) FROM json_each(?))"


def _keys(uuids: Sequence[bytes]) -> tuple[str]:
    return (encode([uuid.hex() for uuid in uuids]).decode(),)


def insert_rows(connection: Connection, timers: Sequence[Timer], first_seq: int) -> int:
    """Insert the timers whose identity is free. Return how many."""
    rows = [(seq, *new_row(timer)) for seq, timer in enumerate(timers, first_seq)]
    return _write_rows(connection, _INSERTS, rows)


def namespaces_of(connection: Connection, seqs: Sequence[int]) -> list[str]:
    """Return the namespace of each of the timers with these rowids."""
    sql = "SELECT json_group_array(namespace) FROM timers WHERE seq IN (SELECT value FROM json_each(?))"
    namespaces: list[str] = msgspec.json.decode(connection.execute(sql, (encode(seqs).decode(),)).get)
    return namespaces


def begin_rows(connection: Connection, seqs: Sequence[int], now: int) -> list[Timer]:
    """Apply ``lifecycle.begin`` to the timers with these rowids, with the versions of their shards. Return them oldest
    first. Raises ``UnreadableRows``."""
    if not seqs:
        return []
    listed = encode(seqs).decode()
    connection.execute(_BEGIN, {"now": now, "seqs": listed})
    source = "timers WHERE seq IN (SELECT value FROM json_each(?))"
    begun = select(connection, source, (listed,))
    if len(begun) != len(seqs):
        rows = one_by_one(connection, source, (listed,))
        raise UnreadableRows({seq: row for row, seq in rows if isinstance(row, str)})
    begun.sort(key=lambda timer: timer.fire_at)
    return begun


def update_rows(connection: Connection, changes: Sequence[tuple[Timer, Timer]]) -> list[bool]:
    """Replace each first timer by the second if it still has its revision. Return for each whether it had."""
    connection.execute("SAVEPOINT changes")
    if _write_changes(connection, changes) == len(changes):
        connection.execute("RELEASE changes")
        return [True] * len(changes)
    # Some had not, and the statement does not report which: read the revisions, then write only those that match.
    connection.execute("ROLLBACK TO changes; RELEASE changes")
    revisions = _revisions(connection, [before.uuid for before, _ in changes])
    fits = [revisions.pop(before.uuid.hex(), None) == before.revision for before, _ in changes]
    _write_changes(connection, [change for change, fit in zip(changes, fits, strict=True) if fit])
    return fits


def count_timers(connection: Connection, tally: Tally) -> None:
    rows = [(namespace, str(status), change) for (namespace, status, _), change in tally.items() if change]
    connection.executemany(
        "INSERT INTO tallies VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET timers = timers + excluded.timers", rows
    )


def _write_changes(connection: Connection, changes: Sequence[tuple[Timer, Timer]]) -> int:
    completions, ends, moves = [], [], []
    for before, after in changes:
        if after.status is Status.COMPLETED:
            completions.append((before.uuid, before.revision, *complete_row(after)))
        elif after.status.final:
            ends.append((before.uuid, before.revision, *end_row(after)))
        else:
            moves.append((before.uuid, before.revision, *move_row(after)))
    batches = ((_COMPLETIONS, completions), (_ENDS, ends), (_MOVES, moves))
    return sum(_write_rows(connection, statements, rows) for statements, rows in batches)


def _write_rows(connection: Connection, statements: Mapping[int, str], rows: Sequence[tuple[Any, ...]]) -> int:
    """Run the statement in batches of the prepared sizes. Return how many rows it changed."""
    before = connection.total_changes()
    for start in range(0, len(rows), _SIZES[-1]):
        some = rows[start : start + _SIZES[-1]]
        size = next(size for size in _SIZES if size >= len(some))
        bindings = list(chain.from_iterable(some))
        connection.execute(statements[size], bindings + [None] * (len(some[0]) * (size - len(some))))
    changed: int = connection.total_changes() - before
    return changed
