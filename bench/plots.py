"""Draws plots as SVG: reads drawings as JSON from stdin and writes each into the given directory.

It runs in the environment of the bench, which has matplotlib, so it imports nothing of the project. Texts stay texts,
in the reader's sans-serif font, and uncolored parts follow the reader's light or dark scheme.
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, MaxNLocator

INK = "#73808c"
"""A placeholder for the reader's text color."""
PALETTE = ("#2f81f7", "#e0722c", "#8957e5", "#2ea043", "#d4a017", "#db61a2", "#39a9a0", "#a0522d", "#7f8c99")
BAR_OF_OURS, BAR_OF_OTHERS = "#2f81f7", "#8b949e"
SCHEME = "<style>svg{color:#24292f}@media(prefers-color-scheme:dark){svg{color:#c9d1d9}}</style>"
SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "duetime",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "xtick.minor.bottom": False,
    "grid.alpha": 0.25,
    "grid.color": INK,
    "legend.frameon": False,
    "figure.constrained_layout.h_pad": 0.08,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
_plain = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
_short = FuncFormatter(lambda value, _: f"{value / 1000:g} k" if value >= 1000 else f"{value:g}")
_count = FuncFormatter(lambda value, _: f"{value / 1e6:g} M" if value >= 1e6 else f"{value / 1e3:g} k")


def _colors(panels: list[dict[str, Any]]) -> dict[str, str]:
    """The same color for a name in all panels."""
    names = list(dict.fromkeys(one["name"] for panel in panels for one in panel["series"]))
    return {name: PALETTE[place % len(PALETTE)] for place, name in enumerate(names)}


def _curves(axes: Any, panel: dict[str, Any], colors: dict[str, str]) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_plain)
    for one in panel["series"]:
        width = 2.2 if one["ours"] else 1.2
        axes.plot(one["x"], one["y"], label=one["name"], color=colors[one["name"]], linewidth=width)


def _lines(axes: Any, panel: dict[str, Any], colors: dict[str, str]) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_count)
    for one in panel["series"]:
        axes.plot(one["x"], one["y"], label=one["name"], color=colors[one["name"]], linewidth=2, marker="o")
    axes.set_ylim(bottom=0)


def _bars(axes: Any, panel: dict[str, Any], colors: dict[str, str]) -> None:
    series = panel["series"][::-1]  # the first one on top
    names = [one["name"] for one in series]
    values = [one["x"][0] for one in series]
    axes.barh(names, values, color=[BAR_OF_OURS if one["ours"] else BAR_OF_OTHERS for one in series])
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(_short)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    most = max(values)
    for place, value in enumerate(values):
        axes.text(value + most * 0.02, place, f"{value:,.0f}" if value else "none", va="center", fontsize=8)
    axes.set_xlim(right=most * 1.25)


KINDS = {"curves": _curves, "lines": _lines, "bars": _bars}


def draw(drawing: dict[str, Any]) -> str:
    """The drawing as SVG; the same figures give the same text."""
    panels = drawing["panels"]
    colors = _colors(panels)
    bars = drawing["kind"] == "bars"
    with matplotlib.rc_context(SETTINGS):
        size = (11, 0.9 + 0.28 * len(panels[0]["series"])) if bars else (11, 3.8)
        figure, all_axes = pyplot.subplots(
            1, len(panels), figsize=size, squeeze=False, sharey=bars, layout="constrained"
        )
        for axes, panel in zip(all_axes[0], panels, strict=True):
            KINDS[drawing["kind"]](axes, panel, colors)
            axes.set_title(panel["title"])
            axes.set_xlabel(panel["x_label"])
            axes.set_ylabel(panel["y_label"])
        if not bars:
            handles = {line.get_label(): line for axes in all_axes[0] for line in axes.get_lines()}
            figure.legend(handles.values(), handles, loc="outside lower center", ncols=5)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Title": drawing["title"]})
        pyplot.close(figure)
    return finished(text.getvalue())


def finished(svg: str) -> str:
    """Replaces the drawn colors and font with the reader's, and shortens numbers to what a screen can show."""
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg.replace(INK, "currentColor"))
    svg = re.sub(r"font(-family)?: ([^;\"]*?)'DejaVu Sans'[^;\"]*", r"font\1: \2sans-serif", svg)
    return re.sub(r"(<svg [^>]*>)", rf"\1{SCHEME}", svg, count=1)


def main() -> None:
    directory = Path(sys.argv[1])
    for drawing in json.load(sys.stdin):
        (directory / drawing["file"]).write_text(draw(drawing))


if __name__ == "__main__":
    main()
