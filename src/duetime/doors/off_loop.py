"""Reads large bodies in threads, so that the event loop goes on meanwhile.

One call into C keeps the interpreter lock for all of its work, thread or not. So no call gets more than a run of
``RUN_BYTES_MAX``: larger bodies are taken apart first. There are two threads, so that a body of one run does not wait
for one of many. With more of them the event loop would wait for a call of each, one after the other.
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
"""Arrays and objects are what takes time: a run with no more of them than timers have is read without a thread."""
SAMPLE_STRIDE = 61  # a prime: the parts of a batch are often equally long

_one_run = ThreadPoolExecutor(1, thread_name_prefix="bodies")
_many_runs = ThreadPoolExecutor(1, thread_name_prefix="large-bodies")


async def off_loop(request: Request, body: bytes, work: Callable[..., T], *args: object) -> T:
    """What ``work`` returns, which reads this body. It does not begin once the client is gone."""
    size = len(body)
    if size <= INLINE_BYTES_MAX or (size <= RUN_BYTES_MAX and not _has_many_containers(body)):
        return work(*args)
    return await in_thread(request, work, *args, large=size > RUN_BYTES_MAX)


def _has_many_containers(body: bytes) -> bool:
    """By a sample of its bytes: to count them all would cost a batch a fiftieth. A body that gets around the sample
    holds up the event loop for no longer than one run may."""
    sample = body[::SAMPLE_STRIDE]
    return SAMPLE_STRIDE * (sample.count(b"[") + sample.count(b"{")) > CONTAINERS_INLINE_MAX


async def in_thread(request: Request, work: Callable[..., T], *args: object, large: bool = True) -> T:
    """The same for work that reads a run of a large body."""
    threads = _many_runs if large else _one_run
    return await asyncio.wrap_future(threads.submit(_unless_gone, request, work, *args))


def _unless_gone(request: Request, work: Callable[..., T], *args: object) -> T:
    if request.gone:
        raise Gone
    return work(*args)


def runs(parts: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The parts in their order, in runs of ``RUN_BYTES_MAX`` together; a larger part is a run of its own."""
    start = size = 0
    for end, part in enumerate(parts):
        if size and size + len(part) > RUN_BYTES_MAX:
            yield parts[start:end]
            start, size = end, 0
        size += len(part)
    if start < len(parts):
        yield parts[start:]
