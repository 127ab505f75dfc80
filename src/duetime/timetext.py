"""Times and durations as text: what a client may write, and the one way each is printed.

Owns the rule of the contract that an instant carries an offset and has millisecond precision, and that a duration is
whole numbers with units. Every text that breaks it raises ``InvalidInput`` with the field's name, and nothing else
is ever raised for a text.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from duetime.errors import InvalidInput
from duetime.model import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS

TIME_MS_MAX = 253_402_300_799_999
"""9999-12-31T23:59:59.999Z, the last instant that four digits of year can print."""

DURATION_MS_MAX = 36_525 * DAY_MS
"""100 years."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_NAIVE = datetime(1970, 1, 1)

# The ranges are spelled out because datetime.fromisoformat takes more than the contract does (week dates, a missing
# minute, and from Python 3.13 on the hour 24). The group holds what it would drop without a word: digits seven to nine.
_DATE_AND_TIME = r"[0-9]{4}-[0-9]{2}-[0-9]{2}T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6}([0-9]{1,3})?)?"
_TIME = re.compile(_DATE_AND_TIME + r"(?:Z|[+-](?:[01][0-9]|2[0-3]):?[0-5][0-9])").fullmatch
_TIME_WITHOUT_OFFSET = re.compile(_DATE_AND_TIME).fullmatch
_LEAP_SECOND = re.compile(r"[0-9-]{10}T[0-9]{2}:[0-9]{2}:60").match


def parse_time(text: str, field: str) -> int:
    """Milliseconds since the epoch of an RFC 3339 time; digits below the millisecond round up, so never too early."""
    try:  # as most programs print it: the way back through the tables of ``format_time``
        return _hour_ms(text[:14]) + _MINUTES_MS[text[14:17]] + _SECONDS_MS[text[17:19]] + _REST_MS[text[19:]]
    except (KeyError, InvalidInput):
        return _parse_any_time(text, field)


@lru_cache(maxsize=4_096)
def _hour_ms(text: str) -> int:
    return _parse_any_time(f"{text}00:00Z", "")


def _parse_any_time(text: str, field: str) -> int:
    match = _TIME(text)
    if match is None:
        # RFC 3339 lets "t" and "z" be lower case. Hardly anybody writes them, so only a miss pays for it.
        text = text.upper() if text.isascii() else text
        match = _TIME(text)
        if match is None:
            raise InvalidInput(field, _time_fault(text))
    try:
        since_epoch = datetime.fromisoformat(text) - _EPOCH
    except ValueError:
        raise InvalidInput(field, "is not a date that exists") from None
    micros = since_epoch.microseconds
    finer = match[1]
    if finer is not None and int(finer):
        micros += 1
    ms = (since_epoch.days * 86_400 + since_epoch.seconds) * 1_000 - (-micros // 1_000)
    if not 0 <= ms <= TIME_MS_MAX:
        raise InvalidInput(field, "must lie in the years 1970 to 9999 (UTC)")
    return ms


def _time_fault(text: str) -> str:
    if _TIME_WITHOUT_OFFSET(text):
        return "needs an offset or Z, like 2026-01-31T09:00:00Z"
    if _LEAP_SECOND(text):
        return "must not be a leap second: seconds go from 00 to 59"
    return "must be a time like 2026-01-31T09:00:00Z"


# One timer is printed with up to five instants, most of them in a handful of hours, so the calendar's work is kept
# per hour and the rest is three look-ups. This took 0.5 µs where datetime.isoformat took 2.0.
_MINUTES = tuple(f"{n:02d}:" for n in range(60))
_SECONDS = tuple(f"{n:02d}." for n in range(60))
_MILLIS = tuple(f"{n:03d}Z" for n in range(1_000))
_MINUTES_MS = {text: n * MINUTE_MS for n, text in enumerate(_MINUTES)}
_SECONDS_MS = {text[:2]: n * SECOND_MS for n, text in enumerate(_SECONDS)}
_REST_MS = {"Z": 0} | {f".{text}": n for n, text in enumerate(_MILLIS)}


@lru_cache(maxsize=4_096)
def _hour_text(hour: int) -> str:
    return (_EPOCH_NAIVE + timedelta(hours=hour)).strftime("%Y-%m-%dT%H:")


@lru_cache(maxsize=4_096)  # created_at is mostly also updated_at, and execute_at is fire_at
def format_time(ms: int) -> str:
    """``YYYY-MM-DDTHH:MM:SS.sssZ``, for any instant that ``parse_time`` can give."""
    hour, ms = divmod(ms, HOUR_MS)
    minute, ms = divmod(ms, MINUTE_MS)
    second, ms = divmod(ms, SECOND_MS)
    return _hour_text(hour) + _MINUTES[minute] + _SECONDS[second] + _MILLIS[ms]


_UNITS = (("d", DAY_MS), ("h", HOUR_MS), ("m", MINUTE_MS), ("s", SECOND_MS), ("ms", 1))
# Fifteen digits hold more than the longest duration in its smallest unit and keep the numbers small.
_DURATION = re.compile("".join(f"(?:([0-9]{{1,15}}){unit})?" for unit, _ in _UNITS)).fullmatch


@lru_cache(maxsize=1_024)  # clients send the same few texts over and over, several per request
def parse_duration(text: str, field: str) -> int:
    """Milliseconds of a text like ``500ms``, ``30s`` or ``1h30m``: units fall and none comes twice."""
    match = _DURATION(text)
    if match is None or not text:
        raise InvalidInput(field, "must be a duration like 500ms, 30s, 10m, 24h, 1h30m or 7d")
    total = sum(int(count) * size for count, (_, size) in zip(match.groups(), _UNITS, strict=True) if count)
    if total > DURATION_MS_MAX:
        raise InvalidInput(field, f"must be at most 100 years ({DURATION_MS_MAX // DAY_MS}d)")
    return total


@lru_cache(maxsize=1_024)  # the same few are shown with every timer
def format_duration(ms: int) -> str:
    """The duration with each unit as large as it can be and the empty ones left out: ``1h30m``, ``7d``, ``0s``.

    Below two days hours stay hours: people say 24h and 36h.
    """
    parts = []
    for unit, size in _UNITS:
        if size == DAY_MS and ms < 2 * DAY_MS:
            continue
        count, ms = divmod(ms, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
