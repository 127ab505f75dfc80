"""The requests that receivers get for timers of the HTTP v1 API, and the effect of their responses on the timer."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest

from duetime.version import __version__
from tests.doors.http_v1 import ONCE, HttpV1
from tests.servers import Receiver, Reply, instant, printed, until


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpV1]:
    with HttpV1(tmp_path_factory.mktemp("http-v1-callbacks")) as service:
        service.namespace("other.ns")
        yield service
        assert "Traceback" not in service.stderr, service.stderr


class TestRequest:
    def test_request_has_the_documented_body_and_headers(self, service: HttpV1, receiver: Receiver) -> None:
        made = service.make(
            receiver.url("/whole?a=1"),
            delay="0s",
            namespace="other.ns",
            id="the-id",
            callbackMethod="PATCH",
            callbackHeaders={"Authorization": "Bearer token", "X-Own": "y"},
            payload={"a": [1.0, "ü"]},
            metadata={"not": "sent"},
        )
        assert service.final(made)["status"] == "completed"
        [request] = receiver.at("/whole?a=1")
        assert request.method == "PATCH"
        assert json.loads(request.body) == {
            "id": "the-id",
            "namespace": "other.ns",
            "executeAt": made["executeAt"],
            "attempt": 1,
            "payload": {"a": [1.0, "ü"]},
        }
        headers = dict(request.headers)
        assert headers.pop("authorization") == "Bearer token" and headers.pop("x-own") == "y"
        assert headers.pop("host") == f"127.0.0.1:{receiver.port}"
        assert headers.pop("content-type") == "application/json"
        assert headers.pop("content-length") == str(len(request.body))
        assert headers.pop("user-agent") == f"timer-platform/0.1.0 duetime/{__version__}"
        assert uuid.UUID(headers.pop("webhook-id")) and headers.pop("webhook-timestamp").isdigit()
        assert (headers.pop("duetime-attempt"), headers.pop("duetime-timer")) == ("1", "other.ns/the-id")
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", headers.pop("traceparent"))
        assert headers == {}  # no signature without a secret

    @pytest.mark.parametrize("payload", [b"null", b"1E5", b'{ "b":1,\n"a": 12345678901234567890123 }', b'"\\u00e9"'])
    def test_payload_is_sent_byte_for_byte(self, service: HttpV1, receiver: Receiver, payload: bytes) -> None:
        path = f"/bytes-{uuid.uuid4()}"
        body = b'{"delay": "0s", "callbackUrl": "%b", "payload": %b}' % (receiver.url(path).encode(), payload)
        assert service.api("POST", "/timers", body=body).status == 200
        [request] = receiver.wait(path)
        assert request.body.endswith(b'"payload":' + payload + b"}")

    def test_id_with_unusual_characters_is_escaped_in_the_header(self, service: HttpV1, receiver: Receiver) -> None:
        service.run(receiver.url("/odd-name"), id="the id/ü%\u2028", namespace="other.ns")
        [request] = receiver.at("/odd-name")
        assert unquote(request.headers["duetime-timer"]) == "other.ns/the id/ü%\u2028"
        assert json.loads(request.body)["id"] == "the id/ü%\u2028"

    def test_omitted_payload_is_sent_as_null(self, service: HttpV1, receiver: Receiver) -> None:
        service.run(receiver.url("/no-payload"))
        assert json.loads(receiver.at("/no-payload")[0].body)["payload"] is None

    def test_delivery_id_and_trace_change_only_with_a_new_firing(self, service: HttpV1, receiver: Receiver) -> None:
        """Retries belong to the same firing; a reschedule starts a new one."""
        later = printed(service.at(86_400))
        moved = Reply(200, json.dumps({"ok": False, "nextExecuteAt": later}).encode())
        url = receiver.reply("/firings", Reply(500), Reply(500), moved, Reply(500), Reply(200))
        timer = service.make(url, delay="0s", retryPolicy={"initialInterval": "1m", "jitter": False})
        for _ in range(5):
            timer = service.attempt(timer)
        assert timer["status"] == "completed"
        requests = receiver.at("/firings")
        ids = [request.headers["webhook-id"] for request in requests]
        assert len(set(ids[:3])) == 1 and len(set(ids[3:])) == 1 and ids[0] != ids[3]
        assert [request.headers["duetime-attempt"] for request in requests] == ["1", "2", "3", "1", "2"]
        assert [json.loads(request.body)["attempt"] for request in requests] == [1, 2, 3, 1, 2]
        assert [json.loads(request.body)["executeAt"] for request in requests][3:] == [later, later]
        traces = [request.headers["traceparent"].split("-")[1:3] for request in requests]
        assert len({trace for trace, _ in traces}) == 2 and len({span for _, span in traces}) == 5


class TestResponses:
    @pytest.mark.parametrize(
        "body",
        [
            b'{"ok": true}',
            b' {"ok":true, "more": [1]} \n',
            b'{"ok": true, "nextExecuteAt": "2999-01-01T00:00:00Z"}',
            b'{"ok": true, "nextExecuteAt": null}',
        ],
    )
    def test_ok_true_completes_the_timer(
        self, service: HttpV1, receiver: Receiver, body: bytes, request: pytest.FixtureRequest
    ) -> None:
        timer = service.run(receiver.reply(f"/ok-{uuid.uuid4()}", Reply(200, body)))
        assert (timer["status"], timer["attempts"], timer["lastError"]) == ("completed", 1, None)
        assert instant(timer["executedAt"]) >= instant(timer["executeAt"])

    @pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
    def test_empty_2xx_completes_the_timer(self, service: HttpV1, receiver: Receiver, status: int) -> None:
        timer = service.run(receiver.reply(f"/empty-{status}", Reply(status, b"")), retryPolicy=ONCE)
        assert (timer["status"], timer["lastError"]) == ("completed", None)

    def test_receiver_can_reject_retries(self, service: HttpV1, receiver: Receiver) -> None:
        timer = service.run(receiver.reply("/no-retry", Reply(200, b'{"ok": false, "retry": false}')))
        assert (timer["status"], timer["attempts"]) == ("failed", 1)

    def test_policy_can_give_up_on_statuses(self, service: HttpV1, receiver: Receiver) -> None:
        policy = {"giveUpOn": [404, 410], "initialInterval": "100ms", "jitter": False}
        url = receiver.reply("/give-up", Reply(503), Reply(410))
        timer = service.run(url, responseProtocol="status", retryPolicy=policy)
        assert (timer["status"], timer["attempts"], timer["lastError"]) == ("failed", 2, "HTTP 410")
        assert timer["retryPolicy"]["giveUpOn"] == [404, 410]

    @pytest.mark.parametrize("status", [200, 202])
    def test_body_of_white_space_is_empty(self, service: HttpV1, receiver: Receiver, status: int) -> None:
        timer = service.run(receiver.reply(f"/blank-{status}", Reply(status, b" \r\n")), retryPolicy=ONCE)
        assert (timer["status"], timer["lastError"]) == ("completed", None)

    def test_error_points_out_a_misspelled_time_to_reschedule_to(self, service: HttpV1, receiver: Receiver) -> None:
        reply = Reply(200, b'{"ok": false, "next_execute_at": "2999-01-01T00:00:00Z"}')
        timer = service.run(receiver.reply("/misspelled", reply), retryPolicy=ONCE)
        message = (
            'the receiver responded {"ok": false}; next_execute_at is not a known field; did you mean nextExecuteAt?'
        )
        assert (timer["status"], timer["lastError"]) == ("failed", message)

    INVALID = {
        "no object": b"true",
        "text": b"OK",
        "html": b"<html>",
        "no ok": b"{}",
        "ok is a word": b'{"ok": "true"}',
        "ok is a number": b'{"ok": 1}',
        "ok is null": b'{"ok": null}',
        "another case": b'{"OK": true}',
        "in an array": b'[{"ok": true}]',
        "half": b'{"ok": true',
        "not ok": b'{"ok": false}',
        "not ok, null": b'{"ok": false, "nextExecuteAt": null}',
        "no time": b'{"ok": false, "nextExecuteAt": "soon"}',
        "no offset": b'{"ok": false, "nextExecuteAt": "2999-01-01T00:00:00"}',
        "a number": b'{"ok": false, "nextExecuteAt": 32503680000}',
        "year 10000": b'{"ok": false, "nextExecuteAt": "10000-01-01T00:00:00Z"}',
        "nul": b"\x00",
        "bytes": b"\xff\xfe\xfd",
        "long": b'{"ok": ' + b" " * 100_000 + b"true}",
    }

    @pytest.mark.parametrize("name", INVALID)
    def test_other_response_bodies_fail_the_attempt(self, service: HttpV1, receiver: Receiver, name: str) -> None:
        path = f"/garbage-{name}".replace(" ", "-").replace(",", "")
        url = receiver.reply(path, Reply(200, self.INVALID[name]), Reply(200))
        timer = service.make(
            url, delay="0s", retryPolicy={"initialInterval": "1h", "maxInterval": "1h", "jitter": False}
        )
        waiting = service.attempt(timer)
        assert (waiting["status"], waiting["attempts"]) == ("pending", 1) and waiting["lastError"]
        assert len(waiting["lastError"]) <= 500 and not set("\r\n\0") & set(waiting["lastError"])
        assert service.attempt(timer)["status"] == "completed"

    @pytest.mark.parametrize("status", [201, 202, 206, 301, 304, 307, 400, 404, 410, 500, 599])
    def test_response_with_a_body_fails_the_timer_unless_its_status_is_200(
        self, service: HttpV1, receiver: Receiver, status: int
    ) -> None:
        reply = Reply(status, body=b"" if status == 304 else b'{"ok": true}')
        timer = service.run(receiver.reply(f"/only-200-{status}", reply), retryPolicy=ONCE)
        assert timer["status"] == "failed"
        assert timer["lastError"].startswith(f"HTTP {status}")

    @pytest.mark.parametrize(("status", "expected"), [(200, "completed"), (202, "completed"), (299, "completed")])
    @pytest.mark.parametrize("body", [b"", b"whatever \xff", b'{"ok": false}'])
    def test_status_protocol_completes_on_any_2xx(
        self, service: HttpV1, receiver: Receiver, status: int, expected: str, body: bytes
    ) -> None:
        url = receiver.reply(f"/status-{uuid.uuid4()}", Reply(status, body))
        assert service.run(url, responseProtocol="status", retryPolicy=ONCE)["status"] == expected

    def test_status_protocol_retries_other_statuses(self, service: HttpV1, receiver: Receiver) -> None:
        url = receiver.reply("/status-500", Reply(302), Reply(500), Reply(204, b""))
        timer = service.make(url, delay="0s", responseProtocol="status", retryPolicy={"jitter": False})
        assert [service.attempt(timer)["status"] for _ in range(3)] == ["pending", "pending", "completed"]

    def test_receiver_can_reschedule_a_timer(self, service: HttpV1, receiver: Receiver) -> None:
        times = [printed(service.at(days * 86_400)) for days in (1, 2, 3)]
        replies = [Reply(200, json.dumps({"ok": False, "nextExecuteAt": at}).encode()) for at in times]
        timer = service.make(receiver.reply("/again", *replies, Reply(200)), delay="0s", retryPolicy=ONCE)
        for at in times:
            timer = service.attempt(timer)
            assert (timer["status"], timer["executeAt"], timer["lastError"]) == ("pending", at, None)
        service.run(receiver.url("/again-witness"))
        assert len(receiver.at("/again")) == 3
        done = service.attempt(timer)
        assert (done["status"], len(receiver.at("/again"))) == ("completed", 4)

    def test_next_execute_at_can_have_any_offset(self, service: HttpV1, receiver: Receiver) -> None:
        body = b'{"ok": false, "nextExecuteAt": "2999-06-01T02:00:00.5+02:00"}'
        timer = service.make(receiver.reply("/offset", Reply(200, body)), delay="0s")
        assert service.attempt(timer)["executeAt"] == "2999-06-01T00:00:00.500Z"

    def test_reschedule_into_the_past_fires_again_at_once(self, service: HttpV1, receiver: Receiver) -> None:
        body = b'{"ok": false, "nextExecuteAt": "2001-01-01T00:00:00Z"}'
        timer = service.run(receiver.reply("/past", Reply(200, body), Reply(200)))
        assert timer["status"] == "completed" and len(receiver.at("/past")) == 2


class TestTimeout:
    def test_receiver_slower_than_callback_timeout_fails_the_timer(self, service: HttpV1, receiver: Receiver) -> None:
        url = receiver.reply("/slow", Reply(hang=True))
        timer = service.run(url, callbackTimeout="100ms", retryPolicy=ONCE)
        assert (timer["status"], timer["lastError"]) == ("failed", "no response within 100ms")
        [attempt] = service.attempts(timer)
        assert (attempt["outcome"], attempt["status"]) == ("timed_out", None)
        receiver.release()

    def test_timed_out_attempt_is_retried(self, service: HttpV1, receiver: Receiver) -> None:
        url = receiver.reply("/slow-once", Reply(hang=True), Reply(200))
        timer = service.make(url, delay="0s", callbackTimeout="2s", retryPolicy={"jitter": False})
        assert service.attempt(timer)["status"] == "pending"
        assert service.attempt(timer)["status"] == "completed"
        receiver.release()


HOSTILE: dict[str, bytes] = {
    "invalid UTF-8 in a time": b'{"ok": false, "nextExecuteAt": "\xff"}',
    "invalid UTF-8 in a key": b'{"\xff": 1, "ok": true}',
    "deep in an unknown field": b'{"ok": true, "x": ' + b"[" * 3000 + b"]" * 3000 + b"}",
    "lone surrogate": b'{"ok": false, "nextExecuteAt": "\\ud800"}',
    "deep and open": b"[" * 60_000,
    "huge number": b'{"ok": true, "x": ' + b"9" * 60_000 + b"}",
    "huge key": b'{"ok": true, "' + b"k" * 60_000 + b'": 1}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_response_does_not_crash_the_service(
    tmp_path_factory: pytest.TempPathFactory, receiver: Receiver, name: str
) -> None:
    path = "/hostile-" + name.replace(" ", "-")
    with HttpV1(tmp_path_factory.mktemp("hostile")) as service:
        timer = service.make(receiver.reply(path, Reply(200, HOSTILE[name])), delay="0s", retryPolicy=ONCE)
        receiver.wait(path)
        try:
            done: Any = until("the timer is final", lambda: service.current(timer)["status"] in ("completed", "failed"))
        except OSError as error:
            raise AssertionError(f"the service has ended: {service.stderr[-300:]}") from error
        assert done and "Traceback" not in service.stderr
