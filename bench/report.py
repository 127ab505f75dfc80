"""Rows of the table at the end: a figure, its ratio to its ceiling, and the bar that the design sets for it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class Row(Struct):
    figure: str
    value: str
    beside: str = ""  # what the ratio is to
    ratio: float | None = None
    bar: str = ""
    ok: bool | None = None  # None: there is no bar, or nothing to judge by


def compared(
    figure: str, value: str, beside: str, ratio: float | None, *, least: float | None = None, most: float | None = None
) -> Row:
    """A row whose ratio is judged by a lower or an upper bound."""
    bar, ok = "", None
    if least is not None:
        bar, ok = f"≥ {least:g}", None if ratio is None else ratio >= least
    elif most is not None:
        bar, ok = f"≤ {most:g}", None if ratio is None else ratio <= most
    return Row(figure, value, beside, ratio, bar, ok)


def rate(per_second: float) -> str:
    return f"{per_second:,.0f}/s"


def ms(value: float) -> str:
    return f"{value:.1f} ms"


def us(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"


HEADINGS = ("figure", "value", "beside", "ratio", "bar", "")


def table(rows: Sequence[Row]) -> str:
    lines = [HEADINGS]
    for row in rows:
        verdict = "" if row.ok is None else ("ok" if row.ok else "under")
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append((row.figure, row.value, row.beside, ratio, row.bar, verdict))
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    right = {1, 3}
    printed = [
        "  ".join(
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    printed.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(printed)
