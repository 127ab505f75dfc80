"""DNS lookups: blocking system calls in threads that destinations share fairly.

A lookup at a dead name server blocks its thread for half a minute and can't be canceled. So there are many cheap
threads, shared by parent domain (the last two labels of a name):

- A parent may use at most an eighth of the threads that are free at that moment, so some always stay free.
- The last eighth of all threads is reserved for parents that have resolved a name recently.
- A lookup that can't start waits in its parent's queue, and parents take turns. A parent may fill half of the room that
  is left in all queues together.

Callers that look up the same name share one lookup. The timeout of a lookup begins when a thread starts it. A caller
that gives up before that gets ``NotSent``: the shortage is ours and says nothing about the name. Only the event loop
changes the state here; threads take a lookup, call the system and report the result.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue

from duetime.clock import Clock
from duetime.deliverers.unsent import NotSent, lookup_shortage, out_of_descriptors
from duetime.model import Unsent

LOOKUP_SECONDS_MAX = 10.0
THREADS_MAX = 1280  # a thousand hanging parents leave some for new ones, besides the reserve
PARENT_SHARE = 8  # a parent gets at most one in this many of the free threads
RESERVED = THREADS_MAX // 8  # threads for parents that resolved a name recently
OPTIONAL_MAX = THREADS_MAX // 8  # threads in use for optional lookups
QUEUE_MAX = 8192
THREAD_IDLE_SECONDS = 5.0
STACK_BYTES = 256 * 1024
KNOWN_SECONDS = 600.0
KNOWN_MAX = 4096

_NO_ADDRESS = (socket.EAI_NONAME, socket.EAI_NODATA)
_UNKNOWN = "Name or service not known"
_log = logging.getLogger(__name__)

Found = list[str] | str
"""The addresses of a name, or the reason why there are none."""


class _Parent:
    __slots__ = ("known", "name", "queue", "running")

    def __init__(self, name: str, known: bool) -> None:
        self.name = name
        self.known = known  # resolved a name recently
        self.running = 0
        self.queue: dict[_Lookup, None] = {}


class _Lookup:
    __slots__ = ("callers", "found", "host", "loop", "optional", "parent", "started")

    def __init__(self, host: str, parent: _Parent, optional: bool, loop: asyncio.AbstractEventLoop) -> None:
        self.host = host
        self.parent = parent
        self.optional = optional
        self.loop = loop
        self.callers = 0
        self.started: asyncio.Future[None] = loop.create_future()
        self.found: asyncio.Future[Found | NotSent] = loop.create_future()


class Lookups:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending: dict[str, _Lookup] = {}  # queued or running, by host
        self._parents: dict[str, _Parent] = {}  # with pending lookups
        self._known: dict[str, float] = {}  # when a parent last resolved a name, oldest first
        # Parents with a queue, by whether they are known, in the order of their turns.
        self._waiting: dict[bool, dict[_Parent, None]] = {True: {}, False: {}}
        self._known_first = True
        self._queued = 0
        self._running = 0
        self._optional = 0
        self._idle = 0
        self._idle_min = 0  # since the last sweep
        self._jobs: SimpleQueue[_Lookup | None] = SimpleQueue()
        self._sweep_handle: asyncio.TimerHandle | None = None
        self._closed = False

    async def find(self, host: str, until: float | None = None, *, optional: bool = False) -> Found:
        """Resolve a name before ``until`` (event loop time). An optional lookup starts at once or not at all.

        Raises ``NotSent`` if the lookup could not be made, and ``TimeoutError`` if it was still running at ``until``.
        """
        lookup = self._pending.get(host)
        if lookup is None:
            lookup = self._begin(host, optional)
        elif optional and not lookup.started.done():
            raise _busy(host)
        lookup.callers += 1
        try:
            found = await _wait(lookup, until)
        finally:
            lookup.callers -= 1
            if not lookup.callers and not lookup.started.done():
                self._withdraw(lookup)
        if isinstance(found, NotSent):
            # A new exception for each caller: one that is raised repeatedly would accumulate tracebacks.
            raise NotSent(found.cause, str(found))
        return found

    def close(self) -> None:
        """Start no more lookups and fail the pending ones. Threads that hang are left to end by themselves."""
        self._closed = True
        if self._sweep_handle is not None:
            self._sweep_handle.cancel()
            self._sweep_handle = None
        for lookup in self._pending.values():
            if not lookup.started.done():
                lookup.started.set_result(None)
            lookup.found.set_result(_shutting_down())
        self._pending.clear()
        self._parents.clear()
        for ring in self._waiting.values():
            ring.clear()
        for _ in range(self._running + self._idle):
            self._jobs.put(None)

    def _begin(self, host: str, optional: bool) -> _Lookup:
        """Start a lookup if allowed, otherwise queue it."""
        if self._closed:
            raise _shutting_down()
        name = parent_of(host)
        parent = self._parents.get(name)
        if parent is None:
            parent = _Parent(name, self._is_known(name))
        lookup = _Lookup(host, parent, optional, asyncio.get_running_loop())
        if not (self._may_start(parent, optional) and self._start(lookup)):
            room = QUEUE_MAX - self._queued
            if optional or len(parent.queue) >= (room + 1) // 2:
                raise _busy(host)
            parent.queue[lookup] = None
            self._queued += 1
            self._waiting[parent.known][parent] = None
        self._parents[name] = parent
        self._pending[host] = lookup
        return lookup

    def _may_start(self, parent: _Parent, optional: bool = False) -> bool:
        free = THREADS_MAX - self._running
        if free <= (0 if parent.known else RESERVED):
            return False
        if optional:
            free = min(free, OPTIONAL_MAX - self._optional)
        return free > 0 and parent.running < max(1, free // PARENT_SHARE)

    def _start(self, lookup: _Lookup) -> bool:
        """Pass the lookup to a thread; False if no thread is idle and none can be started."""
        if not self._idle and not self._add_thread():
            return False
        self._idle -= 1
        self._idle_min = min(self._idle_min, self._idle)
        self._running += 1
        self._optional += lookup.optional
        lookup.parent.running += 1
        lookup.started.set_result(None)
        self._jobs.put(lookup)
        if self._sweep_handle is None:
            self._sweep_handle = lookup.loop.call_later(THREAD_IDLE_SECONDS, self._sweep, lookup.loop)
        return True

    def _add_thread(self) -> bool:
        thread = threading.Thread(target=_work, args=(self._jobs, self._finish), name="duetime-dns", daemon=True)
        stack_bytes = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        except RuntimeError:
            return False  # The system allows no more threads: the lookup waits for an existing one.
        finally:
            threading.stack_size(stack_bytes)
        self._idle += 1
        return True

    def _finish(self, lookup: _Lookup, found: Found | NotSent) -> None:
        """A thread has finished a lookup and is idle again."""
        if self._closed:
            return
        parent = lookup.parent
        self._running -= 1
        self._idle += 1
        self._optional -= lookup.optional
        parent.running -= 1
        del self._pending[lookup.host]
        if isinstance(found, list):
            self._note_known(parent)
        lookup.found.set_result(found)
        self._forget_if_unused(parent)
        self._start_waiting()

    def _start_waiting(self) -> None:
        while (parent := self._next_parent()) is not None:
            lookup = next(iter(parent.queue))
            if not self._start(lookup):
                return
            self._dequeue(lookup)
            if parent.queue:
                ring = self._waiting[parent.known]
                del ring[parent]
                ring[parent] = None  # at the end of the line
            self._known_first = not parent.known

    def _next_parent(self) -> _Parent | None:
        """The parent whose turn it is to start a lookup."""
        if self._running >= THREADS_MAX:
            return None
        for known in (self._known_first, not self._known_first):
            if known or self._running < THREADS_MAX - RESERVED:
                for parent in self._waiting[known]:
                    if self._may_start(parent):
                        return parent
        return None

    def _withdraw(self, lookup: _Lookup) -> None:
        """Remove a queued lookup whose callers have all given up."""
        self._dequeue(lookup)
        del self._pending[lookup.host]
        self._forget_if_unused(lookup.parent)

    def _dequeue(self, lookup: _Lookup) -> None:
        parent = lookup.parent
        del parent.queue[lookup]
        self._queued -= 1
        if not parent.queue:
            del self._waiting[parent.known][parent]

    def _forget_if_unused(self, parent: _Parent) -> None:
        if not parent.running and not parent.queue:
            del self._parents[parent.name]

    def _is_known(self, name: str) -> bool:
        resolved_at = self._known.get(name)
        return resolved_at is not None and self._clock.monotonic() - resolved_at < KNOWN_SECONDS

    def _note_known(self, parent: _Parent) -> None:
        self._known.pop(parent.name, None)
        if len(self._known) >= KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._known[parent.name] = self._clock.monotonic()
        if not parent.known:
            parent.known = True
            if parent.queue:
                del self._waiting[False][parent]
                self._waiting[True][parent] = None

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the threads that were idle since the last sweep."""
        for _ in range(self._idle_min):
            self._jobs.put(None)
        self._idle -= self._idle_min
        self._idle_min = self._idle
        more = self._running + self._idle
        self._sweep_handle = loop.call_later(THREAD_IDLE_SECONDS, self._sweep, loop) if more else None


