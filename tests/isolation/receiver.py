"""A callback receiver in its own process: quick, slow, or silent, on any number of loopback addresses.

The process reads its plan from the command line and prints its ports as one line of JSON. It then answers each command
on stdin with one line of JSON, and exits when stdin is closed. It records when each request arrived, by the machine's
wall clock, and the request's ``"due":<13 digits>``. A silent receiver accepts connections and reads the requests, but
never responds.

It also runs a plain sleep loop and records how late each wake-up was. That is the noise of the machine: no service can
be more punctual.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Any, cast

import uvloop

from tests.servers import PATIENCE_SECONDS

ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{"ok":true}'
BACKLOG = 4096
NOISE_STEP_SECONDS = 0.01
_LENGTH = b"Content-Length: "
_DUE = b'"due":'


class ReceiverProcess:
    """Starts the process and talks to it. ``delay_seconds`` is how long it takes to respond, None for never."""

    def __init__(self, hosts: Sequence[str] = ("127.0.0.1",), *, delay_seconds: float | None = 0.0) -> None:
        plan = json.dumps({"hosts": list(hosts), "delay_seconds": delay_seconds})
        self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, plan], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            ports = self._answer()["ports"]
        except BaseException:
            self.close()
            raise
        self.port: int = ports[0]
        self.urls = [f"http://{host}:{port}/" for host, port in zip(hosts, ports, strict=True)]
        self.url = self.urls[0]

    def reset(self) -> None:
        """Forget the noise and all arrivals."""
        self._ask("reset")

    def count(self) -> int:
        """The number of requests that have arrived."""
        count: int = self._ask("count")["count"]
        return count

    def arrivals(self) -> dict[int, float]:
        """Due time in milliseconds → arrival of the first request with it."""
        first: dict[int, float] = {}
        for due, at_ns in self._ask("arrivals")["arrivals"]:
            first.setdefault(due, at_ns / 1e6)
        return first

    def noise_ms(self) -> list[float]:
        """How late each wake-up of the sleep loop was since the reset, ascending."""
        noise: list[float] = self._ask("noise")["noise_ms"]
        return sorted(noise)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(PATIENCE_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def __enter__(self) -> ReceiverProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the receiver ended with {self._process.poll()}"
        answer: dict[str, Any] = json.loads(line)
        return answer


def raise_descriptor_limit() -> None:
    """Raise the limit on open files of this process and its children to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# --- in the process ------------------------------------------------------------------------------------------------


class _Log:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.at_ns = array("q")
        self.due_ms = array("q")
        self.noise_ms: list[float] = []

    async def watch_noise(self) -> None:
        while True:
            expected = time.perf_counter() + NOISE_STEP_SECONDS
            await asyncio.sleep(NOISE_STEP_SECONDS)
            self.noise_ms.append((time.perf_counter() - expected) * 1000)


class _Connection(asyncio.Protocol):
    """Duetime sends the next request on a connection only after the response to the previous one."""

    def __init__(self, log: _Log, delay_seconds: float | None) -> None:
        self._log = log
        self._delay_seconds = delay_seconds
        self._partial = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        at_ns = time.time_ns()
        data = self._partial + data
        end = data.find(b"\r\n\r\n")
        length = data.find(_LENGTH) + len(_LENGTH)
        if end < 0 or len(data) < end + 4 + int(data[length : data.find(b"\r", length)]):
            self._partial = data
            return
        self._partial = b""
        due = data.find(_DUE, end)
        self._log.at_ns.append(at_ns)
        self._log.due_ms.append(int(data[due + 6 : due + 19]) if due > 0 else 0)
        if self._delay_seconds == 0:
            self._transport.write(ANSWER)
        elif self._delay_seconds is not None:
            asyncio.get_running_loop().call_later(self._delay_seconds, self._send)

    def _send(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(ANSWER)


async def _serve(hosts: Sequence[str], delay_seconds: float | None) -> None:
    loop = asyncio.get_running_loop()
    log = _Log()
    servers = [
        await loop.create_server(lambda: _Connection(log, delay_seconds), host, 0, backlog=BACKLOG) for host in hosts
    ]
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    watching = asyncio.create_task(log.watch_noise())
    gc.disable()
    _print({"ports": [server.sockets[0].getsockname()[1] for server in servers]})
    async for line in lines:
        match line.decode().strip():
            case "reset":
                log.reset()
                _print({})
            case "count":
                _print({"count": len(log.at_ns)})
            case "arrivals":
                _print({"arrivals": list(zip(log.due_ms, log.at_ns, strict=True))})
            case "noise":
                _print({"noise_ms": log.noise_ms})
    watching.cancel()


def _print(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(**json.loads(sys.argv[1])))
