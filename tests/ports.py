"""Loopback ports for servers that stop and start again."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_PORTS = range(20000, 32768)  # below the ephemeral ports
_LOCKS = Path(tempfile.gettempdir()) / f"ports-of-tests-{os.getuid()}"
_locks: list[int] = []  # descriptors, open until this process ends


def free_port() -> int:
    """An unused port that the kernel assigns to no client while its server is down.

    No other test process on the machine gets the same port until this process ends.
    """
    while True:
        port = random.choice(_PORTS)
        if not _lock(port):
            continue
        with socket.socket() as attempt:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                attempt.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _lock(port: int) -> bool:
    _LOCKS.mkdir(exist_ok=True)
    file = os.open(_LOCKS / str(port), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    _locks.append(file)
    return True
