"""An HTTP client of the cluster: keep-alive connections to each instance, one request at a time on each."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from typing import Any, NamedTuple

from tests.servers import KEY

ANSWER_SECONDS_MAX = 9.0
"""Longer than the service waits for the database, so that its 503 is seen; shorter than any timeout here."""


class Answer(NamedTuple):
    status: int
    headers: dict[bytes, bytes]  # names in lower case
    body: Any


class Clients:
    def __init__(self) -> None:
        self._idle: dict[int, list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = defaultdict(list)

    async def ask(self, port: int, method: str, path: str, body: object = None) -> Answer | None:
        """Send a request; returns the response, or None if there is none and its effect is unknown."""
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nContent-Length: {len(content)}\r\n\r\n"
        writer = None
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                idle = self._idle[port]
                reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
                writer.write(head.encode() + content)
                status, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
                given = await reader.readexactly(int(headers.get(b"content-length", b"0")))
            idle.append((reader, writer))
            writer = None
            is_json = given and headers.get(b"content-type") == b"application/json"
            return Answer(int(status[9:12]), headers, json.loads(given) if is_json else given)
        except (OSError, EOFError):
            return None
        finally:
            if writer is not None:
                writer.transport.abort()

    def close(self) -> None:
        for idle in self._idle.values():
            for _, writer in idle:
                writer.close()
        self._idle.clear()
