"""The report of the bench: bars are judged by what was measured, and an unmeasured one is never said to hold."""

from __future__ import annotations

from pathlib import Path

from bench import bars, report
from bench.drawings import drawings
from bench.results import Results, load
from bench.tables import Table


def some(**more: object) -> Results:
    return Results("2030-01-02T03:04:05+00:00", "make bench", True, "a machine", {"Duetime": "1"}, **more)  # type: ignore[arg-type]


def with_creates(ours: float, bare: float, peer: float) -> Results:
    results = some()
    for setup in ("SQLite", "PostgreSQL"):
        results.add("creates", setup, {"per_second": ours, "p50_ms": 1.0})
    results.add("creates", "bare server", {"per_second": bare})
    late = [float(n) for n in range(101)]
    figures = {"version": "1", "setup": "as it comes", "singles_per_second": peer, "herd_lateness_ms": late}
    results.add("peers", "peer", {**figures, "p50_ms": 50.0, "p99_ms": 99.0})
    return results


def verdicts(results: Results, start: str) -> list[bool | None]:
    return [bar.held for bar in bars.judge(results) if bar.what.startswith(start)]


def test_what_was_not_measured_is_not_held() -> None:
    judged = bars.judge(some())
    assert {bar.number for bar in judged} >= set("12345678")
    assert all(bar.held is None and bar.why for bar in judged)


def test_a_bar_is_held_at_its_ratio_and_not_below() -> None:
    what = "creates one by one, SQLite"
    assert verdicts(with_creates(5000, 10_000, 1000), what) == [True, None, True]
    assert verdicts(with_creates(4999, 10_000, 1000), what) == [False, None, False]


def test_lateness_is_judged_by_the_soonest_peer() -> None:
    results = with_creates(1, 1, 1)
    results.add("herd", "SQLite: 1,000", {"per_second": 1.0, "p50_ms": 12.0, "p99_ms": 30.0})
    assert verdicts(results, "1,000 at one instant, SQLite: lateness") == [True, False]


def test_a_second_worker_is_not_judged_without_a_free_core() -> None:
    for busy, held in ((0.5, False), (0.9, None)):
        results = some()
        results.add("creates", "PostgreSQL", {"per_second": 100.0, "busy": busy})
        results.add("creates", "PostgreSQL, 2 workers", {"per_second": 120.0, "busy": 1.0})
        assert verdicts(results, "a second worker: creates one by one") == [held]


def test_many_pending_are_judged_by_every_figure() -> None:
    results = some()
    usual = {"made": 100.0, "made_cpu": 1.0, "steady_p99": 2.0}
    results.add("pending", "SQLite: 10,000", usual)
    results.add("pending", "SQLite: 1,000,000", {"made": 91.0, "made_cpu": 1.09, "steady_p99": 2.9})
    assert verdicts(results, "1 M pending against 10 k, SQLite") == [True]
    results.samples["pending"]["SQLite: 1,000,000"] = [{**usual, "made_cpu": 1.2}]
    [bar] = [bar for bar in bars.judge(results) if bar.what.startswith("1 M pending against 10 k, SQLite")]
    assert bar.held is False and "CPU per create 1.20 ×" in bar.measured


def test_the_page_is_made_from_the_file_alone(tmp_path: Path) -> None:
    results = with_creates(5000, 10_000, 1000)
    results.save(tmp_path / "figures.json")
    again = load(tmp_path / "figures.json")
    page = report.document(again, drawings(again))
    assert page == report.document(results, drawings(results))
    assert "5,000/s to 1,000/s of peer" in page and "**not held**" not in page
    assert "images/bench-throughput.svg" in page and "Steady" not in page


def test_a_file_keeps_figures_and_no_more_of_their_digits_than_mean_something() -> None:
    results = some()
    results.add("herd", "a", {"per_second": 1234.5678, "buckets": [1, 2], "lateness_ms": [0.123456], "version": "1"})
    assert results.samples["herd"]["a"] == [{"per_second": 1234.6, "lateness_ms": [0.12346], "version": "1"}]


def test_a_table_is_aligned() -> None:
    assert str(Table(["", "rate"], [["creates", "1/s"]])) == "\n".join(
        ["|         | rate |", "|:--------|-----:|", "| creates |  1/s |"]
    )
