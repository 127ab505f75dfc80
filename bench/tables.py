"""Tables of the report, in Markdown that is also readable in a terminal, and the format of figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from bench.rounds import Samples

Format = Callable[[float], str]


class Table(Struct):
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    note: str = ""
    texts: Sequence[int] = (0,)  # columns that are not figures

    def __str__(self) -> str:
        every = [self.headings, *self.lines]
        widths = [max(3, *(len(line[column]) for line in every)) for column in range(len(self.headings))]

        def written(line: Sequence[str]) -> str:
            cells = [
                text.ljust(width) if column in self.texts else text.rjust(width)
                for column, (text, width) in enumerate(zip(line, widths, strict=True))
            ]
            return "| " + " | ".join(cells) + " |"

        rulers = [
            ":" + "-" * (width + 1) if column in self.texts else "-" * (width + 1) + ":"
            for column, width in enumerate(widths)
        ]
        return "\n".join([written(self.headings), "|" + "|".join(rulers) + "|", *map(written, self.lines)])


def across(samples: Samples, parts: Sequence[str], *lines: tuple[str, str, Format]) -> list[list[str]]:
    """A line for each (label, figure, format), with the medians of the parts; without lines that no part has."""
    made = []
    for label, figure, form in lines:
        values = [samples.median(part, figure) for part in parts]
        if any(value is not None for value in values):
            made.append([label, *("" if value is None else form(value) for value in values)])
    return made


def rate(per_second: float) -> str:
    return f"{per_second:,.0f}/s"


def ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs" if seconds else "–"


def mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def size(value: float) -> str:
    return f"{value:,.0f} bytes"


def seconds(value: float) -> str:
    return f"{value:.2f} s"


def percent(share: float) -> str:
    return f"{share:.0%}"


def number(value: float) -> str:
    return f"{value:,.0f}"


def times(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:,.0f} ×" if ratio >= 100 else f"{ratio:.1f} ×" if ratio >= 10 else f"{ratio:.2f} ×"
