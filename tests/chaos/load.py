"""The clients: create timers at a steady rate through all instances in turn, move some, cancel some, and record every
response.

Requests are random but depend only on the seed and their order. A create is repeated with the same id until it gets a
response, as a careful client would do; a change is sent once. Up to a bound, the rate does not wait for responses.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from duetime.sharding import shard_of
from tests.chaos.clients import Answer, Clients
from tests.chaos.cluster import SHARDS, Member
from tests.chaos.ledger import Asked, Ledger, Promise, Said
from tests.chaos.receiver import AGAIN
from tests.servers import printed

AHEAD_SECONDS = (0.5, 6.0)
CANCELED, MOVED, MOVED_AND_CANCELED, REPEATED = 0.05, 0.05, 0.02, 0.05
CHANGE_SECONDS = (-0.8, 0.03)  # around the instant at which the timer is due
CALLBACK_TIMEOUT_SECONDS = 3
OPEN_MAX = 600
TRIES_MAX = 80


class Plan(NamedTuple):
    """One timer and the plan for it."""

    id: str
    ahead_seconds: float
    moved_ahead_seconds: float | None
    canceled: bool
    again: bool
    change_seconds: tuple[float, float]


class Load:
    def __init__(
        self, members: Sequence[Member], url: str, ledger: Ledger, *, seed: int, rate: float, ahead_seconds_max: float
    ) -> None:
        self._members = members
        self._url = url
        self._ledger = ledger
        self._draw = random.Random(f"load {seed}")
        self._rate = rate
        self._ahead = AHEAD_SECONDS[0], ahead_seconds_max
        self._clients = Clients()
        self.allowed: frozenset[int] = frozenset()
        """Additional statuses that the scenario allows."""
        self._turn = 0
        self._creating = True

    def stop(self) -> None:
        """Create no more timers; finish the ones in progress."""
        self._creating = False

    async def run(self) -> None:
        due = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            under_way: set[asyncio.Task[None]] = set()
            while self._creating:
                due = max(due + 1 / self._rate, time.monotonic() - 0.2)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if len(under_way) < OPEN_MAX:
                    task = tasks.create_task(self._live(self._plan()))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
        self._clients.close()

    def _plan(self) -> Plan:
        draw = self._draw
        fate = draw.random()
        moved = fate < MOVED + MOVED_AND_CANCELED
        canceled = MOVED <= fate < MOVED + MOVED_AND_CANCELED + CANCELED
        limit = MOVED + MOVED_AND_CANCELED + CANCELED
        return Plan(
            id=str(uuid.UUID(int=draw.getrandbits(128), version=4)),
            ahead_seconds=draw.uniform(*self._ahead),
            moved_ahead_seconds=draw.uniform(*self._ahead) if moved else None,
            canceled=canceled,
            again=limit <= fate < limit + REPEATED,
            change_seconds=(draw.uniform(*CHANGE_SECONDS), draw.uniform(*CHANGE_SECONDS)),
        )

    def _port(self) -> int:
        self._turn += 1
        return self._members[self._turn % len(self._members)].port

    async def _live(self, plan: Plan) -> None:
        at_ms = int((time.time() + plan.ahead_seconds) * 1000)
        shard = shard_of("default", plan.id, namespace_shards=SHARDS, shards=SHARDS)
        nothing = Asked(Said.NOTHING, time.time_ns(), time.time_ns(), at_ms)
        promise = Promise(plan.id, shard, nothing, firings=2 if plan.again else 1)
        self._ledger.add([promise])
        promise.created = await self.create(plan, at_ms)
        if not promise.acknowledged:
            return
        if plan.moved_ahead_seconds is not None:
            await self._until(at_ms, plan.change_seconds[0])
            at_ms = int((time.time() + plan.moved_ahead_seconds) * 1000)
            # From now on, the request may have taken effect, whatever its response.
            promise.updates.append(Asked(Said.NOTHING, time.time_ns(), time.time_ns(), at_ms))
            promise.updates[-1] = update = await self._update(plan.id, at_ms)
            if update.said is not Said.YES:
                return
        if plan.canceled:
            await self._until(at_ms, plan.change_seconds[1])
            promise.cancels.append(Asked(Said.NOTHING, time.time_ns(), time.time_ns()))
            promise.cancels[-1] = await self.cancel(plan.id, self._port())

    async def _until(self, at_ms: int, seconds: float) -> None:
        await asyncio.sleep(max(0.0, at_ms / 1000 + seconds - time.time()))

    async def create(self, plan: Plan, at_ms: int) -> Asked:
        body = {
            "id": plan.id,
            "executeAt": text(at_ms),
            "callbackUrl": self._url,
            "callbackTimeout": f"{CALLBACK_TIMEOUT_SECONDS}s",
            "payload": AGAIN if plan.again else None,
            "retryPolicy": {"maxRetries": 10, "initialInterval": "1s", "maxInterval": "2s"},
        }
        asked_ns = time.time_ns()
        open_ended = False
        for _ in range(TRIES_MAX):
            answer = await self._clients.ask(self._port(), "POST", "/api/v1/timers", body)
            self._note("create", answer, {200, 400})
            if answer is not None and answer.status == 200:
                return Asked(Said.YES, asked_ns, time.time_ns(), at_ms)
            if answer is not None and answer.status < 500:
                break
            open_ended = True
            await asyncio.sleep(0.1 if answer is None else int(answer.headers.get(b"retry-after", b"1")))
        return Asked(Said.NOTHING if open_ended else Said.NO, asked_ns, time.time_ns(), at_ms)

    async def _update(self, id: str, at_ms: int) -> Asked:
        asked_ns = time.time_ns()
        path = f"/api/v1/timers/default/{id}"
        answer = await self._clients.ask(self._port(), "PUT", path, {"executeAt": text(at_ms)})
        self._note("update", answer, {200, 400, 409})
        return Asked(_said(answer), asked_ns, time.time_ns(), at_ms)

    async def cancel(self, id: str, port: int) -> Asked:
        """Cancels through the platform API, which refuses to cancel a finished timer; here it would delete it."""
        asked_ns = time.time_ns()
        answer = await self._clients.ask(port, "DELETE", f"/timers/{id}")
        self._note("cancel", answer, {200, 400})
        return Asked(_said(answer), asked_ns, time.time_ns())

    def _note(self, what: str, answer: Answer | None, expected: set[int]) -> None:
        status = None if answer is None else answer.status
        self._ledger.answers[f"{what} {status or 'without an answer'}"] += 1
        if answer is None or status in expected | self.allowed:
            return
        if status != 503:
            self._ledger.odd.append(f"{what} was answered with {status}: {answer.body}")
        elif b"retry-after" not in answer.headers:
            self._ledger.odd.append(f"{what} was answered with 503 and no Retry-After")


def _said(answer: Answer | None) -> Said:
    if answer is None or answer.status >= 500:
        return Said.NOTHING
    return Said.YES if answer.status < 300 else Said.NO


def text(at_ms: int) -> str:
    return printed(datetime.fromtimestamp(at_ms / 1000, UTC))
