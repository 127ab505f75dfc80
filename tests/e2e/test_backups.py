"""A backup, made while the service runs by the command that the documents name, can be restored: the service starts on
it and fires its timers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import apsw

from tests.mysql import MysqlServer
from tests.postgres import Postgres
from tests.servers import Duetime, Receiver, until
from tests.skips import skip


def create(service: Duetime, url: str) -> None:
    """Create a timer that is due soon after the backup."""
    timer = {"id": "order-7", "delay": "4s", "callbackUrl": url, "payload": {"order": 7}, "responseProtocol": "status"}
    assert service.request("POST", "/api/v1/timers", json=timer).status == 200


def check(service: Duetime) -> None:
    path = "/api/v1/timers/default/order-7"
    until("the restored timer fires", lambda: service.request("GET", path).body["status"] == "completed")


def run(*command: str, stdin: bytes | None = None) -> bytes:
    if shutil.which(command[0]) is None:
        skip(f"{command[0]} is not installed")
    return subprocess.run(command, check=True, input=stdin, stdout=subprocess.PIPE).stdout


def test_backup_of_sqlite(tmp_path: Path) -> None:
    with Receiver() as receiver:
        with Duetime(tmp_path / "before") as service:
            create(service, receiver.url("/hook"))
            (tmp_path / "after").mkdir()
            connection = apsw.Connection(str(tmp_path / "before/duetime.db"), apsw.SQLITE_OPEN_READONLY)
            connection.execute("VACUUM INTO ?", (str(tmp_path / "after/duetime.db"),))
            connection.close()
        with Duetime(tmp_path / "after") as service:
            check(service)


def test_backup_of_postgresql(tmp_path: Path, postgres15: Postgres) -> None:
    before, after = postgres15.fresh(), postgres15.fresh()
    with Receiver() as receiver:
        with Duetime(tmp_path / "before", DATABASE_URL=before) as service:
            create(service, receiver.url("/hook"))
            backup = run("pg_dump", before)
        run("psql", "-q", "-v", "ON_ERROR_STOP=1", after, stdin=backup)
        with Duetime(tmp_path / "after", DATABASE_URL=after) as service:
            check(service)


def test_backup_of_mariadb(tmp_path: Path, mariadb: MysqlServer) -> None:
    before, after = mariadb.fresh(), mariadb.fresh()
    at = urlsplit(before)
    server = (f"--host={at.hostname}", f"--port={at.port}", f"--user={at.username}", f"--password={at.password or ''}")
    with Receiver() as receiver:
        with Duetime(tmp_path / "before", DATABASE_URL=before) as service:
            create(service, receiver.url("/hook"))
            backup = run("mariadb-dump", "--single-transaction", *server, before.rpartition("/")[2])
        run("mariadb", *server, after.rpartition("/")[2], stdin=backup)
        with Duetime(tmp_path / "after", DATABASE_URL=after) as service:
            check(service)
