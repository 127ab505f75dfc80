"""The way over the web page to a first timer, as the README describes it, with the README's receiver."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.docs import pasting, readme
from tests.servers import Duetime
from tests.web.browser import watch


def test_timer_from_the_page_is_fired_at_the_receiver(browser: Browser, tmp_path: Path) -> None:
    text = " ".join((pasting.ROOT / "README.md").read_text().split())
    [steps] = re.findall(r"With the \[web page\].*?\"Create timer\"\.", text)
    fields = dict(re.findall(r'"([^"]+)" `([^`]+)`', steps))
    assert list(fields) == ["When", "Callback URL", "Payload"]
    with Duetime(tmp_path, bare=True) as service, readme.receiver(tmp_path) as receiver:
        context = browser.new_context()
        watched = watch(context.new_page(), f"http://localhost:{service.port}")
        page = watched.page
        page.goto(watched.base)
        page.get_by_label("API key").fill((tmp_path / "duetime.key").read_text())
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("link", name="New timer").click()
        for label, value in fields.items():
            page.get_by_label(label).fill(value.replace(readme.PORT, str(receiver.port)))
        page.get_by_role("button", name="Create timer").click()
        assert receiver.called()[0]["payload"] == {"from": "the page"}
        expect(page.locator(".verdict")).to_contain_text("completed")
        watched.check()
        context.close()
