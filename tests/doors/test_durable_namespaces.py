"""Namespaces: made, listed, changed, paused; and the secrets that sign their callbacks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from tests.doors.durable import URL, Durable, failure, seconds_between, success
from tests.servers import Received, Receiver, Reply, instant, until

SHARDS = 64
DAY_SECONDS = 86_400


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Durable]:
    with Durable(tmp_path_factory.mktemp("durable-namespaces"), LOG_LEVEL="debug") as door:
        yield door
        assert "Traceback" not in door.stderr, door.stderr


def namespace(door: Durable, name: str) -> dict[str, Any]:
    found: dict[str, Any] = success(door.api("GET", f"/namespaces/{name}"))
    return found


def test_there_are_no_more_than_the_setting_allows(tmp_path: Path) -> None:
    with Durable(tmp_path, DUETIME_MAX_NAMESPACES="3", DUETIME_AUTO_NAMESPACES="on") as door:
        success(door.api("POST", "/namespaces", {"name": "one"}), 201)
        success(door.api("POST", "/timers", {"callbackUrl": URL, "delay": "1h", "namespace": "two"}))
        refusal = failure(door.api("POST", "/namespaces", {"name": "three"}), 409, "TOO_MANY_NAMESPACES")
        assert "3 namespaces" in refusal["message"] and "DUETIME_MAX_NAMESPACES" in refusal["message"]
        new = {"callbackUrl": URL, "delay": "1h"}
        failure(door.api("POST", "/timers", new | {"namespace": "three"}), 409, "TOO_MANY_NAMESPACES")
        batch = {"timers": [new | {"namespace": name} for name in ("three", "two")]}
        assert [each["status"] for each in success(door.api("POST", "/timers/batch", batch))["results"]] == [409, 200]
        success(door.api("POST", "/namespaces", {"name": "one"}))
        assert len(success(door.api("GET", "/namespaces"))["namespaces"]) == 3
        assert "Traceback" not in door.stderr, door.stderr


class TestNamespaces:
    def test_default_is_there(self, door: Durable) -> None:
        listed = success(door.api("GET", "/namespaces"))["namespaces"]
        assert "default" in [entry["name"] for entry in listed]
        found = namespace(door, "default")
        assert found in listed and (found["name"], found["paused"], found["secrets"]) == ("default", False, [])
        assert found["weight"] == 1

    def test_made_once(self, door: Durable) -> None:
        asked = {"name": "made.Once_-1", "shards": 4, "retention": "90m", "weight": 100}
        made = success(door.api("POST", "/namespaces", asked), 201)
        assert {name: made[name] for name in asked} == asked | {"retention": "1h30m"}
        assert made["paused"] is False and instant(made["createdAt"])
        assert success(door.api("POST", "/namespaces", asked)) == made == namespace(door, "made.Once_-1")
        assert made in success(door.api("GET", "/namespaces"))["namespaces"]

    @pytest.mark.parametrize(
        "change",
        [{"shards": 5}, {"retention": "1h"}, {"retention": "forever"}, {"weight": 1}, {"weight": 30}],
        ids=json.dumps,
    )
    def test_other_settings_are_a_conflict(self, door: Durable, change: Any) -> None:
        [(field, value)] = change.items()
        asked = {"name": f"conflict-{field}-{value}", "shards": 4, "retention": "2h", "weight": 3}
        made = success(door.api("POST", "/namespaces", asked), 201)
        failure(door.api("POST", "/namespaces", asked | change), 409, "NAMESPACE_CONFLICT")
        assert namespace(door, asked["name"]) == made

    def test_what_is_left_out(self, door: Durable) -> None:
        made = success(door.api("POST", "/namespaces", {"name": "plain"}), 201)
        assert (made["shards"], made["weight"]) == (SHARDS, 1)
        for asked in ({}, {"weight": None}, {"weight": 1}):
            assert success(door.api("POST", "/namespaces", {"name": "plain"} | asked)) == made
        changed = success(door.api("PATCH", "/namespaces/plain", {"weight": 2}))
        assert success(door.api("POST", "/namespaces", {"name": "plain"})) == changed == made | {"weight": 2}
        assert success(door.api("POST", "/namespaces", {"name": "default"}))["name"] == "default"

    @pytest.mark.parametrize(
        ("asked", "field"),
        [
            ({}, "name"),
            *(({"name": name}, "name") for name in ("", "a b", "a/b", "ü", "a\n", "x" * 65, None, 5)),
            *(({"name": "bad", "shards": shards}, "shards") for shards in (0, -1, SHARDS + 1, 1.5, "4", 10**30)),
            *(
                ({"name": "bad", "retention": keep}, "retention")
                for keep in ("", "1", "0s", "-1d", "ever", 5, "9" * 50)
            ),
            *(({"name": "bad", "weight": weight}, "weight") for weight in (0, -1, 101, 1.5, "3", True, [], 10**30)),
        ],
    )
    def test_bad_ones(self, door: Durable, asked: Any, field: str) -> None:
        failure(door.api("POST", "/namespaces", asked), 400, "INVALID_INPUT", field)
        failure(door.api("GET", "/namespaces/bad"), 404, "NAMESPACE_NOT_FOUND")

    def test_nobody(self, door: Durable) -> None:
        for method, path, body in (
            ("GET", "/namespaces/nobody", None),
            ("PATCH", "/namespaces/nobody", {"paused": True}),
            ("POST", "/namespaces/nobody/secrets", None),
            ("DELETE", "/namespaces/nobody/secrets/x", None),
        ):
            failure(door.api(method, path, body), 404, "NAMESPACE_NOT_FOUND")
        failure(door.api("GET", "/namespaces/a%20b"), 400, "INVALID_INPUT", "name")

    def test_changes(self, door: Durable) -> None:
        made = success(door.api("POST", "/namespaces", {"name": "changes", "shards": 8}), 201)

        def patch(**asked: Any) -> Any:
            return success(door.api("PATCH", "/namespaces/changes", asked))

        assert patch() == made
        assert patch(retention="7d") == made | {"retention": "7d"}
        assert patch(paused=True) == made | {"retention": "7d", "paused": True}
        assert patch(retention="forever", paused=False) == made | {"retention": "forever"}
        assert patch(shards=8)["shards"] == 8
        assert patch(weight=100) == made | {"retention": "forever", "weight": 100}
        assert patch(paused=False)["weight"] == patch(weight=None)["weight"] == 100
        made |= {"retention": "forever", "weight": 7}
        assert patch(weight=7) == namespace(door, "changes") == made
        failure(door.api("PATCH", "/namespaces/changes", {"shards": 9}), 400, "INVALID_INPUT", "shards")
        bad: dict[str, list[Any]] = {
            "retention": ["", "x", "1ms", 5],
            "weight": [0, -1, 101, 1.5, "3", True],
            "paused": ["true", 1, []],
            "shards": ["8"],
        }
        for field, values in bad.items():
            for value in values:
                failure(door.api("PATCH", "/namespaces/changes", {field: value}), 400, "INVALID_INPUT", field)
        assert namespace(door, "changes") == made

    def test_few_shards_are_enough(self, door: Durable, receiver: Receiver) -> None:
        door.namespace("one-shard", shards=1)
        items = [{"namespace": "one-shard", "delay": "0s", "callbackUrl": receiver.url("/one-shard")}] * 30
        for result in door.batch(items):
            assert door.final(result["timer"])["status"] == "completed"
        assert len(receiver.at("/one-shard")) == 30

    def test_they_outlive_the_process(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        with Durable(tmp_path_factory.mktemp("kept")) as door:
            door.namespace("kept", shards=2, retention="forever", weight=3)
            success(door.api("PATCH", "/namespaces/kept", {"paused": True}))
            success(door.api("POST", "/namespaces/kept/secrets"), 201)
            before = namespace(door, "kept")
            door.kill()
            door.start()
            assert namespace(door, "kept") == before and before["weight"] == 3

    def test_retention(self, door: Durable, receiver: Receiver) -> None:
        for name, keep in (("hour", "1h"), ("week", "7d"), ("always", "forever")):
            door.namespace(name, retention=keep)
        done = {name: door.run(receiver.url("/kept"), namespace=name) for name in ("hour", "week", "always")}
        waits = door.make(namespace="hour", delay="1000d")

        def gone(name: str) -> bool:
            return door.api("GET", door.path(done[name])).status == 404

        door.advance("2h")
        until("the hour is over", lambda: gone("hour"))
        assert not gone("week") and not gone("always") and door.see(waits) == waits
        door.advance("8d")
        until("the week is over", lambda: gone("week"))
        success(door.api("PATCH", "/namespaces/always", {"retention": "1d"}))
        door.advance("2m")
        until("it is not for ever", lambda: gone("always"))
        assert door.see(waits) == waits


class TestPause:
    def test_nothing_fires_and_creates_are_taken(self, door: Durable, receiver: Receiver) -> None:
        door.namespace("paused")
        before = door.make(receiver.url("/paused"), namespace="paused")
        success(door.api("PATCH", "/namespaces/paused", {"paused": True}))
        during = door.make(receiver.url("/paused"), namespace="paused", delay="0s")
        [result] = door.batch([{"namespace": "paused", "delay": "1s", "callbackUrl": receiver.url("/paused")}])
        moved = door.make(receiver.url("/paused"), namespace="paused", delay="1s")
        door.advance("1h")
        assert door.run(receiver.url("/paused-witness"))["status"] == "completed"
        timers = [before, during, result["timer"], moved]
        assert [door.see(timer)["status"] for timer in timers] == ["pending"] * 4 and not receiver.at("/paused")
        success(door.api("PUT", door.path(moved), {"payload": "changed"}))
        removed = door.make(receiver.url("/paused"), namespace="paused", delay="1s")
        success(door.api("DELETE", door.path(removed)), 204)
        success(door.api("PATCH", "/namespaces/paused", {"paused": False}))
        assert [door.final(timer)["status"] for timer in timers] == ["completed"] * 4
        assert len(receiver.at("/paused")) == 4

    def test_retries_wait_too(self, door: Durable, receiver: Receiver) -> None:
        door.namespace("paused-retry")
        url = receiver.reply("/paused-retry", Reply(500), Reply(200))
        timer = door.attempt(door.make(url, namespace="paused-retry", delay="0s", retryPolicy={"jitter": False}))
        success(door.api("PATCH", "/namespaces/paused-retry", {"paused": True}))
        door.advance("1h")
        door.run(receiver.url("/paused-retry-witness"))
        assert len(receiver.at("/paused-retry")) == 1
        success(door.api("PATCH", "/namespaces/paused-retry", {"paused": False}))
        assert door.final(timer)["status"] == "completed"

    def test_a_restart_does_not_resume_it(self, tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> None:
        with Durable(tmp_path_factory.mktemp("paused")) as door:
            door.namespace("still")
            success(door.api("PATCH", "/namespaces/still", {"paused": True}))
            timer = door.make(receiver.url("/still"), namespace="still", delay="0s")
            door.kill()
            door.start()
            door.run(receiver.url("/still-witness"))
            assert door.see(timer)["status"] == "pending" and not receiver.at("/still")
            success(door.api("PATCH", "/namespaces/still", {"paused": False}))
            assert door.final(timer)["status"] == "completed"


def signed_by(request: Received, secret: str) -> bool:
    """Whether the secret's signature is there, by the official package but for its look at the clock."""
    at = datetime.fromtimestamp(int(request.headers["webhook-timestamp"]), UTC)
    expected = Webhook(secret).sign(request.headers["webhook-id"], at, request.body.decode())
    return expected in request.headers.get("webhook-signature", "").split(" ")


