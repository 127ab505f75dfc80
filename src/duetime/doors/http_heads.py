"""The heads of HTTP messages: checks those of requests, and formats the beginning of those of responses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple

from duetime.errors import InvalidInput

Header = tuple[bytes, bytes]

HEAD_BYTES_MAX = 64 * 1024
LENGTH_DIGITS_MAX = 18
LINES_CACHED_MAX = 256

_NAME = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+").fullmatch
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*").fullmatch
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]+)(?::[0-9]{0,5})?").fullmatch


class Framing(NamedTuple):
    """What the head says about the body."""

    announced: int = 0
    """The Content-Length; 0 without one."""
    coding: str = ""
    """The Content-Encoding; empty if the body is not compressed."""


def framing_of(headers: Sequence[Header], *, old: bool) -> Framing:
    """What the head of a request says about its body; raises ``InvalidInput`` if it breaks a rule of HTTP. An HTTP/1.0
    client (``old``) may omit Host."""
    hosts = announced = 0
    coding = ""
    for name, value in headers:
        if name == b"host":
            hosts += 1
            if not _HOST(value.strip()):
                raise InvalidInput("Host", "must be a host name or address with an optional port")
        elif name == b"content-length":
            digits = value.strip()
            if len(digits) > LENGTH_DIGITS_MAX or not digits.isdigit():
                raise InvalidInput("Content-Length", f"must be a number of at most {LENGTH_DIGITS_MAX} digits")
            announced = int(digits)
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            coding = value[:64].decode("latin-1")
    if hosts != 1 and not (old and hosts == 0):
        raise InvalidInput("Host", "must be given exactly once")
    return Framing(announced, coding)


def size_of(url: bytes, headers: Sequence[Header]) -> int:
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)


@lru_cache(maxsize=LINES_CACHED_MAX)
def lines(status: int, headers: tuple[Header, ...], guards: tuple[Header, ...]) -> bytes:
    """The status line and headers of a response. They contain no text from clients, so few differ and a cache helps."""
    found = [b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode())]
    for name, value in (*headers, *guards):
        if not _NAME(name) or not _VALUE(value):
            raise ValueError(f"{name!r}: {value!r} is not a header")
        found.append(b"%b: %b" % (name, value))
    return b"\r\n".join(found) + b"\r\n"
