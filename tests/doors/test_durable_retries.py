"""Retries of the durable door, on a clock that tests move: when, how often, for how long, and what is kept of them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import UTC, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from tests.doors.durable import ONCE, Durable, Timer, failure, seconds_between, success
from tests.servers import Receiver, Reply, instant, until, unused_port

ANSWER_CHARS_MAX = 1_000  # what is kept of an answer is "the first bytes": far from all of 64 KiB
ATTEMPTS_MAX = 100


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Durable]:
    with Durable(tmp_path_factory.mktemp("durable-retries")) as door:
        door.namespace("replays")
        yield door
        assert "Traceback" not in door.stderr, door.stderr


def policy(**fields: Any) -> dict[str, Any]:
    return {"jitter": False, **fields}


def waits(door: Durable, url: str, limit: int = 30, **fields: Any) -> tuple[list[float], Timer]:
    """How long the service waits after each failed attempt, in seconds, and the timer when it waits no more."""
    timer = door.make(url, delay="0s", **fields)
    found: list[float] = []
    for _ in range(limit):
        timer = door.attempt(timer)
        if timer["status"] != "pending":
            break
        found.append(seconds_between(timer["updatedAt"], timer["fireAt"]))
    return found, timer


class TestSpacing:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({}, [30, 60, 120]),
            ({"maxRetries": 8}, [30, 60, 120, 240, 480, 600, 600, 600]),
            ({"maxRetries": 0}, []),
            ({"maxRetries": 1, "initialInterval": "90s"}, [90]),
            (
                {"initialInterval": "20s", "backoffMultiplier": 3, "maxInterval": "90s", "maxRetries": 4},
                [20, 60, 90, 90],
            ),
            ({"initialInterval": "20s", "backoffMultiplier": 1}, [20, 20, 20]),
            ({"initialInterval": "30s", "backoffMultiplier": 1.5}, [30, 45, 67.5]),
            ({"initialInterval": "20m"}, [600, 600, 600]),
            ({"initialInterval": "30s", "backoffMultiplier": 1000, "maxInterval": "7d", "maxRetries": 2}, [30, 30_000]),
            ({"initialInterval": "4m", "backoffMultiplier": 1, "maxRetryAttemptsDuration": "10m"}, [240, 240]),
            ({"initialInterval": "4s", "maxRetryAttemptsDuration": "3s", "maxRetries": 9}, []),
        ],
        ids=json.dumps,
    )
    def test_follows_the_policy(self, door: Durable, receiver: Receiver, given: Any, expected: list[float]) -> None:
        path = f"/spacing-{uuid.uuid4()}"
        found, timer = waits(door, receiver.reply(path, Reply(500)), retryPolicy=policy(**given))
        assert found == expected
        assert (timer["status"], timer["attempts"], timer["lastError"]) == ("failed", len(expected) + 1, "HTTP 500")
        assert timer["executedAt"] and timer["executeAt"] < timer["executedAt"]
        sent = [instant(attempt["sentAt"]) for attempt in door.attempts(timer)]
        for earlier, later, wait in zip(sent, sent[1:], expected, strict=False):
            assert later - earlier >= timedelta(seconds=wait)
        door.advance("30d")
        assert len(receiver.at(path)) == len(expected) + 1

    def test_not_before_its_time(self, door: Durable, receiver: Receiver) -> None:
        url = receiver.reply("/not-before", Reply(500), Reply(200))
        timer = door.attempt(door.make(url, delay="0s", retryPolicy=policy(initialInterval="1h", maxInterval="1h")))
        door.advance("50m")
        door.run(receiver.url("/not-before-witness"))
        assert len(receiver.at("/not-before")) == 1 and door.see(timer)["status"] == "pending"
        door.advance("10m")
        assert door.final(timer)["status"] == "completed"
        assert len(receiver.at("/not-before")) == 2

    def test_an_execute_at_stays_what_was_asked_for(self, door: Durable, receiver: Receiver) -> None:
        made = door.make(receiver.reply("/stays", Reply(500)), retryPolicy=policy(maxRetries=2))
        for _ in range(3):
            assert door.attempt(made)["executeAt"] == made["executeAt"]
        bodies = [json.loads(request.body) for request in receiver.at("/stays")]
        assert [body["executeAt"] for body in bodies] == [made["executeAt"]] * 3

    def test_jitter(self, door: Durable, receiver: Receiver) -> None:
        url = receiver.reply("/jitter", Reply(500))
        given = {"initialInterval": "10m", "maxRetries": 1}
        items = [{"delay": "0s", "callbackUrl": url, "retryPolicy": given} for _ in range(40)]
        timers = [result["timer"] for result in door.batch(items)]
        receiver.wait("/jitter", 40)
        until("all wait", lambda: all(door.attempts(timer) for timer in timers))
        seen = [door.see(timer) for timer in timers]
        found = [seconds_between(timer["updatedAt"], timer["fireAt"]) for timer in seen if timer["attempts"] == 1]
        assert all(0 <= wait <= 600 for wait in found)
        assert len(set(found)) > 10 and max(found) - min(found) > 60

    def test_the_window_opens_with_the_first_attempt(
        self, tmp_path_factory: pytest.TempPathFactory, receiver: Receiver
    ) -> None:
        """Overdue is not late: a timer that waited for the service has its whole window."""
        with Durable(tmp_path_factory.mktemp("overdue")) as door:
            given = {"initialInterval": "100ms", "maxRetryAttemptsDuration": "1h"}
            made = door.make(receiver.reply("/overdue", Reply(500), Reply(200)), retryPolicy=given)
            success(door.api("PATCH", "/namespaces/default", {"paused": True}))
            door.advance("3d")
            success(door.api("PATCH", "/namespaces/default", {"paused": False}))
            assert door.final(made)["status"] == "completed"
            assert [attempt["status"] for attempt in door.attempts(made)] == [500, 200]


class TestRetryAfter:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [("50", 50), ("10", 20), ("0", 20), ("600", 600), ("601", 600), ("9" * 18, 600), ("soon", 20), ("", 20)],
    )
    @pytest.mark.parametrize("status", [429, 503])
    def test_seconds(self, door: Durable, receiver: Receiver, status: int, value: str, expected: float) -> None:
        url = receiver.reply(f"/after-{status}-{value}", Reply(status, headers={"Retry-After": value}))
        given = policy(initialInterval="20s", maxInterval="10m", maxRetries=1)
        assert waits(door, url, retryPolicy=given)[0] == [expected]

    def test_a_date(self, door: Durable, receiver: Receiver) -> None:
        date = format_datetime(door.at(1000).astimezone(UTC), usegmt=True)
        url = receiver.reply("/after-date", Reply(503, headers={"Retry-After": date}))
        timer = door.attempt(door.make(url, delay="0s", retryPolicy=policy(maxInterval="1h")))
        assert abs(instant(timer["fireAt"]) - door.at(1000)) < timedelta(seconds=200)

    def test_beyond_the_window(self, door: Durable, receiver: Receiver) -> None:
        url = receiver.reply("/after-window", Reply(503, headers={"Retry-After": "100"}))
        given = policy(initialInterval="1s", maxRetryAttemptsDuration="30s")
        found, timer = waits(door, url, retryPolicy=given)
        assert (found, timer["status"]) == ([], "failed")

    def test_with_jitter_it_is_the_least(self, door: Durable, receiver: Receiver) -> None:
        url = receiver.reply("/after-jitter", Reply(503, headers={"Retry-After": "30"}))
        found, _ = waits(door, url, retryPolicy={"initialInterval": "40s", "maxRetries": 5, "maxInterval": "40s"})
        assert len(found) == 5 and all(30 <= wait <= 40 for wait in found)


class TestAttempts:
    def test_what_is_kept(self, door: Durable, receiver: Receiver) -> None:
        url = receiver.reply("/kept-attempts", Reply(503, body=b"busy \xff\x00<b>"), Reply(200, body=b"{}"), Reply(200))
        timer = door.make(url, delay="0s", retryPolicy=policy())
        for _ in range(3):
            timer = door.attempt(timer)
        assert (timer["status"], timer["attempts"], timer["lastError"]) == ("completed", 3, None)
        attempts = door.attempts(timer)
        assert [attempt["attempt"] for attempt in attempts] == [1, 2, 3]
        assert [attempt["status"] for attempt in attempts] == [503, 200, 200]
        assert [attempt["outcome"] for attempt in attempts] == ["answered"] * 3
        assert attempts[0]["error"] == "HTTP 503" and attempts[2]["error"] is None
        assert attempts[0]["answer"].startswith("busy ") and attempts[0]["answer"].endswith("<b>")
        assert attempts[2]["answer"] == '{"ok": true}'
        assert [instant(attempt["sentAt"]) for attempt in attempts] == sorted(instant(a["sentAt"]) for a in attempts)
        assert all(attempt["duration"].endswith("s") for attempt in attempts)

    def test_why_an_answer_was_no_success(self, door: Durable, receiver: Receiver) -> None:
        timer = door.run(receiver.reply("/no-success", Reply(200, body=b"{}")), retryPolicy=ONCE)
        assert timer["status"] == "failed" and timer["lastError"]
        assert door.attempts(timer)[0]["error"]

    def test_no_connection(self, door: Durable) -> None:
        with unused_port() as port:
            timer = door.run(f"http://127.0.0.1:{port}/", retryPolicy=ONCE)
        [attempt] = door.attempts(timer)
        assert (attempt["outcome"], attempt["status"], attempt["answer"]) == ("unreachable", None, "")
        assert "refused" in attempt["error"].lower() and timer["lastError"] == attempt["error"]

    def test_bounded(self, door: Durable, receiver: Receiver) -> None:
        """An attempt keeps little of a long answer, and a timer keeps its latest attempts, not all of them."""
        url = receiver.reply("/bounded", Reply(500, body=b"x" * 1_000_000))
        _, timer = waits(door, url, retryPolicy=policy(maxRetries=13, initialInterval="1s", maxInterval="1s"))
        attempts = door.attempts(timer)
        assert timer["attempts"] >= 10
        assert 3 <= len(attempts) <= ATTEMPTS_MAX
        assert all(0 < len(attempt["answer"]) <= ANSWER_CHARS_MAX for attempt in attempts)
        numbers = [attempt["attempt"] for attempt in attempts]
        assert numbers == sorted(set(numbers))

    def test_none_yet_and_nobody(self, door: Durable) -> None:
        assert door.attempts(door.make(delay="500h")) == []
        failure(door.api("GET", "/timers/default/none/attempts"), 404, "TIMER_NOT_FOUND")


class TestReplay:
    @pytest.mark.parametrize("status", ["failed", "completed"])
    def test_one(self, door: Durable, receiver: Receiver, status: str) -> None:
        path = f"/replay-{status}"
        url = receiver.reply(path, Reply(500 if status == "failed" else 200), Reply(200))
        done = door.run(url, retryPolicy=ONCE, payload={"p": 1})
        assert done["status"] == status
        door.advance("1h")
        again = success(door.api("POST", door.path(done) + "/replay"))
        assert (again["status"], again["attempts"], again["lastError"], again["executedAt"]) == (
            "pending",
            0,
            None,
            None,
        )
        assert abs(instant(again["fireAt"]) - door.now()) < timedelta(minutes=1)
        assert door.final(again)["status"] == "completed"
        first, second = receiver.at(path)
        assert first.headers["webhook-id"] != second.headers["webhook-id"]
        assert first.headers["duetime-attempt"] == second.headers["duetime-attempt"] == "1"
        assert json.loads(second.body)["payload"] == {"p": 1}

    def test_not_of_a_pending_or_executing_one(self, door: Durable, receiver: Receiver) -> None:
        pending = door.make(delay="500h")
        assert door.api("POST", door.path(pending) + "/replay").status == 409
        timer = door.make(receiver.reply("/replay-executing", Reply(hang=True)), delay="0s")
        receiver.wait("/replay-executing")
        assert door.api("POST", door.path(timer) + "/replay").status == 409
        receiver.release()
        door.final(timer)
        failure(door.api("POST", "/timers/default/none/replay"), 404, "TIMER_NOT_FOUND")

    def test_the_policy_starts_again(self, door: Durable, receiver: Receiver) -> None:
        given = policy(maxRetries=1, initialInterval="50s", maxRetryAttemptsDuration="100s")
        found, timer = waits(door, receiver.reply("/replay-policy", Reply(500)), retryPolicy=given)
        assert found == [50]
        door.advance("1d")
        success(door.api("POST", door.path(timer) + "/replay"))
        receiver.wait("/replay-policy", 3)
        until("it waits", lambda: len(door.attempts(timer)) == 3)
        waiting = door.see(timer)
        assert (waiting["status"], seconds_between(waiting["updatedAt"], waiting["fireAt"])) == ("pending", 50)

    def test_by_filter(self, door: Durable, receiver: Receiver) -> None:
        fails = receiver.reply("/replays", *[Reply(500)] * 12, Reply(200))
        for n in range(12):
            door.run(fails, namespace="replays", correlationId=f"c{n % 2}", retryPolicy=ONCE)
        left = door.run(receiver.url("/replays-completed"), namespace="replays", correlationId="c0")

        def replay(**asked: Any) -> int:
            answer = success(door.api("POST", "/timers/replay", asked))
            until("all have fired", lambda: not door.pages("namespace=replays&status=pending", 50))
            until("all are done", lambda: not door.pages("namespace=replays&status=executing", 50))
            assert set(answer) == {"replayed", "more"}
            return int(answer["replayed"])

        assert replay(namespace="replays", correlationId="nobody") == 0
        assert replay(namespace="nowhere") == 0
        assert replay(namespace="replays", correlationId="c1", limit=4) == 4
        assert replay(namespace="replays", correlationId="c1") == 2
        assert len(door.pages("namespace=replays&status=failed", 50)) == 6
        assert replay(namespace="replays", status="failed") == 6
        assert replay(namespace="replays") == 0
        assert len(receiver.at("/replays")) == 24
        assert door.see(left)["updatedAt"] == left["updatedAt"]
        assert replay(namespace="replays", status="completed", correlationId="c0") == 7
        assert len(receiver.at("/replays-completed")) == 2

    @pytest.mark.parametrize(
        ("asked", "field"),
        [
            ({"status": "pending"}, "status"),
            ({"status": "executing"}, "status"),
            ({"status": 5}, "status"),
            ({"limit": 0}, "limit"),
            ({"limit": 1001}, "limit"),
            ({"limit": "1"}, "limit"),
            ({"namespace": "a b"}, "namespace"),
            ({"correlationId": ""}, "correlationId"),
        ],
        ids=json.dumps,
    )
    def test_bad_filters(self, door: Durable, asked: Any, field: str) -> None:
        failure(door.api("POST", "/timers/replay", asked), 400, "INVALID_INPUT", field)
