"""Real MySQL, MariaDB and TiDB for tests: a server on loopback that can be stopped, paused, killed and restarted on the
same port and data. It stops with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncmy
import asyncmy.errors

from duetime.stores.mysql.pool import connect_arguments, run
from tests.ports import free_port
from tests.postgres import Missing
from tests.server_process import ServerProcess, die_with_parent
from tests.servers import NotStarted, until

MYSQL = Path(__file__).parents[1] / ".servers/mysql"
TIDB = Path(__file__).parents[1] / ".servers/tidb/tidb-server"


class MysqlServer(ServerProcess):
    """One server with its own data; ``settings`` are options of the server."""

    name = ""

    def __init__(self, *, port: int = 0, **settings: str) -> None:
        self.check()
        self.port = port or free_port()
        self._settings = {"max-connections": "300", "innodb-buffer-pool-size": "256M"} | settings
        self._remembered: dict[str, tuple[dict[str, str], list[str]]] = {}
        self._names = (f"test_{number}" for number in itertools.count(1))
        self.directory = Path(tempfile.mkdtemp(prefix=f"{self.name.lower()}-"))
        self._data = self.directory / "data"
        self._log = self.directory / "log"
        self._user = ["--user=root"] if os.getuid() == 0 else []
        # At startup, a server removes the files of others from the folder for temporary tables.
        self._environment = os.environ | {"TMPDIR": str(self.directory)}
        try:
            self._install()
            self.start()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def check() -> None:
        """Raise ``Missing`` if the server is not installed."""

    def _install(self) -> None:
        """Create the data directory."""
        made = subprocess.run(
            self._installation(), env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if made.returncode:
            raise NotStarted(f"{self.name}: {made.stdout.decode(errors='replace')}")

    def _installation(self) -> list[str]:
        """The command that creates the data directory."""
        raise NotImplementedError

    def _program(self) -> list[str]:
        """The server's program with the options that it always needs."""
        raise NotImplementedError

    def _run(self) -> list[str]:
        """The command that starts the server."""
        return [
            *(*self._program(), *self._user, f"--datadir={self._data}", f"--port={self.port}"),
            *("--bind-address=127.0.0.1", f"--socket={self.directory / 'socket'}"),
            *(f"--{name}={value}" for name, value in self._settings.items()),
        ]

    def start(self) -> None:
        """Start or restart the server and wait until it accepts connections."""
        assert self.process is None, "is running already"
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                self._run(),
                cwd=self.directory,  # TiDB writes its slow query log into the working directory
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        try:
            until(f"{self.name} is ready", self._is_ready)
        except BaseException:
            self.kill()
            raise

    def _is_ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise NotStarted(f"{self.name} ended with {self.process.returncode}: {self.log}")
        with contextlib.suppress(OSError, asyncmy.errors.MySQLError):
            self.sql("SELECT 1")
            return True
        return False

    @property
    def log(self) -> str:
        """The log of the server since its last start."""
        return self._log.read_text(errors="replace")

    def url(self, database: str = "mysql") -> str:
        return f"mysql://root@127.0.0.1:{self.port}/{database}"

    def sql(self, *statements: str) -> list[Any]:
        """Run statements one by one, with or without a running event loop; returns the rows of each."""

        async def run_each() -> list[Any]:
            connection = await asyncmy.connect(**connect_arguments(self.url()))
            try:
                return [(await run(connection, [statement]))[0].rows for statement in statements]
            finally:
                connection.close()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, run_each()).result()

    def follow(self, primary_port: int) -> None:
        """Replicate from a primary, from its first commit on."""
        self.sql(
            f"CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {primary_port}, MASTER_USER = 'root', "
            "MASTER_CONNECT_RETRY = 1, MASTER_USE_GTID = slave_pos",
            "START SLAVE",
        )

    def promote(self) -> None:
        """Promote a replica to primary once it has applied all it received; it accepts writes when this returns."""
        self.sql("STOP SLAVE IO_THREAD")
        until("all that was sent is applied", lambda: "has read all relay log" in str(self.sql("SHOW SLAVE STATUS")))
        self.sql("STOP SLAVE", "RESET SLAVE ALL", "SET GLOBAL read_only = 0")

    def close(self) -> None:
        """Stop the server and remove its data."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> MysqlServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fresh(self) -> str:
        """The URL of a new, empty database."""
        name = next(self._names)
        self.sql(f"CREATE DATABASE {name}")
        return self.url(name)

    def give_back(self, url: str) -> None:
        self.sql(f"DROP DATABASE {url.rpartition('/')[2]}")

    def remember(self, url: str) -> None:
        """Remember the current rows of this database for ``restore``."""
        name = url.rpartition("/")[2]
        tables = self._tables(name)
        counts = self.sql(*(f"SELECT count(*) FROM {name}.{table}" for table in tables))
        filled = [table for table, [(count,)] in zip(tables, counts, strict=True) if count]
        self.sql(
            f"CREATE DATABASE remembered_{name}",
            *(f"CREATE TABLE remembered_{name}.{table} LIKE {name}.{table}" for table in filled),
            *(f"INSERT INTO remembered_{name}.{table} SELECT * FROM {name}.{table}" for table in filled),
        )
        self._remembered[name] = tables, filled

    def restore(self, url: str) -> bool:
        """Restore the remembered rows, which is much faster than a new database. False if that is impossible because
        tables have different partitions now."""
        name = url.rpartition("/")[2]
        tables, filled = self._remembered[name]
        if self._tables(name) != tables:
            return False
        self.sql(
            *(f"DELETE FROM {name}.{table}" for table in tables),
            *(f"INSERT INTO {name}.{table} SELECT * FROM remembered_{name}.{table}" for table in filled),
        )
        return True

    def _tables(self, name: str) -> dict[str, str]:
        """Each table with its partitions."""
        [rows] = self.sql(
            "SELECT table_name, group_concat(coalesce(partition_name, '') ORDER BY partition_name) "
            f"FROM information_schema.partitions WHERE table_schema = '{name}' GROUP BY table_name ORDER BY table_name"
        )
        return {str(table): str(partitions) for table, partitions in rows}


class Mariadb(MysqlServer):
    name = "MariaDB"

    @staticmethod
    def check() -> None:
        if shutil.which("mariadb-install-db") is None:
            raise Missing("MariaDB is not installed: apt-get install mariadb-server (Debian 12)")

    def _installation(self) -> list[str]:
        method = "--auth-root-authentication-method=normal"
        return ["mariadb-install-db", "--no-defaults", *self._user, f"--datadir={self._data}", "--skip-test-db", method]

    def _program(self) -> list[str]:
        return [shutil.which("mariadbd") or "/usr/sbin/mariadbd", "--no-defaults"]


class Mysql(MysqlServer):
    """Oracle's MySQL, from a folder that ``tests.debian`` has created."""

    name = "MySQL"

    @staticmethod
    def check() -> None:
        if not MYSQL.exists():
            raise Missing("MySQL 9 is not unpacked: make mysql (needs dpkg-deb)")

    def _installation(self) -> list[str]:
        return [*self._program(), *self._user, "--initialize-insecure", f"--datadir={self._data}"]

    def _program(self) -> list[str]:
        libraries = MYSQL / "usr/lib/x86_64-linux-gnu"
        return [
            *(str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries)),
            *(str(MYSQL / "usr/sbin/mysqld"), "--no-defaults", "--mysqlx=OFF", "--secure-file-priv=NULL"),
            *(f"--lc-messages-dir={MYSQL / 'usr/share/mysql'}", f"--plugin-dir={MYSQL / 'usr/lib/mysql/plugin'}"),
        ]


class Tidb(MysqlServer):
    """TiDB with its embedded storage for tests: real SQL, transactions and locks, on one node."""

    name = "TiDB"

    @staticmethod
    def check() -> None:
        if not TIDB.exists():
            raise Missing("TiDB is not built: make tidb (needs Go)")

    def _install(self) -> None:
        """Nothing to do: TiDB creates its data when it starts."""

    def _run(self) -> list[str]:
        return [
            *(str(TIDB), "-store", "unistore", "-path", str(self._data), "-socket", str(self.directory / "socket")),
            *("-host", "127.0.0.1", "-advertise-address", "127.0.0.1", "-P", str(self.port)),
            *("-status-host", "127.0.0.1", "-status", str(free_port())),
        ]
