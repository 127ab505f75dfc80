"""The guide to receivers: its receivers for the standard library, Express and Go work with a real service and reject
forged callbacks, response bodies have the documented effects, and the other examples are valid programs.

Express itself is replaced by ``express.js`` beside this file, so that the test needs no package index.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path

import pytest
from standardwebhooks import Webhook

from duetime.client import Client
from duetime.deliverers.client import IDLE_SECONDS_MAX
from duetime.deliverers.connection import BODY_BYTES_MAX
from duetime.engine import destinations
from duetime.settings import Settings
from tests.docs import pasting
from tests.servers import Duetime, Receiver, Reply, until
from tests.skips import skip

PAGE = "docs/receivers.md"
TEXT = (pasting.ROOT / PAGE).read_text()
SHARED, *_, STANDARD = pasting.blocks(PAGE, "python")
[EXPRESS], [GO] = pasting.blocks(PAGE, "js"), pasting.blocks(PAGE, "go")
SECRET_COMMAND, TRY_COMMAND, CLOCK_COMMAND = pasting.blocks(PAGE)
WORK = "reminder for order 17"


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Duetime]:
    with Duetime(tmp_path, bare=True) as service:
        yield service


@pytest.fixture
def client(service: Duetime) -> Iterator[Client]:
    with Client(f"http://localhost:{service.port}", key=service.key) as client:
        yield client


def standard(directory: Path, port: int) -> list[str]:
    """Write the receiver to the directory; returns the command that runs it."""
    (directory / "receiving.py").write_text(SHARED)
    return [sys.executable, "-c", STANDARD.replace("8080", str(port))]


def express(directory: Path, port: int) -> list[str]:
    package = directory / "node_modules/express"
    package.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("express.js"), package / "index.js")
    (directory / "receiver.js").write_text(EXPRESS.replace("8080", str(port)))
    return [_program("node"), "receiver.js"]


def go(directory: Path, port: int) -> list[str]:
    (directory / "main.go").write_text(GO.replace("8080", str(port)))
    build = [_program("go"), "build", "-o", "receiver", "main.go"]
    built = subprocess.run(build, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    return [str(directory / "receiver")]


def _program(name: str) -> str:
    return shutil.which(name) or skip(f"{name} is not installed")


def check(service: Duetime, command: Sequence[str], port: int) -> None:
    """Run a receiver, in the service's directory, and call it: for a timer, twice for one delivery, and forged."""
    url = f"http://localhost:{service.port}"
    secret = pasting.paste(f"{SECRET_COMMAND}\nprintf %s $DUETIME_SECRET", service.directory, TIMER_URL=url).stdout
    printed = service.directory / "printed"
    with open(printed, "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=service.directory,
            env=os.environ | {"DUETIME_SECRET": secret},
            stdout=output,
            stderr=output,
        )
    try:
        until("the receiver listens", lambda: _responds(port))
        example = TRY_COMMAND.replace("8080", str(port))
        tried = pasting.paste(example, service.directory, TIMER_URL=url)
        assert tried.returncode == 0 and "completed" in tried.stdout, tried.stdout + tried.stderr + printed.read_text()
        assert printed.read_text().count(WORK) == 1
        body = b'{"id": "a", "namespace": "default", "payload": {"order": 17}}'
        headers = _signed(secret, body, time.time())
        assert [_post(port, body, headers) for _ in range(2)] == [204, 204]
        until("the work was done once more", lambda: printed.read_text().count(WORK) == 2)
        now, other = time.time(), "whsec_" + base64.b64encode(b"another secret of 24 bytes").decode()
        for bad in ({}, _signed(secret, b"{}", now), _signed(secret, body, now - 400), _signed(other, body, now)):
            assert _post(port, body, bad) == 401
        assert _post(port, None, _signed(secret, body, now)) == 401
        assert printed.read_text().count(WORK) == 2
    finally:
        process.kill()
        process.wait()


def _responds(port: int) -> bool:
    try:
        return _post(port, b"", {}) == 401
    except OSError:
        return False


def _post(port: int, body: bytes | None, headers: dict[str, str]) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/hook", body, {"Content-Type": "application/json", **headers})
    try:
        return connection.getresponse().status
    finally:
        connection.close()


def _signed(secret: str, body: bytes, at: float) -> dict[str, str]:
    signature = Webhook(secret).sign("one", datetime.fromtimestamp(int(at), UTC), body.decode())
    return {"webhook-id": "one", "webhook-timestamp": str(int(at)), "webhook-signature": f"v1,other {signature}"}


