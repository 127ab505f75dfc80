"""The mutation test tool: finds mutants, runs the tests on a copy, and reports the survivors."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.mutants.edits import edits_of
from tests.mutants.running import Broken, Copy, Mutant
from tests.mutants.table import STAGES, path_of

MODULE = '''\
"""A docstring with 1 + 1, a < b and WHERE a = 1 AND b = 2."""

LIMIT: int | None = 3
FIND = "SELECT id FROM timers WHERE owner_id = $1 AND version < $2 FOR SHARE"
ASSIGN = "UPDATE timers SET version = 1 WHERE id = $1"


def grows(a: int | None, b: int) -> bool:
    log.info("%d < %d", a, b)
    return a is not None and a < b
'''


def changed(source: str) -> set[str]:
    """The changed line of each edit."""
    return {edit.apply(source).splitlines()[edit.line - 1].strip() for edit in edits_of(source)}


def test_python_and_sql_are_mutated_but_not_texts() -> None:
    assert changed(MODULE) == {
        "return a is None and a < b",
        "return a is not None or a < b",
        "return a is not None and a <= b",
        "return None",
        'FIND = "SELECT id FROM timers WHERE owner_id <> $1 AND version < $2 FOR SHARE"',
        'FIND = "SELECT id FROM timers WHERE owner_id = $1 OR version < $2 FOR SHARE"',
        'FIND = "SELECT id FROM timers WHERE owner_id = $1 AND version <= $2 FOR SHARE"',
        'FIND = "SELECT id FROM timers WHERE owner_id = $1 AND (1 = 1 OR version < $2) FOR SHARE"',
        'FIND = "SELECT id FROM timers WHERE (1 = 1 OR owner_id = $1) AND version < $2 FOR SHARE"',
        'FIND = "SELECT id FROM timers WHERE owner_id = $1 AND version < $2 "',
        'ASSIGN = "UPDATE timers SET version = 2 WHERE id = $1"',
        'ASSIGN = "UPDATE timers SET version = 1 WHERE id <> $1"',
    }


def test_mutants_remove_statements_conditions_and_changed_fields() -> None:
    assert changed("def f(x):\n    if x.ready:\n        x.go()\n    return replace(x, done=1, by=me)\n") == {
        "if not (x.ready):",
        "pass",
        "return None",
        "return replace(x,  by=me)",
        "return replace(x, done=1, )",
        "return replace(x, done=2, by=me)",
    }


@pytest.mark.parametrize("module", ["lifecycle", "stores/postgres/statements", "doors/platform"])
def test_mutants_of_a_module_are_valid_python(module: str) -> None:
    source = path_of(module).read_text()
    for edit in edits_of(source)[::20]:
        compile(edit.apply(source), module, "exec")


def test_the_modules_and_tests_in_the_table_exist() -> None:
    for module, stages in STAGES.items():
        assert path_of(module).is_file()
        for argument in (each for stage in stages for each in stage if each.startswith("tests/")):
            assert Path(argument).exists(), f"{module}: {argument}"


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """A copy of a tree with one module and one test, which does not test the limit itself."""
    root = tmp_path / "root"
    (root / "src").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "src" / "tiny.py").write_text("def fits(n):\n    return n < 10\n")
    (root / "tests" / "test_tiny.py").write_text("from tiny import fits\n\ndef test_fits():\n    assert fits(9)\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return Copy(root, tmp_path / "copy")


def verdicts(copy: Copy, *stages: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    source = "def fits(n):\n    return n < 10\n"
    mutants = [Mutant("tiny", Path("src/tiny.py"), edit, source) for edit in edits_of(source)]
    judged = {mutant.change[1]: copy.judge(mutant, stages) for mutant in mutants}
    return {change: (verdict.outcome, verdict.by) for change, verdict in judged.items()}


def test_a_tested_mutant_is_caught_and_an_untested_one_survives(copy: Copy, tmp_path: Path) -> None:
    assert verdicts(copy, ("tests",)) == {
        "return None": ("caught", "tests/test_tiny.py::test_fits"),
        "return n <= 10": ("survived", ""),
        "return n < 20": ("survived", ""),
    }
    for place in ("root", "copy"):
        assert (tmp_path / place / "src" / "tiny.py").read_text() == "def fits(n):\n    return n < 10\n"


def test_tests_that_fail_without_the_mutant_are_not_used(copy: Copy) -> None:
    with pytest.raises(Broken, match="pytest nowhere"):
        verdicts(copy, ("nowhere",))
