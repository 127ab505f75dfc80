"""Timers as rows of SQLite and back: many in one statement, straight into the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec

from duetime.lifecycle import ATTEMPT_GRACE_MS
from duetime.model import Status, Timer
from duetime.stores.unreadable import UNREADABLE

Connection = Any
Tally = Counter[tuple[str, Status]]
"""By how much the number of timers of a namespace with a status changes."""

# What a record changes, and what it changes besides when the timer is not final. A column that a statement sets costs
# its indexes even if it stays what it was. Nearly every record completes its timer, and all that changes then follows
# from two values: the fewer there are to bind, the sooner the event loop has the interpreter lock back.
_COMPLETE = ("updated_at", "attempts")
_COMPLETED = {
    **{"revision": "was + 1", "status": "'completed'", "last_error": "NULL", "executed_at": "new.updated_at"},
    **{"deadline_at": "NULL", "version": "0"},
}
_END = (
    *("updated_at", "revision", "status", "attempt", "failures", "lost", "last_error"),
    *("executed_at", "deadline_at", "version", "attempts"),
)
_MOVE = ("firing", "execute_at", "fire_at", "started_at")
STATE = _END + _MOVE

# What a put writes, and what follows from it or is the same for every timer that nothing has happened to.
_NEW = (
    *("seq", "uuid", "definition", "timeout_ms", "namespace", "id", "shard", "fingerprint", "correlation_id"),
    *("created_at", "execute_at", "revision", "lane"),
)
_FIRST = {
    **{"updated_at": "created_at", "fire_at": "execute_at", "firing": "revision", "status": "'pending'"},
    **{"attempt": "0", "failures": "0", "lost": "0", "version": "0", "attempts": "'[]'"},
}

# Rows per statement. What does not fill one is filled up with rows of nulls, which it skips: each statement gives the
# interpreter lock away, and to get it back from a busy event loop takes longer than a hundred nulls.
_SIZES = (1, 4, 16, 64, 128, 256)


# A timer as one JSON text, which msgspec reads straight into the model. Put together by hand and not by SQLite's JSON
# functions, which would drop the white space of a payload.
_COLUMNS = Timer.__struct_fields__
_TEXTS = frozenset({"namespace", "id", "fingerprint", "correlation_id", "status", "last_error"})
_VALUES = [f"json_quote({c})" if c in _TEXTS else f"ifnull({c}, 'null')" for c in _COLUMNS]
_AS_JSON = f"format('[{','.join(['%s'] * len(_COLUMNS))}]', {', '.join(_VALUES)})"

_timers_decoder = msgspec.json.Decoder(list[Timer])
_timer_decoder = msgspec.json.Decoder(Timer)
names = msgspec.json.Decoder(set[str]).decode
encode = msgspec.json.Encoder().encode


def _placeholders(width: int, rows: int) -> str:
    return ", ".join(["(" + ", ".join("?" * width) + ")"] * rows)


_INSERTS = {
    n: f"WITH new ({', '.join(_NEW)}) AS (VALUES {_placeholders(len(_NEW), n)}) "
    f"INSERT INTO timers ({', '.join((*_NEW, *_FIRST))}) SELECT *, {', '.join(_FIRST.values())} FROM new "
    "WHERE uuid IS NOT NULL ON CONFLICT (uuid) DO NOTHING"
    for n in _SIZES
}


def _records(columns: Sequence[str], besides: dict[str, str]) -> dict[int, str]:
    changes = ", ".join(f"{c} = {value}" for c, value in ({c: f"new.{c}" for c in columns} | besides).items())
    return {
        n: f"WITH new (uuid, was, {', '.join(columns)}) AS (VALUES {_placeholders(2 + len(columns), n)}) "
        f"UPDATE timers SET {changes} FROM new WHERE timers.uuid = new.uuid AND timers.revision = new.was"
        for n in _SIZES
    }


_COMPLETIONS = _records(_COMPLETE, _COMPLETED)
_ENDS = _records(_END, {})
_MOVES = _records(STATE, {})
_BEGIN = f"""
    UPDATE timers SET
        status = 'executing',
        attempt = attempt + 1,
        lost = lost + (status = 'executing'),
        started_at = ifnull(started_at, :now),
        deadline_at = :now + timeout_ms + {ATTEMPT_GRACE_MS},
        version = (SELECT version FROM shards WHERE shards.shard = timers.shard),
        updated_at = :now,
        revision = revision + 1
    WHERE seq IN (SELECT value FROM json_each(:seqs))
