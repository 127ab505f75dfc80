"""The contract of the broker API, tested with a real NATS server and a plain NATS client."""

from __future__ import annotations

import json
import re
import signal
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType

from tests.doors.commands import (
    COMMANDS_STREAM,
    DEAD_STREAM,
    EVENTS,
    EVENTS_STREAM,
    SUBJECT,
    Orchestrator,
    bare,
    envelope,
    from_now,
    new_tenant,
    publish_raw,
)
from tests.doors.http_v1 import HttpV1, success
from tests.nats import Nats
from tests.postgres import Missing, Postgres
from tests.servers import Duetime, Receiver, Reply, instant, until
from tests.skips import skip

FAR = "2999-01-01T00:00:00.000Z"
ACK_WAIT_SECONDS = 30.0
"""The broker redelivers a command that is not acked within this time."""


@pytest.fixture(scope="module")
def nats() -> Iterator[Nats]:
    with Nats() as server:
        yield server


@pytest.fixture(scope="module")
def broker(nats: Nats, service: HttpV1) -> Iterator[Orchestrator]:
    with Orchestrator(nats.url) as broker:
        broker.wait_ready()
        yield broker


@pytest.fixture(scope="module")
def service(nats: Nats, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpV1]:
    """A service with a virtual clock and a broker."""
    with HttpV1(tmp_path_factory.mktemp("broker"), TIMER_BROKER_URL=nats.url) as service:
        yield service
        assert "Traceback" not in service.stderr, service.stderr
        assert service.terminate() == 0


@pytest.fixture
def own_nats() -> Iterator[Nats]:
    """A NATS server for one test, which may stop it."""
    with Nats() as server:
        yield server


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., HttpV1]]:
    """Starts services with a real clock for one test, and kills them when it ends."""
    made: list[HttpV1] = []

    def make(directory: Path | None = None, **options: Any) -> HttpV1:
        options.setdefault("virtual_clock", False)
        made.append(HttpV1(directory or tmp_path_factory.mktemp("own"), start=False, **options))
        made[-1].start()
        return made[-1]

    yield make
    for service in made:
        service.kill()


def _has_stream(broker: Orchestrator, name: str) -> bool:
    return name in {info.config.name for info in broker.run(broker.js.streams_info())}


def _stored(service: HttpV1, tenant: str, call: str) -> dict[str, Any]:
    """Wait for the timer of a command; returns it."""

    def found() -> Any:
        answer = service.api("POST", "/timers/get", {"namespace": tenant, "timerId": call})
        return answer.body if answer.status == 200 else None

    timer: dict[str, Any] = until(f"{tenant}/{call} is stored", found)
    return timer


def _count(service: Duetime, name: str) -> float:
    """The sum of a metric over all its labels."""
    page = service.request("GET", "/metrics").body.decode()
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, found))


