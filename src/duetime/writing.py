"""Writes to many connections in one sweep at the end of a round of the event loop.

A call into the system leaves little of the processor's caches to the program: with a write after every message, making
the next one costs up to twice as much as in a row of others (docs/decisions/0017).
"""

from __future__ import annotations

import asyncio

WRITES_AT_ONCE = 32
"""How many messages wait for the end of the round: more would leave those who read them without work meanwhile."""


class Sweep:
    def __init__(self) -> None:
        self._messages: list[tuple[asyncio.Transport, bytes]] = []

    def add(self, transport: asyncio.Transport, message: bytes, loop: asyncio.AbstractEventLoop) -> None:
        """Have the message written, after those that were added before, and before any task or callback that is begun
        from here on."""
        if not self._messages:
            loop.call_soon(self.flush)
        self._messages.append((transport, message))
        if len(self._messages) >= WRITES_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write all that wait: whoever closes a connection does this first."""
        messages, self._messages = self._messages, []
        for transport, message in messages:
            if not transport.is_closing():
                transport.write(message)
