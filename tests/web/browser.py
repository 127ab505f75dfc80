"""Chromium for tests: finds and starts it, and opens pages that record every error that the browser reports."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Dialog, Page, sync_playwright

DESKTOP, PHONE = (1280, 900), (360, 740)

# Records violations of the content security policy. It runs before any script of the page.
_WATCH = """
window.refusals = [];
addEventListener("securitypolicyviolation", (event) =>
  window.refusals.push(`${event.violatedDirective} ${event.blockedURI}`));
"""


class Missing(Exception):
    """Chromium is not installed."""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        raise Missing("Chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        # CI runs as root, which has no sandbox. The pages are our own.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Watched:
    """A page and its errors."""

    page: Page
    base: str
    faults: list[str] = field(default_factory=list)

    def go(self, hash: str) -> None:
        """Open a route in a freshly loaded page."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.base}/{hash}")
        self.settled()

    def settled(self) -> None:
        self.page.wait_for_selector("main:not([aria-busy]) h1")

    def check(self) -> None:
        refused = self.page.evaluate("window.refusals ?? []")
        assert not self.faults and not refused, (self.faults, refused)

    def close(self) -> None:
        # The page polls, so a request may be in a route of the test. Its failure would be raised in the next test.
        self.page.unroute_all(behavior="ignoreErrors")
        self.page.context.unroute_all(behavior="ignoreErrors")
        self.page.context.close()


def signed_in(browser: Browser, base: str, key: str, **options: Any) -> BrowserContext:
    """A browser context with the session cookie."""
    context = browser.new_context(base_url=base, **options)
    context.add_init_script(_WATCH)
    answer = context.request.post("/session", data={"apiKey": key})
    assert answer.status == 204, answer.text()
    return context


def watch(page: Page, base: str) -> Watched:
    watched = Watched(page, base)

    def asked(dialog: Dialog) -> None:
        watched.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    page.on("pageerror", lambda error: watched.faults.append(f"error: {error}"))
    page.on("dialog", asked)
    return watched
