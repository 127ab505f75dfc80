"""Shared by the programs of the Python peers: mainly the client that schedules timers as told on stdin, one JSON line
each. ``program.mjs`` speaks the same lines.

These programs run in their own environment and import nothing of Duetime.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

IN_FLIGHT = 64
BATCHES_IN_FLIGHT = 2
GRANT_WAIT_SECONDS = 0.002
HEADERS = {"Content-Type": "application/json", "X-Tenant": "acme"}

Timer = dict[str, Any]


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def body_of(timer: Timer) -> bytes:
    """The body to POST, without blanks: the receiver looks for ``"due":`` and digits."""
    return json.dumps(timer["payload"], separators=(",", ":")).encode()


def due_at(timer: Timer) -> float:
    """When the timer is due, as a Unix time in seconds."""
    return float(timer["payload"]["due"] / 1000)


class Order:
    """One order to schedule timers, handed out to callers in parts."""

    def __init__(self, ask: dict[str, Any]) -> None:
        self.granted = ask["granted"]
        self.batch: int = ask["batch"]
        self._ask = ask
        self._lock = threading.Lock()
        self._taken = 0
        self._started = time.monotonic()

    @property
    def callers(self) -> int:
        callers = IN_FLIGHT if self.batch == 1 else BATCHES_IN_FLIGHT
        return callers if self._ask["count"] is None else min(callers, self._ask["count"])

    def take(self) -> list[Timer] | None:
        """The next timers to schedule; none while no budget is granted, None at the end."""
        ask = self._ask
        with self._lock:
            if ask["seconds"] is not None and time.monotonic() - self._started >= ask["seconds"]:
                return None
            size = self.batch if ask["count"] is None else min(self.batch, ask["count"] - self._taken)
            if size <= 0:
                return None
            if self.granted is not None and self._taken + size > self.granted:
                return []
            first = self._taken
            self._taken += size
        due = round(time.time() * 1000) + ask["lead_ms"] if ask["due"] is None else ask["due"] + first * ask["step_ms"]
        payload = {
            "due": due,
            "order": "8f14e45f-ceea-467f",
            "note": "remind the customer that the basket is still there",
        }
        return [{"url": ask["url"], "payload": payload} for _ in range(size)]

    def done(self) -> dict[str, Any]:
        return {"count": self._taken, "seconds": time.monotonic() - self._started}


def client(
    version: str,
    *,
    schedule: Callable[[Timer], object],
    schedule_many: Callable[[Sequence[Timer]], object] | None = None,
    left: Callable[[], int],
    threads: int = IN_FLIGHT,
) -> None:
    """Answer the lines on stdin, with blocking calls in threads."""

    def caller(order: Order) -> None:
        while (timers := order.take()) is not None:
            if not timers:
                time.sleep(GRANT_WAIT_SECONDS)
            elif order.batch == 1:
                schedule(timers[0])
            else:
                assert schedule_many is not None
                schedule_many(timers)

    def ordered(order: Order) -> None:
        callers = [threading.Thread(target=guarded, args=(order,)) for _ in range(min(threads, order.callers))]
        for one in callers:
            one.start()
        for one in callers:
            one.join()
        say(order.done())

    def guarded(order: Order) -> None:
        try:
            caller(order)
        except BaseException as error:
            fail(error)

    order: Order | None = None
    say({"version": version})
    for line in sys.stdin:
        match json.loads(line):
            case {"what": "grant", "total": total}:
                assert order is not None
                order.granted = total
            case {"what": "left"}:
                say({"left": left()})
            case {"what": "schedule"} as ask:
                order = Order(ask)
                threading.Thread(target=ordered, args=(order,)).start()
    os._exit(0)  # a scheduler of the peer may still be at work in this process


async def async_client(
    version: str,
    *,
    schedule: Callable[[Timer], Awaitable[object]],
    schedule_many: Callable[[Sequence[Timer]], Awaitable[object]] | None = None,
    left: Callable[[], Awaitable[int]],
) -> None:
    """Answer the lines on stdin, with coroutines."""

    async def caller(order: Order) -> None:
        while (timers := order.take()) is not None:
            if not timers:
                await asyncio.sleep(GRANT_WAIT_SECONDS)
            elif order.batch == 1:
                await schedule(timers[0])
            else:
                assert schedule_many is not None
                await schedule_many(timers)

    async def ordered(order: Order) -> None:
        try:
            await asyncio.gather(*(caller(order) for _ in range(order.callers)))
        except BaseException as error:
            fail(error)
        say(order.done())

    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    order: Order | None = None
    running: asyncio.Task[None] | None = None
    say({"version": version})
    async for line in lines:
        match json.loads(line):
            case {"what": "grant", "total": total}:
                assert order is not None
                order.granted = total
            case {"what": "left"}:
                say({"left": await left()})
            case {"what": "schedule"} as ask:
                order = Order(ask)
                running = asyncio.create_task(ordered(order))
    if running is not None:
        running.cancel()


def working() -> None:
    """Report that the worker is running."""
    say({"ready": True})


def fail(error: BaseException) -> None:
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(1)
