"""Hints between instances that share a PostgreSQL server, sent with NOTIFY.

At most one hint is being sent; others given meanwhile are merged into the next. Hints use their own connection and
transactions, because the server serializes the commits of transactions that call NOTIFY.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from duetime.errors import StoreError
from duetime.store import Hint
from duetime.stores.postgres.pool import PostgresPool

CHANNEL = "duetime"
CLOSE_SECONDS_MAX = 1.0
RETRY_SECONDS = 0.5

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Hint).decode


class PostgresHints:
    def __init__(self, pool: PostgresPool) -> None:
        self.heard: Callable[[Hint], None] = lambda _: None
        self._pool = pool
        self._pending: Hint | None = None
        self._woken = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._disconnected = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Send the pending hint, if possible within ``CLOSE_SECONDS_MAX``, and stop."""
        if self._task is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS_MAX):
                await self._drained.wait()
        self._task.cancel()
        await asyncio.wait([self._task])

    def send(self, hint: Hint) -> None:
        """Send a hint to the other instances soon. Without a connection no hints are sent or received; nothing depends
        on them."""
        self._pending = hint if self._pending is None else self._pending | hint
        self._drained.clear()
        self._woken.set()

    async def _run(self) -> None:
        while True:
            # Errors are ignored here: if the server is down, the store's statements report it.
            with contextlib.suppress(StoreError):
                await self._exchange()
            await asyncio.sleep(RETRY_SECONDS)

    async def _exchange(self) -> None:
        self._disconnected = False
        async with self._pool.channel(CHANNEL, lambda text: self.heard(_decode(text)), self._end) as notify:
            while not self._disconnected:
                if self._pending is not None:
                    hint, self._pending = self._pending, None
                    await notify(_encode(hint).decode())
                self._woken.clear()
                if self._pending is None:
                    self._drained.set()
                    await self._woken.wait()

    def _end(self) -> None:
        self._disconnected = True
        self._woken.set()
