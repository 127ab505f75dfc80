"""The documents are complete and correct: settings, metrics, endpoints, links, paths and examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from duetime.doors.http import Keys
from duetime.doors.http_v1 import HttpV1Door
from duetime.doors.http_v1_schema import BASE
from duetime.model import Status, Unsent
from duetime.overdue import Reason
from duetime.settings import SETTINGS
from duetime.telemetry import Telemetry
from tests.docs import pasting
from tests.servers import Duetime

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_every_setting_is_documented() -> None:
    page = (ROOT / "docs/operate/settings.md").read_text()
    assert not [one.name for one in SETTINGS if f"| `{one.name}` |" not in page or one.meaning not in page]


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


def test_capacity_in_the_checklist_agrees_with_the_benchmarks() -> None:
    table = (ROOT / "docs/operate/production.md").read_text().partition("## Capacity")[2].partition("## ")[0]
    figures = re.findall(r"\d[\d,]*(?:/s| bytes| MB)(?= \|)", table)
    assert len(figures) == 10 and not [one for one in figures if one not in (ROOT / "docs/benchmarks.md").read_text()]


def test_link_targets_exist() -> None:
    assert not [
        f"{page.name} links to {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#]+)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them of their text."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_headings_that_links_name_exist() -> None:
    assert not [
        f"{page.name} links to {target}#{anchor}"
        for page in PAGES
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())
        if anchor not in anchors(page.parent / target if target else page)
    ]


def test_index_contains_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = [page.relative_to(ROOT / "docs") for page in [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/operate/*.md")]]
    assert not [page for page in pages if page.name != "README.md" and f"]({page})" not in index]


def test_paths_in_the_text_exist() -> None:
    assert not [
        f"{page.name} names {name}"
        for page in PAGES
        for name in re.findall(r"`((?:tests|docs|bench|src)/[\w/.-]+)`", page.read_text())
        if not (ROOT / name).exists()
    ]


def test_modules_of_the_architecture_exist() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    sources = {path.name for path in ROOT.glob("s*/**/*.py") if ".venv" not in path.parts}
    for name in re.findall(r"`([\w/.]+(?:\.py|\.js|/))`", page):
        place = ROOT if name.startswith(("docs/", "tests/", "sdks/")) else ROOT / "src/duetime"
        assert (place / name).exists() or name in sources, name


def http_v1_api() -> HttpV1Door:
    """The API without what it works on, to ask for its operations."""
    return HttpV1Door(None, None, Keys(None), Telemetry(), None, request_bytes_max=1, batch_bytes_max=1, shards=1)  # type: ignore[arg-type]


def test_every_operation_of_the_http_v1_api_is_documented() -> None:
    page = (ROOT / "docs/http-v1-api.md").read_text()
    for operation in http_v1_api().operations():
        assert f"{operation.method} {operation.path.removeprefix(BASE)}" in page, operation.path


def test_example_of_the_http_v1_api_works_when_pasted(tmp_path: Path) -> None:
    example, _ = pasting.blocks("docs/http-v1-api.md")  # the other one needs generators: tests/generated
    with Duetime(tmp_path, bare=True) as service:
        ran = pasting.paste(example.replace("localhost:3000", f"localhost:{service.port}"), tmp_path)
    assert ran.stdout.count('"id":"order-17-reminder"') == 3, ran.stdout + ran.stderr


def test_example_of_the_platform_api_works_when_pasted(tmp_path: Path) -> None:
    [example] = pasting.blocks("docs/platform-api.md")
    with Duetime(tmp_path, bare=True) as service:
        ran = pasting.paste(example.replace("localhost:3000", f"localhost:{service.port}"), tmp_path)
    assert '"message":"timer created successfully"' in ran.stdout, ran.stdout + ran.stderr
