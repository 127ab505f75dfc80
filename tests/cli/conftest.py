"""A server, a receiver, and the command line as a process that talks to them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import KEY, PATIENCE_SECONDS, Duetime, Receiver

COMMAND = [sys.executable, "-W", "error", "-m", "duetime"]


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Processes started within can be interrupted. Otherwise they would ignore SIGINT, as this process does if a shell
    started it in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Shell:
    """A working directory and an environment for commands."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        kept = ("PATH", "HOME", "PYTHONPATH")
        self.env = {name: os.environ[name] for name in kept if name in os.environ}
        self.env |= {"TIMER_URL": url, "API_KEY": KEY}

    def run(self, *arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            cwd=self.directory,
            env=self.env | env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS * 2,  # longer than a command itself may wait for the server
            check=False,
        )

    def good(self, *arguments: str, stdin: str = "", **env: str) -> str:
        """Run a command that must succeed; returns its output."""
        ran = self.run(*arguments, stdin=stdin, **env)
        assert ran.returncode == 0, ran
        assert "\x1b" not in ran.stdout  # no colors in a pipe
        return ran.stdout

    def json(self, *arguments: str, stdin: str = "") -> Any:
        return json.loads(self.good(*arguments, "--json", stdin=stdin))

    def json_lines(self, *arguments: str) -> list[Any]:
        return [json.loads(line) for line in self.good(*arguments, "--json").splitlines()]

    def bad(self, code: int, *arguments: str, stdin: str = "", **env: str) -> str:
        """Run a command that must fail with this exit code; returns its error message, which must be one line."""
        ran = self.run(*arguments, stdin=stdin, **env)
        assert ran.returncode == code and not ran.stdout, ran
        [line] = ran.stderr.splitlines()
        assert line.startswith("duetime: ")
        return line.removeprefix("duetime: ")


@contextlib.contextmanager
def started(shell: Shell, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A running command whose lines can be read one by one."""
    with interruptible():
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=shell.directory,
            env=shell.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duetime]:
    with Duetime(tmp_path_factory.mktemp("service")) as service:
        yield service
        assert "Traceback" not in service.stderr, service.stderr


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver
        receiver.release()


@pytest.fixture
def shell(service: Duetime, tmp_path: Path) -> Shell:
    return Shell(tmp_path, f"http://127.0.0.1:{service.port}")
