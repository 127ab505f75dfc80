"""The brief form of the commands: runs that spend most of their time waiting, so a few run concurrently."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from tests.chaos.cluster import ROOT

AT_ONCE = 4  # each needs about a fifth of a core; an instance starved past its lease would be replaced and fire twice
SECONDS_MAX = 240.0

Run = subprocess.CompletedProcess[str]
Runs = dict[str, Future[Run]]


@contextmanager
def started(program: str, arguments: Mapping[str, Sequence[str]]) -> Iterator[Runs]:
    """Runs of a command by name, each in its own process, started in this order."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(run, program, *each) for name, each in arguments.items()}
        pool.shutdown(cancel_futures=True)


def run(program: str, *arguments: str) -> Run:
    """Run the command; if it takes too long, terminate it, and it then stops what it has started."""
    command = [sys.executable, "-m", program, "--brief", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            said, _ = process.communicate(timeout=SECONDS_MAX)
        except BaseException:
            process.terminate()
            raise
    return Run(command, process.returncode, said)
