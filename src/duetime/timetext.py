"""Parses and formats times and durations.

Owns the contract's rules that a time has an offset and millisecond precision, and that a duration consists of whole
numbers with units. Any invalid text raises ``InvalidInput`` with the field's name, and no other error.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from duetime.errors import InvalidInput
from duetime.instants import Instant
from duetime.model import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS

TIME_MS_MAX = Instant(253_402_300_799_999)
"""9999-12-31T23:59:59.999Z, the last instant of a four-digit year."""

DURATION_MS_MAX = 36_525 * DAY_MS
"""100 years."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_NAIVE = datetime(1970, 1, 1)

# The ranges are explicit because datetime.fromisoformat accepts more than the contract (week dates, a missing minute,
# and hour 24 since Python 3.13). The group holds digits seven to nine, which it would silently drop.
_DATE_AND_TIME = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6}([0-9]{1,3})?)?"
_TIME = re.compile(_DATE_AND_TIME + r"(?:Z|[+-](?:[01][0-9]|2[0-3]):?[0-5][0-9])").fullmatch
_TIME_WITHOUT_OFFSET = re.compile(_DATE_AND_TIME).fullmatch
_LEAP_SECOND = re.compile(r"[0-9-]{10}T[0-9]{2}:[0-9]{2}:60").match


def parse_time(text: str, field: str) -> Instant:
    """Parse an RFC 3339 time; digits below the millisecond round up, so that a timer is never early."""
    try:  # the most common format: the reverse of ``format_time``, with its tables
        return _hour_ms(text[:14]) + _MINUTES_MS[text[14:17]] + _SECONDS_MS[text[17:19]] + _REST_MS[text[19:]]
    except (KeyError, InvalidInput):
        return _parse_any_time(text, field)


@lru_cache(maxsize=4_096)
def _hour_ms(text: str) -> Instant:
    return _parse_any_time(f"{text}00:00Z", "")


def _parse_any_time(text: str, field: str) -> Instant:
    match = _TIME(text)
    if match is None:
        # RFC 3339 allows a lower-case "t" and "z". They are rare, so try them only after a mismatch.
        text = text.upper() if text.isascii() else text
        match = _TIME(text)
        if match is None:
            raise InvalidInput(field, _time_fault(text))
    try:
        since_epoch = datetime.fromisoformat(text) - _EPOCH
    except ValueError:
        raise InvalidInput(field, "is a date that does not exist") from None
    micros = since_epoch.microseconds
    finer = match[1]
    if finer is not None and int(finer):
        micros += 1
    ms = (since_epoch.days * 86_400 + since_epoch.seconds) * 1_000 - (-micros // 1_000)
    if not 0 <= ms <= TIME_MS_MAX:
        raise InvalidInput(field, "must be in the years 1970 to 9999 (UTC)")
    return Instant(ms)


def _time_fault(text: str) -> str:
    if _TIME_WITHOUT_OFFSET(text):
        return "needs an offset or Z, like 2026-01-31T09:00:00Z"
    if _LEAP_SECOND(text):
        return "must not be a leap second: seconds go from 00 to 59"
    return "must be a time like 2026-01-31T09:00:00Z"


# A timer has up to five instants, mostly within a few hours. So the date is cached per hour and the rest is three
# lookups: 0.5 µs instead of 2.0 µs with datetime.isoformat.
_MINUTES = tuple(f"{n:02d}:" for n in range(60))
_SECONDS = tuple(f"{n:02d}." for n in range(60))
_MILLIS = tuple(f"{n:03d}Z" for n in range(1_000))
_MINUTES_MS = {text: n * MINUTE_MS for n, text in enumerate(_MINUTES)}
_SECONDS_MS = {text[:2]: n * SECOND_MS for n, text in enumerate(_SECONDS)}
_REST_MS = {"Z": 0} | {f".{text}": n for n, text in enumerate(_MILLIS)}


@lru_cache(maxsize=4_096)
def _hour_text(hour: int) -> str:
    return (_EPOCH_NAIVE + timedelta(hours=hour)).strftime("%Y-%m-%dT%H:")


@lru_cache(maxsize=4_096)  # created_at mostly equals updated_at, and execute_at equals fire_at
def format_time(at: Instant) -> str:
    """Format as ``YYYY-MM-DDTHH:MM:SS.sssZ``; works for any instant that ``parse_time`` can return."""
    hour, ms = divmod(at, HOUR_MS)
    minute, ms = divmod(ms, MINUTE_MS)
    second, ms = divmod(ms, SECOND_MS)
    return _hour_text(hour) + _MINUTES[minute] + _SECONDS[second] + _MILLIS[ms]


_UNITS = (("d", DAY_MS), ("h", HOUR_MS), ("m", MINUTE_MS), ("s", SECOND_MS), ("ms", 1))
# Fifteen digits are enough for the longest duration in the smallest unit.
_DURATION = re.compile("".join(f"(?:([0-9]{{1,15}}){unit})?" for unit, _ in _UNITS)).fullmatch


@lru_cache(maxsize=1_024)  # clients send the same few texts repeatedly, several per request
def parse_duration(text: str, field: str) -> int:
    """The milliseconds of a text like ``500ms``, ``30s`` or ``1h30m``: each unit at most once, largest first."""
    match = _DURATION(text)
    if match is None or not text:
        raise InvalidInput(field, "must be a duration like 500ms, 30s, 10m, 24h, 1h30m or 7d")
    total = sum(int(count) * size for count, (_, size) in zip(match.groups(), _UNITS, strict=True) if count)
    if total > DURATION_MS_MAX:
        raise InvalidInput(field, f"must be at most 100 years ({DURATION_MS_MAX // DAY_MS}d)")
    return total


@lru_cache(maxsize=1_024)  # the same few durations appear in every timer
def format_duration(ms: int) -> str:
    """Format a duration with the largest units possible, without zero parts: ``1h30m``, ``7d``, ``0s``.

    Durations below two days are in hours: people say 24h and 36h.
    """
    parts = []
    for unit, size in _UNITS:
        if size == DAY_MS and ms < 2 * DAY_MS:
            continue
        count, ms = divmod(ms, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