class TestCommand:
    def test_envelope_creates_a_timer(self, service: HttpV1, broker: Orchestrator) -> None:
        acme, due = new_tenant(), service.ahead(60)
        broker.send(acme, "call-1", due, correlationId=f"corr-{acme}")
        timer = _stored(service, acme, "call-1")
        assert (timer["namespace"], timer["id"], timer["executeAt"]) == (acme, "call-1", due)
        assert timer["correlationId"] == f"corr-{acme}" and timer["status"] == "pending"
        assert timer["callbackSubject"] == f"{EVENTS}.{acme}" and timer["callbackUrl"] is None

    def test_payload_without_an_envelope_creates_a_timer(self, service: HttpV1, broker: Orchestrator) -> None:
        acme, due = new_tenant(), service.ahead(60)
        broker.publish(f"{SUBJECT}.{acme}", json.dumps(bare(acme, "call", due)).encode())
        timer = _stored(service, acme, "call")
        assert timer["executeAt"] == due and timer["correlationId"] is None

    def test_payload_without_an_envelope_can_have_a_correlation_id(self, service: HttpV1, broker: Orchestrator) -> None:
        acme = new_tenant()
        broker.publish(f"{SUBJECT}.{acme}", json.dumps(bare(acme, "call", FAR, correlationId="c")).encode())
        assert _stored(service, acme, "call")["correlationId"] == "c"

    def test_unknown_fields_are_ignored(self, service: HttpV1, broker: Orchestrator) -> None:
        acme = new_tenant()
        message = envelope(acme, "call", FAR, _tag="Envelope", aggregateId="x", causationId=None, extra={"a": [1]})
        message["payload"] |= {"_tag": "ScheduleTimer", "more": 1}
        broker.publish(f"{SUBJECT}.{acme}", json.dumps(message).encode())
        assert _stored(service, acme, "call")["status"] == "pending"

    def test_null_correlation_id_is_none(self, service: HttpV1, broker: Orchestrator) -> None:
        acme = new_tenant()
        broker.send(acme, "call", FAR, correlationId=None)
        assert _stored(service, acme, "call")["correlationId"] is None

    @pytest.mark.parametrize("call", ["ü/ %😀", "x" * 255, "a.b.*.>"])
    def test_service_call_id_can_be_any_timer_id(self, service: HttpV1, broker: Orchestrator, call: str) -> None:
        acme = new_tenant()
        broker.send(acme, call, FAR)
        assert _stored(service, acme, call)["id"] == call

    def test_tenant_id_can_have_64_characters(self, service: HttpV1, broker: Orchestrator) -> None:
        acme = new_tenant().ljust(64, "_")
        broker.send(acme, "call", FAR)
        assert _stored(service, acme, "call")["namespace"] == acme

    def test_due_at_can_have_any_offset(self, service: HttpV1, broker: Orchestrator) -> None:
        acme = new_tenant()
        broker.send(acme, "call", "2999-01-01T02:00:00+02:00")
        assert _stored(service, acme, "call")["executeAt"] == FAR

    def test_command_creates_the_namespace_of_its_tenant(self, service: HttpV1, broker: Orchestrator) -> None:
        acme = new_tenant()
        assert service.api("GET", f"/namespaces/{acme}").status == 404
        broker.send(acme, "call", FAR)
        _stored(service, acme, "call")
        assert success(service.api("GET", f"/namespaces/{acme}"))["name"] == acme
        # Only commands create namespaces; the HTTP API rejects unknown ones.
        refused = service.api(
            "POST", "/timers", {"namespace": new_tenant(), "delay": "1h", "callbackUrl": "http://127.0.0.1/"}
        )
        assert refused.body["error"] == "UNKNOWN_NAMESPACE"

    def test_existing_namespace_keeps_its_settings(self, service: HttpV1, broker: Orchestrator) -> None:
        acme = service.namespace(new_tenant(), shards=3, retention="1d")
        broker.send(acme, "call", FAR)
        _stored(service, acme, "call")
        assert success(service.api("GET", f"/namespaces/{acme}"))["shards"] == 3

    def test_list_by_correlation_id_finds_timers_of_all_tenants(self, service: HttpV1, broker: Orchestrator) -> None:
        one, two = new_tenant(), new_tenant()
        for acme in (one, two):
            broker.send(acme, "call", FAR, correlationId=f"both-{one}")
        _stored(service, one, "call"), _stored(service, two, "call")
        found = service.pages(f"correlationId=both-{one}", 10)
        assert {timer["namespace"] for timer in found} == {one, two}

    def test_http_api_lists_deletes_and_moves_timers_of_commands(self, service: HttpV1, broker: Orchestrator) -> None:
        acme = new_tenant()
        for call in ("moved", "gone"):
            broker.send(acme, call, FAR)
            _stored(service, acme, call)
        assert {timer["id"] for timer in service.pages(f"namespace={acme}", 10)} == {"moved", "gone"}
        success(service.api("DELETE", f"/timers/{acme}/gone"), 204)
        success(service.api("PUT", f"/timers/{acme}/moved", {"executeAt": service.ahead(5)}))
        service.advance("6s")
        [event] = broker.events(acme)
        assert event.body["payload"]["serviceCallId"] == "moved"

    def test_platform_api_shows_timers_of_the_default_tenant(self, service: HttpV1, broker: Orchestrator) -> None:
        call = str(uuid.uuid4())
        broker.send("default", call, FAR)
        _stored(service, "default", call)
        shown = service.get(call)
        assert shown["status"] == "pending" and shown["execute_at"] == FAR and shown["callback_url"] is None
        listed = service.request("GET", "/timers?limit=200").body["data"]["timers"]
        assert call in {timer["id"] for timer in listed}

    def test_commands_are_counted(self, service: HttpV1, broker: Orchestrator) -> None:
        acme = new_tenant()
        received, refused = (
            _count(service, "timer_commands_received_total"),
            _count(service, "duetime_refused_commands_total"),
        )
        broker.send_many([(acme, f"c{n}", FAR) for n in range(7)])
        broker.wait_acked()
        assert _count(service, "timer_commands_received_total") == received + 7
        assert _count(service, "duetime_refused_commands_total") == refused
        assert 'duetime_creates_total{api="nats"}' in service.request("GET", "/metrics").body.decode()

    def test_commands_of_several_batches_are_applied_in_order(self, service: HttpV1, broker: Orchestrator) -> None:
        """The last of several commands for a call determines its time."""
        acme = new_tenant()
        last = [f"2{n:03}-01-01T00:00:00.000Z" for n in range(300, 600)]
        broker.send_many(
            [(acme, f"c{n}", due) for n in range(300) for due in (FAR, "2998-01-01T00:00:00.000Z", last[n])]
        )
        broker.wait_acked()
        found = {timer["id"]: timer["executeAt"] for timer in service.pages(f"namespace={acme}", 100)}
        assert found == {f"c{n}": last[n] for n in range(300)}


