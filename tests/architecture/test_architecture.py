"""The shape of the house: imports point one way, one file reads the clock, each driver lives in one room."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import duetime

ROOT = Path(duetime.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

# From the inside out: a module may import from its own layer and from those before it.
LAYERS = [
    ["errors", "urls"],
    ["model"],
    [
        "timetext",
        "retry",
        "sharding",
        "lifecycle",
        "rotation",
        "identity",
        "clock",
        "store",
        "broker",
        "deliverer",
        "telemetry",
        "writing",
        "logs",
    ],
    ["client", "descriptors"],
    ["settings"],
    ["engine"],
    ["service", "activity", "siblings"],
    ["stores", "brokers", "deliverers"],
    ["doors", "workers"],
    ["node"],
    ["commands"],
    ["cli"],
    ["__main__"],
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

# Where each package from outside may be imported.
ROOMS = {
    "apsw": {"stores/sqlite_file.py"},
    "asyncpg": {"stores/postgres_pool.py"},
    "httptools": {"deliverers/connection.py", "doors/connection.py"},
    "nats": {"brokers/nats.py"},
    "prometheus_client": {"telemetry.py"},
    "uvloop": {"cli.py"},
}
# Data has one vocabulary everywhere.
EVERYWHERE = {"msgspec"}


def room(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("path", MODULES, ids=room)
def test_imports_point_inwards(path: Path) -> None:
    if part(path) == "__init__":
        return
    rank = RANK[part(path)]
    for name in imported(path):
        parts = name.split(".")
        if part(path) == "client" and parts[0] == "duetime":
            # The client is for programs that have no service in them.
            assert parts[1] in ("client", "clock", "timetext", "errors", "model", "__version__"), (
                f"{room(path)} imports {name}"
            )
        if parts[0] == "duetime" and len(parts) > 1 and parts[1] in RANK:
            assert RANK[parts[1]] <= rank, f"{room(path)} imports {name}, which is further out"


@pytest.mark.parametrize("path", MODULES, ids=room)
def test_doors_never_see_a_store(path: Path) -> None:
    if part(path) == "doors":
        assert not [name for name in imported(path) if name.startswith("duetime.stores")]


@pytest.mark.parametrize("path", MODULES, ids=room)
def test_each_package_from_outside_has_one_room(path: Path) -> None:
    import sys

    for name in imported(path):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names or top in EVERYWHERE | {"duetime", "__future__"}:
            continue
        assert room(path) in ROOMS.get(top, set()), f"{room(path)} imports {top}"


@pytest.mark.parametrize("path", MODULES, ids=room)
def test_only_the_clock_reads_a_clock(path: Path) -> None:
    if room(path) == "clock.py":
        return
    text = path.read_text()
    for reading in ("time.time(", "time.time_ns", "time.monotonic", "perf_counter", "datetime.now", "utcnow"):
        assert reading not in text, f"{room(path)} reads a clock: {reading}"


@pytest.mark.parametrize("path", MODULES, ids=room)
def test_every_module_opens_with_what_it_owns(path: Path) -> None:
    if path.stat().st_size:
        assert ast.get_docstring(ast.parse(path.read_text())), f"{room(path)} has no docstring"


@pytest.mark.parametrize("path", MODULES, ids=room)
def test_no_module_is_two(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600
