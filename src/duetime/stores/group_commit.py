"""Group commit for stores on a server: items that arrive during a write are written together in the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from duetime.stores.byte_budget import fitting

A = TypeVar("A")
R = TypeVar("R")


class GroupCommit(Generic[A, R]):
    def __init__(
        self,
        write: Callable[[list[A]], Awaitable[list[R]]],
        *,
        batch_max: int,
        size: Callable[[A], int] | None = None,
        size_max: int = 0,
    ) -> None:
        """A batch has at most ``batch_max`` items and ends with the item whose ``size`` reaches ``size_max``."""
        self._write = write
        self._batch_max = batch_max
        self._size = size
        self._size_max = size_max
        self._waiting: list[tuple[A, asyncio.Future[R]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def __call__(self, item: A) -> R:
        """Write ``item`` together with others, and return its result once that write is durable."""
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        return await done

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                count = self._batch_max
                if self._size is not None:
                    count = fitting([self._size(item) for item, _ in self._waiting[:count]], self._size_max)
                batch, self._waiting = self._waiting[:count], self._waiting[count:]
                await self._write_batch(batch)
        finally:
            self._writing = None

    async def _write_batch(self, batch: list[tuple[A, asyncio.Future[R]]]) -> None:
        try:
            results = await self._write([item for item, _ in batch])
        except Exception as error:
            for _, done in batch:
                if not done.done():
                    done.set_exception(error)
            return
        for (_, done), result in zip(batch, results, strict=True):
            if not done.done():
                done.set_result(result)

    async def finish(self) -> None:
        """Wait for all writes requested so far."""
        while self._writing is not None:
            await asyncio.wait([self._writing])
