"""The overview and the stream of pulses, as a page sees them."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.doors.durable import BASE, ONCE, Durable, failure, seconds_between, success
from tests.servers import KEY, PATIENCE_SECONDS, Duetime, Receiver, Reply, instant, until


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Durable]:
    # A lease that outlives the steps in which these tests move the time.
    forever = {"DUETIME_RETENTION": "forever", "DUETIME_LEASE_TTL": "5m"}
    with Durable(tmp_path_factory.mktemp("overview"), **forever) as door:
        yield door
        assert "Traceback" not in door.stderr, door.stderr


class Listening:
    """Somebody who listens to the pulses of a service."""

    def __init__(self, service: Duetime, **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE_SECONDS)
        self._connection.request("GET", BASE + "/events", headers=headers or {"X-API-Key": KEY})
        self.response = self._connection.getresponse()

    def __enter__(self) -> Listening:
        return self

    def __exit__(self, *_: object) -> None:
        self.response.close()
        self._connection.close()

    def pulse(self) -> dict[str, Any]:
        """The next one."""
        while (line := self.response.readline()) != b"event: pulse\n":
            assert line, "the stream has ended"
        data: dict[str, Any] = json.loads(self.response.readline().removeprefix(b"data: "))
        assert self.response.readline() == b"\n"
        return data

    def until(self, good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not good(pulse := self.pulse()):
            assert time.monotonic() < deadline, pulse
        return pulse


def all_of(pulse: dict[str, Any]) -> int:
    """How many timers there are, whatever becomes of those that other tests left."""
    return sum(pulse["statuses"].values())


def overview(door: Durable) -> dict[str, Any]:
    door.advance("11s")  # what is kept for others who ask is too old now
    seen: dict[str, Any] = success(door.api("GET", "/overview"))
    assert set(seen) == {
        *("now", "statuses", "since", "stepSeconds", "activity", "forecast", "overdue", "failures"),
        *("overdueReasons", "instances", "shards", "unowned"),
    }
    return seen


class TestOverview:
    def test_counts_and_who_does_it(self, door: Durable) -> None:
        until("somebody owns every shard", lambda: not success(door.api("GET", "/cluster"))["unowned"])
        seen = overview(door)
        assert set(seen["statuses"]) == {"pending", "executing", "completed", "failed", "canceled"}
        cluster = success(door.api("GET", "/cluster"))
        assert (seen["shards"], seen["unowned"]) == (cluster["shards"], cluster["unowned"]) == (64, [])
        [instance], [same] = seen["instances"], cluster["instances"]
        assert instance | {"aliveUntil": ""} == same | {"aliveUntil": ""}
        assert instant(seen["since"]) <= instant(seen["now"])

    def test_what_was_fired_and_how_late(self, door: Durable, receiver: Receiver) -> None:
        for _ in range(3):
            door.run(receiver.url("/active"))

        def busy() -> dict[str, Any] | None:
            seen = overview(door)
            return seen if any(point["firesPerSecond"] for point in seen["activity"]) else None

        seen = until("the fires are seen", busy)
        assert seen["stepSeconds"] == 5 and len(seen["activity"]) <= 720
        times = [instant(point["at"]) for point in seen["activity"]]
        assert times == sorted(times)
        for point in seen["activity"]:
            assert set(point) == {"at", "firesPerSecond", "latenessP50Ms", "latenessP99Ms"}
            if point["firesPerSecond"]:
                assert 0 <= point["latenessP50Ms"] <= point["latenessP99Ms"]
            else:
                assert point["latenessP50Ms"] is point["latenessP99Ms"] is None

    def test_what_falls_due(self, door: Durable) -> None:
        before = overview(door)
        door.namespace("stopped")
        success(door.api("PATCH", "/namespaces/stopped", {"paused": True}))
        for delay in ("110s", "110s", "30m", "10h", "30h"):
            door.make(delay=delay)
        door.make(delay="0s", namespace="stopped")
        seen = overview(door)
        for name, places, seconds in (("hour", 60, 60), ("day", 24, 3600)):
            stretches = seen["forecast"][name]
            assert len(stretches) == places and stretches[0]["at"] <= seen["now"]
            assert {seconds_between(a["at"], b["at"]) for a, b in pairwise(stretches)} == {seconds}
            assert not any(stretch["more"] for stretch in stretches)
        minutes = [stretch["timers"] for stretch in seen["forecast"]["hour"]]
        hours = [stretch["timers"] for stretch in seen["forecast"]["day"]]
        assert (minutes[1], sum(minutes), hours[0], sum(hours)) == (2, 3, 3, 4)
        assert seen["overdue"] == {"timers": before["overdue"]["timers"] + 1, "more": False}
        success(door.api("PATCH", "/namespaces/stopped", {"paused": False}))
        until("nothing is overdue", lambda: overview(door)["overdue"]["timers"] == 0)

    def test_where_it_fails_and_why(self, door: Durable, receiver: Receiver) -> None:
        for n in range(3):
            door.run(receiver.reply(f"/fails-{n}", Reply(500 + n)), retryPolicy=ONCE)
            door.advance("1s")
        refused = door.run("http://127.0.0.1:9/nobody", retryPolicy=ONCE)
        failures = overview(door)["failures"]
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

    def test_many_who_look_cost_one_look(self, door: Durable) -> None:
        seen = {success(door.api("GET", "/overview"))["now"] for _ in range(30)}
        assert len(seen) < 30

    def test_needs_the_key(self, door: Durable) -> None:
        for path in ("/overview", "/events"):
            failure(door.request("GET", BASE + path, headers={}), 401, "UNAUTHORIZED")
        failure(door.request("POST", BASE + "/events", headers={}), 405, "METHOD_NOT_ALLOWED")


class TestPulses:
    def test_one_comes_at_once_and_another_when_something_changes(self, door: Durable) -> None:
        with Listening(door) as listening:
            assert listening.response.status == 200
            assert listening.response.headers["content-type"] == "text/event-stream"
            assert listening.response.headers["cache-control"] == "no-store"
            first = listening.pulse()
            assert set(first) == {"now", "statuses", "activity", "changes"}
            made = door.make(delay="1h")
            second = listening.until(lambda pulse: all_of(pulse) == all_of(first) + 1)
            assert second["changes"] > first["changes"]
            success(door.api("PUT", door.path(made), {"payload": 1}))
            listening.until(lambda pulse: pulse["changes"] > second["changes"])
            door.advance("10s")
            listening.until(lambda pulse: pulse["activity"] is not None)

    def test_a_head_is_not_a_stream(self, door: Durable) -> None:
        answer = door.api("HEAD", "/events")
        assert (answer.status, answer.body) == (200, b"")

    def test_they_end_when_the_service_stops_and_do_not_delay_it(self, tmp_path: Path) -> None:
        with Duetime(tmp_path) as service, Listening(service) as one, Listening(service) as other:
            one.pulse()
            other.pulse()
            assert service.terminate() == 0
            for listening in (one, other):
                assert b"event" not in listening.response.read().rpartition(b"\n\n")[2]  # whole to the end
            # A server that has to give up waiting for a connection says so.
            assert "running task" not in service.stderr and "Traceback" not in service.stderr
