"""The turns of a run: their number and order, and failures."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as command
from bench.machine import Machine
from bench.results import Failure, Results
from bench.rounds import Bench, Sample


def run(
    monkeypatch: pytest.MonkeyPatch,
    turns: dict[str, list[str]],
    *,
    rounds: int | None = None,
    full: bool = False,
    **samples: Sample,
) -> tuple[list[str], Results]:
    """Run fake measurements; returns the order of their turns, and the results."""
    had: list[str] = []

    def turn(measurement: str, part: str) -> command.Turn:
        async def measured() -> Sample:
            had.append(part)
            return samples.get(part, {"per_second": 1.0})

        return command.Turn(measurement, part, measured)

    made = [turn(name, part) for name, parts in turns.items() for part in parts]
    monkeypatch.setattr(command, "_turns", lambda bench, names: made)
    results = Results("2030-01-02T03:04:05+00:00", "make bench", True, "a machine", {})
    receiver: Any = None
    bench = Bench(Path(), receiver, None, [], quick=True, started=time.monotonic())
    options = argparse.Namespace(rounds=rounds, full=full, json=None)
    asyncio.run(command._run(bench, options, list(turns), results, Machine()))
    return had, results


def test_every_second_round_is_in_reverse_order(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = {"herd": ["herd"], "pending": ["few", "many"], "peers": ["pg-boss", "Celery"]}
    had, results = run(monkeypatch, turns, rounds=2)
    # A peer that decides no bar is measured once.
    assert had == ["herd", "few", "many", "pg-boss", "Celery", "pg-boss", "many", "few", "herd"]
    assert len(results.samples["pending"]["few"]) == 2 and not results.failures


def test_long_measurements_have_fewer_rounds_in_a_full_run(monkeypatch: pytest.MonkeyPatch) -> None:
    had, _ = run(monkeypatch, {"herd": ["herd"], "pending": ["many"], "peers": ["Celery"]}, full=True)
    assert [had.count(part) for part in ("herd", "many", "Celery")] == [command.ROUNDS, command.ROUNDS_LONG, 1]


def test_partial_failure_keeps_its_figures_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"singles_per_second": 5.0, "error": "only in part: it ended early"}
    _, results = run(monkeypatch, {"peers": ["Celery", "Temporal"]}, Celery=part, Temporal={"error": ""})
    assert results.of("peers").median("Celery", "singles_per_second") == 5.0
    assert results.failures == [Failure("peers", "Celery", "only in part: it ended early")]
