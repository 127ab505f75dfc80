"""A process that puts timers until it is killed, and prints each id after its put has returned.

    python -m tests.contract.putter FILE PREFIX

It checkpoints every few pages, so that a kill is as likely to hit a checkpoint as a commit.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import uvloop

from duetime.stores.sqlite import file as sqlite_file
from tests.clocks import ManualClock
from tests.contract.stores import sqlite
from tests.contract.timers import timer

CALLERS = 8


async def main(path: Path, prefix: str) -> None:
    sqlite_file.CHECKPOINT_PAGES = 20
    store = await sqlite(path.parent, ManualClock())

    async def put_forever(caller: int) -> None:
        number = 0
        while True:
            id = f"{prefix}-{caller}-{number}"
            assert await store.put(timer(id)) is None
            os.write(1, f"{id}\n".encode())
            number += 1

    await asyncio.gather(*(put_forever(caller) for caller in range(CALLERS)))


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), sys.argv[2]))
