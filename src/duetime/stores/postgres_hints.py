"""Hints between instances that share a PostgreSQL server, over its NOTIFY.

At most one is on its way: what is said meanwhile becomes one hint. They travel on a connection and in transactions of
their own, because the server commits transactions that notify one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from duetime.errors import StoreError
from duetime.store import Hint
from duetime.stores.postgres_pool import AGAIN_SECONDS, PostgresPool

CHANNEL = "duetime"
CLOSE_SECONDS_MAX = 1.0

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Hint).decode


class PostgresHints:
    def __init__(self, pool: PostgresPool) -> None:
        self.heard: Callable[[Hint], None] = lambda _: None
        self._pool = pool
        self._unsaid: Hint | None = None
        self._woken = asyncio.Event()
        self._silent = asyncio.Event()
        self._silent.set()
        self._gone = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Send what has been said, if that can be done soon, and end."""
        if self._task is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS_MAX):
                await self._silent.wait()
        self._task.cancel()
        await asyncio.wait([self._task])

    def say(self, hint: Hint) -> None:
        """Tell the others soon; while there is no connection nothing is said or heard, and nothing depends on it."""
        self._unsaid = hint if self._unsaid is None else self._unsaid | hint
        self._silent.clear()
        self._woken.set()

    async def _run(self) -> None:
        while True:
            # What is wrong with the server shows in the statements that matter.
            with contextlib.suppress(StoreError):
                await self._talk()
            await asyncio.sleep(AGAIN_SECONDS)

    async def _talk(self) -> None:
        self._gone = False
        async with self._pool.channel(CHANNEL, lambda text: self.heard(_decode(text)), self._end) as say:
            while not self._gone:
                if self._unsaid is not None:
                    hint, self._unsaid = self._unsaid, None
                    await say(_encode(hint).decode())
                self._woken.clear()
                if self._unsaid is None:
                    self._silent.set()
                    await self._woken.wait()

    def _end(self) -> None:
        self._gone = True
        self._woken.set()
