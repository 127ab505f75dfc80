"""Faults between two programs: ``Proxy``, a TCP proxy on loopback that can refuse, cut, hang, and swallow an answer.

It runs in a thread of its own, is a context manager, and leaves nothing open. A method returns once it is in effect.
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
"""Says of each piece that comes from the target whether the connection is cut in place of passing it on."""

# What closing a socket does: lose what was not sent and reset the connection, or send the rest and say goodbye.
_RESET = struct.pack("ii", 1, 0)
_TELL = struct.pack("ii", 0, 0)


def nth(wanted: bytes, n: int = 1) -> Rule:
    """A rule that meets only the ``n``-th piece with these bytes in it, as in ``nth(b"COMMIT")``."""
    seen = 0

    def meets(piece: bytes) -> bool:
        nonlocal seen
        seen += wanted in piece
        return wanted in piece and seen == n

    return meets


class Proxy:
    """Passes every connection on to a target, until it is told otherwise."""

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
        """The same URL with the proxy in place of the host that it names."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{user}{at}127.0.0.1:{self.port}").geturl()

    def refuse(self) -> None:
        """Refuse new connections. Those that are open stay as they are."""
        self._run(self._refuse())

    def allow(self) -> None:
        """Take connections again, on the same port."""
        self._run(self._allow())

    def cut(self) -> None:
        """Reset every open connection, on both sides."""
        self._run(self._cut())

    def hang(self) -> None:
        """Take connections and keep them, and pass nothing either way: not even that one side has left."""
        self._run(self._pass_on(False))

    def pass_on(self) -> None:
        """Pass everything on again, what was held back first."""
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

    # In the loop's thread.

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
        await asyncio.sleep(0)  # a task that has not begun can't clean up
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)

    def _accept(self) -> None:
        """Take all who are in the queue: they are connected already, as far as they can tell."""
        with contextlib.suppress(BlockingIOError):
            while self._listener is not None:
                accepted, _ = self._listener.accept()
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                task = self._loop.create_task(self._link(accepted))
                self._open.add(task)
                task.add_done_callback(self._open.discard)

    async def _link(self, accepted: socket.socket) -> None:
        """One connection. When a side leaves, the other is told so; whatever else ends it is a reset for both."""
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
