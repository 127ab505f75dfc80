"""Responses that are late, out of order or lost: the page shows the latest state and replays no more than counted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Request, Route, expect

from tests.servers import Duetime, Receiver, Reply, until
from tests.web.browser import Watched
from tests.web.conftest import Create

UNAVAILABLE = {"status": 503, "json": {"error": "UNAVAILABLE", "message": "The database is away."}}


class Held:
    """Holds back the first response to a request whose URL matches; ``release`` delivers it unchanged or replaced."""

    def __init__(self, page: Page, pattern: str) -> None:
        self._page, self._pattern = page, re.compile(pattern)
        self._route: Route | None = None
        self._answer: Any = None
        page.route(self._pattern, self._on_request)

    def _on_request(self, route: Route) -> None:
        if self._route is None:
            self._route = route
            self._answer = route.fetch()
        else:
            route.continue_()

    def wait(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        def is_held() -> bool:
            meanwhile()
            self._page.wait_for_timeout(50)  # Playwright handles requests only while it waits
            return self._answer is not None

        until("the request is held back", is_held)

    def release(self, **other: Any) -> None:
        """Deliver the response, or another one, and wait until the page has handled it."""
        assert self._route is not None
        with self._page.expect_response(self._pattern):
            self._route.fulfill(**(other or {"response": self._answer}))
        self._page.evaluate("fetch('/session').then((answer) => answer.text())")


@pytest.mark.parametrize("other", [{}, UNAVAILABLE])
@pytest.mark.parametrize("held_back", [r"/timers\?.*status=pending", r"/timers/count\?.*status=pending"])
def test_late_response_does_not_replace_a_newer_list(
    open_page: Callable[..., Watched], create: Create, service: Duetime, held_back: str, other: dict[str, Any]
) -> None:
    service.request("POST", "/api/v1/namespaces", json={"name": "late"})
    for id in ("a", "b", "canceled"):
        create(namespace="late", id=id)
    service.request("POST", "/api/v1/timers/late/canceled/cancel")
    page = open_page("#/timers?namespace=late").page
    expect(page.locator(".count")).to_have_text("3 timers")
    held = Held(page, held_back)
    page.get_by_label("Status").select_option("pending")
    held.wait()
    page.get_by_label("Status").select_option("canceled")
    expect(page.locator(".count")).to_have_text("1 timer")
    held.release(**other)
    assert page.locator(".count").inner_text() == "1 timer"
    assert page.locator("table.timers tbody a").all_inner_texts() == ["canceled"]


def test_late_response_does_not_restore_an_old_state_of_a_timer(
    open_page: Callable[..., Watched], create: Create, service: Duetime
) -> None:
    create(id="late")
    page = open_page("#/timers/default/late").page
    held = Held(page, r"/timers/default/late$")
    held.wait(
        lambda: service.request("PUT", "/api/v1/timers/default/late", json={"delay": "2h"})
    )  # makes the page poll again
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Cancel timer").click()
    expect(page.locator(".verdict")).to_contain_text("canceled")
    held.release()
    assert "canceled" in page.locator(".verdict").inner_text()


def test_delete_succeeds_when_an_earlier_one_was_done_but_reported_as_failed(
    open_page: Callable[..., Watched], create: Create, service: Duetime
) -> None:
    create(id="deleted twice")
    page = open_page("#/timers/default/deleted%20twice").page

    answers: list[int] = []

    def done_but_unavailable(route: Route) -> None:
        answer = route.fetch()
        if route.request.method == "DELETE":
            answers.append(answer.status)
        unavailable = len(answers) == 1 and route.request.method == "DELETE"
        route.fulfill(**UNAVAILABLE if unavailable else {"response": answer})

    page.route("**/deleted%20twice", done_but_unavailable)
    for said in ("The database is away.", "Timer deleted."):
        page.get_by_role("button", name="Delete").click()
        page.get_by_role("button", name="Delete timer").click()
        expect(page.get_by_text(said)).to_be_visible()
    expect(page.get_by_role("heading", name="Timers", exact=True)).to_be_visible()  # not also "No timers yet"
    assert answers == [204, 404]


def test_page_loads_again_when_a_script_was_lost(open_page: Callable[..., Watched]) -> None:
    """Chromium gives up requests when a network interface of the machine comes or goes."""
    watched = open_page()
    lost: list[str] = []

    def lose(route: Route) -> None:
        lost.append(route.request.url)
        route.abort("failed")

    watched.page.route("**/ui/router.js", lose, times=1)
    watched.go("#/namespaces")
    expect(watched.page.get_by_role("heading", name="Namespaces")).to_be_visible()
    assert len(lost) == 1


def failed(create: Create, receiver: Receiver, service: Duetime, namespace: str, ids: list[str]) -> None:
    url = receiver.reply(f"/{namespace}", Reply(500))
    for id in ids:
        create(namespace=namespace, id=id, delay="0s", callbackUrl=url, retryPolicy={"maxRetries": 0})

    def is_failed(id: str) -> bool:
        return bool(service.request("GET", f"/api/v1/timers/{namespace}/{id}").body["status"] == "failed")

    until("they failed", lambda: all(map(is_failed, ids)))


def asked_limits(page: Page) -> list[int]:
    """The limit of each replay request from now on."""
    limits: list[int] = []

    def look(request: Request) -> None:
        if request.url.endswith("/timers/replay"):
            limits.append(json.loads(request.post_data or "")["limit"])

    page.on("request", look)
    return limits


def test_replay_stops_at_the_number_that_was_counted(
    open_page: Callable[..., Watched], create: Create, service: Duetime, receiver: Receiver
) -> None:
    service.request("POST", "/api/v1/namespaces", json={"name": "counted"})
    failed(create, receiver, service, "counted", ["a", "b"])
    page = open_page("#/timers?namespace=counted").page
    limits = asked_limits(page)
    page.get_by_role("button", name="Replay all").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("2 failed timers")
    failed(create, receiver, service, "counted", ["c", "d"])
    dialog.get_by_role("button", name="Replay 2").click()
    expect(page.get_by_text("Replayed 2 timers.")).to_be_visible()
    assert limits == [2]


def test_replay_whose_response_was_lost_counts_as_done(
    open_page: Callable[..., Watched], create: Create, service: Duetime, receiver: Receiver
) -> None:
    service.request("POST", "/api/v1/namespaces", json={"name": "lost"})
    failed(create, receiver, service, "lost", ["a", "b"])
    page = open_page("#/timers?namespace=lost").page
    limits = asked_limits(page)

    def done_but_unavailable(route: Route) -> None:
        route.fetch()
        route.fulfill(**UNAVAILABLE)  # type: ignore[arg-type]

    page.route("**/timers/replay", done_but_unavailable)
    page.get_by_role("button", name="Replay all").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Replay 2").click()
    expect(dialog).to_contain_text("Stopped after 0 timers. The database is away. Up to 2 more may have been replayed.")
    dialog.get_by_role("button", name="Replay 2").click()
    expect(dialog).to_have_count(0)
    assert limits == [2]


def test_cancel_all_without_a_filter_names_all_namespaces(open_page: Callable[..., Watched], create: Create) -> None:
    create(id="in any namespace")
    page = open_page("#/timers").page
    page.get_by_role("button", name="Cancel all").click()
    with page.expect_response("**/timers/cancel") as answered:
        page.get_by_role("dialog").get_by_role("button", name="Cancel ").first.click()
    assert answered.value.status == 200
    assert json.loads(answered.value.request.post_data or "")["namespace"] == "*"


@pytest.mark.parametrize(("button", "verb"), [("Cancel all", "cancel"), ("Replay all", "replay")])
def test_cancel_all_and_replay_all_send_every_filter(
    open_page: Callable[..., Watched], create: Create, service: Duetime, button: str, verb: str
) -> None:
    service.request("POST", "/api/v1/namespaces", json={"name": f"all-{verb}"})
    create(namespace=f"all-{verb}", id="a", correlationId="c")
    filters = {
        **{"namespace": f"all-{verb}", "correlationId": "c"},
        **{"executeAfter": "2026-01-01T00:00:00.000Z", "executeBefore": "2999-01-01T00:00:00.000Z"},
    }
    if verb == "replay":
        service.request("POST", f"/api/v1/timers/all-{verb}/a/cancel")
        filters["status"] = "canceled"
    page = open_page("#/timers?" + "&".join(f"{name}={value}" for name, value in filters.items())).page
    page.get_by_role("button", name=button).click()
    with page.expect_request(f"**/timers/{verb}") as asked:
        page.get_by_role("dialog").get_by_role("button", name="1", exact=False).first.click()
    assert json.loads(asked.value.post_data or "") == {**filters, "limit": 1}
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_next_page_keeps_the_filter_and_a_new_filter_starts_at_page_one(
    open_page: Callable[..., Watched], service: Duetime, receiver: Receiver
) -> None:
    service.request("POST", "/api/v1/namespaces", json={"name": "turns"})
    wanted = [
        *({"id": f"even-{n}", "correlationId": "even"} for n in range(60)),
        *({"id": f"odd-{n}", "correlationId": "odd"} for n in range(60)),
    ]
    timers = [{"namespace": "turns", "delay": "1h", "callbackUrl": receiver.url("/hook"), **one} for one in wanted]
    assert service.request("POST", "/api/v1/timers/batch", json={"timers": timers}).status == 200
    page = open_page("#/timers?namespace=turns&correlationId=even").page
    rows = page.locator("table.timers tbody tr")
    expect(rows).to_have_count(50)
    page.get_by_role("button", name="Next").click()
    expect(page.get_by_text("Page 2")).to_be_visible()
    expect(rows).to_have_count(10)
    expect(rows.filter(has_text="even-")).to_have_count(10)
    page.get_by_label("Correlation id").fill("odd")
    expect(rows.filter(has_text="odd-")).to_have_count(50)
    expect(page.get_by_text("Page 1")).to_be_visible()
