"""How values look to people: tables, relative times, colours on a terminal; and as JSON to machines.

What others wrote (an answer's first bytes, an error, an id) is printed with its control characters spelled out, so
that it can't move the cursor or change what was printed before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from duetime.client import Attempt, Cluster, Namespace, Status, Timer
from duetime.client.values import time_text, to_json
from duetime.clock import SystemClock
from duetime.model import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS

PAYLOAD_CHARS_MAX = 2_000
ERROR_CHARS_MAX = 60

_COLOURS = {
    Status.PENDING: "33",
    Status.EXECUTING: "36",
    Status.COMPLETED: "32",
    Status.FAILED: "31",
    Status.CANCELED: "90",
}
_clock = SystemClock()


def is_terminal() -> bool:
    return sys.stdout.isatty()


def print_json(value: Any) -> None:
    print(to_json(value))


# --- pieces --------------------------------------------------------------------------------------------------------


def safe(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short(text: str | None, chars_max: int) -> str:
    text = safe(text or "")
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"


def coloured(text: str, code: str) -> str:
    if not is_terminal() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{code}m{text}\x1b[0m"


def status_text(status: Status, width: int = 0) -> str:
    return coloured(f"{status.value:<{width}}", _COLOURS[status])


def name_of(timer: Timer) -> str:
    return safe(f"{timer.namespace}/{timer.id}")


def absolute(at: datetime) -> str:
    return time_text(at, "")


def relative(at: datetime, now_ms: int | None = None) -> str:
    """``in 9m 58s``, ``3s ago``: the two largest units."""
    ms = round(at.timestamp() * 1000) - (_clock.now() if now_ms is None else now_ms)
    left = (abs(ms) + SECOND_MS // 2) // SECOND_MS * SECOND_MS
    if not left:
        return "now"
    parts = []
    for unit, size in (("d", DAY_MS), ("h", HOUR_MS), ("m", MINUTE_MS), ("s", SECOND_MS)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
        elif parts:
            break
    text = " ".join(parts[:2])
    return f"in {text}" if ms > 0 else f"{text} ago"


def both(at: datetime) -> str:
    return f"{relative(at)} ({absolute(at)})"


def when(timer: Timer) -> str:
    """The time that matters now: when it is due, or when it was finished."""
    if timer.status is Status.PENDING:
        return relative(timer.fire_at)
    if timer.status is Status.EXECUTING:
        return "executing"
    return relative(timer.executed_at or timer.updated_at)


def one_line(timer: Timer) -> str:
    match timer.status:
        case Status.PENDING if timer.attempts:
            rest = f"attempt {timer.attempts + 1} is due {both(timer.fire_at)}: {short(timer.last_error, 200)}"
        case Status.PENDING:
            rest = f"due {both(timer.fire_at)}"
        case Status.EXECUTING:
            rest = f"attempt {timer.attempts}"
        case Status.FAILED:
            rest = f"{both(timer.executed_at or timer.updated_at)}: {short(timer.last_error, 200)}"
        case _:
            rest = both(timer.executed_at or timer.updated_at)
    return f"{name_of(timer)}  {status_text(timer.status)}  {rest}"


# --- wholes --------------------------------------------------------------------------------------------------------


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, coloured_column: int | None = None) -> list[str]:
    """Aligned lines. The cells of a column of statuses are coloured after they were aligned."""
    lines = [list(heads), *[list(row) for row in rows]]
    widths = [max(len(line[n]) for line in lines) for n in range(len(heads))]
    shown = []
    for number, line in enumerate(lines):
        cells = [f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)]
        cells[-1] = line[-1]
        if number and coloured_column is not None:
            cells[coloured_column] = status_text(Status(line[coloured_column]), widths[coloured_column])
        shown.append("  ".join(cells).rstrip())
    shown[0] = coloured(shown[0], "1")
    return shown


def timers_table(timers: Iterable[Timer]) -> list[str]:
    rows = [
        (
            name_of(timer),
            timer.status.value,
            when(timer),
            absolute(timer.fire_at),
            str(timer.attempts),
            safe(timer.callback_url or timer.callback_subject or ""),
            short(timer.last_error, ERROR_CHARS_MAX),
        )
        for timer in timers
    ]
    return table(("TIMER", "STATUS", "WHEN", "DUE", "TRIES", "TARGET", "LAST ERROR"), rows, coloured_column=1)


def fields(pairs: Iterable[tuple[str, str]]) -> list[str]:
    pairs = list(pairs)
    width = max(len(name) for name, _ in pairs)
    return [f"{name:<{width}}  {value}" for name, value in pairs]


def timer_fields(timer: Timer) -> list[str]:
    policy = timer.retry_policy
    target = f"{timer.callback_method} {timer.callback_url}" if timer.callback_url else timer.callback_subject or ""
    retries = (
        f"{policy.max_retries}, after {policy.initial_interval}, × {policy.backoff_multiplier:g}, "
        f"at most {policy.max_interval} apart, within {policy.max_retry_attempts_duration}"
    )
    pairs = [
        ("timer", name_of(timer)),
        ("status", status_text(timer.status)),
        ("asked for", both(timer.execute_at)),
        ("due", both(timer.fire_at) if timer.fire_at != timer.execute_at else ""),
        ("finished", both(timer.executed_at) if timer.executed_at else ""),
        ("target", safe(target)),
        *[("header", safe(f"{name}: {value}")) for name, value in timer.callback_headers.items()],
        ("payload", _shown(timer.payload)),
        ("metadata", _shown(timer.metadata)),
        ("correlation id", safe(timer.correlation_id or "")),
        ("attempts", str(timer.attempts)),
        ("last error", short(timer.last_error, PAYLOAD_CHARS_MAX)),
        ("retries", retries if policy.max_retries else "none"),
        ("timeout", str(timer.callback_timeout)),
        ("completed by", '200 with {"ok": true}' if timer.response_protocol == "answer" else "any 2xx"),
        ("created", both(timer.created_at)),
        ("updated", both(timer.updated_at)),
    ]
    return fields(pair for pair in pairs if pair[1])


def _shown(value: Any) -> str:
    return "" if value is None else short(msgspec.json.encode(value).decode(), PAYLOAD_CHARS_MAX)


def attempts_table(attempts: Iterable[Attempt]) -> list[str]:
    rows = [
        (
            str(attempt.attempt),
            relative(attempt.sent_at),
            absolute(attempt.sent_at),
            str(attempt.duration),
            attempt.outcome.value.replace("_", " "),
            "" if attempt.status is None else str(attempt.status),
            short(attempt.error or attempt.answer, ERROR_CHARS_MAX),
        )
        for attempt in attempts
    ]
    return table(("ATTEMPT", "WHEN", "SENT", "TOOK", "OUTCOME", "STATUS", "ERROR OR ANSWER"), rows)


def namespaces_table(namespaces: Iterable[Namespace]) -> list[str]:
    rows = [
        (
            namespace.name,
            "paused" if namespace.paused else "active",
            str(namespace.shards),
            namespace.retention or "default",
            str(namespace.weight),
            str(len(namespace.secrets)),
            relative(namespace.created_at),
        )
        for namespace in namespaces
    ]
    return table(("NAMESPACE", "STATE", "SHARDS", "RETENTION", "WEIGHT", "SECRETS", "CREATED"), rows)


def cluster_table(cluster: Cluster) -> list[str]:
    rows = [
        (
            instance.name,
            "serving" if instance.serving else "clock is off",
            str(len(instance.shards)),
            ranges(instance.shards),
            instance.version,
            instance.clock_offset,
            relative(instance.started_at),
        )
        for instance in sorted(cluster.instances, key=lambda instance: instance.name)
    ]
    return table(("INSTANCE", "STATE", "OWNS", "SHARDS", "VERSION", "CLOCK", "STARTED"), rows)


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as people write them: 0-3, 7."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in found) or "none"


def namespace_fields(namespace: Namespace) -> list[str]:
    return fields(
        [
            ("namespace", namespace.name),
            ("state", "paused: nothing of it fires" if namespace.paused else "active"),
            ("shards", str(namespace.shards)),
            ("retention", namespace.retention or "as the server's settings say"),
            ("weight", str(namespace.weight)),
            ("created", both(namespace.created_at)),
            *[
                ("secret", f"{secret.id}, " + ("signs" if not secret.expires_at else f"ends {both(secret.expires_at)}"))
                for secret in namespace.secrets
            ],
        ]
    )
