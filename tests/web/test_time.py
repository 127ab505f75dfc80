"""Parsing and formatting of times. The time zone is Berlin's, and now is Thursday, 22 October 2026, 14:00."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.web.browser import Watched

NOW = "2026-10-22T12:00:00Z"
CALL = f"""async ([module, name, ...given]) => {{
  const [time, called] = await Promise.all([import('/ui/time.js'), import(`/ui/${{module}}.js`)]);
  time.setNow('{NOW}');  // each time: the page's own polls set the service's time
  return called[name](...given);
}}"""


@pytest.fixture
def call(open_page: Callable[..., Watched]) -> Callable[..., Any]:
    """Calls a function of one of the page's modules."""
    page = open_page(timezone_id="Europe/Berlin").page
    page.evaluate(f"() => {{ Date.now = () => Date.parse('{NOW}'); }}")
    return lambda *given: page.evaluate(CALL, list(given))


AFTER = [
    ("now", "0s"),
    ("in 10 minutes", "10m"),
    ("IN 10 Minutes", "10m"),
    ("10m", "10m"),
    ("1h30m", "1h30m"),
    ("in an hour", "1h"),
    ("in half an hour", "30m"),
    ("in 1 hour and 5 minutes", "1h5m"),
    ("90 seconds", "1m30s"),
    ("in 2 days", "2d"),
    ("1.5 hours", "1h30m"),
    ("in 3 weeks", "21d"),
    ("500 ms", "500ms"),
]
INSTANTS = [
    ("tomorrow 9:00", "2026-10-23T07:00:00.000Z"),
    ("tomorrow at 9am", "2026-10-23T07:00:00.000Z"),
    ("today 15:30", "2026-10-22T13:30:00.000Z"),
    ("15:30", "2026-10-22T13:30:00.000Z"),
    ("9:00", "2026-10-23T07:00:00.000Z"),  # already past today, so tomorrow
    ("noon", "2026-10-23T10:00:00.000Z"),
    ("12am", "2026-10-22T22:00:00.000Z"),
    ("monday 8:30", "2026-10-26T07:30:00.000Z"),  # after the clocks go back
    ("thursday 15:00", "2026-10-22T13:00:00.000Z"),
    ("thu 13:00", "2026-10-29T12:00:00.000Z"),
    ("2026-12-01 14:30", "2026-12-01T13:30:00.000Z"),
    ("2026-12-01T14:30:15Z", "2026-12-01T14:30:15.000Z"),
    ("2026-12-01 14:30:15.250+02:00", "2026-12-01T12:30:15.250Z"),
    ("2026-12-01 14:30 utc", "2026-12-01T14:30:00.000Z"),
]
WRONG = {
    "": "Enter a time",
    "soon": "Not a valid time",
    "in ten apples": "Not a valid time",
    "tomorrow": "Add a time of day, such as “tomorrow 9:00”",
    "2026-12-01": "Add a time of day",
    "2026-02-30 10:00": "date does not exist",
    "25:00": "Not a valid time of day",
    "13:00 pm": "from 1 to 12",
    "today 9:00": "in the past",
    "2020-01-01 10:00": "in the past",
    "in 200000 days": "at most 100 years",
}


def test_times_are_parsed(call: Callable[..., Any]) -> None:
    for typed, delay in AFTER:
        found = call("time", "parseWhen", typed)
        assert (found.get("delay"), found.get("error")) == (delay, None), (typed, found)
    for typed, at in INSTANTS:
        found = call("time", "parseWhen", typed)
        assert found.get("error") is None and found["delay"] is None, (typed, found)
        assert call("time", "utc", found["at"]) == at, typed
    for typed, why in WRONG.items():
        assert why in call("time", "parseWhen", typed)["error"], typed
    gap = call("time", "parseWhen", "2027-03-28 02:30")
    assert "02:30 does not exist" in gap["note"]
    twice = call("time", "parseWhen", "2030-10-27 02:30")
    assert "02:30 happens twice" in twice["note"] and call("time", "utc", twice["at"]) == "2030-10-27T00:30:00.000Z"
    assert call("time", "parseWhen", "2030-10-27 03:30")["note"] is None
    assert call("time", "zoneAt", twice["at"]) == "Europe/Berlin (UTC+2)"


