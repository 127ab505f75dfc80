"""Kill -9 the broker and the service under a stream of commands, repeatedly, and count losses.

    python -m tests.e2e.broker_crash --commands 20000 --broker-kills 20 --instance-kills 20 [--seed S]

Publishers send ScheduleTimer commands. A command counts as sent once JetStream has acked it; until then it is published
again, unchanged and with the same ``Nats-Msg-Id``. Meanwhile a real NATS server, which syncs before each ack, and the
service are killed independently at random moments and restarted on the same data. In the end, the ledger of acked
commands is compared with the stream of events:

- lost: acked, but no DueTimeReached event;
- early: stored in the stream, or with a ``reachedAt``, before ``dueAt``, by the one clock of this machine;
- twice: more than one event in the stream;
- ids: publishes for one timer with different values of ``Nats-Msg-Id``;
- strange: an event without a command, or with another correlation id.

A plain subscriber sees publishes before JetStream drops duplicates, so duplicates are counted although none may get
into the stream. It misses publishes while it reconnects, so there may have been a few more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig

from tests.nats import Nats
from tests.servers import Duetime, instant, printed

COMMANDS, EVENTS = "timer.commands.schedule", "timer.events.due"
COMMANDS_STREAM, EVENTS_STREAM, DEAD_STREAM = "TIMER_COMMANDS", "TIMER_EVENTS", "TIMER_DLQ"
TENANTS = 7
PUBLISHERS = 64
AHEAD_SECONDS = (-0.5, 6.0)  # some are overdue when they are sent and fire at once
CONFIRM_SECONDS = 2.0
DOWN_SECONDS = (0.0, 2.5)  # how long the broker is down
START_SECONDS = 1.0  # the approximate duration of a start
KILL_EARLY = 0.1  # share of the service's kills before it is ready; never two in a row
PATIENCE_SECONDS = 120.0
PROGRESS_SECONDS = 5.0
READ_BATCH = 500


@dataclass
class Entry:
    """What a publisher knows about one command."""

    number: int
    tenant: str
    due_ms: int
    confirmed: bool = False

    @property
    def call(self) -> str:
        return f"call-{self.number}"

    @property
    def correlation(self) -> str:
        return f"order-{self.number // 3}"

    def command(self) -> bytes:
        payload = {"tenantId": self.tenant, "serviceCallId": self.call, "dueAt": text(self.due_ms)}
        envelope = {"type": "ScheduleTimer", "tenantId": self.tenant, "correlationId": self.correlation}
        return json.dumps({"id": f"id-{self.number}", **envelope, "timestampMs": 0, "payload": payload}).encode()


@dataclass(frozen=True)
class Event:
    """A DueTimeReached event, in the stream or as published."""

    tenant: str
    call: str
    correlation: str | None
    message_id: str
    reached_ms: int
    stored_ms: float | None = None  # None: only seen as a publish

    @classmethod
    def of(cls, message: Msg, *, stored: bool) -> Event:
        body = json.loads(message.data)
        payload = body["payload"]
        assert body["type"] == "DueTimeReached" and body["tenantId"] == payload["tenantId"], body
        return cls(
            payload["tenantId"],
            payload["serviceCallId"],
            body.get("correlationId"),
            (message.headers or {})["Nats-Msg-Id"],
            round(instant(payload["reachedAt"]).timestamp() * 1000),
            message.metadata.timestamp.timestamp() * 1000 if stored else None,
        )


@dataclass
class Ledger:
    entries: list[Entry] = field(default_factory=list)
    repeats: int = 0  # repeated publishes of a command
    known: int = 0  # of these, the ones acked as duplicates
    broker_kills: int = 0
    instance_kills: int = 0

    @property
    def confirmed(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.confirmed]


class BrokerCrash:
    def __init__(
        self,
        directory: Path,
        *,
        commands: int,
        broker_kills: int,
        instance_kills: int,
        seed: int,
        gap: tuple[float, float],
    ) -> None:
        # Separate random generators, so that their draws do not depend on each other's speed.
        self._draws = {who: random.Random(f"{seed} {who}") for who in ("commands", "broker", "instance")}
        self._commands = commands
        self._broker_kills = broker_kills
        self._instance_kills = instance_kills
        self._gap = gap
        self._ledger = Ledger()
        self._seen: list[Event] = []
        self._broker = Nats()
        self._service = Duetime(directory, start=False, TIMER_BROKER_URL=self._broker.url)

    # The publishers.

    async def _publish(self, client: Client) -> None:
        """All commands, spread over about the time of the kills."""
        kills = max(self._broker_kills, self._instance_kills)
        per_second = self._commands / max(1.0, kills * (sum(self._gap) / 2 + START_SECONDS))
        draw, started = self._draws["commands"], time.monotonic()
        room = asyncio.Semaphore(PUBLISHERS)
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._commands):
                await asyncio.sleep(max(0.0, started + number / per_second - time.monotonic()))
                await room.acquire()
                due_ms = int((time.time() + draw.uniform(*AHEAD_SECONDS)) * 1000)
                entry = Entry(number, f"tenant-{draw.randrange(TENANTS)}", due_ms)
                self._ledger.entries.append(entry)
                tasks.create_task(self._send(client, entry)).add_done_callback(lambda _: room.release())

    async def _send(self, client: Client, entry: Entry) -> None:
        """Publish one command until JetStream acks it, unchanged each time: JetStream keeps the first copy."""
        js = client.jetstream(timeout=CONFIRM_SECONDS)
        subject, data, headers = f"{COMMANDS}.{entry.tenant}", entry.command(), {"Nats-Msg-Id": f"id-{entry.number}"}
        deadline, again = time.monotonic() + PATIENCE_SECONDS, False
        while time.monotonic() < deadline:
            self._ledger.repeats += again
            try:
                confirmation = await js.publish(subject, data, headers=headers)
            except (nats.errors.Error, nats.js.errors.APIError, OSError, TimeoutError):
                again = True
                await asyncio.sleep(0.05)
                continue
            self._ledger.known += bool(confirmation.duplicate)
            entry.confirmed = True
            return

    async def _overhear(self, message: Msg) -> None:
        self._seen.append(Event.of(message, stored=False))

    # The killers.

    async def _reap_broker(self) -> None:
        draw = self._draws["broker"]
        for _ in range(self._broker_kills):
            await asyncio.sleep(draw.uniform(*self._gap))
            self._broker.kill()
            self._ledger.broker_kills += 1
            await asyncio.sleep(draw.uniform(*DOWN_SECONDS))
            await asyncio.to_thread(self._broker.start)

    async def _reap_instance(self) -> None:
        draw, early = self._draws["instance"], False
        for _ in range(self._instance_kills):
            # The service correctly fails a timer that is in flight at three kills in a row.
            early = not early and draw.random() < KILL_EARLY
            if early:
                await asyncio.sleep(draw.uniform(0, 0.8))
            else:
                await asyncio.to_thread(self._service.wait_ready)
                await asyncio.sleep(draw.uniform(*self._gap))
            self._service.kill()
            self._ledger.instance_kills += 1
            self._service.spawn()
        await asyncio.to_thread(self._service.wait_ready)

    async def _progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            ledger = self._ledger
            print(
                f"broker killed {ledger.broker_kills}/{self._broker_kills}, instance {ledger.instance_kills}/"
                f"{self._instance_kills}; {len(ledger.confirmed)} commands confirmed, {len(self._seen)} events seen",
                flush=True,
            )

    # The result.

    async def _settle(self, client: Client) -> list[Event]:
        """The events in the stream, once all owed ones are there, or after a timeout."""
        owed = {(entry.tenant, entry.call) for entry in self._ledger.confirmed}
        js = client.jetstream()
        deadline = time.monotonic() + PATIENCE_SECONDS
        looked_at = 0
        while time.monotonic() < deadline:
            held = (await js.stream_info(EVENTS_STREAM)).state.messages
            if held >= len(owed) and held != looked_at:
                # The right number is not enough: there may be duplicates among them.
                looked_at = held
                if owed <= {(event.tenant, event.call) for event in await read(client, EVENTS_STREAM)}:
                    break
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.5)  # for unexpected events
        return await read(client, EVENTS_STREAM)

    async def run(self) -> list[str]:
        """Run everything; returns the violations."""
        try:
            self._service.start()
            client = await nats.connect(
                self._broker.url,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.05,
                error_cb=_quiet,
            )
            await self._until_set_up(client)
            await client.subscribe(f"{EVENTS}.*", cb=self._overhear)
            progress = asyncio.create_task(self._progress())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._publish(client))
                tasks.create_task(self._reap_broker())
                tasks.create_task(self._reap_instance())
            events = await self._settle(client)
            progress.cancel()
            left = (await client.jetstream().stream_info(COMMANDS_STREAM)).state.messages
            dead = (await client.jetstream().stream_info(DEAD_STREAM)).state.messages
            await client.close()
            statuses = await asyncio.to_thread(self._statuses)
            code = await asyncio.to_thread(self._service.terminate)
        finally:
            self._service.kill()
            self._broker.__exit__()
        violations = judge(self._ledger, events, self._seen)
        if code != 0:
            violations.append(f"the last stop had exit code {code}")
        if dead:
            violations.append(f"dead letters: {dead}")
        if statuses["failed"] or statuses["pending"] or statuses["executing"]:
            violations.append(f"the store ends with {statuses}")
        print(table(self._ledger, events, self._seen, statuses, left, violations))
        return violations

    async def _until_set_up(self, client: Client) -> None:
        """Wait until the service has created the streams: before that, nothing can be published."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                await client.jetstream().consumer_info(COMMANDS_STREAM, "duetime")
                return
            except nats.js.errors.NotFoundError:
                assert time.monotonic() < deadline, "the service did not make the streams"
                await asyncio.sleep(0.05)

    def _statuses(self) -> dict[str, int]:
        """The number of timers of all tenants by status, once the service has counted its records."""
        self._service.disconnect()  # The service has closed the idle connections since the start.
        page = self._service.request("GET", "/metrics").body.decode()
        counts = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("duetime_timers{"))
        return {name.split('"')[1]: int(float(count)) for name, count in counts.items()}


