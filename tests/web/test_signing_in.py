"""Signing in with the API key, and the way from a new service to a first fired timer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.servers import Duetime, Receiver, Reply
from tests.web.browser import Watched, watch


def test_key_signs_in_and_scripts_can_not_read_it(browser: Browser, service: Duetime) -> None:
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
    expect(page.get_by_role("alert")).to_contain_text("Wrong API key.")
    assert service.key is not None
    key.fill(f" {service.key} ")  # with the spaces that a paste may add
    key.press("Enter")
    expect(page.get_by_role("heading", name="Namespaces")).to_be_visible()
    [cookie] = context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict" and service.key not in str(cookie)
    assert service.key not in page.evaluate("JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}])")
    # When the session ends, the next request leads to the sign-in page.
    context.clear_cookies()
    page.get_by_role("link", name="Timers").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    page.get_by_label("API key").fill(service.key)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Timers", exact=True)).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    assert not context.cookies()
    watched.check()
    context.close()


def test_new_service_fires_its_first_timer_by_two_clicks(browser: Browser, tmp_path: Path) -> None:
    with Duetime(tmp_path, bare=True) as service:  # as `make run` starts it
        context = browser.new_context()
        watched = watch(context.new_page(), f"http://localhost:{service.port}")
        page = watched.page
        page.goto(watched.base)
        page.get_by_label("API key").fill((tmp_path / "duetime.key").read_text())
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("button", name="Create a timer that fires in 10 seconds").click()
        expect(page.locator(".verdict")).to_contain_text("Due in")
        expect(page.locator(".verdict")).to_contain_text(re.compile("Fired .+ (after it was due|late)"))
        expect(page.locator(".verdict")).to_contain_text("completed")
        expect(page.locator(".timeline")).to_contain_text("Attempt 1")
        page.get_by_role("link", name="Overview").click()
        expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        expect(page.locator(".welcome")).to_have_count(0)
        watched.check()
        context.close()


def test_without_authentication_there_is_no_sign_in(browser: Browser, tmp_path: Path) -> None:
    with Duetime(tmp_path, DUETIME_AUTH="none") as service:
        context = browser.new_context()
        watched = watch(context.new_page(), f"http://127.0.0.1:{service.port}")
        watched.page.goto(watched.base)
        expect(watched.page.get_by_role("heading", name="Overview")).to_be_visible()
        expect(watched.page.get_by_role("button", name="Sign out")).to_be_hidden()
        watched.check()
        context.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"], ids=["same site", "other site"])
def test_without_authentication_other_sites_can_not_create_timers(browser: Browser, tmp_path: Path, host: str) -> None:
    with Duetime(tmp_path, DUETIME_AUTH="none") as service, Receiver() as elsewhere:
        page = browser.new_page()
        elsewhere.reply("/evil", Reply(body=b"<!doctype html><h1>evil</h1>", headers={"Content-Type": "text/html"}))
        page.goto(f"http://{host}:{elsewhere.port}/evil")
        timer = {"delay": "1h", "callbackUrl": "http://127.0.0.1:9/"}
        target = f"http://127.0.0.1:{service.port}/api/v1/timers"
        sent = page.evaluate(
            "([url, body]) => fetch(url, {method: 'POST', mode: 'no-cors', body}).then((answer) => answer.type)",
            [target, json.dumps(timer)],
        )
        assert sent == "opaque"  # The request arrived, but the page can't read the response.
        with page.expect_navigation() as navigation:
            page.evaluate(
                """(url) => {
                  const form = Object.assign(document.createElement("form"), {method: "POST", action: url});
                  form.enctype = "text/plain";
                  document.body.append(form);
                  form.submit();
                }""",
                target,
            )
        assert navigation.value is not None and navigation.value.status == 403
        assert service.request("GET", "/api/v1/timers/count", headers={}).body["timers"] == 0
        page.goto(f"http://{host}:{elsewhere.port}/evil")
        page.evaluate(
            """(url) => {
              const link = Object.assign(document.createElement("a"), {href: url, textContent: "Duetime"});
              document.body.append(link);
            }""",
            f"http://127.0.0.1:{service.port}/",
        )
        page.get_by_role("link", name="Duetime").click()
        expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        page.close()


def test_theme_is_remembered(open_page: Callable[..., Watched]) -> None:
    page = open_page(color_scheme="light").page
    page.get_by_role("button", name="Switch to dark colors").click()
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    expect(page.get_by_role("button", name="Switch to light colors")).to_be_visible()
