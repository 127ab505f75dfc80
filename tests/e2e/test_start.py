"""Startup: invalid settings, files and ports in use, created files and log messages."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from duetime.settings import SETTINGS
from tests.mysql import MysqlServer
from tests.servers import KEY, Duetime, NotStarted, Receiver, instant, until, unused_port
from tests.skips import skip


def refusal(directory: Path, **env: Any) -> str:
    """The one-line error with which a start fails."""
    with Duetime(directory, bare=True, start=False, **env) as service:
        service.spawn()
        assert service.wait() == 2, service.stderr
        [line] = service.stderr.splitlines()
    assert line.startswith("duetime: ")
    return line


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"API_KEY": "short"}, "API_KEY: must be 32"),
        ({"PORT": "70000"}, "PORT=70000: must be a whole number"),
        ({"PORT": "http"}, "PORT=http: must be a whole number"),
        ({"HOST": "999.1.1.1"}, "HOST=999.1.1.1: must be an IP address"),
        ({"DATABASE_URL": "sqlite://x"}, "DATABASE_URL: must be sqlite:///path"),
        ({"DATABASE_URL": "mongodb://u:hunter2@h/d"}, "DATABASE_URL: mongodb is not supported yet"),
        ({"LOG_LEVEL": "loud"}, "LOG_LEVEL=loud: must be trace"),
        ({"DUETIME_LEASE_TTL": "10"}, "DUETIME_LEASE_TTL=10: must be a duration"),
        ({"DUETIME_SHARDZ": "1"}, "did you mean DUETIME_SHARDS"),
        ({"DUETIME_WORKERS": "2"}, "DUETIME_WORKERS=2: must be 1"),
        ({"DUETIME_ALLOW_PRIVATE_TARGETS": "10.0.0.1/8"}, "DUETIME_ALLOW_PRIVATE_TARGETS=10.0.0.1/8: must be on, off"),
        ({"DUETIME_AUTH": "none", "HOST": "0.0.0.0"}, "DUETIME_AUTH=none: needs a loopback HOST"),
        ({"DUETIME_AUTH": "none", "API_KEY": KEY}, "DUETIME_AUTH=none: needs a loopback HOST"),
        ({"DUETIME_AUTH": "maybe"}, "DUETIME_AUTH=maybe: must be key"),
    ],
    ids=lambda value: next(iter(value.values()))[:20] if isinstance(value, dict) else "",
)
def test_an_invalid_setting_prevents_the_start(tmp_path: Path, env: dict[str, str], says: str) -> None:
    line = refusal(tmp_path, **env)
    assert says in line and "hunter2" not in line and "short" not in line
    assert not list(tmp_path.glob("duetime*"))  # no file was created


def test_invalid_files_prevent_the_start(tmp_path: Path) -> None:
    for name, content, says in (
        (".env", "PORT\n", ".env line 1: must be KEY=value"),
        ("duetime.toml", "prot = 1\n", "in duetime.toml is not a setting; did you mean PORT?"),
        ("duetime.toml", "port = \n", "duetime.toml: "),
        ("duetime.key", "too short\n", "duetime.key does not contain a key"),
        ("duetime.db", "not a database " * 100, "DATABASE_URL: "),
    ):
        directory = tmp_path / name / str(len(content))
        directory.mkdir(parents=True)
        (directory / name).write_text(content)
        assert says in refusal(directory)


def test_directory_that_is_not_writable_prevents_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file/d.db" in refusal(tmp_path, API_KEY=KEY, DATABASE_URL="sqlite:///file/d.db")


def test_another_number_of_shards_prevents_the_start(tmp_path: Path) -> None:
    with Duetime(tmp_path) as service:
        assert service.terminate() == 0
    assert "created with 64" in refusal(tmp_path, API_KEY=KEY, DUETIME_SHARDS="32")


def test_a_second_process_on_one_file_is_rejected(tmp_path: Path) -> None:
    with Duetime(tmp_path) as first:
        id = first.create("http://127.0.0.1:9/", seconds=3600)
        assert first.process is not None
        line = refusal(tmp_path, API_KEY=KEY)
        assert f"is in use by another Duetime process (pid {first.process.pid})" in line
        assert first.get(id)["status"] == "pending"  # and the first one keeps working
        first.kill()
        first.start()  # a killed process leaves no lock behind
        assert first.get(id)["status"] == "pending"


def test_database_user_without_privileges_prevents_the_start(tmp_path: Path, mariadb: MysqlServer) -> None:
    url = mariadb.fresh()
    name = url.rpartition("/")[2]
    mariadb.sql(f"CREATE USER {name}@localhost", f"GRANT SELECT ON {name}.* TO {name}@localhost")
    line = refusal(tmp_path, API_KEY=KEY, DATABASE_URL=url.replace("root@", f"{name}@"))
    assert "duetime: DATABASE_URL: MySQL: CREATE command denied" in line and "grant this user all privileges" in line
    mariadb.sql(f"DROP USER {name}@localhost")
    mariadb.give_back(url)


def test_unreadable_certificates_prevent_the_start(tmp_path: Path) -> None:
    line = refusal(tmp_path, API_KEY=KEY, DATABASE_URL="mysql://u:hunter2@h/d?ssl-ca=/nope")
    assert "DATABASE_URL: can't read the certificates in /nope: " in line and "hunter2" not in line


def test_port_in_use_prevents_the_start(tmp_path: Path) -> None:
    with Receiver() as other:
        line = refusal(tmp_path, HOST="127.0.0.1", PORT=str(other.port))
        assert f"PORT: can't listen on 127.0.0.1:{other.port}: " in line and "; set PORT to another value" in line


def test_host_of_another_machine_prevents_the_start(tmp_path: Path) -> None:
    line = refusal(tmp_path, HOST="192.0.2.1")
    assert "HOST: can't listen on 192.0.2.1:" in line and "set HOST to another value" in line


def test_a_developer_machine_needs_no_settings(tmp_path: Path) -> None:
    with Duetime(tmp_path, bare=True) as service:
        key_file = tmp_path / "duetime.key"
        key = key_file.read_text().strip()
        assert len(key) >= 32 and stat.S_IMODE(key_file.stat().st_mode) == 0o600
        assert (tmp_path / "duetime.db").exists()
        assert "duetime.key" in service.stderr and key not in service.stderr
        assert "loopback" in service.stderr
        assert service.request("GET", "/timers").status == 200
        assert service.request("GET", "/timers", headers={"X-API-Key": key[:-1]}).status == 401
        service.kill()
        service.start()
        assert service.key == key and service.request("GET", "/timers").status == 200


def test_the_key_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with Duetime(tmp_path, bare=True):
            assert stat.S_IMODE((tmp_path / "duetime.key").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def listens(address: str, port: int) -> bool:
    """Whether the address is in use, so that nothing else can listen there."""
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return True
    return False


def test_the_service_listens_on_loopback_unless_a_key_is_set(tmp_path: Path) -> None:
    with Duetime(tmp_path / "laptop", bare=True) as service:
        assert listens("127.0.0.1", service.port) and not listens("127.0.0.2", service.port)
    with Duetime(tmp_path / "server", bare=True, API_KEY=KEY) as service:
        assert listens("127.0.0.1", service.port) and listens("127.0.0.2", service.port)
        assert not (tmp_path / "server" / "duetime.key").exists() and KEY not in service.stderr


def test_service_on_all_addresses_does_not_call_its_own_machine(tmp_path: Path) -> None:
    timer = {"delay": "1h", "callbackUrl": "http://127.0.0.1:9/"}
    with Duetime(tmp_path, bare=True, HOST="0.0.0.0") as service:
        answer = service.request("POST", "/api/v1/timers", json=timer)
        assert answer.status == 400 and "a loopback address" in answer.body["message"]
        assert f"http://0.0.0.0:{service.port}" in service.stderr and "loopback" not in service.stderr


def test_service_listens_on_ipv6(tmp_path: Path) -> None:
    with Duetime(tmp_path, bare=True, start=False, HOST="::1") as service:
        service.spawn()
        try:
            service.wait_ready()
        except ConnectionRefusedError:  # ready, and not on 127.0.0.1, which is all that the client knows
            pass
        except NotStarted:
            skip("this machine has no IPv6")
        with socket.create_connection(("::1", service.port), timeout=30) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert f"http://[::1]:{service.port}" in service.stderr


def test_running_without_keys_logs_a_warning(tmp_path: Path) -> None:
    with Duetime(tmp_path, bare=True, DUETIME_AUTH="none") as service:
        assert service.request("GET", "/timers", headers={}).status == 200
        assert "DUETIME_AUTH=none" in service.stderr


def test_environment_file_overrides_the_toml_file(tmp_path: Path) -> None:
    (tmp_path / "duetime.toml").write_text(
        f'api_key = "{"t" * 40}"\nduetime_metrics_auth = "none"\nhost = "127.0.0.1"\n'
    )
    (tmp_path / ".env").write_text(f"API_KEY={KEY}\n")
    with Duetime(tmp_path, bare=True) as service:
        assert service.request("GET", "/timers", headers={"X-API-Key": KEY}).status == 200
        assert service.request("GET", "/timers", headers={"X-API-Key": "t" * 40}).status == 401
        assert service.request("GET", "/metrics", headers={}).status == 200


def test_memory_store_loses_timers_and_logs_it(tmp_path: Path) -> None:
    with Duetime(tmp_path, DATABASE_URL="memory:") as service:
        service.create("http://127.0.0.1:9/", seconds=3600)
        assert service.total() == 1 and "memory" in service.stderr
        assert service.terminate() == 0
        service.start()
        assert service.total() == 0


def test_virtual_clock_on_stored_timers_is_logged(tmp_path: Path) -> None:
    advice = "the virtual clock also fires the timers in"
    with Duetime(tmp_path, virtual_clock=True) as service:
        assert f"{advice} duetime.db; use DATABASE_URL=memory: for tests" in service.stderr
    with Duetime(tmp_path, virtual_clock=True, DATABASE_URL="memory:") as service:
        assert advice not in service.stderr


def test_a_signal_during_startup_stops_the_service(tmp_path: Path) -> None:
    """At any moment, the process stops and the next one can use the file."""
    with Duetime(tmp_path, start=False) as service:
        for _ in range(3):
            service.spawn()
            threading.Event().wait(0.3)
            service.signal(signal.SIGTERM)
            assert service.wait() in (0, -signal.SIGTERM)
        service.start()


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
def test_signal_stops_a_service_that_waits_for_its_database(tmp_path: Path, scheme: str) -> None:
    with unused_port() as port:
        url = f"{scheme}://u:hunter2@127.0.0.1:{port}/x"
        with Duetime(tmp_path, start=False, DATABASE_URL=url) as service:
            service.spawn()
            until("no message", lambda: "waiting for the database" in service.stderr)
            threading.Event().wait(1.2)  # several more tries, without another message
            service.signal(signal.SIGTERM)
            assert service.wait() == 0
            [waiting] = [line for line in service.stderr.splitlines() if "waiting for the database" in line]
            assert f" at 127.0.0.1:{port}: " in waiting and "hunter2" not in waiting
            assert service.stderr.splitlines()[-1].endswith("stopped")


def test_signal_stops_a_service_whose_database_does_not_respond(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://u:p@127.0.0.1:{silent.getsockname()[1]}/x"
        with Duetime(tmp_path, start=False, DATABASE_URL=url) as service:
            service.spawn()
            silent.settimeout(30)
            with silent.accept()[0]:
                service.signal(signal.SIGTERM)
                assert service.wait() == 0


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["serve", "--nonsense"]])
def test_invalid_command_line_shows_the_usage(tmp_path: Path, arguments: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "duetime", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2 and "usage: duetime" in ended.stderr and not ended.stdout


def test_help_lists_every_setting(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "duetime", "serve", "--help"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and all(setting.name in ended.stdout for setting in SETTINGS)


def test_timers_fire_on_time_by_the_machines_own_clock(tmp_path: Path) -> None:
    """The only test that waits in real time: each timer fires once, never early, and before a timeout."""
    with Receiver() as receiver, Duetime(tmp_path) as service:
        # The API's minimum is five seconds, and a slow machine may use up some.
        ids = [service.create(receiver.url("/real"), seconds=8 + n / 10, callback_payload=n) for n in range(5)]
        timers = [service.get(id) for id in ids]
        requests = sorted(receiver.wait("/real", 5), key=lambda request: int(request.body))
        assert [int(request.body) for request in requests] == [0, 1, 2, 3, 4]
        for timer, request in zip(timers, requests, strict=True):
            assert request.at_ns >= instant(timer["execute_at"]).timestamp() * 1e9 - 1000  # a float's last digits
            assert instant(service.finished(timer["id"])["executed_at"]) >= instant(timer["execute_at"])


@pytest.mark.parametrize("stop", ["kill", "terminate"])
def test_overdue_timers_fire_at_once_after_a_restart(tmp_path: Path, stop: str) -> None:
    """A file belongs to one process: the owner of the old leases is gone, so nothing has to wait for them."""
    with Receiver() as receiver, Duetime(tmp_path, virtual_clock=True, DUETIME_LEASE_TTL="5m") as service:
        for _ in range(20):  # enough for many shards
            service.create(receiver.url("/overdue"), seconds=60)
        getattr(service, stop)()
        service.start()
        service.advance("90s")
        until("all have fired", lambda: len(receiver.at("/overdue")) == 20)
