"""``python -m bench.report [FILE]``: creates ``docs/benchmarks.md`` and its plots from the raw figures of a run."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import msgspec

from bench import (
    against,
    bars,
    batches,
    client,
    commands,
    comparison,
    creates,
    herd,
    machine,
    pending,
    steady,
    sustained,
)
from bench.drawings import Drawing, drawings
from bench.results import Results, load
from bench.setups import LEASE_OF_MANY
from bench.tables import Table, percent

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs/benchmarks.md"
FIGURES = ROOT / "docs/benchmarks.json"
IMAGES = ROOT / "docs/images"
WIDTH = 120
PLOTTER = ROOT / ".venv-bench/bin/python"

CHAPTERS: dict[str, ModuleType] = {
    "peers": against,
    "creates": creates,
    "batches": batches,
    "herd": herd,
    "sustained": sustained,
    "steady": steady,
    "pending": pending,
    "client": client,
    "commands": commands,
}

_HEAD = """\
# Benchmarks

How fast Duetime is beside the schedulers and queues that you could use instead. After them come measurements of \
Duetime alone, with the ceilings that its parts set, and [the ratios that are required](#required-ratios-and-goals).

Made by `{command}` on {date}: {minutes:.0f} minutes on {machine}. {versions}. {care} The service, its database, the \
load generator and the receiver share this machine, so read the ratios, not the rates.
"""
_PEERS = """\
All do the same job: a durable "POST this JSON to that URL at T", set up as the documentation of each recommends. \
{count:,} timers fall due at one instant, fewer for the slowest peers, as the table says; only peers with {count:,} \
count for the required ratios. The slowest have one round. End to end means that timers are created, delivered and \
recorded at the same time. The CPU is that of all processes of a peer and its store.
"""
_METHOD = """\
## Method

The compared systems take turns in one run, and each figure is the median of its rounds.{quick} Every create is \
durable before its response (SQLite `synchronous=FULL`, PostgreSQL `fsync` on and otherwise with its defaults), every \
callback is a real HTTP request, and all guards and fences are on.

```
make bench            # about seven minutes
make bench ROUNDS=3   # twice as long, and half the noise
make bench-full       # about forty minutes: more rounds, ten million pending timers, the peers in full
```

`docs/benchmarks.json` has the raw figures, from which `python -m bench.report` generates this page. One measurement \
alone: `python -m bench --only herd`. [Overhead of the MySQL store](benchmarks-stores.md) compares its steps \
with plain statements for the same rows (`make bench-stores`).
"""
_BARS = """\
## Required ratios and goals

Every run must reach the required ratio (the bar). Goals are farther targets, reported separately \
([decision 22](decisions/0022-bars-and-goals.md)). A second worker can add half only if {second:g} times the CPU in \
use with one fits the machine, so row 7 is judged only if at most {busy} was in use. The setup with two workers has \
leases of {lease} instead of 10 s, so that they share the shards soon after the start.
"""
_QUICK = " This was the quick form: {rounds}, and the slow peers with fewer timers."
_ROUNDS = "one round"
_TEXTS = {
    "creates": "`POST /timers` of about 300 bytes from 64 connections, each with its response after the commit. "
    "pgbench writes the same rows into the same table, one commit each, from as many connections; SQLite's single "
    "inserts are rows of that size.",
    "batches": "`POST /api/v1/timers/batch` from 4 connections, with ids in the response (`Prefer: return=minimal`). "
    "The peers' figure is that of a library call, which returns ids or nothing.",
    "herd": "All timers are in the store and due at the same instant. The time starts at that instant.",
    "sustained": "Timers are created over HTTP, due a second later, delivered and recorded, all at the same time. In "
    "batches, creation pauses while 24,000 timers are on the way, so the rate is one that can be sustained.",
    "steady": "Beside a bare loop that sends the same requests from memory.",
    "pending": "The same service with more and more timers that are due on another day. CPU is that of the service "
    "and its database. The service keeps nothing in memory per timer; on SQLite, the memory at the end includes the "
    "page cache, which is 16 MiB at most and fills as there is more to read. The services of all sizes run at the "
    "same time and take turns of about a second; the table has the medians of the turns, and the median of their "
    "ratios is judged.",
    "client": "With the address guard and all limits, from 256 tasks, to the same receiver. The timers of other "
    "measurements are in a namespace without a secret, so their callbacks are not signed.",
    "commands": "NATS JetStream: how fast commands become durable timers, and how much HTTP timers suffer while the "
    "broker is down.",
}


def write(results: Results) -> None:
    """The document and its plots; without the plotting tool, the document alone."""
    IMAGES.mkdir(exist_ok=True)
    for old in IMAGES.glob("bench-*.svg"):
        old.unlink()
    drawn = draw(drawings(results), IMAGES)
    DOCUMENT.write_text(document(results, drawn))


def draw(wanted: Sequence[Drawing], directory: Path) -> list[Drawing]:
    """Draw all possible plots, in the environment that has the tool for it; returns which ones were drawn."""
    if not PLOTTER.exists():
        print("The plots are left out: matplotlib is not installed (make bench installs it).", file=sys.stderr)
        return []
    run = subprocess.run(
        [PLOTTER, Path(__file__).parent / "plots.py", directory],
        input=msgspec.json.encode(wanted),
        stdout=subprocess.DEVNULL,
        check=False,
    )
    return list(wanted) if run.returncode == 0 else []


def document(results: Results, drawn: Sequence[Drawing]) -> str:
    """The whole page."""
    pieces = paragraphs(
        _HEAD,
        command=results.command,
        date=results.began_at[:10],
        minutes=results.seconds / 60,
        machine=results.machine,
        versions=versions_of(results),
        care=care(results),
    )
    method = paragraphs(
        _METHOD,
        quick=_QUICK.format(rounds=f"{results.rounds} rounds" if results.rounds else _ROUNDS) if results.quick else "",
    )
    for name, module in CHAPTERS.items():
        tables: list[Table] = module.tables(results.of(name))
        tables = [table for table in tables if table.lines]
        if not tables:
            continue
        pieces += [f"## {module.TITLE}", wrapped(_text(name, results))]
        pieces += [f"![{one.title}](images/{one.file})" for one in drawn if one.chapter == name]
        if name == "peers":
            pieces.append(str(comparison.table(results)))
        for table in tables:
            pieces += [table.note, str(table)] if table.note else [str(table)]
        if name == "peers":
            pieces += method
    pieces += paragraphs(
        _BARS, busy=percent(bars.BUSY_SHARE_MAX), second=bars.SECOND_WORKER, lease=LEASE_OF_MANY.replace("s", " s")
    )
    pieces.append(str(bars.table(bars.judge(results))))
    if results.failures:
        told = {f"- {one.measurement}, {one.part}: {one.why}" for one in results.failures}
        pieces += ["## What could not run", "\n".join(sorted(told))]
    return "\n\n".join(piece.strip() for piece in pieces) + "\n"


def paragraphs(text: str, **values: object) -> list[str]:
    return [wrapped(paragraph) for paragraph in text.format(**values).split("\n\n")]


def versions_of(results: Results) -> str:
    return ", ".join(f"{name} {version}" for name, version in results.versions.items())


def care(results: Results) -> str:
    told = f"Other programs used {percent(results.others_share)} of its CPU meanwhile"
    return told + ("; read the figures with care." if results.others_share > machine.OTHERS_SHARE_MAX else ".")


def wrapped(paragraph: str) -> str:
    code = paragraph.startswith("```")
    return paragraph if code else textwrap.fill(paragraph, WIDTH, break_long_words=False, break_on_hyphens=False)


def _text(name: str, results: Results) -> str:
    return _PEERS.format(count=herd.SMALL) if name == "peers" else _TEXTS[name]


def text(results: Results) -> str:
    """The summary printed at the end of a run."""
    judged = [bar for bar in bars.judge(results) if bar.measured]
    pieces = [str(bars.table(judged))] if judged else []
    if "peers" in results.samples:
        pieces.append(str(comparison.table(results)))
    for name, module in CHAPTERS.items():
        pieces += [f"{module.TITLE}\n\n{table}" for table in module.tables(results.of(name)) if table.lines]
    pieces += [f"{one.measurement}, {one.part}, could not run: {one.why}" for one in results.failures]
    pieces.append(f"{results.seconds:.0f} s on {results.machine}. {care(results)}")
    return "\n\n".join(pieces)


def main() -> int:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURES
    if not file.exists():
        print(f"{file} does not exist: make bench writes it", file=sys.stderr)
        return 1
    write(load(file))
    print(f"{DOCUMENT.relative_to(ROOT)} and its plots are made from {file.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
