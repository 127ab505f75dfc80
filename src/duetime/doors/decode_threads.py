"""Decodes large bodies in threads, so that they do not block the event loop.

A call into C holds the interpreter lock until it returns, even in a thread. So no call gets more than a run of
``RUN_BYTES_MAX``: larger bodies are split first. There are two threads, so that a body of one run does not wait for one
of many runs. With more threads, the event loop would wait for the calls of all of them, one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from duetime.doors.http import Gone, Request

T = TypeVar("T")

INLINE_BYTES_MAX = 32 * 1024
RUN_BYTES_MAX = 256 * 1024
CONTAINERS_INLINE_MAX = 4_096
"""Arrays and objects take the most time: a run with at most this many is decoded without a thread."""
SAMPLE_STRIDE = 61  # a prime, because the timers of a batch often have the same length

_one_run = ThreadPoolExecutor(1, thread_name_prefix="bodies")
_many_runs = ThreadPoolExecutor(1, thread_name_prefix="large-bodies")


async def off_loop(request: Request, body: bytes, work: Callable[..., T], *args: object) -> T:
    """Call ``work``, which decodes this body: in a thread if that may take long, unless the client left (``Gone``)."""
    size = len(body)
    if size <= INLINE_BYTES_MAX or (size <= RUN_BYTES_MAX and not _has_many_containers(body)):
        return work(*args)
    return await in_thread(request, work, *args, large=size > RUN_BYTES_MAX)


def _has_many_containers(body: bytes) -> bool:
    """Estimated from a sample of the bytes, because counting all adds 2 % to the cost of a batch. A body that evades
    the sample blocks the event loop for no longer than one run does."""
    sample = body[::SAMPLE_STRIDE]
    return SAMPLE_STRIDE * (sample.count(b"[") + sample.count(b"{")) > CONTAINERS_INLINE_MAX


async def in_thread(request: Request, work: Callable[..., T], *args: object, large: bool = True) -> T:
    """Call ``work`` in a thread; ``large`` if it decodes one of many runs."""
    threads = _many_runs if large else _one_run
    return await asyncio.wrap_future(threads.submit(_unless_gone, request, work, *args))


def _unless_gone(request: Request, work: Callable[..., T], *args: object) -> T:
    if request.gone:
        raise Gone
    return work(*args)


def runs(parts: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Group the parts, in order, into runs of at most ``RUN_BYTES_MAX``; a larger part is a run of its own."""
    start = size = 0
    for end, part in enumerate(parts):
        if size and size + len(part) > RUN_BYTES_MAX:
            yield parts[start:end]
            start, size = end, 0
        size += len(part)
    if start < len(parts):
        yield parts[start:]
