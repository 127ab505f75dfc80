"""Log lines: text from clients can't forge a line or control a terminal."""

from __future__ import annotations

import logging
import sys

import pytest

from duetime.logs import OneLine


def written(text: str, *, raised: bool = False) -> str:
    record = logging.LogRecord("x", logging.INFO, "", 0, "a client says %s", (text,), None)
    if raised:
        try:
            raise ValueError(text)
        except ValueError:
            record.exc_info = sys.exc_info()
    return OneLine("%(levelname)s %(message)s").format(record)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("größer ✓", "größer ✓"),
        ("a\nINFO forged", "a\\nINFO forged"),
        ("a\r\nb", "a\\r\\nb"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202eevil\u2028x", "\\u202eevil\\u2028x"),
        ("\x00\x7f", "\\x00\\x7f"),
    ],
)
def test_unprintable_characters_are_escaped(text: str, shown: str) -> None:
    assert written(text) == f"INFO a client says {shown}"


def test_a_traceback_keeps_only_its_own_line_breaks() -> None:
    lines = written("bad\x1b[2J", raised=True).splitlines()
    assert lines[0] == "INFO a client says bad\\x1b[2J"
    assert lines[1] == "Traceback (most recent call last):" and lines[-1] == "ValueError: bad\\x1b[2J"
    assert "\x1b" not in "".join(lines)
