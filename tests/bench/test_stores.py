"""The page about the MySQL store: each step is compared with the raw one, the end-to-end rate with all raw steps."""

from __future__ import annotations

import pytest

from bench import stores
from bench.results import Results


def some(*, rounds: int = 3, begin: float = 0.5, whole: float = 0.4) -> Results:
    """Rounds of a machine that gets slower: the ratios stay."""
    results = Results("2030-01-02T03:04:05+00:00", "make bench-stores", False, "a machine", {}, rounds=rounds)
    for number in range(rounds):
        raw = {"put": 30_000 / (number + 1), "begin": 20_000 / (number + 1), "record": 12_000 / (number + 1)}
        results.add("MariaDB", stores.RAW, {"round": number, **raw})
        ours = {"put": raw["put"] * 0.6, "begin": raw["begin"] * begin, "record": raw["record"] * 0.5}
        results.add("MariaDB", stores.OURS, {"round": number, **ours})
        results.add("MariaDB", stores.END_TO_END, {"round": number, "per_second": 6_000 * whole / (number + 1)})
    return results


def verdicts(results: Results) -> list[str]:
    bars, _ = stores.tables("MariaDB", results.of("MariaDB"))
    return [line[-1] for line in bars.lines]


def test_requirements_that_are_reached_are_met() -> None:
    assert verdicts(some()) == ["met"] * 4


@pytest.mark.parametrize(("below", "place"), [({"begin": 0.49}, 1), ({"whole": 0.39}, 3)])
def test_a_ratio_below_its_requirement_is_not_met(below: dict[str, float], place: int) -> None:
    expected = ["met"] * 4
    expected[place] = "**not met**"
    assert verdicts(some(**below)) == expected  # type: ignore[arg-type]


def test_a_missing_figure_is_not_measured() -> None:
    results = some()
    del results.samples["MariaDB"][stores.END_TO_END]
    assert verdicts(results)[3] == "not measured"
    assert "not measured" in stores.page(results)