def test_durations_are_formatted(call: Callable[..., Any]) -> None:
    said = {12: "12 ms", 3_400: "3.4 s", 59_000: "59 s", 60_000: "1 minute", 185_000: "3 minutes 5 seconds"}
    said |= {7_200_000: "2 hours", 90_000_000: "1 day 1 hour", 20 * 86_400_000: "20 days"}
    assert {ms: call("time", "span", ms) for ms in said} == said
    assert call("time", "durationMs", "1h30m") == 5_400_000 and call("time", "durationMs", "soon") is None


def test_csv_cells_are_never_formulas(call: Callable[..., Any]) -> None:
    for text, cell in {
        "=1+1": "'=1+1",
        "+1": "'+1",
        "-1": "'-1",
        "@sum": "'@sum",
        "\tx": "'\tx",
        'a,"b"': '"a,""b"""',
        "=a,b": '"\'=a,b"',
        "plain": "plain",
    }.items():
        assert call("export", "cell", text) == cell
    assert call("export", "cell", {"a": 1}) == '"{""a"":1}"' and call("export", "cell", None) == ""


def test_timeline_gives_the_reason_for_lateness(call: Callable[..., Any]) -> None:
    timer = {
        "status": "completed",
        "executeAt": "2026-10-22T11:00:00.000Z",
        "fireAt": "2026-10-22T11:00:00.000Z",
        "createdAt": "2026-10-22T10:00:00.000Z",
        "attempts": 1,
    }
    attempt = {"attempt": 1, "sentAt": "2026-10-22T11:00:00.012Z", "duration": "3ms", "outcome": "answered"}
    assert call("story", "lateness", timer, [attempt]) == "Fired 12 ms after it was due."
    late = attempt | {"sentAt": "2026-10-22T11:00:03.000Z"}
    assert call("story", "lateness", timer, [late]).startswith(
        "Fired 3 s late: attempt 1 started at 2026-10-22 13:00:03"
    )
    put_off = timer | {"fireAt": "2026-10-22T11:00:02.990Z"}
    assert "its destination was at its concurrency limit" in call("story", "lateness", put_off, [late])
    again = [attempt | {"deliveryId": "a"}, attempt | {"deliveryId": "b", "sentAt": "2026-10-22T11:30:00.005Z"}]
    replayed = timer | {"fireAt": "2026-10-22T11:30:00.000Z"}
    assert call("story", "lateness", replayed, again) == "Fired 5 ms after it was replayed."


def test_times_follow_the_service_clock_and_the_browser_time_zone(
    open_page: Callable[..., Watched],
) -> None:
    page = open_page(timezone_id="America/St_Johns").page
    ahead = page.evaluate(
        f"""async () => {{
          const time = await import("/ui/time.js");
          Date.now = () => Date.parse("{NOW}");
          time.setNow("2026-10-22T15:00:00Z");
          const [then, before] = ["2026-10-22T17:30:00.250Z", "2026-10-22T12:00:00Z"];
          return [time.now(), time.relative(then), time.about(then), time.relative(before), time.about(before),
                  time.local(then), time.precise(then), time.offsetAt(then), time.offsetAt("2026-12-01T00:00:00Z")];
        }}"""
    )
    assert ahead[1:] == [
        *("in 2 hours 30 minutes", "in 2 hours", "3 hours ago", "3 hours ago"),
        *("2026-10-22 15:00:00", "2026-10-22 15:00:00.250", "UTC-2:30", "UTC-3:30"),
    ]
