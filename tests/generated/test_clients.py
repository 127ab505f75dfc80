from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.docs import pasting
from tests.generated.clients import CLIENTS, NODE_MODULES, QUICK, Client, Missing, check_round_trip
from tests.servers import Duetime
from tests.skips import skip


@pytest.mark.parametrize("client", QUICK, ids=[client.name for client in QUICK])
def test_a_generated_client_makes_its_round_trip(client: Client, tmp_path: Path) -> None:
    try:
        check_round_trip(client, tmp_path)
    except Missing as missing:
        skip(missing)


def test_the_commands_of_the_page_work_when_pasted(tmp_path: Path) -> None:
    commands = pasting.blocks("docs/http-v1-api.md")[1]
    installed = {
        "npx openapi-typescript@7": NODE_MODULES / ".bin/openapi-typescript",
        "openapi-generator-cli": Path(sys.executable).with_name("openapi-generator-cli"),
    }
    for name, program in installed.items():
        if not program.exists():
            skip(f"{program} is not installed")
        commands = commands.replace(name, str(program))
    if shutil.which("java") is None:
        skip("java is not installed")
    with Duetime(tmp_path, bare=True) as service:
        ran = pasting.paste("set -e\n" + commands.replace("localhost:3000", f"localhost:{service.port}"), tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "CreateTimer" in (tmp_path / "duetime.d.ts").read_text()
    assert (tmp_path / "duetime-client/go.mod").exists()


@pytest.mark.parametrize("client", CLIENTS, ids=[client.name for client in CLIENTS])
def test_the_page_shows_the_result_of_each_pinned_generator(client: Client) -> None:
    page = (pasting.ROOT / "docs/http-v1-api.md").read_text()
    assert f"| {client.generator} | {client.version()} | {client.name} | passed |" in page
