"""Streamed responses over a real socket, to clients that read, that disconnect and that do not read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest

from duetime.doors.http import Application, Handler, Request, Response, Stream
from duetime.doors.server import Server, bind

PIECE = b"x" * 65_536
GET = b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n"


class StreamDoor:
    """Streams the pieces that a test puts into a queue, or endless ones."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.endless = False
        self.written = 0
        self.closed = asyncio.Event()

    def routes(self) -> dict[str, dict[str, Handler]]:
        return {"/stream": {"GET": self.stream}}

    def refusal(self, error: Exception) -> Response:
        raise AssertionError from error

    async def stream(self, request: Request) -> Response:
        return Stream(self._pieces(), ((b"content-type", b"text/plain"),))

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                if self.endless:
                    self.pieces.put_nowait(PIECE)
                    await asyncio.sleep(0)
                piece = await self.pieces.get()
                if piece is None:
                    return
                self.written += 1
                yield piece
        finally:
            self.closed.set()


Scene = Callable[[StreamDoor, int, Callable[[], None]], Coroutine[Any, Any, None]]


def play(scene: Scene) -> None:
    """Run a scene against a server, which must stop afterwards."""

    async def played() -> None:
        door = StreamDoor()
        serving = Server(Application([door], fallback=door, under={}))
        listener = bind("127.0.0.1", 0)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serving.serve(listener))
            await scene(door, listener.getsockname()[1], serving.stop)
            serving.stop()

    asyncio.run(asyncio.wait_for(played(), 30))


async def head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


def test_pieces_are_sent_at_once_and_the_connection_can_be_used_again() -> None:
    async def scene(door: StreamDoor, port: int, stop: Callable[[], None]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(GET)
            response = (await head(reader)).lower()
            assert (
                b"200 ok" in response
                and b"transfer-encoding: chunked" in response
                and b"content-length" not in response
            )
            assert b"content-security-policy" in response and b"nosniff" in response
            for word in (b"one", b"two"):
                door.pieces.put_nowait(word)
                assert await reader.readuntil(word + b"\r\n") == b"3\r\n" + word + b"\r\n"
            door.pieces.put_nowait(None)
            assert await reader.readuntil(b"\r\n\r\n") == b"0\r\n\r\n"
        writer.close()

    play(scene)


def test_head_of_a_stream_has_no_pieces() -> None:
    async def scene(door: StreamDoor, port: int, stop: Callable[[], None]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET.replace(b"GET", b"HEAD"))
        assert b"200 OK" in await head(reader)
        assert door.written == 0
        writer.close()

    play(scene)


def test_disconnected_client_ends_its_stream() -> None:
    async def scene(door: StreamDoor, port: int, stop: Callable[[], None]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET)
        await head(reader)
        writer.close()
        await door.closed.wait()

    play(scene)


def test_client_that_does_not_read_pauses_its_stream_and_does_not_prevent_a_stop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(door: StreamDoor, port: int, stop: Callable[[], None]) -> None:
        door.endless = True
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(GET)
        await head(reader)
        written = -1
        while written != door.written:  # until all buffers are full
            written = door.written
            await asyncio.sleep(0.2)
        assert not door.closed.is_set()
        stop()
        await door.closed.wait()
        writer.close()

    with caplog.at_level(logging.ERROR):
        play(scene)
    assert not caplog.records
