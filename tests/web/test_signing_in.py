"""Signing in with the API key, and from a new service to a first fired timer without any document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.servers import Duetime
from tests.web.browser import Watched, watch


def test_the_key_opens_the_page_and_stays_out_of_reach(browser: Browser, service: Duetime) -> None:
    context = browser.new_context()
    base = f"http://127.0.0.1:{service.port}"
    watched = watch(context.new_page(), base)
    page = watched.page
    page.goto(f"{base}/#/namespaces")
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    expect(page.get_by_text("cat duetime.key")).to_be_visible()
    key = page.get_by_label("API key")
    expect(key).to_be_focused()
    key.fill("not-the-key-not-the-key-not-the-key")
    key.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("not the API key")
    assert service.key is not None
    key.fill(f" {service.key} ")  # as it is pasted from a terminal
    key.press("Enter")
    expect(page.get_by_role("heading", name="Namespaces")).to_be_visible()
    [cookie] = context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and service.key not in str(cookie)
    assert service.key not in page.evaluate("JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}])")
    # What a session outlives is said where it is noticed.
    context.clear_cookies()
    page.get_by_role("link", name="Timers").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    page.get_by_label("API key").fill(service.key)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Timers")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    assert not context.cookies()
    watched.check()
    context.close()


def test_from_a_new_service_to_a_fired_timer(browser: Browser, tmp_path: Path) -> None:
    with Duetime(tmp_path, bare=True) as service:  # as `make run` starts it
        context = browser.new_context()
        watched = watch(context.new_page(), f"http://localhost:{service.port}")
        page = watched.page
        page.goto(watched.base)
        page.get_by_label("API key").fill((tmp_path / "duetime.key").read_text())
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("button", name="Fire a first timer in 10 seconds").click()
        expect(page.locator(".verdict")).to_contain_text("Due in")
        expect(page.locator(".verdict")).to_contain_text("after it was due", timeout=30_000)
        expect(page.locator(".verdict")).to_contain_text("completed")
        expect(page.locator(".timeline")).to_contain_text("Attempt 1")
        page.get_by_role("link", name="Overview").click()
        expect(page.locator(".welcome")).to_have_count(0)
        watched.check()
        context.close()


def test_without_keys_there_is_nothing_to_sign_in_to(browser: Browser, tmp_path: Path) -> None:
    with Duetime(tmp_path, DUETIME_AUTH="none") as service:
        context = browser.new_context()
        watched = watch(context.new_page(), f"http://127.0.0.1:{service.port}")
        watched.page.goto(watched.base)
        expect(watched.page.get_by_role("heading", name="Overview")).to_be_visible()
        expect(watched.page.get_by_role("button", name="Sign out")).to_be_hidden()
        watched.check()
        context.close()


def test_the_theme_is_remembered(open_page: Callable[..., Watched]) -> None:
    page = open_page(color_scheme="light").page
    page.get_by_role("button", name="Switch to dark colours").click()
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    expect(page.get_by_role("button", name="Switch to light colours")).to_be_visible()
