"""The broker door's contract, point by point, from outside: a real NATS server and a plain client of it."""

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
    publish_raw,
    soon,
    tenant,
)
from tests.doors.durable import Durable, success
from tests.nats import Nats
from tests.postgres import Missing, Postgres
from tests.servers import Duetime, Receiver, Reply, instant, until

FAR = "2999-01-01T00:00:00.000Z"
ACK_WAIT_SECONDS = 30.0
"""After which the door's own consumer gives a command out again that nobody has answered."""


@pytest.fixture(scope="module")
def nats() -> Iterator[Nats]:
    with Nats() as server:
        yield server


@pytest.fixture(scope="module")
def broker(nats: Nats, door: Durable) -> Iterator[Orchestrator]:
    with Orchestrator(nats.url) as broker:
        broker.ready()
        yield broker


@pytest.fixture(scope="module")
def door(nats: Nats, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Durable]:
    """A service with a virtual clock and a broker."""
    with Durable(tmp_path_factory.mktemp("broker"), TIMER_BROKER_URL=nats.url) as door:
        yield door
        assert "Traceback" not in door.stderr, door.stderr
        assert door.terminate() == 0


@pytest.fixture
def own() -> Iterator[Nats]:
    """A server that one test stops, starts and fills as it likes."""
    with Nats() as server:
        yield server


@pytest.fixture
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Durable]]:
    """Makes services that run by the real clock and end with the test."""
    made: list[Durable] = []

    def make(directory: Path | None = None, **options: Any) -> Durable:
        options.setdefault("virtual_clock", False)
        made.append(Durable(directory or tmp_path_factory.mktemp("own"), start=False, **options))
        made[-1].start()
        return made[-1]

    yield make
    for service in made:
        service.kill()


def _has_stream(broker: Orchestrator, name: str) -> bool:
    return name in {info.config.name for info in broker.run(broker.js.streams_info())}


def _stored(door: Durable, tenant: str, call: str) -> dict[str, Any]:
    """The timer that a command made, once it is there."""

    def there() -> Any:
        answer = door.api("POST", "/timers/get", {"namespace": tenant, "timerId": call})
        return answer.body if answer.status == 200 else None

    timer: dict[str, Any] = until(f"{tenant}/{call} is stored", there)
    return timer


def _count(service: Duetime, name: str) -> float:
    page = service.request("GET", "/metrics").body.decode()
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, found))


