"""Decides when to retry a failed attempt: exponential backoff with a cap and jitter, limited by count and duration."""

from __future__ import annotations

from collections.abc import Callable

from duetime.instants import FireAt, Instant
from duetime.model import SECOND_MS, RetryPolicy

QUICK_RETRIES_MAX = 4
LATER_MS_MIN = SECOND_MS
"""The shortest wait before every retry after the quick ones, whatever the policy and the jitter say."""

Uniform = Callable[[float, float], float]
"""Draws a random number between two bounds; injected, so that tests are deterministic."""


def retry_at(
    policy: RetryPolicy,
    *,
    failures: int,
    started_at: Instant,
    now: Instant,
    retry_after_ms: int | None,
    uniform: Uniform,
) -> FireAt | None:
    """When to make the next attempt after the ``failures``-th failed one; None if no retries are left.

    The retry window opens at ``started_at``: when the first attempt was sent, plus the time for which attempts were
    held back. ``Retry-After`` can only postpone the attempt, by at most ``max_interval_ms``.
    """
    if failures > policy.max_retries:
        return None
    try:
        backoff_ms = policy.initial_interval_ms * policy.backoff_multiplier ** (failures - 1)
    except OverflowError:
        backoff_ms = policy.max_interval_ms
    delay_ms = min(backoff_ms, policy.max_interval_ms)
    if policy.jitter:
        delay_ms = uniform(0, delay_ms)
    if retry_after_ms is not None:
        delay_ms = max(delay_ms, min(retry_after_ms, policy.max_interval_ms))
    if failures > QUICK_RETRIES_MAX:
        delay_ms = max(delay_ms, LATER_MS_MIN)
    at = FireAt(now + round(delay_ms))
    return at if at <= started_at + policy.max_duration_ms else None
