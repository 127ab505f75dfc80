"""Every message that docs/troubleshooting.md quotes is one that the code produces."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from duetime import overdue
from duetime.commands.server_checks import ADVICE

ROOT = Path(__file__).parents[2]
VARIES = "…"
FIXED_CHARS_MIN = 10
_FORMATS = re.compile(r"%[-0-9.]*[sdr]")
_ADJACENT = re.compile(f"{VARIES}+")


def quoted() -> list[str]:
    """The first column of all tables with the heading "message"."""
    found, in_table = [], False
    for line in (ROOT / "docs/troubleshooting.md").read_text().splitlines():
        in_table = line.startswith("| message |") or (in_table and line.startswith("|"))
        if in_table and (cell := re.match(r"\| (`+) ?(.+?) ?\1 \| ", line)):
            found.append(cell[2])
    return found


def texts(path: Path) -> Iterator[str]:
    """The strings of a module, with ``VARIES`` for each part that is not constant."""
    tree = ast.parse(path.read_text())
    constants = {
        assigned.targets[0].id: assigned.value.value
        for assigned in tree.body
        if isinstance(assigned, ast.Assign)
        and isinstance(assigned.targets[0], ast.Name)
        and isinstance(assigned.value, ast.Constant)
        and isinstance(assigned.value.value, str)
    }

    def part(node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        inner = node.value if isinstance(node, ast.FormattedValue) else None
        return constants.get(inner.id, VARIES) if isinstance(inner, ast.Name) else VARIES

    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield _ADJACENT.sub(VARIES, "".join(map(part, node.values)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _FORMATS.sub(VARIES, node.value)


TEXTS = {text for path in ROOT.glob("src/duetime/**/*.py") for text in texts(path)} | {
    f"{VARIES} timers wait {overdue.TEXTS[reason]}: {ADVICE[reason]}" for reason in overdue.Reason
}


def says(text: str, message: str) -> bool:
    """Whether the text may produce the message: ``VARIES`` in it stands for anything."""
    parts, quoted_chars = text.split(VARIES), len(message.replace(VARIES, ""))
    if sum(map(len, parts)) < max(min(FIXED_CHARS_MIN, quoted_chars), quoted_chars / 3):
        return False  # almost any message would do
    if not all(part in message for part in parts):
        return False
    pattern = ".+".join(map(re.escape, parts))
    return any(re.fullmatch(pattern, end) for end in (message, message.removeprefix(VARIES).strip()))


@pytest.mark.parametrize("message", quoted())
def test_quoted_message_is_in_the_code(message: str) -> None:
    assert any(says(text, message) for text in TEXTS)


def test_messages_are_found() -> None:
    assert len(quoted()) > 60
    assert not any(says(text, "this is a message that nothing in the code can produce") for text in TEXTS)
