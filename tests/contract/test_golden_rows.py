"""What stores have written stays readable: ``golden_rows.json`` has each stored value, as it was written.

A test fails when a field, a value or a column disappears or gets another name, and when one is new and not in the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

import apsw
import msgspec
import pytest

from duetime.model import (
    Attempt,
    BodyFormat,
    Definition,
    HttpTarget,
    Namespace,
    NatsTarget,
    OutcomeKind,
    ResponseProtocol,
    RetryPolicy,
    Secret,
    Status,
    Timer,
)
from duetime.store import About
from duetime.stores.postgres_namespaces import namespace_of, namespace_row
from tests.clocks import ManualClock
from tests.contract.stores import sqlite

GOLDEN = json.loads((Path(__file__).parent / "golden_rows.json").read_text())
TYPES: dict[str, Any] = {
    "definition": Definition,
    "attempts": tuple[Attempt, ...],
    "namespace": Namespace,
    "instance": About,
}


@pytest.mark.parametrize("kind", TYPES)
def test_what_was_written_is_read_and_written_the_same(kind: str) -> None:
    for text in GOLDEN[kind]:
        assert msgspec.json.encode(msgspec.json.decode(text, type=TYPES[kind])).decode() == text


def test_no_status_has_another_name() -> None:
    assert {status.value for status in Status} == set(GOLDEN["status"])


def test_every_value_is_there() -> None:
    definitions = [msgspec.json.decode(text, type=Definition) for text in GOLDEN["definition"]]
    assert {d.body for d in definitions} == set(BodyFormat)
    assert {d.protocol for d in definitions} == set(ResponseProtocol)
    assert {type(d.target) for d in definitions} == set(get_args(get_type_hints(Definition)["target"]))
    attempts = [a for text in GOLDEN["attempts"] for a in msgspec.json.decode(text, type=tuple[Attempt, ...])]
    assert {a.outcome for a in attempts} == set(OutcomeKind)


def test_every_field_is_there() -> None:
    """Each at least once with a value that is not what it would be if it were left out."""
    written = [json.loads(text) for text in GOLDEN["definition"]]
    for type_, values in (
        (Definition, written),
        (RetryPolicy, [d["retry"] for d in written if "retry" in d]),
        (HttpTarget, [d["target"] for d in written if d["target"]["type"] == "http"]),
        (NatsTarget, [d["target"] for d in written if d["target"]["type"] == "nats"]),
        (Namespace, [json.loads(text) for text in GOLDEN["namespace"]]),
        (Secret, [s for text in GOLDEN["namespace"] for s in json.loads(text)["secrets"]]),
        (About, [json.loads(text) for text in GOLDEN["instance"]]),
    ):
        assert set(type_.__struct_fields__) == {name for value in values for name in value} - {"type"}, type_
    attempts = [a for text in GOLDEN["attempts"] for a in json.loads(text)]
    assert {len(a) for a in attempts} == {len(Attempt.__struct_fields__)}


def test_the_columns_of_a_file(runner, tmp_path: Path, clock: ManualClock) -> None:
    runner.run(runner.run(sqlite(tmp_path, clock)).close())
    connection = apsw.Connection(str(tmp_path / "duetime.db"))
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    found = {table: [row[1] for row in connection.execute(f"PRAGMA table_info({table})")] for table in tables}
    connection.close()
    _assert_same(found, GOLDEN["columns"]["sqlite"])


async def test_the_columns_of_a_server(opened, database: str) -> None:
    store = await opened(database)
    rows = await store._pool.read(
        "SELECT table_name::text, column_name::text FROM information_schema.columns WHERE table_schema = 'duetime' "
        "AND table_name NOT LIKE 'history\\_%'"
    )
    found: dict[str, list[str]] = {}
    for table, column in rows:
        found.setdefault(table, []).append(column)
    _assert_same(found, GOLDEN["columns"]["postgres"])


def _assert_same(found: dict[str, list[str]], golden: dict[str, list[str]]) -> None:
    assert {table: sorted(columns) for table, columns in found.items()} == {
        table: sorted(columns) for table, columns in golden.items()
    }
    assert set(Timer.__struct_fields__) <= set(golden["timers"])


def test_a_namespace_on_a_server_is_what_the_first_release_wrote_and_columns() -> None:
    for text in GOLDEN["namespace"]:
        namespace = msgspec.json.decode(text, type=Namespace)
        name, paused, definition, *columns = namespace_row(namespace)
        assert (name, paused) == (namespace.name, namespace.paused)
        assert list(json.loads(definition)) == ["name", "shards", "created_at", "retention_ms", "paused", "secrets"]
        assert namespace_of(definition, *columns) == namespace


def test_fields_that_nobody_knows_are_ignored() -> None:
    """A newer program may add fields: this one reads the rest."""
    for kind in ("definition", "namespace", "instance"):
        for text in GOLDEN[kind]:
            newer = json.dumps(json.loads(text) | {"of_a_newer_program": {"a": [1]}})
            assert msgspec.json.encode(msgspec.json.decode(newer, type=TYPES[kind])) is not None
