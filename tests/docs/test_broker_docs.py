"""The page about the broker is true: its orchestrator works against a real server, and its questions get answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from duetime.brokers.nats import DEDUPE_SECONDS, EVENTS_KEPT_SECONDS, Names
from duetime.settings import SETTINGS
from tests.nats import Broker, Nats
from tests.servers import KEY, Duetime, until

PAGE = (Path(__file__).parents[2] / "docs/broker.md").read_text()
EVENTS = "timer.events.due.shop"


@pytest.fixture
def server() -> Iterator[Nats]:
    with Nats() as server:
        yield server


@pytest.fixture
def service(server: Nats, tmp_path: Path) -> Iterator[Duetime]:
    with Duetime(tmp_path, TIMER_BROKER_URL=server.url) as service:
        yield service


@pytest.fixture
def broker(server: Nats, service: Duetime) -> Iterator[Broker]:
    """A client that finds the streams there: a reader pastes the example when the service is up."""
    with Broker(server.url) as broker:
        until("the streams are there", lambda: "made the stream TIMER_DLQ" in service.stderr)
        yield broker


@pytest.fixture
def orchestrator(server: Nats, service: Duetime) -> Iterator[Path]:
    """The example, running as it was pasted but for the port; the file that it prints to."""
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    said = service.directory / "said"
    with open(said, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", example.replace("nats://localhost:4222", server.url)],
            cwd=service.directory,
            stdout=output,
            stderr=output,
        )
    yield said
    process.kill()
    process.wait()


def says(said: Path, line: str, times: int = 1) -> None:
    def found() -> bool:
        assert "Traceback" not in said.read_text(), said.read_text()
        return said.read_text().splitlines().count(line) == times

    until(line, found)


def test_the_orchestrator_works_and_drops_duplicates(broker: Broker, service: Duetime, orchestrator: Path) -> None:
    for line in ("order-17 placed", "order-17 was placed already", "order-18 placed"):
        says(orchestrator, line)
    says(orchestrator, "order-17 expired")
    says(orchestrator, "order-18 needs nothing")
    first, second = broker.messages("TIMER_EVENTS")
    # The same event with its id is dropped by JetStream; without, it is dropped by the state of the orchestrator.
    broker.publish(EVENTS, first.data, **{"Nats-Msg-Id": first.headers["Nats-Msg-Id"]})
    assert len(broker.messages("TIMER_EVENTS")) == 2
    broker.publish(EVENTS, first.data)
    says(orchestrator, "order-17 needs nothing")
    says(orchestrator, "order-17 expired")
    assert json.loads(second.data)["correlationId"] == "order-18"


def test_the_questions_get_answers(broker: Broker, service: Duetime, orchestrator: Path) -> None:
    says(orchestrator, "order-17 expired")
    until("it is recorded", lambda: service.total("executing") == 0 and "expired" in orchestrator.read_text())
    (service.directory / "duetime.key").write_text(KEY)
    examples = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    assert len(examples) == 2
    env = os.environ | {"TIMER_URL": f"http://localhost:{service.port}"}
    env["PATH"] = f"{_command(service.directory)}{os.pathsep}{env['PATH']}"
    answers = []
    for example in examples:
        text = example.replace("localhost:3000", f"localhost:{service.port}")
        ran = subprocess.run(
            ["bash", "-c", text],
            cwd=service.directory,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == 0 and not ran.stderr, ran.stderr
        answers.append(ran.stdout)
    listed, latency = answers
    assert "shop/order-17-payment" in listed.replace("shop  ", "shop/") and '"id":"order-17-payment"' in listed
    assert re.fullmatch(r"shop order-17-payment reached after 0:00:\S+ and late by 0:00:\S+\n", latency), latency


def _command(directory: Path) -> Path:
    """A directory with a ``duetime`` that is the one under test."""
    place = directory / "bin"
    place.mkdir()
    (place / "duetime").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m duetime "$@"\n')
    (place / "duetime").chmod(0o755)
    (place / "python3").symlink_to(sys.executable)
    return place


def test_the_examples_of_a_command_and_an_event_have_the_right_shape(broker: Broker, service: Duetime) -> None:
    command, event = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
    command["payload"]["dueAt"] = "2020-01-01T00:00:00Z"
    broker.publish("timer.commands.schedule.shop", json.dumps(command).encode())
    [message] = until("the event is there", lambda: broker.messages("TIMER_EVENTS"))
    real = json.loads(message.data)
    assert list(real) == list(event) and list(real["payload"]) == list(event["payload"])
    assert [real[name] for name in ("type", "tenantId", "correlationId")] == ["DueTimeReached", "shop", "order-17"]
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", event["id"])


def test_names_settings_and_times_are_those_of_the_code() -> None:
    names = Names()
    for name in (names.commands, names.events):
        assert f"`{name}.<tenantId>`" in PAGE
    for name in (names.dead_letters, names.commands_stream, names.events_stream, names.dead_letters_stream):
        assert f"`{name}`" in PAGE
    for setting in SETTINGS:
        if "BROKER" in setting.name:
            assert f"`{setting.name}`" in PAGE
    assert DEDUPE_SECONDS == 5 * 60 and "5 minutes" in PAGE
    assert EVENTS_KEPT_SECONDS == 30 * 86_400 and "| 30 days |" in PAGE
