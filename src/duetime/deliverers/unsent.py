"""Attempts that were never sent: their error, and how to tell a local shortage from a failure of the destination."""

from __future__ import annotations

import os
import socket
import ssl
from errno import EADDRNOTAVAIL, EMFILE, ENFILE, ENOBUFS, ENOMEM

from duetime.errors import DuetimeError
from duetime.model import Outcome, OutcomeKind, Unsent

_NO_DESCRIPTOR = frozenset({EMFILE, ENFILE})
_NO_MEMORY = frozenset({ENOBUFS, ENOMEM})
_DISCARD_PORT = 9


class NotSent(DuetimeError):
    """No byte of the request was sent, and the cause is on our side."""

    def __init__(self, cause: Unsent, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


class OutOfDescriptors(NotSent):
    """The process or the machine is out of file descriptors."""

    def __init__(self) -> None:
        super().__init__(Unsent.DESCRIPTORS, "out of file descriptors")


def unsent(cause: Unsent, error: str) -> Outcome:
    return Outcome(kind=OutcomeKind.UNSENT, cause=cause, error=error)


def out_of_descriptors() -> bool:
    """Whether the process is unable to open a file right now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as exc:
        return exc.errno in _NO_DESCRIPTOR
    return False


def lookup_shortage(exc: OSError, *, was_out: bool) -> NotSent | None:
    """The local shortage that made a lookup fail, or None; ``was_out``: out of file descriptors before the lookup.

    A C library that can't open its configuration or a socket may report any error, even "name not known". So any
    failure counts as ours while the process is out of file descriptors.
    """
    if isinstance(exc, socket.gaierror):
        if exc.errno == socket.EAI_MEMORY:
            return NotSent(Unsent.DESCRIPTORS, "out of memory for a lookup")
    elif exc.errno in _NO_MEMORY:
        return NotSent(Unsent.DESCRIPTORS, "out of memory for a lookup")
    elif exc.errno in _NO_DESCRIPTOR:
        return OutOfDescriptors()
    return OutOfDescriptors() if was_out or out_of_descriptors() else None


def connect_shortage(exc: OSError, address: str) -> NotSent | None:
    """The local shortage that made a connect fail, or None."""
    if isinstance(exc, ssl.SSLError):
        # OpenSSL loads trusted certificates from files on demand and treats one that it can't open as missing.
        return OutOfDescriptors() if out_of_descriptors() else None
    if exc.errno in _NO_DESCRIPTOR:
        return OutOfDescriptors()
    if exc.errno in _NO_MEMORY:
        return NotSent(Unsent.DESCRIPTORS, "out of memory for a socket")
    if exc.errno == EADDRNOTAVAIL and _has_route(address):
        return NotSent(Unsent.DESCRIPTORS, "out of local ports")
    return None


def _has_route(address: str) -> bool:
    """Whether this machine has a route to the address. Without one (such as IPv6 on a machine where it is disabled), a
    connect fails with the same error as when local ports run out, but permanently."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _DISCARD_PORT))  # sends nothing
    except OSError as exc:
        return exc.errno in _NO_DESCRIPTOR
    return True
