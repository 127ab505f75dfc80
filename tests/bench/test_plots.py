"""Plots of the benchmarks; only the benchmark's environment has matplotlib."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from bench.plots import draw

CURVE = {"name": "Duetime", "x": [1.0, 10.0, 100.0], "y": [0.0, 50.0, 100.0], "ours": True}
PANEL = {"title": "late", "x_label": "ms", "y_label": "%", "series": [CURVE]}


@pytest.mark.parametrize("kind", ["curves", "lines", "bars"])
def test_plot_is_small_reproducible_and_follows_the_color_scheme(kind: str) -> None:
    drawing = {"kind": kind, "title": "a title", "panels": [PANEL]}
    svg = draw(drawing)
    assert svg == draw(drawing)
    assert len(svg) < 60_000
    assert "prefers-color-scheme" in svg and "currentColor" in svg
    assert "DejaVu" not in svg and "<text" in svg