class TestRepeatedCommand:
    def test_repeated_command_moves_a_pending_timer(self, service: HttpV1, broker: Orchestrator) -> None:
        acme, later, sooner = new_tenant(), service.ahead(7200), service.ahead(60)
        broker.send(acme, "call", later)
        _stored(service, acme, "call")
        broker.send(acme, "call", sooner)
        until("it was moved", lambda: _stored(service, acme, "call")["executeAt"] == sooner)
        service.advance("61s")
        [event] = broker.events(acme)
        service.advance("3h")
        assert service.final({"namespace": acme, "id": "call"})["status"] == "completed"
        assert broker.events(acme) == [event]

    def test_repeated_command_can_move_a_timer_into_the_past(self, service: HttpV1, broker: Orchestrator) -> None:
        acme = new_tenant()
        broker.send(acme, "call", FAR)
        _stored(service, acme, "call")
        broker.send(acme, "call", service.ahead(-60))
        assert len(broker.events(acme)) == 1

    def test_identical_command_changes_nothing(self, service: HttpV1, broker: Orchestrator) -> None:
        acme = new_tenant()
        broker.send(acme, "call", FAR, correlationId="first")
        before = _stored(service, acme, "call")
        broker.send(acme, "call", FAR, correlationId="first")
        broker.wait_acked()
        assert _stored(service, acme, "call") == before

    def test_redelivered_command_does_not_override_a_later_command(
        self, own_nats: Nats, serve: Callable[..., HttpV1], tmp_path: Path
    ) -> None:
        with Orchestrator(own_nats.url) as broker:
            service = serve(tmp_path, TIMER_BROKER_URL=own_nats.url)
            broker.wait_ready()
            assert service.terminate() == 0
            acme, later = new_tenant(), "2999-01-02T00:00:00.000Z"
            broker.send(acme, "call", FAR)
            # Stands in for an instance that fetched the command and died.
            dead_instance = broker.run(broker.js.pull_subscribe_bind("duetime", COMMANDS_STREAM))
            [unacked] = broker.run(dead_instance.fetch(1))
            broker.send(acme, "call", later)
            service = serve(tmp_path, TIMER_BROKER_URL=own_nats.url)
            assert _stored(service, acme, "call")["executeAt"] == later
            broker.run(unacked.nak())
            broker.wait_acked()
            assert _stored(service, acme, "call")["executeAt"] == later
            broker.send(acme, "call", FAR)
            until("it was moved", lambda: _stored(service, acme, "call")["executeAt"] == FAR)

    def test_command_for_a_completed_timer_is_ignored(self, service: HttpV1, broker: Orchestrator) -> None:
        acme = new_tenant()
        broker.send(acme, "call", service.ahead(-1))
        events = broker.events(acme)
        reached = service.final({"namespace": acme, "id": "call"})
        broker.send(acme, "call", FAR)
        broker.send(acme, "call", service.ahead(-1))
        broker.wait_acked()
        assert service.current(reached) == reached
        service.advance("1h")
        broker.send(acme, "another", service.ahead(-1))
        assert [event.body["payload"]["serviceCallId"] for event in broker.events(acme, 2)] == ["call", "another"]
        assert broker.events(acme)[:1] == events
        assert broker.dead_letters(f"{SUBJECT}.{acme}") == []

    def test_command_for_a_canceled_timer_is_ignored(self, service: HttpV1, broker: Orchestrator) -> None:
        call = str(uuid.uuid4())
        broker.send("default", call, FAR)
        _stored(service, "default", call)
        assert service.request("DELETE", f"/timers/{call}").status == 200
        broker.send("default", call, service.ahead(-1))
        broker.wait_acked()
        assert service.get(call)["status"] == "canceled"

    def test_tenants_can_use_the_same_service_call_id(self, service: HttpV1, broker: Orchestrator) -> None:
        one, two = new_tenant(), new_tenant()
        broker.send(one, "call", service.ahead(-1))
        broker.events(one)
        broker.send(two, "call", service.ahead(-1))
        assert broker.events(two)[0].body["tenantId"] == two


class TestEvent:
    def test_event_has_the_documented_fields_and_headers(self, service: HttpV1, broker: Orchestrator) -> None:
        acme = new_tenant()
        broker.send(acme, "call-ü", service.ahead(60), correlationId="corr")
        _stored(service, acme, "call-ü")
        assert broker.events(acme, 0) == []
        due = instant(_stored(service, acme, "call-ü")["executeAt"])
        service.advance("61s")
        [event] = broker.events(acme)
        body = dict(event.body)
        reached = instant(body["payload"]["reachedAt"])
        assert due <= reached <= due + timedelta(seconds=60)
        assert body.pop("payload") == {
            "_tag": "DueTimeReached",
            "tenantId": acme,
            "serviceCallId": "call-ü",
            "reachedAt": event.body["payload"]["reachedAt"],
        }
        made = uuid.UUID(body.pop("id"))
        assert made.version == 7 and made.variant == uuid.RFC_4122
        assert abs((made.int >> 80) - reached.timestamp() * 1000) < 60_000  # its first 48 bits are the time
        assert abs(body.pop("timestampMs") - reached.timestamp() * 1000) <= 1
        expected = {"type": "DueTimeReached", "aggregateId": "call-ü", "tenantId": acme, "correlationId": "corr"}
        assert body == expected
        headers = dict(event.headers)
        assert uuid.UUID(headers.pop("Nats-Msg-Id")) and headers.pop("duetime-attempt") == "1"
        assert headers == {}
        timer = service.final({"namespace": acme, "id": "call-ü"})
        assert timer["status"] == "completed" and timer["attempts"] == 1 and timer["lastError"] is None

    def test_event_of_a_timer_without_correlation_id_has_none(self, service: HttpV1, broker: Orchestrator) -> None:
        acme = new_tenant()
        broker.send(acme, "call", service.ahead(-1))
        [event] = broker.events(acme)
        assert set(event.body) == {"id", "type", "aggregateId", "tenantId", "timestampMs", "payload"}

    @pytest.mark.parametrize("due", ["2020-02-29T00:00:00Z", "1970-01-01T00:00:00Z"])
    def test_timer_in_the_past_fires_at_once(self, service: HttpV1, broker: Orchestrator, due: str) -> None:
        acme = new_tenant()
        broker.send(acme, "call", due)
        [event] = broker.events(acme)
        assert abs(instant(event.body["payload"]["reachedAt"]) - service.now()) < timedelta(minutes=1)

    def test_each_firing_has_new_ids(self, service: HttpV1, broker: Orchestrator) -> None:
        acme = new_tenant()
        broker.send(acme, "call", service.ahead(-1))
        broker.events(acme)
        timer = service.final({"namespace": acme, "id": "call"})
        success(service.api("POST", service.path(timer) + "/replay"))
        one, two = broker.events(acme, 2)
        assert one.headers["Nats-Msg-Id"] != two.headers["Nats-Msg-Id"] and one.body["id"] != two.body["id"]

    def test_paused_tenant_gets_no_events(self, service: HttpV1, broker: Orchestrator) -> None:
        acme = service.namespace(new_tenant())
        success(service.api("PATCH", f"/namespaces/{acme}", {"paused": True}))
        broker.send(acme, "call", service.ahead(-1))
        assert _stored(service, acme, "call")["status"] == "pending"
        assert broker.events(acme, 0) == []
        success(service.api("PATCH", f"/namespaces/{acme}", {"paused": False}))
        assert len(broker.events(acme)) == 1


def _with(**fields: Any) -> Callable[[str], bytes]:
    """An envelope whose fields are overridden."""
    return lambda acme: json.dumps(envelope(acme, "call", FAR, **fields)).encode()


def _bare_with(**fields: Any) -> Callable[[str], bytes]:
    return lambda acme: json.dumps(bare(acme, "call", FAR) | fields).encode()


