"""The results of a run, as tables: how many mutants were caught per module, and each survivor with the reason."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mutants.running import Mutant, Verdict

REASONS = Path(__file__).with_name("survivors.toml")
UNEXPLAINED = "a gap: no test notices"
MARK = "<!-- the rest is written by `make mutants DOCUMENT=1` -->"


def table(mutants: Sequence[Mutant], verdicts: Mapping[str, Verdict], every: Sequence[Mutant]) -> str:
    reasons = tomllib.loads(REASONS.read_text())
    lines = ["| module | mutants | run | caught | of these by a time limit | score |", "|---|---|---|---|---|---|"]
    modules = list(dict.fromkeys(mutant.module for mutant in every))
    for name, belongs in [(module, {module}) for module in modules] + [("all", set(modules))]:
        outcomes = [verdicts[mutant.key].outcome for mutant in mutants if mutant.module in belongs]
        if outcomes:
            caught = len(outcomes) - outcomes.count("survived")
            there = sum(mutant.module in belongs for mutant in every)
            numbers = (there, len(outcomes), caught, outcomes.count("timeout"), f"{caught / len(outcomes):.0%}")
            lines.append(f"| {name} | " + " | ".join(map(str, numbers)) + " |")
    lines += ["", "| survivor | change | why |", "|---|---|---|"]
    for mutant in sorted(mutants, key=lambda mutant: (mutant.module, mutant.edit.start)):
        if verdicts[mutant.key].outcome == "survived":
            before, after = mutant.change
            why = reasons.get(mutant.module, {}).get(f"{before} → {after}", UNEXPLAINED)
            lines.append(f"| {mutant.module}, {mutant.edit.scope} | {_cell(before)} → {_cell(after)} | {why} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return "`` " + text.replace("|", "\\|") + " ``" if text else "nothing"


def document(root: Path, mutants: Sequence[Mutant], verdicts: Mapping[str, Verdict], every: Sequence[Mutant]) -> None:
    path = root / "docs" / "mutants.md"
    kept = path.read_text().partition(MARK)[0]
    path.write_text(f"{kept}{MARK}\n\n{table(mutants, verdicts, every)}\n")
