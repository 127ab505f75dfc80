"""What the bench takes from the service: its modules import, and its own inserts write what a put writes."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import bench
from bench import pgbench
from bench.timers import now_ms, timer
from duetime.stores.sql.columns import NEW

NOT_OURS = {"bench.asgi", "bench.plots"}
"""These run in the environment of the peers."""
MODULES = [module.name for module in pkgutil.iter_modules(bench.__path__, "bench.")]


@pytest.mark.parametrize("name", sorted({*MODULES} - NOT_OURS))
def test_every_module_imports(name: str) -> None:
    importlib.import_module(name)


def test_pgbench_writes_every_column_of_a_new_timer() -> None:
    row = pgbench.row(timer("http://127.0.0.1/hook", now_ms()))
    assert tuple(row) == NEW
