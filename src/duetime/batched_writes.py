"""Batches the writes to many connections at the end of each round of the event loop.

A system call evicts much of the program from the CPU caches: with a write after every message, building the next one
costs up to twice as much as building many in a row (docs/decisions/0017).
"""

from __future__ import annotations

import asyncio

WRITES_AT_ONCE = 32
"""The most messages that wait for the end of the round: with more, receivers would be idle meanwhile."""


class BatchedWrites:
    def __init__(self) -> None:
        self._messages: list[tuple[asyncio.Transport, bytes]] = []

    def add(self, transport: asyncio.Transport, message: bytes, loop: asyncio.AbstractEventLoop) -> None:
        """Queue a message. It is written after the messages added before it, and before any task or callback that is
        scheduled from now on."""
        if not self._messages:
            loop.call_soon(self.flush)
        self._messages.append((transport, message))
        if len(self._messages) >= WRITES_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write all queued messages; call this before closing a connection."""
        messages, self._messages = self._messages, []
        for transport, message in messages:
            if not transport.is_closing():
                transport.write(message)
