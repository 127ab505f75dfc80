"""Cancels of the durable door, one by one and by filter; replays by filter; and which firing an attempt belongs to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.doors.durable import ONCE, URL, Durable, failure, success
from tests.servers import Receiver, Reply, until


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Durable]:
    with Durable(
        tmp_path_factory.mktemp("durable-cancel"), DUETIME_RETENTION="forever", DUETIME_AUTO_NAMESPACES="on"
    ) as door:
        yield door
        assert "Traceback" not in door.stderr, door.stderr


def filled(door: Durable, namespace: str, count: int, **fields: Any) -> list[dict[str, Any]]:
    """Timers that are due an hour from now and a second apart, soonest first."""
    items = [
        {"namespace": namespace, "id": f"{n:04d}", "callbackUrl": URL, "executeAt": door.ahead(3600 + n), **fields}
        for n in range(count)
    ]
    return [result["timer"] for result in door.batch(items)]


def cancel(door: Durable, **asked: Any) -> tuple[int, bool]:
    answer = success(door.api("POST", "/timers/cancel", asked))
    assert set(answer) == {"canceled", "more"}
    return answer["canceled"], answer["more"]


def statuses(door: Durable, namespace: str) -> list[str]:
    """By id."""
    timers = door.pages(f"namespace={namespace}", 1000)
    return [timer["status"] for timer in sorted(timers, key=lambda timer: timer["id"])]


class TestOne:
    def test_it_is_kept_and_does_not_fire(self, door: Durable, receiver: Receiver) -> None:
        made = door.make(receiver.url("/canceled-one"))
        canceled = success(door.api("POST", door.path(made) + "/cancel"))
        assert canceled["status"] == "canceled" and canceled["executedAt"] is None
        assert success(door.api("POST", door.path(made) + "/cancel")) == canceled == door.see(made)
        door.advance("1h")
        assert not receiver.at("/canceled-one")
        assert success(door.api("POST", door.path(made) + "/replay"))["status"] == "pending"
        assert door.final(made)["status"] == "completed"
        failure(door.api("POST", door.path(made) + "/cancel"), 409, "TIMER_NOT_PENDING")

    def test_not_while_it_is_executing(self, door: Durable, receiver: Receiver) -> None:
        made = door.make(receiver.reply("/canceled-late", Reply(hang=True)), delay="0s")
        receiver.wait("/canceled-late")
        failure(door.api("POST", door.path(made) + "/cancel"), 409, "TIMER_NOT_PENDING")
        receiver.release()
        assert door.final(made)["status"] == "completed"

    def test_nobody(self, door: Durable) -> None:
        failure(door.api("POST", "/timers/default/nobody/cancel"), 404, "TIMER_NOT_FOUND")
        failure(door.api("POST", "/timers/a%20b/nobody/cancel"), 400, "INVALID_INPUT", "namespace")


class TestByFilter:
    def test_a_time_range(self, door: Durable) -> None:
        made = filled(door, "range", 20)
        after, before = made[5]["executeAt"], made[15]["executeAt"]
        assert cancel(door, namespace="range", executeAfter=after, executeBefore=before) == (10, False)
        assert statuses(door, "range") == ["pending"] * 5 + ["canceled"] * 10 + ["pending"] * 5
        assert cancel(door, namespace="range", executeAfter=after, executeBefore=before) == (0, False)
        assert cancel(door, namespace="range", executeBefore=before) == (5, False)

    def test_a_correlation_id_and_an_id(self, door: Durable) -> None:
        for name in ("left", "right"):
            filled(door, name, 3, correlationId=f"only-{name}")
        assert cancel(door, correlationId="only-left", namespace="right") == (0, False)
        assert cancel(door, correlationId="only-left", id="0001") == (1, False)
        assert cancel(door, id="0002", namespace="right") == (1, False)
        assert statuses(door, "left") == ["pending", "canceled", "pending"]
        assert statuses(door, "right") == ["pending", "pending", "canceled"]

    def test_many_a_thousand_at_a_time(self, door: Durable) -> None:
        for n in range(3):
            door.batch([{"namespace": "many", "id": f"{n}-{i}", "callbackUrl": URL, "delay": "9h"} for i in range(700)])
        told = []
        while not told or told[-1][1]:
            told.append(cancel(door, namespace="many", limit=1000))
        assert told == [(1000, True), (1000, True), (100, False)]
        assert set(statuses(door, "many")) == {"canceled"}

    def test_only_what_is_pending(self, door: Durable, receiver: Receiver) -> None:
        made = door.make(receiver.reply("/under-way", Reply(hang=True)), namespace="mixed", delay="0s")
        door.run(receiver.url("/done-already"), namespace="mixed")
        filled(door, "mixed", 2)
        receiver.wait("/under-way")
        assert cancel(door, namespace="mixed") == (2, False)
        receiver.release()
        assert door.final(made)["status"] == "completed"

    def test_nowhere(self, door: Durable) -> None:
        assert cancel(door, namespace="nowhere") == (0, False)

    @pytest.mark.parametrize("path", ["cancel", "replay"])
    @pytest.mark.parametrize(
        ("asked", "field"),
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
    def test_bad_ones(self, door: Durable, path: str, asked: Any, field: str) -> None:
        failure(door.api("POST", f"/timers/{path}", asked), 400, "INVALID_INPUT", field)


class TestReplays:
    def test_a_time_range(self, door: Durable) -> None:
        made = filled(door, "again", 20)
        cancel(door, namespace="again")
        asked = {"namespace": "again", "status": "canceled", "executeAfter": made[5]["executeAt"]}
        success(door.api("PATCH", "/namespaces/again", {"paused": True}))
        told = [success(door.api("POST", "/timers/replay", asked | {"limit": 10})) for _ in range(2)]
        assert told == [{"replayed": 10, "more": True}, {"replayed": 5, "more": False}]
        assert statuses(door, "again") == ["canceled"] * 5 + ["pending"] * 15


class TestAttempts:
    def test_each_says_which_firing_it_belongs_to(self, door: Durable, receiver: Receiver) -> None:
        url = receiver.reply("/firings", Reply(500), Reply(200))
        policy = {"maxRetries": 1, "initialInterval": "1s", "jitter": False}
        made = door.make(url, delay="0s", retryPolicy=policy)
        door.attempt(made)
        door.attempt(made)
        success(door.api("POST", door.path(made) + "/replay"))
        until("it was fired once more", lambda: len(door.attempts(made)) == 3)
        told = [attempt["deliveryId"] for attempt in door.attempts(made)]
        assert told == [request.headers["webhook-id"] for request in receiver.at("/firings")]
        assert told[0] == told[1] != told[2]

    def test_a_failed_one(self, door: Durable) -> None:
        done = door.run(URL, retryPolicy=ONCE)
        [attempt] = door.attempts(done)
        assert attempt["deliveryId"] and attempt["outcome"] == "unreachable"