async def read(client: Client, stream: str) -> list[Event]:
    """All messages of a stream, oldest first."""
    js = client.jetstream()
    left = (await js.stream_info(stream)).state.messages
    reader = await js.pull_subscribe(f"{EVENTS}.*", stream=stream, config=ConsumerConfig(inactive_threshold=60))
    events: list[Event] = []
    while len(events) < left:
        for message in await reader.fetch(min(READ_BATCH, left - len(events)), timeout=10):
            events.append(Event.of(message, stored=True))
            await message.ack()
    return events


def judge(ledger: Ledger, events: list[Event], seen: list[Event]) -> list[str]:
    """Compares the stream, and the publishes that were seen, with the acked commands."""
    asked = {(entry.tenant, entry.call): entry for entry in ledger.entries}
    stored: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        stored[event.tenant, event.call].append(event)
    found = [f"never confirmed: {entry}" for entry in ledger.entries if not entry.confirmed]
    found += [f"lost: {entry}" for entry in ledger.confirmed if (entry.tenant, entry.call) not in stored]
    for name, each in stored.items():
        if len(each) > 1:
            found.append(f"{len(each)} times in the stream: {each}")
        entry = asked.get(name)
        if entry is None:
            found.append(f"nobody asked for it: {each[0]}")
            continue
        for event in each:
            if event.correlation != entry.correlation:
                found.append(f"another correlation id: {event}")
            assert event.stored_ms is not None
            if min(event.stored_ms, event.reached_ms) < entry.due_ms:
                found.append(f"early by {entry.due_ms - min(event.stored_ms, event.reached_ms):.3f} ms: {event}")
    ids: dict[tuple[str, str], set[str]] = defaultdict(set)
    for event in (*events, *seen):
        ids[event.tenant, event.call].add(event.message_id)
    found += [f"different message ids: {name}: {each}" for name, each in ids.items() if len(each) > 1]
    return found


