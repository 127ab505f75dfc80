"""The documents are true: every setting, metric and endpoint is in them, links lead somewhere, the example works."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import pytest

from duetime.doors.durable import BASE, DurableDoor
from duetime.doors.http import Keys
from duetime.engine.watchdog import Reason
from duetime.model import Status, Unsent
from duetime.settings import SETTINGS
from duetime.telemetry import Telemetry
from tests.servers import Duetime

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_setting_is_documented(setting: object) -> None:
    page = (ROOT / "docs/operate/settings.md").read_text()
    assert f"| `{setting.name}` |" in page and setting.meaning in page  # type: ignore[attr-defined]


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs/operate/metrics.md").read_text()
    text = Telemetry().page({status: 0 for status in Status}).decode()
    for name in re.findall(r"# TYPE (\w+) (?:gauge|counter|histogram)", text):
        if not name.endswith("_created"):
            assert f"`{name}" in page, name


@pytest.mark.parametrize("label", [*Reason, *Unsent])
def test_every_reason_and_cause_is_documented(label: str) -> None:
    assert f"| `{label}` |" in (ROOT / "docs/operate/metrics.md").read_text()


def test_every_endpoint_is_documented() -> None:
    page = (ROOT / "docs/platform-api.md").read_text()
    for path in (
        "POST /timers",
        "GET /timers/{id}",
        "GET /timers",
        "PUT /timers/{id}",
        "DELETE /timers/{id}",
        "/health",
    ):
        assert path in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paths_in_the_text_exist(page: Path) -> None:
    for name in re.findall(r"`((?:tests|docs|bench|src)/[\w/.-]+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_every_operation_of_the_durable_api_is_documented() -> None:
    page = (ROOT / "docs/durable-api.md").read_text()
    door = DurableDoor(None, Keys(None), Telemetry(), None, request_bytes_max=1, batch_bytes_max=1, shards=1)  # type: ignore[arg-type]
    for operation in door.operations():
        assert f"{operation.method} {operation.path.removeprefix(BASE)}" in page, operation.path


def test_the_example_of_the_durable_api_works_when_pasted(tmp_path: Path) -> None:
    example = re.search(r"```sh\n(.*?)```", (ROOT / "docs/durable-api.md").read_text(), re.DOTALL)
    assert example is not None
    with Duetime(tmp_path, bare=True) as service:
        text = example[1].replace("localhost:3000", f"localhost:{service.port}")
        ran = subprocess.run(
            ["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
    assert ran.stdout.count('"id":"order-17-reminder"') == 3, ran.stdout + ran.stderr


def test_the_example_of_the_readme_works_when_pasted(tmp_path: Path) -> None:
    """As written, but for the ports and the time, which a test can't take for granted: the door wants five seconds."""
    example = re.search(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    with Duetime(tmp_path, bare=True) as service, socket.socket() as held:
        # The receiver's port is held until it has it: others could be given it meanwhile.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        text = example[1].replace("8080", str(held.getsockname()[1])).replace("seconds=6", "seconds=9")
        text = text.replace("localhost:3000", f"localhost:{service.port}").replace("/tmp/", f"{service.directory}/")
        ran = subprocess.run(
            ["bash", "-c", text], cwd=service.directory, capture_output=True, text=True, timeout=60, check=False
        )
    assert '"timer created successfully"' in ran.stdout, ran.stderr
    assert 'called back: {"hello": "in six seconds"}' in ran.stdout
