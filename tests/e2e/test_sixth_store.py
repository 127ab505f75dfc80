"""A new database needs its own files and one entry in ``DATABASES``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.servers import Duetime, Receiver

ROOT = Path(__file__).parents[2]


class Served(Duetime):
    module = "tests.sixth_store"

    def __init__(self, directory: Path, **options: Any) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        super().__init__(directory, PYTHONPATH=path, **options)


def test_service_runs_on_a_store_that_is_only_an_entry_in_the_table(tmp_path: Path) -> None:
    with Receiver() as receiver, Served(tmp_path, DATABASE_URL="sixth://host/name") as service:
        timer = {"delay": "0s", "callbackUrl": receiver.url("/sixth")}
        assert service.request("POST", "/api/v1/timers", json=timer).status == 200
        assert len(receiver.wait("/sixth")) == 1


def test_messages_name_every_database(tmp_path: Path) -> None:
    service = Served(tmp_path, start=False, DUETIME_WORKERS="2")
    service.spawn()
    assert service.process is not None and service.process.wait(30) == 2
    assert "several need a postgresql:// or mysql:// or cassandra:// or sixth:// store" in service.stderr