class TestSecrets:
    def secret(self, door: Durable, name: str) -> dict[str, Any]:
        made: dict[str, Any] = success(door.api("POST", f"/namespaces/{name}/secrets"), 201)
        return made

    def fired(self, door: Durable, receiver: Receiver, name: str) -> Received:
        count = len(receiver.at(f"/{name}"))
        door.run(receiver.url(f"/{name}"), namespace=name)
        return receiver.wait(f"/{name}", count + 1)[-1]

    def test_shown_once(self, door: Durable, receiver: Receiver) -> None:
        door.namespace("shown-once")
        made = [self.secret(door, "shown-once") for _ in range(2)]
        assert all(set(secret) == {"id", "secret", "createdAt"} for secret in made)
        assert all(secret["secret"].startswith("whsec_") and instant(secret["createdAt"]) for secret in made)
        assert made[0]["secret"] != made[1]["secret"] and made[0]["id"] != made[1]["id"]
        request = self.fired(door, receiver, "shown-once")
        [timer] = door.pages("namespace=shown-once", 10)
        said = [
            door.api(method, path, body).body
            for method, path, body in (
                ("GET", "/namespaces", None),
                ("GET", "/namespaces/shown-once", None),
                ("PATCH", "/namespaces/shown-once", {"retention": "5d"}),
                ("POST", "/namespaces", {"name": "shown-once"}),
                ("POST", "/namespaces", {"name": "shown-once", "retention": "5d"}),
                ("GET", "/timers?namespace=shown-once", None),
                ("GET", door.path(timer), None),
                ("GET", door.path(timer) + "/attempts", None),
                ("DELETE", f"/namespaces/shown-once/secrets/{made[0]['secret']}", None),
            )
        ]
        listed = {entry["id"] for entry in namespace(door, "shown-once")["secrets"]}
        assert listed == {secret["id"] for secret in made}
        metrics = door.request("GET", "/metrics").body
        everything = json.dumps(said) + metrics.decode() + door.stderr + repr(request.headers)
        for secret in made:
            key = secret["secret"].removeprefix("whsec_")
            assert key not in everything and key.rstrip("=") not in everything

    def test_none_no_signature(self, door: Durable, receiver: Receiver) -> None:
        door.namespace("unsigned")
        self.secret(door, "default")
        assert "webhook-signature" not in self.fired(door, receiver, "unsigned").headers

    def test_deleted(self, door: Durable, receiver: Receiver) -> None:
        door.namespace("delete-old")
        old, new = self.secret(door, "delete-old"), self.secret(door, "delete-old")
        request = self.fired(door, receiver, "delete-old")
        assert signed_by(request, old["secret"]) and signed_by(request, new["secret"])
        success(door.api("DELETE", f"/namespaces/delete-old/secrets/{old['id']}"), 204)
        request = self.fired(door, receiver, "delete-old")
        assert not signed_by(request, old["secret"]) and signed_by(request, new["secret"])
        for id in (old["id"], "nobody", "%20", "x" * 300):
            failure(door.api("DELETE", f"/namespaces/delete-old/secrets/{id}"), 404, "SECRET_NOT_FOUND")
        success(door.api("DELETE", f"/namespaces/delete-old/secrets/{new['id']}"), 204)
        assert "webhook-signature" not in self.fired(door, receiver, "delete-old").headers
        assert namespace(door, "delete-old")["secrets"] == []

    def test_a_day_later(self, door: Durable, receiver: Receiver) -> None:
        door.namespace("a-day")
        old = self.secret(door, "a-day")
        door.advance("100d")  # alone, it has no end
        assert signed_by(self.fired(door, receiver, "a-day"), old["secret"])
        new = self.secret(door, "a-day")
        shown = {entry["id"]: entry for entry in namespace(door, "a-day")["secrets"]}
        assert shown[new["id"]]["expiresAt"] is None
        assert seconds_between(new["createdAt"], shown[old["id"]]["expiresAt"]) == DAY_SECONDS
        door.advance("23h50m")
        request = self.fired(door, receiver, "a-day")
        assert signed_by(request, old["secret"]) and signed_by(request, new["secret"])
        door.advance("10m")
        request = self.fired(door, receiver, "a-day")
        assert not signed_by(request, old["secret"]) and signed_by(request, new["secret"])
        door.advance("1000d")
        assert signed_by(self.fired(door, receiver, "a-day"), new["secret"])


