"""Every decision has a title and a summary for readers who don't know the project, and the index has them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs/decisions"
RECORDS = sorted(FOLDER.glob("0*.md"))
HEAD = re.compile(r"# (\d+)\. (.+)\n\nStatus: (accepted|superseded)[\s\S]*?\n\nSummary: (.+)\n\n## ")


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_decision_has_a_summary_and_is_in_the_index(path: Path) -> None:
    head = HEAD.match(path.read_text())
    assert head is not None, "a record begins with its title, the status and the summary, each on a line"
    number, title, status, summary = head.groups()
    assert path.name.startswith(f"{int(number):04}-")
    assert f"| {number} | [{title}]({path.name}) | {summary} | {status}" in (FOLDER / "README.md").read_text()
