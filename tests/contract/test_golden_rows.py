"""Stored data stays readable: ``golden_rows.json`` contains every stored value in its stored form.

A test fails if a field, a value or a column is removed or renamed, or if a new one is missing in the file.
"""

from __future__ import annotations

import asyncio
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
from duetime.stores.postgres.namespaces import namespace_of, namespace_row
from tests.clocks import ManualClock
from tests.contract.stores import Opened, sqlite

GOLDEN = json.loads((Path(__file__).parent / "golden_rows.json").read_text())
TYPES: dict[str, Any] = {
    "definition": Definition,
    "attempts": tuple[Attempt, ...],
    "namespace": Namespace,
    "instance": About,
}


@pytest.mark.parametrize("kind", TYPES)
def test_stored_value_is_read_and_rewritten_unchanged(kind: str) -> None:
    for text in GOLDEN[kind]:
        assert msgspec.json.encode(msgspec.json.decode(text, type=TYPES[kind])).decode() == text


def test_status_names_are_unchanged() -> None:
    assert {status.value for status in Status} == set(GOLDEN["status"])


def test_golden_rows_contain_every_enum_value() -> None:
    definitions = [msgspec.json.decode(text, type=Definition) for text in GOLDEN["definition"]]
    assert {d.body for d in definitions} == set(BodyFormat)
    assert {d.protocol for d in definitions} == set(ResponseProtocol)
    assert {type(d.target) for d in definitions} == set(get_args(get_type_hints(Definition)["target"]))
    attempts = [a for text in GOLDEN["attempts"] for a in msgspec.json.decode(text, type=tuple[Attempt, ...])]
    assert {a.outcome for a in attempts} == set(OutcomeKind)


def test_golden_rows_contain_every_field() -> None:
    """Each field occurs at least once with a value that differs from its default."""
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


def test_columns_of_the_sqlite_tables_are_unchanged(runner: asyncio.Runner, tmp_path: Path, clock: ManualClock) -> None:
    runner.run(runner.run(sqlite(tmp_path, clock)).close())
    connection = apsw.Connection(str(tmp_path / "duetime.db"))
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    found = {table: [row[1] for row in connection.execute(f"PRAGMA table_info({table})")] for table in tables}
    connection.close()
    _assert_same(found, GOLDEN["columns"]["sqlite"])


async def test_columns_of_the_server_tables_are_unchanged(opened: Opened, database: str) -> None:
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


def test_server_namespace_is_the_first_releases_document_plus_columns() -> None:
    for text in GOLDEN["namespace"]:
        namespace = msgspec.json.decode(text, type=Namespace)
        name, paused, definition, *columns = namespace_row(namespace)
        assert (name, paused) == (namespace.name, namespace.paused)
        assert list(json.loads(definition)) == ["name", "shards", "created_at", "retention_ms", "paused", "secrets"]
        assert namespace_of(definition, *columns) == namespace


def test_unknown_fields_are_ignored() -> None:
    """A newer version may add fields; this one reads the others."""
    for kind in ("definition", "namespace", "instance"):
        for text in GOLDEN[kind]:
            newer = json.dumps(json.loads(text) | {"of_a_newer_program": {"a": [1]}})
            assert msgspec.json.encode(msgspec.json.decode(newer, type=TYPES[kind])) is not None
