"""``python -m bench.peers [NAME …] [--quick]``: runs only the peers and prints a table of their figures."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path

from bench.machine import Machine
from bench.peers import HERD, PEERS, Figures, measure, missing
from bench.processes import receiver

HEADINGS = (
    "peer",
    "singles/s",
    "batched/s",
    "herd",
    "herd/s",
    "p50 ms",
    "p99 ms",
    "steady p50",
    "p99",
    "end to end/s",
    "one by one/s",
    "CPU ms",
)


def row(figures: Figures) -> tuple[str, ...]:
    """One line of the table."""

    def number(value: float | None, digits: int = 0) -> str:
        return "–" if value is None else f"{value:,.{digits}f}"

    def percentile(lateness: list[float], percent: int) -> str:
        return number(lateness[percent] if lateness else None)

    return (
        f"{figures.name} {figures.version}".strip(),
        number(figures.singles_per_second),
        number(figures.batched_per_second),
        number(figures.herd),
        number(figures.herd_per_second),
        percentile(figures.herd_lateness_ms, 50),
        percentile(figures.herd_lateness_ms, 99),
        percentile(figures.steady_lateness_ms, 50),
        percentile(figures.steady_lateness_ms, 99),
        number(figures.sustained_per_second),
        number(figures.sustained_singles_per_second),
        number(figures.cpu_ms_per_timer, 2),
    )


def table(lines: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if n else text.ljust(width)
            for n, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


async def _run(names: list[str], herd: int, quick: bool, directory: Path) -> list[Figures]:
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {text}", file=sys.stderr, flush=True)

    async with receiver(directory) as hooks:
        return [
            await measure(name, directory=directory, receiver=hooks, herd=herd, quick=quick, say=say) for name in names
        ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.peers", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(PEERS)} [all]")
    parser.add_argument("--quick", action="store_true", help="about 20 seconds for each")
    parser.add_argument("--herd", type=int, default=HERD, help=f"timers due at one instant [{HERD}]")
    options = parser.parse_args()
    unknown = set(options.names) - set(PEERS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    if lacking := missing():
        print(lacking, file=sys.stderr)
        return 1
    machine = Machine()
    # Beside the code, so that the files are on a real disk even where /tmp is memory.
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=Path(__file__).parent.parent))
    try:
        measured = asyncio.run(_run(options.names or list(PEERS), options.herd, options.quick, directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(table([HEADINGS, *map(row, measured)]))
    for figures in measured:
        print(f"{figures.name}: {figures.setup}" + (f"; failed: {figures.error}" if figures.error else ""))
    print(machine.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
