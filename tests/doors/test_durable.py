"""The durable door's timers: made, seen, changed and removed, in both styles."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest

from tests.doors.durable import FIELDS, URL, Durable, failure, seconds_between, success
from tests.servers import Duetime, Receiver, Reply, instant, printed, until

STYLES = ["resource", "body"]
Timer = dict[str, Any]


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Durable]:
    with Durable(tmp_path_factory.mktemp("durable")) as door:
        door.namespace("other")
        yield door
        assert "Traceback" not in door.stderr, door.stderr
        assert door.terminate() == 0


def look(door: Durable, style: str, timer: Timer) -> Any:
    if style == "resource":
        return door.api("GET", f"/timers/{timer['namespace']}/{quote(timer['id'], safe='')}")
    return door.api("POST", "/timers/get", {"namespace": timer["namespace"], "timerId": timer["id"]})


def change(door: Durable, style: str, timer: Timer, **fields: Any) -> Any:
    if style == "resource":
        return door.api("PUT", f"/timers/{timer['namespace']}/{quote(timer['id'], safe='')}", fields)
    return door.api("POST", "/timers/update", {"namespace": timer["namespace"], "timerId": timer["id"], **fields})


def remove(door: Durable, style: str, timer: Timer) -> Any:
    if style == "resource":
        return door.api("DELETE", f"/timers/{timer['namespace']}/{quote(timer['id'], safe='')}")
    return door.api("POST", "/timers/delete", {"namespace": timer["namespace"], "timerId": timer["id"]})


@pytest.fixture(params=STYLES)
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def executing(door: Durable, receiver: Receiver) -> Iterator[Timer]:
    """A timer whose receiver has not answered yet; it does at the end."""
    path = f"/executing-{uuid.uuid4()}"
    timer = door.make(receiver.reply(path, Reply(hang=True)), delay="0s")
    receiver.wait(path)
    yield door.in_status(timer, "executing")
    receiver.release()
    assert door.final(timer)["status"] == "completed"
    assert len(receiver.at(path)) == 1


class TestCreate:
    @pytest.mark.parametrize("path", ["/timers", "/timers/create"])
    def test_everything_is_given_back(self, door: Durable, path: str, style: str) -> None:
        asked = {
            "namespace": "other",
            "id": f"all{path}{style}",
            "executeAt": door.ahead(3600),
            "callbackUrl": URL,
            "callbackMethod": "PUT",
            "callbackHeaders": {"Authorization": "Bearer x", "X-Y": ""},
            "payload": {"a": [1, None, "ü"]},
            "metadata": ["m"],
            "correlationId": "order 7",
            "retryPolicy": {
                "maxRetries": 5,
                "maxRetryAttemptsDuration": "1h30m",
                "initialInterval": "500ms",
                "backoffMultiplier": 1.5,
                "maxInterval": "7d",
                "jitter": False,
            },
            "callbackTimeout": "5s",
            "responseProtocol": "status",
        }
        made = success(door.api("POST", path, asked))
        assert made.keys() >= FIELDS
        assert {name: made[name] for name in asked} == asked
        assert (made["status"], made["attempts"], made["lastError"], made["executedAt"]) == ("pending", 0, None, None)
        assert made["createdAt"] == made["updatedAt"]
        assert abs(instant(made["createdAt"]) - door.now()) < timedelta(minutes=5)
        assert success(look(door, style, made)) == made

    @pytest.mark.parametrize("path", ["/timers", "/timers/create"])
    def test_what_is_left_out(self, door: Durable, path: str) -> None:
        made = success(door.api("POST", path, {"executeAt": door.ahead(3600), "callbackUrl": URL}))
        assert uuid.UUID(made["id"]) and made["namespace"] == "default"
        assert made["retryPolicy"] == {
            "maxRetries": 3,
            "maxRetryAttemptsDuration": "24h",
            "initialInterval": "30s",
            "backoffMultiplier": 2.0,
            "maxInterval": "10m",
            "jitter": True,
        }
        assert (made["callbackMethod"], made["callbackHeaders"], made["callbackTimeout"]) == ("POST", {}, "30s")
        assert made["payload"] is made["metadata"] is made["correlationId"] is made["callbackSubject"] is None
        assert door.make()["id"] != made["id"]

    def test_a_policy_keeps_the_defaults_of_what_it_leaves_out(self, door: Durable) -> None:
        policy = door.make(retryPolicy={"maxRetries": 7})["retryPolicy"]
        assert (policy["maxRetries"], policy["initialInterval"], policy["maxInterval"]) == (7, "30s", "10m")

    def test_names(self, door: Durable) -> None:
        assert door.make(groupId="other", timerId="names")["namespace"] == "other"
        again = door.make(groupId="other", namespace="other", id="names2", timerId="names2")
        assert (again["namespace"], again["id"]) == ("other", "names2")
        for wrong in ({"groupId": "other", "namespace": "default"}, {"id": "a", "timerId": "b"}):
            answer = door.api("POST", "/timers", {"delay": "1h", "callbackUrl": URL, **wrong})
            failure(answer, 400, "INVALID_INPUT", next(name for name in ("groupId", "timerId") if name in wrong))
        for name in ("groupId", "namespace"):
            assert success(door.api("POST", "/timers/get", {name: "other", "id": "names"}))["id"] == "names"
        assert failure(door.api("POST", "/timers/get", {"timerId": "names"}), 404, "TIMER_NOT_FOUND")
        failure(door.api("POST", "/timers/get", {"namespace": "other"}), 400, "INVALID_INPUT", "timerId")

    @pytest.mark.parametrize("id", ["x" * 255, "a/b", "a b", "ü😀", "..", "%2F", "create", "a?b#c", '"', "'; --"])
    def test_ids_of_every_kind(self, door: Durable, id: str, style: str) -> None:
        made = success(door.api("POST", "/timers/create", {"id": id, "delay": "10h", "callbackUrl": URL}))
        assert made["id"] == id
        assert success(look(door, style, made)) == made
        assert success(change(door, style, made, payload=1))["payload"] == 1
        success(remove(door, style, made), 204)
        failure(look(door, style, made), 404, "TIMER_NOT_FOUND")

    def test_the_same_id_in_two_namespaces(self, door: Durable) -> None:
        one, two = door.make(id="same", payload=1), door.make(id="same", namespace="other", payload=2)
        assert (door.see(one)["payload"], door.see(two)["payload"]) == (1, 2)
        success(remove(door, "resource", one), 204)
        assert door.see(two) == two

    def test_a_delay_counts_from_now(self, door: Durable) -> None:
        made = door.make(delay="1h30m")
        assert seconds_between(made["createdAt"], made["executeAt"]) == pytest.approx(5400, abs=60)

    def test_a_delay_of_nothing_fires_at_once(self, door: Durable, receiver: Receiver) -> None:
        for path in ("/timers", "/timers/create"):
            body = {"delay": "0s", "callbackUrl": receiver.url(f"/at-once{path}")}
            assert door.final(success(door.api("POST", path, body)))["status"] == "completed"
            assert len(receiver.at(f"/at-once{path}")) == 1

    @pytest.mark.parametrize("path", ["/timers", "/timers/create"])
    @pytest.mark.parametrize("seconds", [0, -1, -1e6])
    def test_the_past(self, door: Durable, path: str, seconds: float) -> None:
        body = {"id": "past", "executeAt": door.ahead(seconds), "callbackUrl": URL}
        failure(door.api("POST", path, body), 400, "INVALID_INPUT", "executeAt")
        failure(door.api("GET", "/timers/default/past"), 404, "TIMER_NOT_FOUND")

    @pytest.mark.parametrize("path", ["/timers", "/timers/create"])
    def test_when_and_where_are_required(self, door: Durable, path: str) -> None:
        failure(door.api("POST", path, {"callbackUrl": URL}), 400, "INVALID_INPUT", "executeAt")
        failure(door.api("POST", path, {"delay": "1h"}), 400, "INVALID_INPUT", "callbackUrl")
        both = {"delay": "1h", "executeAt": door.ahead(60), "callbackUrl": URL}
        failure(door.api("POST", path, both), 400, "INVALID_INPUT", "delay")

    @pytest.mark.parametrize("path", ["/timers", "/timers/create"])
    def test_an_unknown_namespace(self, door: Durable, path: str) -> None:
        body = {"namespace": "nobody", "delay": "1h", "callbackUrl": URL}
        failure(door.api("POST", path, body), 400, "UNKNOWN_NAMESPACE")
        failure(door.api("GET", "/timers/nobody/x"), 404, "TIMER_NOT_FOUND")

    @pytest.mark.parametrize("url", ["http://10.0.0.1/", "http://169.254.169.254/latest", "http://[fe80::1]/"])
    def test_private_addresses_are_refused_by_this_doors_name(self, door: Durable, url: str) -> None:
        body = {"delay": "1h", "callbackUrl": url}
        failure(door.api("POST", "/timers", body), 400, "INVALID_INPUT", "callbackUrl")

    def test_private_addresses_are_refused(self, door: Durable) -> None:
        made = door.make()
        for answer in (
            door.api("POST", "/timers", {"delay": "1h", "callbackUrl": "http://10.0.0.1/"}),
            door.api("POST", "/timers/create", {"delay": "1h", "callbackUrl": "http://192.168.1.1/"}),
            door.api("PUT", door.path(made), {"callbackUrl": "http://172.16.0.1/"}),
        ):
            failure(answer, 400, "INVALID_INPUT")
        assert door.see(made) == made

    def test_namespaces_that_make_themselves(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        with Durable(tmp_path_factory.mktemp("auto"), DUETIME_AUTO_NAMESPACES="on") as door:
            failure(door.api("GET", "/timers/fresh/x"), 404, "TIMER_NOT_FOUND")
            failure(door.api("GET", "/namespaces/fresh"), 404, "NAMESPACE_NOT_FOUND")
            assert door.make(namespace="fresh")["namespace"] == "fresh"
            assert success(door.api("GET", "/namespaces/fresh"))["name"] == "fresh"
            results = door.batch([{"namespace": f"n{n % 3}", "delay": "1h", "callbackUrl": URL} for n in range(9)])
            assert {result["status"] for result in results} == {200}
            names = [n["name"] for n in success(door.api("GET", "/namespaces"))["namespaces"]]
            assert names == ["default", "fresh", "n0", "n1", "n2"]


class TestUpdate:
    def test_what_is_left_out_stays(self, door: Durable, style: str) -> None:
        made = door.make(payload={"a": 1}, metadata=2, correlationId="c", callbackHeaders={"A": "b"}, delay="5h")
        later = door.ahead(36_000)
        changes: list[dict[str, Any]] = [
            {"executeAt": later},
            {"payload": None},
            {"payload": [2]},
            {"metadata": {"x": 1}},
            {"callbackUrl": URL + "2"},
            {"callbackMethod": "PATCH"},
            {"callbackHeaders": {}},
            {"correlationId": "d"},
            {"callbackTimeout": "1m"},
            {"responseProtocol": "status"},
            {},
        ]
        expected = made
        for fields in changes:
            changed = success(change(door, style, made, **fields))
            moved = {name: changed[name] for name in ("updatedAt", "fireAt")}
            expected = expected | fields | moved
            assert changed == expected == success(look(door, style, made))
            assert changed["updatedAt"] >= made["updatedAt"] and changed["createdAt"] == made["createdAt"]

    def test_a_moved_timer_fires_at_its_new_time_only(self, door: Durable, receiver: Receiver, style: str) -> None:
        path = f"/moved-{style}"
        made = door.make(receiver.url(path), executeAt=door.ahead(60))
        success(change(door, style, made, delay="2h"))
        door.advance("1h")
        witness = door.run(receiver.url(path + "-witness"))
        assert witness["status"] == "completed" and not receiver.at(path)
        door.advance("1h")
        assert door.final(made)["status"] == "completed" and len(receiver.at(path)) == 1

    def test_the_past(self, door: Durable, style: str) -> None:
        made = door.make()
        failure(change(door, style, made, executeAt=door.ahead(-5)), 400, "INVALID_INPUT", "executeAt")
        assert door.see(made) == made

    def test_nobody(self, door: Durable, style: str) -> None:
        for nobody in ({"namespace": "default", "id": "none"}, {"namespace": "never", "id": "none"}):
            failure(change(door, style, nobody, payload=1), 404, "TIMER_NOT_FOUND")
            failure(look(door, style, nobody), 404, "TIMER_NOT_FOUND")
            failure(remove(door, style, nobody), 404, "TIMER_NOT_FOUND")

    def test_of_an_executing_one(self, door: Durable, executing: Timer, style: str) -> None:
        failure(change(door, style, executing, payload=1), 409, "TIMER_NOT_PENDING")
        failure(remove(door, style, executing), 409, "TIMER_NOT_PENDING")
        assert door.see(executing) == executing

    @pytest.mark.parametrize("status", ["completed", "failed"])
    def test_of_a_finished_one(self, door: Durable, receiver: Receiver, style: str, status: str) -> None:
        reply = Reply(200 if status == "completed" else 500)
        done = door.run(receiver.reply(f"/finished-{style}-{status}", reply), retryPolicy={"maxRetries": 0})
        assert done["status"] == status
        failure(change(door, style, done, executeAt=door.ahead(100)), 409, "TIMER_NOT_PENDING")
        failure(change(door, style, done, payload=1), 409, "TIMER_NOT_PENDING")
        assert door.see(done) == done

    def test_a_changed_correlation_id_is_found(self, door: Durable) -> None:
        made = door.make(correlationId="before it")
        success(door.api("PUT", door.path(made), {"correlationId": "behind it"}))
        assert door.pages("correlationId=before%20it", 5) == []
        assert [timer["id"] for timer in door.pages("correlationId=behind%20it", 5)] == [made["id"]]

    def test_the_race_against_the_firing(self, door: Durable, receiver: Receiver) -> None:
        """A change that won is never fired, one that lost is told so."""
        url = receiver.url("/race")
        items = [{"delay": f"{n}ms", "callbackUrl": url, "payload": n} for n in range(0, 900, 3)]
        timers = [result["timer"] for result in door.batch(items)]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda timer: door.api("PUT", door.path(timer), {"delay": "900h"}), timers))
        assert {answer.status for answer in answers} <= {200, 409}
        lost = [timer for timer, answer in zip(timers, answers, strict=True) if answer.status == 409]
        for timer in lost:
            door.final(timer)
        door.advance("1h")
        door.run(receiver.url("/race-witness"))
        fired = [json.loads(request.body)["payload"] for request in receiver.at("/race")]
        assert sorted(fired) == sorted(timer["payload"] for timer in lost)


class TestDelete:
    def test_of_a_pending_one_it_never_fires(self, door: Durable, receiver: Receiver, style: str) -> None:
        path = f"/deleted-{style}"
        made = door.make(receiver.url(path))
        success(remove(door, style, made), 204)
        failure(look(door, style, made), 404, "TIMER_NOT_FOUND")
        failure(remove(door, style, made), 404, "TIMER_NOT_FOUND")
        door.advance("1h")
        door.run(receiver.url(path + "-witness"))
        assert not receiver.at(path)

    def test_of_a_finished_one(self, door: Durable, receiver: Receiver, style: str) -> None:
        done = door.run(receiver.url(f"/gone-{style}"))
        success(remove(door, style, done), 204)
        failure(look(door, style, done), 404, "TIMER_NOT_FOUND")
        failure(door.api("GET", door.path(done) + "/attempts"), 404, "TIMER_NOT_FOUND")

    def test_the_id_is_free_again(self, door: Durable, style: str) -> None:
        made = door.make(id=f"free-{style}", payload=1)
        success(remove(door, style, made), 204)
        assert door.make(id=f"free-{style}", payload=2)["payload"] == 2


class TestOtherDoor:
    """A timer made through one door is seen through the other."""

    def test_from_the_platform_door(self, door: Durable, receiver: Receiver) -> None:
        id = door.create(receiver.url("/from-platform"), callback_payload={"p": 1}, metadata={"m": 1})
        seen = success(door.api("GET", f"/timers/default/{id}"))
        assert (seen["payload"], seen["metadata"], seen["status"]) == ({"p": 1}, {"m": 1}, "pending")
        assert (seen["responseProtocol"], seen["retryPolicy"]["maxRetries"]) == ("status", 0)
        assert id in [timer["id"] for timer in door.pages("namespace=default&status=pending", 500)]
        moved = success(door.api("PUT", f"/timers/default/{id}", {"executeAt": door.ahead(1800), "payload": {"p": 2}}))
        assert door.get(id)["execute_at"] == moved["executeAt"] and door.get(id)["callback_payload"] == {"p": 2}
        door.advance("30m")
        assert door.finished(id)["status"] == "completed"
        assert [request.body for request in receiver.at("/from-platform")] == [b'{"p": 2}']
        assert door.see(seen)["status"] == "completed"
        success(door.api("DELETE", f"/timers/default/{id}"), 204)
        assert door.request("GET", f"/timers/{id}").status == 404

    def test_to_the_platform_door(self, door: Durable, receiver: Receiver) -> None:
        made = door.make(receiver.url("/to-platform"), payload=[1])
        seen = door.get(made["id"])
        assert (seen["execute_at"], seen["callback_payload"]) == (made["executeAt"], [1])
        listed = door.request("GET", "/timers?limit=200&status=pending").body["data"]["timers"]
        assert made["id"] in [timer["id"] for timer in listed]
        at = printed(door.at(3600))
        assert door.request("PUT", f"/timers/{made['id']}", json={"execute_at": at}).status == 200
        assert door.see(made)["executeAt"] == at
        door.advance("1h")
        assert door.final(made)["status"] == "completed" and door.get(made["id"])["status"] == "completed"
        assert b'"payload":[1]' in receiver.at("/to-platform")[0].body  # the body of the door that made it

    def test_a_cancel_there_is_seen_here_and_can_be_replayed(self, door: Durable, receiver: Receiver) -> None:
        made = door.make(receiver.url("/canceled-there"))
        assert door.request("DELETE", f"/timers/{made['id']}").status == 200
        assert door.see(made)["status"] == "canceled"
        failure(door.api("PUT", door.path(made), {"payload": 1}), 409, "TIMER_NOT_PENDING")
        assert made["id"] in [timer["id"] for timer in door.pages("status=canceled", 100)]
        assert success(door.api("POST", door.path(made) + "/replay"))["status"] == "pending"
        assert door.final(made)["status"] == "completed" and len(receiver.at("/canceled-there")) == 1

    def test_other_namespaces_stay_out_of_the_platform_door(self, door: Durable) -> None:
        made = door.make(namespace="other")
        assert door.request("GET", f"/timers/{made['id']}").status == 404
        total = door.total()
        door.make(namespace="other")
        assert door.total() == total

    def test_ids_that_are_taken_there(self, door: Duetime) -> None:
        assert isinstance(door, Durable)
        id = door.create(URL)
        body = {"id": id, "delay": "1h", "callbackUrl": URL}
        failure(door.api("POST", "/timers", body), 409, "TIMER_CONFLICT")
        until("it is there", lambda: door.get(id))
