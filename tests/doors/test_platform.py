"""The platform door, endpoint by endpoint, as its contract says it: statuses, codes, messages and exact fields."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.doors.shape import CREATED, FULL, NOBODY, UPDATED, URL, refused, success
from tests.servers import Duetime, Receiver, Reply, instant, until, unused_port


class TestChecklist:
    """The manual checklist of the platform's document, in its order."""

    def test_1_create(self, service: Duetime) -> None:
        at = service.ahead(3600)
        body = {
            "execute_at": at,
            "callback_url": URL,
            "callback_method": "POST",
            "callback_payload": {"message": "Timer triggered!", "timestamp": at},
        }
        timer = success(service.request("POST", "/timers", json=body), 201, "timer created successfully")
        assert set(timer) == CREATED
        assert uuid.UUID(timer["id"]).version == 4 and str(uuid.UUID(timer["id"])) == timer["id"]
        assert timer["status"] == "pending" and timer["executed_at"] is None
        assert timer["execute_at"] == at and timer["callback_url"] == URL and timer["callback_method"] == "POST"
        assert instant(timer["created_at"]) <= service.now()

    def test_2_get(self, service: Duetime) -> None:
        at = service.ahead(3600)
        body = {
            "execute_at": at,
            "callback_url": URL,
            "callback_method": "PATCH",
            "callback_headers": {"Authorization": "Bearer token123", "X-Custom-Header": "value"},
            "callback_payload": {"event": "timer_triggered", "user_id": "user123"},
            "metadata": {"client_ref": "order-456"},
        }
        made = service.request("POST", "/timers", json=body).body["data"]
        timer = success(service.request("GET", f"/timers/{made['id']}"), 200, "success")
        assert set(timer) == FULL
        assert timer == body | {
            "id": made["id"],
            "created_at": made["created_at"],
            "updated_at": made["created_at"],
            "status": "pending",
            "last_error": None,
            "executed_at": None,
        }

    def test_3_list(self, service: Duetime) -> None:
        id = service.create(URL, seconds=3600)
        page = success(service.request("GET", "/timers?status=pending&limit=10"), 200, "success")
        assert set(page) == {"timers", "total", "limit", "offset"}
        assert (page["limit"], page["offset"]) == (10, 0) and page["total"] >= len(page["timers"]) >= 1
        assert all(set(timer) == CREATED and timer["status"] == "pending" for timer in page["timers"])
        assert page["timers"][0]["id"] == id  # the newest comes first

    def test_4_update(self, service: Duetime) -> None:
        id = service.create(URL, seconds=3600)
        later = service.ahead(7200)
        timer = success(
            service.request("PUT", f"/timers/{id}", json={"execute_at": later}), 200, "timer updated successfully"
        )
        assert set(timer) == UPDATED
        assert (timer["id"], timer["execute_at"], timer["status"]) == (id, later, "pending")
        assert instant(timer["updated_at"]) >= instant(timer["created_at"])
        assert service.get(id)["execute_at"] == later

    def test_5_cancel(self, service: Duetime) -> None:
        id = service.create(URL, seconds=3600)
        data = success(service.request("DELETE", f"/timers/{id}"), 200, "timer canceled successfully")
        assert data == {"id": id, "status": "canceled"}
        assert service.get(id)["status"] == "canceled"  # it stays in the store

    def test_6_health(self, service: Duetime) -> None:
        data = success(service.request("GET", "/health", headers={}), 200, "healthy")
        assert set(data) == {"status", "database", "timestamp"}
        assert (data["status"], data["database"]) == ("up", "connected")
        assert instant(data["timestamp"]) <= service.now()

    def test_7_wrong_key(self, service: Duetime) -> None:
        refused(service.request("GET", "/timers", headers={"X-API-Key": "wrong-key"}), 401, 4, "^unauthorized$")

    def test_8_execution(self, service: Duetime, receiver: Receiver) -> None:
        id = service.create(receiver.url("/checklist-8"), callback_payload={"test": "execution"})
        assert service.get(id)["status"] == "pending"
        service.advance("15s")
        timer = service.finished(id)
        assert timer["status"] == "completed" and timer["last_error"] is None
        assert instant(timer["executed_at"]) >= instant(timer["execute_at"])
        [request] = receiver.at("/checklist-8")
        assert request.method == "POST" and request.body == b'{"test": "execution"}'

    def test_9_failure_on_a_laptop(self, alone: Callable[..., Duetime]) -> None:
        """As in the document: nothing listens there. A laptop is a service without an API_KEY."""
        laptop = alone(virtual_clock=True, bare=True)
        with unused_port() as port:
            timer = laptop.fired(f"https://localhost:{port}/nonexistent")
        assert timer["status"] == "failed" and timer["last_error"] and timer["executed_at"]


