"""Log formatting: each message is one line, even if it contains text from clients.

Otherwise a client could forge a log line with a line break, or control the reader's terminal with escape sequences.
"""

from __future__ import annotations

import logging
import sys
from types import TracebackType


class OneLine(logging.Formatter):
    """Escapes unprintable characters; tracebacks keep their line breaks."""

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
    """Log to standard error from this level on, with the prefix before each message."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(f"%(asctime)s %(levelname)-7s {prefix}%(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