class TestCommand:
    def test_an_envelope_becomes_a_timer(self, door: Durable, broker: Orchestrator) -> None:
        acme, due = tenant(), door.ahead(60)
        broker.send(acme, "call-1", due, correlationId=f"corr-{acme}")
        timer = _stored(door, acme, "call-1")
        assert (timer["namespace"], timer["id"], timer["executeAt"]) == (acme, "call-1", due)
        assert timer["correlationId"] == f"corr-{acme}" and timer["status"] == "pending"
        assert timer["callbackSubject"] == f"{EVENTS}.{acme}" and timer["callbackUrl"] is None

    def test_a_bare_payload_is_taken_too(self, door: Durable, broker: Orchestrator) -> None:
        acme, due = tenant(), door.ahead(60)
        broker.publish(f"{SUBJECT}.{acme}", json.dumps(bare(acme, "call", due)).encode())
        timer = _stored(door, acme, "call")
        assert timer["executeAt"] == due and timer["correlationId"] is None

    def test_a_bare_payload_may_have_a_correlation_id(self, door: Durable, broker: Orchestrator) -> None:
        acme = tenant()
        broker.publish(f"{SUBJECT}.{acme}", json.dumps(bare(acme, "call", FAR, correlationId="c")).encode())
        assert _stored(door, acme, "call")["correlationId"] == "c"

    def test_fields_that_nobody_knows_do_no_harm(self, door: Durable, broker: Orchestrator) -> None:
        acme = tenant()
        message = envelope(acme, "call", FAR, aggregateId="x", causationId=None, extra={"a": [1]})
        message["payload"]["more"] = 1
        broker.publish(f"{SUBJECT}.{acme}", json.dumps(message).encode())
        assert _stored(door, acme, "call")["status"] == "pending"

    def test_null_is_no_correlation_id(self, door: Durable, broker: Orchestrator) -> None:
        acme = tenant()
        broker.send(acme, "call", FAR, correlationId=None)
        assert _stored(door, acme, "call")["correlationId"] is None

    @pytest.mark.parametrize("call", ["ü/ %😀", "x" * 255, "a.b.*.>"])
    def test_a_service_call_id_is_any_id(self, door: Durable, broker: Orchestrator, call: str) -> None:
        acme = tenant()
        broker.send(acme, call, FAR)
        assert _stored(door, acme, call)["id"] == call

    def test_a_tenant_id_has_up_to_64_characters(self, door: Durable, broker: Orchestrator) -> None:
        acme = tenant().ljust(64, "_")
        broker.send(acme, "call", FAR)
        assert _stored(door, acme, "call")["namespace"] == acme

    def test_due_at_may_have_any_offset(self, door: Durable, broker: Orchestrator) -> None:
        acme = tenant()
        broker.send(acme, "call", "2999-01-01T02:00:00+02:00")
        assert _stored(door, acme, "call")["executeAt"] == FAR

    def test_the_namespace_of_a_tenant_is_made(self, door: Durable, broker: Orchestrator) -> None:
        acme = tenant()
        assert door.api("GET", f"/namespaces/{acme}").status == 404
        broker.send(acme, "call", FAR)
        _stored(door, acme, "call")
        assert success(door.api("GET", f"/namespaces/{acme}"))["name"] == acme
        # HTTP still has to ask for namespaces: auto-creation is this door's alone.
        refused = door.api(
            "POST", "/timers", {"namespace": tenant(), "delay": "1h", "callbackUrl": "http://127.0.0.1/"}
        )
        assert refused.body["error"] == "UNKNOWN_NAMESPACE"

    def test_a_namespace_that_is_there_keeps_its_settings(self, door: Durable, broker: Orchestrator) -> None:
        acme = door.namespace(tenant(), shards=3, retention="1d")
        broker.send(acme, "call", FAR)
        _stored(door, acme, "call")
        assert success(door.api("GET", f"/namespaces/{acme}"))["shards"] == 3

    def test_found_by_correlation_id_over_all_tenants(self, door: Durable, broker: Orchestrator) -> None:
        one, two = tenant(), tenant()
        for acme in (one, two):
            broker.send(acme, "call", FAR, correlationId=f"both-{one}")
        _stored(door, one, "call"), _stored(door, two, "call")
        found = door.pages(f"correlationId=both-{one}", 10)
        assert {timer["namespace"] for timer in found} == {one, two}

    def test_the_durable_door_lists_cancels_and_moves_it(self, door: Durable, broker: Orchestrator) -> None:
        acme = tenant()
        for call in ("moved", "gone"):
            broker.send(acme, call, FAR)
            _stored(door, acme, call)
        assert {timer["id"] for timer in door.pages(f"namespace={acme}", 10)} == {"moved", "gone"}
        success(door.api("DELETE", f"/timers/{acme}/gone"), 204)
        success(door.api("PUT", f"/timers/{acme}/moved", {"executeAt": door.ahead(5)}))
        door.advance("6s")
        [event] = broker.events(acme)
        assert event.body["payload"]["serviceCallId"] == "moved"

    def test_the_platform_door_shows_those_of_the_default_tenant(self, door: Durable, broker: Orchestrator) -> None:
        call = str(uuid.uuid4())
        broker.send("default", call, FAR)
        _stored(door, "default", call)
        shown = door.get(call)
        assert shown["status"] == "pending" and shown["execute_at"] == FAR and shown["callback_url"] is None
        listed = door.request("GET", "/timers?limit=200").body["data"]["timers"]
        assert call in {timer["id"] for timer in listed}

    def test_it_is_counted(self, door: Durable, broker: Orchestrator) -> None:
        acme = tenant()
        received, refused = (
            _count(door, "timer_commands_received_total"),
            _count(door, "duetime_refused_commands_total"),
        )
        broker.send_many([(acme, f"c{n}", FAR) for n in range(7)])
        broker.settled()
        assert _count(door, "timer_commands_received_total") == received + 7
        assert _count(door, "duetime_refused_commands_total") == refused
        assert 'duetime_creates_total{door="broker"}' in door.request("GET", "/metrics").body.decode()

    def test_many_at_once_in_order(self, door: Durable, broker: Orchestrator) -> None:
        """More than one batch; the last of several commands for a call is the one that counts."""
        acme = tenant()
        last = [f"2{n:03}-01-01T00:00:00.000Z" for n in range(300, 600)]
        broker.send_many(
            [(acme, f"c{n}", due) for n in range(300) for due in (FAR, "2998-01-01T00:00:00.000Z", last[n])]
        )
        broker.settled()
        found = {timer["id"]: timer["executeAt"] for timer in door.pages(f"namespace={acme}", 100)}
        assert found == {f"c{n}": last[n] for n in range(300)}


