"""Kill -9 under load, repeatedly, and count broken promises.

    python -m tests.e2e.crash --kills 100 [--seed S] [--server mariadb --lease 2s]

Clients create about 300 timers a second, cancel and move some of them, and record every response. The service is killed
at random moments and restarted at once on the same file. In the end, the ledger of acknowledged requests is compared
with what the receiver got:

- lost: acknowledged, neither canceled nor delivered;
- early: delivered before its time, by the one clock of this machine; also a moved timer at its old time;
- canceled: delivered although its cancel was acknowledged;
- twice: delivered again without a kill in between, or after a client had seen it completed;
- ids: deliveries of one timer with different delivery ids.

An operation whose response was lost in a kill may or may not have taken effect; both are correct.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.mysql import Mariadb, Mysql
from tests.postgres import Postgres
from tests.servers import KEY, Duetime, Received, Receiver, Reply, printed, until

SERVERS: dict[str, Callable[[], Any]] = {"mariadb": Mariadb, "mysql": Mysql, "postgres": partial(Postgres, 18)}
CREATES_PER_SECOND = 300
CLIENTS = 12
AHEAD_SECONDS = (5.3, 8.0)  # the API's minimum is five, and a request may wait for a starting service
CANCELED = MOVED = 0.05
CHECKED = 0.3  # share of the delivered timers that a client reads back
WARM_UP_SECONDS = 5.5  # before the first kill, so that timers are falling due by then
STAMP_NS_LATE = 250_000_000  # a request sent just before a kill may get its timestamp just after it
QUIET_KILLS = 3  # the last kills come after the last create, while timers are still falling due
KILL_EARLY = 0.1  # share of the kills before the service is ready; never two in a row
PATIENCE_SECONDS = 60.0


@dataclass
class Entry:
    """What the clients know about one timer."""

    number: int
    not_before_ms: int  # the earliest instant at which it may be delivered
    id: str | None = None  # None: the create was never acknowledged
    canceled: bool = False  # acknowledged
    cancel_asked: bool = False
    completed_ns: int | None = None  # when a client had seen it completed


@dataclass
class Ledger:
    entries: list[Entry] = field(default_factory=list)
    kills_ns: list[int] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)

    @property
    def acknowledged(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.id is not None]

    @property
    def owed(self) -> list[Entry]:
        """Timers that must be delivered. A cancel without a response may have taken effect."""
        return [entry for entry in self.acknowledged if not entry.canceled and not entry.cancel_asked]


class Client:
    """A client with one connection at a time. Without a response it returns None, and the effect is unknown."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, object]] | None:
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\nContent-Length: {len(content)}\r\n\r\n"
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port)
            reader, writer = self._streams
            writer.write(head.encode() + content)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_SECONDS)
            length = next(int(line[15:]) for line in answer.lower().split(b"\r\n") if line[:15] == b"content-length:")
            return int(answer[9:12]), json.loads(await reader.readexactly(length))
        except (OSError, EOFError):
            self.close()
            return None

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Crash:
    def __init__(
        self,
        directory: Path,
        *,
        kills: int,
        seed: int,
        gap: tuple[float, float],
        lease: str,
        settings: Mapping[str, Any],
    ) -> None:
        self._draw = random.Random(seed)
        self._kills = kills
        self._gap = gap
        self._ledger = Ledger()
        self._creating = True
        self._over = False
        self._receiver = Receiver()
        self._receiver.decide(self._reply)
        self._fresh: list[int] = []  # numbers of delivered timers, for the clients that check
        # The port stays the same over all restarts, as a client would have it. It is held while nobody listens on it:
        # the kernel could give it to one of the many connections that are made meanwhile.
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self._port = self._held.getsockname()[1]
        self._service = Duetime(directory, start=False, PORT=str(self._port), DUETIME_LEASE_TTL=lease, **settings)

    def _reply(self, request: Received) -> Reply:
        """Respond mostly at once, sometimes slowly, so that attempts are always in flight."""
        self._fresh.append(int(request.body))
        return Reply(delay_seconds=self._draw.choice((0, 0, 0, 0, 0.02, 0.1, 0.3)))

    # The clients.

    async def _create(self) -> None:
        client = Client(self._port)
        pause = CLIENTS / CREATES_PER_SECOND
        due = time.monotonic()
        while self._creating:
            due = max(due + pause, time.monotonic() - 1)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            at_ms = int((time.time() + self._draw.uniform(*AHEAD_SECONDS)) * 1000)
            entry = Entry(len(self._ledger.entries), at_ms)
            self._ledger.entries.append(entry)
            body = {
                "execute_at": text(at_ms),
                "callback_url": self._receiver.url("/"),
                "callback_payload": entry.number,
            }
            answer = await client.ask("POST", "/timers", body)
            if answer is None:
                await asyncio.sleep(0.02)
            elif answer[0] == 201:
                entry.id = answer[1]["data"]["id"]  # type: ignore[index]
            else:
                self._ledger.refusals[f"create {answer[0]} {answer[1]['message']}"] += 1
        client.close()

    async def _change(self) -> None:
        """Cancel and move some timers around their due times, to cause races."""
        client = Client(self._port)
        rate = CREATES_PER_SECOND * (CANCELED + MOVED)
        while self._creating:
            await asyncio.sleep(1 / rate)
            recent = self._ledger.entries[-CREATES_PER_SECOND * 8 :]
            entry = self._draw.choice(recent) if recent else None
            if entry is None or entry.id is None or entry.cancel_asked or entry.canceled:
                continue
            if self._draw.random() < CANCELED / (CANCELED + MOVED):
                await self._cancel(client, entry)
            else:
                await self._move(client, entry)
        client.close()

    async def _cancel(self, client: Client, entry: Entry) -> None:
        entry.cancel_asked = True
        answer = await client.ask("DELETE", f"/timers/{entry.id}")
        if answer is None:
            await asyncio.sleep(0.02)
        elif answer[0] == 200:
            entry.canceled = True
        elif answer[0] == 400:
            entry.cancel_asked = False
        else:
            self._ledger.refusals[f"cancel {answer[0]} {answer[1]['message']}"] += 1

    async def _move(self, client: Client, entry: Entry) -> None:
        at_ms = int((time.time() + self._draw.uniform(*AHEAD_SECONDS)) * 1000)
        answer = await client.ask("PUT", f"/timers/{entry.id}", {"execute_at": text(at_ms)})
        if answer is None:
            entry.not_before_ms = min(entry.not_before_ms, at_ms)
            await asyncio.sleep(0.02)
        elif answer[0] == 200:
            entry.not_before_ms = at_ms
        elif answer[0] != 400:
            self._ledger.refusals[f"move {answer[0]} {answer[1]['message']}"] += 1

    async def _check(self) -> None:
        """Read timers: one that was seen completed must not be delivered again."""
        client = Client(self._port)
        while not self._over:
            await asyncio.sleep(0.01)
            fresh, self._fresh = self._fresh, []
            for number in fresh:
                entry = self._ledger.entries[number]
                if entry.id is None or entry.completed_ns or self._draw.random() > CHECKED:
                    continue
                answer = await client.ask("GET", f"/timers/{entry.id}")
                if answer is None:
                    await asyncio.sleep(0.02)
                elif answer[0] == 200 and answer[1]["data"]["status"] == "completed":  # type: ignore[index]
                    entry.completed_ns = time.time_ns()
        client.close()

    # The killer.

    async def _kill_and_start(self) -> None:
        self._service.kill()
        self._ledger.kills_ns.append(time.time_ns())
        self._service.spawn()

    async def _reap(self) -> None:
        await asyncio.sleep(WARM_UP_SECONDS)
        early = False
        for kill in range(self._kills):
            if kill >= self._kills - QUIET_KILLS:
                self._creating = False
            # The service correctly fails a timer that is in flight at three kills in a row.
            early = not early and self._draw.random() < KILL_EARLY
            if early:
                await asyncio.sleep(self._draw.uniform(0, 0.8))
            else:
                await asyncio.to_thread(self._service.wait_ready)
                await asyncio.sleep(self._draw.uniform(*self._gap))
            await self._kill_and_start()
            delivered = len(self._receiver.received)
            print(
                f"kill {kill + 1}/{self._kills}: {len(self._ledger.entries)} asked, {delivered} delivered", flush=True
            )
        self._creating = False
        await asyncio.to_thread(self._service.wait_ready)

    async def _settle(self) -> None:
        """Wait until everything owed has arrived, or until a timeout; then a little longer for unexpected
        deliveries."""
        deadline = time.time() + PATIENCE_SECONDS
        last = max((entry.not_before_ms for entry in self._ledger.entries), default=0) / 1000
        while time.time() < max(deadline, last + PATIENCE_SECONDS):
            got = {int(request.body) for request in list(self._receiver.received)}
            if time.time() > last and all(entry.number in got for entry in self._ledger.owed):
                break
            await asyncio.sleep(0.1)
        # Some fire although they are not owed: creates and cancels that were cut off.
        await asyncio.to_thread(
            until, "all is done", lambda: not self._service.total("pending") and not self._service.total("executing")
        )
        await asyncio.sleep(0.5)
        self._over = True

    async def run(self) -> list[str]:
        """Run everything; returns the violations."""
        try:
            self._service.start()
            async with asyncio.TaskGroup() as tasks:
                for _ in range(CLIENTS):
                    tasks.create_task(self._create())
                tasks.create_task(self._change())
                tasks.create_task(self._check())
                await self._reap()
                await self._settle()
            statuses = {
                status: self._service.total(status) for status in ("completed", "failed", "canceled", "pending")
            }
            code = self._service.terminate()
        finally:
            self._service.kill()
            self._held.close()
            self._receiver.close()
        violations = judge(self._ledger, self._receiver.received)
        if code != 0:
            violations.append(f"the last stop had exit code {code}")
        if statuses["failed"] or statuses["pending"]:
            violations.append(f"the store ends with {statuses}")
        self._summarize(statuses)
        return violations

    def _summarize(self, statuses: dict[str, int]) -> None:
        ledger, received = self._ledger, self._receiver.received
        acknowledged = ledger.acknowledged
        duplicates = len(received) - len({request.body for request in received})
        unknown = len(ledger.entries) - len(acknowledged)
        starts = [0, *ledger.kills_ns]
        busy = sum(
            any(start < request.at_ns < kill for request in received)
            for start, kill in zip(starts, ledger.kills_ns, strict=False)
        )
        print(
            f"{len(ledger.kills_ns)} kills, {busy} of them of a service that had delivered since its start; "
            f"{len(ledger.entries)} creates: {len(acknowledged)} acknowledged, {unknown} "
            f"cut off or refused; {len(received)} deliveries, {duplicates} of them duplicates; "
            f"{sum(entry.canceled for entry in acknowledged)} canceled, "
            f"{sum(entry.completed_ns is not None for entry in acknowledged)} seen completed; the store says {statuses}"
        )
        for what, count in ledger.refusals.most_common(5):
            print(f"  refused {count} times: {what}")


