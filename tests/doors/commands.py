"""A client of the broker API for tests: sends commands as an orchestrator does, and reads events and dead letters."""

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


def new_tenant(name: str = "t") -> str:
    """A tenant id that no other test uses."""
    return f"{name}-{uuid.uuid4().hex[:12]}"


def from_now(seconds: float = 0.0) -> str:
    """The time this many seconds from now, by the machine's clock."""
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
        """Send one command and wait until the stream has stored it."""
        self.publish(f"{SUBJECT}.{tenant}", json.dumps(envelope(tenant, call, due_at, **fields)).encode())

    def send_many(self, commands: list[tuple[str, str, str]]) -> None:
        """Send commands in order without waiting between them, and wait until the stream has stored all of them."""

        async def send() -> None:
            for tenant, call, due_at in commands:
                data = json.dumps(envelope(tenant, call, due_at)).encode()
                await self.js.publish_async(f"{SUBJECT}.{tenant}", data)
            await self.js.publish_async_completed()

        self.run(send())

    def events(self, tenant: str, count: int = 1) -> list[Event]:
        """Wait for at least ``count`` events of a tenant; returns all of them."""

        def enough() -> list[Any]:
            found = self.messages(EVENTS_STREAM, f"{EVENTS}.{tenant}")
            return found if len(found) >= count else []

        found = until(f"{count} events for {tenant}", enough) if count else enough()
        return [Event(json.loads(message.data), message.headers) for message in found]

    def dead_letters(self, subject: str) -> list[Any]:
        """The dead letters of the commands that were sent on a subject."""
        return [message for message in self.messages(DEAD_STREAM) if message.headers.get("duetime-subject") == subject]

    def wait_acked(self, stream: str = COMMANDS_STREAM) -> None:
        """Wait until every command is acked."""
        until("every command is acked", lambda: self.waiting(stream) == 0)

    def wait_ready(self, stream: str = COMMANDS_STREAM) -> None:
        """Wait until a service has created its streams and, last of all, its consumer."""

        def has_consumer() -> bool:
            try:
                return bool(self.info(stream))
            except NotFoundError:
                return False

        until("the consumer exists", has_consumer)

    def count(self, stream: str) -> int:
        """The number of messages in a stream."""
        return int(self.run(self.js.stream_info(stream)).state.messages)

    def info(self, stream: str = COMMANDS_STREAM, consumer: str = "duetime") -> Any:
        return self.run(self.js.consumer_info(stream, consumer))


def publish_raw(port: int, subject: bytes, head: bytes, data: bytes) -> None:
    """Publish a message that the client library would refuse to send, and wait until the server has read it."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(b'CONNECT {"verbose":false,"headers":true}\r\n')
        if head:
            connection.sendall(b"HPUB %b %d %d\r\n%b%b\r\n" % (subject, len(head), len(head) + len(data), head, data))
        else:
            connection.sendall(b"PUB %b %d\r\n%b\r\n" % (subject, len(data), data))
        connection.sendall(b"PING\r\n")
        response = b""
        while b"PONG" not in response:
            piece = connection.recv(65536)
            assert piece and b"-ERR" not in response, response
            response += piece
