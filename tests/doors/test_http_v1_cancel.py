"""Cancels by the HTTP v1 API, of one timer and by filter; replays by filter; the delivery ids of attempts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.doors.http_v1 import ONCE, URL, HttpV1, failure, success
from tests.servers import Receiver, Reply, until


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpV1]:
    with HttpV1(
        tmp_path_factory.mktemp("http-v1-cancel"), DUETIME_RETENTION="forever", DUETIME_AUTO_NAMESPACES="on"
    ) as service:
        yield service
        assert "Traceback" not in service.stderr, service.stderr


def filled(service: HttpV1, namespace: str, count: int, **fields: Any) -> list[dict[str, Any]]:
    """Create timers that are due in an hour, a second apart; returns them, soonest first."""
    items = [
        {"namespace": namespace, "id": f"{n:04d}", "callbackUrl": URL, "executeAt": service.ahead(3600 + n), **fields}
        for n in range(count)
    ]
    return [result["timer"] for result in service.batch(items)]


def cancel(service: HttpV1, **filters: Any) -> tuple[int, bool]:
    answer = success(service.api("POST", "/timers/cancel", filters))
    assert set(answer) == {"canceled", "more"}
    return answer["canceled"], answer["more"]


def statuses(service: HttpV1, namespace: str) -> list[str]:
    """The statuses of a namespace's timers, ordered by id."""
    timers = service.pages(f"namespace={namespace}", 1000)
    return [timer["status"] for timer in sorted(timers, key=lambda timer: timer["id"])]


class TestCancel:
    def test_canceled_timer_is_kept_and_does_not_fire(self, service: HttpV1, receiver: Receiver) -> None:
        made = service.make(receiver.url("/canceled-one"))
        canceled = success(service.api("POST", service.path(made) + "/cancel"))
        assert canceled["status"] == "canceled" and canceled["executedAt"] is None
        assert success(service.api("POST", service.path(made) + "/cancel")) == canceled == service.current(made)
        service.advance("1h")
        assert not receiver.at("/canceled-one")
        assert success(service.api("POST", service.path(made) + "/replay"))["status"] == "pending"
        assert service.final(made)["status"] == "completed"
        failure(service.api("POST", service.path(made) + "/cancel"), 409, "TIMER_NOT_PENDING")

    def test_executing_timer_can_not_be_canceled(self, service: HttpV1, receiver: Receiver) -> None:
        made = service.make(receiver.reply("/canceled-late", Reply(hang=True)), delay="0s")
        receiver.wait("/canceled-late")
        failure(service.api("POST", service.path(made) + "/cancel"), 409, "TIMER_NOT_PENDING")
        receiver.release()
        assert service.final(made)["status"] == "completed"

    def test_unknown_timer_is_not_found(self, service: HttpV1) -> None:
        failure(service.api("POST", "/timers/default/nobody/cancel"), 404, "TIMER_NOT_FOUND")
        failure(service.api("POST", "/timers/a%20b/nobody/cancel"), 400, "INVALID_INPUT", "namespace")


