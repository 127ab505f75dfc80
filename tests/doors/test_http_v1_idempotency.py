"""Repeated creates: the same timer, a conflict, or an upsert that replaces it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.doors.http_v1 import URL, HttpV1, failure, success
from tests.servers import Receiver, Reply, instant

POLICY = {"maxRetries": 2, "initialInterval": "1s"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpV1]:
    with HttpV1(tmp_path_factory.mktemp("http-v1-once")) as service:
        yield service
        assert "Traceback" not in service.stderr, service.stderr


def body_of(service: HttpV1, id: str, **fields: Any) -> dict[str, Any]:
    return {"id": id, "executeAt": service.ahead(3600), "callbackUrl": URL, **fields}


class TestRepeatedCreate:
    def test_identical_create_returns_the_same_timer(self, service: HttpV1) -> None:
        body = body_of(service, "same", payload={"a": 1}, metadata=[1], correlationId="c", retryPolicy=POLICY)
        first = success(service.api("POST", "/timers", body))
        for _ in range(3):
            assert success(service.api("POST", "/timers", body)) == first
        assert [timer["id"] for timer in service.pages("correlationId=c", 10)] == ["same"]

    @pytest.mark.parametrize(
        "change",
        [
            {"executeAt": "2999-01-01T00:00:00Z"},
            {"callbackUrl": URL + "2"},
            {"callbackMethod": "PUT"},
            {"callbackHeaders": {"A": "c"}},
            {"payload": {"n": 2}},
            {"payload": None},
            {"metadata": 2},
            {"correlationId": "d"},
            {"retryPolicy": {"maxRetries": 1}},
            {"retryPolicy": POLICY | {"jitter": False}},
            {"callbackTimeout": "31s"},
            {"responseProtocol": "status"},
        ],
        ids=json.dumps,
    )
    def test_create_with_another_parameter_is_a_conflict(self, service: HttpV1, change: dict[str, Any]) -> None:
        body = body_of(service, f"conflict {change}", payload={"n": 1}, retryPolicy=POLICY)
        first = success(service.api("POST", "/timers", body))
        failure(service.api("POST", "/timers", body | change), 409, "TIMER_CONFLICT")
        assert service.current(first) == first

    def test_equivalent_spellings_are_the_same_parameters(self, service: HttpV1) -> None:
        """Explicit defaults, older field names and another offset of the same instant."""
        body = body_of(service, "words", executeAt="2998-07-01T12:00:00Z", payload=1)
        first = success(service.api("POST", "/timers", body))
        for fields in (
            {"namespace": "default"},
            {"groupId": "default"},
            {"timerId": "words"},
            {"callbackMethod": "POST", "callbackHeaders": {}},
            {"retryPolicy": None, "correlationId": None},
            {"responseProtocol": "answer"},
            {"executeAt": "2998-07-01T14:00:00.000+02:00"},
        ):
            assert success(service.api("POST", "/timers", body | fields)) == first, fields

    @pytest.mark.parametrize(
        "fields",
        [
            {"callbackTimeout": "30s"},
            {"retryPolicy": {}},
            {"retryPolicy": {"maxRetries": 3, "initialInterval": "30s", "maxRetryAttemptsDuration": "24h"}},
        ],
        ids=json.dumps,
    )
    def test_explicit_default_is_the_same_parameter(self, service: HttpV1, fields: dict[str, Any]) -> None:
        body = body_of(service, f"explicit default {fields}", executeAt="2998-07-01T12:00:00Z")
        first = success(service.api("POST", "/timers", body))
        assert success(service.api("POST", "/timers", body | fields)) == first

    @pytest.mark.parametrize("payload", [b'{"b":2,"a":1}', b'{ "a" : 1, "b": 2 }', b'{"\\u0061": 1, "b": 2}'])
    def test_equal_json_in_other_bytes_is_the_same_payload(self, service: HttpV1, payload: bytes) -> None:
        def bytes_of(payload: bytes) -> bytes:
            return b'{"id": "bytes", "delay": "9h", "callbackUrl": "%b", "payload": %b}' % (URL.encode(), payload)

        assert service.api("POST", "/timers", body=bytes_of(b'{"a": 1, "b": 2}')).status == 200
        assert service.api("POST", "/timers", body=bytes_of(payload)).status == 200

    def test_repeat_after_the_due_time_returns_the_finished_timer(self, service: HttpV1, receiver: Receiver) -> None:
        body = body_of(service, "late", executeAt=service.ahead(10), callbackUrl=receiver.url("/once-late"))
        first = success(service.api("POST", "/timers", body))
        service.advance()
        done = service.final(first)
        for _ in range(2):
            assert success(service.api("POST", "/timers", body)) == done
            service.advance("1h")
        failure(service.api("POST", "/timers", body | {"payload": 1}), 409, "TIMER_CONFLICT")
        failure(service.api("POST", "/timers", body | {"id": "never made"}), 400, "INVALID_INPUT", "executeAt")
        failure(service.api("POST", "/timers", {**body, "id": None}), 400, "INVALID_INPUT", "executeAt")
        assert len(receiver.at("/once-late")) == 1

    def test_repeat_after_an_update_is_compared_with_the_original_create(self, service: HttpV1) -> None:
        body = body_of(service, "updated", payload=1)
        first = success(service.api("POST", "/timers", body))
        changed = success(service.api("PUT", service.path(first), {"payload": 2, "delay": "7h"}))
        assert success(service.api("POST", "/timers", body)) == changed
        failure(service.api("POST", "/timers", body | {"payload": 2}), 409, "TIMER_CONFLICT")

    def test_repeat_after_a_delete_creates_a_new_timer(self, service: HttpV1) -> None:
        body = body_of(service, "deleted")
        first = success(service.api("POST", "/timers", body))
        success(service.api("DELETE", service.path(first)), 204)
        service.advance("1s")
        assert success(service.api("POST", "/timers", body))["createdAt"] > first["createdAt"]

    def test_repeat_with_the_same_delay_returns_the_timer(self, service: HttpV1, receiver: Receiver) -> None:
        body = {"id": "delay", "delay": "10m", "callbackUrl": receiver.url("/once-delay"), "payload": 1}
        first = success(service.api("POST", "/timers", body))
        service.advance("5m")
        assert success(service.api("POST", "/timers", body)) == first
        assert success(service.api("POST", "/timers", body | {"delay": "600s"})) == first
        failure(service.api("POST", "/timers", body | {"payload": 2}), 409, "TIMER_CONFLICT")
        service.advance("5m")
        done = service.final(first)
        assert success(service.api("POST", "/timers", body)) == done
        at_once = {"id": "delay 0", "delay": "0s", "callbackUrl": receiver.url("/once-delay-0")}
        done = service.final(success(service.api("POST", "/timers", at_once)))
        assert success(service.api("POST", "/timers", at_once)) == done
        assert len(receiver.at("/once-delay")) == len(receiver.at("/once-delay-0")) == 1

    def test_repeat_with_another_delay_is_a_conflict(self, service: HttpV1) -> None:
        body = {"id": "other-delay", "delay": "1h", "callbackUrl": URL}
        first = success(service.api("POST", "/timers", body))
        at = {"id": "other-delay", "executeAt": first["executeAt"], "callbackUrl": URL}
        for other in (body | {"delay": "2h"}, at):
            failure(service.api("POST", "/timers", other), 409, "TIMER_CONFLICT")
            [result] = success(service.api("POST", "/timers/batch", {"timers": [other]}))["results"]
            assert result["status"] == 409 and result["error"]["error"] == "TIMER_CONFLICT"
        success(service.api("POST", service.path(first) + "/cancel"))
        failure(service.api("POST", "/timers", body | {"delay": "2h"}), 409, "TIMER_CONFLICT")
        assert success(service.api("POST", "/timers", body))["status"] == "canceled"

    def test_concurrent_identical_creates_make_one_timer(self, service: HttpV1, receiver: Receiver) -> None:
        workers = 16
        barrier = threading.Barrier(workers)
        bodies = [body_of(service, "at once", correlationId="at once", payload="x"), None]
        bodies[1] = {"id": "at once, delayed", "delay": "9h", "callbackUrl": URL, "correlationId": "at once"}

        def make(n: int) -> list[Any]:
            barrier.wait()
            return [success(service.api("POST", "/timers", body)) for body in bodies for _ in range(3)]

        with ThreadPoolExecutor(workers) as pool:
            answers = [answer for answers in pool.map(make, range(workers)) for answer in answers]
        assert len({json.dumps(answer) for answer in answers}) == 2
        assert len(service.pages("correlationId=at%20once", 100)) == 2

    def test_one_of_many_concurrent_different_creates_wins(self, service: HttpV1) -> None:
        barrier = threading.Barrier(12)

        def make(n: int) -> int:
            barrier.wait()
            return service.api(
                "POST", "/timers", {"id": "race", "delay": "9h", "callbackUrl": URL, "payload": n}
            ).status

        with ThreadPoolExecutor(12) as pool:
            assert sorted(pool.map(make, range(12))) == [200] + [409] * 11


class TestUpsert:
    def test_upsert_replaces_a_pending_timer(self, service: HttpV1, receiver: Receiver) -> None:
        first = service.make(receiver.url("/upsert-old"), id="upsert", payload=1, metadata=1, correlationId="c1")
        body = {"id": "upsert", "delay": "1h", "callbackUrl": receiver.url("/upsert-new"), "payload": 2}
        second = success(service.api("POST", "/timers/create", body))
        assert (second["payload"], second["metadata"], second["correlationId"]) == (2, None, None)
        assert second["createdAt"] == first["createdAt"] and second["status"] == "pending"
        assert service.current(first) == second
        service.advance("1h")
        assert service.final(first)["status"] == "completed"
        assert len(receiver.at("/upsert-new")) == 1 and not receiver.at("/upsert-old")
        assert not [timer for timer in service.pages("correlationId=c1", 10) if timer["id"] == "upsert"]

    def test_upsert_can_be_repeated_and_sets_the_parameters_to_compare(self, service: HttpV1) -> None:
        body = body_of(service, "upsert again", payload=1)
        for _ in range(3):
            assert success(service.api("POST", "/timers/create", body))["payload"] == 1
        assert success(service.api("POST", "/timers", body))["status"] == "pending"  # the same parameters
        success(service.api("POST", "/timers/create", body | {"payload": 2}))
        failure(service.api("POST", "/timers", body), 409, "TIMER_CONFLICT")

    @pytest.mark.parametrize("status", [200, 500])
    def test_upsert_of_a_finished_timer_starts_it_again(self, service: HttpV1, receiver: Receiver, status: int) -> None:
        path = f"/upsert-finished-{status}"
        url = receiver.reply(path, Reply(status), Reply(200))
        body = {"id": path, "delay": "0s", "callbackUrl": url, "retryPolicy": {"maxRetries": 0}}
        done = service.final(success(service.api("POST", "/timers/create", body)))
        assert done["status"] == ("completed" if status == 200 else "failed")
        again = success(service.api("POST", "/timers/create", body | {"delay": "1h"}))
        assert (again["status"], again["attempts"], again["lastError"]) == ("pending", 0, None)
        assert again["executedAt"] is None and instant(again["executeAt"]) > service.now()
        service.advance("1h")
        assert service.final(again)["status"] == "completed"
        ids = [request.headers["webhook-id"] for request in receiver.at(path)]
        assert len(ids) == len(set(ids)) == 2

    def test_upsert_of_an_executing_timer_is_a_conflict(self, service: HttpV1, receiver: Receiver) -> None:
        url = receiver.reply("/upsert-executing", Reply(hang=True))
        made = service.make(url, id="upsert executing", delay="0s")
        receiver.wait("/upsert-executing")
        body = {"id": "upsert executing", "delay": "0s", "callbackUrl": url, "payload": 1}
        failure(service.api("POST", "/timers/create", body), 409, "TIMER_NOT_PENDING")
        receiver.release()
        done = service.final(made)
        assert (done["status"], done["payload"]) == ("completed", None)
        assert len(receiver.at("/upsert-executing")) == 1

    def test_upsert_replaces_a_timer_that_waits_for_a_retry(self, service: HttpV1, receiver: Receiver) -> None:
        url = receiver.reply("/upsert-retry", Reply(500))
        made = service.make(url, delay="0s", id="upsert retry", retryPolicy={"jitter": False})
        receiver.wait("/upsert-retry")
        waiting = service.in_status(made, "pending")
        assert waiting["attempts"] == 1 and waiting["lastError"]
        body = {"id": "upsert retry", "delay": "0s", "callbackUrl": receiver.url("/upsert-retry-ok")}
        again = success(service.api("POST", "/timers/create", body))
        assert (again["attempts"], again["lastError"]) == (0, None)
        assert service.final(again)["status"] == "completed"
        service.advance("1h")
        assert len(receiver.at("/upsert-retry")) == len(receiver.at("/upsert-retry-ok")) == 1

    def test_concurrent_upserts_leave_one_timer(self, service: HttpV1) -> None:
        barrier = threading.Barrier(8)

        def make(n: int) -> Any:
            barrier.wait()
            body = {"id": "upserts", "delay": "9h", "callbackUrl": URL, "payload": n, "correlationId": "upserts"}
            return success(service.api("POST", "/timers/create", body))["payload"]

        with ThreadPoolExecutor(8) as pool:
            assert sorted(pool.map(make, range(8))) == list(range(8))
        [left] = service.pages("correlationId=upserts", 10)
        assert left["payload"] in range(8)
