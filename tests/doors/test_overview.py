"""The overview and the stream of pulses that the web pages read."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import pytest

from tests.doors.http_v1 import BASE, ONCE, HttpV1, failure, seconds_between, success
from tests.servers import KEY, PATIENCE_SECONDS, Duetime, Receiver, Reply, instant, until


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpV1]:
    # These tests advance the clock in large steps, so the lease must be long.
    forever: dict[str, Any] = {"DUETIME_RETENTION": "forever", "DUETIME_LEASE_TTL": "5m"}
    with HttpV1(tmp_path_factory.mktemp("overview"), **forever) as service:
        yield service
        assert "Traceback" not in service.stderr, service.stderr


class Listening:
    """A client that receives the pulses of a service."""

    def __init__(self, service: Duetime, **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE_SECONDS)
        self._connection.request("GET", BASE + "/events", headers=headers or {"X-API-Key": KEY})
        self.response = self._connection.getresponse()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.response.close()
        self._connection.close()

    def pulse(self) -> dict[str, Any]:
        """Wait for the next pulse; returns its data."""
        while (line := self.response.readline()) != b"event: pulse\n":
            assert line, "the stream has ended"
        data: dict[str, Any] = json.loads(self.response.readline().removeprefix(b"data: "))
        assert self.response.readline() == b"\n"
        return data

    def until(self, good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for a pulse that fulfills the condition; returns it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not good(pulse := self.pulse()):
            assert time.monotonic() < deadline, pulse
        return pulse


def total(pulse: dict[str, Any]) -> int:
    """The number of timers in any status, because timers of other tests may change theirs."""
    return sum(pulse["statuses"].values())


def overview(service: HttpV1) -> dict[str, Any]:
    service.advance("11s")  # the service caches parts of the overview for up to ten seconds
    seen: dict[str, Any] = success(service.api("GET", "/overview"))
    assert set(seen) == {
        *("now", "statuses", "since", "stepSeconds", "activity", "forecast", "overdue", "failures"),
        *("overdueReasons", "instances", "shards", "unowned"),
    }
    return seen


class TestOverview:
    def test_overview_has_counts_instances_and_shards(self, service: HttpV1) -> None:
        until("every shard has an owner", lambda: not success(service.api("GET", "/cluster"))["unowned"])
        seen = overview(service)
        assert set(seen["statuses"]) == {"pending", "executing", "completed", "failed", "canceled"}
        cluster = success(service.api("GET", "/cluster"))
        assert (seen["shards"], seen["unowned"]) == (cluster["shards"], cluster["unowned"]) == (64, [])
        [instance], [same] = seen["instances"], cluster["instances"]
        assert instance | {"aliveUntil": ""} == same | {"aliveUntil": ""}
        assert instant(seen["since"]) <= instant(seen["now"])

    def test_activity_has_the_rate_and_lateness_of_fires(self, service: HttpV1, receiver: Receiver) -> None:
        for _ in range(3):
            service.run(receiver.url("/active"))

        def busy() -> dict[str, Any] | None:
            seen = overview(service)
            return seen if any(point["firesPerSecond"] for point in seen["activity"]) else None

        seen = until("the activity has fires", busy)
        assert seen["stepSeconds"] == 5 and len(seen["activity"]) <= 720
        times = [instant(point["at"]) for point in seen["activity"]]
        assert times == sorted(times)
        for point in seen["activity"]:
            assert set(point) == {"at", "firesPerSecond", "latenessP50Ms", "latenessP99Ms"}
            if point["firesPerSecond"]:
                assert 0 <= point["latenessP50Ms"] <= point["latenessP99Ms"]
            else:
                assert point["latenessP50Ms"] is point["latenessP99Ms"] is None

    def test_forecast_and_overdue_count_pending_timers(self, service: HttpV1) -> None:
        before = overview(service)
        service.namespace("stopped")
        success(service.api("PATCH", "/namespaces/stopped", {"paused": True}))
        for delay in ("110s", "110s", "30m", "10h", "30h"):
            service.make(delay=delay)
        service.make(delay="0s", namespace="stopped")
        seen = overview(service)
        for name, places, seconds in (("hour", 60, 60), ("day", 24, 3600)):
            stretches = seen["forecast"][name]
            assert len(stretches) == places and stretches[0]["at"] <= seen["now"]
            assert {seconds_between(a["at"], b["at"]) for a, b in pairwise(stretches)} == {seconds}
            assert not any(stretch["more"] for stretch in stretches)
        minutes = [stretch["timers"] for stretch in seen["forecast"]["hour"]]
        hours = [stretch["timers"] for stretch in seen["forecast"]["day"]]
        assert (minutes[1], sum(minutes), hours[0], sum(hours)) == (2, 3, 3, 4)
        assert seen["overdue"] == {"timers": before["overdue"]["timers"] + 1, "more": False}
        success(service.api("PATCH", "/namespaces/stopped", {"paused": False}))
        until("nothing is overdue", lambda: overview(service)["overdue"]["timers"] == 0)

    def test_failures_are_grouped_by_destination(self, service: HttpV1, receiver: Receiver) -> None:
        for n in range(3):
            service.run(receiver.reply(f"/fails-{n}", Reply(500 + n)), retryPolicy=ONCE)
            service.advance("1s")
        refused = service.run("http://127.0.0.1:9/nobody", retryPolicy=ONCE)
        failures = overview(service)["failures"]
        assert failures["of"] == 4
        first, second = failures["destinations"]
        assert (first["destination"], first["timers"]) == (receiver.base, 3)
        assert first["lastError"].startswith("HTTP 502")
        assert second == {
            "destination": "http://127.0.0.1:9",
            "timers": 1,
            "lastError": refused["lastError"],
            "lastAt": refused["executedAt"],
        }

    def test_overview_is_cached(self, service: HttpV1) -> None:
        seen = {success(service.api("GET", "/overview"))["now"] for _ in range(30)}
        assert len(seen) < 30

    def test_overview_and_events_need_the_key(self, service: HttpV1) -> None:
        for path in ("/overview", "/events"):
            failure(service.request("GET", BASE + path, headers={}), 401, "UNAUTHORIZED")
        failure(service.request("POST", BASE + "/events", headers={}), 405, "METHOD_NOT_ALLOWED")


class TestPulses:
    def test_pulse_is_sent_at_once_and_after_every_change(self, service: HttpV1) -> None:
        with Listening(service) as listening:
            assert listening.response.status == 200
            assert listening.response.headers["content-type"] == "text/event-stream"
            assert listening.response.headers["cache-control"] == "no-store"
            first = listening.pulse()
            assert set(first) == {"now", "statuses", "activity", "changes"}
            made = service.make(delay="1h")
            second = listening.until(lambda pulse: total(pulse) == total(first) + 1)
            assert second["changes"] > first["changes"]
            success(service.api("PUT", service.path(made), {"payload": 1}))
            listening.until(lambda pulse: pulse["changes"] > second["changes"])
            service.advance("10s")
            listening.until(lambda pulse: pulse["activity"] is not None)

    def test_head_of_the_stream_has_no_body(self, service: HttpV1) -> None:
        answer = service.api("HEAD", "/events")
        assert (answer.status, answer.body) == (200, b"")

    def test_stream_ends_when_the_service_stops(self, tmp_path: Path) -> None:
        with Duetime(tmp_path) as service, Listening(service) as one, Listening(service) as other:
            one.pulse()
            other.pulse()
            assert service.terminate() == 0
            for listening in (one, other):
                assert b"event" not in listening.response.read().rpartition(b"\n\n")[2]  # the last event is complete
            assert "Traceback" not in service.stderr
