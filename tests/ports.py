"""Ports of loopback for servers that go away and come back."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """A port that nobody listens on, and that the kernel gives to no client while its server is down."""
    while True:
        port = random.randrange(20000, 32768)  # below the range that outgoing connections get theirs from
        with socket.socket() as attempt:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                attempt.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
