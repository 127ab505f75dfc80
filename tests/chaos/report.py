"""The results of the scenarios, as a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tests.chaos.checker import KINDS
from tests.chaos.world import Result

SHOWN_OF_A_KIND_MAX = 3
_SECONDS = ("takeover", "coming", "in flight", "others late", "late", "firing again", "stop", "gave up")


def table(results: Sequence[Result]) -> str:
    head = [
        "fault",
        "times",
        "acknowledged",
        "lost",
        "early",
        "after cancel",
        "moved",
        "ids",
        "duplicates",
        "unexcused",
    ]
    head += ["given up", "stale writes", "other violations", "took", "worst"]
    rows = [head]
    for result in results:
        found, figures = result.verdict.found, dict(result.figures)
        stale = figures.pop("stale writes", 0)
        counts = [result.times, result.verdict.acknowledged]
        counts += [found[kind] for kind in ("lost", "early", "after cancel", "moved", "ids")]
        counts += [result.verdict.duplicates, found["twice"], result.verdict.given_up, int(stale)]
        counts += [len(result.wrong) + found["unasked"] + found["answers"]]
        shown = ", ".join(_figure(name, value) for name, value in figures.items())
        rows.append([result.scenario, *map("{:,}".format, counts), f"{result.seconds:.0f} s", shown])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *numbers, worst = row
        cells = [first.ljust(widths[0]), *(n.rjust(w) for n, w in zip(numbers, widths[1:], strict=False)), worst]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _figure(name: str, value: float) -> str:
    return f"{name} {value:.2f} s" if name in _SECONDS else f"{value:g} {name}"


def details(result: Result) -> str:
    """The responses that clients got, and some violations of each kind."""
    answers = ", ".join(f"{count} × {what}" for what, count in result.answers.items())
    lines = [f"{result.scenario}: {answers}"]
    by_kind: dict[str, list[str]] = defaultdict(list)
    for violation in result.violations:
        kind = violation.partition(":")[0]
        by_kind[kind if kind in KINDS else "other"].append(violation)
    for kind, violations in by_kind.items():
        lines += [f"VIOLATION {violation}" for violation in violations[:SHOWN_OF_A_KIND_MAX]]
        if len(violations) > SHOWN_OF_A_KIND_MAX:
            lines.append(f"… and {len(violations) - SHOWN_OF_A_KIND_MAX} more of the kind {kind!r}")
    return "\n".join(lines)