"""


def _attempts(timer: Timer) -> str:
    return encode(timer.attempts).decode()


_ended, _moved = attrgetter(*_END[:-1]), attrgetter(*_MOVE)


def _end(timer: Timer) -> tuple[Any, ...]:
    return (*_ended(timer), _attempts(timer))


def state(timer: Timer) -> tuple[Any, ...]:
    return (*_end(timer), *_moved(timer))


_TIMERS = f"'[' || ifnull(group_concat({_AS_JSON}, ','), '') || ']'"
BYTES = "octet_length(definition) + octet_length(attempts)"
"""How large a timer is; SQLite knows it without reading the two."""
CHOSEN = "(SELECT value AS chosen FROM json_each(?)) CROSS JOIN timers ON timers.seq = chosen"
"""The timers with these rowids, in their order."""

_taken_decoder = msgspec.json.Decoder(list[tuple[str, int, str, int]])
_revisions_decoder = msgspec.json.Decoder(dict[str, int])
_sizes_decoder = msgspec.json.Decoder(dict[int, int])


class UnreadableRows(Exception):
    """A begin met rows that it can't read: by rowid, with the reason."""

    def __init__(self, rows: dict[int, str]) -> None:
        super().__init__(f"{len(rows)} rows can't be read")
        self.rows = rows


def select(connection: Connection, source: str, bindings: object = ()) -> list[Timer]:
    """The timers that ``source`` (everything after ``FROM``) names, in its order, without those that can't be read."""
    try:
        return _timers_decoder.decode(connection.execute(f"SELECT {_TIMERS} FROM {source}", bindings).get)
    except UNREADABLE:
        return [row for row, _ in one_by_one(connection, source, bindings) if isinstance(row, Timer)]


def one_by_one(connection: Connection, source: str, bindings: object = ()) -> list[tuple[Timer | str, int]]:
    """The same, each decoded by itself, with its rowid, and the reason in place of those that can't be read."""
    rows: list[tuple[Timer | str, int]] = []
    for text, seq in connection.execute(f"SELECT CAST({_AS_JSON} AS BLOB), seq FROM {source}", bindings).fetchall():
        try:
            rows.append((_timer_decoder.decode(text), seq))
        except UNREADABLE as error:
            rows.append((str(error), seq))
    return rows


def select_chosen(connection: Connection, seqs: Sequence[int]) -> list[Timer]:
    """The timers with these rowids, in their order."""
    return select(connection, CHOSEN, (encode(seqs).decode(),)) if seqs else []


def sizes_of(connection: Connection, seqs: Sequence[int], *, unless_within: int) -> dict[int, int] | None:
    """How large each of these timers is; None when they are within so many bytes together."""
    chosen = (encode(seqs).decode(),)
    if (connection.execute(f"SELECT sum({BYTES}) FROM {CHOSEN}", chosen).get or 0) <= unless_within:
        return None
    return _sizes_decoder.decode(
        connection.execute(f"SELECT json_group_object(seq, {BYTES}) FROM {CHOSEN}", chosen).get
    )


def taken_by(connection: Connection, uuids: Sequence[bytes]) -> dict[bytes, tuple[int, str, int]]:
    """The rowid, fingerprint and size of those of the timers that there are."""
    row = f"json_array(hex(uuid), seq, fingerprint, {BYTES})"
    rows = _taken_decoder.decode(connection.execute(f"SELECT json_group_array({row}) FROM {_KEYS}", _keys(uuids)).get)
    return {bytes.fromhex(uuid): (seq, fingerprint, size) for uuid, seq, fingerprint, size in rows}


