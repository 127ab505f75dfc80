"""Times and durations as people type them: "tomorrow 9:00", "in 10 minutes", "2026-12-24 18:00", or RFC 3339.

Pure: the caller passes the current time and the time zone. A text that is not understood, a time that has passed, and a
local time that daylight saving skips or repeats raise ``NotUnderstood`` with a message that says what to type.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta, tzinfo

from msgspec import Struct

from duetime.errors import InvalidInput
from duetime.model import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS
from duetime.timetext import format_duration, parse_time

AHEAD_FORMS = "'tomorrow 9:00', 'friday 9:00', 'in 10 minutes', '2030-12-24 18:00' (local time) or 2030-12-24T18:00:00Z"
ANY_FORMS = "'today', 'yesterday 9:00', '2 hours ago', '2030-12-24 18:00' (local time) or 2030-12-24T18:00:00Z"
DURATION_FORMS = "30s, 10m, 1h30m, 7d or '10 minutes'"

_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
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
_DURATION = re.compile(r"(?:[0-9]{1,12}\s*[a-z]+\s*)+").fullmatch
_PART = re.compile(r"([0-9]+)\s*([a-z]+)").findall
_WITH_OFFSET = re.compile(r"\d{4}-\d\d-\d\d[Tt].*(?:[Zz]|[+-]\d\d:?\d\d)", re.ASCII).fullmatch
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII).fullmatch
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?", re.ASCII).fullmatch


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
    lowered = text.strip().lower()
    parts = _PART(lowered) if _DURATION(lowered) else []
    if not parts or any(unit not in _UNITS for _, unit in parts):
        raise NotUnderstood(f"{text!r} is not a duration like {DURATION_FORMS}")
    return format_duration(sum(int(count) * _UNITS[unit] for count, unit in parts))


def ahead(text: str, now: datetime, zone: tzinfo | None = None) -> When:
    """The future time that ``text`` names. ``zone`` is the local time zone; the system's if None."""
    return _read(text, now, zone, past=False)


def any_time(text: str, now: datetime, zone: tzinfo | None = None) -> When:
    """The time that ``text`` names, past or future, as an RFC 3339 time. A day without a time is its midnight."""
    return _read(text, now, zone, past=True)


def _read(text: str, now: datetime, zone: tzinfo | None, *, past: bool) -> When:
    forms = ANY_FORMS if past else AHEAD_FORMS
    stripped = text.strip()
    if _WITH_OFFSET(stripped):
        try:
            parse_time(stripped, "")
        except InvalidInput as error:
            raise NotUnderstood(f"{text!r} {error.reason}") from None
        return When(at=stripped)
    words = stripped.lower().replace("t", " ", 1).split() if _DATE(stripped[:10]) else stripped.lower().split()
    if words[1:2] == ["at"]:
        del words[1]
    match words:
        case ["in", *rest] if rest:
            delay = duration(" ".join(rest))
            return _shifted(now, delay, 1, zone) if past else When(delay=delay)
        case [*rest, "ago"] if past and rest:
            return _shifted(now, duration(" ".join(rest)), -1, zone)
        case [day, clock] if _CLOCK(clock):
            at = _on(day, _clock(clock), now, zone, past=past)
        case [day] if past:
            at = _on(day, time(), now, zone, past=True)
        case _:
            at = None
    if at is None:
        raise NotUnderstood(f"{text!r} is not a time like {forms}")
    if not past and at <= now:
        raise NotUnderstood(f"{text!r} has passed: it is {shown(now.astimezone(zone))} now")
    return When(at=_rfc3339(at), local=at.astimezone(zone))


def shown(local: datetime) -> str:
    """A local time with its time zone, as people read it."""
    return f"{local:%a %Y-%m-%d %H:%M:%S %Z}"


def _rfc3339(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _shifted(now: datetime, delay: str, sign: int, zone: tzinfo | None) -> When:
    from duetime.timetext import parse_duration

    try:
        at = now + sign * timedelta(milliseconds=parse_duration(delay, ""))
    except (InvalidInput, OverflowError):
        raise NotUnderstood(f"{delay} is too long") from None
    return When(at=_rfc3339(at), local=at.astimezone(zone))


def _clock(text: str) -> time:
    match = _CLOCK(text)
    assert match is not None
    hour, minute, second = (int(part or 0) for part in match.groups())
    try:
        return time(hour, minute, second)
    except ValueError:
        raise NotUnderstood(f"{text!r} is not a time of day, from 0:00 to 23:59:59") from None


def _on(day: str, clock: time, now: datetime, zone: tzinfo | None, *, past: bool) -> datetime | None:
    """That time on that day; a weekday is the next one. None if it names no day."""
    today = now.astimezone(zone).date()
    days = {"today": 0, "tomorrow": 1} | ({"yesterday": -1} if past else {})
    if day in days:
        return _instant(datetime.combine(today + timedelta(days=days[day]), clock), zone)
    for number, name in enumerate(_WEEKDAYS):
        if day in (name, name[:3]):
            date_of = today + timedelta(days=(number - today.weekday()) % 7)
            at = _instant(datetime.combine(date_of, clock), zone)
            return at if past or at > now else _instant(datetime.combine(date_of + timedelta(days=7), clock), zone)
    if not _DATE(day):
        return None
    try:
        return _instant(datetime.combine(date.fromisoformat(day), clock), zone)
    except ValueError as error:
        if isinstance(error, NotUnderstood):
            raise
        raise NotUnderstood(f"{day} is a date that does not exist") from None


def _instant(local: datetime, zone: tzinfo | None) -> datetime:
    """The instant of a local time that happens exactly once."""
    # Not astimezone: in a skipped hour of the system's time zone it confuses the folds.
    first, second = (datetime.fromtimestamp(local.replace(tzinfo=zone, fold=fold).timestamp(), UTC) for fold in (0, 1))
    if first > second:
        then = first.astimezone(zone)
        raise NotUnderstood(
            f"{local} does not exist in the local time zone: the clocks are set forward. Did you mean {then:%H:%M:%S}?"
        )
    if first < second:
        both = " or ".join(at.astimezone(zone).isoformat() for at in (first, second))
        raise NotUnderstood(f"{local} happens twice in the local time zone: the clocks are set back. Give {both}")
    return first
