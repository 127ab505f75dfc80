"""Redocly CLI and Spectral find nothing to say about the OpenAPI document, with their recommended rules."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.servers import Duetime
from tests.skips import skip

HERE = Path(__file__).parent
PROGRAMS = HERE / "node_modules/.bin"
SECONDS_MAX = 120
OFFLINE = {"REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true"}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The document as a service serves it."""
    folder = tmp_path_factory.mktemp("linters")
    with Duetime(folder / "service") as service:
        served = service.request("GET", "/api/v1/openapi.json", headers={}).body
    document = folder / "openapi.json"
    document.write_text(json.dumps(served, indent=1))
    return document


@pytest.mark.parametrize(
    ("program", "options"),
    [
        # In the strict set, the warnings of the recommended one are errors.
        ("redocly", ["--extends=recommended-strict"]),
        ("spectral", [f"--ruleset={HERE / 'ruleset.yaml'}", "--fail-severity=hint"]),
    ],
)
def test_linter_finds_nothing(program: str, options: list[str], document: Path) -> None:
    command = PROGRAMS / program
    if shutil.which("node") is None:
        skip("Node.js is not installed")
    if not command.exists():
        skip(f"{program} is not installed: `npm ci` in tests/linters failed, see the output of `make`")
    ran = subprocess.run(
        [command, "lint", *options, document.name],
        cwd=document.parent,
        env=os.environ | OFFLINE,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
