"""Update and cancel in the platform API: only the given fields change, and only while the timer is pending."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.doors.platform import UNKNOWN_ID, UPDATED, URL, refused, success
from tests.servers import Duetime, Receiver, Reply, instant, until

WHOLE: dict[str, Any] = {
    "callback_method": "PUT",
    "callback_headers": {"X-One": "1"},
    "callback_payload": {"n": 1},
    "metadata": {"m": 1},
}
CHANGES: list[tuple[str, Any]] = [
    ("execute_at", "2999-01-01T00:00:00.000Z"),
    ("callback_url", "http://127.0.0.1:10/other?a=b"),
    ("callback_method", "PATCH"),
    ("callback_headers", {"X-Two": "2"}),
    ("callback_headers", {}),
    ("callback_payload", [1, 2]),
    ("callback_payload", 0),
    ("metadata", "text"),
]


def update(service: Duetime, id: str, /, **fields: Any) -> dict[str, Any]:
    answer = service.request("PUT", f"/timers/{id}", json=fields)
    timer: dict[str, Any] = success(answer, 200, "timer updated successfully")
    assert set(timer) == UPDATED
    return timer


class TestUpdate:
    @pytest.mark.parametrize(("field", "value"), CHANGES)
    def test_update_changes_only_the_given_field(self, service: Duetime, field: str, value: Any) -> None:
        id = service.create(URL, seconds=3600, **WHOLE)
        before = service.get(id)
        answer = update(service, id, **{field: value})
        after = service.get(id)
        assert {name for name in after if after[name] != before[name]} <= {field, "updated_at"}
        assert after[field] == (value or None if field == "callback_headers" else value)
        assert instant(after["updated_at"]) >= instant(before["updated_at"])
        assert {name: after[name] for name in answer} == answer

    def test_callback_uses_all_changed_fields(self, service: Duetime, receiver: Receiver) -> None:
        id = service.create(URL, seconds=3600, **WHOLE)
        update(
            service,
            id,
            execute_at=service.ahead(10),
            callback_url=receiver.url("/all-changed"),
            callback_method="PATCH",
            callback_headers={"X-Two": "2"},
            callback_payload="new",
            metadata=None,
        )
        service.advance()
        assert service.finished(id)["status"] == "completed"
        [request] = receiver.at("/all-changed")
        assert (request.method, request.body, request.headers["x-two"]) == ("PATCH", b'"new"', "2")
        assert "x-one" not in request.headers

    def test_empty_update_changes_nothing(self, service: Duetime) -> None:
        id = service.create(URL, seconds=3600, **WHOLE)
        before = service.get(id)
        update(service, id)
        after = service.get(id)
        assert {**after, "updated_at": None} == {**before, "updated_at": None}

    def test_null_changes_only_the_payload(self, service: Duetime, receiver: Receiver) -> None:
        id = service.create(receiver.url("/nulled"), **WHOLE)
        before = service.get(id)
        nulls = dict.fromkeys(("execute_at", "callback_url", "callback_method", "callback_headers", "retry_policy"))
        update(service, id, **nulls)
        after = service.get(id)
        assert {**after, "updated_at": None} == {**before, "updated_at": None}
        update(service, id, callback_payload=None)
        service.advance()
        service.finished(id)
        assert [request.body for request in receiver.at("/nulled")] == [b"null"]

    @pytest.mark.parametrize("field", ["id", "created_at", "status", "last_error", "idempotency_key"])
    def test_fields_that_can_not_be_updated_are_rejected(self, service: Duetime, field: str) -> None:
        id = service.create(URL, seconds=3600)
        before = service.get(id)
        answer = service.request("PUT", f"/timers/{id}", json={field: UNKNOWN_ID, "callback_payload": 1})
        refused(answer, 400, 2, f"^{field} is not a known field")
        assert service.get(id) == before

    def test_callback_object_changes_only_its_fields(self, service: Duetime) -> None:
        id = service.create(URL, seconds=3600, callback_headers={"A": "b"}, callback_payload={"a": 1})
        before = service.get(id)
        update(service, id, callback={"type": "http", "method": "PUT"})
        update(service, id, callback={"type": "http", "payload": None})
        changed = {"callback_method": "PUT", "callback_payload": None, "updated_at": None}
        assert {**service.get(id), "updated_at": None} == before | changed

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("execute_at", "1999-01-01T00:00:00Z", "^execute_at must be in the future"),
            ("execute_at", "2999-01-01T00:00:00", "^execute_at needs an offset"),
            ("execute_at", 5, "^execute_at must be a string"),
            ("callback_url", "ftp://127.0.0.1/", "^callback_url must be an absolute"),
            ("callback_url", "", "^callback_url"),
            ("callback_method", "GET", '^callback_method must be one of PATCH, POST, PUT, not "GET"$'),
            ("callback_headers", {"Host": "elsewhere"}, "^callback_headers must not set"),
            ("callback_headers", {"X": "a\r\nb"}, "^callback_headers has a value"),
            ("callback_headers", [1], "^callback_headers must be an object"),
            ("retry_policy", {"max_retries": -1}, r"^retry_policy\.max_retries must be"),
            ("callback", {"type": "nats", "topic": "a"}, r"^callback\.topic needs a broker"),
            (
                "callback",
                {"type": "nats", "topic": "a", "url": URL},
                r"^callback\.url is not a known field for type nats",
            ),
        ],
    )
    def test_invalid_values_are_rejected_as_in_a_create(
        self, service: Duetime, field: str, value: Any, message: str
    ) -> None:
        id = service.create(URL, seconds=3600, **WHOLE)
        before = service.get(id)
        body = {"metadata": "must not be written", field: value}
        refused(service.request("PUT", f"/timers/{id}", json=body), 400, 2, message)
        assert service.get(id) == before

    @pytest.mark.parametrize("seconds", [4.9, 0, -3600])
    def test_execute_at_less_than_five_seconds_ahead_is_rejected(self, service: Duetime, seconds: float) -> None:
        id = service.create(URL, seconds=3600)
        body = {"execute_at": service.ahead(seconds)}
        refused(service.request("PUT", f"/timers/{id}", json=body), 400, 2, "^execute_at must be in the future")

    def test_unknown_timer_is_not_found_but_malformed_bodies_are_rejected_first(self, service: Duetime) -> None:
        refused(service.request("PUT", f"/timers/{UNKNOWN_ID}", json={}), 404, 3, "^timer not found$")
        refused(service.request("PUT", f"/timers/{UNKNOWN_ID}", body=b"{"), 400, 2, "^body is not valid JSON")

    def test_timer_moved_to_an_earlier_time_fires_then(self, service: Duetime, receiver: Receiver) -> None:
        id = service.create(receiver.url("/earlier"), seconds=86400)
        update(service, id, execute_at=service.ahead(10))
        service.advance()
        assert service.finished(id)["status"] == "completed"

    def test_concurrent_updates_are_all_applied(self, service: Duetime) -> None:
        id = service.create(URL, seconds=3600)
        bodies: list[dict[str, Any]] = [
            {"metadata": 1},
            {"callback_payload": 2},
            {"callback_method": "PUT"},
            {"callback_headers": {"A": "b"}},
        ]
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(lambda body: service.request("PUT", f"/timers/{id}", json=body), bodies))
        assert [answer.status for answer in answers] == [200] * len(bodies)
        timer = service.get(id)
        assert all(timer[name] == value for body in bodies for name, value in body.items())


class TestCancel:
    def test_second_cancel_changes_nothing_and_succeeds(self, service: Duetime) -> None:
        id = service.create(URL, seconds=3600)
        first = service.request("DELETE", f"/timers/{id}")
        stamp = service.get(id)["updated_at"]
        again = service.request("DELETE", f"/timers/{id}")
        assert success(again, 200, "timer canceled successfully") == first.body["data"]
        assert service.get(id)["updated_at"] == stamp

    def test_unknown_timer_is_not_found(self, service: Duetime) -> None:
        refused(service.request("DELETE", f"/timers/{UNKNOWN_ID}"), 404, 3, "^timer not found$")

    def test_canceled_timer_can_not_be_updated(self, service: Duetime) -> None:
        id = service.create(URL, seconds=3600)
        service.request("DELETE", f"/timers/{id}")
        answer = service.request("PUT", f"/timers/{id}", json={"execute_at": service.ahead(60)})
        refused(answer, 400, 2, "^cannot update timer with status 'canceled'$")
        assert service.get(id)["status"] == "canceled"

    def test_body_of_a_cancel_must_be_empty(self, service: Duetime) -> None:
        id = service.create(URL, seconds=3600)
        message = "^reason is not a known field; this operation takes no fields$"
        refused(service.request("DELETE", f"/timers/{id}", json={"reason": "x"}), 400, 2, message)
        refused(service.request("DELETE", f"/timers/{id}", body=b"{nonsense"), 400, 2, "^body is not valid JSON")
        refused(service.request("DELETE", f"/timers/{id}", body=b" " * (1 << 18) + b" "), 413, 2, "^body is larger")
        compressed = {"X-API-Key": service.key or "", "Content-Encoding": "gzip"}
        refused(service.request("DELETE", f"/timers/{id}", body=b"{}", headers=compressed), 415, 2, "compressed")
        assert service.get(id)["status"] == "pending"
        success(service.request("DELETE", f"/timers/{id}", json={}), 200, "timer canceled successfully")


@pytest.mark.parametrize("status", ["executing", "completed", "failed"])
class TestTooLate:
    @pytest.fixture
    def late(self, service: Duetime, receiver: Receiver, status: str, request: pytest.FixtureRequest) -> Any:
        path = f"/late-{status}-{request.node.name}"
        url = receiver.reply(path, {"failed": Reply(503)}.get(status, Reply(hang=status == "executing")))
        id = service.create(url)
        service.advance()
        receiver.wait(path)
        if status != "executing":
            service.finished(id)
        before = service.get(id)
        assert before["status"] == status
        yield id
        assert service.get(id) == before
        receiver.release()
        service.finished(id)
        assert len(receiver.at(path)) == 1

    def test_cancel_of_a_started_timer_is_rejected(self, service: Duetime, status: str, late: str) -> None:
        answer = service.request("DELETE", f"/timers/{late}")
        refused(answer, 400, 2, f"^cannot cancel timer with status '{status}'$")

    def test_update_of_a_started_timer_is_rejected(self, service: Duetime, status: str, late: str) -> None:
        for body in ({}, {"metadata": 1}, {"execute_at": service.ahead(60)}):
            answer = service.request("PUT", f"/timers/{late}", json=body)
            refused(answer, 400, 2, f"^cannot update timer with status '{status}'$")


class TestRaces:
    """Cancels and moves while timers fall due: the response tells whether the timer fires."""

    def test_timers_whose_cancel_succeeded_do_not_fire(
        self, start_service: Callable[..., Duetime], receiver: Receiver
    ) -> None:
        service = start_service(virtual_clock=True)
        ids = [service.create(receiver.url("/race-cancel"), callback_payload=n) for n in range(60)]
        with ThreadPoolExecutor(9) as pool:
            advancing = pool.submit(service.advance)
            answers = list(pool.map(lambda id: service.request("DELETE", f"/timers/{id}"), ids))
            advancing.result()
        until("every timer is final", lambda: service.total("pending") + service.total("executing") == 0)
        canceled = {n for n, answer in enumerate(answers) if answer.status == 200}
        assert {answer.status for answer in answers} <= {200, 400}
        fired = sorted(int(request.body) for request in receiver.at("/race-cancel"))
        assert fired == sorted(set(range(60)) - canceled)
        assert service.total("canceled") == len(canceled) and service.total("completed") == len(fired)

    def test_timers_whose_move_succeeded_fire_at_the_new_time(
        self, start_service: Callable[..., Duetime], receiver: Receiver
    ) -> None:
        service = start_service(virtual_clock=True)
        ids = [service.create(receiver.url("/race-move"), callback_payload=n) for n in range(60)]
        later = {"execute_at": service.ahead(86400)}
        with ThreadPoolExecutor(9) as pool:
            advancing = pool.submit(service.advance)
            answers = list(pool.map(lambda id: service.request("PUT", f"/timers/{id}", json=later), ids))
            advancing.result()
        moved = {n for n, answer in enumerate(answers) if answer.status == 200}
        assert {answer.status for answer in answers} <= {200, 400}
        until("all others are completed", lambda: service.total("completed") == 60 - len(moved))
        fired = sorted(int(request.body) for request in receiver.at("/race-move"))
        assert fired == sorted(set(range(60)) - moved) and service.total("pending") == len(moved)
        service.advance("2d")
        until("all moved timers are completed", lambda: service.total("completed") == 60)
        assert len(receiver.at("/race-move")) == 60
