"""Times and durations: accepted formats, rounding, and round trips."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetime.errors import InvalidInput
from duetime.model import DAY_MS, HOUR_MS, MINUTE_MS
from duetime.timetext import (
    DURATION_MS_MAX,
    TIME_MS_MAX,
    format_duration,
    format_time,
    parse_duration,
    parse_time,
)

examined = settings(derandomize=True, deadline=None, database=None, max_examples=200)

NINE = 1_769_850_000_000  # 2026-01-31T09:00:00Z


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("2026-01-31T09:00:00Z", NINE),
        ("2026-01-31t09:00:00z", NINE),
        ("2026-01-31T09:00:00.5Z", NINE + 500),
        ("2026-01-31T09:00:00.123Z", NINE + 123),
        ("2026-01-31T11:00:00+02:00", NINE),
        ("2026-01-31T11:00:00+0200", NINE),
        ("2026-01-31T03:30:00-05:30", NINE),
        ("2026-01-31T09:00:00-00:00", NINE),
        ("2026-02-01T08:59:00+23:59", NINE),
        ("2024-02-29T00:00:00Z", 1_709_164_800_000),
        ("1970-01-01T00:00:00Z", 0),
        ("9999-12-31T23:59:59.999Z", TIME_MS_MAX),
    ],
)
def test_a_time_with_an_offset_is_parsed(text: str, ms: int) -> None:
    assert parse_time(text, "at") == ms


@pytest.mark.parametrize(
    ("fraction", "ms"),
    [
        ("1231", 124),
        ("123000", 123),
        ("123001", 124),
        ("123000000", 123),
        ("123000001", 124),
        ("1230000", 123),
        ("000000001", 1),
        ("999000001", 1000),
        ("9999", 1000),
    ],
)
def test_digits_below_the_millisecond_round_up(fraction: str, ms: int) -> None:
    assert parse_time(f"2026-01-31T09:00:00.{fraction}Z", "at") == NINE + ms


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("2026-01-31T09:00:00", "needs an offset or Z, like 2026-01-31T09:00:00Z"),
        ("2026-01-31T09:00:00.123456789", "needs an offset or Z, like 2026-01-31T09:00:00Z"),
        ("2016-12-31T23:59:60Z", "must not be a leap second: seconds go from 00 to 59"),
        ("2026-02-30T09:00:00Z", "is a date that does not exist"),
        ("2025-02-29T09:00:00Z", "is a date that does not exist"),
        ("2026-13-01T09:00:00Z", "is a date that does not exist"),
        ("0000-01-01T00:00:00Z", "is a date that does not exist"),
        ("1969-12-31T23:59:59Z", "must be in the years 1970 to 9999 (UTC)"),
        ("1969-12-31T23:59:59.9999Z", None),
        ("1970-01-01T00:00:00+00:01", "must be in the years 1970 to 9999 (UTC)"),
        ("0001-01-01T00:00:00+23:59", "must be in the years 1970 to 9999 (UTC)"),
        ("9999-12-31T23:59:59.9991Z", "must be in the years 1970 to 9999 (UTC)"),
        ("9999-12-31T23:59:59-00:01", "must be in the years 1970 to 9999 (UTC)"),
        ("10000-01-01T00:00:00Z", "must be a time like 2026-01-31T09:00:00Z"),
    ],
)
def test_an_invalid_time_has_a_reason(text: str, reason: str | None) -> None:
    if reason is None:  # rounds up to the first valid instant
        assert parse_time(text, "at") == 0
        return
    with pytest.raises(InvalidInput) as raised:
        parse_time(text, "execute_at")
    assert raised.value.field == "execute_at"
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "2026-01-31",
        "2026-01-31T09:00Z",
        "2026-01-31T09Z",
        "2026-01-31 09:00:00Z",
        "20260131T090000Z",
        "2026-W05-6T09:00:00Z",
        "2026-1-31T09:00:00Z",
        "2026-01-31T24:00:00Z",
        "2026-01-31T09:60:00Z",
        "2026-01-31T09:00:61Z",
        "2026-01-31T09:00:00.Z",
        "2026-01-31T09:00:00,5Z",
        "2026-01-31T09:00:00.1234567890Z",
        "2026-01-31T09:00:00+2",
        "2026-01-31T09:00:00+02",
        "2026-01-31T09:00:00+24:00",
        "2026-01-31T09:00:00+02:60",
        "2026-01-31T09:00:00+02:00:30",
        "2026-01-31T09:00:00ZZ",
        "2026-01-31T09:00:00Z\n",
        " 2026-01-31T09:00:00Z",
        "\uff12\uff10\uff12\uff16-01-31T09:00:00Z",
        "٢٠٢٦-01-31T09:00:00Z",
        "2026-01-31T09:00:00.\uff11Z",
        "+2026-01-31T09:00:00Z",
        "1769850000000",
    ],
)
def test_garbage_is_not_a_time(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^at must be a time like"):
        parse_time(text, "at")


@examined
@given(st.text() | st.text("0123456789-:.TtZz+ ", max_size=32))
def test_any_text_parses_or_raises_invalid_input(text: str) -> None:
    for parse in (parse_time, parse_duration):
        try:
            assert parse(text, "at") >= 0
        except InvalidInput as error:
            assert str(error).startswith("at ")


@examined
@given(st.integers(0, TIME_MS_MAX))
def test_formatted_times_round_trip(ms: int) -> None:
    text = format_time(ms)
    assert len(text) == 24
    assert parse_time(text, "at") == ms
    instant = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
    assert text == instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@examined
@given(
    st.datetimes(datetime(1970, 1, 3), datetime(9999, 12, 29)),
    st.integers(0, 999),
    st.integers(-23 * 60 - 59, 23 * 60 + 59),
)
def test_any_offset_and_fraction_agree_with_exact_arithmetic(local: datetime, nanos: int, offset: int) -> None:
    sign, (hours, minutes) = "-" if offset < 0 else "+", divmod(abs(offset), 60)
    text = f"{local.isoformat(timespec='microseconds')}{nanos:03d}{sign}{hours:02d}:{minutes:02d}"
    micros = (local - timedelta(minutes=offset) - datetime(1970, 1, 1)) // timedelta(microseconds=1)
    exact_nanos = micros * 1_000 + nanos
    assert parse_time(text, "at") == -(-exact_nanos // 1_000_000)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("0s", 0),
        ("0ms", 0),
        ("500ms", 500),
        ("30s", 30_000),
        ("10m", 10 * MINUTE_MS),
        ("24h", DAY_MS),
        ("1h30m", 90 * MINUTE_MS),
        ("7d", 7 * DAY_MS),
        ("1d2h3m4s5ms", DAY_MS + 2 * HOUR_MS + 3 * MINUTE_MS + 4_005),
        ("1m1ms", MINUTE_MS + 1),
        ("90m", 90 * MINUTE_MS),
        ("36525d", DURATION_MS_MAX),
    ],
)
def test_a_duration_is_parsed(text: str, ms: int) -> None:
    assert parse_duration(text, "delay") == ms


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "s",
        "1.5h",
        "-5s",
        "+5s",
        "5 s",
        " 5s",
        "5s\n",
        "30m1h",
        "1h1h",
        "1S",
        "1w",
        "5sec",
        "\uff11s",
        "1h30",
        "1e3s",
    ],
)
def test_garbage_is_not_a_duration(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^delay must be a duration like"):
        parse_duration(text, "delay")


@pytest.mark.parametrize("text", ["36525d1ms", "36526d", "999999999999999d"])
def test_a_duration_has_a_maximum(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^delay must be at most 100 years"):
        parse_duration(text, "delay")


def test_a_number_of_any_length_is_rejected_as_a_duration() -> None:
    with pytest.raises(InvalidInput):
        parse_duration("9" * 5_000 + "d", "delay")


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0s"), (1, "1ms"), (1_500, "1s500ms"), (90 * MINUTE_MS, "1h30m"), (DAY_MS, "24h"), (7 * DAY_MS, "7d")],
)
def test_a_duration_is_formatted_without_zero_units(ms: int, text: str) -> None:
    assert format_duration(ms) == text


@examined
@given(st.integers(0, DURATION_MS_MAX))
def test_formatted_durations_round_trip(ms: int) -> None:
    assert parse_duration(format_duration(ms), "delay") == ms
