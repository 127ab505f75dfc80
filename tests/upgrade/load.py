"""Clients of all running instances: create timers at a steady rate, of which some are moved, some canceled, and some
fail at first; and the receiver of their callbacks. Records everything sent and received."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime

from duetime.client import InvalidSignature, verify_webhook
from tests.chaos.clients import Answer, Clients
from tests.servers import OK, Received, Receiver, Reply, printed
from tests.upgrade.program import Instance

NAMESPACES = ("default", "signed", "held")
AHEAD_SECONDS = (0.3, 2.5)
CANCELED, MOVED, REFUSED_AT_FIRST = 0.15, 0.3, 0.5
"""Cumulative shares of the timers with a special plan."""
TRIES_MAX = 100
NO = Reply(status=500, body=b"not yet")


@dataclass
class Timer:
    namespace: str
    id: str
    created: bool = False
    canceled_at: float | None = None  # when the cancel was acknowledged
    cancel_unknown: bool = False
    refused_at_first: bool = False


@dataclass
class Got:
    """What the receiver got for one timer: the time of each request, by delivery id."""

    requests: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class Load:
    def __init__(self, receiver: Receiver, *, rate: float, seed: int) -> None:
        self.serving: list[Instance] = []
        """The instances to use, in turn."""
        self.timers: dict[tuple[str, str], Timer] = {}
        self.got: dict[tuple[str, str], Got] = defaultdict(Got)
        self.wrong: list[str] = []
        self.answers: Counter[str] = Counter()
        self.secrets: dict[str, list[str]] = {}
        self._rate = rate
        self._draw = random.Random(seed)
        self._clients = Clients()
        self._turn = 0
        self._url = receiver.url("/due")
        self._going = True
        receiver.decide(self._receive)

    def stop(self) -> None:
        self._going = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while self._going:
                await asyncio.sleep(1 / self._rate)
                tasks.create_task(self.live(self._draw.choice(NAMESPACES)))
        self._clients.close()

    async def live(self, namespace: str, ahead_seconds: float | None = None) -> None:
        """Create a timer and carry out its random plan."""
        fate = self._draw.random()
        timer = Timer(namespace, f"t{len(self.timers)}", refused_at_first=MOVED <= fate < REFUSED_AT_FIRST)
        self.timers[namespace, timer.id] = timer
        seconds = self._draw.uniform(*AHEAD_SECONDS) if ahead_seconds is None else ahead_seconds
        body = {
            **{"namespace": namespace, "id": timer.id, "executeAt": _ahead(seconds), "callbackUrl": self._url},
            **{"payload": timer.refused_at_first, "callbackTimeout": "10s"},
            "retryPolicy": {"maxRetries": 5, "initialInterval": "300ms", "jitter": False},
        }
        answer = await self.ask("POST", "/timers", body)
        timer.created = answer is not None and answer.status in (200, 201)
        if not timer.created:
            self.wrong.append(f"{timer} was not created: {answer}")
            return
        await asyncio.sleep(max(0.0, seconds - self._draw.uniform(-0.1, 0.5)))
        path = f"/timers/{namespace}/{timer.id}"
        if fate < CANCELED:
            timer.cancel_unknown = True
            answer = await self.ask("POST", f"{path}/cancel", tries_max=1)
            if answer is not None and answer.status < 500:
                timer.cancel_unknown = False
                timer.canceled_at = time.time() if answer.status == 200 else None
        elif fate < MOVED:
            await self.ask("PUT", path, {"executeAt": _ahead(0.5)})

    async def ask(
        self, method: str, path: str, body: object = None, *, tries_max: int = TRIES_MAX, of: Instance | None = None
    ) -> Answer | None:
        """The response of this instance or the next; without a response, the request is repeated, perhaps on another
        one."""
        answer = None
        for _ in range(tries_max):
            self._turn += 1
            instance = of or self.serving[self._turn % len(self.serving)]
            answer = await self._clients.ask(instance.port, method, f"/api/v1{path}", body)
            self.answers[f"{method} {'nothing' if answer is None else answer.status}"] += 1
            if answer is not None and answer.status < 500:
                return answer
            if answer is not None and answer.status != 503:
                self.wrong.append(f"{method} {path} was answered with {answer.status}: {answer.body}")
            await asyncio.sleep(0.1)
        return answer

    def _receive(self, request: Received) -> Reply:
        body = json.loads(request.body)
        name = body["namespace"], body["id"]
        requests = self.got[name].requests[request.headers["webhook-id"]]
        requests.append(request.at_ns / 1e9)
        if name[0] in self.secrets:
            try:
                verify_webhook(self.secrets[name[0]], request.headers, request.body)
            except InvalidSignature as error:
                self.wrong.append(f"{name} came without a good signature: {error}")
        return NO if body["payload"] and len(requests) == 1 else OK

    def open_timers(self) -> list[Timer]:
        """Timers that are owed and have not arrived."""
        return [timer for timer in self.timers.values() if self._owed(timer) and not self._done(timer)]

    def _owed(self, timer: Timer) -> bool:
        return timer.created and timer.canceled_at is None and not timer.cancel_unknown

    def _done(self, timer: Timer) -> bool:
        requests = self.got[timer.namespace, timer.id].requests.values()
        return any(len(each) > timer.refused_at_first for each in requests)

    def violations(self) -> list[str]:
        """Timers that were lost, fired after their cancel, or delivered twice."""
        found = list(self.wrong)
        found += [f"lost: {timer}" for timer in self.open_timers()]
        for timer in self.timers.values():
            got = self.got[timer.namespace, timer.id]
            allowed = 2 if timer.refused_at_first else 1
            for id, times in got.requests.items():
                if len(times) > allowed:
                    found.append(f"twice: {timer}, {id} at {times}")
                if timer.canceled_at is not None and times[-1] > timer.canceled_at:
                    found.append(f"after its cancel: {timer} at {times}")
            if len(got.requests) > 1:
                found.append(f"several delivery ids: {timer}, {dict(got.requests)}")
        return found


def _ahead(seconds: float) -> str:
    return printed(datetime.fromtimestamp(time.time() + seconds, UTC))
