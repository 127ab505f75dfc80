"""What workers that share a port tell each other, so that whichever is asked for metrics answers for all of them.

Each listens on a socket in a directory that only they know of, and says its own page to whoever connects. One that does
not answer soon is left out, as a process that has just died would be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

ANSWER_SECONDS_MAX = 1.0


class Siblings:
    def __init__(self, directory: Path, name: str, own_page: Callable[[], bytes]) -> None:
        self._directory = directory
        self._name = name
        self._own_page = own_page

    async def run(self) -> None:
        """Answer the others until canceled."""
        async with await asyncio.start_unix_server(self._answer, self._path(self._name)) as server:
            await server.serve_forever()

    async def pages(self) -> dict[str, bytes]:
        """The page of each worker, by its name."""
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
