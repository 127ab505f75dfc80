"""One process per database file, whichever path is used and whichever process starts first."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers import KEY, Duetime, until
from tests.skips import skip


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Duetime]:
    with Duetime(tmp_path_factory.mktemp("first") / "data") as service:
        service.create("http://127.0.0.1:9/", seconds=3600)
        yield service


def url(path: Path | str) -> str:
    return f"sqlite:///{path}"


def refusal(directory: Path, database: Path | str) -> str:
    """The one-line error with which a start fails."""
    with Duetime(directory, bare=True, start=False, API_KEY=KEY, DATABASE_URL=url(database)) as service:
        service.spawn()
        until("the start is refused", lambda: service.process is not None and service.process.poll() is not None)
        assert service.wait() == 2, service.stderr
        [line] = service.stderr.splitlines()
    return line


def assert_refused(first: Duetime, directory: Path, database: Path | str) -> None:
    assert first.process is not None
    line = refusal(directory, database)
    assert f"is in use by another Duetime process (pid {first.process.pid})" in line
    assert first.total("pending") == 1  # and the first one keeps working


def test_second_process_is_rejected_through_a_symlink_to_the_file(first: Duetime, tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(first.directory / "duetime.db")
    assert_refused(first, tmp_path, "link.db")
    assert not (tmp_path / "link.db-wal").exists()


def test_second_process_is_rejected_through_a_symlink_to_the_folder(first: Duetime, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(first.directory)
    assert_refused(first, tmp_path, "link/duetime.db")


def test_second_process_is_rejected_through_a_path_with_dots(first: Duetime, tmp_path: Path) -> None:
    assert_refused(first, tmp_path, os.path.relpath(first.directory / "duetime.db", tmp_path))
    assert_refused(first, tmp_path, f"{first.directory}/../data/./duetime.db")


def test_removed_lock_file_does_not_let_a_second_process_in(first: Duetime, tmp_path: Path) -> None:
    (first.directory / "duetime.db.lock").unlink()
    assert_refused(first, tmp_path, first.directory / "duetime.db")


def test_second_process_is_rejected_through_a_hard_link(first: Duetime, tmp_path: Path) -> None:
    os.link(first.directory / "duetime.db", tmp_path / "other.db")
    try:
        assert_refused(first, tmp_path, "other.db")
    finally:
        (tmp_path / "other.db").unlink()


@pytest.mark.parametrize("what", ["folder", "file"])
def test_second_process_is_rejected_through_a_bind_mount(first: Duetime, tmp_path: Path, what: str) -> None:
    source, target = first.directory, tmp_path / "mounted"
    if what == "file":
        source = source / "duetime.db"
        target.touch()
    else:
        target.mkdir()
    if shutil.which("mount") is None or subprocess.run(["mount", "--bind", source, target], check=False).returncode:
        skip("only root may mount a file at a second path")
    try:
        assert_refused(first, tmp_path, target if what == "file" else target / "duetime.db")
    finally:
        subprocess.run(["umount", target], check=True)


def test_doctor_names_the_process_that_uses_the_file(first: Duetime, tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(first.directory / "duetime.db")
    (first.directory / "duetime.db.lock").unlink(missing_ok=True)
    run = subprocess.run(
        [sys.executable, "-m", "duetime", "doctor"],
        env={"PATH": os.environ["PATH"], "DATABASE_URL": url("link.db"), "PORT": str(first.port), "API_KEY": KEY},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert first.process is not None
    assert f"in use by process {first.process.pid}" in run.stdout, run.stdout + run.stderr


def test_a_kill_frees_the_file_for_every_path(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to("real/duetime.db")
    with Duetime(tmp_path / "real") as service:
        id = service.create("http://127.0.0.1:9/", seconds=3600)
        service.kill()
        with Duetime(tmp_path, DATABASE_URL=url("link.db")) as second:
            assert second.get(id)["status"] == "pending"  # It was in the WAL beside the file.
            later = second.create("http://127.0.0.1:9/", seconds=3600)
            second.kill()
        service.start()
        assert {service.get(each)["status"] for each in (id, later)} == {"pending"}


def test_file_with_two_names_is_rejected(tmp_path: Path) -> None:
    with Duetime(tmp_path) as service:
        assert service.terminate() == 0
    os.link(tmp_path / "duetime.db", tmp_path / "other.db")
    for name in ("duetime.db", "other.db"):
        line = refusal(tmp_path, name)
        assert "2 names (hard links)" in line and "remove all names but one" in line
    (tmp_path / "other.db").unlink()
    with Duetime(tmp_path):
        pass


def test_of_several_first_starts_one_wins(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to("duetime.db")
    paths: list[str | Path] = ["duetime.db", "link.db", tmp_path / "duetime.db"]
    services = [
        Duetime(tmp_path / str(n), start=False, DATABASE_URL=url(tmp_path / path)) for n, path in enumerate(paths)
    ]
    try:
        for service in services:
            service.spawn()
        processes = [service.process for service in services if service.process is not None]
        until("all but one are refused", lambda: sum(process.poll() is None for process in processes) == 1)
        [winner] = [service for service in services if service.process and service.process.poll() is None]
        winner.wait_ready()
        assert winner.process is not None
        for service in services:
            if service is not winner:
                assert "is in use by another Duetime process" in service.stderr
                assert service.wait() == 2
    finally:
        for service in services:
            service.kill()


def with_umask(mask: int, do: Callable[[], None]) -> None:
    before = os.umask(mask)
    try:
        do()
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
def test_the_files_are_private_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    tmp_path.chmod(0o700)
    service = Duetime(tmp_path, start=False)
    with service:
        with_umask(mask, service.spawn)
        service._log.chmod(0o600)
        service.wait_ready()
        service.create("http://127.0.0.1:9/", seconds=3600)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("duetime.db*")}
    assert modes == dict.fromkeys(("duetime.db", "duetime.db-wal", "duetime.db-shm", "duetime.db.lock"), 0o600)


def test_a_world_readable_file_keeps_its_mode_and_logs_a_warning(tmp_path: Path) -> None:
    with Duetime(tmp_path) as service:
        assert "may open" not in service.stderr
        assert service.terminate() == 0
        for mode, warned in ((0o640, False), (0o644, True)):
            (tmp_path / "duetime.db").chmod(mode)
            service.start()
            assert stat.S_IMODE((tmp_path / "duetime.db").stat().st_mode) == mode
            assert ("every user of this machine may open" in service.stderr) == warned
            assert service.terminate() == 0
