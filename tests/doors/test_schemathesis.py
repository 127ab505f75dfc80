"""Schemathesis makes up requests from the OpenAPI document, good ones and bad ones, and holds a live service to it.

Its command runs in a process of its own, through this module, behind a ``Gate``: whatever it makes up, a timer can only
be aimed at a receiver on loopback, and is due either now or long after the test. The command does not know the key of
the service; only the gate does, so a request that went around it would be refused.

``DUETIME_FUZZ_SEED`` makes it another run, ``DUETIME_FUZZ_EXAMPLES`` a longer one.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from duetime.doors.platform_schema import EXAMPLE_ID
from duetime.errors import InvalidInput
from duetime.timetext import parse_time
from duetime.urls import parse_url
from tests.servers import KEY, Duetime, Receiver, until, unused_address

ROOT = Path(__file__).parents[2]
SEED = os.environ.get("DUETIME_FUZZ_SEED") or "20300131"
EXAMPLES = os.environ.get("DUETIME_FUZZ_EXAMPLES") or "15"
SECONDS_MAX = 300
STAND_IN = "stand-in-for-the-key"
WITH_KEY = {"X-API-Key": KEY}

IDS = [f"timer-{number}" for number in range(40)]
# The platform API knows no other ids. The first is the document's example, changed before much else is done.
UUIDS = [EXAMPLE_ID, *(str(uuid.UUID(int=number, version=4)) for number in range(20))]
FINISHED_IN, PENDING_IN = "archive", "default"

# Not every request that keeps the schema is good, so "positive_data_acceptance" would be wrong: names of one thing must
# agree, times must lie ahead, and durations have a longest, none of which a schema can say. A batch is taken even when
# some of its timers are not.
CONFIGURATION = f"""
[checks.positive_data_acceptance]
enabled = false

[[operations]]
include-path = "/api/v1/timers/batch"
checks.negative_data_rejection.enabled = false

[[operations]]
include-path = "/timers/{{id}}"
parameters = {{ id = {{ dictionary = "platform_ids", probability = 0.6 }} }}

[dictionaries.ids]
values = {IDS}

[dictionaries.platform_ids]
values = {UUIDS}

[dictionaries.namespaces]
values = {[FINISHED_IN, PENDING_IN]}

