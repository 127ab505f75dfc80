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

TEXT_CHARS_MIN, CUT_TEXT_CHARS_MIN = 20, 10
"""A table loses columns before its texts are cut below the first, and no text is cut below the second."""

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
    drop: Sequence[int] = (),
) -> list[str]:
    """Aligned lines. To fit a terminal, they first lose the columns ``drop``, in this order, and then the widest column
    with free text is cut. The first column is never cut, because people copy it into other commands: a row that is
    still too wide wraps."""
    lines = [list(heads), *[list(row) for row in rows]]
    widths = [max(len(line[n]) for line in lines) for n in range(len(heads))]
    kept = list(range(len(heads)))
    if is_terminal():
        columns = shutil.get_terminal_size().columns
        for n in drop:
            if _width(min(widths[k], TEXT_CHARS_MIN) if k in free_text else widths[k] for k in kept) > columns:
                kept.remove(n)
        while _width(widths[n] for n in kept) > columns:
            long = [n for n in free_text if n in kept and widths[n] > CUT_TEXT_CHARS_MIN]
            if not long:
                widths[0] = 0  # no padding, so that only those rows wrap that have to
                break
            widths[max(long, key=lambda n: widths[n])] -= 1
    shown = []
    for number, line in enumerate(lines):
        cells = []
        for n in kept:
            if number and n == status_column:
                cells.append(status_text(Status(line[n]), widths[n]))
            else:
                cell = line[n] if n == 0 or len(line[n]) <= widths[n] else line[n][: widths[n] - 1] + "…"
                cells.append(f"{cell:<{widths[n]}}")
        shown.append("  ".join(cells).rstrip())
    shown[0] = colored(shown[0], "1")
    return shown


def _width(widths: Iterable[int]) -> int:
    """The width of a row with these columns."""
    return sum(width + 2 for width in widths) - 2


def fields(pairs: Iterable[tuple[str, str]]) -> list[str]:
    pairs = list(pairs)
    width = max(len(name) for name, _ in pairs)
    return [f"{name:<{width}}  {value}" for name, value in pairs]
