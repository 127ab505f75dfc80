"""NATS as the target of timers made over HTTP: the same promises as for an HTTP target, with another way to travel."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.doors.commands import Orchestrator
from tests.doors.durable import ONCE, Durable, failure, success
from tests.nats import Nats
from tests.servers import DUE_SECONDS, Receiver, until

STREAM = "APP"
BAD_SUBJECTS = {
    "none at all": "",
    "a star": "app.*",
    "a star alone": "*",
    "everything": ">",
    "everything below": "app.>",
    "a star within": "app.a*b",
    "a blank": "app.a b",
    "a tab": "app.a\tb",
    "a line end": "app.a\r\nPUB app.b 0\r\n",
    "a NUL": "app.\x7f",
    "no first token": ".app",
    "no last token": "app.",
    "no token between": "app..a",
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
def door(nats: Nats, broker: Orchestrator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Durable]:
    with Durable(tmp_path_factory.mktemp("targets"), TIMER_BROKER_URL=nats.url) as door:
        broker.ready()
        yield door
        assert "Traceback" not in door.stderr, door.stderr


@pytest.fixture
def subject() -> str:
    return f"app.{uuid.uuid4().hex}"


def make(door: Durable, subject: str, **fields: Any) -> dict[str, Any]:
    """A timer of the durable door that goes to a subject."""
    when = {} if {"delay", "executeAt"} & fields.keys() else {"delay": "0s"}
    timer: dict[str, Any] = success(door.api("POST", "/timers", {"callbackSubject": subject, **when, **fields}))
    return timer


def got(broker: Orchestrator, subject: str, count: int = 1) -> list[Any]:
    def there() -> list[Any]:
        found = broker.messages(STREAM, subject)
        return found if len(found) >= count else []

    found: list[Any] = until(f"{count} messages on {subject}", there)
    return found


class TestDurableDoor:
    def test_a_message_is_what_an_http_target_would_receive(
        self, door: Durable, broker: Orchestrator, receiver: Receiver, subject: str
    ) -> None:
        fields = {"delay": "0s", "payload": {"a": [1.0, "ü"]}, "metadata": {"not": "sent"}}
        made = make(door, subject, id="to-nats", callbackHeaders={"X-Own": "y", "Authorization": "Bearer z"}, **fields)
        [message] = got(broker, subject)
        over_http = door.final(door.make(receiver.url("/twin"), id="to-http", **fields))
        expected = json.loads(receiver.at("/twin")[0].body)
        body = json.loads(message.data)
        assert list(body) == list(expected)
        assert body == expected | {"id": "to-nats", "executeAt": made["executeAt"]}
        headers = dict(message.headers)
        assert uuid.UUID(headers.pop("Nats-Msg-Id"))
        assert headers == {"X-Own": "y", "Authorization": "Bearer z", "duetime-attempt": "1"}
        timer = door.final(made)
        assert timer["status"] == over_http["status"] == "completed" and timer["attempts"] == 1
        [attempt] = door.attempts(timer)
        assert attempt["status"] is None and attempt["error"] is None and attempt["outcome"] == "answered"

    def test_it_is_shown_with_its_subject(self, door: Durable, subject: str) -> None:
        made = make(door, subject, executeAt=FAR, correlationId=subject, callbackHeaders={"X": "1"})
        [listed] = door.pages(f"correlationId={subject}", 10)
        for timer in (made, door.see(made), success(door.api("GET", door.path(made))), listed):
            assert timer["callbackSubject"] == subject and timer["callbackHeaders"] == {"X": "1"}
            assert timer["callbackUrl"] is None and timer["callbackMethod"] is None

    def test_an_upsert_and_a_batch_take_it_too(self, door: Durable, broker: Orchestrator, subject: str) -> None:
        upserted = {"id": subject, "callbackSubject": subject, "delay": "0s"}
        success(door.api("POST", "/timers/create", upserted))
        batch = [{"callbackSubject": subject, "delay": "0s"}, {"callbackSubject": "app.*", "delay": "0s"}]
        assert [result["status"] for result in door.batch(batch)] == [200, 400]
        assert len(got(broker, subject, 2)) == 2

    def test_a_repeat_is_the_same_timer(self, door: Durable, subject: str) -> None:
        fields = {"id": subject, "executeAt": FAR}
        assert make(door, subject, **fields) == make(door, subject, **fields)
        other = door.api("POST", "/timers", {"callbackSubject": subject + ".b", **fields})
        failure(other, 409, "TIMER_CONFLICT")

    def test_from_http_to_nats(self, door: Durable, broker: Orchestrator, subject: str) -> None:
        timer = door.make("http://127.0.0.1:9/", callbackMethod="PUT", callbackHeaders={"X": "1"})
        changed = success(door.api("PUT", door.path(timer), {"callbackSubject": subject}))
        assert changed["callbackSubject"] == subject and changed["callbackUrl"] is None
        assert changed["callbackHeaders"] == {"X": "1"} and changed["callbackMethod"] is None
        door.advance(f"{DUE_SECONDS}s")
        assert got(broker, subject)[0].headers["X"] == "1"

    def test_from_nats_to_http(self, door: Durable, receiver: Receiver, subject: str) -> None:
        timer = make(door, subject, executeAt=door.ahead(DUE_SECONDS), callbackHeaders={"X": "1"})
        changed = success(door.api("PUT", door.path(timer), {"callbackUrl": receiver.url("/from-nats")}))
        assert changed["callbackUrl"] == receiver.url("/from-nats") and changed["callbackSubject"] is None
        assert changed["callbackMethod"] == "POST"
        door.advance(f"{DUE_SECONDS}s")
        [request] = receiver.wait("/from-nats")
        assert request.headers["x"] == "1"

    def test_headers_alone(self, door: Durable, broker: Orchestrator, subject: str) -> None:
        timer = make(door, subject, executeAt=door.ahead(DUE_SECONDS), callbackHeaders={"X": "1"})
        changed = success(door.api("PUT", door.path(timer), {"callbackHeaders": {"Y": "2"}}))
        assert changed["callbackSubject"] == subject and changed["callbackHeaders"] == {"Y": "2"}
        door.advance(f"{DUE_SECONDS}s")
        headers = got(broker, subject)[0].headers
        assert headers["Y"] == "2" and "X" not in headers

    @pytest.mark.parametrize("name", BAD_SUBJECTS)
    def test_a_subject_that_is_refused(self, door: Durable, name: str) -> None:
        bad = {"callbackSubject": BAD_SUBJECTS[name]}
        failure(door.api("POST", "/timers", {"delay": "1h", **bad}), 400, "INVALID_INPUT", "callbackSubject")
        timer = door.make(executeAt=FAR)
        failure(door.api("PUT", door.path(timer), bad), 400, "INVALID_INPUT", "callbackSubject")
        assert door.see(timer) == timer

    def test_the_longest_subject(self, door: Durable, broker: Orchestrator, subject: str) -> None:
        longest = subject.ljust(255, "x")
        make(door, longest)
        assert len(got(broker, longest)) == 1

    def test_every_character_that_a_subject_may_have(self, door: Durable, broker: Orchestrator, subject: str) -> None:
        odd = subject + "." + "".join(chr(c) for c in range(33, 127) if chr(c) not in "*>.")
        make(door, odd)
        assert len(got(broker, odd)) == 1

    @pytest.mark.parametrize(
        "name", ["Nats-Msg-Id", "nats-expected-stream", "Nats-Rollup", "duetime-attempt", "Duetime-X"]
    )
    def test_a_header_that_is_refused(self, door: Durable, subject: str, name: str) -> None:
        """The first kind tell the broker what to do with a message: a roll-up removes all others."""
        fields = {"delay": "1h", "callbackSubject": subject, "callbackHeaders": {name: "x"}}
        failure(door.api("POST", "/timers", fields), 400, "INVALID_INPUT", "callbackHeaders")

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"callbackUrl": "http://127.0.0.1:9/"}, "callbackSubject"),
            ({"callbackMethod": "POST"}, "callbackMethod"),
        ],
        ids=["a URL", "a method"],
    )
    def test_what_does_not_go_with_a_subject(
        self, door: Durable, subject: str, fields: dict[str, str], field: str
    ) -> None:
        answer = door.api("POST", "/timers", {"delay": "1h", "callbackSubject": subject, **fields})
        failure(answer, 400, "INVALID_INPUT", field)

    def test_neither_a_url_nor_a_subject(self, door: Durable) -> None:
        failure(door.api("POST", "/timers", {"delay": "1h"}), 400, "INVALID_INPUT", "callbackUrl")

    def test_header_values_beyond_ascii(self, door: Durable, broker: Orchestrator, subject: str) -> None:
        heard = broker.run(broker.client.subscribe(subject))
        make(door, subject, callbackHeaders={"X": "grün", "Y": ""})
        headers = broker.run(heard.next_msg(30)).headers
        assert headers["X"] == "grün" and headers["Y"] == ""


class TestPlatformDoor:
    def make(self, door: Durable, callback: Any, **fields: Any) -> Any:
        when = {"execute_at": door.ahead(DUE_SECONDS)}
        return door.request("POST", "/timers", json={"callback": callback, **when, **fields})

    def test_a_message_is_the_payload_as_it_is(self, door: Durable, broker: Orchestrator, subject: str) -> None:
        callback = {"type": "nats", "topic": subject, "headers": {"X-Own": "y"}}
        body = b'{"callback": %b, "execute_at": "%b", "callback_payload": { "b":1.0,"a": [ ] }}'
        answer = door.request(
            "POST", "/timers", body=body % (json.dumps(callback).encode(), door.ahead(DUE_SECONDS).encode())
        )
        assert answer.status == 201 and answer.body["data"]["callback_url"] is None
        door.advance()
        [message] = got(broker, subject)
        assert message.data == b'{ "b":1.0,"a": [ ] }'
        assert message.headers["X-Own"] == "y" and message.headers["duetime-attempt"] == "1"
        timer = door.finished(answer.body["data"]["id"])
        assert timer["status"] == "completed" and timer["last_error"] is None
        assert timer["callback"] == callback and timer["callback_headers"] is None

    def test_without_a_payload_the_message_is_empty(self, door: Durable, broker: Orchestrator, subject: str) -> None:
        assert self.make(door, {"type": "nats", "topic": subject}).status == 201
        door.advance()
        assert not got(broker, subject)[0].data

    def test_the_durable_door_shows_its_subject(self, door: Durable, subject: str) -> None:
        id = self.make(door, {"type": "nats", "topic": subject}).body["data"]["id"]
        assert door.see({"namespace": "default", "id": id})["callbackSubject"] == subject

    def test_it_is_shown_with_its_topic(self, door: Durable, subject: str) -> None:
        callback = {"type": "nats", "topic": subject, "headers": {"X": "1"}}
        id = self.make(door, callback).body["data"]["id"]
        assert door.get(id)["callback"] == callback

    def test_from_http_to_nats_and_back(
        self, door: Durable, broker: Orchestrator, receiver: Receiver, subject: str
    ) -> None:
        id = door.create(receiver.url("/there"), callback_headers={"X": "1"})
        there = door.request("PUT", f"/timers/{id}", json={"callback": {"type": "nats", "topic": subject}})
        assert there.status == 200 and there.body["data"]["callback_url"] is None
        back = door.request("PUT", f"/timers/{id}", json={"callback_url": receiver.url("/back")})
        assert back.status == 200 and back.body["data"]["callback_url"] == receiver.url("/back")
        assert back.body["data"]["callback_method"] == "POST"
        again = door.request("PUT", f"/timers/{id}", json={"callback": {"type": "nats", "topic": subject}})
        assert again.status == 200
        door.advance()
        assert len(got(broker, subject)) == 1
        assert receiver.at("/there") == receiver.at("/back") == []

    def test_other_changes_keep_the_topic(self, door: Durable, broker: Orchestrator, subject: str) -> None:
        id = self.make(door, {"type": "nats", "topic": subject, "headers": {"X": "1"}}).body["data"]["id"]
        assert door.request("PUT", f"/timers/{id}", json={"callback_payload": 7}).status == 200
        headers = door.request("PUT", f"/timers/{id}", json={"callback_headers": {"Y": "2"}})
        assert headers.status == 400 and "callback" in headers.body["message"]
        door.advance()
        [message] = got(broker, subject)
        assert message.data == b"7" and message.headers["X"] == "1"

    @pytest.mark.parametrize(
        ("callback", "field"),
        [
            ({}, "callback.type"),
            ({"type": "http", "topic": "app.a"}, "callback.type"),
            ({"type": "NATS", "topic": "app.a"}, "callback.type"),
            ({"type": "nats"}, "callback.topic"),
            ({"type": "nats", "topic": None}, "callback.topic"),
            ({"type": "nats", "topic": 7}, "callback.topic"),
            ({"type": "nats", "topic": "app.a", "headers": {"Nats-Rollup": "all"}}, "callback.headers"),
            ({"type": "nats", "topic": "app.a", "headers": {"duetime-timer": "x"}}, "callback.headers"),
            ({"type": "nats", "topic": "app.a", "headers": {"a b": "x"}}, "callback.headers"),
            ({"type": "nats", "topic": "app.a", "headers": {"X": "a\r\nb"}}, "callback.headers"),
            ("nats", "callback"),
            *(({"type": "nats", "topic": topic}, "callback.topic") for topic in BAD_SUBJECTS.values()),
        ],
        ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
    )
    def test_a_callback_that_is_refused(self, door: Durable, callback: Any, field: str) -> None:
        answer = self.make(door, callback)
        assert answer.status == 400 and answer.body["code"] == 2 and field in answer.body["message"], answer

    def test_two_ways_to_go(self, door: Durable, subject: str) -> None:
        answer = self.make(door, {"type": "nats", "topic": subject}, callback_url="http://127.0.0.1:9/")
        assert answer.status == 400 and answer.body["message"].startswith("callback")

    def test_a_repeat_with_its_key(self, door: Durable, subject: str) -> None:
        callback, when = {"type": "nats", "topic": subject}, door.ahead(3600)
        first, second = (self.make(door, callback, idempotency_key=subject, execute_at=when) for _ in range(2))
        assert (first.status, second.status) == (201, 200) and first.body["data"] == second.body["data"]
        callback["topic"] += ".other"
        assert self.make(door, callback, idempotency_key=subject, execute_at=when).status == 409


def test_without_a_broker_the_answer_says_what_to_do(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Durable(tmp_path_factory.mktemp("no-broker")) as door:
        body = failure(door.api("POST", "/timers", {"delay": "1h", "callbackSubject": "app.a"}), 400, "INVALID_INPUT")
        assert "TIMER_BROKER_URL" in body["message"]
        timer = door.make(executeAt=FAR)
        failure(door.api("PUT", door.path(timer), {"callbackSubject": "app.a"}), 400, "INVALID_INPUT")
        [result] = door.batch([{"delay": "1h", "callbackSubject": "app.a"}])
        assert result["status"] == 400 and "TIMER_BROKER_URL" in result["error"]["message"]
        callback = {"type": "nats", "topic": "app.a"}
        made = door.request("POST", "/timers", json={"callback": callback, "execute_at": door.ahead(60)})
        assert made.status == 400 and made.body["code"] == 2 and "TIMER_BROKER_URL" in made.body["message"]
        id = door.create("http://127.0.0.1:9/")
        assert door.request("PUT", f"/timers/{id}", json={"callback": callback}).status == 400
        assert door.get(id)["callback_url"] == "http://127.0.0.1:9/"


class TestRetries:
    def test_no_stream_takes_the_subject(self, door: Durable) -> None:
        policy = {"maxRetries": 1, "initialInterval": "10s", "jitter": False}
        timer = make(door, "nobody.listens", executeAt=door.ahead(DUE_SECONDS), retryPolicy=policy)
        first = door.attempt(timer)
        assert first["status"] == "pending" and first["attempts"] == 1
        assert first["lastError"] == "no stream takes the subject 'nobody.listens': add it to one"
        last = door.attempt(timer)
        assert last["status"] == "failed" and last["attempts"] == 2 and "no stream takes" in last["lastError"]

    def test_one_attempt_of_the_platform_door(self, door: Durable) -> None:
        callback = {"type": "nats", "topic": "nobody.listens"}
        made = door.request("POST", "/timers", json={"callback": callback, "execute_at": door.ahead(DUE_SECONDS)})
        door.advance()
        timer = door.finished(made.body["data"]["id"])
        assert timer["status"] == "failed" and "no stream takes" in timer["last_error"] and timer["executed_at"]

    def test_a_stream_that_is_made_meanwhile(self, door: Durable, broker: Orchestrator) -> None:
        timer = make(door, "late.subject", executeAt=door.ahead(DUE_SECONDS), retryPolicy={"jitter": False})
        assert door.attempt(timer)["status"] == "pending"
        broker.make_stream(name="LATE", subjects=["late.*"])
        assert door.attempt(timer)["status"] == "completed"
        [message] = broker.messages("LATE")
        assert message.headers["duetime-attempt"] == "2" and json.loads(message.data)["attempt"] == 2

    def test_a_stream_that_is_full(self, door: Durable, broker: Orchestrator) -> None:
        broker.make_stream(name="FULL", subjects=["full.*"], max_msgs=1, discard="new")
        assert door.final(make(door, "full.a", retryPolicy=ONCE))["status"] == "completed"
        refused = door.final(make(door, "full.a", retryPolicy=ONCE))
        assert refused["status"] == "failed" and "the broker refused it" in refused["lastError"]

    def test_a_subject_where_somebody_else_answers(self, door: Durable, broker: Orchestrator) -> None:
        async def answer(message: Any) -> None:
            await message.respond(b"hello")

        broker.run(broker.client.subscribe("plain.service", cb=answer))
        timer = door.final(make(door, "plain.service", retryPolicy=ONCE))
        assert timer["status"] == "failed" and "somebody else than a stream answers" in timer["lastError"]

    def test_nobody_confirms_in_time(self, door: Durable, broker: Orchestrator) -> None:
        heard = broker.run(broker.client.subscribe("plain.listener"))
        timer = door.final(make(door, "plain.listener", retryPolicy=ONCE, callbackTimeout="300ms"))
        assert timer["status"] == "failed" and "did not confirm in time" in timer["lastError"]
        assert door.attempts(timer)[0]["outcome"] == "timed_out"
        assert heard.pending_msgs == 1

    def test_replay(self, door: Durable, broker: Orchestrator, subject: str) -> None:
        timer = door.final(make(door, subject))
        success(door.api("POST", door.path(timer) + "/replay"))
        one, two = got(broker, subject, 2)
        assert one.headers["Nats-Msg-Id"] != two.headers["Nats-Msg-Id"]
        assert [message.headers["duetime-attempt"] for message in (one, two)] == ["1", "1"]

    def test_a_duplicate_is_dropped_by_the_stream(self, door: Durable, broker: Orchestrator, subject: str) -> None:
        """The first attempt arrives and its confirmation is lost, as when an instance dies just then."""
        sent = make(door, subject)
        [message] = got(broker, subject)
        id = message.headers["Nats-Msg-Id"]
        again = broker.run(broker.js.publish(subject, message.data, headers={"Nats-Msg-Id": id}))
        assert again.duplicate and len(got(broker, subject)) == 1
        assert door.final(sent)["status"] == "completed"

    def test_one_that_is_too_large_for_the_broker(self, tmp_path: Any, receiver: Receiver) -> None:
        """A server ends the connection of a client that sends too much: that must not happen to the others."""
        with Nats() as small:
            small.stop()
            config = small.directory / "nats.conf"
            config.write_text(config.read_text() + "max_payload: 4096\n")
            small.start()
            with (
                Orchestrator(small.url) as broker,
                Durable(tmp_path, virtual_clock=False, TIMER_BROKER_URL=small.url) as door,
            ):
                broker.ready()
                broker.make_stream(name=STREAM, subjects=["app.>"])
                for size in (3900, 5000):  # too large with its headers, and by itself
                    large = door.final(make(door, "app.large", payload="x" * size, retryPolicy=ONCE))
                    assert large["status"] == "failed" and "4096 bytes at most" in large["lastError"]
                assert door.final(make(door, "app.small"))["status"] == "completed"
                assert "away" not in door.stderr

    def test_a_bad_subject_does_not_hold_up_the_others(self, door: Durable, broker: Orchestrator, subject: str) -> None:
        """Forty refusals would open the breaker of a destination; the broker itself is well."""
        door.batch([{"callbackSubject": "nobody.listens", "delay": "0s", "retryPolicy": ONCE} for _ in range(40)])
        until(
            "they have failed",
            lambda: (
                len([t for t in door.pages("status=failed", 100) if t["callbackSubject"] == "nobody.listens"]) >= 40
            ),
        )
        good = door.final(make(door, subject))
        assert good["status"] == "completed" and good["fireAt"] == good["executeAt"]  # it was not put off


class TestBrokerAway:
    def test_timers_wait_unspent_and_go_out_when_it_is_back(
        self, tmp_path_factory: pytest.TempPathFactory, receiver: Receiver
    ) -> None:
        with (
            Nats() as nats,
            Orchestrator(nats.url) as broker,
            Durable(tmp_path_factory.mktemp("away"), virtual_clock=False, TIMER_BROKER_URL=nats.url) as door,
        ):
            broker.ready()
            broker.make_stream(name=STREAM, subjects=["app.>"])
            nats.kill()
            # One attempt is all that these have. More of them than open the breaker.
            waiting = [make(door, f"app.{n}", retryPolicy=ONCE) for n in range(30)]
            assert door.run(receiver.url("/meanwhile"))["status"] == "completed"
            until("it was tried", lambda: b"duetime_deferred_total 0.0" not in door.request("GET", "/metrics").body)
            seen = door.see(waiting[0])
            assert seen["status"] in ("pending", "executing") and seen["lastError"] is None
            assert door.attempts(seen) == []
            nats.start()
            for timer in waiting:
                done = door.final(timer)
                assert done["status"] == "completed" and done["attempts"] == 1
            assert broker.count(STREAM) == 30

    def test_a_message_under_way_when_it_dies(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Nobody knows whether it arrived. It has one attempt only and is not lost: it goes out again with its id."""
        with (
            Nats() as nats,
            Orchestrator(nats.url) as broker,
            Durable(tmp_path_factory.mktemp("dies"), virtual_clock=False, TIMER_BROKER_URL=nats.url) as door,
        ):
            broker.ready()
            broker.make_stream(name=STREAM, subjects=["app.>"])
            assert nats.process is not None
            nats.process.send_signal(signal.SIGSTOP)
            timer = make(door, "app.a", retryPolicy=ONCE)
            door.in_status(timer, "executing")
            nats.kill()
            nats.start()
            done = door.final(timer)
            assert done["status"] == "completed" and done["attempts"] == 1
            assert broker.count(STREAM) == 1


