"""Runs several worker processes on one port: starts them, restarts those that die, and stops them together.

The parent only opens the port. The standard input of a worker is a pipe that only the parent holds: when the parent
ends, even by a crash, the pipe closes and the workers drain.
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
"""A worker that ran this long did not fail at startup: restart it without backoff."""
RETRY_SECONDS_MAX = 5.0
REFUSED_TO_START = 2
"""The exit code of a worker that rejects its settings: restarting it would not help."""


class WorkerContext(Struct, frozen=True):
    """The arguments of a worker process."""

    name: str
    listener: socket.socket
    metrics_directory: Path  # with a socket of each worker, see ``worker_metrics``


class Workers:
    def __init__(self, count: int, listener: socket.socket, metrics_directory: Path) -> None:
        self._count = count
        self._listener = listener
        self._metrics_directory = metrics_directory
        self._clock = SystemClock()
        self._running: set[asyncio.subprocess.Process] = set()
        self._stopping = asyncio.Event()

    def stop(self, number: int) -> None:
        log.info("%s: the workers finish attempts in flight, then stop", signal.Signals(number).name)
        self._stopping.set()
        for worker in self._running:
            self._end(worker)

    async def run(self) -> int:
        """Keep the workers running until ``stop``; returns the exit code of the whole service."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop, number)
        codes = await asyncio.gather(*(self._keep(number) for number in range(1, self._count + 1)))
        log.info("stopped")
        return max(codes)

    async def _keep(self, number: int) -> int:
        """Run one worker, restarting it when it dies; returns the last exit code."""
        retry_seconds = 0.1
        while True:
            began = self._clock.monotonic()
            code = await self._work(number)
            if code == REFUSED_TO_START and not self._stopping.is_set():
                self.stop(signal.SIGTERM)
            if self._stopping.is_set():
                # A worker killed by SIGTERM had not installed its handler yet, so it had nothing in flight.
                return 0 if code == -signal.SIGTERM else abs(code)
            if self._clock.monotonic() - began > SETTLED_SECONDS:
                retry_seconds = 0.1
            log.error("worker %d exited with code %d: restarting it", number, code)
            await self._clock.sleep(retry_seconds, self._stopping)
            retry_seconds = min(2 * retry_seconds, RETRY_SECONDS_MAX)

    async def _work(self, number: int) -> int:
        if self._stopping.is_set():
            return 0
        descriptor = self._listener.fileno()
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "duetime", "serve", "--worker", str(number)),
            *("--listener", str(descriptor), "--metrics-directory", str(self._metrics_directory)),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=[descriptor],
            start_new_session=True,  # Ctrl-C goes only to the parent, which stops the workers
        )
        self._running.add(worker)
        try:
            if self._stopping.is_set():
                self._end(worker)
            return await worker.wait()
        finally:
            self._running.discard(worker)

    def _end(self, worker: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):  # it has ended already
            worker.send_signal(signal.SIGTERM)