async def _wait(lookup: _Lookup, until: float | None) -> Found | NotSent:
    loop = lookup.loop
    had_to_queue = not lookup.started.done()
    if had_to_queue:
        now = loop.time()
        patience = LOOKUP_SECONDS_MAX
        if until is not None:
            # Wait at most half of the time: our queue must leave enough for the lookup and the request.
            patience = min(patience, (until - now) / 2)
        # wait() does not cancel the lookup when this caller gives up: others may be waiting for it.
        await asyncio.wait((lookup.started,), timeout=max(0.0, patience))
        if not lookup.started.done():
            raise _busy(lookup.host)
    now = loop.time()
    end_at = now + LOOKUP_SECONDS_MAX
    limit_at = end_at if until is None else min(end_at, until)
    if not lookup.found.done():
        await asyncio.wait((lookup.found,), timeout=max(0.0, limit_at - now))
    if lookup.found.done():
        return lookup.found.result()
    if limit_at == end_at:
        return f"{lookup.host} was not resolved within {LOOKUP_SECONDS_MAX:g}s"
    if had_to_queue:
        raise _busy(lookup.host)  # Without the queue, it would have had more time.
    raise TimeoutError


def parent_of(host: str) -> str:
    """The last two labels of a name."""
    return ".".join(host.removesuffix(".").rsplit(".", 2)[-2:])


