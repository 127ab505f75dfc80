"""The results, as a table and as JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tests.isolation.world import Lateness, Result

_HEAD = (
    *("scenario", "store", "timers", "alone p50 / p99 / max", "beside p50 / p99 / max", "p99 bar", "noise p99"),
    *("failed", "missing", "deferred", "attempts", "row updates", "CPU", "verdict"),
)
_LEFT = (0, 1, len(_HEAD) - 1)
"""The columns of text."""


def table(results: Sequence[Result]) -> str:
    """Lateness is in milliseconds."""
    rows = [_HEAD, *map(_row, results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place in _LEFT else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _row(result: Result) -> tuple[str, ...]:
    return (
        result.scenario,
        result.store,
        f"{result.size:,}",
        _lateness(result.alone),
        _lateness(result.beside),
        f"{result.p99_bar_ms:,.0f}",
        f"{result.alone.noise_p99_ms:,.1f} / {result.beside.noise_p99_ms:,.1f}",
        f"{result.failed:,}",
        f"{result.beside.missing:,}",
        f"{result.deferred:,}",
        f"{result.attempts:,}",
        "" if result.row_updates is None else f"{result.row_updates:,}",
        f"{result.cpu_seconds:.1f} s of {result.beside_seconds:.1f} s",
        "MISSED" if result.missed else "held",
    )


def _lateness(lateness: Lateness) -> str:
    least = "≥ " if lateness.missing else ""
    return f"{least}{lateness.p50_ms:,.0f} / {lateness.p99_ms:,.0f} / {lateness.max_ms:,.0f}"


def details(result: Result) -> str:
    """The bars that were missed, one line each."""
    return "\n".join(f"MISSED {result.scenario} ({result.store}, {result.size:,}): {bar}" for bar in result.missed)


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    return {"cores": os.cpu_count(), "results": [asdict(result) for result in results]}
