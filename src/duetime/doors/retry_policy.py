"""The retry policy in requests, with the same rules in snake_case and camelCase, and in responses."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

from msgspec import Meta, Struct

from duetime.errors import InvalidInput
from duetime.model import RetryPolicy
from duetime.timetext import format_duration, parse_duration

INTERVAL_MS_MIN = 100
"""The shortest interval that a policy may have. ``retry.py`` limits the rate of later retries."""

Retries = Annotated[
    int, Meta(ge=0, le=1_000, description="how often a failed attempt is retried; 3 by default", examples=[5])
]
Multiplier = Annotated[
    float, Meta(ge=1, le=1_000, description="the factor from each wait to the next; 2 by default", examples=[2])
]
GiveUpOn = Annotated[
    tuple[Annotated[int, Meta(ge=300, le=599)], ...],
    Meta(
        max_length=32,
        description="HTTP statuses that fail the timer at once, without another attempt; none by default",
        examples=[[400, 404, 410]],
    ),
]
SPAN = "([0-9]{1,15}d)?([0-9]{1,15}h)?([0-9]{1,15}m)?([0-9]{1,15}s)?([0-9]{1,15}ms)?"
Duration = Annotated[
    str,
    Meta(
        max_length=40,
        description="500ms, 30s, 10m, 24h, 1h30m, 7d",
        examples=["30s"],
        extra_json_schema={"pattern": f"^{SPAN}$", "minLength": 2},
    ),
]
Within = Annotated[
    Duration,
    Meta(description="the time from the first attempt within which retries start; 24h by default", examples=["24h"]),
]
Initial = Annotated[
    Duration, Meta(description="the wait before the first retry, at least 100ms; 30s by default", examples=["10s"])
]
Longest = Annotated[Duration, Meta(description="the longest wait, at least 100ms; 10m by default", examples=["10m"])]
Jitter = Annotated[bool, Meta(description="whether each wait is random, from 0 to its full length; true by default")]


class SnakeRetryPolicy(Struct, forbid_unknown_fields=True):
    """Omitted fields keep their defaults (three retries after up to 30s, 1m and 2m), or in an update their values."""

    max_retries: Retries | None = None
    max_retry_attempts_duration: Within | None = None
    initial_interval: Initial | None = None
    backoff_multiplier: Multiplier | None = None
    max_interval: Longest | None = None
    jitter: Jitter | None = None
    give_up_on: GiveUpOn | None = None


class CamelRetryPolicy(Struct, rename="camel", forbid_unknown_fields=True):
    """Omitted fields keep their defaults (three retries after up to 30s, 1m and 2m), or in an update their values."""

    max_retries: Retries | None = None
    max_retry_attempts_duration: Within | None = None
    initial_interval: Initial | None = None
    backoff_multiplier: Multiplier | None = None
    max_interval: Longest | None = None
    jitter: Jitter | None = None
    give_up_on: GiveUpOn | None = None


class RetryPolicyOut(Struct, rename="camel"):
    """The retry policy of a timer. A timer that a broker command created exceeds the limits for requests: it is retried
    until the message is published."""

    max_retries: Annotated[int, Meta(description="how often a failed attempt is retried", examples=[5])]
    max_retry_attempts_duration: Annotated[str, Meta(examples=["24h"])]
    initial_interval: Annotated[str, Meta(examples=["10s"])]
    backoff_multiplier: Annotated[float, Meta(examples=[2.0])]
    max_interval: Annotated[str, Meta(examples=["10m"])]
    jitter: bool
    give_up_on: Annotated[tuple[int, ...], Meta(examples=[[]])]


def checked_policy(given: SnakeRetryPolicy | CamelRetryPolicy, field: str, default: RetryPolicy) -> RetryPolicy:
    """The policy, with omitted fields from ``default``."""
    names = dict(zip(given.__struct_fields__, given.__struct_encode_fields__, strict=True))

    def ms(name: str, otherwise: int, least: int = 0) -> int:
        text = getattr(given, name)
        if text is None:
            return otherwise
        found = parse_duration(text, f"{field}.{names[name]}")
        if found < least:
            raise InvalidInput(f"{field}.{names[name]}", f"must be at least {format_duration(least)}")
        return found

    return RetryPolicy(
        max_retries=default.max_retries if given.max_retries is None else given.max_retries,
        max_duration_ms=ms("max_retry_attempts_duration", default.max_duration_ms),
        initial_interval_ms=ms("initial_interval", default.initial_interval_ms, INTERVAL_MS_MIN),
        backoff_multiplier=default.backoff_multiplier if given.backoff_multiplier is None else given.backoff_multiplier,
        max_interval_ms=ms("max_interval", default.max_interval_ms, INTERVAL_MS_MIN),
        jitter=default.jitter if given.jitter is None else given.jitter,
        give_up_on=default.give_up_on if given.give_up_on is None else given.give_up_on,
    )


@lru_cache(maxsize=1_024)  # every timer in a response has a policy, and few differ
def shown_policy(policy: RetryPolicy) -> RetryPolicyOut:
    return RetryPolicyOut(
        policy.max_retries,
        format_duration(policy.max_duration_ms),
        format_duration(policy.initial_interval_ms),
        policy.backoff_multiplier,
        format_duration(policy.max_interval_ms),
        policy.jitter,
        policy.give_up_on,
    )
