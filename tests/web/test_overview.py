"""The overview: its counts, charts and verdict, and its live updates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from duetime.overdue import OPERATOR_REASONS, TEXTS, Reason
from tests.servers import Duetime, Receiver, Reply, until
from tests.web.browser import DESKTOP, Watched, signed_in, watch
from tests.web.conftest import Create


def test_overview_shows_counts_charts_failures_and_owners(
    open_page: Callable[..., Watched], create: Create, service: Duetime, receiver: Receiver
) -> None:
    broken = receiver.reply("/broken", Reply(500))
    create(id="overview-due", delay="30m")
    create(id="overview-failed", delay="0s", callbackUrl=broken, retryPolicy={"maxRetries": 0})
    until("it failed", lambda: service.request("GET", "/api/v1/timers/default/overview-failed").body["lastError"])
    page = open_page().page
    tiles = page.get_by_role("list", name="Timers by status")
    for status in ("pending", "executing", "completed", "failed", "canceled", "overdue"):
        expect(tiles.get_by_role("link", name=status)).to_be_visible()
    expect(page.locator(".verdict")).to_contain_text("overdue")
    for heading in (
        "Attempts per second",
        "Lateness",
        "Due in the next hour, by minute",
        "Due in the next day, by hour",
    ):
        expect(page.get_by_role("img", name=heading)).to_be_visible()
    assert page.locator(".plot canvas").count() == 4
    failures = page.get_by_role("region", name="Failures by destination")
    expect(failures.get_by_role("rowheader", name=receiver.base)).to_be_visible()
    expect(failures).to_contain_text("HTTP 500")
    owners = page.get_by_role("region", name="Shard owners")
    expect(owners).to_contain_text("Every shard has an owner.")
    expect(owners.get_by_role("row")).to_have_count(2)
    # Each chart has a table.
    page.get_by_text("Show as a table").nth(2).click()
    expect(
        page.get_by_role("region", name="Due in the next hour, by minute, as a table").get_by_role("row")
    ).to_have_count(61)
    tiles.get_by_role("link", name="failed").click()
    expect(page.get_by_role("heading", name="Timers")).to_be_visible()
    expect(page.get_by_label("Status")).to_have_value("failed")
    expect(page.get_by_role("link", name="overview-failed")).to_be_visible()


def test_overview_updates_live_until_paused(
    open_page: Callable[..., Watched], create: Create, service: Duetime
) -> None:
    before = service.request("GET", "/api/v1/timers/count?status=pending").body["timers"]
    page = open_page().page
    pending = page.locator(".tile.pending strong")
    expect(pending).to_have_text(f"{before:,}")
    create()
    expect(pending).to_have_text(f"{before + 1:,}")
    page.get_by_role("button", name="Live: pause live updates").click()
    live = page.locator("#live")
    expect(live).to_have_text("Paused")
    live.click()
    expect(live).to_have_text("Live")
    create()
    expect(pending).to_have_text(f"{before + 2:,}")


def test_update_takes_neither_the_focus_nor_the_click(open_page: Callable[..., Watched], create: Create) -> None:
    create()  # so that the tiles do not move up in place of the welcome
    page = open_page().page
    tile = page.get_by_role("list", name="Timers by status").get_by_role("link", name="pending")
    before = tile.locator("strong").inner_text()
    tile.hover()
    page.mouse.down()
    create()
    expect(tile.locator("strong")).not_to_have_text(before)
    expect(tile).to_be_focused()
    page.mouse.up()
    expect(page.get_by_role("heading", name="Timers", exact=True)).to_be_visible()


@contextmanager
def overview_of(service: Duetime, browser: Browser, **changes: Any) -> Iterator[Page]:
    """The overview of a service of the test's own; ``changes`` replace fields of the API's response."""
    assert service.key is not None
    base = f"http://127.0.0.1:{service.port}"
    context = signed_in(browser, base, service.key, viewport={"width": DESKTOP[0], "height": DESKTOP[1]})

    def changed(route: Route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, body=json.dumps(answer.json() | changes))

    if changes:
        context.route("**/api/v1/overview", changed)
    watched = watch(context.new_page(), base)
    watched.page.goto(base)
    watched.settled()
    yield watched.page
    watched.check()
    watched.close()


def overdue(service: Duetime, url: str, count: int, expected: dict[str, int]) -> None:
    """Create timers that are due now, and wait until the API reports why they are overdue."""
    asked = {"delay": "0s", "callbackUrl": url, "callbackTimeout": "1h"}
    assert service.request("POST", "/api/v1/timers/batch", json={"timers": [asked] * count}).status == 200

    def told() -> bool:
        service.advance("2s")
        seen = service.request("GET", "/api/v1/overview").body
        return bool(seen["overdueReasons"] == expected and seen["overdue"]["timers"] == sum(expected.values()))

    until(f"overdue are {expected}", told)


def test_activity_is_counted_in_attempts(tmp_path: Path, browser: Browser) -> None:
    at = "2026-11-20T09:00:00.000Z"
    point = {"at": at, "firesPerSecond": 1.0, "latenessP50Ms": 3, "latenessP99Ms": 9}
    with Duetime(tmp_path) as service:
        with overview_of(service, browser, now=at, activity=[point], stepSeconds=5) as page:
            text = (
                "About 5 attempts in the last 5 minutes: half started within 3 ms of their due time, 99% within 9 ms."
            )
            expect(page.locator(".verdict")).to_contain_text(text)
        with overview_of(service, browser, now=at, activity=[]) as page:
            expect(page.locator(".verdict")).to_contain_text("No attempts in the last 5 minutes.")


def test_pause_is_named_as_a_reason_and_raises_no_alarm(tmp_path: Path, browser: Browser) -> None:
    with Duetime(tmp_path, virtual_clock=True) as service:
        service.request("PATCH", "/api/v1/namespaces/default", json={"paused": True})
        overdue(service, "http://127.0.0.1:9/", 40, {"paused": 40})
        with overview_of(service, browser) as page:
            verdict = page.locator(".verdict")
            expect(verdict).to_contain_text("40 timers are overdue: 40 in paused namespaces.")
            expect(verdict.locator(".word")).to_have_text("Quiet")
            tile = page.get_by_role("link", name="overdue")
            expect(tile).to_contain_text("40 in paused namespaces")
            expect(tile).not_to_have_class("tile late")


def test_full_destination_is_named_as_a_reason_and_raises_no_alarm(tmp_path: Path, browser: Browser) -> None:
    limit: dict[str, Any] = {"DUETIME_MAX_PER_DESTINATION": "5"}
    with Receiver() as receiver, Duetime(tmp_path, virtual_clock=True, **limit) as service:
        overdue(service, receiver.reply("/hang", Reply(hang=True)), 60, {"destination": 55})
        with overview_of(service, browser) as page:
            verdict = page.locator(".verdict")
            expect(verdict).to_contain_text(f"55 timers are overdue: 55 {TEXTS[Reason.DESTINATION]}.")
            expect(verdict.locator(".word")).to_have_text("Some timers are waiting")
            expect(verdict.locator(".word.warn")).to_have_count(0)
            tile = page.get_by_role("link", name="overdue")
            expect(tile).to_contain_text(f"55 {TEXTS[Reason.DESTINATION]}")
            expect(tile).not_to_have_class("tile late")
        receiver.release()


@pytest.mark.parametrize(
    ("reasons", "says"),
    [
        *(({reason: 12}, f"12 {TEXTS[reason]}") for reason in OPERATOR_REASONS),
        ({"paused": 1, "behind": 1}, f"1 {TEXTS[Reason.PAUSED]}; 1 {TEXTS[Reason.BEHIND]}"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_reasons_for_operators_to_fix_raise_an_alarm(
    tmp_path: Path, browser: Browser, reasons: dict[str, int], says: str
) -> None:
    count = {"timers": 16, "more": False}
    with (
        Duetime(tmp_path) as service,
        overview_of(service, browser, overdue=count, overdueReasons=reasons, unowned=[]) as page,
    ):
        expect(page.locator(".verdict")).to_contain_text(f"16 timers are overdue: {says}.")
        expect(page.locator(".verdict .word.warn")).to_have_text("Behind")
        expect(page.get_by_role("link", name="overdue")).to_have_class("tile late")
