"""Times and durations as people type them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetime.commands.times import NotUnderstood, When, ahead, any_time, duration
from tests.cli.conftest import Shell
from tests.web import test_time as page

BERLIN = ZoneInfo("Europe/Berlin")
NOON = datetime(2026, 11, 18, 11, 0, tzinfo=UTC)  # a Wednesday, 12:00 in Berlin
URL = "http://127.0.0.1:9/never"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("today 18:30", "2026-11-18T17:30:00Z"),
        ("Tomorrow 9:00", "2026-11-19T08:00:00Z"),
        ("tomorrow at 09:00:30", "2026-11-19T08:00:30Z"),
        ("friday 9:00", "2026-11-20T08:00:00Z"),
        ("wed 12:01", "2026-11-18T11:01:00Z"),
        ("wednesday 12:00", "2026-11-25T11:00:00Z"),
        ("2026-12-24 18:00", "2026-12-24T17:00:00Z"),
        ("2026-12-24T18:00", "2026-12-24T17:00:00Z"),
        ("2027-07-01 0:00", "2027-06-30T22:00:00Z"),
        ("2026-12-24T18:00:00+05:00", "2026-12-24T18:00:00+05:00"),
        ("2001-01-01T00:00:00z", "2001-01-01T00:00:00Z"),  # the service's clock decides
        ("12:01", "2026-11-18T11:01:00Z"),
        ("11:59", "2026-11-19T10:59:00Z"),  # passed today
        ("next wednesday 13:00", "2026-11-18T12:00:00Z"),  # as without next
        ("on fri 9", "2026-11-20T08:00:00Z"),
        ("2026-12-24 at noon", "2026-12-24T11:00:00Z"),
        ("now", "in 0s"),
        ("in 10 minutes", "in 10m"),
        ("in 1 hour 30 min", "in 1h30m"),
        ("in 1h30m", "in 1h30m"),
        ("in 2 weeks", "in 14d"),
    ],
)
def test_future_time_is_understood(text: str, expected: str) -> None:
    assert str(ahead(text, NOON, BERLIN)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("today", "2026-11-17T23:00:00Z"),
        ("yesterday 9:00", "2026-11-17T08:00:00Z"),
        ("2026-01-01", "2025-12-31T23:00:00Z"),
        ("2 hours ago", "2026-11-18T09:00:00Z"),
        ("in 2 hours", "2026-11-18T13:00:00Z"),
        ("90m ago", "2026-11-18T09:30:00Z"),
        ("tomorrow", "2026-11-18T23:00:00Z"),
        ("now", "2026-11-18T11:00:00Z"),
        ("9am", "2026-11-18T08:00:00Z"),
        ("next friday", "2026-11-19T23:00:00Z"),
    ],
)
def test_past_or_future_time_is_understood(text: str, expected: str) -> None:
    assert any_time(text, NOON, BERLIN).at == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not a time like 'tomorrow 9:00', 'next monday 8:30', 'noon', 'in 10 minutes'"),
        ("soon", "is not a time like"),
        ("tomorrow", "is not a time like"),
        ("yesterday 9:00", "is not a time like"),
        ("2 hours ago", "is not a time like"),
        ("tomorrow 24:00", "'24:00' is not a time of day"),
        ("tomorrow 9:60", "'9:60' is not a time of day"),
        ("2026-02-30 9:00", "2026-02-30 is a date that does not exist"),
        ("2026-02-30T09:00:00Z", "is a date that does not exist"),
        ("2026-12-24T25:00:00Z", "must be a time like"),
        ("in", "is not a time like"),
        ("next", "is not a time like"),
        ("13pm", "'13pm' is not a time of day: with am or pm the hour is from 1 to 12"),
        ("0:00 am", "with am or pm the hour is from 1 to 12"),
        ("in ten minutes", "is not a duration like 30s, 10m, 1h30m, 7d or '10 minutes'"),
        ("in 10 fortnights", "is not a duration like"),
        ("in -5 minutes", "is not a duration like"),
        ("today 12:00", "'today 12:00' has passed: it is Wed 2026-11-18 12:00:00 CET now"),
        ("2026-11-18 11:59", "has passed"),
        ("2027-03-28 02:30", "2027-03-28 02:30:00 does not exist in the local time zone"),
        ("2027-03-28 02:30", "Did you mean 03:30:00?"),
        ("2027-10-31 02:30", "Give 2027-10-31T02:30:00+02:00 or 2027-10-31T02:30:00+01:00"),
    ],
)
def test_rejected_time_is_explained(text: str, says: str) -> None:
    with pytest.raises(NotUnderstood, match=re.escape(says)):
        ahead(text, NOON, BERLIN)


def test_times_of_the_web_page_mean_the_same_here() -> None:
    now = datetime.fromisoformat(page.NOW)
    for typed, delay in page.AFTER:
        assert ahead(typed, now, BERLIN) == When(delay=delay), typed
    for typed, at in page.INSTANTS:
        found = ahead(typed, now, BERLIN).at
        assert found is not None and datetime.fromisoformat(found) == datetime.fromisoformat(at), typed
    for typed in page.WRONG.keys() - {"in 200000 days"}:  # which the service rejects
        with pytest.raises(NotUnderstood):
            ahead(typed, now, BERLIN)


@pytest.mark.parametrize("text", ["10 minutes", "an hour", "1h30m"])
def test_filter_needs_the_direction_of_a_duration(text: str) -> None:
    assert any_time(f"in {text}", NOON, BERLIN).at != any_time(f"{text} ago", NOON, BERLIN).at
    with pytest.raises(NotUnderstood, match="is not a time like 'today'"):
        any_time(text, NOON, BERLIN)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (datetime(2027, 3, 28, 12, tzinfo=BERLIN), "2027-03-29T00:30:00Z"),
        (datetime(2027, 10, 31, 12, tzinfo=BERLIN), "2027-11-01T01:30:00Z"),
    ],
)
def test_time_of_day_that_was_skipped_or_repeated_today_is_tomorrows(now: datetime, expected: str) -> None:
    assert ahead("2:30", now, BERLIN).at == expected


@pytest.fixture
def machine_in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2030-03-31 02:30", "2030-03-31 02:30:00 does not exist in the local time zone: the clocks are set forward"),
        ("2030-03-31 02:30", "Did you mean 03:30:00?"),
        ("2030-10-27 02:30", "2030-10-27 02:30:00 happens twice in the local time zone: the clocks are set back"),
        ("2030-10-27 02:30", "Give 2030-10-27T02:30:00+02:00 or 2030-10-27T02:30:00+01:00"),
    ],
)
@pytest.mark.usefixtures("machine_in_berlin")
def test_skipped_and_repeated_times_of_the_machines_zone_are_explained(text: str, says: str) -> None:
    with pytest.raises(NotUnderstood, match=re.escape(says)):
        ahead(text, NOON)


@pytest.mark.usefixtures("machine_in_berlin")
def test_times_beside_a_change_of_the_machines_clocks_are_understood() -> None:
    for text, expected in (
        ("2030-03-31 01:59", "2030-03-31T00:59:00Z"),
        ("2030-03-31 03:00", "2030-03-31T01:00:00Z"),
        ("2030-10-27 01:59", "2030-10-26T23:59:00Z"),
        ("2030-10-27 03:00", "2030-10-27T02:00:00Z"),
    ):
        assert ahead(text, NOON).at == expected


def test_both_instants_of_a_repeated_hour_can_be_typed() -> None:
    for text in ("2027-10-31T02:30:00+02:00", "2027-10-31T02:30:00+01:00"):
        assert ahead(text, NOON, BERLIN).at == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", "500ms"),
        ("90s", "1m30s"),
        ("1h 30m", "1h30m"),
        ("2 Days", "2d"),
        ("1 week", "7d"),
        ("0s", "0s"),
        ("half an hour", "30m"),
        ("1.5 hours", "1h30m"),
        ("an hour and 5 mins", "1h5m"),
    ],
)
def test_duration_is_understood(text: str, expected: str) -> None:
    assert duration(text) == expected


_zones = st.sampled_from([BERLIN, ZoneInfo("Australia/Lord_Howe"), ZoneInfo("America/St_Johns"), UTC])
_nows = st.datetimes(datetime(1975, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))
_days = st.one_of(
    st.sampled_from(["today", "tomorrow", "monday", "tue", "sunday", "yesterday"]),
    st.dates(datetime(1975, 1, 1).date(), datetime(2100, 1, 1).date()).map(str),
)
_clocks = st.times().map(lambda at: f"{at.hour}:{at:%M}")
_words = st.lists(
    st.sampled_from(
        ["in", "on", "next", "at", "ago", "now", "noon", "today", "fri", "9", "9:00", "30", "am", "half", "an", "hour"]
    ),
    max_size=5,
).map(" ".join)


@settings(deadline=None)
@given(_days, _clocks, _nows, _zones)
def test_local_times_are_never_in_the_past(day: str, clock: str, now: datetime, zone: tzinfo) -> None:
    try:
        when = ahead(f"{day} {clock}", now, zone)
    except NotUnderstood:
        return
    assert when.at is not None and when.local is not None
    at = datetime.fromisoformat(when.at)
    assert now < at == when.local
    assert f"{when.local.hour}:{when.local:%M}" == clock  # the typed time of day, in the local time zone
    if "-" not in day:
        assert at - now < timedelta(days=8, hours=2)


@settings(deadline=None)
@given(st.one_of(st.text(max_size=30), _words), _nows)
def test_any_text_is_a_time_or_rejected(text: str, now: datetime) -> None:
    for read in (ahead, any_time):
        try:
            when = read(text, now, BERLIN)
        except NotUnderstood:
            continue
        assert (when.at is None) != (when.delay is None)


def test_local_times_use_the_zone_of_the_machine(shell: Shell) -> None:
    for zone, offset in (("Asia/Kolkata", "T03:30:00"), ("UTC", "T09:00:00")):
        ran = shell.run("create", "--at", "tomorrow 9:00", "--url", URL, TZ=zone)
        note = re.search(r"duetime: --at is .* 09:00:00 (IST|UTC) \((.*)Z\)$", ran.stderr.strip())
        assert ran.returncode == 0 and note is not None and note[2].endswith(offset), ran
        assert f"({note[2]}.000Z)" in ran.stdout


def test_relative_time_counts_from_the_servers_clock(shell: Shell) -> None:
    timer = shell.json("create", "--at", "in 10 minutes", "--url", URL)
    ahead_by = datetime.fromisoformat(timer["executeAt"]) - datetime.fromisoformat(timer["createdAt"])
    assert ahead_by == timedelta(minutes=10)


def test_forms_of_times_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    for form in ("tomorrow 9am", "next monday 8:30", "9:00", "noon", "now", "in 10 minutes", "2 hours ago"):
        assert f"`{form}`" in text, form
        assert form.endswith("ago") or ahead(form, NOON, BERLIN)
