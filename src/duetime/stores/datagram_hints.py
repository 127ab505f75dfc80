"""Hints between instances as UDP datagrams, for databases without notifications.

Each instance publishes its address in its row of ``instances`` and sends hints to the addresses in the other rows. Each
datagram is signed with a key kept in the store; others are ignored. A datagram may get lost, duplicated, delayed or
replayed, because a hint only makes an instance poll earlier than it would have. Where datagrams are blocked, instances
find timers that others created at their next regular poll.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from duetime.store import Hint
from duetime.stores.unreadable import UNREADABLE

log = logging.getLogger(__name__)

GATHER_SECONDS = 0.002
"""How long a hint waits, so that later hints can be merged into it."""
KEY_BYTES = 32
_SIGNATURE_BYTES = 16
_DATAGRAM_BYTES_MAX = 512

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Hint).decode


class DatagramHints(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.heard: Callable[[Hint], None] = lambda _: None
        self.address: str | None = None
        """The address to publish; None when not listening."""
        self._key = b""
        self._peers: list[tuple[str, int]] = []
        self._pending: Hint | None = None
        self._transport: asyncio.DatagramTransport | None = None

    async def start(self, key: bytes, database: tuple[str, int]) -> None:
        """Listen on the local address that this machine uses to reach the database: the other instances, which use the
        same database, can most likely reach it there."""
        self._key = key
        loop = asyncio.get_running_loop()
        try:
            probe, _ = await loop.create_datagram_endpoint(asyncio.DatagramProtocol, remote_addr=database)
            host = probe.get_extra_info("sockname")[0]
            probe.close()
            self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=(host, 0))
        except OSError as error:
            log.warning("can't listen for hints from other instances (UDP), polling only: %s", error)
            return
        self.address = f"{host} {self._transport.get_extra_info('sockname')[1]}"

    def close(self) -> None:
        """Send the pending hint and stop."""
        self._send_pending()
        if self._transport is not None:
            self._transport.close()

    def set_peers(self, addresses: Iterable[str | None]) -> None:
        """Set the addresses of the live instances; later hints are sent to these."""
        self._peers = []
        for address in addresses:
            if address is not None and address != self.address:
                host, _, port = address.partition(" ")
                if port.isdecimal():  # else a newer program wrote it
                    self._peers.append((host, int(port)))

    def send(self, hint: Hint) -> None:
        """Send a hint to the other instances soon, merged with others given meanwhile."""
        if not self._peers or self._transport is None:
            return
        if self._pending is None:
            asyncio.get_running_loop().call_later(GATHER_SECONDS, self._send_pending)
            self._pending = hint
        else:
            self._pending |= hint

    def _send_pending(self) -> None:
        hint, self._pending = self._pending, None
        if hint is None or self._transport is None or self._transport.is_closing():
            return
        text = _encode(hint)
        for address in self._peers:
            with contextlib.suppress(OSError, ValueError):  # an address that this machine can't reach
                self._transport.sendto(self._signature(text) + text, address)

    def datagram_received(self, data: bytes, addr: tuple[str | Any, int]) -> None:
        signature, text = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:_DATAGRAM_BYTES_MAX]
        if hmac.compare_digest(signature, self._signature(text)):
            with contextlib.suppress(*UNREADABLE):
                self.heard(_decode(text))

    def error_received(self, exc: Exception) -> None:
        """A peer or the network is down. Ignored, because nothing depends on a hint."""

    def _signature(self, text: bytes) -> bytes:
        return hmac.digest(self._key, text, "sha256")[:_SIGNATURE_BYTES]
