"""Creates that come twice: the repeat, the conflict, and the upsert that replaces."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.doors.durable import URL, Durable, failure, success
from tests.servers import Receiver, Reply, instant

POLICY = {"maxRetries": 2, "initialInterval": "1s"}


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Durable]:
    with Durable(tmp_path_factory.mktemp("durable-once")) as door:
        yield door
        assert "Traceback" not in door.stderr, door.stderr


def body_of(door: Durable, id: str, **fields: Any) -> dict[str, Any]:
    return {"id": id, "executeAt": door.ahead(3600), "callbackUrl": URL, **fields}


class TestRepeats:
    def test_the_same_again_is_the_same_timer(self, door: Durable) -> None:
        body = body_of(door, "same", payload={"a": 1}, metadata=[1], correlationId="c", retryPolicy=POLICY)
        first = success(door.api("POST", "/timers", body))
        for _ in range(3):
            assert success(door.api("POST", "/timers", body)) == first
        assert [timer["id"] for timer in door.pages("correlationId=c", 10)] == ["same"]

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
    def test_another_parameter_is_a_conflict(self, door: Durable, change: dict[str, Any]) -> None:
        body = body_of(door, f"conflict {change}", payload={"n": 1}, retryPolicy=POLICY)
        first = success(door.api("POST", "/timers", body))
        failure(door.api("POST", "/timers", body | change), 409, "TIMER_CONFLICT")
        assert door.see(first) == first

    def test_the_same_in_other_words(self, door: Durable) -> None:
        """Defaults spelled out, the older names, another spelling of the same instant: the same parameters."""
        body = body_of(door, "words", executeAt="2998-07-01T12:00:00Z", payload=1)
        first = success(door.api("POST", "/timers", body))
        for words in (
            {"namespace": "default"},
            {"groupId": "default"},
            {"timerId": "words"},
            {"callbackMethod": "POST", "callbackHeaders": {}},
            {"retryPolicy": None, "correlationId": None},
            {"responseProtocol": "answer"},
            {"executeAt": "2998-07-01T14:00:00.000+02:00"},
        ):
            assert success(door.api("POST", "/timers", body | words)) == first, words

    @pytest.mark.parametrize(
        "words",
        [
            {"callbackTimeout": "30s"},
            {"retryPolicy": {}},
            {"retryPolicy": {"maxRetries": 3, "initialInterval": "30s", "maxRetryAttemptsDuration": "24h"}},
        ],
        ids=json.dumps,
    )
    def test_a_default_that_is_spelled_out(self, door: Durable, words: dict[str, Any]) -> None:
        body = body_of(door, f"spelled out {words}", executeAt="2998-07-01T12:00:00Z")
        first = success(door.api("POST", "/timers", body))
        assert success(door.api("POST", "/timers", body | words)) == first

    @pytest.mark.parametrize("payload", [b'{"b":2,"a":1}', b'{ "a" : 1, "b": 2 }', b'{"\\u0061": 1, "b": 2}'])
    def test_the_same_payload_in_other_bytes(self, door: Durable, payload: bytes) -> None:
        def bytes_of(payload: bytes) -> bytes:
            return b'{"id": "bytes", "delay": "9h", "callbackUrl": "%b", "payload": %b}' % (URL.encode(), payload)

        assert door.api("POST", "/timers", body=bytes_of(b'{"a": 1, "b": 2}')).status == 200
        assert door.api("POST", "/timers", body=bytes_of(payload)).status == 200

    def test_after_its_time(self, door: Durable, receiver: Receiver) -> None:
        body = body_of(door, "late", executeAt=door.ahead(10), callbackUrl=receiver.url("/once-late"))
        first = success(door.api("POST", "/timers", body))
        door.advance()
        done = door.final(first)
        for _ in range(2):
            assert success(door.api("POST", "/timers", body)) == done
            door.advance("1h")
        failure(door.api("POST", "/timers", body | {"payload": 1}), 409, "TIMER_CONFLICT")
        failure(door.api("POST", "/timers", body | {"id": "never made"}), 400, "INVALID_INPUT", "executeAt")
        failure(door.api("POST", "/timers", {**body, "id": None}), 400, "INVALID_INPUT", "executeAt")
        assert len(receiver.at("/once-late")) == 1

    def test_after_an_update(self, door: Durable) -> None:
        body = body_of(door, "updated", payload=1)
        first = success(door.api("POST", "/timers", body))
        changed = success(door.api("PUT", door.path(first), {"payload": 2, "delay": "7h"}))
        assert success(door.api("POST", "/timers", body)) == changed
        failure(door.api("POST", "/timers", body | {"payload": 2}), 409, "TIMER_CONFLICT")

    def test_after_a_delete_it_is_a_new_one(self, door: Durable) -> None:
        body = body_of(door, "deleted")
        first = success(door.api("POST", "/timers", body))
        success(door.api("DELETE", door.path(first)), 204)
        door.advance("1s")
        assert success(door.api("POST", "/timers", body))["createdAt"] > first["createdAt"]

    def test_a_delay_is_compared_without_its_time(self, door: Durable, receiver: Receiver) -> None:
        body = {"id": "delay", "delay": "10m", "callbackUrl": receiver.url("/once-delay"), "payload": 1}
        first = success(door.api("POST", "/timers", body))
        door.advance("5m")
        assert success(door.api("POST", "/timers", body)) == first
        assert success(door.api("POST", "/timers", body | {"delay": "20m"})) == first
        failure(door.api("POST", "/timers", body | {"payload": 2}), 409, "TIMER_CONFLICT")
        door.advance("5m")
        done = door.final(first)
        assert success(door.api("POST", "/timers", body)) == done
        at_once = {"id": "delay 0", "delay": "0s", "callbackUrl": receiver.url("/once-delay-0")}
        done = door.final(success(door.api("POST", "/timers", at_once)))
        assert success(door.api("POST", "/timers", at_once)) == done
        assert len(receiver.at("/once-delay")) == len(receiver.at("/once-delay-0")) == 1

    def test_all_at_the_same_time(self, door: Durable, receiver: Receiver) -> None:
        workers = 16
        barrier = threading.Barrier(workers)
        bodies = [body_of(door, "at once", correlationId="at once", payload="x"), None]
        bodies[1] = {"id": "at once, delayed", "delay": "9h", "callbackUrl": URL, "correlationId": "at once"}

        def make(n: int) -> list[Any]:
            barrier.wait()
            return [success(door.api("POST", "/timers", body)) for body in bodies for _ in range(3)]

        with ThreadPoolExecutor(workers) as pool:
            answers = [answer for answers in pool.map(make, range(workers)) for answer in answers]
        assert len({json.dumps(answer) for answer in answers}) == 2
        assert len(door.pages("correlationId=at%20once", 100)) == 2

    def test_one_of_many_different_ones_wins(self, door: Durable) -> None:
        barrier = threading.Barrier(12)

        def make(n: int) -> int:
            barrier.wait()
            return door.api("POST", "/timers", {"id": "race", "delay": "9h", "callbackUrl": URL, "payload": n}).status

        with ThreadPoolExecutor(12) as pool:
            assert sorted(pool.map(make, range(12))) == [200] + [409] * 11


class TestUpsert:
    def test_a_pending_one_is_replaced(self, door: Durable, receiver: Receiver) -> None:
        first = door.make(receiver.url("/upsert-old"), id="upsert", payload=1, metadata=1, correlationId="c1")
        body = {"id": "upsert", "delay": "1h", "callbackUrl": receiver.url("/upsert-new"), "payload": 2}
        second = success(door.api("POST", "/timers/create", body))
        assert (second["payload"], second["metadata"], second["correlationId"]) == (2, None, None)
        assert second["createdAt"] == first["createdAt"] and second["status"] == "pending"
        assert door.see(first) == second
        door.advance("1h")
        assert door.final(first)["status"] == "completed"
        assert len(receiver.at("/upsert-new")) == 1 and not receiver.at("/upsert-old")
        assert not [timer for timer in door.pages("correlationId=c1", 10) if timer["id"] == "upsert"]

    def test_the_same_again(self, door: Durable) -> None:
        body = body_of(door, "upsert again", payload=1)
        for _ in range(3):
            assert success(door.api("POST", "/timers/create", body))["payload"] == 1
        assert success(door.api("POST", "/timers", body))["status"] == "pending"  # the same parameters
        success(door.api("POST", "/timers/create", body | {"payload": 2}))
        failure(door.api("POST", "/timers", body), 409, "TIMER_CONFLICT")

    @pytest.mark.parametrize("status", [200, 500])
    def test_a_finished_one_starts_anew(self, door: Durable, receiver: Receiver, status: int) -> None:
        path = f"/upsert-finished-{status}"
        url = receiver.reply(path, Reply(status), Reply(200))
        body = {"id": path, "delay": "0s", "callbackUrl": url, "retryPolicy": {"maxRetries": 0}}
        done = door.final(success(door.api("POST", "/timers/create", body)))
        assert done["status"] == ("completed" if status == 200 else "failed")
        again = success(door.api("POST", "/timers/create", body | {"delay": "1h"}))
        assert (again["status"], again["attempts"], again["lastError"]) == ("pending", 0, None)
        assert again["executedAt"] is None and instant(again["executeAt"]) > door.now()
        door.advance("1h")
        assert door.final(again)["status"] == "completed"
        ids = [request.headers["webhook-id"] for request in receiver.at(path)]
        assert len(ids) == len(set(ids)) == 2

    def test_an_executing_one_stays(self, door: Durable, receiver: Receiver) -> None:
        url = receiver.reply("/upsert-executing", Reply(hang=True))
        made = door.make(url, id="upsert executing", delay="0s")
        receiver.wait("/upsert-executing")
        body = {"id": "upsert executing", "delay": "0s", "callbackUrl": url, "payload": 1}
        failure(door.api("POST", "/timers/create", body), 409, "TIMER_NOT_PENDING")
        receiver.release()
        done = door.final(made)
        assert (done["status"], done["payload"]) == ("completed", None)
        assert len(receiver.at("/upsert-executing")) == 1

    def test_a_retry_that_waits_is_replaced(self, door: Durable, receiver: Receiver) -> None:
        url = receiver.reply("/upsert-retry", Reply(500))
        made = door.make(url, delay="0s", id="upsert retry", retryPolicy={"jitter": False})
        receiver.wait("/upsert-retry")
        waiting = door.in_status(made, "pending")
        assert waiting["attempts"] == 1 and waiting["lastError"]
        body = {"id": "upsert retry", "delay": "0s", "callbackUrl": receiver.url("/upsert-retry-ok")}
        again = success(door.api("POST", "/timers/create", body))
        assert (again["attempts"], again["lastError"]) == (0, None)
        assert door.final(again)["status"] == "completed"
        door.advance("1h")
        assert len(receiver.at("/upsert-retry")) == len(receiver.at("/upsert-retry-ok")) == 1

    def test_all_at_the_same_time_leave_one(self, door: Durable) -> None:
        barrier = threading.Barrier(8)

        def make(n: int) -> Any:
            barrier.wait()
            body = {"id": "upserts", "delay": "9h", "callbackUrl": URL, "payload": n, "correlationId": "upserts"}
            return success(door.api("POST", "/timers/create", body))["payload"]

        with ThreadPoolExecutor(8) as pool:
            assert sorted(pool.map(make, range(8))) == list(range(8))
        [left] = door.pages("correlationId=upserts", 10)
        assert left["payload"] in range(8)