class TestRepeat:
    def test_it_moves_the_time_while_scheduled(self, door: Durable, broker: Orchestrator) -> None:
        acme, later, sooner = tenant(), door.ahead(7200), door.ahead(60)
        broker.send(acme, "call", later)
        _stored(door, acme, "call")
        broker.send(acme, "call", sooner)
        until("it was moved", lambda: _stored(door, acme, "call")["executeAt"] == sooner)
        door.advance("61s")
        [event] = broker.events(acme)
        door.advance("3h")
        assert door.final({"namespace": acme, "id": "call"})["status"] == "completed"
        assert broker.events(acme) == [event]

    def test_it_can_move_it_into_the_past(self, door: Durable, broker: Orchestrator) -> None:
        acme = tenant()
        broker.send(acme, "call", FAR)
        _stored(door, acme, "call")
        broker.send(acme, "call", door.ahead(-60))
        assert len(broker.events(acme)) == 1

    def test_an_equal_one_changes_nothing(self, door: Durable, broker: Orchestrator) -> None:
        acme = tenant()
        broker.send(acme, "call", FAR, correlationId="first")
        before = _stored(door, acme, "call")
        broker.send(acme, "call", FAR, correlationId="first")
        broker.settled()
        assert _stored(door, acme, "call") == before

    def test_one_that_is_given_out_again_behind_a_later_one_moves_nothing(
        self, own: Nats, serve: Callable[..., Durable], tmp_path: Path
    ) -> None:
        with Orchestrator(own.url) as broker:
            service = serve(tmp_path, TIMER_BROKER_URL=own.url)
            broker.ready()
            assert service.terminate() == 0
            acme, later = tenant(), "2999-01-02T00:00:00.000Z"
            broker.send(acme, "call", FAR)
            taker = broker.run(broker.js.pull_subscribe_bind("duetime", COMMANDS_STREAM))
            [taken] = broker.run(taker.fetch(1))  # by an instance that died with it
            broker.send(acme, "call", later)
            service = serve(tmp_path, TIMER_BROKER_URL=own.url)
            assert _stored(service, acme, "call")["executeAt"] == later
            broker.run(taken.nak())
            broker.settled()
            assert _stored(service, acme, "call")["executeAt"] == later
            broker.send(acme, "call", FAR)
            until("it was moved", lambda: _stored(service, acme, "call")["executeAt"] == FAR)

    def test_it_is_ignored_once_reached(self, door: Durable, broker: Orchestrator) -> None:
        acme = tenant()
        broker.send(acme, "call", door.ahead(-1))
        events = broker.events(acme)
        reached = door.final({"namespace": acme, "id": "call"})
        broker.send(acme, "call", FAR)
        broker.send(acme, "call", door.ahead(-1))
        broker.settled()
        assert door.see(reached) == reached
        door.advance("1h")
        broker.send(acme, "another", door.ahead(-1))
        assert [event.body["payload"]["serviceCallId"] for event in broker.events(acme, 2)] == ["call", "another"]
        assert broker.events(acme)[:1] == events
        assert broker.dead_letters(f"{SUBJECT}.{acme}") == []

    def test_it_is_ignored_once_canceled(self, door: Durable, broker: Orchestrator) -> None:
        call = str(uuid.uuid4())
        broker.send("default", call, FAR)
        _stored(door, "default", call)
        assert door.request("DELETE", f"/timers/{call}").status == 200
        broker.send("default", call, door.ahead(-1))
        broker.settled()
        assert door.get(call)["status"] == "canceled"

    def test_tenants_have_calls_of_their_own(self, door: Durable, broker: Orchestrator) -> None:
        one, two = tenant(), tenant()
        broker.send(one, "call", door.ahead(-1))
        broker.events(one)
        broker.send(two, "call", door.ahead(-1))
        assert broker.events(two)[0].body["tenantId"] == two


class TestEvent:
    def test_all_of_it(self, door: Durable, broker: Orchestrator) -> None:
        acme = tenant()
        broker.send(acme, "call-ü", door.ahead(60), correlationId="corr")
        _stored(door, acme, "call-ü")
        assert broker.events(acme, 0) == []
        due = instant(_stored(door, acme, "call-ü")["executeAt"])
        door.advance("61s")
        [event] = broker.events(acme)
        body = dict(event.body)
        reached = instant(body["payload"]["reachedAt"])
        assert due <= reached <= due + timedelta(seconds=60)
        assert body.pop("payload") == {
            "tenantId": acme,
            "serviceCallId": "call-ü",
            "reachedAt": event.body["payload"]["reachedAt"],
        }
        made = uuid.UUID(body.pop("id"))
        assert made.version == 7 and made.variant == uuid.RFC_4122
        assert abs((made.int >> 80) - reached.timestamp() * 1000) < 60_000  # its first 48 bits are the time
        assert abs(body.pop("timestampMs") - reached.timestamp() * 1000) <= 1
        assert body == {"type": "DueTimeReached", "tenantId": acme, "correlationId": "corr"}
        headers = dict(event.headers)
        assert uuid.UUID(headers.pop("Nats-Msg-Id")) and headers.pop("duetime-attempt") == "1"
        assert headers == {}
        timer = door.final({"namespace": acme, "id": "call-ü"})
        assert timer["status"] == "completed" and timer["attempts"] == 1 and timer["lastError"] is None

    def test_without_a_correlation_id(self, door: Durable, broker: Orchestrator) -> None:
        acme = tenant()
        broker.send(acme, "call", door.ahead(-1))
        [event] = broker.events(acme)
        assert set(event.body) == {"id", "type", "tenantId", "timestampMs", "payload"}

    @pytest.mark.parametrize("due", ["2020-02-29T00:00:00Z", "1970-01-01T00:00:00Z"])
    def test_a_past_time_is_reached_at_once(self, door: Durable, broker: Orchestrator, due: str) -> None:
        acme = tenant()
        broker.send(acme, "call", due)
        [event] = broker.events(acme)
        assert abs(instant(event.body["payload"]["reachedAt"]) - door.now()) < timedelta(minutes=1)

    def test_each_firing_has_its_own_ids(self, door: Durable, broker: Orchestrator) -> None:
        acme = tenant()
        broker.send(acme, "call", door.ahead(-1))
        broker.events(acme)
        timer = door.final({"namespace": acme, "id": "call"})
        success(door.api("POST", door.path(timer) + "/replay"))
        one, two = broker.events(acme, 2)
        assert one.headers["Nats-Msg-Id"] != two.headers["Nats-Msg-Id"] and one.body["id"] != two.body["id"]

    def test_a_paused_tenant_hears_nothing(self, door: Durable, broker: Orchestrator) -> None:
        acme = door.namespace(tenant())
        success(door.api("PATCH", f"/namespaces/{acme}", {"paused": True}))
        broker.send(acme, "call", door.ahead(-1))
        assert _stored(door, acme, "call")["status"] == "pending"
        assert broker.events(acme, 0) == []
        success(door.api("PATCH", f"/namespaces/{acme}", {"paused": False}))
        assert len(broker.events(acme)) == 1