OWN_SUBJECTS = {
    "DUETIME_BROKER_COMMANDS": "own.in",
    "DUETIME_BROKER_EVENTS": "own.out",
    "DUETIME_BROKER_DEAD_LETTERS": "own.dead",
    "DUETIME_BROKER_COMMANDS_STREAM": "OWN_IN",
    "DUETIME_BROKER_EVENTS_STREAM": "OWN_OUT",
    "DUETIME_BROKER_DEAD_LETTERS_STREAM": "OWN_DEAD",
}


@pytest.fixture(scope="module")
def own(nats: Nats, broker: Orchestrator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Durable]:
    with Durable(tmp_path_factory.mktemp("own"), TIMER_BROKER_URL=nats.url, **OWN_SUBJECTS) as own:
        broker.ready("OWN_IN")
        yield own
        assert "Traceback" not in own.stderr


class TestOwnSubjects:
    """A client's timer can make neither commands nor events, whatever their subjects are called."""

    CLOSED = ["own.in", "own.in.tenant", "own.in.a.b", "own.out.tenant", "own.dead", "own.dead.x"]

    @pytest.mark.parametrize("closed", CLOSED)
    def test_a_create_is_refused(self, own: Durable, subject: str, closed: str) -> None:
        bad = {"callbackSubject": closed, "delay": "1h"}
        body = failure(own.api("POST", "/timers", bad), 400, "INVALID_INPUT", "callbackSubject")
        assert "Duetime's own" in body["message"] and "DUETIME_BROKER_COMMANDS" in body["message"]
        failure(own.api("POST", "/timers/create", {"id": "x", **bad}), 400, "INVALID_INPUT", "callbackSubject")
        good = {"callbackSubject": subject, "delay": "1h"}
        for batch, expected in (([bad, good], [400, 200]), ([good, bad], [200, 400])):
            assert [result["status"] for result in own.batch(batch)] == expected
        timer = make(own, subject, executeAt=FAR)
        failure(own.api("PUT", own.path(timer), {"callbackSubject": closed}), 400, "INVALID_INPUT", "callbackSubject")
        callback = {"type": "nats", "topic": closed}
        answer = own.request("POST", "/timers", json={"callback": callback, "execute_at": own.ahead(60)})
        assert answer.status == 400 and "Duetime's own" in answer.body["message"]

    @pytest.mark.parametrize("subject", ["timer.commands.schedule.t", "own", "own.inn", "own.i"])
    def test_other_subjects_are_not(self, own: Durable, subject: str) -> None:
        make(own, subject, executeAt=FAR)

    def test_commands_make_events_and_their_timers_can_be_moved(self, own: Durable, broker: Orchestrator) -> None:
        command = {"tenantId": "moved", "serviceCallId": "c", "dueAt": own.ahead(3600)}
        broker.publish("own.in.moved", json.dumps(command).encode())
        timer = {"namespace": "moved", "id": "c"}
        until("the command is taken", lambda: own.api("GET", own.path(timer)).status == 200)
        success(own.api("PUT", own.path(timer), {"executeAt": own.ahead(7200)}))
        failure(own.api("PUT", own.path(timer), {"callbackSubject": "own.out.other"}), 400, "INVALID_INPUT")
        own.advance("3h")
        assert own.final(timer)["status"] == "completed"
        assert len(broker.messages("OWN_OUT", "own.out.moved")) == 1

    def test_a_timer_from_before_fails_at_once(self, nats: Nats, broker: Orchestrator, tmp_path: Any) -> None:
        broker.make_stream(name="BEFORE", subjects=["before.>"])
        with Durable(tmp_path, TIMER_BROKER_URL=nats.url) as before:
            timer = make(before, "before.x", executeAt=before.ahead(3600), retryPolicy={"maxRetries": 5})
            assert before.terminate() == 0
        with Durable(tmp_path, TIMER_BROKER_URL=nats.url, DUETIME_BROKER_DEAD_LETTERS="before") as after:
            after.advance("2h")
            failed = after.final(timer)
            assert failed["status"] == "failed" and failed["attempts"] == 1
            assert "Duetime's own subjects" in failed["lastError"]
        assert broker.count("BEFORE") == 0
