"""The broker port: commands that come in and events that go out, each at least once.

A broker may be away. Then nothing is taken in, ``publish`` raises ``BrokerAway``, and both go on by themselves when it
is back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct


class BrokerError(Exception):
    """The broker did not take a message, or nobody knows whether it did."""


class BrokerAway(BrokerError):
    """There is no connection, or it broke while the broker was to confirm: the same id may be sent again."""


class BrokerTimeout(BrokerError):
    """The broker did not confirm in time: it may have taken the message."""


class Command(Struct, frozen=True, eq=False):
    """A message that was taken and has to be answered: done, again later, or never."""

    subject: str
    data: bytes
    number: int  # of the message in its stream
    taken_at_ns: int  # by the stream
    token: Any  # the broker's own


class Broker(Protocol):
    @property
    def connected(self) -> bool:
        """Whether a publish can be tried now."""

    async def run(self) -> None:
        """Be connected, for ever."""

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str], *, id: str, timeout: float) -> None:
        """Return when the broker has the message on disk; it drops a second one with the same ``id``."""

    async def take(self) -> Sequence[Command]:
        """Wait for commands and return those that are there; another instance gets none of these meanwhile."""

    async def done(self, commands: Sequence[Command]) -> None:
        """Nobody has to see these again."""

    async def again(self, commands: Sequence[Command], *, delay_ms: int) -> None:
        """Give these out again after a while, to whoever asks."""

    async def never(self, command: Command, reason: str) -> None:
        """Nobody is to try this one again."""

    async def stop_taking(self) -> None:
        """Ask for no more commands and give back those that were not taken yet."""

    async def close(self) -> None:
        """Send what is on its way and let go."""

    async def problems(self) -> list[str]:
        """What is wrong with how the broker is set up, each in a sentence for people."""
