"""Duetime and its peers in comparison: the same figures of each, and the number of timers due at one instant."""

from __future__ import annotations

from bench import against, batches, herd, sustained
from bench.results import Results
from bench.setups import POSTGRES, SQLITE
from bench.tables import Format, Table, ms, number, rate

OURS = {SQLITE: f"Duetime on {SQLITE}", POSTGRES: f"Duetime on {POSTGRES}"}
COLUMNS: tuple[tuple[str, str, Format], ...] = (
    ("creates one by one", against.SINGLES, rate),
    ("creates by 500", against.BATCHED, rate),
    ("due at one instant", against.GIVEN, number),
    ("delivered", against.HERD, rate),
    ("lateness p50", "p50_ms", ms),
    ("lateness p99", "p99_ms", ms),
    ("CPU per timer", "cpu_ms_per_timer", ms),
    ("end to end", against.SUSTAINED, rate),
    ("end to end, one by one", against.SUSTAINED_SINGLES, rate),
)
Figures = dict[str, float | None]


def figures(results: Results) -> dict[str, Figures]:
    """By name; ours first."""
    peers = results.of("peers")
    made = {name: _ours(results, setup) for setup, name in OURS.items()}
    return made | {peer: {figure: peers.median(peer, figure) for _, figure, _ in COLUMNS} for peer in peers.of}


def _ours(results: Results, setup: str) -> Figures:
    at_once, part = results.of("herd"), herd.part_name(setup, herd.SMALL)
    service, database = at_once.median(part, "server_cpu"), at_once.median(part, "store_cpu")
    return {
        against.SINGLES: results.of("creates").median(setup, "per_second"),
        against.BATCHED: results.of("batches").median(batches.part_name(setup, batches.SIZES[0]), "per_second"),
        against.GIVEN: herd.SMALL if part in at_once else None,
        against.HERD: at_once.median(part, "per_second"),
        "p50_ms": at_once.median(part, "p50_ms"),
        "p99_ms": at_once.median(part, "p99_ms"),
        "cpu_ms_per_timer": None if service is None else (service + (database or 0.0)) * 1000,
        against.SUSTAINED: results.of("sustained").median(setup, "per_second"),
        against.SUSTAINED_SINGLES: results.of("sustained").median(sustained.single_name(setup), "per_second"),
    }


def table(results: Results) -> Table:
    lines = []
    for name, of_name in figures(results).items():
        values = [(of_name[figure], form) for _, figure, form in COLUMNS]
        lines.append([name, *("" if value is None else form(value) for value, form in values)])
    return Table(["", *(heading for heading, _, _ in COLUMNS)], lines)
