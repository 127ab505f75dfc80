"""Times and durations as people type them: "tomorrow 9am", "in 10 minutes", "2026-12-24 18:00", or RFC 3339.

Pure: the caller passes the current time and the time zone. A text that is not understood, a time that has passed, and a
local time that daylight saving skips or repeats raise ``NotUnderstood`` with a message that says what to type.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta, tzinfo

from msgspec import Struct

from duetime.errors import InvalidInput
from duetime.model import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS
from duetime.timetext import format_duration, parse_duration, parse_time

AHEAD_FORMS = (
    "'tomorrow 9:00', 'next monday 8:30', 'noon', 'in 10 minutes', '2030-12-24 18:00' (local time) or "
    "2030-12-24T18:00:00Z"
)
ANY_FORMS = "'today', 'yesterday 9:00', '2 hours ago', '2030-12-24 18:00' (local time) or 2030-12-24T18:00:00Z"
DURATION_FORMS = "30s, 10m, 1h30m, 7d or '10 minutes'"

# The web page has the same grammar, in time.js.
_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_COUNTS = {"a": 1, "an": 1, "one": 1, "two": 2, "three": 3, "half": 0.5}
_UNITS = {
    name: size
    for size, names in (
        (1, "ms millisecond milliseconds"),
        (SECOND_MS, "s sec secs second seconds"),
        (MINUTE_MS, "m min mins minute minutes"),
        (HOUR_MS, "h hr hrs hour hours"),
        (DAY_MS, "d day days"),
        (7 * DAY_MS, "w week weeks"),
    )
    for name in names.split()
}
_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?|[a-z]+) ?([a-z]+?)(?=[0-9 ]|$) ?").match
_WITH_OFFSET = re.compile(
    r"(\d{4}-\d\d-\d\d)[t ](\d{1,2}:\d\d)(:\d\d(?:\.\d{1,9})?)? ?(z|utc|[+-]\d\d:?\d\d)", re.ASCII
).fullmatch
_DATED = re.compile(r"(\d{4}-\d\d-\d\d)(?:[t ](.+))?", re.ASCII).fullmatch
_CLOCK = re.compile(r"(?:at )?(?P<clock>(\d{1,2})(?::(\d\d))?(?::(\d\d))? ?(am|pm)?|noon|midnight)", re.ASCII).fullmatch


class NotUnderstood(ValueError):
    """The text names no time, or no usable one; the message says what to type."""


class When(Struct, frozen=True):
    """A time that was typed: an RFC 3339 time, or a delay. ``local`` is set if it was computed from a local time."""

    at: str | None = None
    delay: str | None = None
    local: datetime | None = None

    def __str__(self) -> str:
        return self.at or f"in {self.delay}"


def duration(text: str) -> str:
    """The duration as the API takes it."""
    left = re.sub(r"\b(?:and|of)\b|,", " ", text.lower())
    left = re.sub(r"\bhalf an?\b", "half", " ".join(left.split()))
    total = 0.0
    while (part := _PART(left)) and part[2] in _UNITS and (part[1] in _COUNTS or part[1][0].isdigit()):
        total += (_COUNTS.get(part[1]) or float(part[1])) * _UNITS[part[2]]
        left = left[part.end() :]
        if not left:
            return format_duration(round(total))
    raise NotUnderstood(f"{text!r} is not a duration like {DURATION_FORMS}")


def ahead(text: str, now: datetime, zone: tzinfo | None = None) -> When:
    """The future time that ``text`` names. ``zone`` is the local time zone; the system's if None."""
    return _read(text, now, zone, past=False)


def any_time(text: str, now: datetime, zone: tzinfo | None = None) -> When:
    """The time that ``text`` names, past or future, as an RFC 3339 time. A day without a time is its midnight."""
    return _read(text, now, zone, past=True)


def _read(text: str, now: datetime, zone: tzinfo | None, *, past: bool) -> When:
    typed = " ".join(text.lower().split())
    if stamp := _WITH_OFFSET(typed):
        return When(at=_with_offset(text, stamp))
    if typed == "now" or typed.startswith("in "):
        delay = "0s" if typed == "now" else duration(typed[3:])
        return _shifted(now, delay, 1, zone) if past else When(delay=delay)
    if past and typed.endswith(" ago"):
        return _shifted(now, duration(typed[:-4]), -1, zone)
    local = _local(typed, now.astimezone(zone).replace(tzinfo=None), past=past)
    if local is not None:
        at = _instant(local, zone)
        if not past and at <= now:
            raise NotUnderstood(f"{text!r} has passed: it is {shown(now.astimezone(zone))} now")
        return When(at=_rfc3339(at), local=at.astimezone(zone))
    unknown = NotUnderstood(f"{text!r} is not a time like {ANY_FORMS if past else AHEAD_FORMS}")
    if past:  # "10 minutes" could mean before or after
        raise unknown
    try:
        return When(delay=duration(typed))
    except NotUnderstood:
        raise unknown from None


