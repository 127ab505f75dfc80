"""A disk that fills up, and files that are removed: what clients of a real service see, and which data survives."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import Answer, Duetime, Receiver, until
from tests.skips import skip

DISK = "size=6m"


@contextlib.contextmanager
def small_disk(at: Path) -> Iterator[None]:
    at.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", str(at)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        skip("a full disk needs a small one, which only root may mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", at], check=True)


def fill(path: Path) -> None:
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def asked_for(service: Duetime, url: str, name: str) -> Answer:
    asked = {"execute_at": service.ahead(3600), "callback_url": url, "metadata": {"name": name}}
    return service.request("POST", "/timers", json=asked)


def test_a_full_disk_is_reported_and_recovered_from(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with (
        small_disk(disk),
        Receiver() as receiver,
        Duetime(tmp_path / "run", virtual_clock=True, DATABASE_URL=f"sqlite:///{disk}/d.db") as service,
    ):
        url = receiver.url("/due")
        made = [service.create(url, seconds=3600) for _ in range(20)]
        assert service.request("GET", "/health").status == 200

        fill(disk / "filler")
        for _ in range(500):
            answer = asked_for(service, url, "x" * 10_000)
            if answer.status != 201:
                break
            made.append(answer.body["data"]["id"])
        assert answer.status == 503 and answer.headers["retry-after"], answer
        health = service.request("GET", "/health", headers={})
        assert health.status == 500 and health.body["data"]["status"] == "degraded", health
        assert service.get(made[0])["status"] == "pending"  # Reads still work.
        assert service.request("GET", "/livez").status == 200

        (disk / "filler").unlink()
        until("it is healthy again", lambda: service.request("GET", "/health").status == 200)
        made.append(service.create(url, seconds=3600))
        service.fired(url)
        assert len(receiver.at("/due")) == 1
        service.kill()
        service.start()
        assert service.total("pending") == len(made)
        assert {service.get(id)["status"] for id in made} == {"pending"}


@pytest.mark.parametrize("name", ["duetime.db", "duetime.db-wal"])
def test_a_service_whose_files_are_removed_stops_with_an_error(tmp_path: Path, name: str) -> None:
    with Duetime(tmp_path) as service:
        made = [service.create("http://127.0.0.1:9/", seconds=3600) for _ in range(20)]
        (tmp_path / name).unlink()
        with contextlib.suppress(OSError):  # It may exit before the request.
            answer = asked_for(service, "http://127.0.0.1:9/", "late")
            assert answer.status == 503, answer
        assert service.wait() == 1
        last = service.stderr.splitlines()[-1]
        assert last.startswith(f"duetime: {tmp_path / name} was removed"), service.stderr
        assert "Traceback" not in service.stderr
        if name.endswith("-wal"):
            service.start()
            assert service.total("pending") == len(made)


def test_an_idle_service_notices_removed_files(tmp_path: Path) -> None:
    with Duetime(tmp_path / "run", DUETIME_LEASE_TTL="1s") as service:
        (tmp_path / "run" / "duetime.db").rename(tmp_path / "elsewhere.db")
        assert service.wait() == 1
        assert "was removed or moved while Duetime was using it" in service.stderr
