"""Runs tests against mutants, each in a copy of the tree, so that the tree itself never changes.

If tests fail on the unchanged copy, the run stops, since they would catch every mutant. A mutant whose tests do not end
is caught by a timeout, which also stops everything that the tests have started.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.edits import Edit

SLOWER_MAX = 3
"""The timeout of the tests: a multiple of their time on the unchanged copy, plus some seconds."""
SECONDS_MIN = 20.0
BASELINE_SECONDS_MAX = 900.0

Stages = Sequence[Sequence[str]]


class Broken(Exception):
    """The tests fail without a mutant."""


@dataclass(frozen=True)
class Mutant:
    module: str
    path: Path
    edit: Edit
    source: str
    """The module's source without this mutation."""

    @property
    def key(self) -> str:
        """Identifies it among all mutants of the module's current source."""
        edit = self.edit
        said = f"{self.module}\0{self.source}\0{edit.start}\0{edit.end}\0{edit.text}"
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    @property
    def change(self) -> tuple[str, str]:
        """The changed lines, before and after, without indentation."""
        source, edit = self.source, self.edit
        start = source.rfind("\n", 0, edit.start) + 1
        end = source.find("\n", edit.end)
        before, after = source[start:end], source[start : edit.start] + edit.text + source[edit.end : end]
        return " ".join(before.split()), " ".join(after.split())


@dataclass(frozen=True)
class Verdict:
    outcome: str
    """``caught``, ``timeout`` or ``survived``."""
    by: str = ""
    """The test that caught it."""
    seconds: float = 0.0


class Copy:
    """A copy of all files that git tracks or would add, in which the tests run."""

    def __init__(self, root: Path, place: Path) -> None:
        self._place = place
        self._limits: dict[tuple[str, ...], float] = {}
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=root, capture_output=True, check=True
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (root / name).is_file():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, place / name)

    def judge(self, mutant: Mutant, stages: Stages) -> Verdict:
        """Run the stages on this copy with the mutant until one fails."""
        began = time.monotonic()
        for stage in stages:
            outcome, by = self._judge(mutant, stage)
            if outcome != "survived":
                return Verdict(outcome, by, time.monotonic() - began)
        return Verdict("survived", seconds=time.monotonic() - began)

    def _judge(self, mutant: Mutant, stage: Sequence[str]) -> tuple[str, str]:
        limit = self._limits.get(tuple(stage)) or self.measure(stage)
        path = self._place / mutant.path
        times = path.stat()
        path.write_text(mutant.edit.apply(mutant.source))
        try:
            outcome, by = self._run(stage, limit, PYTHONDONTWRITEBYTECODE="1")
        finally:
            path.write_text(mutant.source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # its compiled file is valid again
        if outcome == "timeout" and self.measure(stage) > limit:
            return self._judge(mutant, stage)  # the machine has become slower since the limit was set
        return outcome, by

    def measure(self, stage: Sequence[str]) -> float:
        """Run the tests on the unchanged copy, which also compiles it; returns the timeout."""
        began = time.monotonic()
        outcome, by = self._run(stage, BASELINE_SECONDS_MAX)
        if outcome != "survived":
            raise Broken(f"without a mutant: pytest {' '.join(stage)}: {outcome} {by}")
        limit = max(SECONDS_MIN, SLOWER_MAX * (time.monotonic() - began))
        self._limits[tuple(stage)] = limit
        return limit

    def _run(self, stage: Sequence[str], seconds_max: float, **env: str) -> tuple[str, str]:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *stage]
        with tempfile.TemporaryFile() as output:  # not a pipe, which a process that the tests left could keep open
            tests = subprocess.Popen(
                command,
                cwd=self._place,
                env=os.environ | {"PYTHONPATH": str(self._place / "src")} | env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                tests.wait(seconds_max)
            except subprocess.TimeoutExpired:
                return "timeout", ""
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(tests.pid, signal.SIGKILL)
                tests.wait()
            output.seek(0)
            said = output.read().decode(errors="replace")
        if tests.returncode == 0:
            return "survived", ""
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        return "caught", found[1] if found else said[-200:].strip()