@pytest.mark.parametrize("prepare", [standard, express, go])
def test_receiver_works_and_rejects_forged_callbacks(
    prepare: Callable[[Path, int], list[str]], service: Duetime
) -> None:
    with pasting.held_port() as port:
        check(service, prepare(service.directory, port), port)


@pytest.mark.parametrize("prepare", [standard, express, go])
def test_receiver_does_not_start_without_a_secret(prepare: Callable[[Path, int], list[str]], tmp_path: Path) -> None:
    command = prepare(tmp_path, 0)
    env = {name: value for name, value in os.environ.items() if name != "DUETIME_SECRET"}
    for secret in ({}, {"DUETIME_SECRET": ""}):
        ran = subprocess.run(command, cwd=tmp_path, env=env | secret, capture_output=True, text=True, timeout=60)
        assert ran.returncode != 0 and "set DUETIME_SECRET to the secret" in ran.stderr, ran.stdout + ran.stderr


def test_example_moves_the_virtual_clock(tmp_path: Path) -> None:
    assert "`DATABASE_URL=memory: duetime serve --virtual-clock`" in TEXT
    with Duetime(tmp_path, bare=True, virtual_clock=True, DATABASE_URL="memory:") as service:
        ran = pasting.paste(CLOCK_COMMAND.replace("localhost:3000", f"localhost:{service.port}"), tmp_path)
        assert not list(tmp_path.glob("*.db"))
    assert ran.returncode == 0 and "now" in ran.stdout, ran.stdout + ran.stderr


def test_responses_have_the_documented_effects(service: Duetime, client: Client) -> None:
    reschedule, stop = (block.strip() for block in pasting.blocks(PAGE, "json"))
    effects = [
        (Reply(204, b""), "completed"),
        (Reply(200, b""), "completed"),
        (Reply(200, b'{"ok": true}'), "completed"),
        (Reply(200, reschedule.encode()), "rescheduled"),
        (Reply(200, b'{"ok": false}'), "retried"),
        (Reply(200, stop.encode()), "failed"),
        (Reply(410, b""), "failed"),
        (Reply(200, b"null"), "retried"),  # FastAPI, for a function that returns nothing
        (Reply(200, b"OK"), "retried"),  # Express, for sendStatus(200)
        (Reply(302, b"", {"Location": "/elsewhere"}), "retried"),
        (Reply(404, b"{}"), "retried"),
        (Reply(503, b"", {"Retry-After": "60"}), "retried"),
        (Reply(close=True), "retried"),
    ]
    with Receiver() as receiver:
        for n, (reply, _) in enumerate(effects):
            url = receiver.reply(f"/{n}", reply)
            client.create(
                id=str(n), delay="0s", callback_url=url, payload=1, retry_policy={"jitter": False, "give_up_on": [410]}
            )
        url = receiver.reply("/status", Reply(200, b"OK"))
        client.create(id="status", delay="0s", callback_url=url, response_protocol="status")

        def effect_on(id: str) -> str | None:
            timer = client.get(id)
            if timer.status not in ("pending", "executing"):
                return timer.status
            return "rescheduled" if timer.execute_at.year == 2030 else "retried" if timer.last_error else None

        until("all responses are recorded", lambda: all(effect_on(str(n)) for n in range(len(effects))))
        assert [(reply, effect_on(str(n))) for n, (reply, _) in enumerate(effects)] == effects
        until("any 2xx completes it", lambda: effect_on("status") == "completed")


def test_limits_agree_with_the_code() -> None:
    text = " ".join(TEXT.split())
    assert f"up to {destinations.FIRST_WINDOW} requests at a time" in text
    assert f"up to {Settings().max_per_destination} (`DUETIME_MAX_PER_DESTINATION`)" in text
    assert f"After {destinations.BREAK_AFTER} timeouts or failed connections in a row" in text
    assert f"for {destinations.BREAK_MS // 1000} seconds or more" in text and destinations.BREAK_MS_MAX == 60_000
    assert f"open for {IDLE_SECONDS_MAX:g} seconds" in text and f"first {BODY_BYTES_MAX // 1024} KiB" in text


@pytest.mark.parametrize("language", ["python", "js", "go"])
def test_other_examples_are_valid_programs(language: str, tmp_path: Path) -> None:
    checker = {"python": [sys.executable, "-m", "py_compile"], "js": ["node", "--check"], "go": ["gofmt", "-e", "-l"]}
    command = checker[language]
    if shutil.which(command[0]) is None:
        skip(f"{command[0]} is not installed")
    for n, example in enumerate(pasting.blocks(PAGE, language)):
        file = tmp_path / f"example{n}.{language}"
        file.write_text(example)
        ran = subprocess.run([*command, file], capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0 and not ran.stdout, ran.stdout + ran.stderr
