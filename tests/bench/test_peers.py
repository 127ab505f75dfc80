"""The parts of the peers' benchmark that run without the peers: orders to schedule timers, the table, errors."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench import against, herd, peers
from bench.peers import PEERS, Figures, stands
from bench.peers.__main__ import HEADINGS, row, table
from bench.processes import BenchError

ORDER = {"url": "http://127.0.0.1:1/hook", "count": None, "seconds": None, "due": None, "lead_ms": 1000, "step_ms": 0}


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """The module that the Python programs share, loaded from its file because they run in their own environment."""
    spec = importlib.util.spec_from_file_location("program", stands.PROGRAMS / "program.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def order(program: ModuleType, **ask: Any) -> Any:
    return program.Order({**ORDER, "batch": 1, "granted": None, **ask})


def test_order_ends_with_its_count(program: ModuleType) -> None:
    some = order(program, count=7, batch=5, due=1_000)
    assert [len(some.take()), len(some.take()), some.take()] == [5, 2, None]
    assert some.done()["count"] == 7


def test_timers_of_an_order_are_due_in_steps(program: ModuleType) -> None:
    some = order(program, count=3, due=1_000, step_ms=10)
    assert [some.take()[0]["payload"]["due"] for _ in range(3)] == [1_000, 1_010, 1_020]


def test_order_creates_no_more_timers_than_granted(program: ModuleType) -> None:
    some = order(program, granted=1)
    assert len(some.take()) == 1
    assert some.take() == []
    some.granted = 2
    assert len(some.take()) == 1


def test_body_contains_the_due_time(program: ModuleType) -> None:
    [timer] = order(program, count=1, due=1_700_000_000_000).take()
    assert b'"due":1700000000000,' in program.body_of(timer)


def test_every_peer_has_a_program() -> None:
    assert {stands.PROGRAMS / peer.program for peer in PEERS.values()} == set(stands.PROGRAMS.glob("with_*"))


def test_table_shows_a_dash_for_missing_figures() -> None:
    late = [float(percent) for percent in range(101)]
    some = Figures("some", "1.2", singles_per_second=1234.5, herd_lateness_ms=late, cpu_ms_per_timer=0.256)
    lines = table([HEADINGS, row(some), row(Figures("none"))]).splitlines()
    assert lines[1].split() == ["some", "1.2", "1,234", "–", "–", "–", "50", "99", "–", "–", "–", "–", "0.26"]
    assert lines[2].split() == ["none", *"–" * 11]
    assert len({len(line) for line in lines}) == 1


def test_peers_that_decide_the_bars_get_all_timers_in_a_quick_run() -> None:
    given = {name: peer.herd(herd.SMALL, quick=True) for name, peer in PEERS.items()}
    assert {name for name, count in given.items() if count == herd.SMALL} == {"graphile-worker", "pg-boss"}
    assert (given["Celery"], given["Temporal"]) == (1_000, 500)
    in_full = {name: peer.herd(herd.SMALL, quick=False) for name, peer in PEERS.items()}
    assert in_full == dict.fromkeys(PEERS, herd.SMALL) | {"Temporal": 500}


def test_figures_of_a_peer_that_failed_are_kept_in_part() -> None:
    sample = against.sample(Figures("some", "1.2", singles_per_second=1.0, error="it ended early"))
    assert (sample["singles_per_second"], sample["herd_per_second"]) == (1.0, None)
    assert sample["error"] == "only in part: it ended early" and "p50_ms" not in sample
    with pytest.raises(BenchError, match="it ended early"):
        against.sample(Figures("some", error="it ended early"))


def test_failure_keeps_the_earlier_figures_of_a_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def half(peer: object, figures: Figures, *rest: object) -> None:
        figures.singles_per_second = 1.0
        raise ValueError("nobody foresaw this")

    monkeypatch.setattr(peers, "_measure", half)
    receiver: Any = None
    figures = asyncio.run(peers.measure("pg-boss", directory=tmp_path, receiver=receiver, say=print))
    assert (figures.singles_per_second, figures.error) == (1.0, "ValueError: nobody foresaw this")


def test_error_names_the_command_that_installs_the_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peers, "VENV", tmp_path)
    assert peers.missing() == "The peers are not installed: make bench sets them up"


def test_cpu_seconds_of_a_process_are_measured() -> None:
    assert stands.cpu_seconds([os.getpid()]) > 0