def shown(local: datetime) -> str:
    """A local time with its time zone, as people read it."""
    return f"{local:%a %Y-%m-%d %H:%M:%S %Z}"


def _rfc3339(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _with_offset(text: str, stamp: re.Match[str]) -> str:
    day, clock, seconds, offset = stamp.groups()
    at = f"{day}T{clock:0>5}{seconds or ':00'}{'Z' if offset in ('z', 'utc') else offset}"
    try:
        parse_time(at, "")
    except InvalidInput as error:
        raise NotUnderstood(f"{text!r} {error.reason}") from None
    return at


def _shifted(now: datetime, delay: str, sign: int, zone: tzinfo | None) -> When:
    try:
        at = now + sign * timedelta(milliseconds=parse_duration(delay, ""))
    except (InvalidInput, OverflowError):
        raise NotUnderstood(f"{delay} is too long") from None
    return When(at=_rfc3339(at), local=at.astimezone(zone))


def _local(typed: str, now: datetime, *, past: bool) -> datetime | None:
    """The local time that the words name, or None. A time of day that has passed means tomorrow's, one of a weekday
    next week's."""
    clock, days = typed, 1  # what names the time of day, and how much later it is if it has passed
    if dated := _DATED(typed):
        day, clock, days = _date(dated[1]), dated[2] or "", 0
    elif (bare := _CLOCK(typed)) and not bare["clock"].isdigit():
        day = now.date()
    else:
        name, _, clock = re.sub("^(?:on|next) ", "", typed).partition(" ")
        named = _days_ahead(name, now, past=past)
        if named is None:
            return None
        day, days = now.date() + timedelta(days=named), 7 if name not in ("today", "tomorrow", "yesterday") else 0
    found = _CLOCK(clock)
    if found is None and (clock or not past):
        return None
    local = datetime.combine(day, time() if found is None else _time_of_day(found))
    return local + timedelta(days=days) if local <= now and not past else local


def _date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise NotUnderstood(f"{text} is a date that does not exist") from None


def _days_ahead(name: str, now: datetime, *, past: bool) -> int | None:
    days = {"today": 0, "tomorrow": 1} | ({"yesterday": -1} if past else {})
    if len(name) >= 3:
        for number, weekday in enumerate(_WEEKDAYS):
            if weekday.startswith(name):
                return (number - now.weekday()) % 7
    return days.get(name)


def _time_of_day(found: re.Match[str]) -> time:
    if found["clock"] in ("noon", "midnight"):
        return time(12 if found["clock"] == "noon" else 0)
    hour, minute, second = (int(part or 0) for part in found.groups()[1:4])
    half = found[5]
    if half and not 1 <= hour <= 12:
        raise NotUnderstood(f"{found['clock']!r} is not a time of day: with am or pm the hour is from 1 to 12")
    try:
        return time(hour % 12 + (12 if half == "pm" else 0) if half else hour, minute, second)
    except ValueError:
        raise NotUnderstood(f"{found['clock']!r} is not a time of day, from 0:00 to 23:59:59") from None


def _instant(local: datetime, zone: tzinfo | None) -> datetime:
    """The instant of a local time that happens exactly once."""
    # Not astimezone: in a skipped hour of the system's time zone it confuses the folds.
    try:
        stamps = [local.replace(tzinfo=zone, fold=fold).timestamp() for fold in (0, 1)]
        first, second = (datetime.fromtimestamp(stamp, UTC) for stamp in stamps)
    except (ValueError, OverflowError):
        raise NotUnderstood(f"{local} is out of range") from None
    if first > second:
        then = first.astimezone(zone)
        raise NotUnderstood(
            f"{local} does not exist in the local time zone: the clocks are set forward. Did you mean {then:%H:%M:%S}?"
        )
    if first < second:
        both = " or ".join(at.astimezone(zone).isoformat() for at in (first, second))
        raise NotUnderstood(f"{local} happens twice in the local time zone: the clocks are set back. Give {both}")
    return first
