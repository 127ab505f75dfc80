"""Connecting to a database server: the hosts in the URL, and the first connection at startup."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from duetime.databases import each_host
from duetime.errors import SettingsError, StoreError, StoreUnavailable

log = logging.getLogger(__name__)

C = TypeVar("C")

START_SECONDS_MAX = 60.0
RETRY_SECONDS = 0.5
LOG_SECONDS = 10.0


class Misconfigured(StoreUnavailable):
    """The server rejected the connection or a statement, and retrying can't help: its settings or ours must change."""


class Hosts:
    """The hosts in a URL, the last one that worked first."""

    def __init__(self, url: str, check: Callable[[str], object] = str) -> None:
        """``check`` raises ``SettingsError`` for an invalid URL."""
        self._urls = each_host(url)
        for each in self._urls:
            check(each)

    def __len__(self) -> int:
        return len(self._urls)

    async def first(self, connect: Callable[[str], Awaitable[C]]) -> C:
        """Try the hosts in order and return the first connection; that host is tried first from now on."""
        refusals: list[StoreUnavailable] = []
        for url in tuple(self._urls):
            try:
                connected = await connect(url)
            except StoreUnavailable as refusal:
                refusals.append(refusal)
                continue
            self._urls.remove(url)
            self._urls.insert(0, url)
            return connected
        raise next((refusal for refusal in refusals if isinstance(refusal, Misconfigured)), refusals[0])


class Pool(Protocol):
    def connection(self) -> AbstractAsyncContextManager[Any]:
        """Borrow a connection exclusively."""


async def wait_for_server(pool: Pool) -> None:
    """Return once a connection succeeds; a server may still be starting. Wrong settings raise ``SettingsError`` at
    once, a server that is still not available after ``START_SECONDS_MAX``."""
    loop = asyncio.get_running_loop()
    began = log_again_at = loop.time()
    while True:
        try:
            async with pool.connection():
                return
        except Misconfigured as error:
            raise SettingsError(f"DATABASE_URL: {error}") from error
        except StoreError as error:
            now = loop.time()
            if now - began > START_SECONDS_MAX:
                raise SettingsError(f"DATABASE_URL: {error}") from error
            if now >= log_again_at:
                log.warning("waiting for the database: %s", error)
                log_again_at = now + LOG_SECONDS
            await asyncio.sleep(RETRY_SECONDS)
