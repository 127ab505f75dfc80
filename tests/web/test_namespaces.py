"""Namespaces: create, pause, change retention and weight, add and delete signing secrets."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from playwright.sync_api import expect

from tests.servers import Duetime
from tests.web.browser import Watched


def test_namespace_is_created_and_changed(open_page: Callable[..., Watched], service: Duetime) -> None:
    def there() -> dict[str, Any]:
        namespace: dict[str, Any] = service.request("GET", "/api/v1/namespaces/billing").body
        return namespace

    page = open_page("#/namespaces", permissions=["clipboard-read", "clipboard-write"]).page
    page.get_by_role("button", name="New namespace").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("not a name")
    expect(dialog).to_contain_text("Must have only the letters a–z and A–Z, digits, dots")
    dialog.get_by_label("Name").fill("billing")
    dialog.get_by_label("Retention").fill("30d")
    dialog.get_by_label("Shards").fill("100000")
    dialog.get_by_role("button", name="Create").click()
    expect(dialog).to_contain_text("Shards must be at most")  # only the service knows the number of shards
    dialog.get_by_label("Weight").fill("101")
    expect(dialog).to_contain_text("Must be at most 100")
    dialog.get_by_label("Weight").fill("3")
    dialog.get_by_label("Shards").fill("4")
    dialog.get_by_role("button", name="Create").click()
    expect(page.get_by_role("heading", name="billing")).to_be_visible()
    assert (there()["retention"], there()["shards"], there()["weight"]) == ("30d", 4, 3)

    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator(".verdict")).to_contain_text("paused")
    assert there()["paused"]
    page.get_by_role("button", name="Resume", exact=True).click()
    expect(page.locator(".verdict")).to_contain_text("active")
    assert not there()["paused"]

    page.get_by_label("Retention").fill("sometimes")
    expect(page.get_by_text("Must be a duration of at least 1s, such as 30d, or forever.")).to_be_visible()
    page.get_by_label("Retention").fill("7d")
    page.get_by_role("button", name="Save retention").click()
    expect(page.get_by_role("definition").filter(has_text=re.compile("^7d$"))).to_be_visible()
    assert there()["retention"] == "7d"

    expect(page.get_by_label("Weight")).to_have_value("3")
    page.get_by_label("Weight").fill("2.5")
    expect(page.get_by_text("Must be a whole number")).to_be_visible()
    page.get_by_role("button", name="Save weight").click()
    assert there()["weight"] == 3
    page.get_by_label("Weight").fill("25")
    page.get_by_role("button", name="Save weight").click()
    expect(page.get_by_role("definition").filter(has_text=re.compile("^25$"))).to_be_visible()
    assert (there()["retention"], there()["weight"]) == ("7d", 25)

    page.get_by_role("button", name="New secret").click()
    shown = dialog.get_by_role("region", name="The secret").inner_text()
    assert shown.startswith("whsec_")
    dialog.get_by_role("button", name="Copy secret").click()
    expect(page.get_by_text("Copied the secret.")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == shown
    dialog.get_by_role("button", name="Close").click()
    expect(page.locator("dialog")).to_have_count(0)  # removed from the page, not only closed
    assert shown not in page.content()
    [secret] = there()["secrets"]
    page.get_by_role("button", name=f"Delete secret {secret['id']}").click()
    page.get_by_role("button", name="Delete secret", exact=True).click()
    expect(page.get_by_text("Secret deleted.")).to_be_visible()
    expect(page.get_by_text("Callbacks are not signed.")).to_be_visible()
    assert there()["secrets"] == []

    page.get_by_role("link", name="Namespaces").first.click()
    expect(page.get_by_role("columnheader", name="Weight")).to_be_visible()
    columns = page.get_by_role("columnheader").all_inner_texts()
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="billing"))
    expect(row.get_by_role("cell").nth(columns.index("Weight") - 1)).to_have_text("25")  # column 0 is a header
    row.get_by_role("link").click()

    page.get_by_role("link", name="View timers").click()
    expect(page.get_by_label("Namespace")).to_have_value("billing")
    page.goto(f"{page.url.split('#')[0]}#/namespaces/nobody")
    expect(page.get_by_role("heading", name="Namespace not found")).to_be_visible()
