"""A client of the broker door for tests: sends commands as an orchestrator does, and reads events and dead letters."""

from __future__ import annotations

import json
import socket
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from nats.js.errors import NotFoundError

from tests.nats import Broker
from tests.servers import PATIENCE_SECONDS, printed, until

SUBJECT = "timer.commands.schedule"
EVENTS, EVENTS_STREAM = "timer.events.due", "TIMER_EVENTS"
COMMANDS_STREAM, DEAD_STREAM = "TIMER_COMMANDS", "TIMER_DLQ"


class Event(NamedTuple):
    body: dict[str, Any]
    headers: dict[str, str]


def tenant(name: str = "t") -> str:
    """The name of a tenant that no other test has."""
    return f"{name}-{uuid.uuid4().hex[:12]}"


def soon(seconds: float = 0.0) -> str:
    """A time so far from now, by the clock of this machine."""
    return printed(datetime.now(UTC) + timedelta(seconds=seconds))


def bare(tenant: str, call: str, due_at: str, **fields: Any) -> dict[str, Any]:
    return {"tenantId": tenant, "serviceCallId": call, "dueAt": due_at, **fields}


def envelope(tenant: str, call: str, due_at: str, **fields: Any) -> dict[str, Any]:
    return {
        "id": str(uuid.uuid4()),
        "type": "ScheduleTimer",
        "tenantId": tenant,
        "timestampMs": 1_700_000_000_000,
        "payload": bare(tenant, call, due_at),
        **fields,
    }


class Orchestrator(Broker):
    def send(self, tenant: str, call: str, due_at: str, **fields: Any) -> None:
        """Send one command and wait until the stream has it."""
        self.publish(f"{SUBJECT}.{tenant}", json.dumps(envelope(tenant, call, due_at, **fields)).encode())

    def send_many(self, commands: list[tuple[str, str, str]]) -> None:
        """Send commands as fast as they go, in order, and wait until the stream has them all."""

        async def send() -> None:
            for tenant, call, due_at in commands:
                data = json.dumps(envelope(tenant, call, due_at)).encode()
                await self.js.publish_async(f"{SUBJECT}.{tenant}", data)
            await self.js.publish_async_completed()

        self.run(send())

    def events(self, tenant: str, count: int = 1) -> list[Event]:
        """What was published for a tenant, once there are at least ``count`` events."""

        def there() -> list[Any]:
            found = self.messages(EVENTS_STREAM, f"{EVENTS}.{tenant}")
            return found if len(found) >= count else []

        found = until(f"{count} events for {tenant}", there) if count else there()
        return [Event(json.loads(message.data), message.headers) for message in found]

    def dead_letters(self, subject: str) -> list[Any]:
        """Copies of the commands on a subject that were refused."""
        return [message for message in self.messages(DEAD_STREAM) if message.headers.get("duetime-subject") == subject]

    def settled(self, stream: str = COMMANDS_STREAM) -> None:
        """Wait until every command was answered."""
        until("every command is answered", lambda: self.waiting(stream) == 0)

    def ready(self, stream: str = COMMANDS_STREAM) -> None:
        """Wait until a door has set up what it needs, of which its consumer is the last."""

        def there() -> bool:
            try:
                return bool(self.info(stream))
            except NotFoundError:
                return False

        until("the door is set up", there)

    def count(self, stream: str) -> int:
        """How many messages are in a stream."""
        return int(self.run(self.js.stream_info(stream)).state.messages)

    def info(self, stream: str = COMMANDS_STREAM, consumer: str = "duetime") -> Any:
        return self.run(self.js.consumer_info(stream, consumer))


def publish_raw(port: int, subject: bytes, head: bytes, data: bytes) -> None:
    """Publish bytes that a well-behaved client would not, and wait until the server has read them."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as line:
        line.sendall(b'CONNECT {"verbose":false,"headers":true}\r\n')
        if head:
            line.sendall(b"HPUB %b %d %d\r\n%b%b\r\n" % (subject, len(head), len(head) + len(data), head, data))
        else:
            line.sendall(b"PUB %b %d\r\n%b\r\n" % (subject, len(data), data))
        line.sendall(b"PING\r\n")
        said = b""
        while b"PONG" not in said:
            piece = line.recv(65536)
            assert piece and b"-ERR" not in said, said
            said += piece
