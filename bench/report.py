"""``python -m bench.report [FILE]``: makes ``docs/benchmarks.md`` and its plots from the raw figures of a run."""

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

Made by `{command}` on {date}: {minutes:.0f} minutes on {machine}. {versions}. {care}

Everything runs on this one machine: the service, its database, whoever makes the load and whoever is called back. So \
read the ratios, not the rates. What is compared takes turns in one run, and each figure is the median of its rounds.\
{quick} Every create is durable before it is answered (SQLite `synchronous=FULL`, PostgreSQL `fsync` on and otherwise \
as it comes), every callback is a real HTTP request, and all guards and fences are on.

```
make bench            # about seven minutes
make bench ROUNDS=3   # twice as long, and half as noisy
make bench-full       # about forty minutes: more rounds, ten million pending timers, the peers in full
```

`docs/benchmarks.json` has the raw figures, from which `python -m bench.report` makes this page. One measurement \
alone: `python -m bench --only herd`.

## The bars

What Duetime is held to, what it aims at, and what was measured in this run; decision 22 says what each bar means and \
why. A second worker can add half only where {second:g} times \
what is busy with one fits the machine, so bar 7 is judged where at most {busy} of it was. The setup with two workers \
has leases of {lease} instead of 10 s, so that they have shared the shards out soon after the start.
"""
_QUICK = " This was the quick form: {rounds}, and the slow peers with fewer timers."
_ROUNDS = "one round"
_PEERS = """\
What a user would pick otherwise, doing the same job: a durable "POST this JSON to that URL at T", set up as its own \
documents recommend. {count:,} timers are due at one instant, fewer for those that would take long, as the table says; \
the bars of it are judged by those that had {count:,}. Those that are far behind have one round. The CPU is that of \
all its processes and its store then.
"""
_TEXTS = {
    "creates": "`POST /timers` of about 300 bytes from 64 connections, each answered after its commit. pgbench writes "
    "the same rows into the same table, one commit each, from as many connections; SQLite's single inserts are rows of "
    "that size.",
    "batches": "`POST /api/v1/timers/batch` from 4 connections, answered with the ids (`Prefer: return=minimal`). The "
    "peers' figure is that of a library call, which answers with ids or with nothing.",
    "herd": "The timers are in the store; the clock starts at the instant at which all are due.",
    "sustained": "Made over HTTP, due a second later, delivered and recorded, all at the same time. In batches no more "
    "is made while 24,000 are on the way, so it is a rate that can be kept up.",
    "steady": "Beside it a bare loop that sends the same requests from memory.",
    "pending": "The same service with more and more timers that wait for another day. CPU is that of the service and "
    "its database. Nothing is kept in memory per timer; on SQLite the memory at the end has the page cache in it, "
    "which is 16 MiB at most and fills as there is more to read. The services of all sizes are up at once and take "
    "turns of about a second; the table has the medians of the turns, and the bar compares the median of their ratios.",
    "client": "With the address guard and all limits, from 256 tasks, against the same receiver. The timers of other "
    "measurements are in a namespace without a secret, so their callbacks are not signed.",
    "commands": "NATS JetStream: how fast commands become durable timers, and what HTTP timers notice of a broker that "
    "is down.",
}


def write(results: Results) -> None:
    """The document and its plots; without the tool for plots, the document alone."""
    IMAGES.mkdir(exist_ok=True)
    for old in IMAGES.glob("bench-*.svg"):
        old.unlink()
    drawn = draw(drawings(results), IMAGES)
    DOCUMENT.write_text(document(results, drawn))


def draw(wanted: Sequence[Drawing], directory: Path) -> list[Drawing]:
    """Draw what can be drawn, in the environment that has the tool for it; which ones were."""
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
    head = _HEAD.format(
        command=results.command,
        date=results.began_at[:10],
        minutes=results.seconds / 60,
        machine=results.machine,
        versions=", ".join(f"{name} {version}" for name, version in results.versions.items()),
        care=_care(results),
        quick=_QUICK.format(rounds=f"{results.rounds} rounds" if results.rounds else _ROUNDS) if results.quick else "",
        busy=percent(bars.BUSY_SHARE_MAX),
        second=bars.SECOND_WORKER,
        lease=LEASE_OF_MANY.replace("s", " s"),
    )
    pieces = [*map(_wrapped, head.split("\n\n")), str(bars.table(bars.judge(results)))]
    for name, module in CHAPTERS.items():
        tables: list[Table] = module.tables(results.of(name))
        tables = [table for table in tables if table.lines]
        if not tables:
            continue
        pieces += [f"## {module.TITLE}", _wrapped(_text(name, results))]
        pieces += [f"![{one.title}](images/{one.file})" for one in drawn if one.chapter == name]
        if name == "peers":
            pieces.append(str(comparison.table(results)))
        for table in tables:
            pieces += [table.note, str(table)] if table.note else [str(table)]
    if results.failures:
        told = {f"- {one.measurement}, {one.part}: {one.why}" for one in results.failures}
        pieces += ["## What could not run", "\n".join(sorted(told))]
    return "\n\n".join(piece.strip() for piece in pieces) + "\n"


def _care(results: Results) -> str:
    told = f"Others used {percent(results.others_share)} of its CPU meanwhile"
    return told + ("; read the figures with care." if results.others_share > machine.OTHERS_SHARE_MAX else ".")


def _wrapped(paragraph: str) -> str:
    code = paragraph.startswith("```")
    return paragraph if code else textwrap.fill(paragraph, WIDTH, break_long_words=False, break_on_hyphens=False)


def _text(name: str, results: Results) -> str:
    return _PEERS.format(count=herd.SMALL) if name == "peers" else _TEXTS[name]


def text(results: Results) -> str:
    """What is printed at the end of a run."""
    judged = [bar for bar in bars.judge(results) if bar.measured]
    pieces = [str(bars.table(judged))] if judged else []
    if "peers" in results.samples:
        pieces.append(str(comparison.table(results)))
    for name, module in CHAPTERS.items():
        pieces += [f"{module.TITLE}\n\n{table}" for table in module.tables(results.of(name)) if table.lines]
    pieces += [f"{one.measurement}, {one.part}, could not run: {one.why}" for one in results.failures]
    pieces.append(f"{results.seconds:.0f} s on {results.machine}. {_care(results)}")
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
