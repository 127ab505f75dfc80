"""Several processes on one port: starts them, starts another for one that dies, and ends them together.

The parent opens the port and does nothing else with it. A worker's standard input is a pipe that only the parent holds:
when the parent is gone, however it went, the pipe ends and the workers drain.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from duetime.clock import SystemClock

log = logging.getLogger("duetime")

SETTLED_SECONDS = 10.0
"""A worker that lived this long did not die of its start: the next one is started at once."""
AGAIN_SECONDS_MAX = 5.0
REFUSED_TO_START = 2
"""The exit code of a worker that can't work with these settings: another one would not either."""


class Place(Struct, frozen=True):
    """A worker's place among the others."""

    name: str
    listener: socket.socket
    siblings: Path  # where each has a socket for the others


class Workers:
    def __init__(self, count: int, listener: socket.socket, siblings: Path) -> None:
        self._count = count
        self._listener = listener
        self._siblings = siblings
        self._clock = SystemClock()
        self._running: set[asyncio.subprocess.Process] = set()
        self._stopping = asyncio.Event()

    def stop(self, number: int) -> None:
        log.info("%s: the workers finish what is in flight, then stop", signal.Signals(number).name)
        self._stopping.set()
        for worker in self._running:
            self._end(worker)

    async def run(self) -> int:
        """Keep the workers running until ``stop``; the exit code for all of them."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, number)
        codes = await asyncio.gather(*(self._keep(number) for number in range(1, self._count + 1)))
        log.info("stopped")
        return max(codes)

    async def _keep(self, number: int) -> int:
        """One worker after the other; the exit code of the last."""
        again_seconds = 0.1
        while True:
            began = self._clock.monotonic()
            code = await self._work(number)
            if code == REFUSED_TO_START and not self._stopping.is_set():
                self.stop(signal.SIGTERM)
            if self._stopping.is_set():
                # One that was told to stop before it knew how to drain had nothing in flight.
                return 0 if code == -signal.SIGTERM else abs(code)
            if self._clock.monotonic() - began > SETTLED_SECONDS:
                again_seconds = 0.1
            log.error("worker %d ended with %d: starting another", number, code)
            await self._clock.sleep(again_seconds, self._stopping)
            again_seconds = min(2 * again_seconds, AGAIN_SECONDS_MAX)

    async def _work(self, number: int) -> int:
        if self._stopping.is_set():
            return 0
        descriptor = self._listener.fileno()
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "duetime", "serve", "--worker", str(number)),
            *("--listener", str(descriptor), "--siblings", str(self._siblings)),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=[descriptor],
            start_new_session=True,  # Ctrl-C is for the parent, which tells the workers.
        )
        self._running.add(worker)
        try:
            if self._stopping.is_set():
                self._end(worker)
            return await worker.wait()
        finally:
            self._running.discard(worker)

    def _end(self, worker: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):  # it has ended, and is about to be noticed
            worker.send_signal(signal.SIGTERM)
