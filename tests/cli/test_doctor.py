"""``duetime doctor``: its checks and its advice."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from duetime.version import __version__
from tests.nats import Broker, Nats
from tests.ports import free_port
from tests.postgres import Postgres
from tests.servers import KEY, Duetime, Receiver, Reply, until


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


def test_fresh_machine_passes_and_stays_unchanged(tmp_path: Path) -> None:
    run = doctor(tmp_path)
    assert run.returncode == 0 and "FAIL" not in run.stdout and "`duetime serve` starts it" in run.stdout, run.stdout
    assert list(tmp_path.iterdir()) == []


def test_doctor_passes_for_a_running_server(tmp_path: Path) -> None:
    with Duetime(tmp_path) as service:
        assert service.process is not None
        run = doctor(tmp_path, PORT=str(service.port))
        assert run.returncode == 0, run.stdout
        assert f"in use by process {service.process.pid}" in run.stdout
        assert f"http://localhost:{service.port} is up" in run.stdout
        assert "no timer is overdue" in run.stdout


def test_named_server_is_checked_for_key_version_and_clock(tmp_path: Path) -> None:
    with Duetime(tmp_path / "server") as service:
        url = f"http://127.0.0.1:{service.port}"
        run = doctor(tmp_path, "--server", url, "--key", KEY)
        assert run.returncode == 0, run.stdout
        for line in (
            f"ok    key       {url} accepts it",
            f"ok    version   the service runs {__version__}\n",
            "ok    clock     this machine and the service agree",
            f"ok    service   {url} is up",
        ):
            assert line in run.stdout
        # Nothing about a service in this directory, not even a wrong setting.
        checks = [line.split()[1] for line in run.stdout.splitlines()]
        assert checks == ["key", "version", "clock", "service", "overdue", "rows"]
        run = doctor(tmp_path, "--server", url, "--key", KEY, "--json", DUETIME_LEASE_TTL="soon")
        assert run.returncode == 0 and [each["check"] for each in json.loads(run.stdout)["findings"]] == checks
        wrong = doctor(tmp_path, TIMER_URL=url, API_KEY="wrong" * 8)
        assert wrong.returncode == 1 and f"FAIL  key       {url} rejects it: give --key" in wrong.stdout
    gone = doctor(tmp_path, "--server", url)
    assert gone.returncode == 1 and re.search(rf"FAIL  service   no .* {url}: connection refused", gone.stdout), gone


def test_clock_that_differs_from_the_named_server_fails(tmp_path: Path) -> None:
    with Duetime(tmp_path / "server", virtual_clock=True) as service:
        service.advance("1h")
        run = doctor(tmp_path, "--server", f"http://127.0.0.1:{service.port}", "--key", KEY)
    assert run.returncode == 1 and re.search(r"FAIL  clock     this machine is \d+ ms behind the service", run.stdout)


def overdue(service: Duetime, url: str, count: int, expected: dict[str, int]) -> None:
    """Create timers that are due now, and wait until the server reports them as overdue."""
    timer = {"delay": "0s", "callbackUrl": url, "callbackTimeout": "1h"}
    assert service.request("POST", "/api/v1/timers/batch", json={"timers": [timer] * count}).status == 200

    def reported() -> bool:
        service.advance("2s")
        return bool(service.request("GET", "/readyz").body.get("overdue") == expected)

    until(f"overdue are {expected}", reported)


def test_timers_of_paused_namespaces_are_ok(tmp_path: Path) -> None:
    with Duetime(tmp_path, virtual_clock=True) as service:
        service.request("PATCH", "/api/v1/namespaces/default", json={"paused": True})
        overdue(service, "http://127.0.0.1:9/", 40, {"paused": 40})
        run = doctor(tmp_path, PORT=str(service.port))
        assert run.returncode == 0, run.stdout
        assert "ok    overdue   40 timers wait in paused namespaces: `duetime namespaces resume NAME`" in run.stdout


def test_timers_that_wait_for_a_slow_destination_are_ok(tmp_path: Path) -> None:
    with (
        Receiver() as receiver,
        Duetime(tmp_path, virtual_clock=True, DUETIME_MAX_PER_DESTINATION="5") as service,
    ):
        overdue(service, receiver.reply("/silent", Reply(hang=True)), 60, {"destination": 55})
        run = doctor(tmp_path, PORT=str(service.port))
        assert run.returncode == 0 and run.stdout.count("overdue") == 1, run.stdout
        assert "ok    overdue   55 timers wait for destinations that are full, slow or do not respond" in run.stdout


def test_overdue_reasons_that_operators_must_fix_fail(tmp_path: Path) -> None:
    """Uses a fake server, because these faults are hard to cause on a real one."""
    reasons = {"no_owner": 3, "behind": 12, "store": 1, "unheard_of": 1}
    body = json.dumps({"status": "not ready", "reason": "it is starting or stopping", "overdue": reasons})
    health = {"data": {"status": "up", "database": "up", "timestamp": "2030-01-01T00:00:00.000Z"}}
    with Receiver() as service:
        service.reply("/health", Reply(body=json.dumps(health).encode()))
        service.reply("/readyz", Reply(503, body=body.encode()))
        run = doctor(tmp_path, PORT=str(service.port))
    assert run.returncode == 1, run.stdout
    assert "FAIL  service   " in run.stdout and "is not ready: it is starting or stopping" in run.stdout
    for says in (
        "3 timers wait in shards without",
        "12 timers wait because the instances",
        "1 timer waits because the store",
    ):
        assert f"FAIL  overdue   {says}" in run.stdout


def test_another_server_at_the_port_fails(tmp_path: Path) -> None:
    with Receiver() as stranger:
        run = doctor(tmp_path, PORT=str(stranger.port))
    assert run.returncode == 1 and "responds, but not like Duetime" in run.stdout, run.stdout


def test_silent_server_at_the_port_fails(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        run = doctor(tmp_path, PORT=str(port))
    assert run.returncode == 1 and f"no response from http://localhost:{port}: timed out" in run.stdout, run.stdout


def test_bad_setting_is_the_only_finding(tmp_path: Path) -> None:
    run = doctor(tmp_path, "--json", DUETIME_LEASE_TTL="soon")
    assert run.returncode == 1
    report = json.loads(run.stdout)
    assert report["ok"] is False and [finding["check"] for finding in report["findings"]] == ["settings"]
    assert "DUETIME_LEASE_TTL=soon: must be a duration" in report["findings"][0]["message"]


def test_unreachable_servers_are_shown_without_passwords(tmp_path: Path) -> None:
    port = free_port()
    url = f"//me:hunter2@127.0.0.1:{port}"
    run = doctor(tmp_path, DATABASE_URL=f"postgresql:{url}/x", TIMER_BROKER_URL=f"nats:{url}")
    assert run.returncode == 1 and run.stdout.count("FAIL") == 2, run.stdout
    assert f"PostgreSQL at 127.0.0.1:{port}/x: can't connect" in run.stdout and "; check DATABASE_URL" in run.stdout
    assert f"can't connect to NATS at 127.0.0.1:{port}: " in run.stdout and "; check TIMER_BROKER_URL" in run.stdout
    assert "hunter2" not in run.stdout + run.stderr


def test_read_only_directory_fails(tmp_path: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    assert "can't be written to" in doctor(tmp_path).stdout


def test_working_database_and_broker_pass(tmp_path: Path, postgres15: Postgres) -> None:
    with Nats() as server:
        run = doctor(tmp_path, DATABASE_URL=postgres15.url(), TIMER_BROKER_URL=server.url)
        assert run.returncode == 0, run.stdout
        assert "version 15" in run.stdout and "agrees with the database's" in run.stdout
        assert "its streams have the right configuration" in run.stdout


def test_stream_that_drops_messages_fails(tmp_path: Path) -> None:
    with Nats() as server, Broker(server.url) as broker:
        broker.make_stream(name="TIMER_EVENTS", subjects=["timer.events.due.*"], max_msgs=10, storage="memory")
        run = doctor(tmp_path, TIMER_BROKER_URL=server.url)
        assert run.returncode == 1 and run.stdout.count("FAIL") == 2, run.stdout
        assert "is stored in memory" in run.stdout and "drops its oldest messages silently" in run.stdout


def test_consumer_of_another_program_fails(tmp_path: Path) -> None:
    subjects = ["timer.commands.schedule.*"]
    with Nats() as server, Broker(server.url) as broker:
        broker.make_stream(name="TIMER_COMMANDS", subjects=subjects, retention="workqueue", duplicate_window=300)
        broker.make_consumer("TIMER_COMMANDS", durable_name="other", ack_policy="explicit")
        run = doctor(tmp_path, TIMER_BROKER_URL=server.url)
    assert run.returncode == 1 and "the consumer other of the stream TIMER_COMMANDS receives" in run.stdout, run.stdout


def test_public_file_and_hard_links_fail(tmp_path: Path) -> None:
    (tmp_path / "duetime.db").touch(0o600)
    assert doctor(tmp_path).returncode == 0
    (tmp_path / "duetime.db").chmod(0o644)
    run = doctor(tmp_path)
    assert run.returncode == 1 and "FAIL  store     every user of this machine may open" in run.stdout, run.stdout
    os.link(tmp_path / "duetime.db", tmp_path / "other.db")
    assert "has 2 names (hard links)" in doctor(tmp_path).stdout
