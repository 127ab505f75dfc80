"""The time of the next attempt after a failure."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from duetime.instants import Instant
from duetime.model import HOUR_MS, RetryPolicy
from duetime.retry import retry_at

NOW = Instant(1_800_000_000_000)
POLICY = RetryPolicy(max_retries=10, initial_interval_ms=1_000, max_interval_ms=10_000, jitter=False)


def low(a: float, b: float) -> float:
    return a


def high(a: float, b: float) -> float:
    return b


def after(policy: RetryPolicy, failures: int, retry_after_ms: int | None = None, started_ago_ms: int = 0) -> int | None:
    at = retry_at(
        policy,
        failures=failures,
        started_at=NOW - started_ago_ms,
        now=NOW,
        retry_after_ms=retry_after_ms,
        uniform=high,
    )
    return None if at is None else at - NOW


def test_backoff_grows_by_the_multiplier_up_to_the_maximum() -> None:
    assert [after(POLICY, n) for n in range(1, 7)] == [1_000, 2_000, 4_000, 8_000, 10_000, 10_000]


@pytest.mark.parametrize(("max_retries", "failures", "again"), [(0, 1, False), (3, 3, True), (3, 4, False)])
def test_retries_end_after_max_retries(max_retries: int, failures: int, again: bool) -> None:
    policy = RetryPolicy(max_retries=max_retries, jitter=False)
    assert (after(policy, failures) is not None) is again


def test_retries_end_with_the_retry_window() -> None:
    policy = RetryPolicy(max_retries=10, max_duration_ms=HOUR_MS, initial_interval_ms=1_000, jitter=False)
    assert after(policy, 1, started_ago_ms=HOUR_MS - 1_000) == 1_000
    assert after(policy, 1, started_ago_ms=HOUR_MS - 999) is None


def test_full_jitter_is_between_zero_and_the_backoff() -> None:
    policy = RetryPolicy(max_retries=10, initial_interval_ms=1_000, max_interval_ms=10_000)
    ends = [
        retry_at(policy, failures=3, started_at=NOW, now=NOW, retry_after_ms=None, uniform=draw) for draw in (low, high)
    ]
    assert ends == [NOW, NOW + 4_000]


@pytest.mark.parametrize(("failures", "most"), [(1, 1_000), (4, 8_000), (5, 10_000), (9, 10_000)])
def test_jitter_is_limited_by_the_maximum_interval(failures: int, most: int) -> None:
    policy = RetryPolicy(max_retries=10, initial_interval_ms=1_000, max_interval_ms=10_000)
    drawn: list[tuple[float, float]] = []

    def half(a: float, b: float) -> float:
        drawn.append((a, b))
        return (a + b) / 2

    at = retry_at(policy, failures=failures, started_at=NOW, now=NOW, retry_after_ms=None, uniform=half)
    assert drawn == [(0, most)] and at == NOW + most // 2


def test_no_random_number_is_drawn_without_jitter() -> None:
    def never(a: float, b: float) -> float:
        raise AssertionError

    assert retry_at(POLICY, failures=3, started_at=NOW, now=NOW, retry_after_ms=1, uniform=never) == NOW + 4_000


def test_retry_after_beyond_the_retry_window_ends_the_retries() -> None:
    policy = RetryPolicy(max_retries=10, max_duration_ms=5_000, initial_interval_ms=1_000, jitter=False)
    assert after(policy, 1, retry_after_ms=5_000) == 5_000
    assert after(policy, 1, retry_after_ms=5_001) is None


def test_retry_after_only_delays_and_is_limited_by_the_maximum_interval() -> None:
    assert after(POLICY, 1, retry_after_ms=5_000) == 5_000
    assert after(POLICY, 3, retry_after_ms=10) == 4_000
    assert after(POLICY, 1, retry_after_ms=10**9) == 10_000


def test_extreme_policy_does_not_overflow() -> None:
    policy = RetryPolicy(max_retries=100_000, backoff_multiplier=1_000.0, jitter=False)
    assert after(policy, 100_000) == policy.max_interval_ms


@pytest.mark.parametrize("draw", [low, high])
@pytest.mark.parametrize(
    ("initial_ms", "multiplier", "cap_ms"),
    [(1, 1.0, 1), (0, 1.0, 0), (1, 1.0, 10_000), (100, 1.0, 100), (1, 0.5, 10_000), (5_000, 2.0, 1)],
)
@pytest.mark.parametrize("jitter", [True, False])
def test_retries_are_never_more_frequent_than_about_one_per_second(
    initial_ms: int, multiplier: float, cap_ms: int, jitter: bool, draw: Callable[[float, float], float]
) -> None:
    policy = RetryPolicy(
        max_retries=1_000,
        initial_interval_ms=initial_ms,
        backoff_multiplier=multiplier,
        max_interval_ms=cap_ms,
        jitter=jitter,
    )
    now, attempts = NOW, 1
    while now < NOW + 30_000:
        at = retry_at(policy, failures=attempts, started_at=NOW, now=now, retry_after_ms=None, uniform=draw)
        assert at is not None
        now, attempts = at, attempts + 1
    assert attempts <= 36
