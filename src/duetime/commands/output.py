"""How values look: relative times, colors and rows that fit on a terminal; JSON for programs.

Text from elsewhere (a response body, an error, an id) is printed with its control characters escaped, so that it can't
move the cursor or change what was printed before.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from duetime.client import Count, Status, Timer
from duetime.client.values import time_text, to_json
from duetime.clock import SystemClock
from duetime.model import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS

COLUMN_CHARS_MIN = 12
"""A column is not cut below this."""

_COLORS = {
    Status.PENDING: "33",
    Status.EXECUTING: "36",
    Status.COMPLETED: "32",
    Status.FAILED: "31",
    Status.CANCELED: "90",
}
_clock = SystemClock()


def is_terminal() -> bool:
    return sys.stdout.isatty()


def print_json(value: Any) -> None:
    """One document, indented."""
    print(to_json(value))


def print_json_line(value: Any) -> None:
    """One line of JSON Lines, flushed so that the reader of a pipe gets it now."""

    def plain(given: Any) -> str:
        return time_text(given, "") if isinstance(given, datetime) else str(given)

    built = msgspec.to_builtins(value, builtin_types=(datetime,), enc_hook=str)
    print(json.dumps(built, ensure_ascii=False, default=plain), flush=True)


# --- pieces --------------------------------------------------------------------------------------------------------


def safe(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short(text: str | None, chars_max: int) -> str:
    """The text, cut on a terminal only: a program that reads a pipe gets all of it."""
    text = safe(text or "")
    return text if len(text) <= chars_max or not is_terminal() else text[: chars_max - 1] + "…"


def colored(text: str, code: str) -> str:
    if not is_terminal() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{code}m{text}\x1b[0m"


def status_text(status: Status, width: int = 0) -> str:
    return colored(f"{status.value:<{width}}", _COLORS[status])


def counted(count: Count) -> str:
    """The count, with a ~ if it is an estimate and a + if counting stopped there."""
    return f"{'~' if count.estimated else ''}{count.timers}{'+' if count.more else ''}"


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def name_of(timer: Timer) -> str:
    return safe(f"{timer.namespace}/{timer.id}")


def absolute(at: datetime) -> str:
    return time_text(at, "")


def relative(at: datetime, now_ms: int | None = None) -> str:
    """``in 9m 58s``, ``3s ago``: the two largest units."""
    ms = round(at.timestamp() * 1000) - (_clock.now() if now_ms is None else now_ms)
    left = (abs(ms) + SECOND_MS // 2) // SECOND_MS * SECOND_MS
    if not left:
        return "now"
    parts = []
    for unit, size in (("d", DAY_MS), ("h", HOUR_MS), ("m", MINUTE_MS), ("s", SECOND_MS)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
        elif parts:
            break
    text = " ".join(parts[:2])
    return f"in {text}" if ms > 0 else f"{text} ago"


def both(at: datetime) -> str:
    return f"{relative(at)} ({absolute(at)})"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as people write them: 0-3, 7."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in found) or "none"


# --- rows ----------------------------------------------------------------------------------------------------------


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    status_column: int | None = None,
    free_text: Sequence[int] = (),
) -> list[str]:
    """Aligned lines. On a terminal they fit: the widest column with free text is cut first, the name in front last."""
    lines = [list(heads), *[list(row) for row in rows]]
    widths = [max(len(line[n]) for line in lines) for n in range(len(heads))]
    columns = shutil.get_terminal_size().columns if is_terminal() else None
    if columns is not None:
        _fit(widths, free_text, columns)
        _fit(widths, (0,), columns)
    shown = []
    for number, line in enumerate(lines):
        cells = [
            f"{cell if len(cell) <= width else cell[: width - 1] + '…':<{width}}"
            for cell, width in zip(line, widths, strict=True)
        ]
        if number and status_column is not None:
            cells[status_column] = status_text(Status(line[status_column]), widths[status_column])
        text = "  ".join(cells).rstrip()
        shown.append(text if columns is None else cut(text, columns))
    shown[0] = colored(shown[0], "1")
    return shown


def _fit(widths: list[int], free_text: Sequence[int], columns: int) -> None:
    """Narrow the widest free-text column, again and again, until the row fits."""
    excess = sum(widths) + 2 * (len(widths) - 1) - columns
    while excess > 0 and free_text:
        widest = max(free_text, key=lambda n: widths[n])
        if widths[widest] <= COLUMN_CHARS_MIN:
            return
        widths[widest] -= 1
        excess -= 1


def cut(line: str, columns: int) -> str:
    """The line's first columns; escape sequences for colors take none."""
    shown = 0
    at = 0
    while at < len(line):
        if line[at] == "\x1b":
            at = line.index("m", at) + 1
            continue
        shown += 1
        at += 1
        if shown == columns and line[at:] not in ("", "\x1b[0m"):
            return line[: at - 1] + "…" + ("\x1b[0m" if "\x1b" in line else "")
    return line


def fields(pairs: Iterable[tuple[str, str]]) -> list[str]:
    pairs = list(pairs)
    width = max(len(name) for name, _ in pairs)
    return [f"{name:<{width}}  {value}" for name, value in pairs]