def _payload_with(**fields: Any) -> Callable[[str], bytes]:
    return lambda acme: json.dumps(envelope(acme, "call", FAR, payload=bare(acme, "call", FAR) | fields)).encode()


def _bare_without(name: str) -> Callable[[str], bytes]:
    return lambda acme: json.dumps({k: v for k, v in bare(acme, "call", FAR).items() if k != name}).encode()


def _bytes(data: bytes) -> Callable[[str], bytes]:
    return lambda acme: data


INVALID: dict[str, tuple[Callable[[str], bytes], str]] = {
    "nothing": (_bytes(b""), "empty"),
    "blanks": (_bytes(b" \n"), "empty"),
    "no JSON": (_bytes(b"hello"), "not valid JSON"),
    "truncated JSON": (lambda acme: _with()(acme)[:-1], "not valid JSON"),
    "text after the JSON": (lambda acme: _with()(acme) + b"}", "not valid JSON"),
    "binary": (_bytes(bytes(range(256))), "UTF-8"),
    "a byte order mark": (lambda acme: b"\xef\xbb\xbf" + _with()(acme), "byte order mark"),
    "NaN": (_bytes(b'{"dueAt": NaN}'), "NaN"),
    "a number out of range": (_bytes(b'{"timestampMs": 1e999}'), "number"),
    "an array": (_bytes(b"[]"), "must be a JSON object"),
    "null": (_bytes(b"null"), "must be a JSON object"),
    "a string": (_bytes(b'"ScheduleTimer"'), "must be a JSON object"),
    "nested too deep": (_bytes(b'{"a":' * 65 + b"1" + b"}" * 65), "nested deeper"),
    "nested far too deep": (_bytes(b"[" * 100_000), "body"),
    "a duplicate key": (_bytes(b'{"dueAt": "x", "dueAt": "y"}'), "twice"),
    "a lone surrogate": (_bytes(b'{"tenantId": "\\ud800"}'), "surrogate"),
    "a NUL": (_bytes(b'{"tenantId": "\\u0000"}'), "u0000"),
    "an empty object": (_bytes(b"{}"), "tenantId"),
    "no tenant": (_bare_without("tenantId"), "tenantId"),
    "no call": (_bare_without("serviceCallId"), "serviceCallId"),
    "no time": (_bare_without("dueAt"), "dueAt"),
    "an empty payload": (_with(payload={}), "payload"),
    "a payload that is no object": (_with(payload="x"), "payload"),
    "no payload": (_with(payload=None), "serviceCallId"),
    "no tenant in the envelope": (_with(tenantId=None), "tenantId"),
    "another type": (_with(type="CancelTimer"), "type"),
    "a type that is no string": (_with(type=7), "type"),
    "another _tag in the payload": (_payload_with(_tag="CancelTimer"), "payload._tag"),
    "another _tag in a bare payload": (_bare_with(_tag="CancelTimer"), "_tag"),
    "a _tag that is no string": (_bare_with(_tag=7), "_tag"),
    "a tenant that is no string": (_bare_with(tenantId=7), "tenantId"),
    "a call that is no string": (_bare_with(serviceCallId=["x"]), "serviceCallId"),
    "a time that is no string": (_bare_with(dueAt=1_700_000_000_000), "dueAt"),
    "a time without an offset": (_bare_with(dueAt="2999-01-01T00:00:00"), "dueAt"),
    "a time that does not exist": (_bare_with(dueAt="2999-02-30T00:00:00Z"), "dueAt"),
    "a time before 1970": (_bare_with(dueAt="1900-01-01T00:00:00Z"), "1970"),
    "an empty time": (_bare_with(dueAt=""), "dueAt"),
    "an empty call": (_bare_with(serviceCallId=""), "serviceCallId"),
    "a long call": (_bare_with(serviceCallId="x" * 256), "serviceCallId"),
    "a call with a line end": (_bare_with(serviceCallId="a\nb"), "serviceCallId"),
    "an empty correlation": (_with(correlationId=""), "correlationId"),
    "a long correlation": (_with(correlationId="x" * 256), "correlationId"),
    "a correlation that is no string": (_with(correlationId={}), "correlationId"),
    "another tenant": (_bare_with(tenantId="somebody-else"), "last token of the command's subject"),
    "another tenant in the envelope": (_with(tenantId="somebody-else"), "the same"),
    "an empty tenant": (_bare_with(tenantId=""), "tenantId"),
    "a tenant with a dot": (_bare_with(tenantId="a.b"), "must not contain dots"),
    "a tenant with a star": (_bare_with(tenantId="*"), "tenantId"),
    "a tenant that is a wildcard": (_bare_with(tenantId=">"), "tenantId"),
    "a tenant with a blank": (_bare_with(tenantId="a b"), "tenantId"),
    "a long tenant": (_bare_with(tenantId="x" * 65), "tenantId"),
    "too large": (_with(filler="x" * 300_000), "larger than 262144"),
}


@pytest.fixture(scope="module")
def letters(service: HttpV1, broker: Orchestrator) -> dict[str, tuple[str, bytes, list[Any]]]:
    """Sends each invalid command on a subject of its own; returns its subject, its body and its dead letters."""
    sent = {name: (f"{SUBJECT}.{new_tenant()}", make) for name, (make, _) in INVALID.items()}
    bodies = {}
    before = {
        name: _count(service, name) for name in ("timer_commands_received_total", "duetime_refused_commands_total")
    }
    for name, (subject, make) in sent.items():
        bodies[name] = make(subject.rpartition(".")[2])
        broker.publish(subject, bodies[name])
    broker.wait_acked()
    for name, count in before.items():
        assert _count(service, name) == count + len(INVALID), name
    dead = broker.messages(DEAD_STREAM)
    return {
        name: (subject, bodies[name], [one for one in dead if one.headers["duetime-subject"] == subject])
        for name, (subject, _) in sent.items()
    }


