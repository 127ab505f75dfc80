"""The requests that receivers get, byte for byte, and the effect of their responses on the timer."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from duetime.clock import SystemClock
from duetime.instants import EPOCH, Instant
from duetime.model import (
    SINGLE_ATTEMPT,
    BodyFormat,
    Definition,
    HttpTarget,
    Namespace,
    ResponseProtocol,
    Secret,
    Timer,
)
from duetime.secret_rotation import to_text
from duetime.stores.sqlite.store import SqliteStore
from duetime.version import __version__
from tests.clocks import all_at
from tests.servers import Duetime, Receiver, Reply, instant, until, unused_port


class TestHeaders:
    def test_request_has_the_documented_headers_and_no_others(self, service: Duetime, receiver: Receiver) -> None:
        own = {"Authorization": "Bearer token123", "X-Custom-Header": "value", "x-empty": "", "X-Latin": "café"}
        id = service.fired(receiver.url("/headers?a=%20b&c"), callback_headers=own, callback_payload={})["id"]
        [request] = receiver.at("/headers?a=%20b&c")
        headers = dict(request.headers)
        assert {name: headers.pop(name) for name in ("authorization", "x-custom-header", "x-empty")} == {
            "authorization": "Bearer token123",
            "x-custom-header": "value",
            "x-empty": "",
        }
        assert headers.pop("x-latin").encode("latin-1") in ("café".encode(), "café".encode("latin-1"))
        assert headers.pop("host") == f"127.0.0.1:{receiver.port}"
        assert headers.pop("content-type") == "application/json"
        assert headers.pop("content-length") == "2"
        assert headers.pop("user-agent") == f"timer-platform/0.1.0 duetime/{__version__}"
        assert str(uuid.UUID(headers.pop("webhook-id")))
        assert headers.pop("webhook-timestamp").isdigit()
        assert headers.pop("duetime-attempt") == "1"
        assert headers.pop("duetime-timer") == f"default/{id}"
        trace = re.fullmatch(r"00-([0-9a-f]{32})-([0-9a-f]{16})-01", headers.pop("traceparent"))
        assert trace and int(trace[1], 16) and int(trace[2], 16)
        assert headers == {}  # without a secret, there is no signature
        names = [line.partition(b":")[0].lower() for line in request.head.split(b"\r\n")[1:]]
        assert len(names) == len(set(names))

    def test_timer_can_override_content_type_and_user_agent(self, service: Duetime, receiver: Receiver) -> None:
        own = {"content-type": "application/vnd.api+json", "User-Agent": "mine/1"}
        service.fired(receiver.url("/own-headers"), callback_headers=own)
        [request] = receiver.at("/own-headers")
        assert request.headers["content-type"] == "application/vnd.api+json"
        assert request.headers["user-agent"] == "mine/1"
        assert request.head.lower().count(b"content-type") == request.head.lower().count(b"user-agent") == 1

    def test_timer_can_have_64_headers(self, service: Duetime, receiver: Receiver) -> None:
        own = {f"X-{n}": str(n) for n in range(64)}
        service.fired(receiver.url("/many-headers"), callback_headers=own)
        [request] = receiver.at("/many-headers")
        assert all(request.headers[name.lower()] == value for name, value in own.items())

    def test_webhook_timestamp_is_the_time_of_the_attempt(self, service: Duetime, receiver: Receiver) -> None:
        timer = service.fired(receiver.url("/timestamp"))
        sent = int(receiver.at("/timestamp")[0].headers["webhook-timestamp"])
        assert int(instant(timer["execute_at"]).timestamp()) <= sent <= instant(timer["executed_at"]).timestamp()

    def test_retries_share_webhook_id_and_trace_but_not_the_span(self, service: Duetime, receiver: Receiver) -> None:
        policy = {"max_retries": 2, "initial_interval": "1m", "jitter": False}
        id = service.create(receiver.reply("/ids", Reply(500)), retry_policy=policy)
        service.advance()
        for attempt in (1, 2):
            receiver.wait("/ids", attempt)
            until("the attempt is recorded", lambda: service.get(id)["status"] == "pending")
            service.advance("2m")
        service.finished(id)
        requests = receiver.at("/ids")
        assert len({request.headers["webhook-id"] for request in requests}) == 1
        assert [request.headers["duetime-attempt"] for request in requests] == ["1", "2", "3"]
        parents = [request.headers["traceparent"].split("-") for request in requests]
        assert len({parent[1] for parent in parents}) == 1 and len({parent[2] for parent in parents}) == 3
        stamps = [int(request.headers["webhook-timestamp"]) for request in requests]
        assert stamps == sorted(stamps) and stamps[0] < stamps[2]
        service.fired(receiver.url("/ids-other"))
        assert receiver.at("/ids-other")[0].headers["webhook-id"] != requests[0].headers["webhook-id"]


class TestBody:
    @pytest.mark.parametrize(
        "payload",
        [
            b"null",
            b"{}",
            b"[]",
            b'""',
            b"0",
            b"-0.0",
            b'{"b":1,"a":2}',
            b'{ "odd" :\t[ 1 ,2,\r\n   3 ]  }',
            b"123456789012345678901234567890123456789",
            b"1.0",
            b"1E5",
            b"0.1000000000000000055511151231257827021181583404541015625",
            b'"\\u00e9\\ud83d\\ude00 \\/ \\" \\\\u0000"',
            '"é😀 \u2028"'.encode(),
            b'{"":{"":[[[[{}]]]]}}',
            b"[" * 60 + b"]" * 60,
            b'"' + b"x" * 200_000 + b'"',
        ],
        ids=lambda payload: payload[:40].decode(),
    )
    def test_body_is_the_payload_byte_for_byte(self, service: Duetime, receiver: Receiver, payload: bytes) -> None:
        path = f"/body-{uuid.uuid4()}"
        head = json.dumps({"execute_at": service.ahead(10), "callback_url": receiver.url(path)}).encode()
        body = head[:-1] + b', "callback_payload":\n ' + payload + b" \n}"
        id = service.request("POST", "/timers", body=body).body["data"]["id"]
        service.advance()
        service.finished(id)
        assert [request.body for request in receiver.at(path)] == [payload]
        got = service.request("GET", f"/timers/{id}")
        assert got.body["data"]["callback_payload"] == json.loads(payload)

    def test_body_is_empty_without_a_payload(self, service: Duetime, receiver: Receiver) -> None:
        service.fired(receiver.url("/no-body"))
        [request] = receiver.at("/no-body")
        assert request.body == b"" and request.headers["content-length"] == "0"
        assert request.headers["content-type"] == "application/json"

    def test_payload_survives_a_restart_and_other_updates(self, tmp_path: Path, receiver: Receiver) -> None:
        payload = b'{ "n":  12345678901234567890123, "s": "\\u0041" }'
        with Duetime(tmp_path, virtual_clock=True) as service:
            head = json.dumps({"execute_at": service.ahead(3600), "callback_url": receiver.url("/kept")}).encode()
            body = head[:-1] + b', "callback_payload": ' + payload + b"}"
            id = service.request("POST", "/timers", body=body).body["data"]["id"]
            assert service.request("PUT", f"/timers/{id}", json={"metadata": 1}).status == 200
            service.kill()
            service.start()
            service.advance("1h")
            service.finished(id)
        assert [request.body for request in receiver.at("/kept")] == [payload]


class TestResponses:
    @pytest.mark.parametrize("status", [200, 201, 202, 204, 206, 299])
    def test_2xx_response_completes_the_timer(self, service: Duetime, receiver: Receiver, status: int) -> None:
        reply = Reply(status, body=b"" if status == 204 else b"whatever \xff")
        timer = service.fired(receiver.reply(f"/answer-{status}", reply))
        assert (timer["status"], timer["last_error"]) == ("completed", None)
        assert instant(timer["executed_at"]) >= instant(timer["execute_at"])

    @pytest.mark.parametrize("status", [300, 304, 400, 401, 404, 410, 429, 500, 502, 503, 599])
    def test_other_statuses_fail_the_timer(self, service: Duetime, receiver: Receiver, status: int) -> None:
        reply = Reply(status, body=b"" if status == 304 else b'{"ok": true}')
        timer = service.fired(receiver.reply(f"/answer-{status}", reply))
        assert (timer["status"], timer["last_error"]) == ("failed", f"HTTP {status}")
        assert instant(timer["executed_at"]) >= instant(timer["execute_at"])
        assert len(receiver.at(f"/answer-{status}")) == 1

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    def test_redirects_are_not_followed(self, service: Duetime, receiver: Receiver, status: int) -> None:
        away = Reply(status, headers={"Location": receiver.url(f"/elsewhere-{status}")})
        timer = service.fired(receiver.reply(f"/redirect-{status}", away))
        assert (timer["status"], timer["last_error"]) == ("failed", f"HTTP {status}: redirects are not followed")
        assert not receiver.at(f"/elsewhere-{status}")

    def test_refused_connection_fails_the_timer(self, service: Duetime) -> None:
        with unused_port() as port:
            timer = service.fired(f"http://127.0.0.1:{port}/")
        assert timer["status"] == "failed" and "refused" in timer["last_error"].lower() and timer["executed_at"]

    def test_tls_to_a_plain_http_receiver_fails_the_timer(self, service: Duetime, receiver: Receiver) -> None:
        timer = service.fired(f"https://127.0.0.1:{receiver.port}/tls")
        assert timer["status"] == "failed" and timer["last_error"] and timer["executed_at"]

    @pytest.mark.parametrize(
        "reply",
        [
            Reply(close=True),
            Reply(raw=b"nonsense\r\n\r\n"),
            Reply(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf"),
            Reply(raw=b"HTTP/1.1 200 OK\r\nContent-Le"),
            Reply(raw=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
            Reply(raw=b"SSH-2.0-OpenSSH_9.6\r\n"),
        ],
        ids=["closed", "nonsense", "half-a-body", "half-a-head", "bad-chunk", "ssh"],
    )
    def test_incomplete_or_invalid_response_fails_the_timer(
        self, service: Duetime, receiver: Receiver, reply: Reply, request: pytest.FixtureRequest
    ) -> None:
        timer = service.fired(receiver.reply(f"/{request.node.name}", reply))
        assert timer["status"] == "failed" and timer["last_error"] and timer["executed_at"]

    def test_large_response_body_does_not_fail_the_timer(self, service: Duetime, receiver: Receiver) -> None:
        """Only the status counts, and at most 64 KiB of the body are read."""
        timer = service.fired(receiver.reply("/big", Reply(200, body=b"x" * 5_000_000)))
        assert timer["status"] == "completed"

    def test_last_error_does_not_repeat_a_long_reason_phrase(self, service: Duetime, receiver: Receiver) -> None:
        raw = b"HTTP/1.1 500 " + b"a" * 5000 + b"\r\nContent-Length: 0\r\n\r\n"
        error = service.fired(receiver.reply("/long-reason", Reply(raw=raw)))["last_error"]
        assert error == "HTTP 500"


def put_into_file(path: Path, timers: list[Timer], secrets: tuple[Secret, ...] = ()) -> None:
    """Put timers and secrets into the database file of a stopped service."""

    async def put() -> None:
        store = SqliteStore(path, SystemClock())
        await store.open()
        try:
            if secrets:
                [before] = await store.namespaces()
                after: Namespace = msgspec.structs.replace(before, secrets=secrets)
                assert await store.swap_namespace(before, after)
            for timer in timers:
                assert await store.put(timer) is None
        finally:
            await store.close()

    asyncio.run(put())


class TestTimeouts:
    def test_receiver_that_never_responds_fails_the_timer(self, tmp_path: Path, receiver: Receiver) -> None:
        """The platform API always sets 30 s, so a timer with a shorter timeout is put into the store."""
        url = receiver.reply("/silent", Reply(hang=True))
        definition = Definition(
            target=HttpTarget(url=url),
            retry=SINGLE_ATTEMPT,
            timeout_ms=1_000,
            body=BodyFormat.PAYLOAD,
            protocol=ResponseProtocol.STATUS,
        )
        now = SystemClock().now()
        id = str(uuid.uuid4())
        put_into_file(
            tmp_path / "duetime.db",
            [Timer("default", id, 0, definition, *all_at(now), revision=1, firing=1)],
        )
        with Duetime(tmp_path) as service:
            timer = service.finished(id)
        assert (timer["status"], timer["last_error"]) == ("failed", "no response within 1s")
        assert instant(timer["executed_at"]) > instant(timer["execute_at"])
        assert len(receiver.wait("/silent")) == 1

    def test_platform_api_sets_a_timeout_of_30_seconds(self, tmp_path: Path) -> None:
        """Reads the timeout from the store, because waiting for it would take 30 s."""
        with Duetime(tmp_path) as service:
            id = service.create("http://127.0.0.1:9/", seconds=3600)
            service.kill()

        async def read() -> Timer | None:
            store = SqliteStore(tmp_path / "duetime.db", SystemClock())
            await store.open()
            try:
                return await store.get("default", id)
            finally:
                await store.close()

        timer = asyncio.run(read())
        assert timer is not None and timer.definition.timeout_ms == 30_000


class TestSignatures:
    OLD = Secret(id="old", key=b"o" * 32, created_at=EPOCH, expires_at=Instant(2**50))
    NEW = Secret(id="new", key=b"n" * 32, created_at=Instant(1))
    GONE = Secret(id="gone", key=b"g" * 32, created_at=EPOCH, expires_at=Instant(1))

    @pytest.fixture
    def sign(self, tmp_path: Path, receiver: Receiver) -> Callable[..., Any]:
        def deliver(path: str, *secrets: Secret, **fields: Any) -> Any:
            put_into_file(tmp_path / "duetime.db", [], secrets)
            with Duetime(tmp_path, virtual_clock=True) as service:
                service.fired(receiver.url(path), **fields)
            [request] = receiver.at(path)
            return request

        return deliver

    def test_request_is_signed_with_the_secret(self, sign: Callable[..., Any]) -> None:
        request = sign("/signed", self.NEW, callback_payload={"amount": "12.30", "ü": [1]})
        assert len(request.headers["webhook-signature"].split()) == 1
        checked = Webhook(to_text(self.NEW.key))
        assert checked.verify(request.body, request.headers) == {"amount": "12.30", "ü": [1]}
        for broken in (request.body + b" ", request.body.replace(b"12", b"13"), b""):
            with pytest.raises(WebhookVerificationError):
                checked.verify(broken, request.headers)
        for name in ("webhook-id", "webhook-timestamp"):
            with pytest.raises(WebhookVerificationError):
                checked.verify(request.body, {**request.headers, name: request.headers[name][:-1] + "x"})
        with pytest.raises(WebhookVerificationError):
            Webhook(to_text(self.OLD.key)).verify(request.body, request.headers)

    def test_both_secrets_sign_during_a_rotation(self, sign: Callable[..., Any]) -> None:
        request = sign("/rotation", self.NEW, self.OLD, self.GONE, callback_payload=[1])
        assert len(request.headers["webhook-signature"].split()) == 2
        for secret in (self.NEW, self.OLD):
            assert Webhook(to_text(secret.key)).verify(request.body, request.headers) == [1]
        with pytest.raises(WebhookVerificationError):
            Webhook(to_text(self.GONE.key)).verify(request.body, request.headers)
