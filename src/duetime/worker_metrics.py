"""Exchanges metrics between workers that share a port, so that any worker can serve the metrics of all.

Each worker listens on a Unix socket in a private directory and sends its own metrics page to each connection. A worker
that does not respond in time is left out, like one that has just died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

ANSWER_SECONDS_MAX = 1.0


class WorkerMetrics:
    def __init__(self, directory: Path, name: str, own_page: Callable[[], bytes]) -> None:
        self._directory = directory
        self._name = name
        self._own_page = own_page

    async def run(self) -> None:
        """Serve this worker's page to the others until canceled."""
        async with await asyncio.start_unix_server(self._answer, self._path(self._name)) as server:
            await server.serve_forever()

    async def pages(self) -> dict[str, bytes]:
        """The page of each worker, by name."""
        others = [path.stem for path in self._directory.glob("*.sock") if path.stem != self._name]
        answers = await asyncio.gather(*(self._ask(other) for other in others))
        pages = {self._name: self._own_page(), **dict(zip(others, answers, strict=True))}
        return {name: pages[name] for name in sorted(pages) if pages[name]}

    async def _ask(self, other: str) -> bytes:
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                reader, writer = await asyncio.open_unix_connection(self._path(other))
                try:
                    return await reader.read()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return b""

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._own_page())
        writer.close()

    def _path(self, name: str) -> str:
        return str(self._directory / f"{name}.sock")
