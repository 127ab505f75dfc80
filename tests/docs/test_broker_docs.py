"""The examples and statements of docs/broker.md are true; its orchestrator runs against a real server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from duetime.brokers.nats import DEDUPE_SECONDS, EVENTS_KEPT_SECONDS, Names
from duetime.settings import SETTINGS
from tests.docs import pasting
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
    """A client, once the service has created the streams."""
    with Broker(server.url) as broker:
        until("the streams exist", lambda: "created the stream TIMER_DLQ" in service.stderr)
        yield broker


@pytest.fixture
def orchestrator(server: Nats, service: Duetime) -> Iterator[Path]:
    """Runs the example, with another port only; returns the file that it prints to."""
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    printed = service.directory / "printed"
    with open(printed, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", example.replace("nats://localhost:4222", server.url)],
            cwd=service.directory,
            stdout=output,
            stderr=output,
        )
    yield printed
    process.kill()
    process.wait()


def wait_for_line(printed: Path, line: str, times: int = 1) -> None:
    """Wait until the file contains the line this many times."""

    def found() -> bool:
        assert "Traceback" not in printed.read_text(), printed.read_text()
        return printed.read_text().splitlines().count(line) == times

    until(line, found)


def test_orchestrator_works_and_ignores_duplicates(broker: Broker, service: Duetime, orchestrator: Path) -> None:
    for line in ("order-17 placed", "order-17 was placed already", "order-18 placed"):
        wait_for_line(orchestrator, line)
    wait_for_line(orchestrator, "order-17 expired")
    wait_for_line(orchestrator, "order-18 needs nothing")
    first, second = broker.messages("TIMER_EVENTS")
    # JetStream drops the same event with its id; the orchestrator ignores it without the id.
    broker.publish(EVENTS, first.data, **{"Nats-Msg-Id": first.headers["Nats-Msg-Id"]})
    assert len(broker.messages("TIMER_EVENTS")) == 2
    broker.publish(EVENTS, first.data)
    wait_for_line(orchestrator, "order-17 needs nothing")
    wait_for_line(orchestrator, "order-17 expired")
    assert json.loads(second.data)["correlationId"] == "order-18"


def test_commands_on_the_page_work_when_pasted(broker: Broker, service: Duetime, orchestrator: Path) -> None:
    wait_for_line(orchestrator, "order-17 expired")
    until(
        "the completion is recorded", lambda: service.total("executing") == 0 and "expired" in orchestrator.read_text()
    )
    (service.directory / "duetime.key").write_text(KEY)
    examples = pasting.blocks("docs/broker.md")
    assert len(examples) == 2
    url = f"http://localhost:{service.port}"
    answers = []
    for example in examples:
        ran = pasting.paste(example.replace("http://localhost:3000", url), service.directory, TIMER_URL=url)
        assert ran.returncode == 0 and not ran.stderr, ran.stderr
        answers.append(ran.stdout)
    listed, latency = answers
    assert "shop/order-17-payment" in listed.replace("shop  ", "shop/") and '"id":"order-17-payment"' in listed
    assert re.fullmatch(r"shop order-17-payment reached after 0:00:\S+ and late by 0:00:\S+\n", latency), latency


def test_example_command_works_and_example_event_has_the_right_fields(broker: Broker, service: Duetime) -> None:
    command, event = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
    command["payload"]["dueAt"] = "2020-01-01T00:00:00Z"
    broker.publish("timer.commands.schedule.shop", json.dumps(command).encode())
    [message] = until("the event is published", lambda: broker.messages("TIMER_EVENTS"))
    real = json.loads(message.data)
    assert list(real) == list(event) and list(real["payload"]) == list(event["payload"])
    assert [real[name] for name in ("type", "tenantId", "correlationId")] == ["DueTimeReached", "shop", "order-17"]
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", event["id"])


def test_names_settings_and_times_agree_with_the_code() -> None:
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
