"""NATS targets of timers created over HTTP: the same guarantees as for HTTP targets."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.doors.commands import Orchestrator
from tests.doors.http_v1 import ONCE, HttpV1, failure, success
from tests.nats import Nats
from tests.servers import DUE_SECONDS, Receiver, until

STREAM = "APP"
INVALID_SUBJECTS = {
    "an empty subject": "",
    "a star as a token": "app.*",
    "a star alone": "*",
    "a full wildcard": ">",
    "a full wildcard as a token": "app.>",
    "a star within a token": "app.a*b",
    "a blank": "app.a b",
    "a tab": "app.a\tb",
    "a line end": "app.a\r\nPUB app.b 0\r\n",
    "a NUL": "app.\x7f",
    "an empty first token": ".app",
    "an empty last token": "app.",
    "an empty token": "app..a",
    "the API of JetStream": "$JS.API.STREAM.DELETE.APP",
    "an ack": "$JS.ACK.APP.c.1.1.1.1.0",
    "the system": "$SYS.REQ.SERVER.PING",
    "a key-value bucket": "$KV.bucket.key",
    "an inbox": "_INBOX.abc",
    "all inboxes": "_INBOX",
    "a reply of another account": "_R_.abc",
    "another alphabet": "app.ü",
    "too long": "app." + "x" * 252,
}
INVALID_KEYS = ["", "*", "a.>", ".a", "a.", "a..b", "a b", "x" * 252]
FAR = "2999-01-01T00:00:00.000Z"


@pytest.fixture(scope="module")
def nats() -> Iterator[Nats]:
    with Nats() as server:
        yield server


@pytest.fixture(scope="module")
def broker(nats: Nats) -> Iterator[Orchestrator]:
    with Orchestrator(nats.url) as broker:
        broker.make_stream(name=STREAM, subjects=["app.>"])
        yield broker


@pytest.fixture(scope="module")
def service(nats: Nats, broker: Orchestrator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpV1]:
    with HttpV1(tmp_path_factory.mktemp("targets"), TIMER_BROKER_URL=nats.url) as service:
        broker.wait_ready()
        yield service
        assert "Traceback" not in service.stderr, service.stderr


@pytest.fixture
def subject() -> str:
    return f"app.{uuid.uuid4().hex}"


def make(service: HttpV1, subject: str, **fields: Any) -> dict[str, Any]:
    """Create a timer whose target is a subject, by the HTTP v1 API."""
    when = {} if {"delay", "executeAt"} & fields.keys() else {"delay": "0s"}
    timer: dict[str, Any] = success(service.api("POST", "/timers", {"callbackSubject": subject, **when, **fields}))
    return timer


def wait_messages(broker: Orchestrator, subject: str, count: int = 1) -> list[Any]:
    """Wait for at least ``count`` messages on a subject; returns them."""

    def enough() -> list[Any]:
        found = broker.messages(STREAM, subject)
        return found if len(found) >= count else []

    found: list[Any] = until(f"{count} messages on {subject}", enough)
    return found


class TestHttpApi:
    def test_message_equals_the_body_that_an_http_target_receives(
        self, service: HttpV1, broker: Orchestrator, receiver: Receiver, subject: str
    ) -> None:
        fields = {"delay": "0s", "payload": {"a": [1.0, "ü"]}, "metadata": {"not": "sent"}}
        made = make(
            service, subject, id="to-nats", callbackHeaders={"X-Own": "y", "Authorization": "Bearer z"}, **fields
        )
        [message] = wait_messages(broker, subject)
        over_http = service.final(service.make(receiver.url("/twin"), id="to-http", **fields))
        expected = json.loads(receiver.at("/twin")[0].body)
        body = json.loads(message.data)
        assert list(body) == list(expected)
        assert body == expected | {"id": "to-nats", "executeAt": made["executeAt"]}
        headers = dict(message.headers)
        assert uuid.UUID(headers.pop("Nats-Msg-Id"))
        assert headers == {"X-Own": "y", "Authorization": "Bearer z", "duetime-attempt": "1"}
        timer = service.final(made)
        assert timer["status"] == over_http["status"] == "completed" and timer["attempts"] == 1
        [attempt] = service.attempts(timer)
        assert attempt["status"] is None and attempt["error"] is None and attempt["outcome"] == "answered"

    def test_timer_is_shown_with_its_subject(self, service: HttpV1, subject: str) -> None:
        made = make(service, subject, executeAt=FAR, correlationId=subject, callbackHeaders={"X": "1"})
        [listed] = service.pages(f"correlationId={subject}", 10)
        for timer in (made, service.current(made), success(service.api("GET", service.path(made))), listed):
            assert timer["callbackSubject"] == subject and timer["callbackHeaders"] == {"X": "1"}
            assert timer["callbackUrl"] is None and timer["callbackMethod"] is None

    def test_upsert_and_batch_accept_subjects(self, service: HttpV1, broker: Orchestrator, subject: str) -> None:
        upserted = {"id": subject, "callbackSubject": subject, "delay": "0s"}
        success(service.api("POST", "/timers/create", upserted))
        batch = [{"callbackSubject": subject, "delay": "0s"}, {"callbackSubject": "app.*", "delay": "0s"}]
        assert [result["status"] for result in service.batch(batch)] == [200, 400]
        assert len(wait_messages(broker, subject, 2)) == 2

    def test_repeated_create_returns_the_same_timer(self, service: HttpV1, subject: str) -> None:
        fields = {"id": subject, "executeAt": FAR}
        assert make(service, subject, **fields) == make(service, subject, **fields)
        other = service.api("POST", "/timers", {"callbackSubject": subject + ".b", **fields})
        failure(other, 409, "TIMER_CONFLICT")

    def test_update_can_change_the_target_from_http_to_nats(
        self, service: HttpV1, broker: Orchestrator, subject: str
    ) -> None:
        timer = service.make("http://127.0.0.1:9/", callbackMethod="PUT", callbackHeaders={"X": "1"})
        changed = success(service.api("PUT", service.path(timer), {"callbackSubject": subject}))
        assert changed["callbackSubject"] == subject and changed["callbackUrl"] is None
        assert changed["callbackHeaders"] == {"X": "1"} and changed["callbackMethod"] is None
        service.advance(f"{DUE_SECONDS}s")
        assert wait_messages(broker, subject)[0].headers["X"] == "1"

    def test_update_can_change_the_target_from_nats_to_http(
        self, service: HttpV1, receiver: Receiver, subject: str
    ) -> None:
        timer = make(service, subject, executeAt=service.ahead(DUE_SECONDS), callbackHeaders={"X": "1"})
        changed = success(service.api("PUT", service.path(timer), {"callbackUrl": receiver.url("/from-nats")}))
        assert changed["callbackUrl"] == receiver.url("/from-nats") and changed["callbackSubject"] is None
        assert changed["callbackMethod"] == "POST"
        service.advance(f"{DUE_SECONDS}s")
        [request] = receiver.wait("/from-nats")
        assert request.headers["x"] == "1"

    def test_update_can_change_only_the_headers(self, service: HttpV1, broker: Orchestrator, subject: str) -> None:
        timer = make(service, subject, executeAt=service.ahead(DUE_SECONDS), callbackHeaders={"X": "1"})
        changed = success(service.api("PUT", service.path(timer), {"callbackHeaders": {"Y": "2"}}))
        assert changed["callbackSubject"] == subject and changed["callbackHeaders"] == {"Y": "2"}
        service.advance(f"{DUE_SECONDS}s")
        headers = wait_messages(broker, subject)[0].headers
        assert headers["Y"] == "2" and "X" not in headers

    @pytest.mark.parametrize("name", INVALID_SUBJECTS)
    def test_invalid_subject_is_rejected(self, service: HttpV1, name: str) -> None:
        bad = {"callbackSubject": INVALID_SUBJECTS[name]}
        failure(service.api("POST", "/timers", {"delay": "1h", **bad}), 400, "INVALID_INPUT", "callbackSubject")
        timer = service.make(executeAt=FAR)
        failure(service.api("PUT", service.path(timer), bad), 400, "INVALID_INPUT", "callbackSubject")
        assert service.current(timer) == timer

    def test_subject_can_have_255_characters(self, service: HttpV1, broker: Orchestrator, subject: str) -> None:
        longest = subject.ljust(255, "x")
        make(service, longest)
        assert len(wait_messages(broker, longest)) == 1

    def test_subject_can_have_every_printable_ascii_character_but_wildcards(
        self, service: HttpV1, broker: Orchestrator, subject: str
    ) -> None:
        odd = subject + "." + "".join(chr(c) for c in range(33, 127) if chr(c) not in "*>.")
        make(service, odd)
        assert len(wait_messages(broker, odd)) == 1

    @pytest.mark.parametrize(
        "name", ["Nats-Msg-Id", "nats-expected-stream", "Nats-Rollup", "duetime-attempt", "Duetime-X"]
    )
    def test_headers_with_a_meaning_for_the_broker_or_duetime_are_rejected(
        self, service: HttpV1, subject: str, name: str
    ) -> None:
        """Headers that begin with Nats- are instructions for the broker: a rollup deletes all other messages."""
        fields = {"delay": "1h", "callbackSubject": subject, "callbackHeaders": {name: "x"}}
        failure(service.api("POST", "/timers", fields), 400, "INVALID_INPUT", "callbackHeaders")

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"callbackUrl": "http://127.0.0.1:9/"}, "callbackSubject"),
            ({"callbackMethod": "POST"}, "callbackMethod"),
        ],
        ids=["a URL", "a method"],
    )
    def test_url_or_method_together_with_a_subject_is_rejected(
        self, service: HttpV1, subject: str, fields: dict[str, str], field: str
    ) -> None:
        answer = service.api("POST", "/timers", {"delay": "1h", "callbackSubject": subject, **fields})
        failure(answer, 400, "INVALID_INPUT", field)

    def test_timer_without_a_target_is_rejected(self, service: HttpV1) -> None:
        failure(service.api("POST", "/timers", {"delay": "1h"}), 400, "INVALID_INPUT", "callbackUrl")

    def test_header_values_can_have_any_characters(self, service: HttpV1, broker: Orchestrator, subject: str) -> None:
        subscription = broker.run(broker.client.subscribe(subject))
        make(service, subject, callbackHeaders={"X": "grün", "Y": ""})
        headers = broker.run(subscription.next_msg(30)).headers
        assert headers["X"] == "grün" and headers["Y"] == ""


class TestPlatformApi:
    def make(self, service: HttpV1, callback: Any, **fields: Any) -> Any:
        when = {"execute_at": service.ahead(DUE_SECONDS)}
        return service.request("POST", "/timers", json={"callback": callback, **when, **fields})

    def test_message_is_the_payload_byte_for_byte(self, service: HttpV1, broker: Orchestrator, subject: str) -> None:
        callback = {"type": "nats", "topic": subject, "headers": {"X-Own": "y"}}
        body = b'{"callback": %b, "execute_at": "%b", "callback_payload": { "b":1.0,"a": [ ] }}'
        answer = service.request(
            "POST", "/timers", body=body % (json.dumps(callback).encode(), service.ahead(DUE_SECONDS).encode())
        )
        assert answer.status == 201 and answer.body["data"]["callback_url"] is None
        service.advance()
        [message] = wait_messages(broker, subject)
        assert message.data == b'{ "b":1.0,"a": [ ] }'
        assert message.headers["X-Own"] == "y" and message.headers["duetime-attempt"] == "1"
        timer = service.finished(answer.body["data"]["id"])
        assert timer["status"] == "completed" and timer["last_error"] is None
        assert timer["callback"] == callback and timer["callback_headers"] is None

    def test_message_without_a_payload_is_empty(self, service: HttpV1, broker: Orchestrator, subject: str) -> None:
        assert self.make(service, {"type": "nats", "topic": subject}).status == 201
        service.advance()
        assert not wait_messages(broker, subject)[0].data

    def test_http_v1_api_shows_the_subject(self, service: HttpV1, subject: str) -> None:
        id = self.make(service, {"type": "nats", "topic": subject}).body["data"]["id"]
        assert service.current({"namespace": "default", "id": id})["callbackSubject"] == subject

    def test_key_is_appended_to_the_topic(self, service: HttpV1, broker: Orchestrator, subject: str) -> None:
        callback = {"type": "nats", "topic": subject, "key": "eu.7", "headers": {"X": "1"}, "payload": {"a": 1.0}}
        id = self.make(service, callback).body["data"]["id"]
        shown = {"type": "nats", "topic": f"{subject}.eu.7", "headers": {"X": "1"}}
        assert service.get(id)["callback"] == shown and service.get(id)["callback_payload"] == {"a": 1.0}
        moved = {"callback": {"type": "nats", "topic": subject, "key": "us", "payload": 2}}
        assert service.request("PUT", f"/timers/{id}", json=moved).status == 200
        service.advance()
        [message] = wait_messages(broker, f"{subject}.us")
        assert message.data == b"2" and not broker.messages(STREAM, f"{subject}.eu.7")

    def test_timer_is_shown_with_its_callback(self, service: HttpV1, subject: str) -> None:
        callback = {"type": "nats", "topic": subject, "headers": {"X": "1"}}
        id = self.make(service, callback).body["data"]["id"]
        assert service.get(id)["callback"] == callback

    def test_update_can_change_the_target_to_nats_and_back(
        self, service: HttpV1, broker: Orchestrator, receiver: Receiver, subject: str
    ) -> None:
        id = service.create(receiver.url("/there"), callback_headers={"X": "1"})
        there = service.request("PUT", f"/timers/{id}", json={"callback": {"type": "nats", "topic": subject}})
        assert there.status == 200 and there.body["data"]["callback_url"] is None
        back = service.request("PUT", f"/timers/{id}", json={"callback_url": receiver.url("/back")})
        assert back.status == 200 and back.body["data"]["callback_url"] == receiver.url("/back")
        assert back.body["data"]["callback_method"] == "POST"
        again = service.request("PUT", f"/timers/{id}", json={"callback": {"type": "nats", "topic": subject}})
        assert again.status == 200
        service.advance()
        assert len(wait_messages(broker, subject)) == 1
        assert receiver.at("/there") == receiver.at("/back") == []

    def test_update_of_other_fields_keeps_the_topic(self, service: HttpV1, broker: Orchestrator, subject: str) -> None:
        id = self.make(service, {"type": "nats", "topic": subject, "headers": {"X": "1"}}).body["data"]["id"]
        assert service.request("PUT", f"/timers/{id}", json={"callback_payload": 7}).status == 200
        headers = service.request("PUT", f"/timers/{id}", json={"callback_headers": {"Y": "2"}})
        assert headers.status == 400 and "callback" in headers.body["message"]
        service.advance()
        [message] = wait_messages(broker, subject)
        assert message.data == b"7" and message.headers["X"] == "1"

    @pytest.mark.parametrize(
        ("callback", "field"),
        [
            ({}, "callback.type"),
            ({"type": "http", "topic": "app.a"}, "callback.topic"),
            *(({"type": "nats", "topic": "app", "key": key}, "callback.key") for key in INVALID_KEYS),
            ({"type": "NATS", "topic": "app.a"}, "callback.type"),
            ({"type": "nats"}, "callback.topic"),
            ({"type": "nats", "topic": None}, "callback.topic"),
            ({"type": "nats", "topic": 7}, "callback.topic"),
            ({"type": "nats", "topic": "app.a", "headers": {"Nats-Rollup": "all"}}, "callback.headers"),
            ({"type": "nats", "topic": "app.a", "headers": {"duetime-timer": "x"}}, "callback.headers"),
            ({"type": "nats", "topic": "app.a", "headers": {"a b": "x"}}, "callback.headers"),
            ({"type": "nats", "topic": "app.a", "headers": {"X": "a\r\nb"}}, "callback.headers"),
            ("nats", "callback"),
            *(({"type": "nats", "topic": topic}, "callback.topic") for topic in INVALID_SUBJECTS.values()),
        ],
        ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
    )
    def test_invalid_callback_is_rejected(self, service: HttpV1, callback: Any, field: str) -> None:
        answer = self.make(service, callback)
        assert answer.status == 400 and answer.body["code"] == 2 and field in answer.body["message"], answer

    def test_callback_together_with_callback_url_is_rejected(self, service: HttpV1, subject: str) -> None:
        answer = self.make(service, {"type": "nats", "topic": subject}, callback_url="http://127.0.0.1:9/")
        assert answer.status == 400 and answer.body["message"].startswith("callback")

    def test_repeated_idempotency_key_returns_the_same_timer(self, service: HttpV1, subject: str) -> None:
        callback, when = {"type": "nats", "topic": subject}, service.ahead(3600)
        first, second = (self.make(service, callback, idempotency_key=subject, execute_at=when) for _ in range(2))
        assert (first.status, second.status) == (201, 200) and first.body["data"] == second.body["data"]
        callback["topic"] += ".other"
        assert self.make(service, callback, idempotency_key=subject, execute_at=when).status == 409


def test_error_without_a_broker_names_the_setting(tmp_path_factory: pytest.TempPathFactory) -> None:
    with HttpV1(tmp_path_factory.mktemp("no-broker")) as service:
        body = failure(
            service.api("POST", "/timers", {"delay": "1h", "callbackSubject": "app.a"}), 400, "INVALID_INPUT"
        )
        assert "TIMER_BROKER_URL" in body["message"]
        timer = service.make(executeAt=FAR)
        failure(service.api("PUT", service.path(timer), {"callbackSubject": "app.a"}), 400, "INVALID_INPUT")
        [result] = service.batch([{"delay": "1h", "callbackSubject": "app.a"}])
        assert result["status"] == 400 and "TIMER_BROKER_URL" in result["error"]["message"]
        callback = {"type": "nats", "topic": "app.a"}
        made = service.request("POST", "/timers", json={"callback": callback, "execute_at": service.ahead(60)})
        assert made.status == 400 and made.body["code"] == 2 and "TIMER_BROKER_URL" in made.body["message"]
        id = service.create("http://127.0.0.1:9/")
        assert service.request("PUT", f"/timers/{id}", json={"callback": callback}).status == 400
        assert service.get(id)["callback_url"] == "http://127.0.0.1:9/"


class TestRetries:
    def test_attempt_fails_if_no_stream_has_the_subject(self, service: HttpV1) -> None:
        policy = {"maxRetries": 1, "initialInterval": "10s", "jitter": False}
        timer = make(service, "nobody.listens", executeAt=service.ahead(DUE_SECONDS), retryPolicy=policy)
        first = service.attempt(timer)
        assert first["status"] == "pending" and first["attempts"] == 1
        assert first["lastError"] == "no stream has the subject 'nobody.listens': add it to one"
        last = service.attempt(timer)
        assert last["status"] == "failed" and last["attempts"] == 2 and "no stream has" in last["lastError"]

    def test_timer_of_the_platform_api_fails_after_one_attempt(self, service: HttpV1) -> None:
        callback = {"type": "nats", "topic": "nobody.listens"}
        made = service.request("POST", "/timers", json={"callback": callback, "execute_at": service.ahead(DUE_SECONDS)})
        service.advance()
        timer = service.finished(made.body["data"]["id"])
        assert timer["status"] == "failed" and "no stream has" in timer["last_error"] and timer["executed_at"]

    def test_retry_succeeds_once_a_stream_has_the_subject(self, service: HttpV1, broker: Orchestrator) -> None:
        timer = make(service, "late.subject", executeAt=service.ahead(DUE_SECONDS), retryPolicy={"jitter": False})
        assert service.attempt(timer)["status"] == "pending"
        broker.make_stream(name="LATE", subjects=["late.*"])
        assert service.attempt(timer)["status"] == "completed"
        [message] = broker.messages("LATE")
        assert message.headers["duetime-attempt"] == "2" and json.loads(message.data)["attempt"] == 2

    def test_attempt_fails_if_the_stream_is_full(self, service: HttpV1, broker: Orchestrator) -> None:
        broker.make_stream(name="FULL", subjects=["full.*"], max_msgs=1, discard="new")
        assert service.final(make(service, "full.a", retryPolicy=ONCE))["status"] == "completed"
        refused = service.final(make(service, "full.a", retryPolicy=ONCE))
        assert refused["status"] == "failed" and "the broker rejected the message" in refused["lastError"]

    def test_response_that_is_not_a_streams_ack_fails_the_attempt(self, service: HttpV1, broker: Orchestrator) -> None:
        async def answer(message: Any) -> None:
            await message.respond(b"hello")

        broker.run(broker.client.subscribe("plain.service", cb=answer))
        timer = service.final(make(service, "plain.service", retryPolicy=ONCE))
        assert timer["status"] == "failed" and "is not a stream's ack" in timer["lastError"]

    def test_attempt_without_an_ack_times_out(self, service: HttpV1, broker: Orchestrator) -> None:
        subscription = broker.run(broker.client.subscribe("plain.listener"))
        timer = service.final(make(service, "plain.listener", retryPolicy=ONCE, callbackTimeout="300ms"))
        assert timer["status"] == "failed" and "sent no ack in time" in timer["lastError"]
        assert service.attempts(timer)[0]["outcome"] == "timed_out"
        assert subscription.pending_msgs == 1

    def test_replay_publishes_with_a_new_message_id(self, service: HttpV1, broker: Orchestrator, subject: str) -> None:
        timer = service.final(make(service, subject))
        success(service.api("POST", service.path(timer) + "/replay"))
        one, two = wait_messages(broker, subject, 2)
        assert one.headers["Nats-Msg-Id"] != two.headers["Nats-Msg-Id"]
        assert [message.headers["duetime-attempt"] for message in (one, two)] == ["1", "1"]

    def test_stream_drops_a_duplicate_attempt(self, service: HttpV1, broker: Orchestrator, subject: str) -> None:
        """The second publish stands in for the attempt after an instance died before it got the ack."""
        sent = make(service, subject)
        [message] = wait_messages(broker, subject)
        id = message.headers["Nats-Msg-Id"]
        again = broker.run(broker.js.publish(subject, message.data, headers={"Nats-Msg-Id": id}))
        assert again.duplicate and len(wait_messages(broker, subject)) == 1
        assert service.final(sent)["status"] == "completed"

    def test_message_too_large_for_the_broker_fails_alone(self, tmp_path: Any, receiver: Receiver) -> None:
        """The broker closes the connection after a message that is too large, which would disturb other timers."""
        with Nats() as small:
            small.stop()
            config = small.directory / "nats.conf"
            config.write_text(config.read_text() + "max_payload: 4096\n")
            small.start()
            with (
                Orchestrator(small.url) as broker,
                HttpV1(tmp_path, virtual_clock=False, TIMER_BROKER_URL=small.url) as service,
            ):
                broker.wait_ready()
                broker.make_stream(name=STREAM, subjects=["app.>"])
                for size in (3900, 5000):  # too large with its headers, and by itself
                    large = service.final(make(service, "app.large", payload="x" * size, retryPolicy=ONCE))
                    assert large["status"] == "failed" and "accepts 4096 at most" in large["lastError"]
                assert service.final(make(service, "app.small"))["status"] == "completed"
                assert "away" not in service.stderr

    def test_failing_subject_does_not_delay_other_subjects(
        self, service: HttpV1, broker: Orchestrator, subject: str
    ) -> None:
        """Forty failures would open the circuit breaker if they counted against the broker."""
        service.batch([{"callbackSubject": "nobody.listens", "delay": "0s", "retryPolicy": ONCE} for _ in range(40)])
        until(
            "all have failed",
            lambda: (
                len([t for t in service.pages("status=failed", 100) if t["callbackSubject"] == "nobody.listens"]) >= 40
            ),
        )
        good = service.final(make(service, subject))
        assert good["status"] == "completed" and good["fireAt"] == good["executeAt"]


class TestBrokerUnavailable:
    def test_timers_wait_for_the_broker_without_using_an_attempt(
        self, tmp_path_factory: pytest.TempPathFactory, receiver: Receiver
    ) -> None:
        with (
            Nats() as nats,
            Orchestrator(nats.url) as broker,
            HttpV1(tmp_path_factory.mktemp("away"), virtual_clock=False, TIMER_BROKER_URL=nats.url) as service,
        ):
            broker.wait_ready()
            broker.make_stream(name=STREAM, subjects=["app.>"])
            nats.kill()
            # They have one attempt each, and are enough to open the circuit breaker.
            waiting = [make(service, f"app.{n}", retryPolicy=ONCE) for n in range(30)]
            assert service.run(receiver.url("/meanwhile"))["status"] == "completed"
            until(
                "timers are deferred",
                lambda: b"duetime_deferred_total 0.0" not in service.request("GET", "/metrics").body,
            )
            seen = service.current(waiting[0])
            assert seen["status"] in ("pending", "executing") and seen["lastError"] is None
            assert service.attempts(seen) == []
            nats.start()
            for timer in waiting:
                done = service.final(timer)
                assert done["status"] == "completed" and done["attempts"] == 1
            assert broker.count(STREAM) == 30

    def test_message_without_an_ack_is_published_again_after_the_broker_was_killed(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """Whether it arrived is unknown, so it is published again with the same id and not counted twice."""
        with (
            Nats() as nats,
            Orchestrator(nats.url) as broker,
            HttpV1(tmp_path_factory.mktemp("dies"), virtual_clock=False, TIMER_BROKER_URL=nats.url) as service,
        ):
            broker.wait_ready()
            broker.make_stream(name=STREAM, subjects=["app.>"])
            assert nats.process is not None
            nats.process.send_signal(signal.SIGSTOP)
            timer = make(service, "app.a", retryPolicy=ONCE)
            service.in_status(timer, "executing")
            nats.kill()
            nats.start()
            done = service.final(timer)
            assert done["status"] == "completed" and done["attempts"] == 1
            assert broker.count(STREAM) == 1


OWN_SUBJECTS: dict[str, Any] = {
    "DUETIME_BROKER_COMMANDS": "own.in",
    "DUETIME_BROKER_EVENTS": "own.out",
    "DUETIME_BROKER_DEAD_LETTERS": "own.dead",
    "DUETIME_BROKER_COMMANDS_STREAM": "OWN_IN",
    "DUETIME_BROKER_EVENTS_STREAM": "OWN_OUT",
    "DUETIME_BROKER_DEAD_LETTERS_STREAM": "OWN_DEAD",
}


@pytest.fixture(scope="module")
def own(nats: Nats, broker: Orchestrator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpV1]:
    with HttpV1(tmp_path_factory.mktemp("own"), TIMER_BROKER_URL=nats.url, **OWN_SUBJECTS) as own:
        broker.wait_ready("OWN_IN")
        yield own
        assert "Traceback" not in own.stderr


class TestOwnSubjects:
    """Timers of clients can publish neither commands nor events, whatever the settings for their subjects."""

    RESERVED = ["own.in", "own.in.tenant", "own.in.a.b", "own.out.tenant", "own.dead", "own.dead.x"]

    @pytest.mark.parametrize("reserved", RESERVED)
    def test_duetimes_own_subjects_are_rejected(self, own: HttpV1, subject: str, reserved: str) -> None:
        bad = {"callbackSubject": reserved, "delay": "1h"}
        body = failure(own.api("POST", "/timers", bad), 400, "INVALID_INPUT", "callbackSubject")
        assert "Duetime's own" in body["message"] and "DUETIME_BROKER_COMMANDS" in body["message"]
        failure(own.api("POST", "/timers/create", {"id": "x", **bad}), 400, "INVALID_INPUT", "callbackSubject")
        good = {"callbackSubject": subject, "delay": "1h"}
        for batch, expected in (([bad, good], [400, 200]), ([good, bad], [200, 400])):
            assert [result["status"] for result in own.batch(batch)] == expected
        timer = make(own, subject, executeAt=FAR)
        failure(own.api("PUT", own.path(timer), {"callbackSubject": reserved}), 400, "INVALID_INPUT", "callbackSubject")
        callback = {"type": "nats", "topic": reserved}
        answer = own.request("POST", "/timers", json={"callback": callback, "execute_at": own.ahead(60)})
        assert answer.status == 400 and "Duetime's own" in answer.body["message"]

    @pytest.mark.parametrize("subject", ["timer.commands.schedule.t", "own", "own.inn", "own.i"])
    def test_other_subjects_are_accepted(self, own: HttpV1, subject: str) -> None:
        make(own, subject, executeAt=FAR)

    def test_timers_of_commands_can_be_moved_but_not_redirected(self, own: HttpV1, broker: Orchestrator) -> None:
        command = {"tenantId": "moved", "serviceCallId": "c", "dueAt": own.ahead(3600)}
        broker.publish("own.in.moved", json.dumps(command).encode())
        timer = {"namespace": "moved", "id": "c"}
        until("the command is taken", lambda: own.api("GET", own.path(timer)).status == 200)
        success(own.api("PUT", own.path(timer), {"executeAt": own.ahead(7200)}))
        failure(own.api("PUT", own.path(timer), {"callbackSubject": "own.out.other"}), 400, "INVALID_INPUT")
        own.advance("3h")
        assert own.final(timer)["status"] == "completed"
        assert len(broker.messages("OWN_OUT", "own.out.moved")) == 1

    def test_timer_whose_subject_became_reserved_fails_at_its_first_attempt(
        self, nats: Nats, broker: Orchestrator, tmp_path: Any
    ) -> None:
        broker.make_stream(name="BEFORE", subjects=["before.>"])
        with HttpV1(tmp_path, TIMER_BROKER_URL=nats.url) as before:
            timer = make(before, "before.x", executeAt=before.ahead(3600), retryPolicy={"maxRetries": 5})
            assert before.terminate() == 0
        with HttpV1(tmp_path, TIMER_BROKER_URL=nats.url, DUETIME_BROKER_DEAD_LETTERS="before") as after:
            after.advance("2h")
            failed = after.final(timer)
            assert failed["status"] == "failed" and failed["attempts"] == 1
            assert "Duetime's own subjects" in failed["lastError"]
        assert broker.count("BEFORE") == 0