def judge(ledger: Ledger, received: list[Received]) -> list[str]:
    """Compares what the receiver got with what was promised."""
    deliveries: dict[int, list[Received]] = defaultdict(list)
    for request in received:
        deliveries[int(request.body)].append(request)
    found: list[str] = []
    for entry in ledger.owed:
        if entry.number not in deliveries:
            found.append(f"lost: {entry}")
    for number, requests in deliveries.items():
        entry = ledger.entries[number]
        if requests[0].at_ns < entry.not_before_ms * 1_000_000:
            found.append(f"early by {entry.not_before_ms - requests[0].at_ns / 1e6:.3f} ms: {entry}")
        if entry.canceled:
            found.append(f"canceled and delivered: {entry}")
        if entry.id is not None and any(r.headers["duetime-timer"] != f"default/{entry.id}" for r in requests):
            found.append(f"delivered under another name: {entry}")
        if len({request.headers["webhook-id"] for request in requests}) > 1:
            found.append(f"different delivery ids: {entry}")
        for before, after in pairwise(requests):
            if not any(before.at_ns - STAMP_NS_LATE < kill_ns < after.at_ns for kill_ns in ledger.kills_ns):
                found.append(f"twice with no kill in between: {entry}; {evidence(requests, ledger.kills_ns)}")
            if entry.completed_ns is not None and entry.completed_ns < after.at_ns:
                found.append(f"delivered after it was seen completed: {entry}")
    return found


