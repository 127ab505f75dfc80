"""The previous release, from the history of this repository, run next to this version."""

from __future__ import annotations

import os
import subprocess
import zipfile
from io import BytesIO
from pathlib import Path

from tests.servers import Duetime

ROOT = Path(__file__).parents[2]
LAST_RELEASE = "dd9fa3a08843"
LEASE_SECONDS = 10


class NoHistory(Exception):
    """The repository does not contain the commit of the previous release."""


def last_release(directory: Path) -> Path:
    """Write the sources of the previous release to a directory."""
    git = ["git", "-C", str(ROOT)]
    try:
        pack = [*git, "archive", "--format=zip", LAST_RELEASE, "src"]
        packed = subprocess.run(pack, capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoHistory(f"commit {LAST_RELEASE}, the last release, is not here: git fetch --unshallow") from error
    with zipfile.ZipFile(BytesIO(packed.stdout)) as archive:
        archive.extractall(directory)
    return directory / "src"


class Instance(Duetime):
    """One instance, of the previous release or of this version, on a fixed port."""

    def __init__(self, directory: Path, sources: Path, database_url: str) -> None:
        inherited = os.environ.get("PYTHONPATH", "")
        super().__init__(
            directory,
            start=False,
            PYTHONPATH=os.pathsep.join(filter(None, [str(sources), inherited])),
            DATABASE_URL=database_url,
            DUETIME_LEASE_TTL=f"{LEASE_SECONDS}s",
        )

    def stop(self) -> None:
        code = self.terminate()
        assert code == 0, f"exit code {code}: {self.stderr[-3000:]}"
