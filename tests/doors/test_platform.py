"""The platform API, endpoint by endpoint: statuses, codes, messages and exact fields."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.doors.platform import CREATED, FULL, UNKNOWN_ID, UPDATED, URL, refused, success
from tests.servers import DUE_SECONDS, Duetime, Receiver, Reply, instant, until, unused_port


class TestChecklist:
    """The manual checklist of the platform API's document, in its order."""

    def test_1_create_returns_the_timer(self, service: Duetime) -> None:
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

    def test_2_get_returns_all_fields(self, service: Duetime) -> None:
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

    def test_3_list_returns_a_page_newest_first(self, service: Duetime) -> None:
        id = service.create(URL, seconds=3600)
        page = success(service.request("GET", "/timers?status=pending&limit=10"), 200, "success")
        assert set(page) == {"timers", "total", "limit", "offset"}
        assert (page["limit"], page["offset"]) == (10, 0) and page["total"] >= len(page["timers"]) >= 1
        assert all(set(timer) == CREATED and timer["status"] == "pending" for timer in page["timers"])
        assert page["timers"][0]["id"] == id  # the newest comes first

    def test_4_update_moves_the_timer(self, service: Duetime) -> None:
        id = service.create(URL, seconds=3600)
        later = service.ahead(7200)
        timer = success(
            service.request("PUT", f"/timers/{id}", json={"execute_at": later}), 200, "timer updated successfully"
        )
        assert set(timer) == UPDATED
        assert (timer["id"], timer["execute_at"], timer["status"]) == (id, later, "pending")
        assert instant(timer["updated_at"]) >= instant(timer["created_at"])
        assert service.get(id)["execute_at"] == later

    def test_5_canceled_timer_is_kept(self, service: Duetime) -> None:
        id = service.create(URL, seconds=3600)
        data = success(service.request("DELETE", f"/timers/{id}"), 200, "timer canceled successfully")
        assert data == {"id": id, "status": "canceled"}
        assert service.get(id)["status"] == "canceled"

    def test_6_health_needs_no_key(self, service: Duetime) -> None:
        assert service.request("GET", "/healthz?probe=1", headers={}).body["message"] == "healthy"
        data = success(service.request("GET", "/health", headers={}), 200, "healthy")
        assert set(data) == {"status", "database", "timestamp"}
        assert (data["status"], data["database"]) == ("up", "connected")
        assert instant(data["timestamp"]) <= service.now()

    def test_7_wrong_key_is_rejected(self, service: Duetime) -> None:
        refused(service.request("GET", "/timers", headers={"X-API-Key": "wrong-key"}), 401, 4, "^unauthorized: ")

    def test_8_due_timer_is_executed(self, service: Duetime, receiver: Receiver) -> None:
        id = service.create(receiver.url("/checklist-8"), callback_payload={"test": "execution"})
        assert service.get(id)["status"] == "pending"
        service.advance("15s")
        timer = service.finished(id)
        assert timer["status"] == "completed" and timer["last_error"] is None
        assert instant(timer["executed_at"]) >= instant(timer["execute_at"])
        [request] = receiver.at("/checklist-8")
        assert request.method == "POST" and request.body == b'{"test": "execution"}'

    def test_9_refused_connection_fails_the_timer(self, start_service: Callable[..., Duetime]) -> None:
        """Without ``API_KEY``, as on a laptop, loopback addresses are allowed."""
        service = start_service(virtual_clock=True, bare=True)
        with unused_port() as port:
            timer = service.fired(f"https://localhost:{port}/nonexistent")
        assert timer["status"] == "failed" and timer["last_error"] and timer["executed_at"]


