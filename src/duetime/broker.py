"""The broker port: receives commands and publishes events, each at least once.

While the broker is not connected, no commands arrive and ``publish`` raises ``BrokerAway``. Both recover by themselves
when it is back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct


class BrokerError(Exception):
    """The broker rejected a message, or it is unknown whether it was stored."""


class BrokerAway(BrokerError):
    """There is no connection, or it broke before the ack: the message may be sent again with the same id."""


class BrokerTimeout(BrokerError):
    """The broker sent no ack in time; it may have stored the message."""


class Command(Struct, frozen=True, eq=False):
    """A received message, which needs one reply: ``ack``, ``nack`` or ``reject``."""

    subject: str
    data: bytes
    number: int  # sequence number in its stream
    taken_at_ns: int  # when the stream stored it
    token: Any  # identifies the message to the broker


class Broker(Protocol):
    @property
    def connected(self) -> bool:
        """Whether a publish is possible now."""

    async def run(self) -> None:
        """Connect, and stay connected until canceled."""

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str], *, id: str, timeout: float) -> None:
        """Publish a message and return after the ack; the broker drops a second message with the same ``id``."""

    async def take(self) -> Sequence[Command]:
        """Wait for commands and return them; no other instance gets them until they are due for redelivery."""

    async def ack(self, commands: Sequence[Command]) -> None:
        """Ack these commands."""

    async def nack(self, commands: Sequence[Command], *, delay_ms: int) -> None:
        """Nack these commands: redeliver them after the delay, to any instance."""

    async def reject(self, command: Command, reason: str) -> None:
        """Reject this command permanently."""

    async def stop_taking(self) -> None:
        """Request no more commands, and nack those that ``take`` has not returned yet."""

    async def close(self) -> None:
        """Flush and disconnect."""

    async def problems(self) -> list[str]:
        """Problems of the broker's configuration, each as a sentence for users."""
