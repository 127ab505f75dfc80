"""The list with many timers; ``DUETIME_LISTED=100000`` sets how many. The test asserts no times: it prints them, beside
those of an empty list."""

from __future__ import annotations

import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from tests.servers import Duetime
from tests.web.browser import DESKTOP, signed_in

TIMERS = int(os.environ.get("DUETIME_LISTED", "10000"))
TURNS = 20

# Waits until the first row, or the text of the empty list, is painted.
PAINTED = """async () => {
  await new Promise((resolve) => {
    const there = () => document.querySelector("table.timers tbody tr, .welcome");
    const look = () => there() ? resolve() : requestAnimationFrame(look);
    look();
  });
  await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
  const [paint] = performance.getEntriesByName("first-contentful-paint");
  return [paint.startTime, performance.now()];
}"""
# Measures from the click on Next until the next page is painted.
TURNED = """async () => {
  const first = () => document.querySelector("table.timers tbody a").textContent;
  const [before, began] = [first(), performance.now()];
  [...document.querySelectorAll(".pager button")].at(-1).click();
  await new Promise((resolve) => {
    const look = () => first() !== before ? resolve() : requestAnimationFrame(look);
    look();
  });
  await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
  return performance.now() - began;
}"""


def painted(page: Page, base: str) -> str:
    def once() -> list[float]:
        page.goto("about:blank")
        page.goto(f"{base}/#/timers")
        looked: list[float] = page.evaluate(PAINTED)
        return looked

    first, rows = (statistics.median(some) for some in zip(*(once() for _ in range(5)), strict=True))
    return f"first paint after {first:.0f} ms, the list after {rows:.0f} ms"


def test_list_of_many_timers_shows_the_count_and_turns_pages(browser: Browser, tmp_path: Path) -> None:
    with Duetime(tmp_path) as service:
        assert service.key is not None
        base = f"http://127.0.0.1:{service.port}"
        width, height = DESKTOP
        context = signed_in(browser, base, service.key, viewport={"width": width, "height": height})
        page = context.new_page()
        print(f"\nno timers: {painted(page, base)}")
        fill(service)
        print(f"{TIMERS:,} timers: {painted(page, base)}")
        expect(page.locator(".count")).to_have_text(f"{TIMERS:,} timers")
        turns = sorted(page.evaluate(TURNED) for _ in range(TURNS))
        print(f"next page: {statistics.median(turns):.0f} ms, at most {turns[-1]:.0f} ms of {TURNS}")
        expect(page.get_by_text(f"Page {TURNS + 1}")).to_be_visible()
        assert page.locator("table.timers tbody tr").count() == 50
        context.close()


def fill(service: Duetime) -> None:
    def batch(start: int) -> None:
        timers = [
            {
                "id": f"order-{n:06}",
                "delay": f"{3_600 + n}s",
                "callbackUrl": "http://127.0.0.1:9/hook",
                "payload": {"order": n},
                "correlationId": f"customer-{n % 5_000}",
            }
            for n in range(start, start + 1_000)
        ]
        assert service.request("POST", "/api/v1/timers/batch", json={"timers": timers}).status == 200

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(batch, range(0, TIMERS, 1_000)))
