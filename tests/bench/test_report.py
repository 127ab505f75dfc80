"""The benchmark report: bars are judged by the figures, and a bar without figures is never held."""

from __future__ import annotations

from pathlib import Path

from bench import bars, pending, report
from bench.drawings import drawings
from bench.results import Failure, Results, load
from bench.rounds import Samples
from bench.tables import Table


def some(**more: object) -> Results:
    return Results("2030-01-02T03:04:05+00:00", "make bench", True, "a machine", {"Duetime": "1"}, **more)  # type: ignore[arg-type]


def with_creates(ours: float, bare: float, peer: float) -> Results:
    results = some()
    for setup in ("SQLite", "PostgreSQL"):
        results.add("creates", setup, {"per_second": ours, "p50_ms": 1.0})
    results.add("creates", "bare application on uvicorn", {"per_second": bare})
    late = [float(n) for n in range(101)]
    figures = {"version": "1", "setup": "as it comes", "singles_per_second": peer, "herd_lateness_ms": late}
    figures |= {"herd": 5_000, "herd_per_second": 1000.0}
    results.add("peers", "peer", {**figures, "p50_ms": 50.0, "p99_ms": 99.0})
    return results


def verdicts(results: Results, start: str) -> list[bool | None]:
    return [bar.held for bar in bars.judge(results) if bar.what.startswith(start)]


def test_bars_without_figures_are_not_held() -> None:
    judged = bars.judge(some())
    assert {bar.number for bar in judged} >= set("12345678")
    assert all(bar.held is None and bar.why for bar in judged)


def test_bar_is_held_from_its_ratio_on() -> None:
    what = "creates one by one, SQLite"
    assert verdicts(with_creates(5000, 10_000, 1000), what) == [True, None, True]
    assert verdicts(with_creates(4999, 10_000, 1000), what) == [False, None, False]


def test_lateness_is_compared_with_the_best_peer() -> None:
    results = with_creates(1, 1, 1)
    results.add("herd", "SQLite: 5,000", {"per_second": 3000.0, "p50_ms": 25.0, "p99_ms": 49.6})
    assert verdicts(results, "5,000 at one instant, SQLite: lateness") == [True, False]


def test_goal_is_reached_beyond_its_bar() -> None:
    results = with_creates(1, 1, 1)
    for setup, per_second, late_ms in (("SQLite", 3000.0, 12.0), ("PostgreSQL", 2999.0, 13.0)):
        results.add("herd", f"{setup}: 5,000", {"per_second": per_second, "p50_ms": late_ms, "p99_ms": 60.0})
    judged = {bar.what: (bar.held, bar.reached) for bar in bars.judge(results)}
    assert judged["5,000 at one instant, SQLite"] == (True, True)
    assert judged["5,000 at one instant, PostgreSQL"] == (True, False)
    assert judged["5,000 at one instant, SQLite: lateness p50"] == (True, True)
    assert judged["5,000 at one instant, PostgreSQL: lateness p50"] == (True, False)
    assert judged["5,000 at one instant, SQLite: lateness p99"] == (False, False)
    assert report.document(results, []).count("| met, goal reached ") == 2


def test_ratios_are_computed_per_round() -> None:
    """So the result is the same on a machine that is three times as fast in every second round."""
    results = some()
    for ours, theirs in ((5000.0, 1000.0), (15_000.0, 3000.0), (5100.0, 1000.0), (14_000.0, 3000.0)):
        results.add("creates", "SQLite", {"per_second": ours})
        results.add("peers", "peer", {"version": "1", "setup": "", "singles_per_second": theirs})
    [bar] = [bar for bar in bars.judge(results) if bar.what == "creates one by one, SQLite: the fastest peer"]
    assert bar.ratio == 5.0 and bar.held


