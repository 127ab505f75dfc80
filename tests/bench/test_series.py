"""Statistics of the benchmarks: percentiles, rates, ratios of rounds, and the order of turns."""

from __future__ import annotations

from bench.rounds import Samples, spread
from bench.series import buckets, percentile, percentiles, rate_between


def test_percentile_is_one_of_the_values() -> None:
    values = [float(n) for n in range(1, 1001)]
    assert (percentile(values, 0), percentile(values, 50), percentile(values, 99.9)) == (1.0, 501.0, 1000.0)
    assert len(percentiles(values)) == 101 and percentiles(values)[-1] == 1000.0
    assert percentile([], 50) == 0.0 and percentiles([]) == []


def test_rate_is_computed_from_whole_buckets() -> None:
    counts = buckets([0.0, 0.05, 0.11, 0.29])
    assert counts == [2, 1, 1]
    assert rate_between(counts, 0.1, 0.3) == 10.0
    assert rate_between(counts, 0.3, 0.1) == 0.0


def test_ratio_is_the_median_of_the_ratios_of_rounds() -> None:
    samples = Samples({"ours": [{"x": 10}, {"x": 30}, {"x": 9}], "theirs": [{"x": 5}, {"x": 10}, {"x": 9}], "none": []})
    assert samples.ratio("ours", "theirs", "x") == 2.0
    assert samples.median("ours", "x") == 10.0
    assert samples.ratio("ours", "none", "x") is None and samples.median("none", "x") is None
    assert "ours" in samples and "none" not in samples


def test_guests_are_spread_evenly_between_the_blocks() -> None:
    assert spread([["a", "a"], ["b"], ["c"]], ["1", "2", "3"]) == ["a", "a", "1", "b", "2", "c", "3"]
    assert spread([["a"], ["b"], ["c"]], ["1"]) == ["a", "b", "c", "1"]
    assert spread([[]], ["1", "2"]) == ["1", "2"]
