"""Idempotency keys and retry policies in the platform API."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.doors.platform import CREATED, URL, refused, success
from tests.servers import Duetime, Receiver, Reply, until


def body_of(service: Duetime, key: str, **fields: Any) -> dict[str, Any]:
    return {"execute_at": service.ahead(10), "callback_url": URL, "idempotency_key": key, **fields}


class TestIdempotencyKey:
    def test_repeated_create_returns_the_first_timer(self, service: Duetime) -> None:
        body = body_of(service, "repeat", callback_payload={"n": 1}, metadata=[1], callback_headers={"A": "b"})
        first = success(service.request("POST", "/timers", json=body), 201, "timer created successfully")
        total = service.total()
        for _ in range(3):
            again = service.request("POST", "/timers", json=body)
            assert (again.status, again.body["code"]) == (200, 0)
            assert again.body["data"] == first and set(first) == CREATED
        assert service.total() == total

    @pytest.mark.parametrize(
        "change",
        [
            {"callback_url": URL + "2"},
            {"callback_method": "PUT"},
            {"callback_headers": {"A": "c"}},
            {"callback_payload": {"n": 2}},
            {"callback_payload": None},
            {"metadata": 2},
            {"retry_policy": {"max_retries": 1}},
            {"execute_at": "2999-01-01T00:00:00Z"},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_same_key_with_other_parameters_is_a_conflict(self, service: Duetime, change: dict[str, Any]) -> None:
        body = body_of(service, f"conflict {change}", callback_payload={"n": 1})
        first = service.request("POST", "/timers", json=body).body["data"]
        before, total = service.get(first["id"]), service.total()
        refused(service.request("POST", "/timers", json=body | change), 409, 2, "different parameters")
        assert service.get(first["id"]) == before and service.total() == total

    def test_another_key_creates_another_timer(self, service: Duetime) -> None:
        bodies = [body_of(service, key) for key in ("one", "One", "one ", "1", "ö", "o\u0308")]
        ids = {service.request("POST", "/timers", json=body).body["data"]["id"] for body in bodies}
        assert len(ids) == len(bodies)

    def test_repeat_after_the_due_time_returns_the_completed_timer(self, service: Duetime, receiver: Receiver) -> None:
        body = body_of(service, "late", callback_url=receiver.url("/late"))
        id = service.request("POST", "/timers", json=body).body["data"]["id"]
        service.advance()
        service.finished(id)
        for _ in range(2):
            again = service.request("POST", "/timers", json=body)
            assert again.status == 200 and again.body["data"]["id"] == id
            assert again.body["data"]["status"] == "completed"
            service.advance("1h")
        refused(service.request("POST", "/timers", json=body | {"metadata": 1}), 409, 2, "different parameters")
        assert len(receiver.at("/late")) == 1

    def test_first_create_in_the_past_is_rejected(self, service: Duetime) -> None:
        body = body_of(service, "too late") | {"execute_at": service.ahead(-60)}
        refused(service.request("POST", "/timers", json=body), 400, 2, "^execute_at must be in the future")

    def test_repeat_does_not_undo_an_update_or_a_cancel(self, service: Duetime) -> None:
        body = body_of(service, "changed")
        id = service.request("POST", "/timers", json=body).body["data"]["id"]
        service.request("PUT", f"/timers/{id}", json={"metadata": "new"})
        assert service.request("POST", "/timers", json=body).status == 200
        assert service.get(id)["metadata"] == "new"
        service.request("DELETE", f"/timers/{id}")
        again = service.request("POST", "/timers", json=body)
        assert (again.status, again.body["data"]["status"]) == (200, "canceled")

    def test_concurrent_repeats_create_one_timer(self, service: Duetime, receiver: Receiver) -> None:
        body = body_of(service, "together", callback_url=receiver.url("/together"))
        total = service.total()
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda _: service.request("POST", "/timers", json=body), range(48)))
        assert sorted(answer.status for answer in answers) == [200] * 47 + [201]
        [id] = {answer.body["data"]["id"] for answer in answers}
        assert service.total() == total + 1
        service.advance()
        service.finished(id)
        assert len(receiver.at("/together")) == 1

    def test_repeat_after_a_kill_returns_the_first_timer(self, tmp_path: Any) -> None:
        with Duetime(tmp_path) as service:
            body = body_of(service, "killed") | {"execute_at": "2999-01-01T00:00:00Z"}
            first = service.request("POST", "/timers", json=body).body["data"]
            service.kill()
            service.start()
            again = service.request("POST", "/timers", json=body)
            assert again.status == 200 and again.body["data"] == first and service.total() == 1

    def test_order_of_the_fields_does_not_matter(self, service: Duetime) -> None:
        body = body_of(service, "order")
        first = service.request("POST", "/timers", json=body)
        turned = json.dumps(dict(reversed(body.items())), indent=3).encode()
        again = service.request("POST", "/timers", body=turned)
        assert again.status == 200 and again.body["data"] == first.body["data"]

    @pytest.mark.parametrize("key", ["", "k" * 256, 5, ["a"], {}, True])
    def test_invalid_keys_are_rejected(self, service: Duetime, key: Any) -> None:
        body = body_of(service, "") | {"idempotency_key": key}
        refused(service.request("POST", "/timers", json=body), 400, 2, "^idempotency_key must")

    @pytest.mark.parametrize("key", ["k" * 255, "😀" * 255, "a\n\tb", " "])
    def test_unusual_keys_are_accepted(self, service: Duetime, key: str) -> None:
        body = body_of(service, key)
        assert [service.request("POST", "/timers", json=body).status for _ in range(2)] == [201, 200]


MINUTELY = {"initial_interval": "1m", "max_interval": "1m", "jitter": False}


class TestRetryPolicy:
    def test_timer_without_a_policy_has_one_attempt(self, service: Duetime, receiver: Receiver) -> None:
        timer = service.fired(receiver.reply("/once", Reply(500)))
        assert timer["status"] == "failed"
        service.advance("30d")
        service.fired(receiver.url("/once-later"))
        assert len(receiver.at("/once")) == 1

    def test_timer_is_retried_until_it_completes(self, service: Duetime, receiver: Receiver) -> None:
        url = receiver.reply("/retried", Reply(500), Reply(429), Reply(200))
        id = service.create(url, retry_policy={"max_retries": 5, **MINUTELY})
        service.advance()
        for attempt in (1, 2):
            receiver.wait("/retried", attempt)
            # Between two attempts, the timer is pending and has the error of the last one.
            between = until("the attempt is recorded", lambda: (t := service.get(id))["status"] == "pending" and t)
            assert between["last_error"] == f"HTTP {[500, 429][attempt - 1]}" and between["executed_at"] is None
            service.advance("1m")
        timer = service.finished(id)
        assert (timer["status"], timer["last_error"]) == ("completed", None) and timer["executed_at"]
        assert [request.headers["duetime-attempt"] for request in receiver.at("/retried")] == ["1", "2", "3"]

    def test_timer_fails_after_max_retries(self, service: Duetime, receiver: Receiver) -> None:
        id = service.create(receiver.reply("/used-up", Reply(500)), retry_policy={"max_retries": 2, **MINUTELY})
        service.advance()
        for attempt in (1, 2, 3):
            receiver.wait("/used-up", attempt)
            until("the attempt is recorded", lambda: service.get(id)["status"] != "executing")
            service.advance("1m")
        timer = service.finished(id)
        assert (timer["status"], timer["last_error"]) == ("failed", "HTTP 500") and timer["executed_at"]
        service.advance("1d")
        assert len(receiver.at("/used-up")) == 3

    def test_timer_fails_when_the_next_retry_is_beyond_the_maximum_duration(
        self, service: Duetime, receiver: Receiver
    ) -> None:
        policy = {"max_retries": 100, "max_retry_attempts_duration": "10m", "initial_interval": "1h", "jitter": False}
        timer = service.fired(receiver.reply("/window", Reply(500)), retry_policy=policy | {"max_interval": "1h"})
        assert timer["status"] == "failed" and len(receiver.at("/window")) == 1

    def test_retries_wait_for_the_interval(self, service: Duetime, receiver: Receiver) -> None:
        policy = {"max_retries": 2, "initial_interval": "10m", "max_interval": "1d", "jitter": False}
        id = service.create(receiver.reply("/interval", Reply(500)), retry_policy=policy | {"backoff_multiplier": 3})
        service.advance()
        for attempt, minutes in ((1, 10), (2, 30)):
            receiver.wait("/interval", attempt)
            until("the attempt is recorded", lambda: service.get(id)["status"] == "pending")
            service.advance(f"{minutes - 1}m")
            service.fired(receiver.url("/interval-other"))
            assert len(receiver.at("/interval")) == attempt
            service.advance("1m")
        assert service.finished(id)["status"] == "failed" and len(receiver.at("/interval")) == 3

    def test_retry_after_delays_the_retry(self, service: Duetime, receiver: Receiver) -> None:
        reply = Reply(503, headers={"Retry-After": "1800"})
        policy = {"max_retries": 1, "initial_interval": "1s", "max_interval": "1h", "jitter": False}
        id = service.create(receiver.reply("/retry-after", reply), retry_policy=policy)
        service.advance()
        receiver.wait("/retry-after")
        until("the attempt is recorded", lambda: service.get(id)["status"] == "pending")
        service.advance("29m")
        service.fired(receiver.url("/retry-after-other"))
        assert len(receiver.at("/retry-after")) == 1
        service.advance("1m")
        service.finished(id)
        assert len(receiver.at("/retry-after")) == 2

    def test_canceled_timer_is_not_retried(self, service: Duetime, receiver: Receiver) -> None:
        policy = {"max_retries": 9, "initial_interval": "1h", "max_interval": "1h", "jitter": False}
        id = service.create(receiver.reply("/no-retry", Reply(500)), retry_policy=policy)
        service.advance()
        receiver.wait("/no-retry")
        until("the attempt is recorded", lambda: service.get(id)["status"] == "pending")
        success(service.request("DELETE", f"/timers/{id}"), 200, "timer canceled successfully")
        service.advance("2h")
        service.fired(receiver.url("/no-retry-other"))
        assert len(receiver.at("/no-retry")) == 1 and service.get(id)["status"] == "canceled"

    @pytest.mark.parametrize(
        ("policy", "message"),
        [
            ({"max_retries": -1}, r"^retry_policy\.max_retries must be at "),
            ({"max_retries": 1001}, r"^retry_policy\.max_retries must be at "),
            ({"max_retries": 1.5}, r"^retry_policy\.max_retries must be a whole number"),
            ({"max_retries": "3"}, r"^retry_policy\.max_retries must be a whole number"),
            ({"max_retries": True}, r"^retry_policy\.max_retries must be a whole number"),
            ({"initial_interval": "fast"}, r"^retry_policy\.initial_interval must be a duration"),
            ({"initial_interval": 5}, r"^retry_policy\.initial_interval must be a string"),
            ({"initial_interval": "99ms"}, r"^retry_policy\.initial_interval must be at least 100ms"),
            ({"initial_interval": "0s"}, r"^retry_policy\.initial_interval must be at least 100ms"),
            ({"max_interval": "1ms"}, r"^retry_policy\.max_interval must be at least 100ms"),
            ({"max_interval": "-5s"}, r"^retry_policy\.max_interval must be a duration"),
            ({"max_interval": "99999999d"}, r"^retry_policy\.max_interval must be at most"),
            ({"max_retry_attempts_duration": ""}, r"^retry_policy\.max_retry_attempts_duration must be a duration"),
            ({"backoff_multiplier": 0.5}, r"^retry_policy\.backoff_multiplier must be at (least|most) "),
            ({"backoff_multiplier": 1e9}, r"^retry_policy\.backoff_multiplier must be at (least|most) "),
            ({"backoff_multiplier": "2"}, r"^retry_policy\.backoff_multiplier must be a number"),
            ({"jitter": "no"}, r"^retry_policy\.jitter must be true or false"),
            ([], "^retry_policy must be an object"),
            ("3", "^retry_policy must be an object"),
        ],
    )
    def test_invalid_policy_is_rejected(self, service: Duetime, policy: Any, message: str) -> None:
        body = {"execute_at": service.ahead(60), "callback_url": URL, "retry_policy": policy}
        refused(service.request("POST", "/timers", json=body), 400, 2, message)
