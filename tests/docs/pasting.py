"""Runs the examples of the documents in a shell, as a reader pastes them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 120


def blocks(page: str, language: str = "sh") -> list[str]:
    """The examples of a page, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def path(directory: Path) -> str:
    """A ``PATH`` on which ``duetime`` and ``python3`` are those under test."""
    programs = directory / "programs"
    programs.mkdir(exist_ok=True)
    for name, command in (("duetime", "-m duetime"), ("python3", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        (programs / name).chmod(0o755)
    return f"{programs}{os.pathsep}{os.environ['PATH']}"


def paste(text: str, directory: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", text],
        cwd=directory,
        env=os.environ | {"PATH": path(directory)} | env,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


@contextmanager
def held_port() -> Iterator[int]:
    """A free port that only a listener with SO_REUSEADDR, which most servers set, can get during the block."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
