"""The retry policy as clients write it: the same rules in snake_case and in camelCase."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

from msgspec import Meta, Struct

from duetime.errors import InvalidInput
from duetime.model import RetryPolicy
from duetime.timetext import format_duration, parse_duration

INTERVAL_MS_MIN = 100
"""How soon a policy may ask for a retry. ``retry.py`` has what bounds the rate of many retries."""

Retries = Annotated[int, Meta(ge=0, le=1_000, description="how many more attempts a failed one is given")]
Multiplier = Annotated[float, Meta(ge=1, le=1_000, description="how much longer each wait is than the one before")]
Duration = Annotated[str, Meta(max_length=40, description="500ms, 30s, 10m, 24h, 1h30m, 7d", examples=["30s"])]


class SnakeRetryPolicy(Struct):
    """What is left out keeps its default: three retries after 30s, 1m, 2m, each drawn from 0 to that."""

    max_retries: Retries | None = None
    max_retry_attempts_duration: Duration | None = None
    initial_interval: Duration | None = None
    backoff_multiplier: Multiplier | None = None
    max_interval: Duration | None = None
    jitter: bool | None = None


class CamelRetryPolicy(Struct, rename="camel"):
    """What is left out keeps its default: three retries after 30s, 1m, 2m, each drawn from 0 to that."""

    max_retries: Retries | None = None
    max_retry_attempts_duration: Duration | None = None
    initial_interval: Duration | None = None
    backoff_multiplier: Multiplier | None = None
    max_interval: Duration | None = None
    jitter: bool | None = None


def checked_policy(given: SnakeRetryPolicy | CamelRetryPolicy, field: str, default: RetryPolicy) -> RetryPolicy:
    """The policy that was given; what was not stays as in ``default``."""
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
    )


@lru_cache(maxsize=1_024)  # a service has few policies, and shows one with every timer
def shown_policy(policy: RetryPolicy) -> CamelRetryPolicy:
    return CamelRetryPolicy(
        policy.max_retries,
        format_duration(policy.max_duration_ms),
        format_duration(policy.initial_interval_ms),
        policy.backoff_multiplier,
        format_duration(policy.max_interval_ms),
        policy.jitter,
    )