[parameters]
id = {{ dictionary = "ids", probability = 0.6 }}
namespace = {{ dictionary = "namespaces", probability = 0.6 }}
"""


def test_the_service_keeps_to_its_document(tmp_path: Path) -> None:
    with (
        Receiver() as receiver,
        Duetime(tmp_path / "service", virtual_clock=True, DUETIME_AUTO_NAMESPACES="on") as service,
    ):
        furnish(service, receiver)
        document = service.request("GET", "/api/v1/openapi.json", headers={}).body
        (tmp_path / "schemathesis.toml").write_text(CONFIGURATION)
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "tests.doors.test_schemathesis", "run", "--no-color"),
                *("--header", f"X-API-Key: {STAND_IN}", "--seed", SEED, "--max-examples", EXAMPLES),
                *("--generation-database", "none", f"http://127.0.0.1:{service.port}/api/v1/openapi.json"),
            ],
            cwd=tmp_path,
            # The order of a set must not make it another run.
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(ROOT),
                "PYTHONHASHSEED": "0",
                "RECEIVER": receiver.url("/"),
            },
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        assert ran.returncode == 0, f"seed {SEED}\n{ran.stdout}\n{ran.stderr}"
        assert "Traceback" not in service.stderr, service.stderr
        assert {timer["callbackUrl"] for timer in all_timers(service)} == {receiver.url("/")}

    answers = json.loads((tmp_path / "answers.json").read_text())
    never = [name for name, shape in operations(document).items() if not succeeded(answers, shape)]
    assert not never, f"no request made up for these was a good one: {never}"


def furnish(service: Duetime, receiver: Receiver) -> None:
    """Timers to be found: finished ones and pending ones, and one more for requests that name theirs in the body."""
    aim = {"callbackUrl": receiver.url("/")}
    finished = [{"namespace": FINISHED_IN, "id": id, "delay": "0s", **aim} for id in IDS]
    pending = [{"namespace": PENDING_IN, "id": id, "delay": "1000d", **aim} for id in [*IDS, "kept", *UUIDS]]
    made = service.request("POST", "/api/v1/timers/batch", json={"timers": finished + pending}, headers=WITH_KEY)
    assert {result["status"] for result in made.body["results"]} == {200}, made
    until("the finished timers are", lambda: len(all_timers(service, "&status=completed")) == len(IDS))


def all_timers(service: Duetime, query: str = "") -> list[dict[str, Any]]:
    timers, cursor = [], ""
    while True:
        page = service.request("GET", f"/api/v1/timers?limit=1000{query}{cursor}", headers=WITH_KEY).body
        timers += page["timers"]
        if page["nextCursor"] is None:
            return timers
        cursor = f"&cursor={page['nextCursor']}"


def operations(document: dict[str, Any]) -> dict[str, re.Pattern[str]]:
    """The operations of the document, with the shape of a good answer's entry in the gate's tally."""
    return {
        f"{method.upper()} {path}": re.compile(f"{method.upper()} {re.sub(r'{[^}]*}', '[^/]+', path)} 2..")
        for path, methods in document["paths"].items()
        for method in methods
    }


def succeeded(answers: dict[str, int], shape: re.Pattern[str]) -> bool:
    return any(shape.fullmatch(answer) for answer in answers)


# --- in the process of the command ---------------------------------------------------------------------------------


class Gate:
    """What every request goes through on its way out of the command, and every answer on its way back."""

    def __init__(self, receiver: str) -> None:
        self.receiver = receiver
        self.answers: Counter[str] = Counter()

    def aimed(self, path: str, body: bytes) -> bytes:
        """The body, aimed at the receiver if it can aim at anything. Whatever the service can read, this can."""
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            return body
        if path in ("/api/v1/timers/get", "/api/v1/timers/update") and asked.__class__ is dict:
            # The document's example, which others of its examples delete.
            asked = {name: "kept" if value == "invoice-42" else value for name, value in asked.items()}
        aimed = self._aim(asked)
        return body if aimed == json.loads(body) else json.dumps(aimed).encode()

    def _aim(self, part: Any) -> Any:
        if isinstance(part, list):
            return [self._aim(item) for item in part]
        if isinstance(part, dict):
            return {name: self._field(name, value) for name, value in part.items()}
        return part

    def _field(self, name: str, value: Any) -> Any:
        if name in ("callbackUrl", "callback_url", "url") and accepted(parse_url, value):
            return self.receiver
        if name in ("executeAt", "execute_at") and accepted(parse_time, value):
            return "2996" + value[4:]  # a leap year, as the one before it may have been
        if value is None and name not in ("payload", "metadata"):
            return []  # The document forbids null, the code takes it as absent; this, both refuse.
        return self._aim(value)

    def install(self) -> None:
        from requests import PreparedRequest, Response
        from requests.adapters import HTTPAdapter

        send = HTTPAdapter.send

        def gated(adapter: HTTPAdapter, request: PreparedRequest, **more: Any) -> Response:
            url = urlsplit(request.url or "")
            assert url.hostname == "127.0.0.1", request.url
            if request.body:
                body = request.body.encode() if isinstance(request.body, str) else request.body
                assert isinstance(body, bytes), type(body)
                request.body = self.aimed(url.path, body)
                request.headers["Content-Length"] = str(len(request.body))
            if request.headers.get("X-API-Key") == STAND_IN:
                request.headers["X-API-Key"] = KEY
            else:
                adapter = HTTPAdapter()  # Wrong keys are counted by address.
                adapter.init_poolmanager(1, 1, source_address=(unused_address(), 0))
            response = send(adapter, request, **more)
            self.answers[f"{request.method} {url.path} {response.status_code}"] += 1
            return response

        HTTPAdapter.send = gated  # type: ignore[method-assign,assignment]
        atexit.register(lambda: Path("answers.json").write_text(json.dumps(self.answers)))


def accepted(parse: Callable[[str, str], Any], value: Any) -> bool:
    try:
        return isinstance(value, str) and parse(value, "") is not None
    except InvalidInput:
        return False


if __name__ == "__main__":
    from schemathesis.cli import schemathesis

    Gate(os.environ["RECEIVER"]).install()
    schemathesis()