def _revisions(connection: Connection, uuids: Sequence[bytes]) -> dict[str, int]:
    """The revision of those of the timers that there are."""
    sql = f"SELECT json_group_object(lower(hex(uuid)), revision) FROM {_KEYS}"
    return _revisions_decoder.decode(connection.execute(sql, _keys(uuids)).get)


_KEYS = "timers WHERE uuid IN (SELECT unhex(value) FROM json_each(?))"


def _keys(uuids: Sequence[bytes]) -> tuple[str]:
    return (encode([uuid.hex() for uuid in uuids]).decode(),)


def insert_rows(connection: Connection, timers: Sequence[Timer], first_seq: int) -> int:
    """Write new timers where their place is free; how many were."""
    return _write_rows(
        connection,
        _INSERTS,
        [
            (
                *(seq, timer.uuid, encode(timer.definition).decode(), timer.definition.timeout_ms),
                *(timer.namespace, timer.id, timer.shard, timer.fingerprint, timer.correlation_id),
                *(timer.created_at, timer.execute_at, timer.revision, timer.lane),
            )
            for seq, timer in enumerate(timers, first_seq)
        ],
    )


def namespaces_of(connection: Connection, seqs: Sequence[int]) -> list[str]:
    """The namespace of each of the timers with these rowids."""
    sql = "SELECT json_group_array(namespace) FROM timers WHERE seq IN (SELECT value FROM json_each(?))"
    namespaces: list[str] = msgspec.json.decode(connection.execute(sql, (encode(seqs).decode(),)).get)
    return namespaces


def begin_rows(connection: Connection, seqs: Sequence[int], now: int) -> list[Timer]:
    """``lifecycle.begin`` of the timers with these rowids, at the versions of their shards; oldest first. Raises
    ``UnreadableRows``."""
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
    """Write the state of each second timer over the first where that is still at its revision; say which were."""
    connection.execute("SAVEPOINT changes")
    if _write_changes(connection, changes) == len(changes):
        connection.execute("RELEASE changes")
        return [True] * len(changes)
    # Some were not, and the statement does not say which: look first, then write only what fits.
    connection.execute("ROLLBACK TO changes; RELEASE changes")
    revisions = _revisions(connection, [before.uuid for before, _ in changes])
    fits = [revisions.pop(before.uuid.hex(), None) == before.revision for before, _ in changes]
    _write_changes(connection, [change for change, fit in zip(changes, fits, strict=True) if fit])
    return fits


def count_timers(connection: Connection, tally: Tally) -> None:
    rows = [(namespace, status.value, change) for (namespace, status), change in tally.items() if change]
    connection.executemany(
        "INSERT INTO tallies VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET timers = timers + excluded.timers", rows
    )


def _write_changes(connection: Connection, changes: Sequence[tuple[Timer, Timer]]) -> int:
    completions, ends, moves = [], [], []
    for before, after in changes:
        if after.status is Status.COMPLETED:
            completions.append((before.uuid, before.revision, after.updated_at, _attempts(after)))
        elif after.status.final:
            ends.append((before.uuid, before.revision, *_end(after)))
        else:
            moves.append((before.uuid, before.revision, *state(after)))
    batches = ((_COMPLETIONS, completions), (_ENDS, ends), (_MOVES, moves))
    return sum(_write_rows(connection, statements, rows) for statements, rows in batches)


def _write_rows(connection: Connection, statements: Mapping[int, str], rows: Sequence[tuple[Any, ...]]) -> int:
    """Run the statement for as many rows at a time as it has a text for; how many rows it changed."""
    before = connection.total_changes()
    for start in range(0, len(rows), _SIZES[-1]):
        some = rows[start : start + _SIZES[-1]]
        size = next(size for size in _SIZES if size >= len(some))
        bindings = list(chain.from_iterable(some))
        connection.execute(statements[size], bindings + [None] * (len(some[0]) * (size - len(some))))
    changed: int = connection.total_changes() - before
    return changed
