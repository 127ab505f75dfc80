"""The load generator, a process: N connections that each send the next request as soon as the response has arrived.

Reads one line of JSON (``Plan``) from stdin and writes one (``Result``) to stdout. It parses responses as little as
possible, so that it uses much less CPU than the server under load.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from array import array
from collections import Counter
from typing import cast

import msgspec
import uvloop
from msgspec import Struct

from bench.series import BUCKET_SECONDS, buckets, percentile
from duetime.timetext import format_time

DRAIN_SECONDS_MAX = 30.0
_HEAD_END = b"\r\n\r\n"
_LENGTH = b"ontent-length: "


class Plan(Struct):
    """``body`` may contain ``{at}`` and ``{due}``, the instant ``ahead_ms`` after sending, as a text and a number."""

    port: int
    path: str
    connections: int
    seconds: float
    body: str
    headers: dict[str, str] = {}
    ahead_ms: int = 0
    answers_max: int = 1_000_000


class Result(Struct):
    answers: int
    statuses: dict[str, int]
    seconds: float
    per_second: float
    cpu_seconds: float
    p50_ms: float
    p99_ms: float
    started_at: float  # wall clock, where the buckets begin
    bucket_seconds: float
    buckets: list[int]  # answers in each


class Run:
    """The state that the connections share."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.statuses: Counter[bytes] = Counter()
        self.answered_at = array("d")
        self.latencies = array("d")
        self.open = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._requests: list[bytes] = []
        self.started = self.until = 0.0

    def begin(self) -> None:
        """Build the bodies, one for each millisecond if they contain the time, and start the clock."""
        plan = self.plan
        head = "".join(f"{name}: {value}\r\n" for name, value in plan.headers.items())

        def request(at: int) -> bytes:
            body = plan.body.replace("{at}", format_time(at)).replace("{due}", str(at))
            return (
                f"POST {plan.path} HTTP/1.1\r\nHost: 127.0.0.1:{plan.port}\r\nContent-Type: application/json\r\n"
                f"{head}Content-Length: {len(body)}\r\n\r\n{body}"
            ).encode()

        moments = int(plan.seconds * 1000) + 1000 if plan.ahead_ms else 1
        first_at = int(time.time() * 1000) + plan.ahead_ms
        self._requests = [request(first_at + ms) for ms in range(moments)]
        # Building took a while; the table is as long as the run plus a second, and begins when it was begun.
        self._base = time.perf_counter() - (time.time() * 1000 + plan.ahead_ms - first_at) / 1000
        self.started = time.perf_counter()
        self.started_at = time.time()
        self.until = self.started + plan.seconds

    def next(self, now: float) -> bytes:
        if not self.plan.ahead_ms:
            return self._requests[0]
        return self._requests[min(int((now - self._base) * 1000), len(self._requests) - 1)]

    def closed(self) -> None:
        self.open -= 1
        if not self.open and not self.done.done():
            self.done.set_result(None)


class Connection(asyncio.Protocol):
    def __init__(self, run: Run) -> None:
        self._run = run
        self._transport: asyncio.Transport | None = None
        self._sent = 0.0
        self._partial = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._run.open += 1

    def send(self) -> None:
        assert self._transport is not None
        self._sent = now = time.perf_counter()
        self._transport.write(self._run.next(now))

    def data_received(self, data: bytes) -> None:
        if self._partial:
            data = self._partial + data
        end = data.find(_HEAD_END)
        at = data.find(_LENGTH)
        if end < 0 or at < 0 or len(data) < end + 4 + int(data[at + 15 : data.find(b"\r", at)]):
            self._partial = data
            return
        self._partial = b""
        run = self._run
        now = time.perf_counter()
        run.statuses[data[9:12]] += 1
        run.answered_at.append(now)
        run.latencies.append(now - self._sent)
        assert self._transport is not None
        if now < run.until and len(run.latencies) < run.plan.answers_max:
            self._sent = now
            self._transport.write(run.next(now))
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._run.closed()


async def run(plan: Plan) -> Result:
    loop = asyncio.get_running_loop()
    work = Run(plan)
    made = [loop.create_connection(lambda: Connection(work), "127.0.0.1", plan.port) for _ in range(plan.connections)]
    connections = [protocol for _, protocol in await asyncio.gather(*made)]
    gc.collect()
    gc.disable()
    work.begin()
    cpu = time.process_time()
    for connection in connections:
        connection.send()
    try:
        await asyncio.wait_for(work.done, plan.seconds + DRAIN_SECONDS_MAX)
    except TimeoutError:
        print("load: some answers never came", file=sys.stderr)
    answers = len(work.answered_at)
    seconds = (max(work.answered_at) if answers else time.perf_counter()) - work.started
    latencies = sorted(work.latencies)
    return Result(
        answers=answers,
        statuses={status.decode("latin-1"): count for status, count in work.statuses.items()},
        seconds=seconds,
        per_second=answers / seconds,
        cpu_seconds=time.process_time() - cpu,
        p50_ms=percentile(latencies, 50) * 1000,
        p99_ms=percentile(latencies, 99) * 1000,
        started_at=work.started_at,
        bucket_seconds=BUCKET_SECONDS,
        buckets=buckets(at - work.started for at in work.answered_at),
    )


def main() -> None:
    plan = msgspec.json.decode(sys.stdin.buffer.readline(), type=Plan)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(run(plan))
    os.write(1, msgspec.json.encode(result) + b"\n")


if __name__ == "__main__":
    main()
