"""The contents of the plots, as data: curves and bars selected from the raw figures. ``plots.py`` draws them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from bench import against, batches, comparison, herd, pending, steady
from bench.results import Results
from bench.rounds import Samples


class Series(Struct):
    name: str
    x: Sequence[float]
    y: Sequence[float]
    ours: bool


class Panel(Struct):
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]


class Drawing(Struct):
    """``kind`` is ``curves`` (log x), ``bars`` (each series one value) or ``lines`` (log x, y from 0)."""

    file: str
    chapter: str
    title: str
    kind: str
    panels: Sequence[Panel]


def drawings(results: Results) -> list[Drawing]:
    made = [_throughput(results), _lateness(results), _pending(results)]
    return [one for one in made if one.panels]


def _distribution(samples: Samples, part: str, name: str, ours: bool, figure: str = "lateness_ms") -> Iterator[Series]:
    """The round with the median of the median latenesses."""
    there = sorted(
        (sample[figure] for sample in samples.of.get(part, ()) if sample.get(figure)), key=lambda one: one[50]
    )
    if there:
        middle = there[(len(there) - 1) // 2]
        # A logarithm has no place for what came at once.
        yield Series(name, [max(0.1, value) for value in middle], list(range(len(middle))), ours)


def _lateness(results: Results) -> Drawing:
    peers = results.of("peers")
    at_once: list[Series] = []
    evenly: list[Series] = []
    for setup in comparison.OURS:
        at_once += _distribution(results.of("herd"), herd.part_name(setup, herd.SMALL), comparison.OURS[setup], True)
        evenly += _distribution(results.of("steady"), setup, comparison.OURS[setup], True)
    evenly += _distribution(results.of("steady"), steady.LOOP, steady.LOOP, False)
    for peer in peers.of:
        count = peers.median(peer, against.GIVEN)
        name = peer if count in (None, herd.SMALL) else f"{peer}, {count:,.0f}"
        at_once += _distribution(peers, peer, name, False, "herd_lateness_ms")
        evenly += _distribution(peers, peer, peer, False, "steady_lateness_ms")
    panels = [
        Panel(f"{herd.SMALL:,} due at one instant, or as many as is said", "late by, ms", "% of timers", at_once),
        Panel("Steady: Duetime and the loop 1,000/s, peers 100/s", "late by, ms", "% of timers", evenly),
    ]
    title = "How late timers are: Duetime and its peers"
    return Drawing("bench-lateness.svg", "herd", title, "curves", [panel for panel in panels if panel.series])


def _throughput(results: Results) -> Drawing:
    compared = comparison.figures(results)
    titles = {
        against.SINGLES: "One by one",
        against.BATCHED: f"In batches of {batches.SIZES[0]}",
        against.HERD: "Due at one instant",
        against.SUSTAINED: "End to end",
    }
    panels = []
    for figure, title in titles.items():
        ours = set(comparison.OURS.values())
        series = [Series(name, [of_name[figure] or 0.0], [0.0], name in ours) for name, of_name in compared.items()]
        if any(one.x[0] for one in series):
            panels.append(Panel(title, "timers a second", "", series))
    return Drawing("bench-throughput.svg", "peers", "Timers a second: Duetime and its peers", "bars", panels)


def _pending(results: Results) -> Drawing:
    samples = results.of("pending")
    panels = []
    for figure, title in (
        ("made_cpu", "CPU per create"),
        ("fired_cpu", "CPU per delivery"),
        ("rss_end", "Memory"),
    ):
        scale, unit = (1e-6, "MB") if figure == "rss_end" else (1e6, "µs")
        series = []
        for setup in pending.SETUPS:
            sizes = (pending.FEW, pending.MANY, pending.MOST)
            points = [(size, samples.median(setup, pending.of(figure, size))) for size in sizes]
            known = [(size, value * scale) for size, value in points if value is not None]
            if known:
                series.append(Series(comparison.OURS[setup], [x for x, _ in known], [y for _, y in known], True))
        if series:
            panels.append(Panel(title, "timers pending", unit, series))
    return Drawing("bench-pending.svg", "pending", "Cost against the number of pending timers", "lines", panels)
