"""The modules to mutate, and the tests to run against their mutants: quick and effective ones first."""

from __future__ import annotations

from pathlib import Path

Stage = tuple[str, ...]
"""Arguments of pytest. Each further stage is for mutants that survived the previous one."""

_PURE: Stage = tuple(f"tests/unit/test_{name}.py" for name in ("retry", "lifecycle", "lifecycle_fields"))
_UNIT: Stage = ("tests/unit",)
_ENGINE: Stage = ("tests/engine", "tests/simulation/test_simulation.py")
_METRICS: Stage = ("tests/doors/test_paths.py",)
_API: Stage = ("tests/doors", "-k", "http_v1 or platform or overview or broker or nats_targets")
_VERBS = ("walk", "begin", "put", "record", "swap", "fence", "ownership")
_COMMON = tuple(f"tests/contract/test_{verb}.py" for verb in _VERBS)
_MEMORY: Stage = ("tests/contract", "-k", "memory")
_EMBEDDED: Stage = ("tests/contract", "-k", "(memory or sqlite) and not postgres")
_POSTGRES: tuple[Stage, ...] = (
    (*_COMMON, "-k", "postgres18"),
    # Left out are tests that read the text of a statement, and fail whatever is changed in it.
    ("tests/contract", "-k", "postgres18 and not test_audit_detects_a_planted_bug"),
)
_POSTGRES_FAULTS: Stage = (
    *("tests/contract/test_postgres_failures.py", "tests/contract/test_postgres_hints.py", "-k", "postgres18"),
)
_DOORS: Stage = ("tests/unit/test_http_doors.py",)
_HTTP_V1: Stage = ("tests/doors", "-k", "http_v1 or openapi or overview")
_PLATFORM: Stage = ("tests/doors", "-k", "platform or nats_targets")

STAGES: dict[str, tuple[Stage, ...]] = {
    "lifecycle": (_PURE, _UNIT, _API, _ENGINE),
    "retry": (_PURE,),
    "secret_rotation": (_UNIT, _API),
    "identity": (_UNIT, _API),
    "namespaces": (_UNIT, _API, _ENGINE),
    "service": (_UNIT, _API, _ENGINE),
    "engine/alarm": (_ENGINE,),
    "engine/destinations": (("tests/engine/test_destinations.py",), _ENGINE),
    "engine/dispatcher": (_ENGINE, _METRICS),
    "engine/engine": (("tests/engine/test_engine.py",), _ENGINE),
    "engine/lanes": (("tests/engine/test_lanes.py",), _ENGINE),
    "engine/ownership": (("tests/engine/test_engine.py",), _ENGINE),
    "engine/recorder": (("tests/engine/test_engine.py",), _METRICS, _ENGINE),
    "engine/watchdog": (("tests/engine/test_watchdog.py",), _ENGINE),
    "stores/fair_shares": (("tests/contract/test_lanes.py", "-k", "memory"), _EMBEDDED),
    "stores/group_commit": (("tests/unit/test_group_commit.py",),),
    "stores/memory": ((*_COMMON, "-k", "memory"), _MEMORY, ("tests/simulation/test_simulation.py",)),
    "stores/postgres/store": _POSTGRES,
    "stores/postgres/statements": _POSTGRES,
    "stores/postgres/pool": (_POSTGRES_FAULTS, *_POSTGRES),
    "stores/postgres/hints": (_POSTGRES_FAULTS, *_POSTGRES),
    "stores/sqlite/store": ((*_COMMON, "-k", "sqlite"), _EMBEDDED),
    "stores/sqlite/due": (("tests/contract/test_lanes.py", *_COMMON, "-k", "sqlite"), _EMBEDDED),
    "stores/sqlite/rows": ((*_COMMON, "-k", "sqlite"), _EMBEDDED),
    "stores/stored_destination": (_EMBEDDED,),
    "doors/http_v1": (_DOORS, _HTTP_V1),
    "doors/platform": (_DOORS, _PLATFORM),
    "doors/wire": (("tests/unit/test_wire.py",), _API),
}


def path_of(module: str) -> Path:
    return Path("src/duetime", f"{module}.py")
