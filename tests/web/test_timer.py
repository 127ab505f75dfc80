"""One timer: its timeline and actions, and the form that creates one."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from typing import Any

from playwright.sync_api import expect

from tests.servers import Duetime, Receiver, Reply, until
from tests.web.browser import Watched
from tests.web.conftest import Create


def got(service: Duetime, id: str, namespace: str = "default") -> dict[str, Any]:
    timer: dict[str, Any] = service.request("GET", f"/api/v1/timers/{namespace}/{id}").body
    return timer


def test_timeline_shows_attempts_and_replay(
    open_page: Callable[..., Watched], create: Create, service: Duetime, receiver: Receiver
) -> None:
    url = receiver.reply("/story", Reply(503, b"come back later"), Reply())
    create(
        id="story",
        delay="1s",
        callbackUrl=url,
        payload={"order": 17, "exact": 12345678901234567890},
        metadata=["kept"],
        callbackHeaders={"X-Tenant": "acme"},
        correlationId="story-line",
        retryPolicy={"maxRetries": 2, "initialInterval": "1s", "jitter": False},
    )
    page = open_page("#/timers/default/story").page
    line = page.locator(".timeline")
    expect(page.locator(".verdict")).to_contain_text("completed")
    expect(page.locator(".verdict")).to_contain_text(re.compile("Fired .+ (after it was due|late)"))
    for text in ("Created", "Due", "Attempt 1", "HTTP 503", "Attempt 2", "HTTP 200", "Completed"):
        expect(line).to_contain_text(text)
    line.get_by_text("Response body (first 200 characters)").first.click()
    expect(line).to_contain_text("come back later")
    expect(page.get_by_role("region", name="Payload").first).to_contain_text("12345678901234567890")
    expect(page.get_by_role("region", name="Metadata").first).to_contain_text("kept")
    expect(page.get_by_role("region", name="Headers").first).to_contain_text("X-Tenant: acme")
    page.get_by_role("button", name="Replay").click()
    receiver.wait("/story", 3)
    expect(line).to_contain_text("Replayed")
    expect(page.locator(".verdict")).to_contain_text(re.compile("Fired .+ (after it was replayed|late)"))
    page.get_by_role("link", name="story-line").click()
    expect(page.get_by_label("Correlation id")).to_have_value("story-line")


def test_timeline_shows_a_reschedule(
    open_page: Callable[..., Watched], create: Create, receiver: Receiver, service: Duetime
) -> None:
    later = Reply(body=json.dumps({"ok": False, "nextExecuteAt": "2999-01-01T00:00:00Z"}).encode())
    create(id="again", delay="0s", callbackUrl=receiver.reply("/again", later))
    until("it was rescheduled", lambda: got(service, "again")["executeAt"].startswith("2999"))
    page = open_page("#/timers/default/again").page
    expect(page.locator(".timeline")).to_contain_text("Due again")
    expect(page.locator(".verdict")).to_contain_text("pending")


def test_timer_is_edited(open_page: Callable[..., Watched], create: Create, service: Duetime) -> None:
    create(id="edit", payload={"old": 12345678901234567890}, correlationId="old")
    page = open_page("#/timers/default/edit").page
    page.get_by_role("button", name="Edit").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("New time").fill("in 3 hours")
    payload = dialog.get_by_label("Payload")
    assert json.loads(payload.input_value()) == {"old": 12345678901234567890}
    payload.fill("{broken")
    expect(dialog).to_contain_text("Not valid JSON")
    dialog.get_by_role("button", name="Save").click()
    expect(payload).to_be_focused()
    payload.fill('{"new": 98765432109876543210}')
    dialog.get_by_label("Correlation id").fill("new")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog).to_have_count(0)
    expect(page.get_by_role("region", name="Payload").first).to_contain_text("98765432109876543210")
    timer = got(service, "edit")
    assert timer["payload"] == {"new": 98765432109876543210} and timer["correlationId"] == "new"
    expect(page.locator(".verdict")).to_contain_text("Due in 2 hours 59 minutes")


def test_timer_is_canceled_and_deleted(open_page: Callable[..., Watched], create: Create, service: Duetime) -> None:
    create(id="cancel")
    page = open_page("#/timers/default/cancel").page
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.keyboard.press("Escape")
    assert got(service, "cancel")["status"] == "pending"
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Cancel timer").click()
    expect(page.locator(".verdict")).to_contain_text("canceled")
    assert got(service, "cancel")["status"] == "canceled"
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete timer").click()
    expect(page.get_by_role("heading", name="Timers", exact=True)).to_be_visible()  # not also "No timers yet"
    assert service.request("GET", "/api/v1/timers/default/cancel").status == 404
    page.goto(f"{page.url.split('#')[0]}#/timers/default/cancel")
    expect(page.get_by_role("heading", name="Timer not found")).to_be_visible()


def test_update_does_not_take_the_click(open_page: Callable[..., Watched], create: Create, service: Duetime) -> None:
    create(id="pressed", correlationId="press")
    page = open_page("#/timers/default/pressed").page
    for n, (role, name) in enumerate((("button", "Cancel"), ("link", "press"))):
        page.get_by_role(role, name=name, exact=True).hover()  # type: ignore[arg-type]
        page.mouse.down()
        service.request("PUT", "/api/v1/timers/default/pressed", json={"delay": f"{n + 5}d"})
        expect(page.locator(".verdict")).to_contain_text(f"Due in {n + 4} days 23 hours")
        page.mouse.up()
        if role == "button":
            expect(page.get_by_role("dialog")).to_be_visible()
            page.keyboard.press("Escape")
    expect(page.get_by_label("Correlation id")).to_have_value("press")


def test_copied_curl_command_creates_the_same_timer(
    open_page: Callable[..., Watched], create: Create, service: Duetime
) -> None:
    hard = 'it\'s $HOME, `id`, "quoted" \\ and \n new'
    create(id="curl", payload={"text": hard}, callbackHeaders={"X-Note": "it's $1"}, correlationId="pasted")
    watched = open_page("#/timers/default/curl", permissions=["clipboard-read", "clipboard-write"])
    watched.page.get_by_role("button", name="Copy as curl").click()
    expect(watched.page.get_by_text("Copied the curl command.")).to_be_visible()
    command = watched.page.evaluate("navigator.clipboard.readText()")
    assert service.key is not None and service.key not in command and "$API_KEY" in command
    env = os.environ | {"API_KEY": service.key}
    ran = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=60, check=True)
    made = json.loads(ran.stdout)
    assert made["payload"] == {"text": hard} and made["callbackHeaders"] == {"X-Note": "it's $1"}
    assert made["id"] != "curl" and made["correlationId"] == "pasted"


def test_form_says_that_a_timer_exists_already(
    open_page: Callable[..., Watched], create: Create, service: Duetime, receiver: Receiver
) -> None:
    create(id="taken", delay="2h")
    assert service.request("POST", "/api/v1/timers/default/taken/cancel").status == 200
    page = open_page("#/create").page
    page.get_by_label("When").fill("in 2 hours")
    page.get_by_label("Callback URL").fill(receiver.url("/hook"))
    page.get_by_role("textbox", name="Id", exact=True).fill("taken")
    page.get_by_role("button", name="Create timer").click()
    expect(page.get_by_text("This timer already exists and is canceled: nothing was changed.")).to_be_visible()
    expect(page.get_by_role("heading", name="taken")).to_be_visible()


def test_timer_is_created_with_the_form_and_fires(
    open_page: Callable[..., Watched], service: Duetime, receiver: Receiver
) -> None:
    page = open_page("#/create", timezone_id="Europe/Berlin").page
    expect(page.get_by_label("When")).to_be_focused()
    page.get_by_role("button", name="tomorrow 9:00").click()
    expect(page.locator(".preview")).to_contain_text("09:00:00 Europe/Berlin (UTC+")
    expect(page.locator(".preview")).to_contain_text(":00:00.000Z")
    page.get_by_label("When").fill("sometime")
    expect(page.get_by_text("Not a valid time")).to_be_visible()
    page.get_by_label("When").fill("in 2 seconds")
    # The form validates by the rules of the API.
    page.get_by_label("Callback URL").fill("ftp://example.com")
    expect(page.get_by_text("Must be an http:// or https:// URL")).to_be_visible()
    page.get_by_role("textbox", name="Id", exact=True).fill("x" * 256)
    expect(page.get_by_text("at most 255 characters; it has 256")).to_be_visible()
    page.get_by_label("Payload").fill("{")
    expect(page.get_by_text("Not valid JSON")).to_be_visible()
    page.get_by_role("button", name="Create timer").click()
    expect(page.get_by_label("Callback URL")).to_be_focused()
    page.get_by_role("textbox", name="Id", exact=True).fill("made here")
    page.get_by_label("Payload").fill('{"n": 12345678901234567890}')
    page.get_by_text("Delivery: method").click()
    page.get_by_label("Headers").fill("X-Tenant: acme\nX-Other: a: b")
    page.get_by_label("Method").select_option("PUT")
    page.locator("summary", has_text="Retries").click()
    page.get_by_label("Retries", exact=True).fill("1001")
    expect(page.get_by_text("Must be at most 1000.")).to_be_visible()
    page.get_by_label("Retries", exact=True).fill("1")
    page.get_by_label("Give up on statuses").fill("404, 200")
    expect(page.get_by_text("Write statuses from 300 to 599")).to_be_visible()
    page.get_by_label("Give up on statuses").fill("404, 410")
    # An error that only the service can find is shown at its field too.
    page.get_by_label("Callback URL").fill("http://10.0.0.1/hook")
    page.get_by_role("button", name="Create timer").click()
    expect(page.get_by_text("callbackUrl points to a private address (10.0.0.1);")).to_be_visible()
    expect(page.get_by_label("Callback URL")).to_be_focused()
    page.get_by_label("Callback URL").fill(receiver.url("/made"))
    page.get_by_role("button", name="Create timer").click()
    expect(page.get_by_role("heading", name="made here")).to_be_visible()
    expect(page.locator(".verdict")).to_contain_text("completed")
    [request] = receiver.at("/made")
    assert request.method == "PUT" and request.headers["x-other"] == "a: b"
    assert json.loads(request.body)["payload"] == {"n": 12345678901234567890}
    policy = got(service, "made%20here")["retryPolicy"]
    assert (policy["maxRetries"], policy["giveUpOn"]) == (1, [404, 410])
