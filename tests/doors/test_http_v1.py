"""Create, get, update and delete timers by the HTTP v1 API, by path and by request body."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest

from tests.doors.http_v1 import FIELDS, URL, HttpV1, failure, seconds_between, success
from tests.servers import Duetime, Receiver, Reply, instant, printed, until

STYLES = ["resource", "body"]
Timer = dict[str, Any]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpV1]:
    with HttpV1(tmp_path_factory.mktemp("durable")) as service:
        service.namespace("other")
        yield service
        assert "Traceback" not in service.stderr, service.stderr
        assert service.terminate() == 0


def get_timer(service: HttpV1, style: str, timer: Timer) -> Any:
    if style == "resource":
        return service.api("GET", f"/timers/{timer['namespace']}/{quote(timer['id'], safe='')}")
    return service.api("POST", "/timers/get", {"namespace": timer["namespace"], "timerId": timer["id"]})


def update_timer(service: HttpV1, style: str, timer: Timer, **fields: Any) -> Any:
    if style == "resource":
        return service.api("PUT", f"/timers/{timer['namespace']}/{quote(timer['id'], safe='')}", fields)
    return service.api("POST", "/timers/update", {"namespace": timer["namespace"], "timerId": timer["id"], **fields})


def delete_timer(service: HttpV1, style: str, timer: Timer) -> Any:
    if style == "resource":
        return service.api("DELETE", f"/timers/{timer['namespace']}/{quote(timer['id'], safe='')}")
    return service.api("POST", "/timers/delete", {"namespace": timer["namespace"], "timerId": timer["id"]})


@pytest.fixture(params=STYLES)
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def executing(service: HttpV1, receiver: Receiver) -> Iterator[Timer]:
    """A timer whose receiver responds only when the test ends."""
    path = f"/executing-{uuid.uuid4()}"
    timer = service.make(receiver.reply(path, Reply(hang=True)), delay="0s")
    receiver.wait(path)
    yield service.in_status(timer, "executing")
    receiver.release()
    assert service.final(timer)["status"] == "completed"
    assert len(receiver.at(path)) == 1


class TestCreate:
    @pytest.mark.parametrize("path", ["/timers", "/timers/create"])
    def test_created_timer_has_all_requested_fields(self, service: HttpV1, path: str, style: str) -> None:
        requested = {
            "namespace": "other",
            "id": f"all{path}{style}",
            "executeAt": service.ahead(3600),
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
                "giveUpOn": [410],
            },
            "callbackTimeout": "5s",
            "responseProtocol": "status",
        }
        made = success(service.api("POST", path, requested))
        assert made.keys() >= FIELDS
        assert {name: made[name] for name in requested} == requested
        assert (made["status"], made["attempts"], made["lastError"], made["executedAt"]) == ("pending", 0, None, None)
        assert made["createdAt"] == made["updatedAt"]
        assert abs(instant(made["createdAt"]) - service.now()) < timedelta(minutes=5)
        assert success(get_timer(service, style, made)) == made

    @pytest.mark.parametrize("path", ["/timers", "/timers/create"])
    def test_omitted_fields_get_their_defaults(self, service: HttpV1, path: str) -> None:
        made = success(service.api("POST", path, {"executeAt": service.ahead(3600), "callbackUrl": URL}))
        assert uuid.UUID(made["id"]) and made["namespace"] == "default"
        assert made["retryPolicy"] == {
            "maxRetries": 3,
            "maxRetryAttemptsDuration": "24h",
            "initialInterval": "30s",
            "backoffMultiplier": 2.0,
            "maxInterval": "10m",
            "jitter": True,
            "giveUpOn": [],
        }
        assert (made["callbackMethod"], made["callbackHeaders"], made["callbackTimeout"]) == ("POST", {}, "30s")
        assert made["payload"] is made["metadata"] is made["correlationId"] is made["callbackSubject"] is None
        assert service.make()["id"] != made["id"]

    def test_omitted_fields_of_a_retry_policy_get_their_defaults(self, service: HttpV1) -> None:
        policy = service.make(retryPolicy={"maxRetries": 7})["retryPolicy"]
        assert (policy["maxRetries"], policy["initialInterval"], policy["maxInterval"]) == (7, "30s", "10m")

    def test_older_field_names_are_accepted_and_must_not_contradict(self, service: HttpV1) -> None:
        assert service.make(groupId="other", timerId="names")["namespace"] == "other"
        again = service.make(groupId="other", namespace="other", id="names2", timerId="names2")
        assert (again["namespace"], again["id"]) == ("other", "names2")
        for wrong in ({"groupId": "other", "namespace": "default"}, {"id": "a", "timerId": "b"}):
            answer = service.api("POST", "/timers", {"delay": "1h", "callbackUrl": URL, **wrong})
            failure(answer, 400, "INVALID_INPUT", next(name for name in ("groupId", "timerId") if name in wrong))
        for name in ("groupId", "namespace"):
            assert success(service.api("POST", "/timers/get", {name: "other", "id": "names"}))["id"] == "names"
        assert failure(service.api("POST", "/timers/get", {"timerId": "names"}), 404, "TIMER_NOT_FOUND")
        failure(service.api("POST", "/timers/get", {"namespace": "other"}), 400, "INVALID_INPUT", "timerId")

    @pytest.mark.parametrize("id", ["x" * 255, "a/b", "a b", "ü😀", "..", "%2F", "create", "a?b#c", '"', "'; --"])
    def test_any_printable_id_works_in_paths_and_bodies(self, service: HttpV1, id: str, style: str) -> None:
        made = success(service.api("POST", "/timers/create", {"id": id, "delay": "10h", "callbackUrl": URL}))
        assert made["id"] == id
        assert success(get_timer(service, style, made)) == made
        assert success(update_timer(service, style, made, payload=1))["payload"] == 1
        success(delete_timer(service, style, made), 204)
        failure(get_timer(service, style, made), 404, "TIMER_NOT_FOUND")

    def test_same_id_in_two_namespaces_is_two_timers(self, service: HttpV1) -> None:
        one, two = service.make(id="same", payload=1), service.make(id="same", namespace="other", payload=2)
        assert (service.current(one)["payload"], service.current(two)["payload"]) == (1, 2)
        success(delete_timer(service, "resource", one), 204)
        assert service.current(two) == two

    def test_delay_counts_from_now(self, service: HttpV1) -> None:
        made = service.make(delay="1h30m")
        assert seconds_between(made["createdAt"], made["executeAt"]) == pytest.approx(5400, abs=60)

    def test_zero_delay_fires_at_once(self, service: HttpV1, receiver: Receiver) -> None:
        for path in ("/timers", "/timers/create"):
            body = {"delay": "0s", "callbackUrl": receiver.url(f"/at-once{path}")}
            assert service.final(success(service.api("POST", path, body)))["status"] == "completed"
            assert len(receiver.at(f"/at-once{path}")) == 1

    @pytest.mark.parametrize("path", ["/timers", "/timers/create"])
    @pytest.mark.parametrize("seconds", [0, -1, -1e6])
    def test_execute_at_in_the_past_is_rejected(self, service: HttpV1, path: str, seconds: float) -> None:
        body = {"id": "past", "executeAt": service.ahead(seconds), "callbackUrl": URL}
        failure(service.api("POST", path, body), 400, "INVALID_INPUT", "executeAt")
        failure(service.api("GET", "/timers/default/past"), 404, "TIMER_NOT_FOUND")

    @pytest.mark.parametrize("path", ["/timers", "/timers/create"])
    def test_exactly_one_time_and_a_target_are_required(self, service: HttpV1, path: str) -> None:
        failure(service.api("POST", path, {"callbackUrl": URL}), 400, "INVALID_INPUT", "executeAt")
        failure(service.api("POST", path, {"delay": "1h"}), 400, "INVALID_INPUT", "callbackUrl")
        both = {"delay": "1h", "executeAt": service.ahead(60), "callbackUrl": URL}
        failure(service.api("POST", path, both), 400, "INVALID_INPUT", "delay")

    @pytest.mark.parametrize("path", ["/timers", "/timers/create"])
    def test_unknown_namespace_is_rejected(self, service: HttpV1, path: str) -> None:
        body = {"namespace": "nobody", "delay": "1h", "callbackUrl": URL}
        failure(service.api("POST", path, body), 400, "UNKNOWN_NAMESPACE")
        refused = failure(service.api("GET", "/timers/nobody/x"), 404, "TIMER_NOT_FOUND")
        assert refused["message"] == "timer 'x' not found in namespace 'nobody'"

    @pytest.mark.parametrize("url", ["http://10.0.0.1/", "http://169.254.169.254/latest", "http://[fe80::1]/"])
    def test_error_for_a_private_address_names_callback_url(self, service: HttpV1, url: str) -> None:
        body = {"delay": "1h", "callbackUrl": url}
        failure(service.api("POST", "/timers", body), 400, "INVALID_INPUT", "callbackUrl")

    def test_create_upsert_and_update_reject_private_addresses(self, service: HttpV1) -> None:
        made = service.make()
        for answer in (
            service.api("POST", "/timers", {"delay": "1h", "callbackUrl": "http://10.0.0.1/"}),
            service.api("POST", "/timers/create", {"delay": "1h", "callbackUrl": "http://192.168.1.1/"}),
            service.api("PUT", service.path(made), {"callbackUrl": "http://172.16.0.1/"}),
        ):
            failure(answer, 400, "INVALID_INPUT")
        assert service.current(made) == made

    def test_setting_creates_namespaces_on_first_use(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        with HttpV1(tmp_path_factory.mktemp("auto"), DUETIME_AUTO_NAMESPACES="on") as service:
            failure(service.api("GET", "/timers/fresh/x"), 404, "TIMER_NOT_FOUND")
            failure(service.api("GET", "/namespaces/fresh"), 404, "NAMESPACE_NOT_FOUND")
            assert service.make(namespace="fresh")["namespace"] == "fresh"
            assert success(service.api("GET", "/namespaces/fresh"))["name"] == "fresh"
            results = service.batch([{"namespace": f"n{n % 3}", "delay": "1h", "callbackUrl": URL} for n in range(9)])
            assert {result["status"] for result in results} == {200}
            names = [n["name"] for n in success(service.api("GET", "/namespaces"))["namespaces"]]
            assert names == ["default", "fresh", "n0", "n1", "n2"]


class TestUpdate:
    def test_update_changes_only_the_given_fields(self, service: HttpV1, style: str) -> None:
        made = service.make(payload={"a": 1}, metadata=2, correlationId="c", callbackHeaders={"A": "b"}, delay="5h")
        later = service.ahead(36_000)
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
            changed = success(update_timer(service, style, made, **fields))
            moved = {name: changed[name] for name in ("updatedAt", "fireAt")}
            expected = expected | fields | moved
            assert changed == expected == success(get_timer(service, style, made))
            assert changed["updatedAt"] >= made["updatedAt"] and changed["createdAt"] == made["createdAt"]

    def test_moved_timer_fires_at_its_new_time_only(self, service: HttpV1, receiver: Receiver, style: str) -> None:
        path = f"/moved-{style}"
        made = service.make(receiver.url(path), executeAt=service.ahead(60))
        success(update_timer(service, style, made, delay="2h"))
        service.advance("1h")
        witness = service.run(receiver.url(path + "-witness"))
        assert witness["status"] == "completed" and not receiver.at(path)
        service.advance("1h")
        assert service.final(made)["status"] == "completed" and len(receiver.at(path)) == 1

    def test_move_into_the_past_is_rejected(self, service: HttpV1, style: str) -> None:
        made = service.make()
        failure(update_timer(service, style, made, executeAt=service.ahead(-5)), 400, "INVALID_INPUT", "executeAt")
        assert service.current(made) == made

    def test_unknown_timers_are_not_found(self, service: HttpV1, style: str) -> None:
        for unknown in ({"namespace": "default", "id": "none"}, {"namespace": "never", "id": "none"}):
            failure(update_timer(service, style, unknown, payload=1), 404, "TIMER_NOT_FOUND")
            failure(get_timer(service, style, unknown), 404, "TIMER_NOT_FOUND")
            failure(delete_timer(service, style, unknown), 404, "TIMER_NOT_FOUND")

    def test_executing_timer_can_not_be_updated_or_deleted(self, service: HttpV1, executing: Timer, style: str) -> None:
        failure(update_timer(service, style, executing, payload=1), 409, "TIMER_NOT_PENDING")
        failure(delete_timer(service, style, executing), 409, "TIMER_NOT_PENDING")
        assert service.current(executing) == executing

    @pytest.mark.parametrize("status", ["completed", "failed"])
    def test_finished_timer_can_not_be_updated(
        self, service: HttpV1, receiver: Receiver, style: str, status: str
    ) -> None:
        reply = Reply(200 if status == "completed" else 500)
        done = service.run(receiver.reply(f"/finished-{style}-{status}", reply), retryPolicy={"maxRetries": 0})
        assert done["status"] == status
        failure(update_timer(service, style, done, executeAt=service.ahead(100)), 409, "TIMER_NOT_PENDING")
        failure(update_timer(service, style, done, payload=1), 409, "TIMER_NOT_PENDING")
        assert service.current(done) == done

    def test_list_finds_a_changed_correlation_id(self, service: HttpV1) -> None:
        made = service.make(correlationId="before it")
        success(service.api("PUT", service.path(made), {"correlationId": "behind it"}))
        assert service.pages("correlationId=before%20it", 5) == []
        assert [timer["id"] for timer in service.pages("correlationId=behind%20it", 5)] == [made["id"]]

    def test_update_racing_with_the_firing_either_wins_or_gets_a_conflict(
        self, service: HttpV1, receiver: Receiver
    ) -> None:
        """A timer whose update succeeded does not fire; all others get a 409 and fire once."""
        url = receiver.url("/race")
        items = [{"delay": f"{n}ms", "callbackUrl": url, "payload": n} for n in range(0, 900, 3)]
        timers = [result["timer"] for result in service.batch(items)]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda timer: service.api("PUT", service.path(timer), {"delay": "900h"}), timers))
        assert {answer.status for answer in answers} <= {200, 409}
        lost = [timer for timer, answer in zip(timers, answers, strict=True) if answer.status == 409]
        for timer in lost:
            service.final(timer)
        service.advance("1h")
        service.run(receiver.url("/race-witness"))
        fired = [json.loads(request.body)["payload"] for request in receiver.at("/race")]
        assert sorted(fired) == sorted(timer["payload"] for timer in lost)


class TestDelete:
    def test_deleted_timer_does_not_fire(self, service: HttpV1, receiver: Receiver, style: str) -> None:
        path = f"/deleted-{style}"
        made = service.make(receiver.url(path))
        success(delete_timer(service, style, made), 204)
        failure(get_timer(service, style, made), 404, "TIMER_NOT_FOUND")
        failure(delete_timer(service, style, made), 404, "TIMER_NOT_FOUND")
        service.advance("1h")
        service.run(receiver.url(path + "-witness"))
        assert not receiver.at(path)

    def test_finished_timer_can_be_deleted(self, service: HttpV1, receiver: Receiver, style: str) -> None:
        done = service.run(receiver.url(f"/gone-{style}"))
        success(delete_timer(service, style, done), 204)
        failure(get_timer(service, style, done), 404, "TIMER_NOT_FOUND")
        failure(service.api("GET", service.path(done) + "/attempts"), 404, "TIMER_NOT_FOUND")

    def test_id_of_a_deleted_timer_can_be_used_again(self, service: HttpV1, style: str) -> None:
        made = service.make(id=f"free-{style}", payload=1)
        success(delete_timer(service, style, made), 204)
        assert service.make(id=f"free-{style}", payload=2)["payload"] == 2


class TestPlatformApi:
    """Timers that one API created are visible in the other."""

    def test_timers_of_the_platform_api_can_be_listed_changed_and_deleted(
        self, service: HttpV1, receiver: Receiver
    ) -> None:
        id = service.create(receiver.url("/from-platform"), callback_payload={"p": 1}, metadata={"m": 1})
        seen = success(service.api("GET", f"/timers/default/{id}"))
        assert (seen["payload"], seen["metadata"], seen["status"]) == ({"p": 1}, {"m": 1}, "pending")
        assert (seen["responseProtocol"], seen["retryPolicy"]["maxRetries"]) == ("status", 0)
        assert id in [timer["id"] for timer in service.pages("namespace=default&status=pending", 500)]
        moved = success(
            service.api("PUT", f"/timers/default/{id}", {"executeAt": service.ahead(1800), "payload": {"p": 2}})
        )
        assert service.get(id)["execute_at"] == moved["executeAt"] and service.get(id)["callback_payload"] == {"p": 2}
        service.advance("30m")
        assert service.finished(id)["status"] == "completed"
        assert [request.body for request in receiver.at("/from-platform")] == [b'{"p": 2}']
        assert service.current(seen)["status"] == "completed"
        success(service.api("DELETE", f"/timers/default/{id}"), 204)
        assert service.request("GET", f"/timers/{id}").status == 404

    def test_platform_api_shows_lists_and_moves_timers(self, service: HttpV1, receiver: Receiver) -> None:
        made = service.make(receiver.url("/to-platform"), payload=[1])
        seen = service.get(made["id"])
        assert (seen["execute_at"], seen["callback_payload"]) == (made["executeAt"], [1])
        listed = service.request("GET", "/timers?limit=200&status=pending").body["data"]["timers"]
        assert made["id"] in [timer["id"] for timer in listed]
        at = printed(service.at(3600))
        assert service.request("PUT", f"/timers/{made['id']}", json={"execute_at": at}).status == 200
        assert service.current(made)["executeAt"] == at
        service.advance("1h")
        assert service.final(made)["status"] == "completed" and service.get(made["id"])["status"] == "completed"
        assert b'"payload":[1]' in receiver.at("/to-platform")[0].body  # the body format of the API that created it

    def test_timer_canceled_by_the_platform_api_can_be_replayed(self, service: HttpV1, receiver: Receiver) -> None:
        made = service.make(receiver.url("/canceled-there"))
        assert service.request("DELETE", f"/timers/{made['id']}").status == 200
        assert service.current(made)["status"] == "canceled"
        failure(service.api("PUT", service.path(made), {"payload": 1}), 409, "TIMER_NOT_PENDING")
        assert made["id"] in [timer["id"] for timer in service.pages("status=canceled", 100)]
        assert success(service.api("POST", service.path(made) + "/replay"))["status"] == "pending"
        assert service.final(made)["status"] == "completed" and len(receiver.at("/canceled-there")) == 1

    def test_platform_api_does_not_show_other_namespaces(self, service: HttpV1) -> None:
        made = service.make(namespace="other")
        assert service.request("GET", f"/timers/{made['id']}").status == 404
        total = service.total()
        service.make(namespace="other")
        assert service.total() == total

    def test_create_with_the_id_of_a_platform_timer_is_a_conflict(self, service: Duetime) -> None:
        assert isinstance(service, HttpV1)
        id = service.create(URL)
        body = {"id": id, "delay": "1h", "callbackUrl": URL}
        failure(service.api("POST", "/timers", body), 409, "TIMER_CONFLICT")
        until("it is there", lambda: service.get(id))
