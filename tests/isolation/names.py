"""A DNS server on loopback, and a view of the file system in which a process uses only this server.

The zone of a name determines the response. A name in ``quick.test`` resolves to 127.0.0.1 at once, one in ``slow.test``
after ``slow_seconds``, and one in ``silent.test`` gets no response. ``quick-17.test`` and so on are zones of the same
kind, so that names can share a parent domain or have their own. No other name exists. There are no IPv6 addresses.

It needs root on Linux: port 53, and a private mount namespace in which our files replace those of ``/etc``.
``Unsupported`` says what is missing.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import subprocess
import threading
from collections import Counter
from pathlib import Path
from typing import cast

from tests.servers import PATIENCE_SECONDS

PORT = 53
ADDRESS_ATTEMPTS_MAX = 20
BUFFER_BYTES = 8 << 20
_RCVBUFFORCE = 33  # of Linux; as root it may exceed what the system allows others
_A = 1
_NO_SUCH_NAME = 3
_ADDRESS = bytes([127, 0, 0, 1])
_FILES = {
    "resolv.conf": "nameserver {address}\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "hosts: files dns\n",
}
# "$0" is the directory of the files; the arguments are the command that gets to see them.
_MOUNT = "".join(f'mount --bind "$0/{name}" /etc/{name} && ' for name in _FILES) + 'exec "$@"'


def host(kind: str, n: int, label: str = "") -> str:
    """The n-th name of a kind. Half of the names share a parent domain, the others have their own."""
    return f"{label}n{n}.{kind}.test" if n % 2 else f"{label}www.{kind}-{n}.test"


class Unsupported(Exception):
    """This machine can't run a scenario; the message says why."""


class NameServer:
    def __init__(self) -> None:
        if os.geteuid() != 0 or shutil.which("unshare") is None:
            raise Unsupported("a DNS server of our own needs root, and unshare (Linux)")
        self.slow_seconds = 0.0
        self.queries: Counter[str] = Counter()
        """The number of queries by kind of zone."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dns", daemon=True)
        self._thread.start()
        try:
            self._transport, self.address = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(
                PATIENCE_SECONDS
            )
        except BaseException:
            self._stop()
            raise

    def command_prefix(self, directory: Path) -> list[str]:
        """A prefix that makes a command resolve names here. It execs the command, so the process id stays the same."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in _FILES.items():
            (directory / name).write_text(text.format(address=self.address))
        prefix = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNT, str(directory)]
        tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        if tried.returncode:
            raise Unsupported(f"no private mount namespace: {tried.stderr.strip()}")
        return prefix

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._transport.close)
        self._stop()

    def __enter__(self) -> NameServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self) -> None:
        # One step later, so that the loop still sees the transport closed.
        self._loop.call_soon_threadsafe(self._loop.call_soon, self._loop.stop)
        self._thread.join(PATIENCE_SECONDS)
        self._loop.close()

    # Called in the loop's thread.

    async def _listen(self) -> tuple[asyncio.DatagramTransport, str]:
        for _ in range(ADDRESS_ATTEMPTS_MAX):
            # An address of its own, so that runs at the same time do not meet.
            address = f"127.53.{random.randrange(256)}.{random.randrange(1, 255)}"
            try:
                transport, _ = await self._loop.create_datagram_endpoint(lambda: _Queries(self), (address, PORT))
            except PermissionError as error:
                raise Unsupported(f"port {PORT}: {error}") from None
            except OSError:
                continue
            # A burst of queries must not be dropped here: the client would ask again only seconds later.
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, BUFFER_BYTES)
            return transport, address
        raise Unsupported(f"port {PORT} is taken on every loopback address that was tried")


class _Queries(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, client: tuple[str, int]) -> None:
        labels, end = _question(data)
        kind = labels[-2].partition(b"-")[0].decode("latin-1").lower() if len(labels) > 1 else ""
        self._server.queries[kind] += 1
        if kind == "silent":
            return
        exists = kind in ("quick", "slow")
        wants_address = int.from_bytes(data[end - 4 : end - 2], "big") == _A
        answer = _response(data, end, exists=exists, addresses=[_ADDRESS] if exists and wants_address else [])
        delay_seconds = self._server.slow_seconds if kind == "slow" else 0.0
        asyncio.get_running_loop().call_later(delay_seconds, self._send, answer, client)

    def _send(self, answer: bytes, client: tuple[str, int]) -> None:
        if not self._transport.is_closing():
            self._transport.sendto(answer, client)


def _question(query: bytes) -> tuple[list[bytes], int]:
    """The labels of the name, and the end position of the question."""
    labels, at = [], 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length])
        at += 1 + length
    return labels, at + 5


def _response(query: bytes, end: int, *, exists: bool, addresses: list[bytes]) -> bytes:
    flags = 0x8580 | (0 if exists else _NO_SUCH_NAME)  # a response, authoritative, with recursion
    counts = (1, len(addresses), 0, 0)
    head = query[:2] + flags.to_bytes(2, "big") + b"".join(count.to_bytes(2, "big") for count in counts)
    # Each answer points to the name in the question. It may not be cached.
    records = (b"\xc0\x0c\x00\x01\x00\x01" + bytes(4) + len(a).to_bytes(2, "big") + a for a in addresses)
    return head + query[12:end] + b"".join(records)
