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
from tests.servers import Duetime, Receiver, Reply, until


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
        assert "no timer is overdue" in run.stdout


def overdue(service: Duetime, url: str, count: int, expected: dict[str, int]) -> None:
    """Make timers that are due now, and wait until the service says which of them are overdue."""
    asked = {"delay": "0s", "callbackUrl": url, "callbackTimeout": "1h"}
    assert service.request("POST", "/api/v1/timers/batch", json={"timers": [asked] * count}).status == 200

    def seen() -> bool:
        service.advance("2s")
        return service.request("GET", "/readyz").body.get("overdue") == expected

    until(f"overdue are {expected}", seen)


def test_timers_that_a_pause_holds_are_no_fault(tmp_path: Path) -> None:
    with Duetime(tmp_path, virtual_clock=True) as service:
        service.request("PATCH", "/api/v1/namespaces/default", json={"paused": True})
        overdue(service, "http://127.0.0.1:9/", 40, {"paused": 40})
        run = doctor(tmp_path, PORT=str(service.port))
        assert run.returncode == 0, run.stdout
        assert "ok    overdue   40 wait in paused namespaces: `duetime namespaces resume NAME`" in run.stdout


def test_timers_that_wait_for_a_silent_destination_are_no_fault_of_ours(tmp_path: Path) -> None:
    limit = {"DUETIME_MAX_PER_DESTINATION": "5"}
    with Receiver() as receiver, Duetime(tmp_path, virtual_clock=True, **limit) as service:
        overdue(service, receiver.reply("/silent", Reply(hang=True)), 60, {"destination": 55})
        run = doctor(tmp_path, PORT=str(service.port))
        assert run.returncode == 0 and run.stdout.count("overdue") == 1, run.stdout
        assert "ok    overdue   55 wait for destinations that are full, slow or do not answer" in run.stdout


def test_what_operators_have_to_mend_is_a_failure(tmp_path: Path) -> None:
    """Of a service that says so: one with these faults is hard to make."""
    said = {"no_owner": 3, "behind": 12, "store": 5, "unheard_of": 1}
    body = json.dumps({"status": "not ready", "reason": "no instance owns their shards", "overdue": said})
    health = {"data": {"status": "up", "database": "up", "timestamp": "2030-01-01T00:00:00.000Z"}}
    with Receiver() as service:
        service.reply("/health", Reply(body=json.dumps(health).encode()))
        service.reply("/readyz", Reply(503, body=body.encode()))
        run = doctor(tmp_path, PORT=str(service.port))
    assert run.returncode == 1, run.stdout
    assert "FAIL  service   " in run.stdout and "is not ready: no instance owns their shards" in run.stdout
    for says in ("3 are in shards that no instance owns", "12 wait because this instance", "5 wait because the store"):
        assert f"FAIL  overdue   {says}" in run.stdout


def test_something_else_at_the_port_is_a_failure(tmp_path: Path) -> None:
    with Receiver() as stranger:
        run = doctor(tmp_path, PORT=str(stranger.port))
    assert run.returncode == 1 and "answers, but not as it should" in run.stdout, run.stdout


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


def test_a_file_that_all_may_read_and_one_with_two_names_are_failures(tmp_path: Path) -> None:
    (tmp_path / "duetime.db").touch(0o600)
    assert doctor(tmp_path).returncode == 0
    (tmp_path / "duetime.db").chmod(0o644)
    run = doctor(tmp_path)
    assert run.returncode == 1 and "FAIL  store     every user of this machine may open" in run.stdout, run.stdout
    os.link(tmp_path / "duetime.db", tmp_path / "other.db")
    assert "has 2 names (hard links)" in doctor(tmp_path).stdout
