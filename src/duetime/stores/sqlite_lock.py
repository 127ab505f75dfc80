"""The files of one SQLite database: locks them to this process, and notices when somebody else changes them.

The lock is on the database file itself, so another path, a link, a mount or a removed lock file does not lead around
it. The system drops it when the process ends, however it ends.

How it fails: a file that another process has is refused, and so is one with several names, because SQLite looks for
the log of a database by its name (``SettingsError``). When the database, its log or the index of its log was removed,
moved, replaced or cut short, ``explain`` says which (``StoreFailed``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import struct
import sys
from pathlib import Path
from typing import NoReturn

from duetime.errors import SettingsError, StoreFailed

log = logging.getLogger(__name__)

PRIVATE = 0o600
NOWHERE = (-1, -1)
UNKNOWN = "unknown"

_LOCKED_AT = 0x4000_0400
"""A byte of the page that SQLite never uses for data, behind those of its own locks. Our lock belongs to an open file,
not to the process: whatever else the process opens and closes, it stays (F_OFD_SETLK)."""
_NAMED_AT = _LOCKED_AT + 1
"""Has a lock that belongs to the process, so that others can ask the system which process that is."""
_FLOCK = struct.Struct("@hhqqi0q")  # type, whence, start, length, pid

_ours: set[tuple[int, int]] = set()
"""The files that this process has locked. It must not open one again: closing it would drop SQLite's own locks."""


def holder(path: Path) -> str | None:
    """The process that has this file open as its store, or "unknown"; None if there is none. Locks nothing."""
    if sys.platform != "linux":
        return None
    try:
        database = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        kind, *_ = _FLOCK.unpack(fcntl.fcntl(database, fcntl.F_OFD_GETLK, _flock(_LOCKED_AT)))
        return None if kind == fcntl.F_UNLCK else _process_of(database) or UNKNOWN
    except OSError:
        return None
    finally:
        os.close(database)


def too_many_names(path: Path) -> str | None:
    """Why a file with several names can't be a store."""
    links = path.stat().st_nlink if path.is_file() else 1
    if links <= 1:
        return None
    return (
        f"{path} has {links} names (hard links), but SQLite finds the log of a database by its name: remove all names "
        f"but one (`find / -samefile {path}` lists them)"
    )


def open_to_others(path: Path) -> str | None:
    """What to do about a file that every user of the machine may open."""
    mode = stat.S_IMODE(path.stat().st_mode) if path.is_file() else PRIVATE
    if not mode & stat.S_IRWXO:
        return None
    return f"every user of this machine may open {path} (mode {mode:04o}), which holds payloads and keys: chmod 600 it"


class LogLost(StoreFailed):
    """The log or its index was removed or replaced, and the database is in its place."""


class SqliteLock:
    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self.paths = [f"{self.path}{suffix}" for suffix in ("", "-wal", "-shm")]
        """The database, its log, and the index of the log."""
        self._note_path = f"{self.path}.lock"
        self._open: list[int] = []
        self._database = NOWHERE
        self._opened_files: list[tuple[int, int]] = []

    def take(self) -> None:
        """Lock the file, which is made if there is none."""
        try:
            self._take()
        except BaseException:
            self.release()
            raise

    def _take(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"DATABASE_URL: can't write beside {self.path}: {error.strerror}") from error
        try:
            if self.path.exists() and _identity(self.path.stat()) in _ours:
                self._refuse(str(os.getpid()))
            database = self._opened(self.paths[0])
            if sys.platform == "linux" and not _locked(database):
                self._refuse(_process_of(database))
            beside = self._opened(self._note_path)
        except OSError as error:
            raise SettingsError(f"DATABASE_URL: can't open and lock {self.path}: {error.strerror}") from error
        try:
            # The only lock on other systems, and of versions of this program that lock nothing else.
            fcntl.flock(beside, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._refuse(None)
        if problem := too_many_names(self.path):
            raise SettingsError(f"DATABASE_URL: {problem}")
        self._database = _identity(os.fstat(database))
        _ours.add(self._database)
        _make_private(beside)
        with contextlib.suppress(OSError):  # The disk is full, and what SQLite says about that is better.
            os.ftruncate(beside, 0)
            os.pwrite(beside, str(os.getpid()).encode(), 0)
        if os.fstat(database).st_size == 0:
            _make_private(database)  # SQLite gives the log and its index the same mode

    def _opened(self, path: str) -> int:
        self._open.append(descriptor := os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE))
        return descriptor

    def _refuse(self, process: str | None) -> NoReturn:
        if process is None:
            with contextlib.suppress(OSError, ValueError):
                process = Path(self._note_path).read_text("ascii").strip()
        raise SettingsError(
            f"DATABASE_URL: {self.path} is in use by another Duetime process (pid {process or UNKNOWN}): stop it, or "
            "give this one a file of its own; several processes share a server database, not a file"
        )

    def release(self) -> None:
        """Let go of the file. SQLite must have closed it before: closing ours drops its locks."""
        _ours.discard(self._database)
        self._database = NOWHERE
        while self._open:
            os.close(self._open.pop())

    def watch(self) -> None:
        """Remember which files these are, now that SQLite has made them all and they turned out to be ours."""
        _name(self._open[0])  # Only now: before it keeps a log, SQLite drops all locks of the process with its own.
        self._opened_files = [self._database, *(_identity(os.stat(path)) for path in self.paths[1:])]
        if problem := open_to_others(self.path):
            log.warning("%s", problem)

    def explain(self) -> NoReturn:
        """Raise what says what happened to the files, which are not as they were."""
        for path, opened in zip(self.paths, self._opened_files, strict=True):
            self._check_place(path, opened)
        raise StoreFailed(
            f"another program has shortened {self.path} or its -wal file, which only Duetime may write to: "
            "check it (PRAGMA integrity_check) or restore a backup, then start again"
        )

    def _check_place(self, path: str, opened: tuple[int, int]) -> None:
        try:
            if _identity(os.stat(path)) == opened:
                return
            problem = f"{path} was replaced while Duetime was using it"
        except OSError as error:
            problem = f"{path} was removed or moved while Duetime was using it ({error.strerror})"
        if path != self.paths[0]:
            raise LogLost(problem)
        raise StoreFailed(f"{problem}: put it back together with its -wal file, or restore a backup, then start again")


def _locked(database: int) -> bool:
    """Lock the file unless somebody else has; say whether it is ours now."""
    try:
        fcntl.fcntl(database, fcntl.F_OFD_SETLK, _flock(_LOCKED_AT))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno != errno.EINVAL:  # Some sandboxes know no such locks, and have only the one beside the file.
            raise
    return True


def _name(database: int) -> None:
    with contextlib.suppress(OSError):  # It only serves others, who would have to do without.
        fcntl.fcntl(database, fcntl.F_SETLK, _flock(_NAMED_AT))


def _process_of(database: int) -> str | None:
    """The process that has the file, if it is known here: not in another container."""
    kind, *_, process = _FLOCK.unpack(fcntl.fcntl(database, fcntl.F_GETLK, _flock(_NAMED_AT)))
    return None if kind == fcntl.F_UNLCK or process <= 0 else str(process)


def _make_private(descriptor: int) -> None:
    """Whatever the umask is."""
    with contextlib.suppress(PermissionError):  # It belongs to another user, who lets us write to it.
        os.fchmod(descriptor, PRIVATE)


def _flock(start: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
