"""``duetime stats`` and ``duetime destinations``: the overview of the service."""

from __future__ import annotations

import argparse
import sys

from duetime.client import ActivityPoint, Client, ForecastStep, Overview, Status
from duetime.commands import output
from duetime.overdue import TEXTS

_MINUTE_SECONDS = 60
_TEXTS: dict[str, str] = {reason.value: text for reason, text in TEXTS.items()}


def stats(client: Client, options: argparse.Namespace) -> int:
    overview = client.overview()
    if options.json:
        output.print_json(overview)
    else:
        print(*output.fields(_lines(overview)), sep="\n")
    return 0


def _lines(overview: Overview) -> list[tuple[str, str]]:
    about = "~" if overview.estimated else ""
    lines = [(status.value, f"{about}{overview.statuses.get(status, 0)}") for status in Status]
    lines.append(("due soon", _due_soon(overview)))
    # The count and the reasons are sampled at different times, so they are not shown side by side.
    reasons = [f"{number} {_TEXTS.get(reason, reason)}" for reason, number in overview.overdue_reasons.items()]
    lines.append(("overdue", ", ".join(reasons) or output.counted(overview.overdue)))
    lines.append(("attempts", _attempts(overview)))
    lines.append(("lateness", _lateness(overview.activity)))
    if overview.failures is not None:
        most = [f"{each.timers} at {output.safe(each.destination)}" for each in overview.failures.destinations[:3]]
        of = f"of the latest {overview.failures.of} failed timers: " if most else ""
        lines.append(("failures", (of + ", ".join(most)) or "none"))
    unowned = f", {len(overview.unowned)} shards without an owner" if overview.unowned else ""
    lines.append(("instances", f"{len(overview.instances)}{unowned}"))
    return lines


def _due_soon(overview: Overview) -> str:
    hour, day = overview.forecast.hour, overview.forecast.day
    parts = (("minute", hour[:1]), ("hour", hour), ("24 hours", day))
    return ", ".join(f"{_sum(steps)} in the next {span}" for span, steps in parts)


def _sum(steps: list[ForecastStep]) -> str:
    about = "~" if any(step.estimated for step in steps) else ""
    return f"{about}{sum(step.timers for step in steps)}{'+' if any(step.more for step in steps) else ''}"


def _attempts(overview: Overview) -> str:
    minute = overview.activity[-max(1, _MINUTE_SECONDS // overview.step_seconds) :]
    if not minute:
        return "not measured yet"
    average = sum(point.fires_per_second for point in minute) / len(minute)
    span = len(minute) * overview.step_seconds
    return f"{minute[-1].fires_per_second:g} per second now, {average:.3g} on average over the last {span} seconds"


def _lateness(activity: list[ActivityPoint]) -> str:
    for point in reversed(activity):
        if point.lateness_p50_ms is not None and point.lateness_p99_ms is not None:
            when = output.relative(point.at)
            return f"p50 {point.lateness_p50_ms:g} ms, p99 {point.lateness_p99_ms:g} ms (measured {when})"
    return "no timer fired in the last hour"


def destinations(client: Client, options: argparse.Namespace) -> int:
    failures = client.overview().failures
    if options.json:
        output.print_json(failures)
    elif failures is None:
        print("this service's database can't list failed timers", file=sys.stderr)
    elif failures.destinations:
        rows = [
            (
                output.safe(each.destination),
                str(each.timers),
                output.relative(each.last_at),
                output.safe(each.last_error or ""),
            )
            for each in failures.destinations
        ]
        print(*output.table(("DESTINATION", "FAILED", "LATEST", "LAST ERROR"), rows, free_text=(3,)), sep="\n")
        print(f"counted in the latest {output.plural(failures.of, 'failed timer')}", file=sys.stderr)
    else:
        print("no failed timers", file=sys.stderr)
    return 0