class TestCreate:
    def test_the_least_that_a_timer_needs(self, service: Duetime) -> None:
        timer = service.get(service.create(URL, seconds=60))
        assert timer["callback_method"] == "POST"
        for field in ("callback_headers", "callback_payload", "metadata", "last_error", "executed_at"):
            assert timer[field] is None

    @pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
    def test_methods(self, service: Duetime, receiver: Receiver, method: str) -> None:
        timer = service.fired(receiver.url(f"/method-{method}"), callback_method=method)
        assert timer["callback_method"] == method
        assert [request.method for request in receiver.at(f"/method-{method}")] == [method]

    def test_null_is_as_good_as_absent_except_in_a_payload(self, service: Duetime) -> None:
        nothing = dict.fromkeys(("callback_method", "callback_headers", "metadata", "retry_policy", "idempotency_key"))
        timer = service.get(service.create(URL, seconds=60, **nothing))
        assert timer["callback_method"] == "POST" and timer["callback_headers"] is None and timer["metadata"] is None

    @pytest.mark.parametrize("value", [0, "text", True, [1, {"a": None}], {}, {"deep": {"er": [[]]}}, 1.5, "ü€😀"])
    def test_payload_and_metadata_are_any_json(self, service: Duetime, value: Any) -> None:
        timer = service.get(service.create(URL, seconds=60, callback_payload=value, metadata=value))
        assert (timer["callback_payload"], timer["metadata"]) == (value, value)

    @pytest.mark.parametrize(
        ("given", "stored"),
        [
            ("2999-01-02T03:04:05Z", "2999-01-02T03:04:05.000Z"),
            ("2999-01-02T03:04:05.6Z", "2999-01-02T03:04:05.600Z"),
            ("2999-01-02T05:34:05.678+02:30", "2999-01-02T03:04:05.678Z"),
            ("2999-01-01T23:04:05-04:00", "2999-01-02T03:04:05.000Z"),
            ("2999-01-02T03:04:05.123001Z", "2999-01-02T03:04:05.124Z"),  # never early: rounded up
            ("2999-01-02t03:04:05z", "2999-01-02T03:04:05.000Z"),
            ("9999-12-31T23:59:59.999Z", "9999-12-31T23:59:59.999Z"),
        ],
    )
    def test_times_are_kept_as_utc_milliseconds(self, service: Duetime, given: str, stored: str) -> None:
        answer = service.request("POST", "/timers", json={"execute_at": given, "callback_url": URL})
        assert success(answer, 201, "timer created successfully")["execute_at"] == stored

    def test_five_seconds_ahead_is_enough(self, service: Duetime) -> None:
        def accepted() -> bool:  # the request itself takes some of the five seconds, on a bad day too much
            body = {"execute_at": service.ahead(5.1), "callback_url": URL}
            return service.request("POST", "/timers", json=body).status == 201

        until("5.1 s ahead is accepted", accepted)

    @pytest.mark.parametrize("seconds", [4.9, 1, 0, -1, -3600])
    def test_less_than_five_seconds_ahead_is_not(self, service: Duetime, seconds: float) -> None:
        answer = service.request("POST", "/timers", json={"execute_at": service.ahead(seconds), "callback_url": URL})
        refused(answer, 400, 2, "^execute_at must be in the future")

    @pytest.mark.parametrize("field", ["execute_at", "callback_url"])
    @pytest.mark.parametrize("null", [False, True])
    def test_what_is_required(self, service: Duetime, field: str, null: bool) -> None:
        body: dict[str, Any] = {"execute_at": "2999-01-01T00:00:00Z", "callback_url": URL}
        if null:
            body[field] = None
        else:
            del body[field]
        refused(service.request("POST", "/timers", json=body), 400, 2, f"^{field} is required")

    def test_a_content_type_is_not_needed(self, service: Duetime) -> None:
        body = b'{"execute_at": "2999-01-01T00:00:00Z", "callback_url": "https://example.com/"}'
        answer = service.request("POST", "/timers", body=body, headers={"X-API-Key": service.key or ""})
        success(answer, 201, "timer created successfully")

    def test_fields_that_nobody_knows_are_ignored(self, service: Duetime) -> None:
        id = service.create(URL, seconds=60, id=NOBODY, status="completed", created_at="1999-01-01T00:00:00Z", x=[1])
        timer = service.get(id)
        assert id != NOBODY and timer["status"] == "pending" and set(timer) == FULL

    def test_a_nats_callback_needs_a_broker(self, service: Duetime) -> None:
        before = service.total()
        body = {"execute_at": service.ahead(60), "callback": {"type": "nats", "topic": "orders.due", "headers": {}}}
        refused(service.request("POST", "/timers", json=body), 400, 2, r"^callback needs a broker.*TIMER_BROKER_URL")
        refused(
            service.request("POST", "/timers", json=body | {"callback_url": URL}), 400, 2, r"^callback must not come"
        )
        body["callback"] = {"type": "smoke-signal"}
        refused(service.request("POST", "/timers", json=body), 400, 2, r"^callback\.type")
        assert service.total() == before


