"""Group commit for stores that are asked over a network: what comes while a write is under way goes into the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

A = TypeVar("A")
R = TypeVar("R")


class Gathering(Generic[A, R]):
    def __init__(self, write: Callable[[list[A]], Awaitable[list[R]]], *, batch_max: int) -> None:
        self._write = write
        self._batch_max = batch_max
        self._waiting: list[tuple[A, asyncio.Future[R]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def __call__(self, item: A) -> R:
        """Have ``item`` written with others and return its result once that write is durable."""
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        return await done

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[: self._batch_max], self._waiting[self._batch_max :]
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
        """Wait for what has been asked so far."""
        while self._writing is not None:
            await asyncio.wait([self._writing])
