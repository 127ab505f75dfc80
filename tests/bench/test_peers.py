"""The parts of the peers' measurement that run without them: orders to schedule, the table, what is missing."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench import peers
from bench.peers import PEERS, Figures, stands
from bench.peers.__main__ import HEADINGS, row, table

ORDER = {"url": "http://127.0.0.1:1/hook", "count": None, "seconds": None, "due": None, "lead_ms": 1000, "step_ms": 0}


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """What the Python programs share: they run in an environment of their own, so it is loaded from its file."""
    spec = importlib.util.spec_from_file_location("program", stands.PROGRAMS / "program.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def order(program: ModuleType, **ask: Any) -> Any:
    return program.Order({**ORDER, "batch": 1, "granted": None, **ask})


def test_an_order_ends_with_its_count(program: ModuleType) -> None:
    some = order(program, count=7, batch=5, due=1_000)
    assert [len(some.take()), len(some.take()), some.take()] == [5, 2, None]
    assert some.done()["count"] == 7


def test_timers_of_an_order_are_due_in_steps(program: ModuleType) -> None:
    some = order(program, count=3, due=1_000, step_ms=10)
    assert [some.take()[0]["payload"]["due"] for _ in range(3)] == [1_000, 1_010, 1_020]


def test_an_order_waits_for_what_is_granted(program: ModuleType) -> None:
    some = order(program, granted=1)
    assert len(some.take()) == 1
    assert some.take() == []
    some.granted = 2
    assert len(some.take()) == 1


def test_the_receiver_finds_when_a_timer_was_due(program: ModuleType) -> None:
    [timer] = order(program, count=1, due=1_700_000_000_000).take()
    assert b'"due":1700000000000,' in program.body_of(timer)


def test_every_peer_has_its_program() -> None:
    assert {stands.PROGRAMS / peer.program for peer in PEERS.values()} == set(stands.PROGRAMS.glob("with_*"))


def test_the_table_shows_what_was_measured_and_what_was_not() -> None:
    late = [float(percent) for percent in range(101)]
    some = Figures("some", "1.2", singles_per_second=1234.5, herd_lateness_ms=late, cpu_ms_per_timer=0.256)
    lines = table([HEADINGS, row(some), row(Figures("none"))]).splitlines()
    assert lines[1].split() == ["some", "1.2", "1,234", "–", "–", "50", "99", "–", "–", "–", "0.26"]
    assert lines[2].split() == ["none", *"–" * 9]
    assert len({len(line) for line in lines}) == 1


def test_it_says_how_to_get_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "VENV", tmp_path)
    assert peers.missing() == "The peers are not installed: make bench sets them up"


def test_the_time_of_a_process_counts() -> None:
    assert stands.cpu_seconds([os.getpid()]) > 0
