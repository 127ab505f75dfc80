"""A real PgBouncer for tests, in front of PostgreSQL. It refuses to run as root, so root runs it as ``nobody``."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.postgres import Missing, Postgres
from tests.servers import PATIENCE_SECONDS, NotStarted, until

PROGRAM = "/usr/sbin/pgbouncer"


class PgBouncer:
    def __init__(self, server: Postgres, *, pool_mode: str, **settings: str) -> None:
        if not Path(PROGRAM).exists():
            raise Missing("PgBouncer is not installed: apt-get install pgbouncer (Debian 12)")
        self.port = free_port()
        self._directory = Path(tempfile.mkdtemp(prefix="pgbouncer-"))
        configuration, users = self._directory / "pgbouncer.ini", self._directory / "users"
        settings = {"listen_addr": "127.0.0.1", "listen_port": str(self.port), "unix_socket_dir": ""} | settings
        settings |= {"pool_mode": pool_mode, "auth_type": "trust", "auth_file": str(users)}
        lines = ["[databases]", f"* = host=127.0.0.1 port={server.port}", "[pgbouncer]"]
        configuration.write_text("\n".join([*lines, *(f"{name} = {value}" for name, value in settings.items())]))
        users.write_text('"postgres" ""\n')
        run_as: dict[str, Any] = {}
        if os.getuid() == 0:
            nobody = pwd.getpwnam("nobody")
            run_as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            shutil.chown(self._directory, nobody.pw_uid, nobody.pw_gid)
        self._process = subprocess.Popen(
            [PROGRAM, configuration], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **run_as
        )
        try:
            until("PgBouncer is ready", self._is_ready)
        except BaseException:
            self.close()
            raise

    def _is_ready(self) -> bool:
        if self._process.poll() is not None:
            raise NotStarted(f"PgBouncer ended with {self._process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def url(self, url: str) -> str:
        """The URL of the same database through the pooler."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{url.rpartition('/')[2]}"

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(PATIENCE_SECONDS)
        finally:
            self._process.kill()
            shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> PgBouncer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
