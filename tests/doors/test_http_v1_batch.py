"""Batches: up to a thousand creates, each with a result of its own, all durable when the response is sent."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.doors.http_v1 import FIELDS, URL, HttpV1, failed_as, failure, success
from tests.servers import KEY, Receiver

REQUEST_BYTES_MAX = 256 * 1024
BATCH_BYTES_MAX = 16 * 1024 * 1024
SINGLES_MAX = 120
"""A batch of a thousand may take as long as this many single creates; about 40 where a single one takes 1.2 ms."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpV1]:
    with HttpV1(tmp_path_factory.mktemp("http-v1-batch")) as service:
        service.namespace("other")
        yield service
        assert "Traceback" not in service.stderr, service.stderr


def item(**fields: Any) -> dict[str, Any]:
    return {"delay": "100h", "callbackUrl": URL, **fields}


class TestResults:
    def test_results_of_a_thousand_creates_are_in_order(self, service: HttpV1) -> None:
        items = [item(id=f"k{n}", namespace=("default", "other")[n % 2], payload=n) for n in range(1000)]
        results = service.batch(items)
        assert [result["status"] for result in results] == [200] * 1000
        assert all(set(result) == {"status", "timer"} for result in results)
        timers = [result["timer"] for result in results]
        assert [timer["payload"] for timer in timers] == list(range(1000))
        assert timers[0].keys() >= FIELDS and service.current(timers[999]) == timers[999]
        assert len(service.pages("namespace=other", 1000)) == 500

    def test_repeated_create_returns_the_same_timer(self, service: HttpV1) -> None:
        items = [item(id=f"repeat {n}", payload=n) for n in range(5)]
        first = service.batch(items)
        again = service.batch([*items, item(id="repeat 5"), item(id="repeat 0", payload="other")])
        assert again[:5] == first and again[5]["status"] == 200
        assert again[6]["status"] == 409
        failed_as(again[6]["error"], "TIMER_CONFLICT")
        assert success(service.api("POST", "/timers", items[0])) == first[0]["timer"]

    def test_duplicates_within_a_batch_create_one_timer(self, service: HttpV1) -> None:
        same, differs = item(id="twin", payload=1), item(id="twin", payload=2)
        results = service.batch([same, item(id="between"), same, differs])
        assert [result["status"] for result in results] == [200, 200, 200, 409]
        assert results[0] == results[2] and service.current(results[0]["timer"])["payload"] == 1
        failed_as(results[3]["error"], "TIMER_CONFLICT")

    def test_omitted_ids_are_generated(self, service: HttpV1) -> None:
        results = service.batch([item(), item(), item()])
        assert len({result["timer"]["id"] for result in results}) == 3

    @pytest.mark.parametrize("prefer", ["return=minimal", "respond-async, Return = Minimal; a=b", 'return="minimal"'])
    def test_prefer_return_minimal_returns_ids_only(self, service: HttpV1, prefer: str) -> None:
        id, taken = f"minimal {prefer}", f"taken {prefer}"
        service.make(URL, id=taken)
        items = [item(id=id), item(), item(id=id), item(id=taken), item(callbackUrl="nowhere")]
        answer = service.api("POST", "/timers/batch", {"timers": items}, headers={"X-API-Key": KEY, "Prefer": prefer})
        assert answer.headers["preference-applied"] == "return=minimal"
        first, made, again, *refused = success(answer)["results"]
        assert first == again == {"status": 200, "id": id} and service.current({"namespace": "default", "id": id})
        assert (
            set(made) == {"status", "id"} and service.current({"namespace": "default", **made})["status"] == "pending"
        )
        assert [result["error"]["error"] for result in refused] == ["TIMER_CONFLICT", "INVALID_INPUT"]

    @pytest.mark.parametrize(
        "prefer", ["", "return=representation, return=minimal", "return=minimalist", "minimal", ",;="]
    )
    def test_other_prefer_headers_return_timers(self, service: HttpV1, prefer: str) -> None:
        answer = service.api(
            "POST", "/timers/batch", {"timers": [item()]}, headers={"X-API-Key": KEY, "Prefer": prefer}
        )
        [result] = success(answer)["results"]
        assert set(result) == {"status", "timer"} and "preference-applied" not in answer.headers

    def test_timers_of_a_batch_fire(self, service: HttpV1, receiver: Receiver) -> None:
        url = receiver.url("/batch-fires")
        results = service.batch([item(callbackUrl=url, delay=delay) for delay in ("0s", "1ms", "10h")])
        for result in results[:2]:
            service.final(result["timer"])
        service.advance("10h")
        assert service.final(results[2]["timer"])["status"] == "completed"
        assert len(receiver.at("/batch-fires")) == 3

    INVALID: list[tuple[Any, int, str, str]] = [
        (5, 400, "INVALID_INPUT", "body"),
        (None, 400, "INVALID_INPUT", "body"),
        ([], 400, "INVALID_INPUT", "body"),
        ("x", 400, "INVALID_INPUT", "body"),
        ({}, 400, "INVALID_INPUT", "callbackUrl"),
        (item(id=""), 400, "INVALID_INPUT", "id"),
        (item(id="x" * 256), 400, "INVALID_INPUT", "id"),
        (item(id="a\nb"), 400, "INVALID_INPUT", "id"),
        (item(callbackUrl="ftp://127.0.0.1/"), 400, "INVALID_INPUT", "callbackUrl"),
        (item(callbackMethod="GET"), 400, "INVALID_INPUT", "callbackMethod"),
        (item(callbackHeaders={"Host": "x"}), 400, "INVALID_INPUT", "callbackHeaders"),
        (item(retryPolicy={"maxRetries": -1}), 400, "INVALID_INPUT", "retryPolicy.maxRetries"),
        (item(delay="soon"), 400, "INVALID_INPUT", "delay"),
        (item(delay=None), 400, "INVALID_INPUT", "executeAt"),
        (item(delay=None, executeAt="2001-01-01T00:00:00Z"), 400, "INVALID_INPUT", "executeAt"),
        (item(namespace="nobody"), 400, "UNKNOWN_NAMESPACE", ""),
        (item(callbackUrl="http://10.0.0.1/"), 400, "INVALID_INPUT", ""),
        (item(payload="x" * REQUEST_BYTES_MAX), 413, "PAYLOAD_TOO_LARGE", ""),
    ]

    def test_invalid_creates_do_not_fail_the_others(self, service: HttpV1) -> None:
        items = [entry for n, invalid in enumerate(self.INVALID) for entry in (item(id=f"beside {n}"), invalid[0])]
        results = service.batch(items)
        assert len(results) == len(items)
        for n, (_, status, code, field) in enumerate(self.INVALID):
            good, refused = results[2 * n : 2 * n + 2]
            assert good["status"] == 200 and good["timer"]["id"] == f"beside {n}"
            assert set(refused) == {"status", "error"} and refused["status"] == status, refused
            failed_as(refused["error"], code, field or None)
            assert service.current(good["timer"]) == good["timer"]

    def test_batch_of_only_invalid_creates_is_accepted(self, service: HttpV1) -> None:
        assert [result["status"] for result in service.batch([{}, 5])] == [400, 400]

    def test_create_repeated_after_its_due_time_returns_the_finished_timer(
        self, service: HttpV1, receiver: Receiver
    ) -> None:
        items = [item(id="late", delay=None, executeAt=service.ahead(10), callbackUrl=receiver.url("/batch-late"))]
        [first] = service.batch(items)
        service.advance()
        done = service.final(first["timer"])
        assert success(service.api("POST", "/timers", items[0])) == done
        assert service.batch(items) == [{"status": 200, "timer": done}]

    def test_payload_in_a_batch_can_be_as_deep_as_in_a_create(self, service: HttpV1) -> None:
        deep = json.loads("[" * 63 + "]" * 63)
        assert service.api("POST", "/timers", item(payload=deep)).status == 200
        assert [result["status"] for result in service.batch([item(), item(payload=deep)])] == [200, 200]


