"""The list of timers: filters, pages, live updates, export and bulk actions."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, Route, expect

from tests.servers import Duetime, Receiver, Reply, until
from tests.web.browser import PHONE, Watched
from tests.web.conftest import Create


def ids(page: Page) -> list[str]:
    return page.locator("table.timers tbody a").all_inner_texts()


def test_filters_narrow_the_list_and_are_part_of_the_url(
    open_page: Callable[..., Watched], create: Create, service: Duetime
) -> None:
    service.request("POST", "/api/v1/namespaces", json={"name": "filters"})
    for n in range(3):
        create(namespace="filters", id=f"f-{n}", delay=f"{n + 1}h", correlationId=f"c-{n % 2}")
    service.request("POST", "/api/v1/timers/filters/f-2/cancel")
    page = open_page("#/timers", timezone_id="Asia/Kolkata").page  # its clocks never change
    page.get_by_label("Namespace").select_option("filters")
    expect(page.locator(".count")).to_have_text("3 timers")
    assert ids(page) == ["f-2", "f-1", "f-0"]
    page.get_by_label("Status").select_option("canceled")
    expect(page.locator(".count")).to_have_text("1 timer")
    page.get_by_label("Status").select_option("")
    page.get_by_label("Correlation id").fill("c-0")
    expect(page.locator(".count")).to_have_text("2 timers")
    page.get_by_label("Correlation id").fill("")
    page.keyboard.press("Tab")
    page.get_by_role("heading", name="Timers").click()
    page.keyboard.press("/")
    expect(page.get_by_label("Id", exact=True)).to_be_focused()
    page.keyboard.type("f-1")
    expect(page.locator(".count")).to_have_text("1 timer")
    assert "id=f-1" in page.url and "namespace=filters" in page.url
    page.reload()
    expect(page.locator(".count")).to_have_text("1 timer")
    expect(page.get_by_role("button", name="Cancel all")).to_be_disabled()
    page.get_by_label("Id", exact=True).fill("nobody")
    expect(page.get_by_text("No timers match this filter.")).to_be_visible()
    page.get_by_role("button", name="Clear filter").click()
    page.get_by_label("Namespace").select_option("filters")
    # The inputs take local time, to the second.
    soon = page.evaluate(
        "new Date(Date.now() + 5400e3 - new Date().getTimezoneOffset() * 60e3).toISOString().slice(0, 19)"
    )
    page.get_by_label("Scheduled before").fill(soon)
    expect(page.locator(".count")).to_have_text("1 timer")
    page.get_by_label("Scheduled before").fill("")
    page.get_by_label("Scheduled at or after").fill(soon)
    expect(page.locator(".count")).to_have_text("2 timers")


def test_next_and_previous_page(open_page: Callable[..., Watched], service: Duetime, receiver: Receiver) -> None:
    service.request("POST", "/api/v1/namespaces", json={"name": "pages"})
    wanted = [
        {"namespace": "pages", "id": f"p-{n:03}", "delay": "1h", "callbackUrl": receiver.url("/hook")}
        for n in range(120)
    ]
    assert service.request("POST", "/api/v1/timers/batch", json={"timers": wanted}).status == 200
    page = open_page("#/timers?namespace=pages").page
    expect(page.locator(".count")).to_have_text("120 timers")
    seen = [ids(page)]
    following, preceding = page.get_by_role("button", name="Next"), page.get_by_role("button", name="Previous")
    expect(preceding).to_be_disabled()
    for number in (2, 3):
        following.click()
        expect(page.get_by_text(f"Page {number}")).to_be_visible()
        seen.append(ids(page))
    expect(following).to_be_disabled()
    assert sorted(id for some in seen for id in some) == [f"p-{n:03}" for n in range(120)]
    preceding.click()
    expect(page.get_by_text("Page 2")).to_be_visible()
    assert ids(page) == seen[1]


def test_rows_update_live(open_page: Callable[..., Watched], create: Create, service: Duetime) -> None:
    service.request("POST", "/api/v1/namespaces", json={"name": "live"})
    create(namespace="live", id="stays")
    page = open_page("#/timers?namespace=live").page
    page.get_by_role("link", name="stays").focus()
    create(namespace="live", id="comes", delay="1s")
    row = page.get_by_role("row").filter(has_text="comes")
    expect(row).to_contain_text("completed")
    expect(row).to_have_class("changed")
    expect(page.locator(".count")).to_have_text("2 timers")
    expect(page.get_by_role("link", name="stays")).to_be_focused()  # an update does not move the focus


def test_change_before_the_first_event_is_shown(open_page: Callable[..., Watched], create: Create) -> None:
    watched = open_page("#/namespaces")
    streams: list[Route] = []
    watched.page.route("**/api/v1/events", lambda route: streams.append(route))
    watched.go("#/timers?id=unseen")
    expect(watched.page.get_by_text("No timers match this filter.")).to_be_visible()
    create(id="unseen")
    streams[0].continue_()
    expect(watched.page.get_by_role("link", name="unseen")).to_be_visible()


def exported(page: Page, kind: str) -> str:
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Export {kind}").click()
    assert download.value.suggested_filename == f"timers.{kind.lower()}"
    return download.value.path().read_text()


def test_export_contains_every_timer_that_matches_the_filter(
    open_page: Callable[..., Watched], service: Duetime, receiver: Receiver
) -> None:
    service.request("POST", "/api/v1/namespaces", json={"name": "files"})
    wanted: list[dict[str, Any]] = [
        {"id": f"x-{n}", "payload": {"n": n, "text": 'a "quote", a comma'}} for n in range(1_100)
    ]
    wanted += [{"id": id} for id in ("=cmd()", "+1", "-1", "@x")]
    for some in (wanted[:600], wanted[600:]):
        timers = [{"namespace": "files", "delay": "1h", "callbackUrl": receiver.url("/hook"), **one} for one in some]
        assert service.request("POST", "/api/v1/timers/batch", json={"timers": timers}).status == 200
    page = open_page("#/timers?namespace=files").page
    expect(page.locator(".count")).to_have_text("1,104 timers")
    rows = list(csv.DictReader(io.StringIO(exported(page, "CSV"))))
    assert len(rows) == 1_104
    found = {row["id"]: row for row in rows}
    assert {"'=cmd()", "'+1", "'-1", "'@x"} <= found.keys()  # a spreadsheet must not run these as formulas
    assert json.loads(found["x-7"]["payload"]) == {"n": 7, "text": 'a "quote", a comma'}
    timers = json.loads(exported(page, "JSON"))
    assert {timer["id"] for timer in timers} == {one["id"] for one in wanted}


def test_export_can_be_stopped(open_page: Callable[..., Watched], create: Create) -> None:
    create()
    page = open_page("#/timers").page
    page.route(re.compile("limit=1000"), lambda route: None)  # never responds
    page.get_by_role("button", name="Export JSON").click()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.get_by_text("Export stopped. No file was saved.")).to_be_visible()


def test_cancel_all_and_replay_all_show_the_count_first(
    open_page: Callable[..., Watched], create: Create, service: Duetime, receiver: Receiver
) -> None:
    service.request("POST", "/api/v1/namespaces", json={"name": "bulk"})
    url = receiver.reply("/bulk", Reply(500))
    for n in range(6):
        create(
            namespace="bulk", id=f"b-{n}", callbackUrl=url, correlationId=f"c-{n % 2}", retryPolicy={"maxRetries": 0}
        )

    def statuses() -> list[str]:
        timers = service.request("GET", "/api/v1/timers?namespace=bulk").body["timers"]
        return sorted(timer["status"] for timer in timers)

    page = open_page("#/timers?namespace=bulk&correlationId=c-0").page
    page.get_by_role("button", name="Cancel all").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("3 pending timers")
    expect(dialog).to_contain_text("c-0")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert statuses() == ["pending"] * 6
    page.get_by_role("button", name="Cancel all").click()
    dialog.get_by_role("button", name="Cancel 3").click()
    expect(page.get_by_text("Canceled 3 timers.")).to_be_visible()
    assert statuses() == ["canceled"] * 3 + ["pending"] * 3
    # A replayed timer fails again at once. It must not be replayed forever.
    page.get_by_label("Status").select_option("canceled")
    page.get_by_role("button", name="Replay all").click()
    expect(dialog).to_contain_text("3 canceled timers")
    dialog.get_by_role("button", name="Replay 3").click()
    expect(page.get_by_text("Replayed 3 timers.")).to_be_visible()
    until("they failed", lambda: statuses() == ["failed"] * 3 + ["pending"] * 3)
    page.get_by_label("Status").select_option("")
    page.get_by_role("button", name="Replay all").click()
    expect(dialog).to_contain_text("3 failed timers")
    dialog.get_by_role("button", name="Replay 3").click()
    receiver.wait("/bulk", 6)


def test_pages_fit_a_phone(open_page: Callable[..., Watched], create: Create) -> None:
    made = create(id="w" * 200)
    watched = open_page(size=PHONE)
    for hash in ("", "#/timers", f"#/timers/default/{made['id']}", "#/create", "#/namespaces", "#/namespaces/default"):
        watched.go(hash)
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= PHONE[0], hash
