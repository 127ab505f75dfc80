"""Batches: a thousand creates in one durable write, an answer for each."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.doors.durable import FIELDS, URL, Durable, failed_as, failure, success
from tests.servers import KEY, Receiver

REQUEST_BYTES_MAX = 256 * 1024
BATCH_BYTES_MAX = 16 * 1024 * 1024
SINGLES_MAX = 120
"""How many single creates a batch of a thousand may cost as much as; it is about 40 where a single one takes 1.2 ms."""


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Durable]:
    with Durable(tmp_path_factory.mktemp("durable-batch")) as door:
        door.namespace("other")
        yield door
        assert "Traceback" not in door.stderr, door.stderr


def item(**fields: Any) -> dict[str, Any]:
    return {"delay": "100h", "callbackUrl": URL, **fields}


class TestResults:
    def test_a_thousand_in_order(self, door: Durable) -> None:
        items = [item(id=f"k{n}", namespace=("default", "other")[n % 2], payload=n) for n in range(1000)]
        results = door.batch(items)
        assert [result["status"] for result in results] == [200] * 1000
        assert all(set(result) == {"status", "timer"} for result in results)
        timers = [result["timer"] for result in results]
        assert [timer["payload"] for timer in timers] == list(range(1000))
        assert timers[0].keys() >= FIELDS and door.see(timers[999]) == timers[999]
        assert len(door.pages("namespace=other", 1000)) == 500

    def test_repeats(self, door: Durable) -> None:
        items = [item(id=f"repeat {n}", payload=n) for n in range(5)]
        first = door.batch(items)
        again = door.batch([*items, item(id="repeat 5"), item(id="repeat 0", payload="other")])
        assert again[:5] == first and again[5]["status"] == 200
        assert again[6]["status"] == 409
        failed_as(again[6]["error"], "TIMER_CONFLICT")
        assert success(door.api("POST", "/timers", items[0])) == first[0]["timer"]

    def test_duplicates_within_one(self, door: Durable) -> None:
        same, differs = item(id="twin", payload=1), item(id="twin", payload=2)
        results = door.batch([same, item(id="between"), same, differs])
        assert [result["status"] for result in results] == [200, 200, 200, 409]
        assert results[0] == results[2] and door.see(results[0]["timer"])["payload"] == 1
        failed_as(results[3]["error"], "TIMER_CONFLICT")

    def test_ids_that_are_left_out(self, door: Durable) -> None:
        results = door.batch([item(), item(), item()])
        assert len({result["timer"]["id"] for result in results}) == 3

    @pytest.mark.parametrize("prefer", ["return=minimal", "respond-async, Return = Minimal; a=b", 'return="minimal"'])
    def test_ids_are_enough_for_who_prefers_that(self, door: Durable, prefer: str) -> None:
        id, taken = f"minimal {prefer}", f"taken {prefer}"
        door.make(URL, id=taken)
        items = [item(id=id), item(), item(id=id), item(id=taken), item(callbackUrl="nowhere")]
        answer = door.api("POST", "/timers/batch", {"timers": items}, headers={"X-API-Key": KEY, "Prefer": prefer})
        assert answer.headers["preference-applied"] == "return=minimal"
        first, made, again, *refused = success(answer)["results"]
        assert first == again == {"status": 200, "id": id} and door.see({"namespace": "default", "id": id})
        assert set(made) == {"status", "id"} and door.see({"namespace": "default", **made})["status"] == "pending"
        assert [result["error"]["error"] for result in refused] == ["TIMER_CONFLICT", "INVALID_INPUT"]

    @pytest.mark.parametrize(
        "prefer", ["", "return=representation, return=minimal", "return=minimalist", "minimal", ",;="]
    )
    def test_others_get_their_timers(self, door: Durable, prefer: str) -> None:
        answer = door.api("POST", "/timers/batch", {"timers": [item()]}, headers={"X-API-Key": KEY, "Prefer": prefer})
        [result] = success(answer)["results"]
        assert set(result) == {"status", "timer"} and "preference-applied" not in answer.headers

    def test_they_fire(self, door: Durable, receiver: Receiver) -> None:
        url = receiver.url("/batch-fires")
        results = door.batch([item(callbackUrl=url, delay=delay) for delay in ("0s", "1ms", "10h")])
        for result in results[:2]:
            door.final(result["timer"])
        door.advance("10h")
        assert door.final(results[2]["timer"])["status"] == "completed"
        assert len(receiver.at("/batch-fires")) == 3

    BAD: list[tuple[Any, int, str, str]] = [
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

    def test_bad_ones_do_not_fail_the_others(self, door: Durable) -> None:
        items = [entry for n, bad in enumerate(self.BAD) for entry in (item(id=f"beside {n}"), bad[0])]
        results = door.batch(items)
        assert len(results) == len(items)
        for n, (_, status, code, field) in enumerate(self.BAD):
            good, refused = results[2 * n : 2 * n + 2]
            assert good["status"] == 200 and good["timer"]["id"] == f"beside {n}"
            assert set(refused) == {"status", "error"} and refused["status"] == status, refused
            failed_as(refused["error"], code, field or None)
            assert door.see(good["timer"]) == good["timer"]

    def test_only_bad_ones(self, door: Durable) -> None:
        assert [result["status"] for result in door.batch([{}, 5])] == [400, 400]

    def test_a_repeat_after_its_time(self, door: Durable, receiver: Receiver) -> None:
        items = [item(id="late", delay=None, executeAt=door.ahead(10), callbackUrl=receiver.url("/batch-late"))]
        [first] = door.batch(items)
        door.advance()
        done = door.final(first["timer"])
        assert success(door.api("POST", "/timers", items[0])) == done
        assert door.batch(items) == [{"status": 200, "timer": done}]

    def test_a_payload_as_deep_as_a_create_may_have(self, door: Durable) -> None:
        deep = json.loads("[" * 63 + "]" * 63)
        assert door.api("POST", "/timers", item(payload=deep)).status == 200
        assert [result["status"] for result in door.batch([item(), item(payload=deep)])] == [200, 200]


class TestWhole:
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
    def test_refused(self, door: Durable, body: Any) -> None:
        before = door.total()
        field = "timers" if isinstance(body, dict) else "body"
        failure(door.api("POST", "/timers/batch", body), 400, "INVALID_INPUT", field)
        assert door.total() == before

    def test_over_the_limit(self, door: Durable) -> None:
        """The answer comes before the body does."""
        head = (
            f"POST /api/v1/timers/batch HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nConnection: close\r\n"
            f"Content-Length: {BATCH_BYTES_MAX + 1}\r\n\r\n"
        )
        status, _, rest = door.raw(head.encode()).partition(b"\r\n")
        assert b" 413 " in status
        failed_as(json.loads(rest.partition(b"\r\n\r\n")[2]), "PAYLOAD_TOO_LARGE", "body")

    def test_up_to_the_limit(self, door: Durable) -> None:
        items = [item(payload="x" * (REQUEST_BYTES_MAX - 200)) for _ in range(63)]
        body = json.dumps({"timers": items}).encode()
        body += b" " * (BATCH_BYTES_MAX - len(body))
        assert len(body) == BATCH_BYTES_MAX
        results = success(door.api("POST", "/timers/batch", body=body))["results"]
        assert {result["status"] for result in results} == {200}


def test_a_thousand_cost_much_less_than_a_thousand_singles(door: Durable) -> None:
    def took(work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    def single() -> object:
        return success(door.api("POST", "/timers", item(payload={"n": 1})))

    bodies = [json.dumps({"timers": [item(payload={"n": n}) for n in range(1000)]}).encode() for _ in range(5)]
    took(single)
    singles: list[float] = []
    batches: list[float] = []
    for body in bodies:  # side by side, so that a busy machine slows both
        singles += [took(single) for _ in range(40)]
        batches.append(took(lambda body=body: door.api("POST", "/timers/batch", body=body)))  # type: ignore[misc]
    ratio = statistics.median(batches) / statistics.median(singles)
    assert ratio <= SINGLES_MAX, f"a batch of 1000 costs as much as {ratio:.0f} single creates"