def _busy(host: str) -> NotSent:
    return NotSent(Unsent.LOOKUPS, f"{host} was not looked up: too many DNS lookups are queued")


def _shutting_down() -> NotSent:
    return NotSent(Unsent.DRAIN, "shutting down")


def _work(jobs: SimpleQueue[_Lookup | None], report: Callable[[_Lookup, Found | NotSent], None]) -> None:
    """The loop of a thread; None ends it."""
    while (lookup := jobs.get()) is not None:
        found = _system_lookup(lookup.host)
        try:
            lookup.loop.call_soon_threadsafe(report, lookup, found)
        except RuntimeError:
            return  # The event loop is closed, so no caller is left.


def _system_lookup(host: str) -> Found | NotSent:
    """Resolve a name. Returns errors as values, so that an abandoned lookup does not log an unhandled exception."""
    was_out = out_of_descriptors()
    try:
        # Bytes avoid Python's IDNA codec: the URL parser accepts only ASCII.
        found = socket.getaddrinfo(host.encode("ascii"), None, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    except (OSError, UnicodeError) as exc:
        shortage = lookup_shortage(exc, was_out=was_out) if isinstance(exc, OSError) else None
        return shortage or f"{host} was not resolved: {_why(exc)}"
    except Exception as exc:
        _log.exception("the lookup of %s raised an error", host)
        return NotSent(Unsent.INTERNAL, f"internal error: {type(exc).__name__}")
    return addresses or f"{host} has no address"


def _why(exc: Exception) -> str:
    """The error text for clients. It does not reveal whether our network knows the name without an address for it."""
    if isinstance(exc, socket.gaierror) and exc.errno in _NO_ADDRESS:
        return _UNKNOWN
    return getattr(exc, "strerror", None) or str(exc)
