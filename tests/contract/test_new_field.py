"""A new field of a timer needs one line in the model and a migration in each store. Tested on a copy of the program."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from duetime import model
from tests.contract.stores import STORES

SOURCE = Path(model.__file__).parent
ROOT = SOURCE.parents[1]

LINE = re.compile(r"^    attempts: tuple\[Attempt, \.\.\.\] = .*\n", re.M)
"""A field of a timer; the new ones follow it."""
FIELD = "    note: str | None = None\n    weight: int = 7\n"

TABLES = ("timers", "history")
ROWS = ("new_timer", "live_timer", "whole_row", "end_row", "move_row")
MIGRATIONS = {
    "sqlite": '"ALTER TABLE timers ADD COLUMN note TEXT; ALTER TABLE timers ADD COLUMN weight INTEGER DEFAULT 7"',
    "postgres": repr(
        "".join(f"ALTER TABLE {table} ADD COLUMN note text, ADD COLUMN weight int DEFAULT 7; " for table in TABLES)
        + "".join(f"ALTER TYPE {row} ADD ATTRIBUTE note text, ADD ATTRIBUTE weight int; " for row in ROWS)
    ),
    "mysql": repr(
        tuple(f"ALTER TABLE {table} ADD COLUMN note BLOB, ADD COLUMN weight INT DEFAULT 7" for table in TABLES)
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the program with two more fields."""
    copied = tmp_path_factory.mktemp("program") / "src"
    shutil.copytree(SOURCE, copied / "duetime", ignore=shutil.ignore_patterns("__pycache__"))
    model = copied / "duetime/model.py"
    text, count = LINE.subn(lambda line: line[0] + FIELD, model.read_text())
    assert count == 1
    model.write_text(text)
    for store, migration in MIGRATIONS.items():
        with open(copied / f"duetime/stores/{store}/schema.py", "a") as schema:
            schema.write(f"\n\nMIGRATIONS = (*MIGRATIONS, {migration})\n")
    return copied


@pytest.mark.parametrize("name", [name for name in STORES if name != "memory"])
def test_new_field_needs_only_a_line_and_a_migration(
    name: str, copy: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server = STORES[name].server
    place = str(tmp_path) if server is None else request.getfixturevalue(server).fresh()
    env = os.environ | {"PYTHONPATH": f"{copy}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "tests.contract.with_new_field", name, place]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "kept by every verb\n", done.stderr
