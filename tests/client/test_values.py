"""The client has its own statuses, times and durations; these tests compare them with those of the server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetime import model, timetext
from duetime.client import InvalidRequest, OutcomeKind, Status
from duetime.client.values import DEFAULT_NAMESPACE, Duration, duration_of, duration_text, time_text

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)


def test_names_equal_those_of_the_server() -> None:
    assert [(each.name, each.value, each.final) for each in Status] == [
        (each.name, each.value, each.final) for each in model.Status
    ]
    assert [(each.name, each.value) for each in OutcomeKind] == [(each.name, each.value) for each in model.OutcomeKind]
    assert DEFAULT_NAMESPACE == model.DEFAULT_NAMESPACE


@settings(deadline=None)
@given(st.timedeltas(timedelta(0), timedelta(milliseconds=timetext.DURATION_MS_MAX)))
def test_duration_is_formatted_as_on_the_server(duration: timedelta) -> None:
    text = duration_text(duration, "delay")
    ms = timetext.parse_duration(text, "delay")
    assert ms == -(-duration // MILLISECOND) and timetext.format_duration(ms) == text
    read = duration_of(text)
    assert isinstance(read, Duration) and read == timedelta(milliseconds=ms) and str(read) == text


@settings(deadline=None)
@given(
    st.datetimes(datetime(1970, 1, 2), datetime(9999, 12, 30)),
    st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes))),
)
def test_time_is_formatted_as_on_the_server(naive: datetime, zone: timezone) -> None:
    at = naive.replace(tzinfo=zone)
    text = time_text(at, "execute_at")
    ms = timetext.parse_time(text, "execute_at")
    assert ms == -((EPOCH - at) // MILLISECOND) and timetext.format_time(ms) == text


@pytest.mark.parametrize("text", ["", "s", "5", "1m1h", "1.5s", "-1s", " 1s"])
def test_invalid_duration_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        duration_of(text)


def test_errors_name_the_argument_and_the_field() -> None:
    with pytest.raises(InvalidRequest, match=r"^execute_at needs a time zone") as error:
        time_text(datetime(2030, 1, 1), "execute_at", "executeAt")
    assert error.value.details == {"field": "executeAt"}
    with pytest.raises(InvalidRequest, match=r"^callback_timeout must not be negative") as error:
        duration_text(timedelta(seconds=-1), "callback_timeout", "callbackTimeout")
    assert error.value.details == {"field": "callbackTimeout"}