class TestRequest:
    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"timers": []},
            {"timers": None},
            {"timers": {}},
            {"timers": "x"},
            [],
            {"timers": [item()] * 1001},
            {"timer": [item()]},
        ],
        ids=lambda body: json.dumps(body)[:30],
    )
    def test_invalid_batch_creates_nothing(self, service: HttpV1, body: Any) -> None:
        before = service.total()
        field = "timer" if isinstance(body, dict) else "body"
        failure(service.api("POST", "/timers/batch", body), 400, "INVALID_INPUT", field)
        assert service.total() == before

    def test_batch_over_the_limit_is_rejected(self, service: HttpV1) -> None:
        """The service rejects it by its Content-Length, before the body arrives."""
        head = (
            f"POST /api/v1/timers/batch HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nConnection: close\r\n"
            f"Content-Length: {BATCH_BYTES_MAX + 1}\r\n\r\n"
        )
        status, _, rest = service.raw(head.encode()).partition(b"\r\n")
        assert b" 413 " in status
        failed_as(json.loads(rest.partition(b"\r\n\r\n")[2]), "PAYLOAD_TOO_LARGE", "body")

    def test_batch_of_the_largest_size_is_accepted(self, service: HttpV1) -> None:
        items = [item(payload="x" * (REQUEST_BYTES_MAX - 200)) for _ in range(63)]
        body = json.dumps({"timers": items}).encode()
        body += b" " * (BATCH_BYTES_MAX - len(body))
        assert len(body) == BATCH_BYTES_MAX
        results = success(service.api("POST", "/timers/batch", body=body))["results"]
        assert {result["status"] for result in results} == {200}


def test_batch_of_a_thousand_is_much_faster_than_a_thousand_creates(service: HttpV1) -> None:
    def seconds(work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    def single() -> object:
        return success(service.api("POST", "/timers", item(payload={"n": 1})))

    bodies = [json.dumps({"timers": [item(payload={"n": n}) for n in range(1000)]}).encode() for _ in range(5)]
    seconds(single)
    singles: list[float] = []
    batches: list[float] = []
    for body in bodies:  # alternating, so that a busy machine slows both
        singles += [seconds(single) for _ in range(40)]
        batches.append(seconds(lambda body=body: service.api("POST", "/timers/batch", body=body)))  # type: ignore[misc]
    ratio = statistics.median(batches) / statistics.median(singles)
    assert ratio <= SINGLES_MAX, f"a batch of 1000 costs as much as {ratio:.0f} single creates"
