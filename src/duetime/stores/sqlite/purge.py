"""Retention in SQLite: a reader finds the groups with old timers, and the writer deletes them in small batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from duetime.model import Status
from duetime.stores.byte_budget import fitting
from duetime.stores.sql.columns import encode
from duetime.stores.sql.tallies import LIVE_SLICE, Tally
from duetime.stores.sqlite.rows import BYTES, Connection, count_timers

ROWS_AT_ONCE = 500
"""How many timers one transaction deletes; all other writes wait for it."""

Group = tuple[str, Status]
"""The final timers of one namespace with one status."""

_OLD = (
    "timers.namespace = {namespace} AND timers.status = {status} AND timers.status NOT IN ('pending', 'executing') AND "
    "updated_at < :now - ifnull((SELECT retention_ms FROM namespaces WHERE name = {namespace}), :retention_ms)"
)

_groups_decoder = msgspec.json.Decoder(list[Group])
_found_decoder = msgspec.json.Decoder(list[tuple[int, int]])


class Step(Struct, frozen=True):
    """The timers that one transaction deletes."""

    groups: Sequence[Group]
    each: int
    now: int
    retention_ms: int


def old_groups(connection: Connection, now: int, retention_ms: int) -> list[Group]:
    """Return the groups that have timers older than the retention, with one index seek per group."""
    found = connection.execute(
        f"""SELECT json_group_array(json_array(namespace, status)) FROM tallies
        WHERE status IN ('completed', 'failed', 'canceled') AND timers > 0 AND EXISTS (
            SELECT 1 FROM timers WHERE {_OLD.format(namespace="tallies.namespace", status="tallies.status")}
        )""",
        {"now": now, "retention_ms": retention_ms},
    ).get
    return _groups_decoder.decode(found)


def drop_old(connection: Connection, steps: Sequence[Step]) -> list[tuple[int, list[Group]]]:
    """Run each step. Return how many timers it deleted, and the groups that may have more."""
    return [_drop(connection, step) for step in steps]


def _drop(connection: Connection, step: Step) -> tuple[int, list[Group]]:
    tally: Tally = Counter()
    left: list[Group] = []
    for namespace, status in step.groups:
        old = _OLD.format(namespace=":namespace", status=":status")
        source = f"SELECT seq, {BYTES} AS bytes FROM timers WHERE {old} ORDER BY updated_at LIMIT :most"
        bindings = {"namespace": namespace, "status": status.value, "now": step.now, "retention_ms": step.retention_ms}
        found = _found_decoder.decode(
            connection.execute(
                f"SELECT json_group_array(json_array(seq, bytes)) FROM ({source})", {**bindings, "most": step.each}
            ).get
        )
        seqs = [seq for seq, _ in found[: fitting([size for _, size in found])]]
        connection.execute("DELETE FROM timers WHERE seq IN (SELECT value FROM json_each(?))", (encode(seqs).decode(),))
        tally[namespace, status, LIVE_SLICE] -= len(seqs)
        if len(seqs) < len(found) or len(found) == step.each:
            left.append((namespace, status))
    count_timers(connection, tally)
    return -tally.total(), left