def table(
    ledger: Ledger,
    events: list[Event],
    seen: list[Event],
    statuses: dict[str, int],
    left: int,
    violations: list[str],
) -> str:
    kinds = Counter(violation.split(":")[0].split(" by ")[0] for violation in violations)
    due = {(entry.tenant, entry.call): entry.due_ms for entry in ledger.entries}
    late = sorted(event.stored_ms - due.get((event.tenant, event.call), 0) for event in events if event.stored_ms)
    lateness = (
        f"{late[len(late) // 2]:,.0f} ms / {late[len(late) * 99 // 100]:,.0f} ms / {late[-1]:,.0f} ms" if late else "-"
    )
    duplicates = len(seen) - len({event.message_id for event in seen})
    rows = [
        ("broker killed", ledger.broker_kills),
        ("instance killed", ledger.instance_kills),
        ("commands confirmed", len(ledger.confirmed)),
        ("  published again, unsure of the first", ledger.repeats),
        ("  of which JetStream had and dropped", ledger.known),
        ("  whose acks were lost: still to be repeated", left),
        ("events in the stream", len(events)),
        ("  lateness p50 / p99 / most", lateness),
        ("events seen on their way", len(seen)),
        ("  duplicates, which JetStream dropped", duplicates),
        *(sorted((f"timers {status}", count) for status, count in statuses.items() if count)),
        *(sorted((f"VIOLATIONS {kind}", count) for kind, count in kinds.items())),
        ("violations", len(violations)),
    ]
    return "\n".join(f"{name:<46}{value:>12}" for name, value in rows)


def text(at_ms: int) -> str:
    return printed(datetime.fromtimestamp(at_ms / 1000, UTC))


async def _quiet(_error: Exception) -> None:
    """Ignore errors: the test stops the server on purpose."""


def run(
    *, commands: int, broker_kills: int, instance_kills: int, seed: int, gap: tuple[float, float], directory: Path
) -> list[str]:
    print(f"seed {seed}")
    crash = BrokerCrash(
        directory, commands=commands, broker_kills=broker_kills, instance_kills=instance_kills, seed=seed, gap=gap
    )
    return asyncio.run(crash.run())


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.e2e.broker_crash", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--commands", type=int, default=20_000)
    parser.add_argument("--broker-kills", type=int, default=20)
    parser.add_argument("--instance-kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="duetime-broker-crash-") as directory:
        violations = run(
            commands=options.commands,
            broker_kills=options.broker_kills,
            instance_kills=options.instance_kills,
            seed=options.seed,
            gap=(0.5, 7.0),
            directory=Path(directory),
        )
    for violation in violations[:50]:
        print(f"VIOLATION {violation}")
    print(f"{len(violations)} violations; seed {options.seed}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
