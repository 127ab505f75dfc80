"""The receiver of the README, running as it was pasted but for its port."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docs import pasting
from tests.servers import until

INSTALL, RECEIVER, *WAYS = pasting.blocks("README.md")
PORT = "8080"


@dataclass
class Pasted:
    """The receiver's port and the file that it prints to."""

    port: int
    output: Path

    def called(self, count: int = 1) -> list[dict[str, Any]]:
        """Wait for at least ``count`` callbacks; returns their bodies."""

        def bodies() -> list[str]:
            return re.findall(r"called back: (.*)", self.output.read_text())

        until(f"the receiver was called {count} times", lambda: len(bodies()) >= count)
        return [json.loads(body) for body in bodies()]


@contextmanager
def receiver(directory: Path) -> Iterator[Pasted]:
    activate = directory / "duetime-env/bin/activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    output = directory / "output"
    with pasting.held_port() as port, open(output, "wb") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"{RECEIVER.replace(PORT, str(port))}\nwait"],
            cwd=directory,
            env=os.environ | {"PATH": pasting.path(directory)},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )

        def listening() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        try:
            until("the receiver listens", listening)
            yield Pasted(port, output)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
