"""Accessibility: axe finds no violation on any page, light, dark or on a phone, and the keyboard can do everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.servers import Duetime, Receiver, Reply, until
from tests.web.browser import DESKTOP, PHONE, Watched
from tests.web.conftest import Create

PAGES = ["", "#/timers", "#/timers?id=nobody", "#/create", "#/namespaces", "#/namespaces/default", "#/nowhere"]


def violations(page: Page) -> list[str]:
    # The animation of a row that changes meanwhile is canceled, not finished.
    page.evaluate("Promise.allSettled(document.getAnimations().map((one) => one.finished))")
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['html'][:160]} {node['failureSummary']}" for one in found for node in one["nodes"]]


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_axe_finds_no_violation(
    look: str, open_page: Callable[..., Watched], create: Create, service: Duetime, receiver: Receiver
) -> None:
    broken = receiver.reply("/broken", Reply(500, b"no"))
    create(id="axe-pending", payload={"a": 1}, metadata=[1], callbackHeaders={"X-A": "b"}, correlationId="axe")
    create(id="axe-failed", delay="0s", callbackUrl=broken, retryPolicy={"maxRetries": 0})
    until("it failed", lambda: service.request("GET", "/api/v1/timers/default/axe-failed").body["lastError"])
    service.request("POST", "/api/v1/namespaces/default/secrets")
    options: dict[str, Any] = {"color_scheme": "dark" if look == "dark" else "light"}
    watched = open_page(size=PHONE if look == "phone" else DESKTOP, **options)
    page = watched.page
    for hash in [*PAGES, "#/timers/default/axe-pending", "#/timers/default/axe-failed"]:
        watched.go(hash)
        page.evaluate("document.querySelectorAll('main details').forEach((one) => { one.open = true; })")
        assert not violations(page), hash
    # Dialogs, with a validation error.
    watched.go("#/timers/default/axe-pending")
    page.get_by_role("button", name="Edit").click()
    page.get_by_role("dialog").get_by_label("Payload").fill("{")
    page.get_by_role("button", name="Save").click()
    assert not violations(page)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Delete").click()
    assert not violations(page)


def test_axe_finds_no_violation_on_the_sign_in_page(browser: Browser, service: Duetime) -> None:
    page = browser.new_page()
    page.goto(f"http://127.0.0.1:{service.port}/")
    page.get_by_label("API key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Wrong API key.")
    assert not violations(page)
    page.close()


def test_keyboard_alone_can_open_and_cancel_a_timer(open_page: Callable[..., Watched], create: Create) -> None:
    create(id="keys")
    page = open_page("#/timers?id=keys").page
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    expect(page.get_by_role("link", name="keys")).to_be_visible()  # the route did not change
    page.get_by_role("link", name="keys").focus()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="keys")).to_be_focused()  # so that a screen reader announces the page
    page.get_by_role("button", name="Cancel", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Cancel", exact=True)).to_be_focused()