class TestCreate:
    def test_omitted_fields_get_their_defaults(self, service: Duetime) -> None:
        timer = service.get(service.create(URL, seconds=60))
        assert timer["callback_method"] == "POST"
        for field in ("callback_headers", "callback_payload", "metadata", "last_error", "executed_at"):
            assert timer[field] is None

    @pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
    def test_callback_uses_the_method(self, service: Duetime, receiver: Receiver, method: str) -> None:
        timer = service.fired(receiver.url(f"/method-{method}"), callback_method=method)
        assert timer["callback_method"] == method
        assert [request.method for request in receiver.at(f"/method-{method}")] == [method]

    def test_null_fields_get_their_defaults(self, service: Duetime) -> None:
        nothing = dict.fromkeys(("callback_method", "callback_headers", "metadata", "retry_policy", "idempotency_key"))
        timer = service.get(service.create(URL, seconds=60, **nothing))
        assert timer["callback_method"] == "POST" and timer["callback_headers"] is None and timer["metadata"] is None

    @pytest.mark.parametrize("value", [0, "text", True, [1, {"a": None}], {}, {"deep": {"er": [[]]}}, 1.5, "ü€😀"])
    def test_payload_and_metadata_can_be_any_json(self, service: Duetime, value: Any) -> None:
        timer = service.get(service.create(URL, seconds=60, callback_payload=value, metadata=value))
        assert (timer["callback_payload"], timer["metadata"]) == (value, value)

    @pytest.mark.parametrize(
        ("given", "stored"),
        [
            ("2999-01-02T03:04:05Z", "2999-01-02T03:04:05.000Z"),
            ("2999-01-02T03:04:05.6Z", "2999-01-02T03:04:05.600Z"),
            ("2999-01-02T05:34:05.678+02:30", "2999-01-02T03:04:05.678Z"),
            ("2999-01-01T23:04:05-04:00", "2999-01-02T03:04:05.000Z"),
            ("2999-01-02T03:04:05.123001Z", "2999-01-02T03:04:05.124Z"),  # rounded up, so that it never fires early
            ("2999-01-02t03:04:05z", "2999-01-02T03:04:05.000Z"),
            ("9999-12-31T23:59:59.999Z", "9999-12-31T23:59:59.999Z"),
        ],
    )
    def test_times_are_stored_in_utc_and_rounded_up_to_milliseconds(
        self, service: Duetime, given: str, stored: str
    ) -> None:
        answer = service.request("POST", "/timers", json={"execute_at": given, "callback_url": URL})
        assert success(answer, 201, "timer created successfully")["execute_at"] == stored

    def test_execute_at_just_over_five_seconds_ahead_is_accepted(self, service: Duetime) -> None:
        def accepted() -> bool:  # repeated, because a slow request may arrive too late
            body = {"execute_at": service.ahead(5.1), "callback_url": URL}
            return service.request("POST", "/timers", json=body).status == 201

        until("5.1 s ahead is accepted", accepted)

    @pytest.mark.parametrize("seconds", [4.9, 1, 0, -1, -3600])
    def test_execute_at_less_than_five_seconds_ahead_is_rejected(self, service: Duetime, seconds: float) -> None:
        answer = service.request("POST", "/timers", json={"execute_at": service.ahead(seconds), "callback_url": URL})
        refused(answer, 400, 2, "^execute_at must be in the future")

    @pytest.mark.parametrize("field", ["execute_at", "callback_url"])
    @pytest.mark.parametrize("null", [False, True])
    def test_execute_at_and_callback_url_are_required(self, service: Duetime, field: str, null: bool) -> None:
        body: dict[str, Any] = {"execute_at": "2999-01-01T00:00:00Z", "callback_url": URL}
        if null:
            body[field] = None
        else:
            del body[field]
        refused(service.request("POST", "/timers", json=body), 400, 2, f"^{field} is required")

    def test_content_type_is_not_needed(self, service: Duetime) -> None:
        body = b'{"execute_at": "2999-01-01T00:00:00Z", "callback_url": "https://example.com/"}'
        answer = service.request("POST", "/timers", body=body, headers={"X-API-Key": service.key or ""})
        success(answer, 201, "timer created successfully")

    @pytest.mark.parametrize("field", ["id", "status", "created_at", "callback_paylod"])
    def test_unknown_fields_are_rejected(self, service: Duetime, field: str) -> None:
        before = service.total()
        body = {"execute_at": service.ahead(60), "callback_url": URL, field: UNKNOWN_ID}
        refused(service.request("POST", "/timers", json=body), 400, 2, f"^{field} is not a known field")
        assert service.total() == before

    def test_location_is_sent_only_for_a_new_timer(self, service: Duetime) -> None:
        body = {"execute_at": service.ahead(60), "callback_url": URL, "idempotency_key": str(uuid.uuid4())}
        first, again = (service.request("POST", "/timers", json=body) for _ in range(2))
        id = first.body["data"]["id"]
        assert (first.status, first.headers["location"]) == (201, f"/timers/{id}")
        assert service.request("GET", first.headers["location"]).body["data"]["id"] == id
        assert again.status == 200 and "location" not in again.headers

    def test_http_callback_object_equals_the_flat_fields(self, service: Duetime, receiver: Receiver) -> None:
        url, headers = receiver.url("/callback-object"), {"X-Own": "y"}
        callback = {"type": "http", "url": url, "method": "PUT", "headers": headers, "payload": {"a": 1}}
        body = {"execute_at": service.ahead(DUE_SECONDS), "callback": callback, "idempotency_key": str(uuid.uuid4())}
        made = success(service.request("POST", "/timers", json=body), 201, "timer created successfully")
        flat = {f"callback_{name}": value for name, value in callback.items() if name != "type"}
        same = {name: value for name, value in body.items() if name != "callback"} | flat
        assert service.request("POST", "/timers", json=same).body["data"]["id"] == made["id"]
        timer = service.get(made["id"])
        assert set(timer) == FULL and {name: timer[name] for name in flat} == flat
        service.advance()
        assert service.finished(made["id"])["status"] == "completed"
        [request] = receiver.at("/callback-object")
        assert (request.method, request.body) == ("PUT", b'{"a": 1}') and request.headers["x-own"] == "y"

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"callback": {"type": "http"}}, r"^callback\.url is required$"),
            ({"callback": {"type": "http", "url": "x"}}, r"^callback\.url must be an absolute"),
            (
                {"callback": {"type": "http", "url": URL, "method": "GET"}},
                r'^callback\.method must be one of PATCH, POST, PUT, not "GET"$',
            ),
            ({"callback": {"type": "http", "url": URL, "headers": {"Host": "a"}}}, r"^callback\.headers must not set"),
            (
                {"callback": {"type": "http", "url": URL, "topic": "a"}},
                r"^callback\.topic is not a known field for type http; known: type, url, method, headers, payload$",
            ),
            (
                {"callback": {"type": "http", "url": URL}, "callback_url": URL},
                "^callback can.t be combined with callback_url",
            ),
            ({"callback": {"type": "http", "url": URL}, "callback_headers": {}}, "^callback can.t be combined with"),
            (
                {"callback": {"type": "http", "url": URL, "payload": None}, "callback_payload": 1},
                r"^callback\.payload can.t be combined with callback_payload$",
            ),
            (
                {"callback": {"type": "http", "url": URL}, "callback_payload": None},
                r"^callback can.t be combined with callback_payload: give it as callback\.payload$",
            ),
            ({"callback": {"type": "http", "url": URL}, "callback_method": "PUT"}, "^callback can.t be combined with"),
            (
                {"callback": {"type": "nats", "topic": "a", "url": URL}},
                r"^callback\.url is not a known field for type nats; known: type, topic, key, headers, payload$",
            ),
            ({"callback": {"type": "nats"}}, r"^callback\.topic is required$"),
            ({"callback": {"type": "nats", "topic": "a", "key": ""}}, r"^callback\.key must be"),
            ({"callback": {"type": "nats", "topic": "a", "key": "b c"}}, r"^callback\.key must be"),
            ({"callback": {"type": "nats", "topic": "a", "key": "b.*"}}, r"^callback\.key must be"),
            ({"callback": {"type": "nats", "topic": "a", "key": ">"}}, r"^callback\.key must be"),
            ({"callback": {"type": "nats", "topic": "a", "key": "b" * 254}}, r"^callback\.key must be"),
            ({"callback": {"type": "nats", "topic": "a.", "key": "b"}}, r"^callback\.topic must be"),
            ({"callback": {"type": "nats", "topic": "$JS", "key": "b"}}, r"^callback\.topic must not be"),
        ],
    )
    def test_invalid_callback_is_rejected(self, service: Duetime, fields: dict[str, Any], message: str) -> None:
        refused(service.request("POST", "/timers", json={"execute_at": service.ahead(60), **fields}), 400, 2, message)

    def test_nats_callback_needs_a_broker(self, service: Duetime) -> None:
        before = service.total()
        body = {"execute_at": service.ahead(60), "callback": {"type": "nats", "topic": "orders.due", "headers": {}}}
        refused(
            service.request("POST", "/timers", json=body), 400, 2, r"^callback\.topic needs a broker.*TIMER_BROKER_URL"
        )
        refused(
            service.request("POST", "/timers", json=body | {"callback_url": URL}),
            400,
            2,
            r"^callback can.t be combined",
        )
        body["callback"] = {"type": "smoke-signal"}
        refused(
            service.request("POST", "/timers", json=body),
            400,
            2,
            r"^callback\.type must be one of http, nats, not \"smoke-signal\"$",
        )
        assert service.total() == before


