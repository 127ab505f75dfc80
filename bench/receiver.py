"""The callback receiver, a process: responds with 200 to everything and records when each request arrived and was due.

It prints its port as JSON, then answers each command line on stdin with one line of JSON: ``reset``, ``wait COUNT
SECONDS`` (until this many have arrived since the reset), ``report``. A request with ``"due":<13 digits>`` in its body
counts with its lateness; ``lateness_ms`` of the report has its percentiles from 0 to 100.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from array import array
from typing import Any, cast

import msgspec
import uvloop

from bench.series import BUCKET_SECONDS, buckets, percentile, percentiles

ANSWER = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n{"ok":true}'
LOOK_SECONDS = 0.005
_HEAD_END = b"\r\n\r\n"
_LENGTH, _LENGTH_SMALL = b"Content-Length: ", b"content-length: "  # Duetime, wrk and most; some of the peers
_DUE = b'"due":'


class Arrivals:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.at_ns = array("q")
        self.due_ms = array("q")
        self.cpu = time.process_time()

    def report(self) -> dict[str, Any]:
        count = len(self.at_ns)
        lateness = sorted(at / 1e6 - due for at, due in zip(self.at_ns, self.due_ms, strict=True) if due)
        first, last = (min(self.at_ns) / 1e9, max(self.at_ns) / 1e9) if count else (0.0, 0.0)
        return {
            "count": count,
            "first_at": first,
            "last_at": last,
            "first_due_at": min((due for due in self.due_ms if due), default=0) / 1e3,
            "per_second": (count - 1) / (last - first) if last > first else 0.0,
            "p50_ms": percentile(lateness, 50),
            "p99_ms": percentile(lateness, 99),
            "p999_ms": percentile(lateness, 99.9),
            "lateness_ms": percentiles(lateness),
            "least_ms": lateness[0] if lateness else 0.0,
            "most_ms": lateness[-1] if lateness else 0.0,
            "cpu_seconds": time.process_time() - self.cpu,
            "bucket_seconds": BUCKET_SECONDS,
            "buckets": buckets(at / 1e9 - first for at in self.at_ns),
        }


class Connection(asyncio.Protocol):
    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._partial = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        at_ns = time.time_ns()
        if self._partial:
            data = self._partial + data
        end = data.find(_HEAD_END)
        length = data.find(_LENGTH)
        if length < 0:
            length = data.find(_LENGTH_SMALL)
        if end < 0 or len(data) < end + 4 + (int(data[length + 16 : data.find(b"\r", length)]) if length > 0 else 0):
            self._partial = data
            return
        self._partial = b""
        due = data.find(_DUE, end)
        arrivals = self._arrivals
        arrivals.at_ns.append(at_ns)
        arrivals.due_ms.append(int(data[due + 6 : due + 19]) if due > 0 else 0)
        self._transport.write(ANSWER)


async def _until(arrivals: Arrivals, count: int, seconds: float) -> int:
    until = time.monotonic() + seconds
    while len(arrivals.at_ns) < count and time.monotonic() < until:  # noqa: ASYNC110  (an event would cost each request)
        await asyncio.sleep(LOOK_SECONDS)
    return len(arrivals.at_ns)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    arrivals = Arrivals()
    server = await loop.create_server(lambda: Connection(arrivals), "127.0.0.1", 0, backlog=4096)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer)
    gc.disable()
    _say({"port": server.sockets[0].getsockname()[1]})
    async for line in lines:
        match line.decode().split():
            case ["reset"]:
                arrivals.reset()
                _say({"count": 0})
            case ["wait", count, seconds]:
                _say({"count": await _until(arrivals, int(count), float(seconds))})
            case ["report"]:
                _say(arrivals.report())
    server.close()


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve())
