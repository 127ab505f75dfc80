"""The page of a service whose store can do less: it hides unsupported filters and marks estimates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Response, expect

from duetime.store import Abilities, Order, TimeSource
from tests.few_abilities import FewAbilities, without
from tests.servers import Duetime
from tests.web.browser import DESKTOP, Watched, signed_in, watch

URL = "http://127.0.0.1:9/hook"
FILTERS = {"Id", "Status", "Namespace", "Correlation id", "Scheduled at or after", "Scheduled before"}
STATUSES = ["any", "pending", "executing", "completed", "failed", "canceled"]
ESTIMATES = Abilities(counts_exactly=False)


@contextmanager
def page_of(service: Duetime, browser: Browser, hash: str = "") -> Iterator[Watched]:
    base = f"http://127.0.0.1:{service.port}"
    assert service.key is not None
    context = signed_in(browser, base, service.key, viewport={"width": DESKTOP[0], "height": DESKTOP[1]})
    watched = watch(context.new_page(), base)
    refused: list[str] = []

    def note(answer: Response) -> None:
        if answer.status == 400:
            refused.append(answer.url)

    watched.page.on("response", note)
    watched.go(hash)
    yield watched
    watched.check()
    assert not refused  # the page sends no request that the store can't serve
    watched.close()


def made(service: Duetime, **fields: Any) -> None:
    answer = service.request("POST", "/api/v1/timers", json={"delay": "1h", "callbackUrl": URL, **fields})
    assert answer.status == 200, answer


@pytest.mark.parametrize(
    ("missing", "filters", "statuses", "tiles"),
    [
        (None, FILTERS, STATUSES, 6),
        (Order.NEWEST, FILTERS - {"Id", "Correlation id"}, STATUSES[1:], 6),
        (Order.SOONEST, FILTERS - {"Scheduled at or after", "Scheduled before"}, STATUSES, 5),
        (Order.DUE, FILTERS, ["any", *STATUSES[2:]], 5),
        (Order.DEADLINE, FILTERS, ["any", "pending", *STATUSES[3:]], 5),
        (Order.FINISHED, FILTERS, ["any", "pending", "executing"], 3),
    ],
)
def test_unsupported_filters_and_links_are_hidden(
    tmp_path: Path, browser: Browser, missing: Order | None, filters: set[str], statuses: list[str], tiles: int
) -> None:
    with FewAbilities(tmp_path, without() if missing is None else without(missing)) as service:
        made(service, id="one", correlationId="c-1")
        with page_of(service, browser) as watched:
            page = watched.page
            shown = page.get_by_role("list", name="Timers by status")
            expect(shown.get_by_role("listitem")).to_have_count(6)
            expect(shown.get_by_role("link")).to_have_count(tiles)
            failures = page.get_by_role("region", name="Failures by destination")
            expect(failures).to_have_count(0 if missing is Order.FINISHED else 1)
            # A bookmarked URL with unsupported filters causes no such request either.
            watched.go("#/timers?status=failed&id=one&correlationId=c-1&executeAfter=2020-01-01T00:00:00Z")
            watched.go("#/timers")
            page.wait_for_selector(".count:not(:empty)")
            labels = page.get_by_role("search").locator("label").all_inner_texts()
            assert set(labels) == filters
            status = page.get_by_label("Status")
            assert status.locator("option").all_inner_texts() == statuses
            expect(page.get_by_role("link", name="one")).to_be_visible()
            for label in statuses:
                status.select_option(label=label)
                expect(page.locator(".problem")).to_have_count(0)
            page.get_by_role("button", name="Clear", exact=True).click()
            expect(status.locator("option:checked")).to_have_text(statuses[0])
            expect(page.get_by_role("button", name="Cancel all")).to_have_count(0 if missing is Order.DUE else 1)
            expect(page.get_by_role("button", name="Replay all")).to_have_count(0 if missing is Order.FINISHED else 1)
            watched.go("#/timers/default/one")
            related = page.get_by_role("link", name="c-1")
            expect(related).to_have_count(0 if missing is Order.NEWEST else 1)
            expect(page.get_by_text("c-1", exact=True)).to_be_visible()


def test_estimated_counts_have_a_tilde(tmp_path: Path, browser: Browser) -> None:
    with FewAbilities(tmp_path, ESTIMATES) as service:
        made(service)
        made(service)
        with page_of(service, browser) as watched:
            page = watched.page
            pending = page.locator(".tile.pending strong")
            expect(pending).to_have_text("~2")
            expect(pending).to_have_attribute("title", "An estimate: this database keeps no exact count.")
            expect(page.get_by_role("img", name="Due in the next day")).to_have_attribute(
                "aria-label", "Due in the next day, by hour. ~2 timers fall due (estimate)."
            )
            made(service)
            expect(pending).to_have_text("~3")  # by the event stream
            watched.go("#/timers")
            count = page.locator(".count")
            expect(count).to_have_text("~3 timers")
            expect(count).to_have_attribute("title", "An estimate: this database keeps no exact count.")
            page.get_by_role("button", name="Cancel all").click()
            dialog = page.get_by_role("dialog")
            expect(dialog).to_contain_text("~3 pending timers match the filter")
            dialog.get_by_role("button", name="Cancel ~3").click()
            expect(page.get_by_text("Canceled 3 timers.")).to_be_visible()


def test_estimate_of_zero_does_not_prevent_export_or_cancel(tmp_path: Path, browser: Browser) -> None:
    """An estimate may be older than the newest timers."""
    with FewAbilities(tmp_path, ESTIMATES) as service:
        made(service)
        with page_of(service, browser, "#/timers") as watched:
            page = watched.page
            none = '{"timers": 0, "more": false, "estimated": true}'
            page.route("**/timers/count?*", lambda route: route.fulfill(body=none, content_type="application/json"))
            with page.expect_download() as file:
                page.get_by_role("button", name="Export CSV").click()
            assert len(file.value.path().read_text().splitlines()) == 2
            expect(page.get_by_text("Exported 1 timer.")).to_be_visible()
            page.get_by_role("button", name="Cancel all").click()
            page.get_by_role("dialog").get_by_role("button", name="Cancel ~0").click()
            expect(page.get_by_text("Canceled 1 timer.")).to_be_visible()


def test_exact_counts_have_no_tilde(tmp_path: Path, browser: Browser) -> None:
    with FewAbilities(tmp_path, Abilities()) as service:
        made(service)
        with page_of(service, browser) as watched:
            page = watched.page
            expect(page.locator(".tile.pending strong")).to_have_text("1")
            watched.go("#/timers")
            expect(page.locator(".count")).to_have_text("1 timer")
            assert "~" not in page.locator("main").inner_text()


@pytest.mark.parametrize("source", TimeSource)
def test_overview_tells_when_instances_use_their_own_clocks(
    tmp_path: Path, browser: Browser, source: TimeSource
) -> None:
    with FewAbilities(tmp_path, Abilities(time_source=source)) as service, page_of(service, browser) as watched:
        says = watched.page.get_by_text("Each instance uses its own machine's clock")
        expect(says).to_have_count(1 if source is TimeSource.MACHINE else 0)
