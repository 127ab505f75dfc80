"""Create, list, change and pause namespaces; manage the secrets that sign their callbacks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from tests.doors.http_v1 import URL, HttpV1, failure, seconds_between, success
from tests.servers import Received, Receiver, Reply, instant, until

SHARDS = 64
BAD_WEIGHTS: list[Any] = [0, -1, 101, 1.5, "3", True, [], 10**30]
DAY_SECONDS = 86_400


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpV1]:
    with HttpV1(tmp_path_factory.mktemp("http-v1-namespaces"), LOG_LEVEL="debug") as service:
        yield service
        assert "Traceback" not in service.stderr, service.stderr


def namespace(service: HttpV1, name: str) -> dict[str, Any]:
    found: dict[str, Any] = success(service.api("GET", f"/namespaces/{name}"))
    return found


def test_number_of_namespaces_is_limited_by_a_setting(tmp_path: Path) -> None:
    with HttpV1(tmp_path, DUETIME_MAX_NAMESPACES="3", DUETIME_AUTO_NAMESPACES="on") as service:
        success(service.api("POST", "/namespaces", {"name": "one"}), 201)
        success(service.api("POST", "/timers", {"callbackUrl": URL, "delay": "1h", "namespace": "two"}))
        refusal = failure(service.api("POST", "/namespaces", {"name": "three"}), 409, "TOO_MANY_NAMESPACES")
        assert "3 namespaces" in refusal["message"] and "DUETIME_MAX_NAMESPACES" in refusal["message"]
        new = {"callbackUrl": URL, "delay": "1h"}
        failure(service.api("POST", "/timers", new | {"namespace": "three"}), 409, "TOO_MANY_NAMESPACES")
        batch = {"timers": [new | {"namespace": name} for name in ("three", "two")]}
        assert [each["status"] for each in success(service.api("POST", "/timers/batch", batch))["results"]] == [
            409,
            200,
        ]
        success(service.api("POST", "/namespaces", {"name": "one"}))
        assert len(success(service.api("GET", "/namespaces"))["namespaces"]) == 3
        assert "Traceback" not in service.stderr, service.stderr


class TestNamespaces:
    def test_default_namespace_exists(self, service: HttpV1) -> None:
        listed = success(service.api("GET", "/namespaces"))["namespaces"]
        assert "default" in [entry["name"] for entry in listed]
        found = namespace(service, "default")
        assert found in listed and (found["name"], found["paused"], found["secrets"]) == ("default", False, [])
        assert found["weight"] == 1

    def test_location_is_sent_only_for_a_new_namespace(self, service: HttpV1) -> None:
        answers = [service.api("POST", "/namespaces", {"name": "located"}) for _ in range(2)]
        assert [(answer.status, answer.headers.get("location")) for answer in answers] == [
            (201, "/api/v1/namespaces/located"),
            (200, None),
        ]

    def test_location_of_a_new_secret_deletes_it(self, service: HttpV1) -> None:
        name = service.namespace("located-secret")
        made = service.api("POST", f"/namespaces/{name}/secrets")
        assert made.headers["location"].endswith("/" + success(made, 201)["id"])
        success(service.request("DELETE", made.headers["location"]), 204)
        assert namespace(service, name)["secrets"] == []

    def test_repeated_create_returns_the_same_namespace(self, service: HttpV1) -> None:
        settings = {"name": "made.Once_-1", "shards": 4, "retention": "90m", "weight": 100}
        made = success(service.api("POST", "/namespaces", settings), 201)
        assert {name: made[name] for name in settings} == settings | {"retention": "1h30m"}
        assert made["paused"] is False and instant(made["createdAt"])
        assert success(service.api("POST", "/namespaces", settings)) == made == namespace(service, "made.Once_-1")
        assert made in success(service.api("GET", "/namespaces"))["namespaces"]

    @pytest.mark.parametrize(
        "change",
        [{"shards": 5}, {"retention": "1h"}, {"retention": "forever"}, {"weight": 1}, {"weight": 30}],
        ids=json.dumps,
    )
    def test_repeated_create_with_other_settings_is_a_conflict(self, service: HttpV1, change: Any) -> None:
        [(field, value)] = change.items()
        settings: dict[str, Any] = {"name": f"conflict-{field}-{value}", "shards": 4, "retention": "2h", "weight": 3}
        made = success(service.api("POST", "/namespaces", settings), 201)
        failure(service.api("POST", "/namespaces", settings | change), 409, "NAMESPACE_CONFLICT")
        assert namespace(service, settings["name"]) == made

    def test_omitted_settings_get_their_defaults_and_cause_no_conflict(self, service: HttpV1) -> None:
        made = success(service.api("POST", "/namespaces", {"name": "plain"}), 201)
        assert (made["shards"], made["weight"]) == (SHARDS, 1)
        for settings in ({}, {"weight": None}, {"weight": 1}):
            assert success(service.api("POST", "/namespaces", {"name": "plain"} | settings)) == made
        changed = success(service.api("PATCH", "/namespaces/plain", {"weight": 2}))
        assert success(service.api("POST", "/namespaces", {"name": "plain"})) == changed == made | {"weight": 2}
        assert success(service.api("POST", "/namespaces", {"name": "default"}))["name"] == "default"

    @pytest.mark.parametrize(
        ("settings", "field"),
        [
            ({}, "name"),
            *(({"name": name}, "name") for name in ("", "a b", "a/b", "ü", "a\n", "x" * 65, None, 5)),
            *(({"name": "bad", "shards": shards}, "shards") for shards in (0, -1, SHARDS + 1, 1.5, "4", 10**30)),
            *(
                ({"name": "bad", "retention": keep}, "retention")
                for keep in ("", "1", "0s", "-1d", "ever", 5, "9" * 50)
            ),
            *(({"name": "bad", "weight": weight}, "weight") for weight in BAD_WEIGHTS),
        ],
    )
    def test_invalid_settings_are_rejected(self, service: HttpV1, settings: Any, field: str) -> None:
        failure(service.api("POST", "/namespaces", settings), 400, "INVALID_INPUT", field)
        failure(service.api("GET", "/namespaces/bad"), 404, "NAMESPACE_NOT_FOUND")

    def test_unknown_namespace_is_not_found(self, service: HttpV1) -> None:
        for method, path, body in (
            ("GET", "/namespaces/nobody", None),
            ("PATCH", "/namespaces/nobody", {"paused": True}),
            ("POST", "/namespaces/nobody/secrets", None),
            ("DELETE", "/namespaces/nobody/secrets/x", None),
        ):
            failure(service.api(method, path, body), 404, "NAMESPACE_NOT_FOUND")
        failure(service.api("GET", "/namespaces/a%20b"), 400, "INVALID_INPUT", "name")

    def test_patch_changes_only_the_given_settings(self, service: HttpV1) -> None:
        made = success(service.api("POST", "/namespaces", {"name": "changes", "shards": 8}), 201)

        def patch(**settings: Any) -> Any:
            return success(service.api("PATCH", "/namespaces/changes", settings))

        assert patch() == made
        assert patch(retention="7d") == made | {"retention": "7d"}
        assert patch(paused=True) == made | {"retention": "7d", "paused": True}
        assert patch(retention="forever", paused=False) == made | {"retention": "forever"}
        assert patch(shards=8)["shards"] == 8
        assert patch(weight=100) == made | {"retention": "forever", "weight": 100}
        assert patch(paused=False)["weight"] == patch(weight=None)["weight"] == 100
        made |= {"retention": "forever", "weight": 7}
        assert patch(weight=7) == namespace(service, "changes") == made
        failure(service.api("PATCH", "/namespaces/changes", {"shards": 9}), 400, "INVALID_INPUT", "shards")
        bad: dict[str, list[Any]] = {
            "retention": ["", "x", "1ms", 5],
            "weight": [0, -1, 101, 1.5, "3", True],
            "paused": ["true", 1, []],
            "shards": ["8"],
        }
        for field, values in bad.items():
            for value in values:
                failure(service.api("PATCH", "/namespaces/changes", {field: value}), 400, "INVALID_INPUT", field)
        assert namespace(service, "changes") == made

    def test_namespace_with_one_shard_works(self, service: HttpV1, receiver: Receiver) -> None:
        service.namespace("one-shard", shards=1)
        items = [{"namespace": "one-shard", "delay": "0s", "callbackUrl": receiver.url("/one-shard")}] * 30
        for result in service.batch(items):
            assert service.final(result["timer"])["status"] == "completed"
        assert len(receiver.at("/one-shard")) == 30

    def test_namespaces_survive_a_restart(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        with HttpV1(tmp_path_factory.mktemp("kept")) as service:
            service.namespace("kept", shards=2, retention="forever", weight=3)
            success(service.api("PATCH", "/namespaces/kept", {"paused": True}))
            success(service.api("POST", "/namespaces/kept/secrets"), 201)
            before = namespace(service, "kept")
            service.kill()
            service.start()
            assert namespace(service, "kept") == before and before["weight"] == 3

    def test_finished_timers_expire_by_the_retention_of_their_namespace(
        self, service: HttpV1, receiver: Receiver
    ) -> None:
        for name, keep in (("hour", "1h"), ("week", "7d"), ("always", "forever")):
            service.namespace(name, retention=keep)
        done = {name: service.run(receiver.url("/kept"), namespace=name) for name in ("hour", "week", "always")}
        waits = service.make(namespace="hour", delay="1000d")

        def gone(name: str) -> bool:
            return service.api("GET", service.path(done[name])).status == 404

        service.advance("2h")
        until("the timer with 1h has expired", lambda: gone("hour"))
        assert not gone("week") and not gone("always") and service.current(waits) == waits
        service.advance("8d")
        until("the timer with 7d has expired", lambda: gone("week"))
        success(service.api("PATCH", "/namespaces/always", {"retention": "1d"}))
        service.advance("2m")
        until("the shorter retention applies", lambda: gone("always"))
        assert service.current(waits) == waits


class TestPause:
    def test_paused_namespace_accepts_timers_and_fires_none(self, service: HttpV1, receiver: Receiver) -> None:
        service.namespace("paused")
        before = service.make(receiver.url("/paused"), namespace="paused")
        success(service.api("PATCH", "/namespaces/paused", {"paused": True}))
        during = service.make(receiver.url("/paused"), namespace="paused", delay="0s")
        [result] = service.batch([{"namespace": "paused", "delay": "1s", "callbackUrl": receiver.url("/paused")}])
        moved = service.make(receiver.url("/paused"), namespace="paused", delay="1s")
        service.advance("1h")
        assert service.run(receiver.url("/paused-witness"))["status"] == "completed"
        timers = [before, during, result["timer"], moved]
        assert [service.current(timer)["status"] for timer in timers] == ["pending"] * 4 and not receiver.at("/paused")
        success(service.api("PUT", service.path(moved), {"payload": "changed"}))
        removed = service.make(receiver.url("/paused"), namespace="paused", delay="1s")
        success(service.api("DELETE", service.path(removed)), 204)
        success(service.api("PATCH", "/namespaces/paused", {"paused": False}))
        assert [service.final(timer)["status"] for timer in timers] == ["completed"] * 4
        assert len(receiver.at("/paused")) == 4

    def test_pause_holds_back_retries(self, service: HttpV1, receiver: Receiver) -> None:
        service.namespace("paused-retry")
        url = receiver.reply("/paused-retry", Reply(500), Reply(200))
        timer = service.attempt(service.make(url, namespace="paused-retry", delay="0s", retryPolicy={"jitter": False}))
        success(service.api("PATCH", "/namespaces/paused-retry", {"paused": True}))
        service.advance("1h")
        service.run(receiver.url("/paused-retry-witness"))
        assert len(receiver.at("/paused-retry")) == 1
        success(service.api("PATCH", "/namespaces/paused-retry", {"paused": False}))
        assert service.final(timer)["status"] == "completed"

    def test_pause_survives_a_restart(self, tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> None:
        with HttpV1(tmp_path_factory.mktemp("paused")) as service:
            service.namespace("still")
            success(service.api("PATCH", "/namespaces/still", {"paused": True}))
            timer = service.make(receiver.url("/still"), namespace="still", delay="0s")
            service.kill()
            service.start()
            service.run(receiver.url("/still-witness"))
            assert service.current(timer)["status"] == "pending" and not receiver.at("/still")
            success(service.api("PATCH", "/namespaces/still", {"paused": False}))
            assert service.final(timer)["status"] == "completed"


def signed_by(request: Received, secret: str) -> bool:
    """Whether the official package, without its check of the time, computes this signature for the secret."""
    at = datetime.fromtimestamp(int(request.headers["webhook-timestamp"]), UTC)
    expected = Webhook(secret).sign(request.headers["webhook-id"], at, request.body.decode())
    return expected in request.headers.get("webhook-signature", "").split(" ")


class TestSecrets:
    def secret(self, service: HttpV1, name: str) -> dict[str, Any]:
        made: dict[str, Any] = success(service.api("POST", f"/namespaces/{name}/secrets"), 201)
        return made

    def fired(self, service: HttpV1, receiver: Receiver, name: str) -> Received:
        count = len(receiver.at(f"/{name}"))
        service.run(receiver.url(f"/{name}"), namespace=name)
        return receiver.wait(f"/{name}", count + 1)[-1]

    def test_secret_is_shown_only_when_it_is_created(self, service: HttpV1, receiver: Receiver) -> None:
        service.namespace("shown-once")
        made = [self.secret(service, "shown-once") for _ in range(2)]
        assert all(set(secret) == {"id", "secret", "createdAt"} for secret in made)
        assert all(secret["secret"].startswith("whsec_") and instant(secret["createdAt"]) for secret in made)
        assert made[0]["secret"] != made[1]["secret"] and made[0]["id"] != made[1]["id"]
        request = self.fired(service, receiver, "shown-once")
        [timer] = service.pages("namespace=shown-once", 10)
        shown = [
            service.api(method, path, body).body
            for method, path, body in (
                ("GET", "/namespaces", None),
                ("GET", "/namespaces/shown-once", None),
                ("PATCH", "/namespaces/shown-once", {"retention": "5d"}),
                ("POST", "/namespaces", {"name": "shown-once"}),
                ("POST", "/namespaces", {"name": "shown-once", "retention": "5d"}),
                ("GET", "/timers?namespace=shown-once", None),
                ("GET", service.path(timer), None),
                ("GET", service.path(timer) + "/attempts", None),
                ("DELETE", f"/namespaces/shown-once/secrets/{made[0]['secret']}", None),
            )
        ]
        listed = {entry["id"] for entry in namespace(service, "shown-once")["secrets"]}
        assert listed == {secret["id"] for secret in made}
        metrics = service.request("GET", "/metrics").body
        everything = json.dumps(shown) + metrics.decode() + service.stderr + repr(request.headers)
        for secret in made:
            key = secret["secret"].removeprefix("whsec_")
            assert key not in everything and key.rstrip("=") not in everything

    def test_callbacks_of_a_namespace_without_secrets_are_unsigned(self, service: HttpV1, receiver: Receiver) -> None:
        service.namespace("unsigned")
        self.secret(service, "default")
        assert "webhook-signature" not in self.fired(service, receiver, "unsigned").headers

    def test_deleted_secret_signs_no_more(self, service: HttpV1, receiver: Receiver) -> None:
        service.namespace("delete-old")
        old, new = self.secret(service, "delete-old"), self.secret(service, "delete-old")
        request = self.fired(service, receiver, "delete-old")
        assert signed_by(request, old["secret"]) and signed_by(request, new["secret"])
        success(service.api("DELETE", f"/namespaces/delete-old/secrets/{old['id']}"), 204)
        request = self.fired(service, receiver, "delete-old")
        assert not signed_by(request, old["secret"]) and signed_by(request, new["secret"])
        for id in (old["id"], "nobody", "%20", "x" * 300):
            failure(service.api("DELETE", f"/namespaces/delete-old/secrets/{id}"), 404, "SECRET_NOT_FOUND")
        success(service.api("DELETE", f"/namespaces/delete-old/secrets/{new['id']}"), 204)
        assert "webhook-signature" not in self.fired(service, receiver, "delete-old").headers
        assert namespace(service, "delete-old")["secrets"] == []

    def test_replaced_secret_expires_after_a_day(self, service: HttpV1, receiver: Receiver) -> None:
        service.namespace("a-day")
        old = self.secret(service, "a-day")
        service.advance("100d")  # a secret that is not replaced does not expire
        assert signed_by(self.fired(service, receiver, "a-day"), old["secret"])
        new = self.secret(service, "a-day")
        shown = {entry["id"]: entry for entry in namespace(service, "a-day")["secrets"]}
        assert shown[new["id"]]["expiresAt"] is None
        assert seconds_between(new["createdAt"], shown[old["id"]]["expiresAt"]) == DAY_SECONDS
        service.advance("23h50m")
        request = self.fired(service, receiver, "a-day")
        assert signed_by(request, old["secret"]) and signed_by(request, new["secret"])
        service.advance("10m")
        request = self.fired(service, receiver, "a-day")
        assert not signed_by(request, old["secret"]) and signed_by(request, new["secret"])
        service.advance("1000d")
        assert signed_by(self.fired(service, receiver, "a-day"), new["secret"])


def test_all_callbacks_verify_during_a_rotation(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> None:
    """Callbacks verify with the old secret throughout, and with the new secret from its creation on."""
    with HttpV1(tmp_path_factory.mktemp("rotation"), virtual_clock=False) as service:
        service.namespace("rotation")
        old = success(service.api("POST", "/namespaces/rotation/secrets"), 201)

        def thousand(path: str) -> None:
            item = {"namespace": "rotation", "delay": "0s", "callbackUrl": receiver.url(path), "payload": "ü"}
            assert {result["status"] for result in service.batch([item] * 1000)} == {200}

        thousand("/http-v1-straddling")
        new = success(service.api("POST", "/namespaces/rotation/secrets"), 201)
        thousand("/http-v1-rotation")
        by_old, by_new = Webhook(old["secret"]), Webhook(new["secret"])
        for request in receiver.wait("/http-v1-rotation", 1000):
            for webhook in (by_old, by_new):
                assert webhook.verify(request.body, request.headers)["payload"] == "ü"
        for request in receiver.wait("/http-v1-straddling", 1000):
            by_old.verify(request.body, request.headers)
        assert len(receiver.at("/http-v1-rotation")) == len(receiver.at("/http-v1-straddling")) == 1000
        success(service.api("DELETE", f"/namespaces/rotation/secrets/{old['id']}"), 204)
        service.run(receiver.url("/http-v1-rotated"), namespace="rotation")
        [request] = receiver.at("/http-v1-rotated")
        by_new.verify(request.body, request.headers)
        with pytest.raises(WebhookVerificationError):
            by_old.verify(request.body, request.headers)
        with pytest.raises(WebhookVerificationError):
            by_new.verify(request.body + b" ", request.headers)
