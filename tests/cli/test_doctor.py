"""``duetime doctor``: what it looks at, and what it says about what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nats import Broker, Nats
from tests.ports import free_port
from tests.postgres import Postgres
from tests.servers import Duetime


def doctor(directory: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-m", "duetime", "doctor", *arguments],
        cwd=directory,
        env=inherited | {"PORT": str(free_port())} | env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_on_a_fresh_machine_all_is_well_and_nothing_is_made(tmp_path: Path) -> None:
    run = doctor(tmp_path)
    assert run.returncode == 0 and "FAIL" not in run.stdout and "`duetime serve` starts it" in run.stdout, run.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_running_service_is_seen(tmp_path: Path) -> None:
    with Duetime(tmp_path) as service:
        assert service.process is not None
        run = doctor(tmp_path, PORT=str(service.port))
        assert run.returncode == 0, run.stdout
        assert f"in use by process {service.process.pid}" in run.stdout
        assert f"http://localhost:{service.port} is up" in run.stdout


def test_a_bad_setting_is_the_one_finding(tmp_path: Path) -> None:
    run = doctor(tmp_path, "--json", DUETIME_LEASE_TTL="soon")
    assert run.returncode == 1
    report = json.loads(run.stdout)
    assert report["ok"] is False and [finding["about"] for finding in report["findings"]] == ["settings"]
    assert "DUETIME_LEASE_TTL=soon: must be a duration" in report["findings"][0]["says"]


def test_servers_that_do_not_answer_are_named_without_their_passwords(tmp_path: Path) -> None:
    url = f"//me:hunter2@127.0.0.1:{free_port()}"
    run = doctor(tmp_path, DATABASE_URL=f"postgresql:{url}/x", TIMER_BROKER_URL=f"nats:{url}")
    assert run.returncode == 1 and run.stdout.count("FAIL") == 2, run.stdout
    assert "is DATABASE_URL right" in run.stdout and "is TIMER_BROKER_URL right" in run.stdout
    assert "hunter2" not in run.stdout + run.stderr


def test_a_store_that_can_not_be_written(tmp_path: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    assert "can't be written to" in doctor(tmp_path).stdout


def test_a_server_store_and_a_broker_that_are_as_they_should_be(tmp_path: Path, postgres15: Postgres) -> None:
    with Nats() as server:
        run = doctor(tmp_path, DATABASE_URL=postgres15.url(), TIMER_BROKER_URL=server.url)
        assert run.returncode == 0, run.stdout
        assert "version 15" in run.stdout and "agrees with the database's" in run.stdout
        assert "its streams are as they should be" in run.stdout


def test_a_stream_that_drops_silently(tmp_path: Path) -> None:
    with Nats() as server, Broker(server.url) as broker:
        broker.make_stream(name="TIMER_EVENTS", subjects=["timer.events.due.*"], max_msgs=10, storage="memory")
        run = doctor(tmp_path, TIMER_BROKER_URL=server.url)
        assert run.returncode == 1 and run.stdout.count("FAIL") == 2, run.stdout
        assert "is kept in memory" in run.stdout and "drops its oldest messages silently" in run.stdout