def test_round_that_failed_is_left_out_of_the_ratio() -> None:
    results = some()
    for number, ours, theirs in ((0, 5000.0, 1000.0), (1, 100.0, None), (2, 16_000.0, 3000.0)):
        results.add("creates", "SQLite", {"round": number, "per_second": ours})
        results.add("peers", "peer", {"round": number, "version": "1", "setup": "", "singles_per_second": theirs})
    [bar] = [bar for bar in bars.judge(results) if bar.what == "creates one by one, SQLite: the fastest peer"]
    assert bar.ratio is not None and bar.ratio > 5


def test_end_to_end_batches_and_single_creates_are_compared_separately() -> None:
    results = some()
    for part, per_second in (("SQLite", 1100.0), ("SQLite, one by one", 300.0)):
        results.add("sustained", part, {"per_second": per_second})
    late = {"version": "1", "setup": "", "herd_lateness_ms": []}
    results.add("peers", "quick", {**late, "sustained_per_second": 1000.0, "sustained_singles_per_second": 50.0})
    results.add("peers", "even", {**late, "sustained_per_second": 100.0, "sustained_singles_per_second": 100.0})
    assert verdicts(results, "end to end, SQLite") == [True, True]
    results.samples["sustained"]["SQLite, one by one"] = [{"per_second": 299.0}]
    results.samples["sustained"]["SQLite"] = [{"per_second": 1099.0}]
    assert verdicts(results, "end to end, SQLite") == [False, False]


def test_herd_is_compared_with_peers_that_had_as_many_timers() -> None:
    results = with_creates(1, 1, 1)
    results.add("herd", "SQLite: 5,000", {"per_second": 3000.0, "p50_ms": 12.0, "p99_ms": 20.0})
    small = {"version": "1", "setup": "", "herd": 1_000, "herd_per_second": 9000.0, "p50_ms": 1.0, "p99_ms": 1.0}
    results.add("peers", "small", {**small, "herd_lateness_ms": [1.0] * 101})
    assert verdicts(results, "5,000 at one instant, SQLite") == [True, True, True]
    [curves] = [panel for one in drawings(results) if one.chapter == "herd" for panel in one.panels]
    assert [one.name for one in curves.series] == ["peer", "small, 1,000"]
    assert "|              1,000 |   9,000/s |" in report.document(results, [])
    del results.samples["peers"]["peer"]
    assert verdicts(results, "5,000 at one instant, SQLite") == [None, None, None]


def test_second_worker_is_judged_only_if_the_machine_has_enough_cpu_left() -> None:
    for busy, held in ((0.5, False), (0.66, False), (0.67, None), (0.9, None)):
        results = some()
        results.add("creates", "PostgreSQL", {"per_second": 100.0, "busy": busy})
        results.add("creates", "PostgreSQL, 2 workers", {"per_second": 120.0, "busy": 1.0})
        assert verdicts(results, "a second worker: creates one by one") == [held]


def with_pending(**figures: tuple[float, float]) -> dict[str, float]:
    """Figures with ten thousand pending timers, and their ratios with a million."""
    few = {pending.of(figure, pending.FEW): value for figure, (value, _) in figures.items()}
    return few | {pending.ratio_of(figure): ratio for figure, (_, ratio) in figures.items()}


def test_a_million_pending_timers_are_judged_by_every_figure() -> None:
    results = some()
    results.add("pending", "SQLite", with_pending(made=(100.0, 0.91), made_cpu=(1.0, 1.09), steady_p99=(2.0, 1.4)))
    assert verdicts(results, "1 M pending against 10 k, SQLite") == [True]
    results.samples["pending"]["SQLite"] = [with_pending(made=(100.0, 0.91), made_cpu=(1.0, 1.2))]
    [bar] = [bar for bar in bars.judge(results) if bar.what.startswith("1 M pending against 10 k, SQLite")]
    assert bar.held is False and "CPU per create 1.20 ×" in bar.measured and bar.measured.startswith("1 of 2")


