"""The overview: what it says, and that it changes by itself."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect

from tests.servers import Duetime, Receiver, Reply, until
from tests.web.browser import Watched
from tests.web.conftest import Create


def test_it_answers_what_is_due_what_fired_and_what_failed(
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
    for heading in ("Fires per second", "Lateness", "Due in the next hour, by minute", "Due in the next day, by hour"):
        expect(page.get_by_role("img", name=heading)).to_be_visible()
    assert page.locator(".plot canvas").count() == 4
    failures = page.get_by_role("region", name="Failures by destination")
    expect(failures.get_by_role("rowheader", name=receiver.base)).to_be_visible(timeout=15_000)
    expect(failures).to_contain_text("HTTP 500")
    owners = page.get_by_role("region", name="Who owns which shard")
    expect(owners).to_contain_text("Every shard has an owner.")
    expect(owners.get_by_role("row")).to_have_count(2)
    # A chart is a table too.
    page.get_by_text("As a table").nth(2).click()
    expect(
        page.get_by_role("region", name="Due in the next hour, by minute, as a table").get_by_role("row")
    ).to_have_count(61)
    tiles.get_by_role("link", name="failed").click()
    expect(page.get_by_role("heading", name="Timers")).to_be_visible()
    expect(page.get_by_label("Status")).to_have_value("failed")
    expect(page.get_by_role("link", name="overview-failed")).to_be_visible()


def test_it_changes_by_itself_until_it_is_paused(open_page: Callable[..., Watched], create: Create) -> None:
    page = open_page().page
    pending = page.locator(".tile.pending strong")

    def shown() -> int:
        return int(pending.inner_text().replace(",", ""))

    before = shown()
    create()
    expect(pending).to_have_text(f"{before + 1:,}")
    page.get_by_role("button", name="Live: stop live updates").click()
    live = page.locator("#live")
    expect(live).to_have_text("Paused")
    live.click()
    expect(live).to_have_text("Live")
    create()
    expect(pending).to_have_text(f"{before + 2:,}")
