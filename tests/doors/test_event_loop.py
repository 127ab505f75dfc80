"""No request blocks the event loop, whatever its body contains: the tests measure the longest stall."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from duetime.node import Node
from duetime.settings import Settings

pytestmark = pytest.mark.alone

KEY = "k" * 32
MIB = 1024 * 1024
BATCH = "/api/v1/timers/batch"
CREATE = "/api/v1/timers"
PLATFORM = "/timers"
STALL_SECONDS_MAX = 0.1
"""Measured in CPU time, so that other processes do not count."""
TICK_SECONDS = 0.002
PATIENCE_SECONDS = 60


class Stalls:
    """Measures the longest time between two rounds of the event loop, in CPU time of this process."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        while True:
            before = time.process_time()
            await asyncio.sleep(TICK_SECONDS)
            self.longest = max(self.longest, time.process_time() - before)


@pytest.fixture
def interpreter() -> Iterator[None]:
    """Restores the settings of the interpreter that a node changes."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)
    gc.unfreeze()


Send = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]


def measured(directory: Path, scene: Callable[[Send, Stalls], Awaitable[None]]) -> None:
    async def run() -> None:
        settings = Settings(
            database_url=f"sqlite:///{directory}/timers.db", api_key=KEY, port=0, allow_private_targets=True
        )
        node = Node(settings)

        async def send(path: str, body: bytes) -> tuple[int, bytes]:
            reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
            head = f"POST {path} HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nConnection: close\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
            # The client runs on the same loop, so it writes small pieces to cause no stalls itself.
            for at in range(0, len(body), MIB):
                writer.write(body[at : at + MIB])
                await writer.drain()
            pieces = []
            while piece := await reader.read(MIB):
                pieces.append(piece)
            writer.close()
            return int(pieces[0][9:12]), b"".join(pieces)

        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(node.run())
            await node.started.wait()
            stalls = Stalls()
            watching = tasks.create_task(stalls.watch())
            await asyncio.wait_for(scene(send, stalls), PATIENCE_SECONDS)
            watching.cancel()
            node.stop()
            await running

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def timer(payload: bytes, url: str = "http://127.0.0.1:9/x", id: str = "") -> bytes:
    named = f'"id":"{id}",' if id else ""
    return f'{{"delay":"1h",{named}"callbackUrl":"{url}","payload":'.encode() + payload + b"}"


def batch(*timers: bytes) -> bytes:
    return b'{"timers":[' + b",".join(timers) + b"]}"


def deep(size: int) -> bytes:
    return b"[" + (b"[" * 58 + b"]" * 58 + b",") * (size // 117) + b"1]"


LARGE = 15 * MIB
ONE = 250 * 1024
"""Nearly the largest size of a timer."""


def many(payload: bytes, count: int, name: str = "") -> bytes:
    """A batch of timers with this payload; a name gives them ids, so that the service computes fingerprints."""
    return batch(*[timer(payload, id=name and f"{name}{n}") for n in range(count)])


def destinations() -> bytes:
    return batch(*[timer(b"1", f"http://127.0.{n % 256}.{n // 256 + 1}/") for n in range(1000)])


BATCHES: dict[str, tuple[int, Callable[[], bytes]]] = {
    "escapes": (200, lambda: many(b'"' + b"\\u00e9" * (LARGE // 6000) + b'"', 1000, "escapes")),
    "escapes in objects": (200, lambda: many(b"[" + b'{"\\u00e9":"\\":"},' * (ONE // 17) + b"1]", 12)),
    "escaped quotes and colons": (200, lambda: many(b'["' + b'\\":' * (ONE // 3) + b'"]', 12)),
    "deep": (200, lambda: many(deep(ONE), 4, "deep")),
    "many keys": (200, lambda: many(json.dumps(dict.fromkeys(range(20_000), 1)).encode(), 4)),
    "many destinations": (200, destinations),
    "large strings": (200, lambda: many(b'"' + b"x" * ONE + b'"', 60)),
    "invalid at the end": (200, lambda: many(b'"' + b"x" * ONE + b'\xff"', 60)),
    "long numbers": (200, lambda: many(b"[" + (b"1" * 300 + b",") * (ONE // 301) + b"1]", 12)),
    "one string": (400, lambda: b'"' + b"x" * LARGE + b'"'),
    "one timer too large": (200, lambda: many(b'"' + b"\\u00e9" * (LARGE // 6) + b'"', 1)),
    "numbers": (400, lambda: b'{"timers":[' + b"1," * (LARGE // 2) + b"1]}"),
    "lists": (400, lambda: b'{"timers":[' + b"[]," * (LARGE // 3) + b"1]}"),
    "open brackets": (400, lambda: b"[" * LARGE),
    "open brackets as timers": (400, lambda: b'{"timers":' + b"[" * LARGE),
    "blanks": (400, lambda: b" " * LARGE),
    "many unknown keys": (400, lambda: b"{" + b",".join(b'"%d":0' % n for n in range(500_000)) + b"}"),
    "escapes in a key": (400, lambda: b'{"' + b"\\u0074" * (LARGE // 6) + b'":[]}'),
    "invalid byte after the batch": (400, lambda: many(b'"' + b"x" * ONE + b'"', 60) + b"\xff"),
}
CREATES: dict[str, Callable[[], bytes]] = {
    "deep": lambda: deep(ONE),
    "small objects": lambda: b"[" + b'{"":"\\":"},' * (ONE // 11) + b"1]",
    "empty objects": lambda: b"[" + b"{}," * (ONE // 3) + b'{"a":"\\":"}]',
    "numbers": lambda: b"[" + b"1," * (ONE // 2) + b"1]",
}


@pytest.mark.usefixtures("interpreter")
def test_no_batch_blocks_the_event_loop(tmp_path: Path) -> None:
    async def scene(send: Send, stalls: Stalls) -> None:
        found = {}
        for name, (status, make) in BATCHES.items():
            body = make()
            await asyncio.sleep(0.01)
            stalls.longest = 0.0
            got, response = await send(BATCH, body)
            found[name] = round(stalls.longest, 3)
            assert got == status, (name, response[-300:])
            del body, response
        assert max(found.values()) < STALL_SECONDS_MAX, found

    measured(tmp_path, scene)


@pytest.mark.usefixtures("interpreter")
def test_no_create_blocks_the_event_loop(tmp_path: Path) -> None:
    async def scene(send: Send, stalls: Stalls) -> None:
        found = {}
        for name, make in CREATES.items():
            payload = make()
            at = b'"execute_at":"2099-01-01T00:00:00Z","callback_url":"http://127.0.0.1:9/x","idempotency_key":"%b"'
            bodies = {
                CREATE: timer(payload, id=name),
                PLATFORM: b"{" + at % name.encode() + b',"callback_payload":' + payload + b"}",
            }
            for path, body in bodies.items():
                await asyncio.sleep(0.01)
                stalls.longest = 0.0
                got, response = await send(path, body)
                found[path, name] = round(stalls.longest, 3)
                assert got in (200, 201), (path, name, response[-300:])
        assert max(found.values()) < STALL_SECONDS_MAX, found

    measured(tmp_path, scene)


PATHS = {
    "slashes": "/" * 60_000,
    "segments": "/a" * 30_000,
    "known, then slashes": f"{CREATE}{'/' * 60_000}x",
    "one long segment": f"{CREATE}/{'a' * 60_000}",
}


@pytest.mark.usefixtures("interpreter")
def test_no_unknown_path_blocks_the_event_loop(tmp_path: Path) -> None:
    async def scene(send: Send, stalls: Stalls) -> None:
        found = {}
        for name, path in PATHS.items():
            await asyncio.sleep(0.01)
            stalls.longest = 0.0
            got, response = await send(path, b"")
            found[name] = round(stalls.longest, 3)
            assert got == 404, (name, response[-300:])
        assert max(found.values()) < STALL_SECONDS_MAX, found

    measured(tmp_path, scene)