class TestGet:
    def test_nobody(self, service: Duetime) -> None:
        refused(service.request("GET", f"/timers/{NOBODY}"), 404, 3, "^timer not found$")

    def test_an_id_in_capitals_is_the_same_id(self, service: Duetime) -> None:
        id = service.create(URL, seconds=60)
        assert service.get(id.upper())["id"] == id

    @pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
    @pytest.mark.parametrize("id", ["1", "not-a-uuid", NOBODY[:-1], NOBODY + "0", NOBODY.replace("-", ""), "%00", "é"])
    def test_an_id_that_is_no_uuid(self, service: Duetime, method: str, id: str) -> None:
        path = "/timers/" + id.encode().decode("latin-1").replace("Ã©", "%C3%A9")
        refused(service.request(method, path, json={}), 400, 2, "^id must be a UUID")


class TestStates:
    """Pending, executing, completed or failed: seen from outside while the receiver keeps the callback waiting."""

    @pytest.mark.parametrize(("status", "becomes"), [(200, "completed"), (500, "failed")])
    def test_the_way_of_a_timer(self, service: Duetime, receiver: Receiver, status: int, becomes: str) -> None:
        path = f"/way-{status}"
        id = service.create(receiver.reply(path, Reply(status, hang=True)))
        seen = [service.get(id)]
        service.advance()
        receiver.wait(path)
        seen.append(service.get(id))
        assert id in {
            timer["id"] for timer in service.request("GET", "/timers?status=executing").body["data"]["timers"]
        }
        receiver.release()
        seen.append(service.finished(id))
        assert [timer["status"] for timer in seen] == ["pending", "executing", becomes]
        assert [timer["executed_at"] is None for timer in seen] == [True, True, False]
        stamps = [instant(timer["updated_at"]) for timer in seen]
        assert stamps == sorted(stamps) and stamps[0] < stamps[2]
        assert len(receiver.at(path)) == 1

    def test_a_canceled_timer_is_not_executed(self, service: Duetime, receiver: Receiver) -> None:
        canceled = service.create(receiver.url("/not-executed"), seconds=8)
        service.request("DELETE", f"/timers/{canceled}")
        service.fired(receiver.url("/executed-instead"))
        assert receiver.at("/executed-instead") and not receiver.at("/not-executed")
        assert service.get(canceled)["executed_at"] is None

    def test_a_moved_timer_is_executed_at_its_new_time_only(self, service: Duetime, receiver: Receiver) -> None:
        id = service.create(receiver.url("/moved"), seconds=8)
        later = service.ahead(3600)
        service.request("PUT", f"/timers/{id}", json={"execute_at": later})
        service.fired(receiver.url("/moved-other"))
        assert not receiver.at("/moved")
        service.advance("1h")
        assert service.finished(id)["status"] == "completed"
        assert len(receiver.at("/moved")) == 1

    def test_timers_of_a_service_that_was_away_fire_when_it_is_back(
        self, alone: Callable[..., Duetime], receiver: Receiver
    ) -> None:
        service = alone(virtual_clock=True)
        kept = [service.create(receiver.url("/away"), seconds=8 + n / 100, callback_payload=n) for n in range(5)]
        assert service.terminate() == 0
        service.start()
        service.advance("3d")
        assert {service.finished(id)["status"] for id in kept} == {"completed"}
        assert sorted(request.body for request in receiver.at("/away")) == [b"0", b"1", b"2", b"3", b"4"]
