"""``python -m tests.sixth_store serve``: the service with one more database, added by an entry in ``DATABASES``."""

from __future__ import annotations

import sys

from duetime import databases
from duetime.clock import Clock, SystemClock
from duetime.stores.memory import MemoryStore


class SixthStore(MemoryStore):
    def __init__(
        self, url: str, *, shards: int, retention_ms: int, takeover_now: bool, virtual_clock: Clock | None
    ) -> None:
        super().__init__(virtual_clock or SystemClock(), shards=shards)


if __name__ == "__main__":
    entry = databases.Database(
        name="Sixth", schemes=("sixth",), store="tests.sixth_store:SixthStore", example="sixth://host/name"
    )
    databases.DATABASES += (entry,)

    from duetime.cli import main

    sys.exit(main())
