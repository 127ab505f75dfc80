"""The shape of the house: imports point one way, one file reads the clock, each driver lives in one room.

Each test is about all modules and lists those that break its rule.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import duetime

ROOTS = [Path(folder) for folder in duetime.__path__]
"""The two distributions: the server and the client."""
MODULES = {path: ast.parse(path.read_text()) for root in ROOTS for path in sorted(root.rglob("*.py"))}

# From the inside out: a module may import from its own layer and from those before it.
LAYERS = [
    ["errors", "urls", "targets", "instants", "version"],
    ["model"],
    [
        "timetext",
        "retry",
        "sharding",
        "lifecycle",
        "secret_rotation",
        "identity",
        "clock",
        "store",
        "broker",
        "deliverer",
        "telemetry",
        "batched_writes",
        "logs",
        "overdue",
    ],
    ["descriptors", "databases"],
    ["settings"],
    ["engine"],
    ["namespaces", "service", "activity", "worker_metrics"],
    ["stores", "brokers", "deliverers"],
    ["doors", "workers"],
    ["node"],
    ["client"],  # stands alone; the command line talks to a server through it
    ["commands"],
    ["cli"],
    ["__main__"],
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

# Where each package from outside may be imported.
ROOMS = {
    "apsw": {"stores/sqlite/file.py"},
    "asyncmy": {"stores/mysql/pool.py"},
    "asyncpg": {"stores/postgres/pool.py"},
    "cassandra": {"stores/cassandra/driver.py"},
    "httptools": {"deliverers/connection.py", "doors/connection.py"},
    "nats": {"brokers/nats.py"},
    "prometheus_client": {"telemetry.py"},
    "uvloop": {"cli.py"},
}
# What a folder or module must not import, although its layer may.
FORBIDDEN = {
    "doors/": ("duetime.stores", "duetime.deliverers", "duetime.brokers"),
    "service.py": ("duetime.secret_rotation",),  # secrets belong to namespaces
    "namespaces.py": ("duetime.lifecycle", "duetime.deliverer", "duetime.service"),
}
# Packages from outside that every module may import.
EVERYWHERE = {"msgspec"}


def room(path: Path) -> str:
    [root] = [root for root in ROOTS if path.is_relative_to(root)]
    return path.relative_to(root).as_posix()


def part(path: Path) -> str:
    return room(path).partition("/")[0].removesuffix(".py")


def imports() -> Iterator[tuple[Path, str]]:
    """Each module with each name that it imports."""
    for path, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from ((path, f"{node.module}.{alias.name}") for alias in node.names)


IMPORTS = list(imports())


def test_modules_are_found() -> None:
    assert {"model.py", "stores/sqlite/store.py", "client/calls.py"} <= set(map(room, MODULES)) and len(IMPORTS) > len(
        MODULES
    )


def test_forbidden_imports_are_absent() -> None:
    assert not [
        f"{room(path)} imports {name}"
        for place, others in FORBIDDEN.items()
        for path, name in IMPORTS
        if room(path).startswith(place) and name.startswith(others)
    ]


def test_openapi_generator_is_independent_of_the_apis() -> None:
    ours = [name for path, name in IMPORTS if room(path) == "doors/openapi.py" and name.startswith("duetime.")]
    assert ours and all(name.startswith(("duetime.doors.operation.", "duetime.doors.examples.")) for name in ours)


def test_every_package_has_a_layer() -> None:
    assert {part(path) for path in MODULES} <= RANK.keys()


def test_imports_point_inwards() -> None:
    assert not [
        f"{room(path)} imports {name}, which is further out"
        for path, name in IMPORTS
        if name.startswith("duetime.") and RANK.get(name.split(".")[1], 0) > RANK[part(path)]
    ]


def test_client_does_not_import_the_server() -> None:
    assert not [
        f"{room(path)} imports {name}"
        for path, name in IMPORTS
        if part(path) == "client" and name.startswith("duetime.") and not name.startswith("duetime.client.")
    ]


def test_external_packages_are_imported_only_where_listed() -> None:
    ours = sys.stdlib_module_names | EVERYWHERE | {"duetime"}
    assert not [
        f"{room(path)} imports {name}"
        for path, name in IMPORTS
        if (top := name.split(".")[0]) not in ours and room(path) not in ROOMS.get(top, set())
    ]


def test_only_the_clock_reads_a_clock() -> None:
    readings = ("time.time(", "time.time_ns", "time.monotonic", "perf_counter", "datetime.now", "utcnow")
    assert not [
        f"{room(path)} reads a clock: {reading}"
        for path in MODULES
        for reading in readings
        if room(path) not in ("clock.py", "client/clock.py") and reading in path.read_text()
    ]


def test_every_module_has_a_docstring() -> None:
    assert not [
        f"{room(path)} has no docstring"
        for path, tree in MODULES.items()
        if path.stat().st_size and not ast.get_docstring(tree)
    ]


def test_no_module_has_more_than_600_lines() -> None:
    assert not [room(path) for path in MODULES if len(path.read_text().splitlines()) > 600]
