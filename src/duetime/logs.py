"""How log lines are written: one line for a message, whatever a client put into it.

A line break in a client's text would forge a line, and an escape sequence would act on the terminal that shows it.
"""

from __future__ import annotations

import logging
import sys
from types import TracebackType


class OneLine(logging.Formatter):
    """Shows characters that can't be printed as escapes; a traceback keeps its line breaks."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _printable(record.message)
        return super().formatMessage(record)

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        return "\n".join(map(_printable, super().formatException(ei).split("\n")))


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def configure(level: str, prefix: str) -> None:
    """Log to standard error from this level on, each message behind the prefix."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(f"%(asctime)s %(levelname)-7s {prefix}%(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