class TestInvalidCommand:
    @pytest.mark.parametrize("name", INVALID)
    def test_invalid_command_becomes_a_dead_letter(
        self, service: HttpV1, letters: dict[str, tuple[str, bytes, list[Any]]], name: str
    ) -> None:
        subject, body, [letter] = letters[name]
        assert letter.subject == "timer.dlq.commands" and (letter.data or b"") == body
        assert INVALID[name][1] in letter.headers["duetime-error"]
        assert set(letter.headers) == {"duetime-error", "duetime-subject", "Nats-Msg-Id"}
        assert len(re.findall(rf"WARNING.* a command on {re.escape(subject)} is invalid: ", service.stderr)) == 1

    def test_invalid_command_creates_no_namespace(
        self, service: HttpV1, letters: dict[str, tuple[str, bytes, list[Any]]]
    ) -> None:
        for subject, _, _ in letters.values():
            assert service.api("GET", f"/namespaces/{subject.rpartition('.')[2]}").status == 404

    def test_invalid_command_is_not_redelivered(self, broker: Orchestrator, letters: Any) -> None:
        info = broker.info()
        assert info.num_ack_pending == 0 and info.num_redelivered == 0 and info.num_pending == 0
        assert broker.messages(COMMANDS_STREAM) == []

    def test_invalid_commands_do_not_block_valid_commands(self, service: HttpV1, broker: Orchestrator) -> None:
        acme = new_tenant()
        for n in range(100):
            broker.run(broker.client.publish(f"{SUBJECT}.{acme}", b"bad"))
            broker.run(broker.client.publish(f"{SUBJECT}.{acme}", json.dumps(bare(acme, f"c{n}", FAR)).encode()))
        until("all valid commands are stored", lambda: len(service.pages(f"namespace={acme}", 200)) == 100)
        until("all others are dead letters", lambda: len(broker.dead_letters(f"{SUBJECT}.{acme}")) == 100)

    def test_dead_letter_of_the_largest_possible_command_is_truncated(
        self, service: HttpV1, broker: Orchestrator
    ) -> None:
        """The dead letter has headers, too, and the broker closes the connection after a message that is too large."""
        acme = new_tenant()
        whole = b"x" * (broker.client.max_payload - 10)
        broker.publish(f"{SUBJECT}.{acme}", whole)
        broker.send(acme, "behind", FAR)
        _stored(service, acme, "behind")
        broker.wait_acked()
        [letter] = broker.dead_letters(f"{SUBJECT}.{acme}")
        assert letter.headers["duetime-size"] == str(len(whole)) and letter.data == whole[: len(whole) // 2]

    @pytest.mark.parametrize(
        ("subject", "head"),
        [(b"\xff\xfe", b""), (b"odd-head", b"NATS/1.0"), (b"odd-head-2", b"NATS/1.0 \xff\xff\xff \xff\r\n\r\n")],
        ids=["subject", "no headers", "status"],
    )
    def test_command_that_the_client_library_can_not_parse_is_rejected(
        self, nats: Nats, service: HttpV1, broker: Orchestrator, subject: bytes, head: bytes
    ) -> None:
        acme, refused = new_tenant(), _count(service, "duetime_refused_commands_total")
        publish_raw(nats.port, SUBJECT.encode() + b"." + subject, head, b"bad")
        broker.send(acme, "behind", FAR)
        _stored(service, acme, "behind")
        broker.wait_acked()
        assert _count(service, "duetime_refused_commands_total") == refused + 1
        assert "encountered error" not in service.stderr


class TestStreams:
    def test_missing_streams_are_created(self, service: HttpV1, broker: Orchestrator) -> None:
        commands, events, dead = (
            broker.run(broker.js.stream_info(name)).config for name in (COMMANDS_STREAM, EVENTS_STREAM, DEAD_STREAM)
        )
        assert commands.subjects == ["timer.commands.schedule.*"] and events.subjects == ["timer.events.due.*"]
        assert dead.subjects == ["timer.dlq.commands"]
        for config in (commands, events, dead):
            assert config.storage == StorageType.FILE and config.discard == DiscardPolicy.NEW
            assert not config.no_ack and config.max_msgs == -1 and config.max_bytes == -1
            assert config.duplicate_window >= 120
        assert not commands.max_age and commands.retention == RetentionPolicy.WORK_QUEUE
        assert events.max_age >= 7 * 86_400 and dead.max_age >= 7 * 86_400
        consumer = broker.consumer(COMMANDS_STREAM, "duetime")
        assert consumer.ack_policy == AckPolicy.EXPLICIT and consumer.max_deliver == -1
        assert consumer.deliver_subject is None and consumer.filter_subject == "timer.commands.schedule.*"
        assert "created the stream TIMER_COMMANDS" in service.stderr
        assert "broker: the " not in service.stderr  # no warnings about streams that the service created

    def test_existing_streams_are_not_changed_and_cause_warnings(
        self, own_nats: Nats, serve: Callable[..., HttpV1]
    ) -> None:
        with Orchestrator(own_nats.url) as broker:
            broker.make_stream(
                name=COMMANDS_STREAM,
                subjects=["timer.commands.>"],
                storage=StorageType.MEMORY,
                max_msgs=1000,
                max_msgs_per_subject=100,
                max_age=60,
                duplicate_window=5,
            )
            broker.make_stream(name=EVENTS_STREAM, subjects=["timer.events.*"], retention=RetentionPolicy.INTEREST)
            broker.make_stream(name=DEAD_STREAM, subjects=["timer.dlq.commands"], no_ack=True, duplicate_window=5)
            consumer = ConsumerConfig(
                durable_name="duetime",
                ack_policy=AckPolicy.ALL,
                max_deliver=5,
                filter_subject="timer.commands.schedule.acme",
            )
            broker.run(broker.js.add_consumer(COMMANDS_STREAM, consumer))
            names = (COMMANDS_STREAM, EVENTS_STREAM, DEAD_STREAM)
            before = [broker.run(broker.js.stream_info(name)).config for name in names]
            service = serve(TIMER_BROKER_URL=own_nats.url)
            for problem in (
                "the stream TIMER_COMMANDS is stored in memory",
                "the stream TIMER_COMMANDS drops its oldest messages silently",
                "the stream TIMER_COMMANDS keeps 100 messages per subject and drops older ones silently",
                "the stream TIMER_COMMANDS drops messages silently after 60 s",
                "the stream TIMER_COMMANDS forgets message ids after 5 s",
                "the stream TIMER_EVENTS does not have the subject timer.events.due.*",
                "the stream TIMER_EVENTS drops messages silently while it has no consumer",
                "the stream TIMER_DLQ sends no acks",
                "the consumer duetime must have explicit acks",
                "the consumer duetime drops a command after 5 deliveries",
                "the consumer duetime does not deliver all of timer.commands.schedule.*",
            ):
                until(problem, lambda problem=problem: f"broker: {problem}" in service.stderr)  # type: ignore[misc]
            assert "the stream TIMER_COMMANDS does not have" not in service.stderr
            assert [broker.run(broker.js.stream_info(name)).config for name in names] == before
            assert broker.consumer(COMMANDS_STREAM, "duetime").max_deliver == 5
            broker.send("acme", "call", FAR)
            _stored(service, "acme", "call")

    def test_commands_stream_without_the_commands_subject_causes_a_warning(
        self, own_nats: Nats, serve: Callable[..., HttpV1]
    ) -> None:
        with Orchestrator(own_nats.url) as broker:
            broker.make_stream(name=COMMANDS_STREAM, subjects=["something.else"])
            service = serve(TIMER_BROKER_URL=own_nats.url)
            until(
                "the warning is logged",
                lambda: (
                    "the stream TIMER_COMMANDS does not have the subject timer.commands.schedule.*" in service.stderr
                ),
            )

    def test_setup_is_retried_while_another_stream_has_the_subject(
        self, own_nats: Nats, serve: Callable[..., HttpV1], receiver: Receiver
    ) -> None:
        """HTTP works, the log names the reason once, and commands work after the other stream is deleted."""
        with Orchestrator(own_nats.url) as broker:
            broker.make_stream(name="OTHER", subjects=["timer.commands.>"])
            service = serve(TIMER_BROKER_URL=own_nats.url)
            until("the error is logged", lambda: "could not set up the broker's streams: " in service.stderr)
            assert "overlap" in service.stderr
            assert service.run(receiver.url("/overlap"))["status"] == "completed"
            broker.run(broker.js.delete_stream("OTHER"))
            broker.wait_ready()
            broker.send("acme", "call", from_now())
            assert len(broker.events("acme")) == 1
            assert service.stderr.count("could not set up") == 1

    def test_deleted_streams_are_created_again(self, own_nats: Nats, serve: Callable[..., HttpV1]) -> None:
        with Orchestrator(own_nats.url) as broker:
            service = serve(TIMER_BROKER_URL=own_nats.url)
            broker.wait_ready()
            broker.send("acme", "before", from_now())
            broker.events("acme")
            broker.run(broker.js.delete_stream(COMMANDS_STREAM))
            until("the stream exists again", lambda: _has_stream(broker, COMMANDS_STREAM))
            broker.send("acme", "after", from_now())
            assert len(broker.events("acme", 2)) == 2
            assert "Traceback" not in service.stderr

    def test_consumer_that_rejects_every_fetch_is_logged_once_and_polled_slowly(
        self, own_nats: Nats, serve: Callable[..., HttpV1], receiver: Receiver
    ) -> None:
        """The fetches back off, so they do not use up the CPU."""
        with Orchestrator(own_nats.url) as broker:
            broker.make_stream(name=COMMANDS_STREAM, subjects=["timer.commands.schedule.*"])
            limited = {"durable_name": "duetime", "ack_policy": "explicit", "max_batch": 10}
            made = broker.run(
                broker.client.request(
                    f"$JS.API.CONSUMER.DURABLE.CREATE.{COMMANDS_STREAM}.duetime",
                    json.dumps({"stream_name": COMMANDS_STREAM, "config": limited}).encode(),
                )
            )
            assert b"error" not in made.data, made.data
            service = serve(TIMER_BROKER_URL=own_nats.url)
            until(
                "the error is logged",
                lambda: "the broker delivered no commands: Exceeded MaxRequestBatch" in service.stderr,
            )
            fetches = broker.run(broker.client.subscribe("$JS.API.CONSUMER.MSG.NEXT.>"))
            assert service.run(receiver.url("/limited"))["status"] == "completed"
            assert fetches.pending_msgs < 100
            assert service.stderr.count("the broker delivered no commands") == 1

    def test_names_of_subjects_and_streams_are_settings(self, own_nats: Nats, serve: Callable[..., HttpV1]) -> None:
        with Orchestrator(own_nats.url) as broker:
            service = serve(
                TIMER_BROKER_URL=own_nats.url,
                DUETIME_BROKER_COMMANDS="my.in",
                DUETIME_BROKER_EVENTS="my.out.of",
                DUETIME_BROKER_DEAD_LETTERS="my.dead",
                DUETIME_BROKER_COMMANDS_STREAM="MY_IN",
                DUETIME_BROKER_EVENTS_STREAM="MY_OUT",
                DUETIME_BROKER_DEAD_LETTERS_STREAM="MY_DEAD",
            )
            broker.wait_ready("MY_IN")
            broker.publish("my.in.acme", b"bad")
            broker.publish("my.in.acme", json.dumps(bare("acme", "call", from_now())).encode())
            [event] = until("the event", lambda: broker.messages("MY_OUT", "my.out.of.acme"))
            assert json.loads(event.data)["payload"]["serviceCallId"] == "call"
            [letter] = until("the dead letter", lambda: broker.messages("MY_DEAD", "my.dead"))
            assert letter.data == b"bad"
            assert {info.config.name for info in broker.run(broker.js.streams_info())} == {"MY_IN", "MY_OUT", "MY_DEAD"}
            assert service.terminate() == 0

    def test_attempts_of_one_event_have_the_same_ids(self, own_nats: Nats, serve: Callable[..., HttpV1]) -> None:
        """A plain subscriber stands in for the stream of events and rejects the first two attempts."""
        with Orchestrator(own_nats.url) as broker:
            broker.make_stream(name=EVENTS_STREAM, subjects=["somewhere.else"])
            seen: list[Any] = []

            async def answer(message: Any) -> None:
                seen.append(message)
                refused = b'{"error": {"code": 503, "description": "not now"}}'
                await message.respond(refused if len(seen) < 3 else b'{"stream": "X", "seq": 1}')

            broker.run(broker.client.subscribe(f"{EVENTS}.acme", cb=answer))
            service = serve(TIMER_BROKER_URL=own_nats.url)
            broker.wait_ready()
            broker.send("acme", "call", from_now())
            timer = service.final({"namespace": "acme", "id": "call"} if _stored(service, "acme", "call") else {})
            assert timer["status"] == "completed" and timer["attempts"] == 3
            assert [message.headers["duetime-attempt"] for message in seen] == ["1", "2", "3"]
            assert len({message.headers["Nats-Msg-Id"] for message in seen}) == 1
            assert len({json.loads(message.data)["id"] for message in seen}) == 1
            errors = [attempt["error"] for attempt in service.attempts(timer)]
            assert "not now" in errors[0] and errors[2] is None


class TestBrokerUnavailable:
    def test_service_starts_without_a_broker_and_connects_later(
        self, own_nats: Nats, serve: Callable[..., HttpV1], receiver: Receiver
    ) -> None:
        own_nats.stop()
        service = serve(TIMER_BROKER_URL=own_nats.url)
        assert service.run(receiver.url("/away-at-start"))["status"] == "completed"
        until("the error is logged", lambda: "the broker can't be reached" in service.stderr)
        own_nats.start()
        with Orchestrator(own_nats.url) as broker:
            broker.wait_ready()
            broker.send("acme", "call", from_now())
            assert len(broker.events("acme")) == 1
        assert service.terminate() == 0
        assert "Traceback" not in service.stderr

    def test_service_without_a_broker_stops_cleanly(self, own_nats: Nats, serve: Callable[..., HttpV1]) -> None:
        own_nats.stop()
        service = serve(TIMER_BROKER_URL=own_nats.url)
        assert service.terminate() == 0
        assert "Traceback" not in service.stderr

    @pytest.mark.parametrize("end", [Nats.stop, Nats.kill], ids=["stopped", "killed"])
    def test_events_wait_for_the_broker_to_return(
        self, own_nats: Nats, serve: Callable[..., HttpV1], receiver: Receiver, end: Callable[[Nats], None]
    ) -> None:
        with Orchestrator(own_nats.url) as broker:
            service = serve(TIMER_BROKER_URL=own_nats.url)
            broker.wait_ready()
            broker.send("acme", "before", from_now())
            broker.events("acme")
            broker.send("acme", "meanwhile", from_now(1))
            _stored(service, "acme", "meanwhile")
            end(own_nats)
            assert service.run(receiver.url(f"/while-{end.__name__}"))["status"] == "completed"
            until(
                "the event is deferred",
                lambda: _count(service, "duetime_deferred_total") > 0,
            )
            waiting = _stored(service, "acme", "meanwhile")
            assert waiting["status"] in ("pending", "executing") and waiting["lastError"] is None
            own_nats.start()
            events = broker.events("acme", 2)
            assert [event.body["payload"]["serviceCallId"] for event in events] == ["before", "meanwhile"]
            assert events[1].headers["duetime-attempt"] == "1"  # waiting for the broker is not a failed attempt
            broker.send("acme", "after", from_now())
            assert len(broker.events("acme", 3)) == 3
            assert service.terminate() == 0
            assert "Traceback" not in service.stderr

    def test_streams_are_created_again_on_an_empty_broker(self, own_nats: Nats, serve: Callable[..., HttpV1]) -> None:
        service = serve(TIMER_BROKER_URL=own_nats.url)
        with Orchestrator(own_nats.url) as broker:
            broker.wait_ready()
        own_nats.stop()
        (own_nats.directory / "data").rename(own_nats.directory / "old")
        own_nats.start()
        with Orchestrator(own_nats.url) as broker:
            broker.wait_ready()
            broker.send("acme", "call", from_now())
            assert len(broker.events("acme")) == 1
        assert "Traceback" not in service.stderr


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    try:
        server = Postgres(18)
    except Missing as missing:
        skip(missing)
    with server:
        yield server


class TestNothingIsLost:
    def test_command_is_not_acked_before_it_is_stored(
        self, own_nats: Nats, serve: Callable[..., HttpV1], postgres: Postgres
    ) -> None:
        """Commands wait while the store is down, and are acked after it returns."""
        with Orchestrator(own_nats.url) as broker:
            service = serve(TIMER_BROKER_URL=own_nats.url, DATABASE_URL=postgres.fresh())
            broker.wait_ready()
            broker.send("acme", "before", FAR)
            _stored(service, "acme", "before")
            broker.wait_acked()
            postgres.stop("immediate")
            try:
                broker.send_many([("acme", f"c{n}", FAR) for n in range(50)])
                broker.publish(f"{SUBJECT}.acme", b"bad")
                until("the service waits for the store", lambda: "commands wait for the store" in service.stderr)
                assert broker.waiting(COMMANDS_STREAM) >= 50
            finally:
                postgres.start()
            broker.wait_acked()
            assert len(service.pages("namespace=acme", 100)) == 51
            # An invalid command needs no store, and becomes one dead letter.
            assert len(broker.dead_letters(f"{SUBJECT}.acme")) == 1

    def test_commands_fetched_by_a_killed_instance_are_redelivered(
        self, own_nats: Nats, serve: Callable[..., HttpV1], tmp_path: Path
    ) -> None:
        with Orchestrator(own_nats.url) as broker:
            broker.make_stream(name=COMMANDS_STREAM, subjects=[f"{SUBJECT}.*"], retention=RetentionPolicy.WORK_QUEUE)
            quick = ConsumerConfig(durable_name="duetime", ack_policy=AckPolicy.EXPLICIT, ack_wait=2)
            broker.run(broker.js.add_consumer(COMMANDS_STREAM, quick))
            service = serve(tmp_path, TIMER_BROKER_URL=own_nats.url)
            broker.wait_ready()
            until("the service has fetched", lambda: broker.info().num_waiting > 0)
            service.signal(signal.SIGSTOP)
            calls = sorted(f"c{n}" for n in range(100))
            broker.send_many([("acme", call, from_now()) for call in calls])
            until("commands are delivered", lambda: broker.info().num_ack_pending > 0)
            service.kill()
            assert broker.waiting(COMMANDS_STREAM) == 100  # none was acked
            serve(tmp_path, TIMER_BROKER_URL=own_nats.url)
            until("all events are published", lambda: broker.count(EVENTS_STREAM) >= 100)
            events = broker.events("acme", 100)
            assert sorted(event.body["payload"]["serviceCallId"] for event in events) == calls
            broker.wait_acked()

    def test_command_whose_ack_was_lost_is_redelivered_and_changes_nothing(
        self, own_nats: Nats, serve: Callable[..., HttpV1]
    ) -> None:
        with Orchestrator(own_nats.url) as broker:
            broker.make_stream(name=COMMANDS_STREAM, subjects=[f"{SUBJECT}.*"], retention=RetentionPolicy.WORK_QUEUE)
            quick = ConsumerConfig(durable_name="duetime", ack_policy=AckPolicy.EXPLICIT, ack_wait=1)
            broker.run(broker.js.add_consumer(COMMANDS_STREAM, quick))
            service = serve(TIMER_BROKER_URL=own_nats.url)
            broker.wait_ready()
            for n in range(5):
                broker.send("acme", f"c{n}", from_now())
                own_nats.kill()
                own_nats.start()
            broker.wait_acked()
            until("all events are published", lambda: len(service.pages("namespace=acme&status=completed", 100)) == 5)
            events = broker.events("acme", 5)
            assert sorted(event.body["payload"]["serviceCallId"] for event in events) == [f"c{n}" for n in range(5)]

    def test_draining_instance_returns_fetched_commands(
        self, own_nats: Nats, serve: Callable[..., HttpV1], receiver: Receiver, tmp_path: Path
    ) -> None:
        """A draining instance may have a fetch open while it waits for a callback."""
        with Orchestrator(own_nats.url) as broker:
            service = serve(tmp_path, TIMER_BROKER_URL=own_nats.url)
            broker.wait_ready()
            until("the service has fetched", lambda: broker.info().num_waiting > 0)
            hanging = receiver.reply("/hanging", Reply(hang=True))
            service.make(hanging, delay="0s")
            receiver.wait("/hanging")
            service.signal(signal.SIGTERM)
            until("the service drains", lambda: "finishing attempts in flight" in service.stderr)
            # The open fetch may still get commands; the service must return them for the next instance.
            broker.send_many([("acme", f"c{n}", from_now()) for n in range(20)])
            receiver.release()
            assert service.wait() == 0
            assert "Traceback" not in service.stderr
            serve(tmp_path, TIMER_BROKER_URL=own_nats.url)
            until("all events are published", lambda: broker.count(EVENTS_STREAM) == 20, ACK_WAIT_SECONDS / 2)

    def test_instances_share_commands_and_one_can_stop(
        self, own_nats: Nats, serve: Callable[..., HttpV1], postgres: Postgres
    ) -> None:
        with Orchestrator(own_nats.url) as broker:
            database = postgres.fresh()
            one = serve(TIMER_BROKER_URL=own_nats.url, DATABASE_URL=database)
            two = serve(TIMER_BROKER_URL=own_nats.url, DATABASE_URL=database)
            broker.wait_ready()
            until("both instances have fetched", lambda: broker.info().num_waiting >= 2)
            # An attempt that begins while its shard moves may be lost and retried much later, so wait for the moves.
            until(
                "the shards are shared", lambda: min(_count(each, "duetime_owned_shards") for each in (one, two)) > 20
            )
            assert len(broker.run(broker.js.consumers_info(COMMANDS_STREAM))) == 1
            # Sent one by one, because the broker gives each to the instance that has waited longest.
            for n in range(40):
                broker.send("acme", f"a{n}", from_now())
            broker.wait_acked()
            taken = [_count(service, "timer_commands_received_total") for service in (one, two)]
            assert sum(taken) == 40 and min(taken) > 0
            broker.send_many([("acme", f"b{n}", from_now()) for n in range(600)])
            one.signal(signal.SIGTERM)
            broker.send_many([("acme", f"c{n}", from_now()) for n in range(200)])
            assert one.wait() == 0
            # The stopped instance returned its commands, so none has to wait until the broker redelivers it.
            until("every command is acked", lambda: broker.waiting(COMMANDS_STREAM) == 0, ACK_WAIT_SECONDS / 2)
            until("all events are published", lambda: broker.count(EVENTS_STREAM) >= 840)
            assert broker.count(EVENTS_STREAM) == 840
            until("all are recorded", lambda: _count(two, "duetime_timers") == 840)
            assert "Traceback" not in one.stderr + two.stderr