def evidence(requests: list[Received], kills_ns: list[int]) -> str:
    """The time and attempt number of each delivery, with the kills before and after the first of them."""
    first = requests[0].at_ns
    near = [
        max((k for k in kills_ns if k <= first), default=None),
        min((k for k in kills_ns if k > first), default=None),
    ]
    kills = ", ".join("none" if k is None else f"{(k - first) / 1e6:+.3f} ms" for k in near)
    came = ", ".join(f"attempt {r.headers['duetime-attempt']} at {(r.at_ns - first) / 1e6:+.3f} ms" for r in requests)
    return f"{came}; kills around the first: {kills}"


def text(at_ms: int) -> str:
    return printed(datetime.fromtimestamp(at_ms / 1000, UTC))


def run(
    *, kills: int, seed: int, gap: tuple[float, float], directory: Path, lease: str = "10s", **settings: str
) -> list[str]:
    """``settings`` are those of the service."""
    print(f"seed {seed}")
    return asyncio.run(Crash(directory, kills=kills, seed=seed, gap=gap, lease=lease, settings=settings).run())


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.e2e.crash", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--lease", default="10s", help="DUETIME_LEASE_TTL of the service")
    parser.add_argument("--server", choices=SERVERS, help="use this database server instead of a file")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        settings = {}
        if options.server:
            database = stack.enter_context(SERVERS[options.server]()).fresh()
            settings = {"DATABASE_URL": database, "DUETIME_TAKEOVER": "now"}
        violations = run(
            kills=options.kills,
            seed=options.seed,
            gap=(0.5, 6.0),
            directory=Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="duetime-crash-"))),
            lease=options.lease,
            **settings,
        )
    for violation in violations[:50]:
        print(f"VIOLATION {violation}")
    print(f"{len(violations)} violations; seed {options.seed}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
