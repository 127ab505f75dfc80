"""The comparison of the APIs in docs/which-api.md agrees with the code and with a running service."""

from __future__ import annotations

import json
import re
from pathlib import Path

from duetime.doors import broker, http_v1, http_v1_schema, platform, platform_schema
from duetime.model import Definition, HttpTarget, RetryPolicy
from tests.docs.pasting import ROOT
from tests.nats import Broker, Nats
from tests.servers import Duetime, Receiver, until

PAGE = (ROOT / "docs/which-api.md").read_text()
ROWS = {
    name: cells for name, *cells in (re.split(r" \| ", line.strip("| ")) for line in PAGE.splitlines() if "|" in line)
}
PAST = "2020-01-01T00:00:00Z"
FUTURE = "2030-01-01T00:00:00Z"


def test_limits_and_defaults_agree_with_the_code() -> None:
    v1, plain, _ = ROWS["list"]
    assert f"{http_v1.LIMIT_MAX} per page" in v1 and f"{platform_schema.LIMIT_MAX} per page" in plain
    assert f"up to {http_v1_schema.BATCH_MAX} timers" in ROWS["batch"][0]
    assert f"at least {platform.AHEAD_MS_MIN // 1000} seconds" in ROWS["time"][1]
    default, timeout_ms = RetryPolicy(), Definition(target=HttpTarget(url="")).timeout_ms
    assert ROWS["retries unless given"][0].startswith(f"{default.max_retries}, ")
    assert f"up to {default.initial_interval_ms // 1000} seconds" in ROWS["retries unless given"][0]
    assert f"every {broker.UNTIL_TAKEN.max_interval_ms // 1000} seconds" in ROWS["retries unless given"][2]
    assert all(f"{timeout_ms // 1000} seconds" in cell for cell in ROWS["timeout of an attempt"])


def test_timers_of_one_api_are_visible_in_the_others(tmp_path: Path) -> None:
    with Nats() as server, Duetime(tmp_path, TIMER_BROKER_URL=server.url) as service, Receiver() as receiver:
        request = service.request
        plain = request(
            "POST",
            "/timers",
            json={"execute_at": FUTURE, "callback_url": receiver.url("/plain"), "callback_payload": 1},
        )
        made = plain.body["data"]["id"]
        assert plain.status == 201 and plain.headers["location"] == f"/timers/{made}"
        v1 = {"id": "own", "executeAt": FUTURE, "callbackUrl": receiver.url("/v1"), "payload": 1}
        assert [request("POST", "/api/v1/timers", json=v1).status for _ in range(2)] == [200, 200]
        assert request("POST", "/api/v1/timers", json=v1 | {"payload": 2}).status == 409
        with Broker(server.url) as nats:
            until("the streams exist", lambda: "created the stream TIMER_DLQ" in service.stderr)
            command = {"tenantId": "shop", "serviceCallId": "call", "dueAt": PAST}
            nats.publish("timer.commands.schedule.shop", json.dumps(command).encode())
            [event] = until("the event is published", lambda: nats.messages("TIMER_EVENTS"))
        assert json.loads(event.data)["type"] == "DueTimeReached"

        retries = {
            path: request("GET", f"/api/v1/timers/{path}").body["retryPolicy"]["maxRetries"]
            for path in (f"default/{made}", "default/own", "shop/call")
        }
        assert list(retries.values())[:2] == [0, RetryPolicy().max_retries] and retries["shop/call"] > 0
        assert {one["id"] for one in request("GET", "/timers").body["data"]["timers"]} == {made, "own"}
        assert request("GET", "/timers/own").status == 400

        assert request("PUT", f"/api/v1/timers/default/{made}", json={"delay": "0s"}).status == 200
        assert request("PUT", "/api/v1/timers/default/own", json={"delay": "0s"}).status == 200
        assert receiver.wait("/plain")[0].body == b"1"
        body = json.loads(receiver.wait("/v1")[0].body)
        assert list(body) == re.findall(r'"(\w+)"', ROWS["callback body"][0])