class TestCancelByFilter:
    def test_cancel_by_time_range(self, service: HttpV1) -> None:
        made = filled(service, "range", 20)
        after, before = made[5]["executeAt"], made[15]["executeAt"]
        assert cancel(service, namespace="range", executeAfter=after, executeBefore=before) == (10, False)
        assert statuses(service, "range") == ["pending"] * 5 + ["canceled"] * 10 + ["pending"] * 5
        assert cancel(service, namespace="range", executeAfter=after, executeBefore=before) == (0, False)
        assert cancel(service, namespace="range", executeBefore=before) == (5, False)

    def test_cancel_by_correlation_id_and_id(self, service: HttpV1) -> None:
        for name in ("left", "right"):
            filled(service, name, 3, correlationId=f"only-{name}")
        assert cancel(service, correlationId="only-left", namespace="right") == (0, False)
        assert cancel(service, correlationId="only-left", id="0001") == (1, False)
        assert cancel(service, id="0002", namespace="right") == (1, False)
        assert statuses(service, "left") == ["pending", "canceled", "pending"]
        assert statuses(service, "right") == ["pending", "pending", "canceled"]

    def test_cancel_stops_at_the_limit_and_can_be_continued(self, service: HttpV1) -> None:
        for n in range(3):
            service.batch(
                [{"namespace": "many", "id": f"{n}-{i}", "callbackUrl": URL, "delay": "9h"} for i in range(700)]
            )
        results: list[Any] = []
        while not results or results[-1][1]:
            results.append(cancel(service, namespace="many", limit=1000))
        assert results == [(1000, True), (1000, True), (100, False)]
        assert set(statuses(service, "many")) == {"canceled"}

    def test_only_pending_timers_are_canceled(self, service: HttpV1, receiver: Receiver) -> None:
        made = service.make(receiver.reply("/under-way", Reply(hang=True)), namespace="mixed", delay="0s")
        service.run(receiver.url("/done-already"), namespace="mixed")
        filled(service, "mixed", 2)
        receiver.wait("/under-way")
        assert cancel(service, namespace="mixed") == (2, False)
        receiver.release()
        assert service.final(made)["status"] == "completed"

    def test_cancel_in_an_unknown_namespace_cancels_nothing(self, service: HttpV1) -> None:
        assert cancel(service, namespace="nowhere") == (0, False)

    @pytest.mark.parametrize("filters", [{}, {"limit": 1000}, {"namespace": None, "id": None}], ids=json.dumps)
    def test_cancel_without_a_filter_is_rejected(self, service: HttpV1, filters: Any) -> None:
        made = service.make(URL, delay="9h")
        error = failure(service.api("POST", "/timers/cancel", filters), 400, "INVALID_INPUT", "namespace")
        assert error["message"] == (
            'namespace is required unless there is another filter; "namespace": "*" cancels in all namespaces'
        )
        assert service.current(made)["status"] == "pending"

    def test_star_is_every_namespace(self, service: HttpV1) -> None:
        made = [timer for name in ("star-1", "star-2") for timer in filled(service, name, 2, correlationId="star")]
        assert cancel(service, namespace="*", executeAfter=made[0]["executeAt"])[0] >= 4
        assert statuses(service, "star-1") == statuses(service, "star-2") == ["canceled"] * 2
        filters = {"namespace": "*", "correlationId": "star", "status": "canceled"}
        assert success(service.api("POST", "/timers/replay", filters)) == {"replayed": 4, "more": False}

    @pytest.mark.parametrize("path", ["cancel", "replay"])
    @pytest.mark.parametrize(
        ("filters", "field"),
        [
            ({"limit": 0}, "limit"),
            ({"limit": 1001}, "limit"),
            ({"namespace": "a b"}, "namespace"),
            ({"id": ""}, "id"),
            ({"id": "a\nb"}, "id"),
            ({"correlationId": ""}, "correlationId"),
            ({"executeAfter": "now"}, "executeAfter"),
            ({"executeBefore": 5}, "executeBefore"),
        ],
        ids=json.dumps,
    )
    def test_invalid_filters_are_rejected(self, service: HttpV1, path: str, filters: Any, field: str) -> None:
        failure(service.api("POST", f"/timers/{path}", filters), 400, "INVALID_INPUT", field)


class TestReplayByFilter:
    def test_replay_by_time_range_stops_at_the_limit_and_can_be_continued(self, service: HttpV1) -> None:
        made = filled(service, "again", 20)
        cancel(service, namespace="again")
        filters = {"namespace": "again", "status": "canceled", "executeAfter": made[5]["executeAt"]}
        success(service.api("PATCH", "/namespaces/again", {"paused": True}))
        results = [success(service.api("POST", "/timers/replay", filters | {"limit": 10})) for _ in range(2)]
        assert results == [{"replayed": 10, "more": True}, {"replayed": 5, "more": False}]
        assert statuses(service, "again") == ["canceled"] * 5 + ["pending"] * 15


class TestAttempts:
    def test_attempts_have_the_delivery_id_of_their_firing(self, service: HttpV1, receiver: Receiver) -> None:
        url = receiver.reply("/firings", Reply(500), Reply(200))
        policy = {"maxRetries": 1, "initialInterval": "1s", "jitter": False}
        made = service.make(url, delay="0s", retryPolicy=policy)
        service.attempt(made)
        service.attempt(made)
        success(service.api("POST", service.path(made) + "/replay"))
        until("the replay is recorded", lambda: len(service.attempts(made)) == 3)
        ids = [attempt["deliveryId"] for attempt in service.attempts(made)]
        assert ids == [request.headers["webhook-id"] for request in receiver.at("/firings")]
        assert ids[0] == ids[1] != ids[2]

    def test_attempt_without_a_response_has_a_delivery_id(self, service: HttpV1) -> None:
        done = service.run(URL, retryPolicy=ONCE)
        [attempt] = service.attempts(done)
        assert attempt["deliveryId"] and attempt["outcome"] == "unreachable"