def _with(**fields: Any) -> Callable[[str], bytes]:
    """An envelope with something wrong in it."""
    return lambda acme: json.dumps(envelope(acme, "call", FAR, **fields)).encode()


def _bare_with(**fields: Any) -> Callable[[str], bytes]:
    return lambda acme: json.dumps(bare(acme, "call", FAR) | fields).encode()


def _bare_without(name: str) -> Callable[[str], bytes]:
    return lambda acme: json.dumps({k: v for k, v in bare(acme, "call", FAR).items() if k != name}).encode()


def _bytes(data: bytes) -> Callable[[str], bytes]:
    return lambda acme: data


REFUSED: dict[str, tuple[Callable[[str], bytes], str]] = {
    "nothing": (_bytes(b""), "empty"),
    "blanks": (_bytes(b" \n"), "empty"),
    "no JSON": (_bytes(b"hello"), "not valid JSON"),
    "half of it": (lambda acme: _with()(acme)[:-1], "not valid JSON"),
    "something after it": (lambda acme: _with()(acme) + b"}", "not valid JSON"),
    "binary": (_bytes(bytes(range(256))), "UTF-8"),
    "a byte order mark": (lambda acme: b"\xef\xbb\xbf" + _with()(acme), "byte order mark"),
    "NaN": (_bytes(b'{"dueAt": NaN}'), "NaN"),
    "a number beyond all": (_bytes(b'{"timestampMs": 1e999}'), "number"),
    "an array": (_bytes(b"[]"), "must be a JSON object"),
    "null": (_bytes(b"null"), "must be a JSON object"),
    "a string": (_bytes(b'"ScheduleTimer"'), "must be a JSON object"),
    "too deep": (_bytes(b'{"a":' * 65 + b"1" + b"}" * 65), "nested deeper"),
    "far too deep": (_bytes(b"[" * 100_000), "body"),
    "a key twice": (_bytes(b'{"dueAt": "x", "dueAt": "y"}'), "twice"),
    "half a character": (_bytes(b'{"tenantId": "\\ud800"}'), "surrogate"),
    "a NUL": (_bytes(b'{"tenantId": "\\u0000"}'), "u0000"),
    "an empty object": (_bytes(b"{}"), "tenantId"),
    "no tenant": (_bare_without("tenantId"), "tenantId"),
    "no call": (_bare_without("serviceCallId"), "serviceCallId"),
    "no time": (_bare_without("dueAt"), "dueAt"),
    "an empty payload": (_with(payload={}), "payload"),
    "a payload that is none": (_with(payload="x"), "payload"),
    "no payload": (_with(payload=None), "serviceCallId"),
    "no tenant in the envelope": (_with(tenantId=None), "tenantId"),
    "another type": (_with(type="CancelTimer"), "type"),
    "a type that is none": (_with(type=7), "type"),
    "a tenant of another kind": (_bare_with(tenantId=7), "tenantId"),
    "a call of another kind": (_bare_with(serviceCallId=["x"]), "serviceCallId"),
    "a time of another kind": (_bare_with(dueAt=1_700_000_000_000), "dueAt"),
    "a time without an offset": (_bare_with(dueAt="2999-01-01T00:00:00"), "dueAt"),
    "a time that is none": (_bare_with(dueAt="2999-02-30T00:00:00Z"), "dueAt"),
    "a time before there was any": (_bare_with(dueAt="1900-01-01T00:00:00Z"), "1970"),
    "no time in it": (_bare_with(dueAt=""), "dueAt"),
    "an empty call": (_bare_with(serviceCallId=""), "serviceCallId"),
    "a long call": (_bare_with(serviceCallId="x" * 256), "serviceCallId"),
    "a call with a line end": (_bare_with(serviceCallId="a\nb"), "serviceCallId"),
    "an empty correlation": (_with(correlationId=""), "correlationId"),
    "a long correlation": (_with(correlationId="x" * 256), "correlationId"),
    "a correlation of another kind": (_with(correlationId={}), "correlationId"),
    "another tenant": (_bare_with(tenantId="somebody-else"), "last token of the subject"),
    "another tenant in the envelope": (_with(tenantId="somebody-else"), "the same"),
    "an empty tenant": (_bare_with(tenantId=""), "tenantId"),
    "a tenant with a dot": (_bare_with(tenantId="a.b"), "no dots"),
    "a tenant with a star": (_bare_with(tenantId="*"), "tenantId"),
    "a tenant with all": (_bare_with(tenantId=">"), "tenantId"),
    "a tenant with a blank": (_bare_with(tenantId="a b"), "tenantId"),
    "a long tenant": (_bare_with(tenantId="x" * 65), "tenantId"),
    "too large": (_with(filler="x" * 300_000), "larger than 262144"),
}