def test_a_million_pending_timers_are_judged_by_the_ratios_of_rounds() -> None:
    rounds = [with_pending(made=(100.0, ratio), made_cpu=(1.0, ratio)) for ratio in (0.7, 0.9, 1.3)]
    samples = Samples({"SQLite": rounds})
    assert pending.within(samples, "SQLite", "made") == (0.9, True)
    assert pending.within(samples, "SQLite", "made_cpu") == (0.9, True)
    assert pending.within(samples, "SQLite", "fired") == (None, None)
    assert pending.within(Samples({"SQLite": rounds[:2]}), "SQLite", "made")[1] is False
    assert pending.within(Samples({"SQLite": rounds[1:]}), "SQLite", "made_cpu")[1] is True
    assert pending.within(Samples({"SQLite": rounds[2:]}), "SQLite", "made_cpu") == (1.3, False)


def test_lateness_can_exceed_its_ratio_by_a_millisecond() -> None:
    for ratio, held in ((1.6, True), (1.65, False)):
        samples = Samples({"SQLite": [with_pending(steady_p50=(2.0, ratio))]})
        assert pending.within(samples, "SQLite", "steady_p50")[1] is held


def test_sizes_alternate_in_short_turns() -> None:
    planned = pending.turns([1, 2, 3], 1_000)
    assert [turn.count for turn in planned[:9]] == [1, 2, 3, 3, 2, 1, 1, 2, 3]
    assert [turn.herd for turn in planned] == [False] * 3 * pending.TURNS + [True] * 3 * pending.TURNS
    times = [turn.at for turn in planned]
    assert times[0] == 1_000 and times == sorted(set(times))
    herd = planned[-1].timers("http://127.0.0.1/")
    assert len(herd) == pending.AT_ONCE and {timer.fire_at for timer in herd} == {planned[-1].at}


def test_figures_of_a_partial_failure_count_and_its_error_is_shown() -> None:
    results = with_creates(5000, 10_000, 1000)
    results.add(
        "peers", "half", {"version": "2", "setup": "", "singles_per_second": 2000.0, "error": "only in part: x"}
    )
    results.failures.append(Failure("peers", "half", "only in part: x"))
    assert verdicts(results, "creates one by one, SQLite: the fastest peer") == [False]
    page = report.document(results, drawings(results))
    assert "5,000/s against 2,000/s of half" in page and "- peers, half: only in part: x" in page


def test_page_explains_how_two_workers_are_set_up_and_judged() -> None:
    page = " ".join(report.document(some(), []).split())
    assert "1.5 times the CPU in use with one fits the machine" in page and "at most 67%" in page
    assert "leases of 3 s instead of 10 s" in page


def test_page_begins_with_the_peers() -> None:
    headings = [line for line in report.document(with_creates(1, 1, 1), []).splitlines() if line.startswith("## ")]
    assert headings[0] == "## Peers" and headings[-1] == "## Required ratios and goals"


def test_page_is_generated_from_the_file_of_figures_alone(tmp_path: Path) -> None:
    results = with_creates(5000, 10_000, 1000)
    results.save(tmp_path / "figures.json")
    again = load(tmp_path / "figures.json")
    page = report.document(again, drawings(again))
    assert page == report.document(results, drawings(results))
    assert "5,000/s against 1,000/s of peer" in page and "**not met**" not in page
    assert "images/bench-throughput.svg" in page and "Steady" not in page


def test_file_keeps_figures_with_five_significant_digits() -> None:
    results = some()
    results.add("herd", "a", {"per_second": 1234.5678, "buckets": [1, 2], "lateness_ms": [0.123456], "version": "1"})
    assert results.samples["herd"]["a"] == [{"per_second": 1234.6, "lateness_ms": [0.12346], "version": "1"}]


def test_table_is_aligned() -> None:
    assert str(Table(["", "rate"], [["creates", "1/s"]])) == "\n".join(
        ["|         | rate |", "|:--------|-----:|", "| creates |  1/s |"]
    )


def test_page_in_the_repository_is_up_to_date() -> None:
    results = load(report.FIGURES)
    assert report.document(results, drawings(results)) == report.DOCUMENT.read_text()
