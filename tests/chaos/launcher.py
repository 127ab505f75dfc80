"""Starts an instance in which one thing is not as it should be; ``src`` itself is never touched.

    python -m tests.chaos.launcher [--clock FILE] [--bug NAME] serve

``--clock`` moves the process's wall clock, and nothing else of it, by the milliseconds that the file says at that
moment. ``--bug`` plants one of ``bugs``.
"""

from __future__ import annotations

import argparse
import mmap
import struct
import sys
from pathlib import Path

from duetime import cli
from duetime.clock import SystemClock
from tests.chaos import bugs

_OFFSET = struct.Struct("=q")


def set_offset(path: Path, ms: int) -> None:
    """Set the clock of the process that was started with this file. The file is updated in place."""
    if not path.exists():
        path.write_bytes(bytes(_OFFSET.size))
    with open(path, "r+b") as file:
        file.write(_OFFSET.pack(ms))


def move_clock(path: Path) -> None:
    with open(path, "rb") as file:
        offset = mmap.mmap(file.fileno(), _OFFSET.size, access=mmap.ACCESS_READ)
    now = SystemClock.now
    SystemClock.now = lambda self: now(self) + _OFFSET.unpack(offset[:])[0]  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos.launcher")
    parser.add_argument("--clock", type=Path)
    parser.add_argument("--bug", choices=bugs.BUGS)
    options, arguments = parser.parse_known_args()
    if options.clock:
        move_clock(options.clock)
    if options.bug:
        bugs.BUGS[options.bug]()
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