@pytest.fixture(scope="module")
def letters(door: Durable, broker: Orchestrator) -> dict[str, tuple[str, bytes, list[Any]]]:
    """Every bad command was sent on a subject of its own; what became of it."""
    sent = {name: (f"{SUBJECT}.{tenant()}", make) for name, (make, _) in REFUSED.items()}
    bodies = {}
    before = {name: _count(door, name) for name in ("timer_commands_received_total", "duetime_refused_commands_total")}
    for name, (subject, make) in sent.items():
        bodies[name] = make(subject.rpartition(".")[2])
        broker.publish(subject, bodies[name])
    broker.settled()
    for name, count in before.items():
        assert _count(door, name) == count + len(REFUSED), name
    dead = broker.messages(DEAD_STREAM)
    return {
        name: (subject, bodies[name], [one for one in dead if one.headers["duetime-subject"] == subject])
        for name, (subject, _) in sent.items()
    }


class TestRefused:
    @pytest.mark.parametrize("name", REFUSED)
    def test_it_is_among_the_dead_letters(
        self, door: Durable, letters: dict[str, tuple[str, bytes, list[Any]]], name: str
    ) -> None:
        subject, body, [letter] = letters[name]
        assert letter.subject == "timer.dlq.commands" and (letter.data or b"") == body
        assert REFUSED[name][1] in letter.headers["duetime-error"]
        assert set(letter.headers) == {"duetime-error", "duetime-subject", "Nats-Msg-Id"}
        assert len(re.findall(rf"WARNING.* a command on {re.escape(subject)} can't be taken: ", door.stderr)) == 1

    def test_nothing_was_made_of_it(self, door: Durable, letters: dict[str, tuple[str, bytes, list[Any]]]) -> None:
        for subject, _, _ in letters.values():
            assert door.api("GET", f"/namespaces/{subject.rpartition('.')[2]}").status == 404

    def test_it_is_not_given_out_again(self, broker: Orchestrator, letters: Any) -> None:
        info = broker.info()
        assert info.num_ack_pending == 0 and info.num_redelivered == 0 and info.num_pending == 0
        assert broker.messages(COMMANDS_STREAM) == []

    def test_it_never_blocks_the_ones_behind_it(self, door: Durable, broker: Orchestrator) -> None:
        acme = tenant()
        for n in range(100):
            broker.run(broker.client.publish(f"{SUBJECT}.{acme}", b"bad"))
            broker.run(broker.client.publish(f"{SUBJECT}.{acme}", json.dumps(bare(acme, f"c{n}", FAR)).encode()))
        until("all that are good are there", lambda: len(door.pages(f"namespace={acme}", 200)) == 100)
        until("all that are bad are buried", lambda: len(broker.dead_letters(f"{SUBJECT}.{acme}")) == 100)

    def test_one_that_fills_a_message_to_the_brim(self, door: Durable, broker: Orchestrator) -> None:
        """Its copy has headers and so no room for all of it. A server that is sent too much ends the connection."""
        acme = tenant()
        whole = b"x" * (broker.client.max_payload - 10)
        broker.publish(f"{SUBJECT}.{acme}", whole)
        broker.send(acme, "behind", FAR)
        _stored(door, acme, "behind")
        broker.settled()
        [letter] = broker.dead_letters(f"{SUBJECT}.{acme}")
        assert letter.headers["duetime-size"] == str(len(whole)) and letter.data == whole[: len(whole) // 2]

    @pytest.mark.parametrize(
        ("subject", "head"),
        [(b"\xff\xfe", b""), (b"odd-head", b"NATS/1.0"), (b"odd-head-2", b"NATS/1.0 \xff\xff\xff \xff\r\n\r\n")],
        ids=["the subject", "no headers", "a status"],
    )
    def test_one_that_the_client_library_can_not_read(
        self, nats: Nats, door: Durable, broker: Orchestrator, subject: bytes, head: bytes
    ) -> None:
        acme, refused = tenant(), _count(door, "duetime_refused_commands_total")
        publish_raw(nats.port, SUBJECT.encode() + b"." + subject, head, b"bad")
        broker.send(acme, "behind", FAR)
        _stored(door, acme, "behind")
        broker.settled()
        assert _count(door, "duetime_refused_commands_total") == refused + 1
        assert "encountered error" not in door.stderr


class TestStreams:
    def test_they_are_made_when_missing(self, door: Durable, broker: Orchestrator) -> None:
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
        assert "made the stream TIMER_COMMANDS" in door.stderr
        assert "broker: the " not in door.stderr  # nothing of its own is worth a warning

    def test_those_that_are_there_are_kept_and_judged(self, own: Nats, serve: Callable[..., Durable]) -> None:
        with Orchestrator(own.url) as broker:
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
            service = serve(TIMER_BROKER_URL=own.url)
            for problem in (
                "the stream TIMER_COMMANDS is kept in memory",
                "the stream TIMER_COMMANDS drops its oldest messages silently",
                "the stream TIMER_COMMANDS keeps 100 messages of a subject and drops those before silently",
                "the stream TIMER_COMMANDS drops messages silently after 60 s",
                "the stream TIMER_COMMANDS forgets message ids after 5 s",
                "the stream TIMER_EVENTS does not take the subject timer.events.due.*",
                "the stream TIMER_EVENTS drops messages silently while no consumer waits for them",
                "the stream TIMER_DLQ confirms nothing",
                "the consumer duetime must have explicit acks",
                "the consumer duetime gives up on a command after 5 deliveries",
                "the consumer duetime does not give out all of timer.commands.schedule.*",
            ):
                until(problem, lambda problem=problem: f"broker: {problem}" in service.stderr)  # type: ignore[misc]
            assert "the stream TIMER_COMMANDS does not take" not in service.stderr
            assert [broker.run(broker.js.stream_info(name)).config for name in names] == before
            assert broker.consumer(COMMANDS_STREAM, "duetime").max_deliver == 5
            broker.send("acme", "call", FAR)  # It works with what it has.
            _stored(service, "acme", "call")

    def test_a_stream_without_the_subject_of_commands(self, own: Nats, serve: Callable[..., Durable]) -> None:
        with Orchestrator(own.url) as broker:
            broker.make_stream(name=COMMANDS_STREAM, subjects=["something.else"])
            service = serve(TIMER_BROKER_URL=own.url)
            until(
                "it says so",
                lambda: (
                    "the stream TIMER_COMMANDS does not take the subject timer.commands.schedule.*" in service.stderr
                ),
            )

    def test_a_subject_that_another_stream_has(
        self, own: Nats, serve: Callable[..., Durable], receiver: Receiver
    ) -> None:
        """Nothing can be taken in; HTTP goes on, the log says why, and it works once somebody has mended it."""
        with Orchestrator(own.url) as broker:
            broker.make_stream(name="OTHER", subjects=["timer.commands.>"])
            service = serve(TIMER_BROKER_URL=own.url)
            until("it says so", lambda: "could not set up the broker's streams: " in service.stderr)
            assert "overlap" in service.stderr
            assert service.run(receiver.url("/overlap"))["status"] == "completed"
            broker.run(broker.js.delete_stream("OTHER"))
            broker.ready()
            broker.send("acme", "call", soon())
            assert len(broker.events("acme")) == 1
            assert service.stderr.count("could not set up") == 1

    def test_streams_that_vanish_are_made_again(self, own: Nats, serve: Callable[..., Durable]) -> None:
        with Orchestrator(own.url) as broker:
            service = serve(TIMER_BROKER_URL=own.url)
            broker.ready()
            broker.send("acme", "before", soon())
            broker.events("acme")
            broker.run(broker.js.delete_stream(COMMANDS_STREAM))
            until("it is there again", lambda: _has_stream(broker, COMMANDS_STREAM))
            broker.send("acme", "after", soon())
            assert len(broker.events("acme", 2)) == 2
            assert "Traceback" not in service.stderr

    def test_a_consumer_that_refuses_every_request(
        self, own: Nats, serve: Callable[..., Durable], receiver: Receiver
    ) -> None:
        """The log says why, and asking again and again does not take the machine."""
        with Orchestrator(own.url) as broker:
            broker.make_stream(name=COMMANDS_STREAM, subjects=["timer.commands.schedule.*"])
            limited = {"durable_name": "duetime", "ack_policy": "explicit", "max_batch": 10}
            made = broker.run(
                broker.client.request(
                    f"$JS.API.CONSUMER.DURABLE.CREATE.{COMMANDS_STREAM}.duetime",
                    json.dumps({"stream_name": COMMANDS_STREAM, "config": limited}).encode(),
                )
            )
            assert b"error" not in made.data, made.data
            service = serve(TIMER_BROKER_URL=own.url)
            until("it says so", lambda: "the broker gave no commands: Exceeded MaxRequestBatch" in service.stderr)
            heard = broker.run(broker.client.subscribe("$JS.API.CONSUMER.MSG.NEXT.>"))
            assert service.run(receiver.url("/limited"))["status"] == "completed"
            assert heard.pending_msgs < 100
            assert service.stderr.count("the broker gave no commands") == 1

    def test_subjects_and_streams_are_settings(self, own: Nats, serve: Callable[..., Durable]) -> None:
        with Orchestrator(own.url) as broker:
            service = serve(
                TIMER_BROKER_URL=own.url,
                DUETIME_BROKER_COMMANDS="my.in",
                DUETIME_BROKER_EVENTS="my.out.of",
                DUETIME_BROKER_DEAD_LETTERS="my.dead",
                DUETIME_BROKER_COMMANDS_STREAM="MY_IN",
                DUETIME_BROKER_EVENTS_STREAM="MY_OUT",
                DUETIME_BROKER_DEAD_LETTERS_STREAM="MY_DEAD",
            )
            broker.ready("MY_IN")
            broker.publish("my.in.acme", b"bad")
            broker.publish("my.in.acme", json.dumps(bare("acme", "call", soon())).encode())
            [event] = until("the event", lambda: broker.messages("MY_OUT", "my.out.of.acme"))
            assert json.loads(event.data)["payload"]["serviceCallId"] == "call"
            [letter] = until("the dead letter", lambda: broker.messages("MY_DEAD", "my.dead"))
            assert letter.data == b"bad"
            assert {info.config.name for info in broker.run(broker.js.streams_info())} == {"MY_IN", "MY_OUT", "MY_DEAD"}
            assert service.terminate() == 0

    def test_attempts_of_one_event_have_the_same_ids(self, own: Nats, serve: Callable[..., Durable]) -> None:
        """A plain subscriber stands in for the stream of events and refuses the first ones."""
        with Orchestrator(own.url) as broker:
            broker.make_stream(name=EVENTS_STREAM, subjects=["somewhere.else"])
            seen: list[Any] = []

            async def answer(message: Any) -> None:
                seen.append(message)
                refused = b'{"error": {"code": 503, "description": "not now"}}'
                await message.respond(refused if len(seen) < 3 else b'{"stream": "X", "seq": 1}')

            broker.run(broker.client.subscribe(f"{EVENTS}.acme", cb=answer))
            service = serve(TIMER_BROKER_URL=own.url)
            broker.ready()
            broker.send("acme", "call", soon())
            timer = service.final({"namespace": "acme", "id": "call"} if _stored(service, "acme", "call") else {})
            assert timer["status"] == "completed" and timer["attempts"] == 3
            assert [message.headers["duetime-attempt"] for message in seen] == ["1", "2", "3"]
            assert len({message.headers["Nats-Msg-Id"] for message in seen}) == 1
            assert len({json.loads(message.data)["id"] for message in seen}) == 1
            errors = [attempt["error"] for attempt in service.attempts(timer)]
            assert "not now" in errors[0] and errors[2] is None


class TestBrokerAway:
    def test_at_the_start(self, own: Nats, serve: Callable[..., Durable], receiver: Receiver) -> None:
        own.stop()
        service = serve(TIMER_BROKER_URL=own.url)
        assert service.run(receiver.url("/away-at-start"))["status"] == "completed"
        until("it says so", lambda: "the broker can't be reached" in service.stderr)
        own.start()
        with Orchestrator(own.url) as broker:
            broker.ready()
            broker.send("acme", "call", soon())
            assert len(broker.events("acme")) == 1
        assert service.terminate() == 0
        assert "Traceback" not in service.stderr

    def test_it_can_be_ended_before_there_is_a_broker(self, own: Nats, serve: Callable[..., Durable]) -> None:
        own.stop()
        service = serve(TIMER_BROKER_URL=own.url)
        assert service.terminate() == 0
        assert "Traceback" not in service.stderr

    @pytest.mark.parametrize("end", [Nats.stop, Nats.kill], ids=["stopped", "killed"])
    def test_and_back(
        self, own: Nats, serve: Callable[..., Durable], receiver: Receiver, end: Callable[[Nats], None]
    ) -> None:
        with Orchestrator(own.url) as broker:
            service = serve(TIMER_BROKER_URL=own.url)
            broker.ready()
            broker.send("acme", "before", soon())
            broker.events("acme")
            broker.send("acme", "meanwhile", soon(1))
            _stored(service, "acme", "meanwhile")
            end(own)
            assert service.run(receiver.url(f"/while-{end.__name__}"))["status"] == "completed"
            until(
                "the event was tried",
                lambda: _count(service, "duetime_deferred_total") > 0,
            )
            waiting = _stored(service, "acme", "meanwhile")
            assert waiting["status"] in ("pending", "executing") and waiting["lastError"] is None
            own.start()
            events = broker.events("acme", 2)
            assert [event.body["payload"]["serviceCallId"] for event in events] == ["before", "meanwhile"]
            assert events[1].headers["duetime-attempt"] == "1"  # waiting is not a failed attempt
            broker.send("acme", "after", soon())
            assert len(broker.events("acme", 3)) == 3
            assert service.terminate() == 0
            assert "Traceback" not in service.stderr

    def test_a_server_that_starts_anew_with_nothing(self, own: Nats, serve: Callable[..., Durable]) -> None:
        service = serve(TIMER_BROKER_URL=own.url)
        with Orchestrator(own.url) as broker:
            broker.ready()
        own.stop()
        (own.directory / "data").rename(own.directory / "old")
        own.start()
        with Orchestrator(own.url) as broker:
            broker.ready()
            broker.send("acme", "call", soon())
            assert len(broker.events("acme")) == 1
        assert "Traceback" not in service.stderr


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    try:
        server = Postgres(18)
    except Missing as missing:
        pytest.skip(str(missing))
    with server:
        yield server


class TestNothingIsLost:
    def test_a_command_is_kept_until_it_is_stored(
        self, own: Nats, serve: Callable[..., Durable], postgres: Postgres
    ) -> None:
        """The store goes away: nothing is answered. It comes back: everything is."""
        with Orchestrator(own.url) as broker:
            service = serve(TIMER_BROKER_URL=own.url, DATABASE_URL=postgres.fresh())
            broker.ready()
            broker.send("acme", "before", FAR)
            _stored(service, "acme", "before")
            broker.settled()
            postgres.stop("immediate")
            try:
                broker.send_many([("acme", f"c{n}", FAR) for n in range(50)])
                broker.publish(f"{SUBJECT}.acme", b"bad")
                until("they were tried", lambda: "commands have to wait for the store" in service.stderr)
                assert broker.waiting(COMMANDS_STREAM) >= 50
            finally:
                postgres.start()
            broker.settled()
            assert len(service.pages("namespace=acme", 100)) == 51
            assert len(broker.dead_letters(f"{SUBJECT}.acme")) == 1  # what is bad needs no store, and comes once

    def test_an_instance_that_dies_with_commands_in_hand(
        self, own: Nats, serve: Callable[..., Durable], tmp_path: Path
    ) -> None:
        with Orchestrator(own.url) as broker:
            broker.make_stream(name=COMMANDS_STREAM, subjects=[f"{SUBJECT}.*"], retention=RetentionPolicy.WORK_QUEUE)
            hasty = ConsumerConfig(durable_name="duetime", ack_policy=AckPolicy.EXPLICIT, ack_wait=2)
            broker.run(broker.js.add_consumer(COMMANDS_STREAM, hasty))
            service = serve(tmp_path, TIMER_BROKER_URL=own.url)
            broker.ready()
            until("it has asked for commands", lambda: broker.info().num_waiting > 0)
            service.signal(signal.SIGSTOP)
            calls = sorted(f"c{n}" for n in range(100))
            broker.send_many([("acme", call, soon()) for call in calls])
            until("they were given out", lambda: broker.info().num_ack_pending > 0)
            service.kill()
            assert broker.waiting(COMMANDS_STREAM) == 100  # none was answered
            serve(tmp_path, TIMER_BROKER_URL=own.url)
            until("all are reached", lambda: broker.count(EVENTS_STREAM) >= 100)
            events = broker.events("acme", 100)
            assert sorted(event.body["payload"]["serviceCallId"] for event in events) == calls
            broker.settled()

    def test_a_command_whose_answer_was_lost_comes_again_and_changes_nothing(
        self, own: Nats, serve: Callable[..., Durable]
    ) -> None:
        with Orchestrator(own.url) as broker:
            broker.make_stream(name=COMMANDS_STREAM, subjects=[f"{SUBJECT}.*"], retention=RetentionPolicy.WORK_QUEUE)
            hasty = ConsumerConfig(durable_name="duetime", ack_policy=AckPolicy.EXPLICIT, ack_wait=1)
            broker.run(broker.js.add_consumer(COMMANDS_STREAM, hasty))
            service = serve(TIMER_BROKER_URL=own.url)
            broker.ready()
            for n in range(5):
                broker.send("acme", f"c{n}", soon())
                own.kill()
                own.start()
            broker.settled()
            until("all are reached", lambda: len(service.pages("namespace=acme&status=completed", 100)) == 5)
            events = broker.events("acme", 5)
            assert sorted(event.body["payload"]["serviceCallId"] for event in events) == [f"c{n}" for n in range(5)]

    def test_draining_gives_back_what_was_not_taken(
        self, own: Nats, serve: Callable[..., Durable], receiver: Receiver, tmp_path: Path
    ) -> None:
        """An instance that drains has asked for commands and stays for as long as a callback takes."""
        with Orchestrator(own.url) as broker:
            service = serve(tmp_path, TIMER_BROKER_URL=own.url)
            broker.ready()
            until("it has asked for commands", lambda: broker.info().num_waiting > 0)
            hanging = receiver.reply("/hanging", Reply(hang=True))
            service.make(hanging, delay="0s")
            receiver.wait("/hanging")
            service.signal(signal.SIGTERM)
            until("it drains", lambda: "finishing what is in flight" in service.stderr)
            # The broker may still have its request for commands. What that brings is given back, to whoever is next.
            broker.send_many([("acme", f"c{n}", soon()) for n in range(20)])
            receiver.release()
            assert service.wait() == 0
            assert "Traceback" not in service.stderr
            serve(tmp_path, TIMER_BROKER_URL=own.url)
            until("all are reached", lambda: broker.count(EVENTS_STREAM) == 20, ACK_WAIT_SECONDS / 2)

    def test_two_instances_share_the_commands_and_one_may_leave(
        self, own: Nats, serve: Callable[..., Durable], postgres: Postgres
    ) -> None:
        with Orchestrator(own.url) as broker:
            database = postgres.fresh()
            one = serve(TIMER_BROKER_URL=own.url, DATABASE_URL=database)
            two = serve(TIMER_BROKER_URL=own.url, DATABASE_URL=database)
            broker.ready()
            until("both have asked", lambda: broker.info().num_waiting >= 2)
            # What is begun while a shard changes hands may have to wait until its attempt is given up for lost.
            until(
                "the shards are shared", lambda: min(_count(each, "duetime_owned_shards") for each in (one, two)) > 20
            )
            assert len(broker.run(broker.js.consumers_info(COMMANDS_STREAM))) == 1
            # One after the other, so that each is given to whoever has waited longest.
            for n in range(40):
                broker.send("acme", f"a{n}", soon())
            broker.settled()
            taken = [_count(service, "timer_commands_received_total") for service in (one, two)]
            assert sum(taken) == 40 and min(taken) > 0
            broker.send_many([("acme", f"b{n}", soon()) for n in range(600)])
            one.signal(signal.SIGTERM)
            broker.send_many([("acme", f"c{n}", soon()) for n in range(200)])
            assert one.wait() == 0
            # What it had and did not take was given back: nothing has to wait until the broker loses patience.
            until("every command is answered", lambda: broker.waiting(COMMANDS_STREAM) == 0, ACK_WAIT_SECONDS / 2)
            until("all are reached", lambda: broker.count(EVENTS_STREAM) >= 840)
            assert broker.count(EVENTS_STREAM) == 840
            until("all are recorded", lambda: _count(two, "duetime_timers") == 840)
            assert "Traceback" not in one.stderr + two.stderr
