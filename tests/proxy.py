"""Network faults for tests: ``Proxy``, a TCP proxy on loopback that can refuse, reset or hang connections and drop
responses.

It runs in its own thread, is a context manager, and leaves nothing open. Each method takes effect before it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from tests.ports import free_port
from tests.servers import PATIENCE_SECONDS

Rule = Callable[[bytes], bool]
"""Decides for each piece of data from the target whether to reset the connection instead of forwarding it."""

# SO_LINGER: closing a socket resets the connection and discards unsent data, or sends the rest and closes normally.
_RESET = struct.pack("ii", 1, 0)
_TELL = struct.pack("ii", 0, 0)


def nth(wanted: bytes, n: int = 1) -> Rule:
    """A rule for only the ``n``-th piece that contains these bytes, as in ``nth(b"COMMIT")``."""
    seen = 0

    def meets(piece: bytes) -> bool:
        nonlocal seen
        seen += wanted in piece
        return wanted in piece and seen == n

    return meets


class Proxy:
    """Forwards every connection to a target until a fault is set."""

    def __init__(self, target_host: str, target_port: int) -> None:
        self.port = free_port()
        self.on_answer: Rule | None = None
        self._target = target_host, target_port
        self._open: set[asyncio.Task[None]] = set()
        self._passing = asyncio.Event()
        self._passing.set()
        self._listener: socket.socket | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self.allow()

    def url(self, url: str) -> str:
        """The same URL with the proxy's host and port."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{user}{at}127.0.0.1:{self.port}").geturl()

    def lead_to(self, port: int) -> None:
        """Forward new connections to another port. Open connections do not change."""
        self._target = self._target[0], port

    def refuse(self) -> None:
        """Refuse new connections. Open connections do not change."""
        self._run(self._refuse())

    def allow(self) -> None:
        """Accept connections again, on the same port."""
        self._run(self._allow())

    def cut(self) -> None:
        """Reset every open connection, on both sides."""
        self._run(self._cut())

    def hang(self) -> None:
        """Accept and keep connections but forward nothing in either direction, not even a close."""
        self._run(self._pass_on(False))

    def pass_on(self) -> None:
        """Forward everything again, held-back data first."""
        self._run(self._pass_on(True))

    def close(self) -> None:
        self.refuse()
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_SECONDS)
        self._loop.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, action: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(action, self._loop).result(PATIENCE_SECONDS)

    # Called in the loop's thread.

    async def _allow(self) -> None:
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port), backlog=1024)
            self._listener.setblocking(False)
            self._loop.add_reader(self._listener, self._accept)

    async def _refuse(self) -> None:
        if self._listener is not None:
            self._accept()
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def _pass_on(self, now: bool) -> None:
        (self._passing.set if now else self._passing.clear)()

    async def _cut(self) -> None:
        self._accept()
        await asyncio.sleep(0)  # a task that has not started can't clean up
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)

    def _accept(self) -> None:
        """Accept all connections in the backlog: for their clients, they are connected already."""
        with contextlib.suppress(BlockingIOError):
            while self._listener is not None:
                accepted, _ = self._listener.accept()
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                task = self._loop.create_task(self._link(accepted))
                self._open.add(task)
                task.add_done_callback(self._open.discard)

    async def _link(self, accepted: socket.socket) -> None:
        """Forward one connection. A close of one side is forwarded to the other; anything else resets both."""
        writers: list[asyncio.StreamWriter] = []
        directions: list[asyncio.Task[None]] = []
        try:
            questions, client = await asyncio.open_connection(sock=accepted)
            writers.append(client)
            await self._passing.wait()
            answers, server = await asyncio.open_connection(*self._target)
            writers.append(server)
            server.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            directions.append(self._loop.create_task(self._pass(questions, server, lambda _: False)))
            directions.append(self._loop.create_task(self._pass(answers, client, self._swallows)))
            await asyncio.gather(*directions)
        except EOFError:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                for writer in writers:
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _TELL)
                    writer.close()
                for writer in writers:
                    await writer.wait_closed()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for direction in directions:
                direction.cancel()
            for writer in writers:
                writer.transport.abort()

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, rule: Rule) -> None:
        while True:
            piece = b""
            with contextlib.suppress(OSError):
                piece = await source.read(65536)
            await self._passing.wait()
            if not piece:
                raise EOFError
            if rule(piece):
                raise ConnectionResetError
            sink.write(piece)
            await sink.drain()

    def _swallows(self, answer: bytes) -> bool:
        return self.on_answer is not None and self.on_answer(answer)
