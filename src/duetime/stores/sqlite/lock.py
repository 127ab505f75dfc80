"""The files of one SQLite database: locks them for this process, and detects when another program changes them.

The lock is on the database file itself, so another path, a link, a mount or a removed lock file can't bypass it. The
operating system releases it when the process ends, however it ends.

How it fails: a file that another process uses is rejected, and so is a file with several names, because SQLite finds
the log of a database by its name (``SettingsError``). If the database, its log or the index of its log was removed,
moved, replaced or truncated, ``explain`` raises ``StoreFailed`` with the details.
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
"""A byte in the page that SQLite reserves for locks, after SQLite's own. Our lock belongs to the open file, not to the
process (F_OFD_SETLK), so it survives whatever else the process opens and closes."""
_NAMED_AT = _LOCKED_AT + 1
"""This byte has a lock that belongs to the process, so that others can query the system for its pid."""
_FLOCK = struct.Struct("@hhqqi0q")  # type, whence, start, length, pid

_ours: set[tuple[int, int]] = set()
"""The files that this process has locked. It must not open them again, because closing drops SQLite's own locks."""


def holder(path: Path) -> str | None:
    """Return the pid of the process that uses this file as its store, "unknown" if the pid is unavailable, or None if
    no process does. Takes no lock."""
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
    """Return a message if the file has several names and therefore can't be a store."""
    links = path.stat().st_nlink if path.is_file() else 1
    if links <= 1:
        return None
    return (
        f"{path} has {links} names (hard links), but SQLite finds the log of a database by its name: remove all names "
        f"but one (`find / -samefile {path}` lists them)"
    )


def open_to_others(path: Path) -> str | None:
    """Return a message if every user of the machine can open the file."""
    mode = stat.S_IMODE(path.stat().st_mode) if path.is_file() else PRIVATE
    if not mode & stat.S_IRWXO:
        return None
    return f"every user of this machine may open {path} (mode {mode:04o}), which holds payloads and keys: chmod 600 it"


class LogLost(StoreFailed):
    """The log or its index was removed or replaced, but the database is still in place."""


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
        """Lock the file; create it if it does not exist."""
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
            # The only lock on systems other than Linux, and in old versions of this program.
            fcntl.flock(beside, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._refuse(None)
        if problem := too_many_names(self.path):
            raise SettingsError(f"DATABASE_URL: {problem}")
        self._database = _identity(os.fstat(database))
        _ours.add(self._database)
        _make_private(beside)
        with contextlib.suppress(OSError):  # The disk is full: SQLite reports that with a better message.
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
        """Release the lock. SQLite must have closed the file before, because closing ours drops SQLite's locks."""
        _ours.discard(self._database)
        self._database = NOWHERE
        while self._open:
            os.close(self._open.pop())

    def watch(self) -> None:
        """Remember the identity of the files, once SQLite has created all of them and they are known to be ours."""
        _name(self._open[0])  # Not earlier: until it uses a log, SQLite drops all locks of the process with its own.
        self._opened_files = [self._database, *(_identity(os.stat(path)) for path in self.paths[1:])]
        if problem := open_to_others(self.path):
            log.warning("%s", problem)

    def explain(self) -> NoReturn:
        """Raise ``StoreFailed`` with what happened to the files; called once they have changed."""
        for path, opened in zip(self.paths, self._opened_files, strict=True):
            self._check_place(path, opened)
        raise StoreFailed(
            f"another program has truncated {self.path} or its -wal file, which only Duetime may write to: "
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
    """Try to lock the file. Return whether this process has the lock."""
    try:
        fcntl.fcntl(database, fcntl.F_OFD_SETLK, _flock(_LOCKED_AT))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno != errno.EINVAL:  # Some sandboxes do not support such locks; the lock file must do.
            raise
    return True


def _name(database: int) -> None:
    with contextlib.suppress(OSError):  # Without it, other processes just can't learn our pid.
        fcntl.fcntl(database, fcntl.F_SETLK, _flock(_NAMED_AT))


def _process_of(database: int) -> str | None:
    """The pid of the process that uses the file; None if it is not visible here, as in another container."""
    kind, *_, process = _FLOCK.unpack(fcntl.fcntl(database, fcntl.F_GETLK, _flock(_NAMED_AT)))
    return None if kind == fcntl.F_UNLCK or process <= 0 else str(process)


def _make_private(descriptor: int) -> None:
    """Set the file mode, whatever the umask is."""
    with contextlib.suppress(PermissionError):  # The file belongs to another user.
        os.fchmod(descriptor, PRIVATE)


def _flock(start: int) -> bytes:
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