class TestGet:
    def test_unknown_timer_is_not_found(self, service: Duetime) -> None:
        refused(service.request("GET", f"/timers/{UNKNOWN_ID}"), 404, 3, "^timer not found$")

    def test_ids_are_case_insensitive(self, service: Duetime) -> None:
        id = service.create(URL, seconds=60)
        assert service.get(id.upper())["id"] == id

    @pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
    @pytest.mark.parametrize(
        "id", ["1", "not-a-uuid", UNKNOWN_ID[:-1], UNKNOWN_ID + "0", UNKNOWN_ID.replace("-", ""), "%00", "é"]
    )
    def test_id_that_is_no_uuid_is_rejected(self, service: Duetime, method: str, id: str) -> None:
        path = "/timers/" + id.encode().decode("latin-1").replace("Ã©", "%C3%A9")
        refused(service.request(method, path, json={}), 400, 2, "^id must be a UUID")


class TestStatuses:
    @pytest.mark.parametrize(("status", "becomes"), [(200, "completed"), (500, "failed")])
    def test_timer_goes_from_pending_over_executing_to_its_outcome(
        self, service: Duetime, receiver: Receiver, status: int, becomes: str
    ) -> None:
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

    def test_canceled_timer_is_not_executed(self, service: Duetime, receiver: Receiver) -> None:
        canceled = service.create(receiver.url("/not-executed"), seconds=8)
        service.request("DELETE", f"/timers/{canceled}")
        service.fired(receiver.url("/executed-instead"))
        assert receiver.at("/executed-instead") and not receiver.at("/not-executed")
        assert service.get(canceled)["executed_at"] is None

    def test_moved_timer_is_executed_at_its_new_time_only(self, service: Duetime, receiver: Receiver) -> None:
        id = service.create(receiver.url("/moved"), seconds=8)
        later = service.ahead(3600)
        service.request("PUT", f"/timers/{id}", json={"execute_at": later})
        service.fired(receiver.url("/moved-other"))
        assert not receiver.at("/moved")
        service.advance("1h")
        assert service.finished(id)["status"] == "completed"
        assert len(receiver.at("/moved")) == 1

    def test_timers_that_fell_due_while_the_service_was_stopped_fire_at_its_start(
        self, start_service: Callable[..., Duetime], receiver: Receiver
    ) -> None:
        service = start_service(virtual_clock=True)
        kept = [service.create(receiver.url("/away"), seconds=8 + n / 100, callback_payload=n) for n in range(5)]
        assert service.terminate() == 0
        service.start()
        service.advance("3d")
        assert {service.finished(id)["status"] for id in kept} == {"completed"}
        assert sorted(request.body for request in receiver.at("/away")) == [b"0", b"1", b"2", b"3", b"4"]
