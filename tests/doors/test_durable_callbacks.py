"""What a receiver gets from the durable door, and what its answer makes of the timer."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest

from duetime import __version__
from tests.doors.durable import ONCE, Durable
from tests.servers import Receiver, Reply, instant, printed, until


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Durable]:
    with Durable(tmp_path_factory.mktemp("durable-callbacks")) as door:
        door.namespace("other.ns")
        yield door
        assert "Traceback" not in door.stderr, door.stderr


class TestRequest:
    def test_all_of_it(self, door: Durable, receiver: Receiver) -> None:
        made = door.make(
            receiver.url("/whole?a=1"),
            delay="0s",
            namespace="other.ns",
            id="the-id",
            callbackMethod="PATCH",
            callbackHeaders={"Authorization": "Bearer token", "X-Own": "y"},
            payload={"a": [1.0, "ü"]},
            metadata={"not": "sent"},
        )
        assert door.final(made)["status"] == "completed"
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
    def test_the_payload_is_byte_for_byte(self, door: Durable, receiver: Receiver, payload: bytes) -> None:
        path = f"/bytes-{uuid.uuid4()}"
        body = b'{"delay": "0s", "callbackUrl": "%b", "payload": %b}' % (receiver.url(path).encode(), payload)
        assert door.api("POST", "/timers", body=body).status == 200
        [request] = receiver.wait(path)
        assert request.body.endswith(b'"payload":' + payload + b"}")

    def test_a_name_that_no_header_can_carry(self, door: Durable, receiver: Receiver) -> None:
        door.run(receiver.url("/odd-name"), id="the id/ü%\u2028", namespace="other.ns")
        [request] = receiver.at("/odd-name")
        assert unquote(request.headers["duetime-timer"]) == "other.ns/the id/ü%\u2028"
        assert json.loads(request.body)["id"] == "the id/ü%\u2028"

    def test_without_a_payload(self, door: Durable, receiver: Receiver) -> None:
        door.run(receiver.url("/no-payload"))
        assert json.loads(receiver.at("/no-payload")[0].body)["payload"] is None

    def test_the_id_of_one_firing(self, door: Durable, receiver: Receiver) -> None:
        """The same on each attempt, another one after a reschedule."""
        later = printed(door.at(86_400))
        moved = Reply(200, json.dumps({"ok": False, "nextExecuteAt": later}).encode())
        url = receiver.reply("/firings", Reply(500), Reply(500), moved, Reply(500), Reply(200))
        timer = door.make(url, delay="0s", retryPolicy={"initialInterval": "1m", "jitter": False})
        for _ in range(5):
            timer = door.attempt(timer)
        assert timer["status"] == "completed"
        requests = receiver.at("/firings")
        ids = [request.headers["webhook-id"] for request in requests]
        assert len(set(ids[:3])) == 1 and len(set(ids[3:])) == 1 and ids[0] != ids[3]
        assert [request.headers["duetime-attempt"] for request in requests] == ["1", "2", "3", "1", "2"]
        assert [json.loads(request.body)["attempt"] for request in requests] == [1, 2, 3, 1, 2]
        assert [json.loads(request.body)["executeAt"] for request in requests][3:] == [later, later]
        traces = [request.headers["traceparent"].split("-")[1:3] for request in requests]
        assert len({trace for trace, _ in traces}) == 2 and len({span for _, span in traces}) == 5


class TestAnswers:
    @pytest.mark.parametrize(
        "body",
        [
            b'{"ok": true}',
            b' {"ok":true, "more": [1]} \n',
            b'{"ok": true, "nextExecuteAt": "2999-01-01T00:00:00Z"}',
            b'{"ok": true, "nextExecuteAt": null}',
        ],
    )
    def test_ok(self, door: Durable, receiver: Receiver, body: bytes, request: pytest.FixtureRequest) -> None:
        timer = door.run(receiver.reply(f"/ok-{uuid.uuid4()}", Reply(200, body)))
        assert (timer["status"], timer["attempts"], timer["lastError"]) == ("completed", 1, None)
        assert instant(timer["executedAt"]) >= instant(timer["executeAt"])

    GARBAGE = {
        "empty": b"",
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

    @pytest.mark.parametrize("name", GARBAGE)
    def test_everything_else_is_a_failed_attempt(self, door: Durable, receiver: Receiver, name: str) -> None:
        path = f"/garbage-{name}".replace(" ", "-").replace(",", "")
        url = receiver.reply(path, Reply(200, self.GARBAGE[name]), Reply(200))
        timer = door.make(url, delay="0s", retryPolicy={"initialInterval": "1h", "maxInterval": "1h", "jitter": False})
        waiting = door.attempt(timer)
        assert (waiting["status"], waiting["attempts"]) == ("pending", 1) and waiting["lastError"]
        assert len(waiting["lastError"]) <= 500 and not set("\r\n\0") & set(waiting["lastError"])
        assert door.attempt(timer)["status"] == "completed"

    @pytest.mark.parametrize("status", [201, 202, 204, 206, 301, 304, 307, 400, 404, 410, 500, 599])
    def test_only_a_200_counts(self, door: Durable, receiver: Receiver, status: int) -> None:
        reply = Reply(status, body=b"" if status in (204, 304) else b'{"ok": true}')
        timer = door.run(receiver.reply(f"/only-200-{status}", reply), retryPolicy=ONCE)
        assert (timer["status"], timer["lastError"]) == ("failed", f"HTTP {status}")

    @pytest.mark.parametrize(("status", "expected"), [(200, "completed"), (202, "completed"), (299, "completed")])
    @pytest.mark.parametrize("body", [b"", b"whatever \xff", b'{"ok": false}'])
    def test_status_protocol(self, door: Durable, receiver: Receiver, status: int, expected: str, body: bytes) -> None:
        url = receiver.reply(f"/status-{uuid.uuid4()}", Reply(status, body))
        assert door.run(url, responseProtocol="status", retryPolicy=ONCE)["status"] == expected

    def test_status_protocol_retries_what_is_no_success(self, door: Durable, receiver: Receiver) -> None:
        url = receiver.reply("/status-500", Reply(302), Reply(500), Reply(204, b""))
        timer = door.make(url, delay="0s", responseProtocol="status", retryPolicy={"jitter": False})
        assert [door.attempt(timer)["status"] for _ in range(3)] == ["pending", "pending", "completed"]

    def test_a_reschedule_is_no_failure(self, door: Durable, receiver: Receiver) -> None:
        times = [printed(door.at(days * 86_400)) for days in (1, 2, 3)]
        replies = [Reply(200, json.dumps({"ok": False, "nextExecuteAt": at}).encode()) for at in times]
        timer = door.make(receiver.reply("/again", *replies, Reply(200)), delay="0s", retryPolicy=ONCE)
        for at in times:
            timer = door.attempt(timer)
            assert (timer["status"], timer["executeAt"], timer["lastError"]) == ("pending", at, None)
        door.run(receiver.url("/again-witness"))
        assert len(receiver.at("/again")) == 3
        done = door.attempt(timer)
        assert (done["status"], len(receiver.at("/again"))) == ("completed", 4)

    def test_a_reschedule_with_another_offset(self, door: Durable, receiver: Receiver) -> None:
        body = b'{"ok": false, "nextExecuteAt": "2999-06-01T02:00:00.5+02:00"}'
        timer = door.make(receiver.reply("/offset", Reply(200, body)), delay="0s")
        assert door.attempt(timer)["executeAt"] == "2999-06-01T00:00:00.500Z"

    def test_a_reschedule_into_the_past_fires_again(self, door: Durable, receiver: Receiver) -> None:
        body = b'{"ok": false, "nextExecuteAt": "2001-01-01T00:00:00Z"}'
        timer = door.run(receiver.reply("/past", Reply(200, body), Reply(200)))
        assert timer["status"] == "completed" and len(receiver.at("/past")) == 2


class TestTimeout:
    def test_of_the_timer(self, door: Durable, receiver: Receiver) -> None:
        url = receiver.reply("/slow", Reply(hang=True))
        timer = door.run(url, callbackTimeout="100ms", retryPolicy=ONCE)
        assert (timer["status"], timer["lastError"]) == ("failed", "no answer within 100ms")
        [attempt] = door.attempts(timer)
        assert (attempt["outcome"], attempt["status"]) == ("timed_out", None)
        receiver.release()

    def test_is_retried(self, door: Durable, receiver: Receiver) -> None:
        url = receiver.reply("/slow-once", Reply(hang=True), Reply(200))
        timer = door.make(url, delay="0s", callbackTimeout="2s", retryPolicy={"jitter": False})
        assert door.attempt(timer)["status"] == "pending"
        assert door.attempt(timer)["status"] == "completed"
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
def test_no_answer_can_harm_the_service(
    tmp_path_factory: pytest.TempPathFactory, receiver: Receiver, name: str
) -> None:
    path = "/hostile-" + name.replace(" ", "-")
    with Durable(tmp_path_factory.mktemp("hostile")) as door:
        timer = door.make(receiver.reply(path, Reply(200, HOSTILE[name])), delay="0s", retryPolicy=ONCE)
        receiver.wait(path)
        try:
            done: Any = until("it is done", lambda: door.see(timer)["status"] in ("completed", "failed"))
        except OSError as error:
            raise AssertionError(f"the service has ended: {door.stderr[-300:]}") from error
        assert done and "Traceback" not in door.stderr
