"""Timers, attempts, namespaces and instances as lines for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from duetime.client import Attempt, Cluster, Namespace, OutcomeKind, Status, Timer
from duetime.commands.output import (
    absolute,
    both,
    fields,
    name_of,
    ranges,
    relative,
    safe,
    short,
    status_text,
    table,
)

PAYLOAD_CHARS_MAX = 2_000
ERROR_CHARS_MAX = 200
_OUTCOMES = {OutcomeKind.ANSWERED: "responded"}
COMPLETED_BY_ANSWER = 'any 2xx with an empty body, or 200 with {"ok": true}'


def when(timer: Timer) -> str:
    """The time that matters now: when it is due, or when it finished."""
    if timer.status is Status.PENDING:
        return relative(timer.fire_at)
    if timer.status is Status.EXECUTING:
        return "executing"
    return relative(timer.executed_at or timer.updated_at)


def one_line(timer: Timer) -> str:
    match timer.status:
        case Status.PENDING if timer.attempts:
            error = short(timer.last_error, ERROR_CHARS_MAX)
            rest = f"attempt {timer.attempts + 1} is due {both(timer.fire_at)}: {error}"
        case Status.PENDING:
            rest = f"due {both(timer.fire_at)}"
        case Status.EXECUTING:
            rest = f"attempt {timer.attempts}"
        case Status.FAILED:
            rest = f"{both(timer.executed_at or timer.updated_at)}: {short(timer.last_error, ERROR_CHARS_MAX)}"
        case _:
            rest = both(timer.executed_at or timer.updated_at)
    return f"{name_of(timer)}  {status_text(timer.status)}  {rest}"


def timers_table(timers: Iterable[Timer]) -> list[str]:
    rows = [
        (
            name_of(timer),
            timer.status.value,
            when(timer),
            absolute(timer.fire_at),
            str(timer.attempts),
            safe(timer.callback_url or timer.callback_subject or ""),
            safe(timer.last_error or ""),
        )
        for timer in timers
    ]
    heads = ("TIMER", "STATUS", "WHEN", "DUE", "ATTEMPTS", "TARGET", "LAST ERROR")
    return table(heads, rows, status_column=1, free_text=(5, 6), drop=(3, 4, 5))


def timer_fields(timer: Timer) -> list[str]:
    policy = timer.retry_policy
    target = f"{timer.callback_method} {timer.callback_url}" if timer.callback_url else timer.callback_subject or ""
    retries = [
        f"up to {policy.max_retries}, first after {policy.initial_interval}",
        f"backoff × {policy.backoff_multiplier:g} up to {policy.max_interval}",
        f"for {policy.max_retry_attempts_duration}",
    ]
    if policy.jitter:
        retries.append("with jitter")
    if policy.give_up_on:
        retries.append(f"gives up on {', '.join(map(str, policy.give_up_on))}")
    pairs = [
        ("timer", name_of(timer)),
        ("status", status_text(timer.status)),
        ("scheduled for", both(timer.execute_at)),
        ("due", both(timer.fire_at) if timer.fire_at != timer.execute_at else ""),
        ("finished", both(timer.executed_at) if timer.executed_at else ""),
        ("target", safe(target)),
        *[("header", safe(f"{name}: {value}")) for name, value in timer.callback_headers.items()],
        ("payload", _shown(timer.payload)),
        ("metadata", _shown(timer.metadata)),
        ("correlation id", safe(timer.correlation_id or "")),
        ("attempts", str(timer.attempts)),
        ("last error", short(timer.last_error, PAYLOAD_CHARS_MAX)),
        ("retries", ", ".join(retries) if policy.max_retries else "none"),
        ("timeout", str(timer.callback_timeout)),
        ("completed by", COMPLETED_BY_ANSWER if timer.response_protocol == "answer" else "any 2xx"),
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
            _OUTCOMES.get(attempt.outcome) or attempt.outcome.value.replace("_", " "),
            "" if attempt.status is None else str(attempt.status),
            safe(attempt.error or ""),
            safe(attempt.answer),
        )
        for attempt in attempts
    ]
    heads = ("ATTEMPT", "WHEN", "SENT", "TOOK", "OUTCOME", "HTTP", "ERROR", "RESPONSE")
    return table(heads, rows, free_text=(6, 7), drop=(2, 3, 5))


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
    heads = ("NAMESPACE", "STATE", "SHARDS", "RETENTION", "WEIGHT", "SECRETS", "CREATED")
    return table(heads, rows, drop=(6, 5, 2))


def namespace_fields(namespace: Namespace) -> list[str]:
    pairs = [
        ("namespace", namespace.name),
        ("state", "paused: its timers do not fire" if namespace.paused else "active"),
        ("shards", str(namespace.shards)),
        ("retention", namespace.retention or "the service's default"),
        ("weight", str(namespace.weight)),
        ("created", both(namespace.created_at)),
    ]
    for secret in namespace.secrets:
        signs = f"signs callbacks until {both(secret.expires_at)}" if secret.expires_at else "signs callbacks"
        pairs.append(("secret", f"{secret.id}, {signs}"))
    return fields(pairs)


def cluster_table(cluster: Cluster) -> list[str]:
    rows = [
        (
            instance.name,
            "serving" if instance.serving else "clock wrong",
            str(len(instance.shards)),
            ranges(instance.shards),
            instance.version,
            instance.clock_offset,
            relative(instance.started_at),
        )
        for instance in sorted(cluster.instances, key=lambda instance: instance.name)
    ]
    heads = ("INSTANCE", "STATE", "OWNS", "SHARDS", "VERSION", "CLOCK", "STARTED")
    return table(heads, rows, free_text=(3,))
