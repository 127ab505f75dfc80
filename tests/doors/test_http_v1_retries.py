"""Retries of the HTTP v1 API with a virtual clock: their times, their limits, and the recorded attempts."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import UTC, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from tests.doors.http_v1 import ONCE, HttpV1, Timer, failure, seconds_between, success
from tests.servers import Receiver, Reply, instant, until, unused_port

ANSWER_CHARS_MAX = 1_000  # an attempt keeps only the beginning of a response body
ATTEMPTS_MAX = 100


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpV1]:
    with HttpV1(tmp_path_factory.mktemp("http-v1-retries")) as service:
        service.namespace("replays")
        yield service
        assert "Traceback" not in service.stderr, service.stderr


def policy(**fields: Any) -> dict[str, Any]:
    return {"jitter": False, **fields}


def waits(service: HttpV1, url: str, limit: int = 30, **fields: Any) -> tuple[list[float], Timer]:
    """Create a timer and let its attempts happen; returns the seconds from each to its retry, and the timer."""
    timer = service.make(url, delay="0s", **fields)
    found: list[float] = []
    for _ in range(limit):
        timer = service.attempt(timer)
        if timer["status"] != "pending":
            break
        found.append(seconds_between(timer["updatedAt"], timer["fireAt"]))
    return found, timer


class TestIntervals:
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
    def test_intervals_follow_the_policy(
        self, service: HttpV1, receiver: Receiver, given: Any, expected: list[float]
    ) -> None:
        path = f"/spacing-{uuid.uuid4()}"
        found, timer = waits(service, receiver.reply(path, Reply(500)), retryPolicy=policy(**given))
        assert found == expected
        assert (timer["status"], timer["attempts"], timer["lastError"]) == ("failed", len(expected) + 1, "HTTP 500")
        assert timer["executedAt"] and timer["executeAt"] < timer["executedAt"]
        sent = [instant(attempt["sentAt"]) for attempt in service.attempts(timer)]
        for earlier, later, wait in zip(sent, sent[1:], expected, strict=False):
            assert later - earlier >= timedelta(seconds=wait)
        service.advance("30d")
        assert len(receiver.at(path)) == len(expected) + 1

    def test_retry_does_not_begin_early(self, service: HttpV1, receiver: Receiver) -> None:
        url = receiver.reply("/not-before", Reply(500), Reply(200))
        timer = service.attempt(
            service.make(url, delay="0s", retryPolicy=policy(initialInterval="1h", maxInterval="1h"))
        )
        service.advance("50m")
        service.run(receiver.url("/not-before-witness"))
        assert len(receiver.at("/not-before")) == 1 and service.current(timer)["status"] == "pending"
        service.advance("10m")
        assert service.final(timer)["status"] == "completed"
        assert len(receiver.at("/not-before")) == 2

    def test_retries_do_not_change_execute_at(self, service: HttpV1, receiver: Receiver) -> None:
        made = service.make(receiver.reply("/stays", Reply(500)), retryPolicy=policy(maxRetries=2))
        for _ in range(3):
            assert service.attempt(made)["executeAt"] == made["executeAt"]
        bodies = [json.loads(request.body) for request in receiver.at("/stays")]
        assert [body["executeAt"] for body in bodies] == [made["executeAt"]] * 3

    def test_jitter_spreads_the_intervals(self, service: HttpV1, receiver: Receiver) -> None:
        url = receiver.reply("/jitter", Reply(500))
        given = {"initialInterval": "10m", "maxRetries": 1}
        items = [{"delay": "0s", "callbackUrl": url, "retryPolicy": given} for _ in range(40)]
        timers = [result["timer"] for result in service.batch(items)]
        receiver.wait("/jitter", 40)
        until("all attempts are recorded", lambda: all(service.attempts(timer) for timer in timers))
        seen = [service.current(timer) for timer in timers]
        found = [seconds_between(timer["updatedAt"], timer["fireAt"]) for timer in seen if timer["attempts"] == 1]
        assert all(0 <= wait <= 600 for wait in found)
        assert len(set(found)) > 10 and max(found) - min(found) > 60

    def test_retry_window_starts_with_the_first_attempt(
        self, tmp_path_factory: pytest.TempPathFactory, receiver: Receiver
    ) -> None:
        """A timer that began late still has its whole retry window."""
        with HttpV1(tmp_path_factory.mktemp("overdue")) as service:
            given = {"initialInterval": "100ms", "maxRetryAttemptsDuration": "1h"}
            made = service.make(receiver.reply("/overdue", Reply(500), Reply(200)), retryPolicy=given)
            success(service.api("PATCH", "/namespaces/default", {"paused": True}))
            service.advance("3d")
            success(service.api("PATCH", "/namespaces/default", {"paused": False}))
            assert service.final(made)["status"] == "completed"
            assert [attempt["status"] for attempt in service.attempts(made)] == [500, 200]


class TestRetryAfter:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [("50", 50), ("10", 20), ("0", 20), ("600", 600), ("601", 600), ("9" * 18, 600), ("soon", 20), ("", 20)],
    )
    @pytest.mark.parametrize("status", [429, 503])
    def test_retry_after_in_seconds_is_respected_up_to_the_maximum_interval(
        self, service: HttpV1, receiver: Receiver, status: int, value: str, expected: float
    ) -> None:
        url = receiver.reply(f"/after-{status}-{value}", Reply(status, headers={"Retry-After": value}))
        given = policy(initialInterval="20s", maxInterval="10m", maxRetries=1)
        assert waits(service, url, retryPolicy=given)[0] == [expected]

    def test_retry_after_can_be_a_date(self, service: HttpV1, receiver: Receiver) -> None:
        date = format_datetime(service.at(1000).astimezone(UTC), usegmt=True)
        url = receiver.reply("/after-date", Reply(503, headers={"Retry-After": date}))
        timer = service.attempt(service.make(url, delay="0s", retryPolicy=policy(maxInterval="1h")))
        assert abs(instant(timer["fireAt"]) - service.at(1000)) < timedelta(seconds=200)

    def test_retry_after_beyond_the_retry_window_fails_the_timer(self, service: HttpV1, receiver: Receiver) -> None:
        url = receiver.reply("/after-window", Reply(503, headers={"Retry-After": "100"}))
        given = policy(initialInterval="1s", maxRetryAttemptsDuration="30s")
        found, timer = waits(service, url, retryPolicy=given)
        assert (found, timer["status"]) == ([], "failed")

    def test_retry_after_is_the_minimum_with_jitter(self, service: HttpV1, receiver: Receiver) -> None:
        url = receiver.reply("/after-jitter", Reply(503, headers={"Retry-After": "30"}))
        found, _ = waits(service, url, retryPolicy={"initialInterval": "40s", "maxRetries": 5, "maxInterval": "40s"})
        assert len(found) == 5 and all(30 <= wait <= 40 for wait in found)


class TestAttempts:
    def test_attempts_are_recorded_with_status_error_and_response(self, service: HttpV1, receiver: Receiver) -> None:
        url = receiver.reply("/kept-attempts", Reply(503, body=b"busy \xff\x00<b>"), Reply(200, body=b"{}"), Reply(200))
        timer = service.make(url, delay="0s", retryPolicy=policy())
        for _ in range(3):
            timer = service.attempt(timer)
        assert (timer["status"], timer["attempts"], timer["lastError"]) == ("completed", 3, None)
        attempts = service.attempts(timer)
        assert [attempt["attempt"] for attempt in attempts] == [1, 2, 3]
        assert [attempt["status"] for attempt in attempts] == [503, 200, 200]
        assert [attempt["outcome"] for attempt in attempts] == ["answered"] * 3
        assert attempts[0]["error"] == "HTTP 503" and attempts[2]["error"] is None
        assert attempts[0]["answer"].startswith("busy ") and attempts[0]["answer"].endswith("<b>")
        assert attempts[2]["answer"] == '{"ok": true}'
        assert [instant(attempt["sentAt"]) for attempt in attempts] == sorted(instant(a["sentAt"]) for a in attempts)
        assert all(attempt["duration"].endswith("s") for attempt in attempts)

    def test_attempt_with_an_invalid_response_has_an_error(self, service: HttpV1, receiver: Receiver) -> None:
        timer = service.run(receiver.reply("/no-success", Reply(200, body=b"{}")), retryPolicy=ONCE)
        assert timer["status"] == "failed" and timer["lastError"]
        assert service.attempts(timer)[0]["error"]

    def test_refused_connection_is_recorded(self, service: HttpV1) -> None:
        with unused_port() as port:
            timer = service.run(f"http://127.0.0.1:{port}/", retryPolicy=ONCE)
        [attempt] = service.attempts(timer)
        assert (attempt["outcome"], attempt["status"], attempt["answer"]) == ("unreachable", None, "")
        assert "refused" in attempt["error"].lower() and timer["lastError"] == attempt["error"]

    def test_size_and_number_of_recorded_attempts_are_limited(self, service: HttpV1, receiver: Receiver) -> None:
        """An attempt keeps the beginning of a long response, and a timer keeps only its latest attempts."""
        url = receiver.reply("/bounded", Reply(500, body=b"x" * 1_000_000))
        _, timer = waits(service, url, retryPolicy=policy(maxRetries=13, initialInterval="1s", maxInterval="1s"))
        attempts = service.attempts(timer)
        assert timer["attempts"] >= 10
        assert 3 <= len(attempts) <= ATTEMPTS_MAX
        assert all(0 < len(attempt["answer"]) <= ANSWER_CHARS_MAX for attempt in attempts)
        numbers = [attempt["attempt"] for attempt in attempts]
        assert numbers == sorted(set(numbers))

    def test_new_timer_has_no_attempts_and_unknown_timer_is_not_found(self, service: HttpV1) -> None:
        assert service.attempts(service.make(delay="500h")) == []
        failure(service.api("GET", "/timers/default/none/attempts"), 404, "TIMER_NOT_FOUND")


class TestReplay:
    @pytest.mark.parametrize("status", ["failed", "completed"])
    def test_replay_fires_a_finished_timer_again(self, service: HttpV1, receiver: Receiver, status: str) -> None:
        path = f"/replay-{status}"
        url = receiver.reply(path, Reply(500 if status == "failed" else 200), Reply(200))
        done = service.run(url, retryPolicy=ONCE, payload={"p": 1})
        assert done["status"] == status
        service.advance("1h")
        again = success(service.api("POST", service.path(done) + "/replay"))
        assert (again["status"], again["attempts"], again["lastError"], again["executedAt"]) == (
            "pending",
            0,
            None,
            None,
        )
        assert abs(instant(again["fireAt"]) - service.now()) < timedelta(minutes=1)
        assert service.final(again)["status"] == "completed"
        first, second = receiver.at(path)
        assert first.headers["webhook-id"] != second.headers["webhook-id"]
        assert first.headers["duetime-attempt"] == second.headers["duetime-attempt"] == "1"
        assert json.loads(second.body)["payload"] == {"p": 1}

    def test_pending_and_executing_timers_can_not_be_replayed(self, service: HttpV1, receiver: Receiver) -> None:
        pending = service.make(delay="500h")
        assert service.api("POST", service.path(pending) + "/replay").status == 409
        timer = service.make(receiver.reply("/replay-executing", Reply(hang=True)), delay="0s")
        receiver.wait("/replay-executing")
        assert service.api("POST", service.path(timer) + "/replay").status == 409
        receiver.release()
        service.final(timer)
        failure(service.api("POST", "/timers/default/none/replay"), 404, "TIMER_NOT_FOUND")

    def test_replay_starts_the_retry_policy_again(self, service: HttpV1, receiver: Receiver) -> None:
        given = policy(maxRetries=1, initialInterval="50s", maxRetryAttemptsDuration="100s")
        found, timer = waits(service, receiver.reply("/replay-policy", Reply(500)), retryPolicy=given)
        assert found == [50]
        service.advance("1d")
        success(service.api("POST", service.path(timer) + "/replay"))
        receiver.wait("/replay-policy", 3)
        until("the third attempt is recorded", lambda: len(service.attempts(timer)) == 3)
        waiting = service.current(timer)
        assert (waiting["status"], seconds_between(waiting["updatedAt"], waiting["fireAt"])) == ("pending", 50)

    def test_replay_by_filter(self, service: HttpV1, receiver: Receiver) -> None:
        fails = receiver.reply("/replays", *[Reply(500)] * 12, Reply(200))
        for n in range(12):
            service.run(fails, namespace="replays", correlationId=f"c{n % 2}", retryPolicy=ONCE)
        left = service.run(receiver.url("/replays-completed"), namespace="replays", correlationId="c0")

        def replay(**filters: Any) -> int:
            answer = success(service.api("POST", "/timers/replay", filters))
            until("all have fired", lambda: not service.pages("namespace=replays&status=pending", 50))
            until("all are done", lambda: not service.pages("namespace=replays&status=executing", 50))
            assert set(answer) == {"replayed", "more"}
            return int(answer["replayed"])

        assert replay(namespace="replays", correlationId="nobody") == 0
        assert replay(namespace="nowhere") == 0
        assert replay(namespace="replays", correlationId="c1", limit=4) == 4
        assert replay(namespace="replays", correlationId="c1") == 2
        assert len(service.pages("namespace=replays&status=failed", 50)) == 6
        assert replay(namespace="replays", status="failed") == 6
        assert replay(namespace="replays") == 0
        assert len(receiver.at("/replays")) == 24
        assert service.current(left)["updatedAt"] == left["updatedAt"]
        assert replay(namespace="replays", status="completed", correlationId="c0") == 7
        assert len(receiver.at("/replays-completed")) == 2

    @pytest.mark.parametrize(
        ("filters", "field"),
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
    def test_invalid_filters_are_rejected(self, service: HttpV1, filters: Any, field: str) -> None:
        failure(service.api("POST", "/timers/replay", filters), 400, "INVALID_INPUT", field)
