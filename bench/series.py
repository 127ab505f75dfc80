"""Arithmetic on measured series: percentiles of sorted values and counts per tenth of a second."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

BUCKET_SECONDS = 0.1


def percentile(ascending: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` of the values do not exceed; 0 if there are none."""
    if not ascending:
        return 0.0
    return ascending[min(len(ascending) - 1, int(len(ascending) * percent / 100))]


def percentiles(ascending: Sequence[float]) -> list[float]:
    """The percentiles from 0 to 100: 101 values, the last one is the maximum; empty if there are no values."""
    return [percentile(ascending, percent) for percent in range(101)] if ascending else []


def buckets(seconds: Iterable[float]) -> list[int]:
    """How many of the instants, in seconds after the start, fall into each bucket."""
    counts: list[int] = []
    for at in seconds:
        place = max(0, int(at / BUCKET_SECONDS))
        if place >= len(counts):
            counts.extend([0] * (place + 1 - len(counts)))
        counts[place] += 1
    return counts


def rate_between(counts: Sequence[int], begin: float, end: float) -> float:
    """Events per second in the whole buckets from ``begin`` to ``end``, in seconds after the series' start."""
    first, last = round(begin / BUCKET_SECONDS), round(end / BUCKET_SECONDS)
    return sum(counts[max(0, first) : last]) / ((last - first) * BUCKET_SECONDS) if last > first else 0.0
