"""Nothing left us: the error that says so, and how to tell a shortage of ours from a failure of the destination."""

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
    """Not one byte of the request left us, and the destination is not to blame."""

    def __init__(self, cause: Unsent, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


class OutOfDescriptors(NotSent):
    """The process or the machine has no file descriptor left."""

    def __init__(self) -> None:
        super().__init__(Unsent.DESCRIPTORS, "out of file descriptors")


def unsent(cause: Unsent, error: str) -> Outcome:
    return Outcome(kind=OutcomeKind.UNSENT, cause=cause, error=error)


def out_of_descriptors() -> bool:
    """Whether this process can open no file at this moment."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as exc:
        return exc.errno in _NO_DESCRIPTOR
    return False


def lookup_shortage(exc: OSError, *, was_out: bool) -> NotSent | None:
    """The shortage behind a lookup that failed, if there is one; ``was_out``: out of descriptors before the lookup.

    A C library that can open neither its configuration nor a socket reports whatever fits, "name not known" included.
    So any failure counts as ours while the process is out of descriptors.
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
    """The shortage behind a connection to an address that could not be opened, if there is one."""
    if isinstance(exc, ssl.SSLError):
        # OpenSSL reads trusted certificates from files as it needs them, and takes one it can't open for a missing one.
        return OutOfDescriptors() if out_of_descriptors() else None
    if exc.errno in _NO_DESCRIPTOR:
        return OutOfDescriptors()
    if exc.errno in _NO_MEMORY:
        return NotSent(Unsent.DESCRIPTORS, "out of memory for a socket")
    if exc.errno == EADDRNOTAVAIL and _has_route(address):
        return NotSent(Unsent.DESCRIPTORS, "out of local ports")
    return None


def _has_route(address: str) -> bool:
    """Whether this machine has a source address for packets to the address. Without one, as for IPv6 on a machine that
    has it turned off, a connect fails with the same error as without a free port, but it would fail forever."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _DISCARD_PORT))  # sends nothing
    except OSError as exc:
        return exc.errno in _NO_DESCRIPTOR
    return True
