"""Every operation of the OpenAPI document, with timers of all three APIs in the store: each status that a client can
cause occurs, and every answer is one that the document allows (``answers_keep_the_document``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.doors.commands import Orchestrator
from tests.doors.described import operation_of
from tests.doors.http_v1 import URL, HttpV1
from tests.doors.test_openapi import DOCUMENT, SCHEMAS
from tests.nats import Nats
from tests.servers import Answer, Receiver, Reply, until, unused_address

CAUSED = {200, 201, 204, 400, 401, 404, 409, 415}
V1, NOBODY = "/api/v1", "00000000-0000-4000-8000-000000000000"
OTHER = "http://127.0.0.1:9/other"


class Asker:
    """Sends requests and keeps which operations answered with which status."""

    def __init__(self, service: HttpV1) -> None:
        self.service = service
        self.seen: set[tuple[str, int]] = set()

    def __call__(self, status: int, method: str, path: str, json: Any = None, **more: Any) -> Any:
        answer: Answer = self.service.request(method, path, json=json, **more)
        assert answer.status == status, (method, path, answer)
        operation = operation_of(method.lower(), path.partition("?")[0])
        assert operation is not None, path
        self.seen.add((operation["operationId"], status))
        return answer.body


def test_responses_of_every_operation_match_the_document(tmp_path: Path) -> None:
    with Nats() as nats, Receiver() as receiver, HttpV1(tmp_path / "service", TIMER_BROKER_URL=nats.url) as service:
        ask = Asker(service)
        with Orchestrator(nats.url) as broker:
            broker.wait_ready()
            broker.send("acme", "call", service.ahead(60))
            until("the command's timer is stored", lambda: service.pages("namespace=acme", 10))
        _timers(ask, receiver)
        _other_style(ask, service)
        _namespaces(ask)
        _platform(ask, service)
        for path in ("/health", "/healthz", "/livez", "/readyz", "/metrics", f"{V1}/overview", f"{V1}/cluster"):
            ask(200, "GET", path)
        _anywhere(ask)
        described = {
            (operation["operationId"], int(status))
            for methods in DOCUMENT["paths"].values()
            for operation in methods.values()
            for status in operation["responses"]
            if int(status) in CAUSED
        }
        assert ask.seen == described
        assert "Traceback" not in service.stderr, service.stderr


def _timers(ask: Asker, receiver: Receiver) -> None:
    timers, one = f"{V1}/timers", f"{V1}/timers/default/one"
    service = ask.service
    asked = {"id": "one", "delay": "1h", "callbackUrl": URL, "payload": {"a": 1}, "correlationId": "some"}
    ask(200, "POST", timers, asked)
    ask(409, "POST", timers, asked | {"callbackUrl": OTHER})
    ask(400, "POST", timers, {})
    ask(200, "POST", timers, {"id": "subject", "delay": "1h", "callbackSubject": "app.a"})
    results = ask(200, "POST", f"{timers}/batch", {"timers": [asked, {}, asked | {"callbackUrl": OTHER}]})["results"]
    assert [result["status"] for result in results] == [200, 400, 409]
    minimal = {"X-API-Key": service.key or "", "Prefer": "return=minimal"}
    ask(200, "POST", f"{timers}/batch", {"timers": [asked]}, headers=minimal)
    ask(400, "POST", f"{timers}/batch", {"timers": []})

    shown = {timer["namespace"]: timer for timer in ask(200, "GET", timers)["timers"]}
    assert set(shown) == {"acme", "default"}
    # More than a request may ask for: answers have a schema of their own.
    most = SCHEMAS["RetryPolicy"]["properties"]["maxRetries"]["maximum"]
    assert shown["acme"]["retryPolicy"]["maxRetries"] > most
    ask(200, "GET", f"{timers}?limit=1")
    ask(400, "GET", f"{timers}?limit=0")
    ask(200, "GET", f"{timers}/count?status=pending")
    ask(400, "GET", f"{timers}/count?limit=1")

    ask(200, "GET", one)
    ask(200, "GET", f"{timers}/acme/call")
    ask(200, "PUT", one, {"delay": "2h"})
    failed = service.run(receiver.reply("/fails", Reply(500)), id="failed", retryPolicy={"maxRetries": 0})
    assert failed["status"] == "failed" and failed["lastError"]
    ask(200, "GET", f"{timers}/default/failed/attempts")
    ask(409, "PUT", f"{timers}/default/failed", {"delay": "1h"})
    ask(409, "POST", f"{timers}/default/failed/cancel")
    ask(409, "POST", f"{one}/replay")
    ask(200, "POST", f"{timers}/default/failed/replay")
    ask(200, "POST", f"{timers}/replay", {"status": "failed"})
    ask(400, "POST", f"{timers}/replay", {"limit": 0})
    ask(200, "POST", f"{one}/cancel")
    ask(200, "POST", f"{timers}/cancel", {"correlationId": "none"})
    ask(400, "POST", f"{timers}/cancel", {"limit": 0})
    ask(204, "DELETE", one)
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/attempts"), ("POST", "/cancel"), ("POST", "/replay")):
        ask(404, method, f"{one}{path}")
        ask(400, method, f"{timers}/{quote('a b')}/one{path}")
    ask(404, "PUT", one, {"delay": "1h"})
    ask(400, "PUT", one, {"delay": 1})

    held = {"id": "held", "delay": "0s", "callbackUrl": receiver.reply("/hangs", Reply(hang=True))}
    ask(200, "POST", timers, held)
    receiver.wait("/hangs")
    ask(409, "DELETE", f"{timers}/default/held")
    ask(409, "POST", f"{timers}/create", held)
    ask(409, "POST", f"{timers}/update", {"id": "held", "delay": "1h"})
    ask(409, "POST", f"{timers}/delete", {"id": "held"})
    receiver.release()


def _other_style(ask: Asker, service: HttpV1) -> None:
    timers = f"{V1}/timers"
    ask(200, "POST", f"{timers}/create", {"id": "two", "executeAt": service.ahead(60), "callbackUrl": URL})
    ask(400, "POST", f"{timers}/create", {"id": "two", "callbackUrl": URL})
    ask(200, "POST", f"{timers}/get", {"timerId": "two"})
    ask(200, "POST", f"{timers}/update", {"timerId": "two", "delay": "2h"})
    ask(204, "POST", f"{timers}/delete", {"timerId": "two"})
    for verb in ("get", "update", "delete"):
        ask(404, "POST", f"{timers}/{verb}", {"timerId": "two"})
        ask(400, "POST", f"{timers}/{verb}", {})


def _namespaces(ask: Asker) -> None:
    namespaces, one = f"{V1}/namespaces", f"{V1}/namespaces/billing"
    ask(201, "POST", namespaces, {"name": "billing", "retention": "30d"})
    ask(200, "POST", namespaces, {"name": "billing", "retention": "30d"})
    ask(409, "POST", namespaces, {"name": "billing", "retention": "1d"})
    ask(400, "POST", namespaces, {"name": "a b"})
    ask(200, "PATCH", one, {"paused": True})
    ask(400, "PATCH", one, {"paused": 1})
    secret = ask(201, "POST", f"{one}/secrets")
    ask(201, "POST", f"{one}/secrets")
    ask(200, "GET", one)
    ask(200, "GET", namespaces)
    ask(204, "DELETE", f"{one}/secrets/{secret['id']}")
    ask(404, "DELETE", f"{one}/secrets/{NOBODY}")
    for method, path in (("GET", ""), ("POST", "/secrets"), ("DELETE", f"/secrets/{NOBODY}")):
        ask(404, method, f"{namespaces}/missing{path}")
        ask(400, method, f"{namespaces}/{quote('a b')}{path}")
    ask(404, "PATCH", f"{namespaces}/missing", {})


def _platform(ask: Asker, service: HttpV1) -> None:
    asked = {"execute_at": service.ahead(60), "callback_url": URL, "callback_payload": [1], "idempotency_key": "a"}
    made = ask(201, "POST", "/timers", asked)["data"]
    ask(200, "POST", "/timers", asked)
    ask(409, "POST", "/timers", asked | {"callback_url": OTHER})
    ask(400, "POST", "/timers", {})
    callback = {"type": "nats", "topic": "app.a", "payload": {"b": None}}
    subject = ask(201, "POST", "/timers", {"execute_at": service.ahead(60), "callback": callback})["data"]
    one, missing = f"/timers/{made['id']}", f"/timers/{NOBODY}"
    ask(200, "GET", one)
    ask(200, "GET", f"/timers/{subject['id']}")
    ask(200, "GET", f"{V1}/timers?namespace=default")
    ask(200, "GET", "/timers")
    ask(400, "GET", "/timers?limit=0")
    ask(200, "PUT", one, {"execute_at": service.ahead(90)})
    ask(200, "DELETE", one)
    ask(400, "PUT", one, {"execute_at": service.ahead(90)})
    for method, body in (("GET", None), ("DELETE", None), ("PUT", {"execute_at": service.ahead(90)})):
        ask(404, method, missing, body)
        ask(400, method, "/timers/none", body)


def _anywhere(ask: Asker) -> None:
    """Errors that come before an operation begins: no key, an unknown query parameter, and a compressed body."""
    for template, methods in DOCUMENT["paths"].items():
        path = template.replace("{id}", NOBODY).replace("{namespace}", "default").replace("{name}", "default")
        for method, operation in methods.items():
            if "401" in operation["responses"]:
                ask(401, method.upper(), path, headers={}, source=unused_address())
            if "400" in operation["responses"]:
                ask(400, method.upper(), f"{path}?unheardOf=1")
            if "415" in operation["responses"]:
                headers = {"X-API-Key": ask.service.key or "", "Content-Encoding": "gzip"}
                ask(415, method.upper(), path, {}, headers=headers)
