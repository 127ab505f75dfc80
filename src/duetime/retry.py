"""When a failed attempt is tried again: exponential backoff, capped, jittered, within a count and a window, and never a
hot loop."""

from __future__ import annotations

from collections.abc import Callable

from duetime.model import SECOND_MS, RetryPolicy

QUICK_RETRIES_MAX = 4
LATER_MS_MIN = SECOND_MS
"""How long every retry after the quick ones waits at least, whatever the policy says and chance draws."""

Uniform = Callable[[float, float], float]
"""Draws a number between two bounds; injected, so that a test knows what comes."""


def retry_at(
    policy: RetryPolicy, *, failures: int, started_at: int, now: int, retry_after_ms: int | None, uniform: Uniform
) -> int | None:
    """The instant of the next attempt after the ``failures``-th failed one, or None when the policy is exhausted.

    ``started_at`` is when the retry window opened: with the first attempt, not with ``execute_at``, and later by what
    held attempts back. Time that the service was down is not held against the timer. A ``Retry-After`` can only put the
    attempt off, and never beyond ``max_interval_ms``.
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
    at = now + round(delay_ms)
    return at if at <= started_at + policy.max_duration_ms else None