def test_a_thousand_of_a_thousand_during_a_rotation(
    tmp_path_factory: pytest.TempPathFactory, receiver: Receiver
) -> None:
    """With the old secret throughout, with the new one from when it was made, as the official package judges it."""
    with Durable(tmp_path_factory.mktemp("rotation"), virtual_clock=False) as door:
        door.namespace("rotation")
        old = success(door.api("POST", "/namespaces/rotation/secrets"), 201)

        def thousand(path: str) -> None:
            item = {"namespace": "rotation", "delay": "0s", "callbackUrl": receiver.url(path), "payload": "ü"}
            assert {result["status"] for result in door.batch([item] * 1000)} == {200}

        thousand("/durable-straddling")
        new = success(door.api("POST", "/namespaces/rotation/secrets"), 201)
        thousand("/durable-rotation")
        by_old, by_new = Webhook(old["secret"]), Webhook(new["secret"])
        for request in receiver.wait("/durable-rotation", 1000):
            for webhook in (by_old, by_new):
                assert webhook.verify(request.body, request.headers)["payload"] == "ü"
        for request in receiver.wait("/durable-straddling", 1000):
            by_old.verify(request.body, request.headers)
        assert len(receiver.at("/durable-rotation")) == len(receiver.at("/durable-straddling")) == 1000
        success(door.api("DELETE", f"/namespaces/rotation/secrets/{old['id']}"), 204)
        door.run(receiver.url("/durable-rotated"), namespace="rotation")
        [request] = receiver.at("/durable-rotated")
        by_new.verify(request.body, request.headers)
        with pytest.raises(WebhookVerificationError):
            by_old.verify(request.body, request.headers)
        with pytest.raises(WebhookVerificationError):
            by_new.verify(request.body + b" ", request.headers)
