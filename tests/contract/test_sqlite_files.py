"""The files of a running SQLite store: what happens if another program removes or changes one of them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

from duetime.errors import SettingsError, StoreFailed
from duetime.model import Status
from duetime.store import Filter
from duetime.stores.sqlite.lock import holder
from duetime.stores.sqlite.store import SqliteStore
from tests.clocks import ManualClock
from tests.contract.stores import sqlite
from tests.contract.timers import spread, timer, with_timers

KEPT = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def store(runner: asyncio.Runner, folder: Path, clock: ManualClock) -> Iterator[SqliteStore]:
    store = runner.run(sqlite(folder, clock))
    runner.run(with_timers(store, *spread(KEPT)))
    yield store
    runner.run(store.close())


def remove(path: Path) -> None:
    path.unlink()


def rename(path: Path) -> None:
    path.rename(f"{path}.away")


def replace(path: Path) -> None:
    shutil.copy(path, f"{path}.copy")
    os.replace(f"{path}.copy", path)


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def move_folder(path: Path) -> None:
    path.parent.rename(f"{path.parent}.away")


HARM = [
    *((harm, suffix) for harm in (remove, rename, replace) for suffix in ("", "-wal", "-shm")),
    *((harm, suffix) for harm in (truncate, halve) for suffix in ("", "-wal")),
    (move_folder, ""),
]


@pytest.mark.parametrize(("harm", "suffix"), HARM, ids=[f"{harm.__name__}{suffix}" for harm, suffix in HARM])
async def test_no_write_is_acknowledged_into_a_removed_file(
    store: SqliteStore, folder: Path, harm: Callable[[Path], None], suffix: str
) -> None:
    if suffix == "" and harm in (truncate, halve):
        apsw.Connection(str(folder / "duetime.db")).wal_checkpoint()  # so that there is something to truncate
        await store.put(timer("before"))
    harm(folder / f"duetime.db{suffix}")
    with pytest.raises(StoreFailed) as raised:
        await store.put(timer("late"))
    assert str(folder / "duetime.db") in str(raised.value)
    async with asyncio.timeout(30):
        assert await store.failure() is raised.value
    for verb in (store.put(timer("later")), store.get("default", "t0"), store.ping()):
        with pytest.raises(StoreFailed):
            await verb


@pytest.mark.parametrize("harm", [remove, rename, replace])
@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
async def test_lost_log_loses_no_timer(
    store: SqliteStore, folder: Path, clock: ManualClock, harm: Callable[[Path], None], suffix: str
) -> None:
    harm(folder / f"duetime.db{suffix}")
    with pytest.raises(StoreFailed, match="all timers were saved into the database: start Duetime again"):
        await store.put(timer("late"))
    await store.close()
    again = await sqlite(folder, clock)
    assert (await again.tally())[Status.PENDING] == KEPT
    await again.close()


@pytest.mark.parametrize("suffix", ["", "-wal"])
async def test_files_that_replaced_ours_are_not_changed(store: SqliteStore, folder: Path, suffix: str) -> None:
    for name in ("duetime.db", "duetime.db-wal"):
        (folder / name).rename(folder / f"away-{name}")
        (folder / name).write_bytes(b"of a backup that is being restored")
    with pytest.raises(StoreFailed, match="was replaced while Duetime was using it: put it back"):
        await store.put(timer("late"))
    await store.close()
    assert (folder / f"duetime.db{suffix}").read_bytes() == b"of a backup that is being restored"
    # The log of the file that was moved away is unchanged, too.
    (folder / "away-duetime.db-wal").rename(folder / "moved.db-wal")
    (folder / "away-duetime.db").rename(folder / "moved.db")
    assert apsw.Connection(str(folder / "moved.db")).execute("SELECT count(*) FROM timers").get == KEPT


async def test_backup_by_another_process_does_not_disturb_the_store(
    store: SqliteStore, folder: Path, clock: ManualClock
) -> None:
    backup = "import apsw, sys; apsw.Connection(sys.argv[1]).execute(f\"VACUUM INTO '{sys.argv[2]}'\")"
    run = [sys.executable, "-c", backup, str(folder / "duetime.db"), str(folder / "backup.db")]
    await asyncio.to_thread(subprocess.run, run, check=True, timeout=30)
    await store.put(timer("after"))
    assert apsw.Connection(str(folder / "backup.db")).execute("SELECT count(*) FROM timers").get == KEPT


async def test_close_leaves_no_log(store: SqliteStore, folder: Path) -> None:
    await store.get("default", "t0")
    await store.page(Filter(), 10)
    await store.ping()
    await store.close()
    assert sorted(os.listdir(folder)) == ["duetime.db", "duetime.db.lock"]
    assert holder(folder / "duetime.db") is None


def test_lock_file_alone_excludes_other_processes(
    runner: asyncio.Runner, folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of an older version, or on a system without the other lock."""
    monkeypatch.setattr(fcntl, "F_OFD_SETLK", 9_999)
    store = runner.run(sqlite(folder, clock))
    opening = "import asyncio, sys; from pathlib import Path; from duetime.stores.sqlite.store import SqliteStore; "
    run = [sys.executable, "-c", opening + "asyncio.run(SqliteStore(Path(sys.argv[1]), None).open())"]
    tried = subprocess.run([*run, folder / "duetime.db"], timeout=30, capture_output=True, text=True, check=False)
    assert f"is in use by another Duetime process (pid {os.getpid()})" in tried.stderr
    runner.run(store.close())


async def test_rejected_second_store_keeps_the_locks_of_the_first(
    store: SqliteStore, folder: Path, clock: ManualClock
) -> None:
    """A process that opens and closes a file drops all its locks on the file, including SQLite's."""
    (folder / "link.db").symlink_to("duetime.db")
    for path in (folder / "duetime.db", folder / "link.db"):
        with pytest.raises(SettingsError, match=rf"in use by another Duetime process \(pid {os.getpid()}\)"):
            await SqliteStore(path, clock).open()
    ask = "import sys; from pathlib import Path; from duetime.stores.sqlite.lock import holder; "
    run = [sys.executable, "-c", ask + "print(holder(Path(sys.argv[1])))", str(folder / "duetime.db")]
    asked = await asyncio.to_thread(subprocess.run, run, check=True, timeout=30, capture_output=True, text=True)
    assert asked.stdout.strip() == str(os.getpid())
    await store.put(timer("after"))
